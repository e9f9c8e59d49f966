package server

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

const self, other = 7, 8

// leaseBench is the leases of a member whose consensus and leader are the test's.
type leaseBench struct {
	*leases
	t     *testing.T
	clk   *clock.Fake
	state *state.Machine
	index uint64

	leader, term atomic.Uint64
	sinceTick    atomic.Int64
	reads        chan func(error) // nil: reads are answered at once
	asked        chan asked       // what came to the leader
	proposed     []*pb.LeaseCheckpoint
}

// asked is one request of a leader; reply answers it.
type asked struct {
	ctx   context.Context
	id    int64
	keys  bool
	reply chan<- answered
}

type answered struct {
	s   rpc.LeaseStatus
	err error
}

func (b *leaseBench) Leader() uint64           { return b.leader.Load() }
func (b *leaseBench) Term() uint64             { return b.term.Load() }
func (b *leaseBench) SinceTick() time.Duration { return time.Duration(b.sinceTick.Load()) }

func (b *leaseBench) ReadIndex(_ time.Time, done func(error)) {
	if b.reads == nil {
		done(nil)
		return
	}
	b.reads <- done
}

// benchLeader is the leaseForwarder.
type benchLeader struct{ *leaseBench }

func (b benchLeader) ask(ctx context.Context, id int64, keys bool) (rpc.LeaseStatus, error) {
	reply := make(chan answered, 1)
	b.asked <- asked{ctx, id, keys, reply}
	select {
	case a := <-reply:
		return a.s, a.err
	case <-ctx.Done():
		return rpc.LeaseStatus{}, ctx.Err()
	}
}

func (b benchLeader) RenewLease(ctx context.Context, id int64) (int64, error) {
	s, err := b.ask(ctx, id, false)
	return s.TTL, err
}

func (b benchLeader) LeaseTimeToLive(ctx context.Context, id int64, keys bool) (rpc.LeaseStatus, error) {
	return b.ask(ctx, id, keys)
}

func newLeaseBench(t *testing.T) *leaseBench {
	store, err := storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "store"})
	if err != nil {
		t.Fatal(err)
	}
	b := &leaseBench{t: t, clk: clock.NewFake(time.Unix(1_000_000, 0)), asked: make(chan asked, 2*maxForwards)}
	if b.state, err = state.Open(state.Options{Storage: store, MinLeaseTTL: 2}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(b.state.Close(), store.Close()); err != nil {
			t.Error(err)
		}
	})
	b.leader.Store(other)
	b.term.Store(3)
	lessor := lease.NewLessor(b.state.Leases(), lease.LessorOptions{Now: b.clk.Now})
	b.leases = &leases{
		machine: func() *state.Machine { return b.state }, lessor: lessor, node: b, member: self,
		tick: 100 * time.Millisecond, timeout: 7 * time.Second, clock: b.clk,
		checkpoint: func(r *pb.LeaseCheckpointRequest, done func(error)) {
			b.proposed = append(b.proposed, r.Checkpoints...)
			b.apply(command.KindLeaseCheckpoint, r)
			done(nil)
		},
		forwards: &forwards{
			to: benchLeader{b}, clock: b.clk, electionTimeout: time.Second,
			leader: b.Leader, member: self, primary: lessor.Primary, changed: make(chan struct{}),
		},
	}
	return b
}

func (b *leaseBench) apply(kind command.Kind, m proto.Message) {
	b.t.Helper()
	b.index++
	data, err := command.AppendMessage(nil, kind, command.Header{ID: b.index}, m)
	if err != nil {
		b.t.Fatal(err)
	}
	results, err := b.state.Apply([]*raftpb.Entry{{Term: proto.Uint64(3), Index: proto.Uint64(b.index), Data: data}})
	if err != nil || results[0].Err != nil {
		b.t.Fatal(err, results)
	}
	results[0].Reply.Release()
}

func (b *leaseBench) grant(id, ttl int64) {
	b.t.Helper()
	b.apply(command.KindLeaseGrant, &pb.LeaseGrantRequest{ID: id, TTL: ttl})
}

// lead makes this member the leader.
func (b *leaseBench) lead() {
	b.lessor.Promote(b.clk.Now(), 0)
	b.leader.Store(self)
}

// renew begins a renewal.
func (b *leaseBench) renew(ctx context.Context, id int64) <-chan answered {
	got := make(chan answered, 2) // a second answer would be a mistake, and must not hide
	b.Renew(ctx, rpc.Identity{}, id, func(ttl int64, err error) { got <- answered{rpc.LeaseStatus{TTL: ttl}, err} })
	return got
}

func (b *leaseBench) want(got <-chan answered, ttl int64, want error) {
	b.t.Helper()
	select {
	case a := <-got:
		if a.s.TTL != ttl || !errors.Is(a.err, want) || (a.err != nil) != (want != nil) {
			b.t.Errorf("TTL %d, %v; want %d, %v", a.s.TTL, a.err, ttl, want)
		}
	case <-time.After(20 * time.Second):
		b.t.Fatal("no answer")
	}
	if len(got) > 0 {
		b.t.Error("answered twice")
	}
}

func TestRenewIsForwarded(t *testing.T) {
	b := newLeaseBench(t)
	b.grant(1, 60)
	got := b.renew(t.Context(), 1)
	(<-b.asked).reply <- answered{rpc.LeaseStatus{TTL: 60}, nil}
	b.want(got, 60, nil)

	// What fails is tried again after a pause; that the lease is gone is an answer.
	got = b.renew(t.Context(), 1)
	for range 3 {
		(<-b.asked).reply <- answered{err: errors.New("connection refused")}
		b.clk.WaitAlarms(2)
		b.clk.Advance(forwardPause)
	}
	(<-b.asked).reply <- answered{err: lease.ErrNotFound}
	b.want(got, 0, nil)

	// A lease that is unknown here, with all applied, is unknown.
	b.want(b.renew(t.Context(), 404), 0, nil)

	// Nothing is forwarded twice.
	if _, err := b.renewHere(t.Context(), 1); !errors.Is(err, lease.ErrNotPrimary) {
		t.Errorf("for another member: %v", err)
	}
	if _, err := b.renewHere(t.Context(), 404); !errors.Is(err, lease.ErrNotFound) {
		t.Errorf("an unknown one for another member: %v", err)
	}
	if _, err := b.statusHere(t.Context(), 1, false); !errors.Is(err, lease.ErrNotPrimary) {
		t.Errorf("status for another member: %v", err)
	}
	if len(b.asked) != 0 {
		t.Error("the leader was asked once more")
	}
}

func TestRenewWaitsForALeader(t *testing.T) {
	b := newLeaseBench(t)
	b.grant(1, 60)
	b.leader.Store(0)
	got := b.renew(t.Context(), 1)
	b.clk.WaitAlarms(2)
	b.leader.Store(other)
	b.leaderChanged()
	(<-b.asked).reply <- answered{rpc.LeaseStatus{TTL: 60}, nil}
	b.want(got, 60, nil)

	// It may turn out to be this member, which then has an entry to apply first.
	b.leader.Store(0)
	got = b.renew(t.Context(), 1)
	b.clk.WaitAlarms(2)
	b.leader.Store(self)
	b.leaderChanged()
	b.lead()
	b.leaderChanged()
	b.want(got, 60, nil)

	// None comes.
	b.lessor.Demote()
	b.leader.Store(0)
	got = b.renew(t.Context(), 1)
	for range 7 {
		b.clk.WaitAlarms(2)
		b.clk.Advance(time.Second)
	}
	b.want(got, 0, consensus.ErrTimeout)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the stream is over")
	got = b.renew(ctx, 1)
	b.clk.WaitAlarms(2)
	cancel(cause)
	b.want(got, 0, cause)

	// A member alone has nobody to ask.
	b.forwards.to = nil
	b.want(b.renew(t.Context(), 1), 0, lease.ErrNotPrimary)
}

// TestForwardsAreBounded: while the leader does not answer, so many requests are
// with it, so many wait, and the next are refused.
func TestForwardsAreBounded(t *testing.T) {
	b := newLeaseBench(t)
	b.grant(1, 60)
	got := make(chan answered, maxForwards+maxForwardsWaiting)
	for range maxForwards + maxForwardsWaiting {
		b.Renew(t.Context(), rpc.Identity{}, 1, func(ttl int64, err error) { got <- answered{rpc.LeaseStatus{TTL: ttl}, err} })
	}
	b.want(b.renew(t.Context(), 1), 0, consensus.ErrTooManyRequests)
	if _, err := b.Status(t.Context(), rpc.Identity{}, 1, false); !errors.Is(err, consensus.ErrTooManyRequests) {
		t.Errorf("status: %v", err)
	}
	var first []asked
	for range maxForwards {
		first = append(first, <-b.asked)
	}
	if n := len(b.asked); n != 0 {
		t.Fatalf("%d more than the bound were asked at once", n)
	}
	for _, a := range first {
		a.reply <- answered{rpc.LeaseStatus{TTL: 60}, nil}
	}
	for range maxForwardsWaiting {
		(<-b.asked).reply <- answered{rpc.LeaseStatus{TTL: 60}, nil}
	}
	for range maxForwards + maxForwardsWaiting {
		if a := <-got; a.err != nil || a.s.TTL != 60 {
			t.Fatal(a)
		}
	}
}

func TestStaleLeaderProvesItself(t *testing.T) {
	b := newLeaseBench(t)
	b.grant(1, 60)
	b.lead()
	b.reads = make(chan func(error), 1)
	b.want(b.renew(t.Context(), 1), 60, nil)

	b.sinceTick.Store(int64(b.tick*staleTicks) + 1)
	got := b.renew(t.Context(), 1)
	(<-b.reads)(nil)
	b.want(got, 60, nil)

	got = b.renew(t.Context(), 1)
	(<-b.reads)(consensus.ErrTimeout)
	b.want(got, 0, lease.ErrNotPrimary)

	// The read was answered by the leader of another term.
	for _, change := range []func(){func() { b.term.Store(4) }, func() { b.leader.Store(other) }} {
		got = b.renew(t.Context(), 1)
		read := <-b.reads
		change()
		read(nil)
		b.want(got, 0, lease.ErrNotPrimary)
	}
}

func TestRenewOfAnExpiredLease(t *testing.T) {
	b := newLeaseBench(t)
	b.grant(1, 5)
	b.grant(2, 5)
	b.lead()
	b.clk.Advance(6 * time.Second)
	ctx, cancel := context.WithCancelCause(t.Context())
	one, cut, two := b.renew(t.Context(), 1), b.renew(ctx, 1), b.renew(t.Context(), 2)
	if len(one)+len(cut)+len(two) != 0 {
		t.Fatal("answered before the end")
	}
	cause := errors.New("the stream is over")
	cancel(cause)
	b.want(cut, 0, cause)
	b.apply(command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: 1})
	b.want(one, 0, nil)
	b.lessor.Stalled(10 * time.Second)
	b.want(two, 5, nil)
	if len(cut) != 0 {
		t.Error("answered twice")
	}

	// At the end of leadership the next leader is asked.
	b.clk.Advance(6 * time.Second)
	two = b.renew(t.Context(), 2)
	b.leader.Store(other)
	b.lessor.Demote()
	(<-b.asked).reply <- answered{rpc.LeaseStatus{TTL: 5}, nil}
	b.want(two, 5, nil)
}

func TestRenewTakesBackACheckpoint(t *testing.T) {
	b := newLeaseBench(t)
	b.grant(1, 600)
	b.apply(command.KindLeaseCheckpoint, &pb.LeaseCheckpointRequest{Checkpoints: []*pb.LeaseCheckpoint{{ID: 1, Remaining_TTL: 300}}})
	b.lead()
	if s, err := b.Status(t.Context(), rpc.Identity{}, 1, false); err != nil || s.TTL != 300 || s.GrantedTTL != 600 {
		t.Errorf("%+v, %v", s, err)
	}
	for range 2 {
		b.want(b.renew(t.Context(), 1), 600, nil)
	}
	if len(b.proposed) != 1 || b.proposed[0].ID != 1 || b.proposed[0].Remaining_TTL != 0 {
		t.Errorf("proposed %v", b.proposed)
	}
	if s, err := b.Status(t.Context(), rpc.Identity{}, 1, false); err != nil || s.TTL != 600 {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestRenewTakesBackACheckpointInFlight: one that was proposed before the renewal is applied after it was looked for.
func TestRenewTakesBackACheckpointInFlight(t *testing.T) {
	b := newLeaseBench(t)
	b.grant(1, 600)
	b.lead()
	b.clk.Advance(301 * time.Second)
	var due []lease.Lease
	if b.lessor.DueCheckpoints(b.clk.Now(), 10, func(all []lease.Lease) { due = all }); len(due) != 1 || due[0].Remaining != 299 {
		t.Fatalf("due: %+v", due)
	}
	propose := b.leases.checkpoint
	b.leases.checkpoint = func(r *pb.LeaseCheckpointRequest, done func(error)) {
		// The log has the keeper's first.
		b.apply(command.KindLeaseCheckpoint, &pb.LeaseCheckpointRequest{Checkpoints: []*pb.LeaseCheckpoint{{ID: 1, Remaining_TTL: due[0].Remaining}}})
		propose(r, done)
	}
	b.want(b.renew(t.Context(), 1), 600, nil)
	if l, ok := b.state.Leases().Lookup(1); !ok || l.Remaining != 0 || len(b.proposed) != 1 {
		t.Errorf("the next leader finds %+v, proposed %v", l, b.proposed)
	}
	b.leases.checkpoint = propose
	if b.want(b.renew(t.Context(), 1), 600, nil); len(b.proposed) != 1 {
		t.Errorf("proposed again: %v", b.proposed)
	}
}

func TestStatusIsForwarded(t *testing.T) {
	b := newLeaseBench(t)
	b.grant(1, 60)
	b.apply(command.KindPut, &pb.PutRequest{Key: []byte("a"), Lease: 1})
	type result struct {
		s   rpc.LeaseStatus
		err error
	}
	status := func(id int64) <-chan result {
		got := make(chan result, 1)
		go func() {
			s, err := b.Status(t.Context(), rpc.Identity{}, id, true)
			got <- result{s, err}
		}()
		return got
	}
	got := status(1)
	a := <-b.asked
	if a.id != 1 || !a.keys {
		t.Errorf("asked for %d, keys %t", a.id, a.keys)
	}
	a.reply <- answered{rpc.LeaseStatus{ID: 1, TTL: 42, GrantedTTL: 60, Keys: [][]byte{[]byte("a")}}, nil}
	if r := <-got; r.err != nil || r.s.TTL != 42 || r.s.GrantedTTL != 60 || len(r.s.Keys) != 1 {
		t.Errorf("%+v", r)
	}
	got = status(1)
	(<-b.asked).reply <- answered{err: lease.ErrNotFound}
	if r := <-got; r.err != nil || r.s.TTL != -1 || r.s.ID != 1 {
		t.Errorf("gone at the leader: %+v", r)
	}
	if r := <-status(404); r.err != nil || r.s.TTL != -1 || r.s.ID != 404 {
		t.Errorf("unknown: %+v", r)
	}
	b.lead()
	if r := <-status(1); r.err != nil || r.s.TTL != 60 || !slices.EqualFunc(r.s.Keys, []string{"a"}, func(k []byte, s string) bool { return string(k) == s }) {
		t.Errorf("as the leader: %+v", r)
	}
}
