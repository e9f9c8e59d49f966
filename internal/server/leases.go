package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/state"
)

// staleTicks is after how many ticks without one a leader must prove that it
// still leads before it renews a lease.
const staleTicks = 3

// leases is rpc.Leases. What the leader answers to other members is renewHere and
// statusHere.
type leases struct {
	machine func() *state.Machine // the present one
	lessor  *lease.Lessor
	node    leaseNode
	// checkpoint proposes what is left of leases.
	checkpoint func(r *pb.LeaseCheckpointRequest, done func(error))
	member     uint64
	tick       time.Duration
	timeout    time.Duration // of a request
	clock      clock.Clock
	forwards   *forwards
}

// leaseNode is what leases ask of consensus. Term is raft's own, not that of the
// last entry applied.
type leaseNode interface {
	Leader() uint64
	Term() uint64
	SinceTick() time.Duration
	ReadIndex(deadline time.Time, done func(error))
}

// plainNode is leaseNode.
type plainNode struct{ *consensus.Node }

// ReadIndex implements leaseNode.
func (n plainNode) ReadIndex(deadline time.Time, done func(error)) {
	proposer{Node: n.Node}.ReadIndex(deadline, done)
}

// newLeases returns the leases of a member whose lessor and node are there. To is
// how it asks the leader, nil for a member alone.
func (m *Member) newLeases(to leaseForwarder) *leases {
	return &leases{
		machine: m.machine, lessor: m.lessor, node: plainNode{m.node}, checkpoint: m.proposer().checkpoint,
		member: m.id.member, tick: m.cfg.Tick(), timeout: m.cfg.RequestTimeout(), clock: m.clock,
		forwards: &forwards{
			to: to, clock: m.clock, electionTimeout: m.cfg.Tick() * time.Duration(m.cfg.ElectionTicks()),
			leader: m.node.Leader, member: m.id.member, primary: m.lessor.Primary, changed: make(chan struct{}),
		},
	}
}

// leaderChanged says that another member leads, or none, or this one.
func (l *leases) leaderChanged() { l.forwards.leaderChanged() }

// renewal is one renewal under way. Its methods follow one another as callbacks
// and never block; the last of them calls done.
type renewal struct {
	l        *leases
	ctx      context.Context
	id       int64
	deadline time.Time
	here     bool // on behalf of another member, so it is not forwarded again
	done     func(ttl int64, err error)
}

// Renew implements rpc.Leases.
func (l *leases) Renew(ctx context.Context, u rpc.Identity, id int64, done func(ttl int64, err error)) {
	r := &renewal{l: l, ctx: ctx, id: id, deadline: l.deadline(ctx), done: done}
	r.begin(func() error { return l.mayUse(u, id) })
}

// renewHere renews on behalf of another member, which has checked who asks. It
// fails with lease.ErrNotPrimary if this member does not lead, and with
// lease.ErrNotFound, and blocks no longer than a request may take.
func (l *leases) renewHere(ctx context.Context, id int64) (ttl int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	type result struct {
		ttl int64
		err error
	}
	got := make(chan result, 1)
	r := &renewal{l: l, ctx: ctx, id: id, deadline: l.deadline(ctx), here: true, done: func(ttl int64, err error) { got <- result{ttl, err} }}
	r.begin(func() error { return nil })
	select {
	case r := <-got:
		return r.ttl, r.err
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

// deadline is the earlier one of the caller's and of what a request may take.
func (l *leases) deadline(ctx context.Context) time.Time {
	d := l.clock.Now().Add(l.timeout)
	if own, ok := ctx.Deadline(); ok && own.Before(d) {
		return own
	}
	return d
}

// begin renews if check allows it. It looks for the lease first: that may have
// been granted a moment ago, in an entry not yet applied here.
func (r *renewal) begin(check func() error) {
	checked := func() {
		if err := check(); err != nil {
			r.done(0, err)
			return
		}
		r.renew()
	}
	if _, ok := r.l.machine().Leases().Lookup(r.id); ok {
		checked()
		return
	}
	r.l.node.ReadIndex(r.deadline, func(err error) {
		if err != nil {
			r.done(0, err)
		} else if _, ok := r.l.machine().Leases().Lookup(r.id); !ok {
			r.unknown()
		} else {
			checked()
		}
	})
}

func (r *renewal) unknown() {
	if r.here {
		r.done(0, fmt.Errorf("renew lease %x: %w", r.id, lease.ErrNotFound))
		return
	}
	r.done(0, nil)
}

// renew goes on where the clock counts. A leader that has not ticked for a while
// may have been replaced without noticing, and asks the others first.
func (r *renewal) renew() {
	l := r.l
	if l.node.Leader() != l.member || !l.lessor.Primary() {
		r.elsewhere()
		return
	}
	if l.node.SinceTick() <= staleTicks*l.tick {
		r.extend()
		return
	}
	term := l.node.Term()
	l.node.ReadIndex(r.deadline, func(err error) {
		if err != nil || l.node.Leader() != l.member || l.node.Term() != term {
			r.done(0, fmt.Errorf("renew lease %x, leadership of term %d not proven (%v): %w", r.id, term, err, lease.ErrNotPrimary))
			return
		}
		r.extend()
	})
}

// extend renews the lease in time. One whose rest was checkpointed, or is about to
// be, is checkpointed anew first: else the next leader would let it expire early.
func (r *renewal) extend() {
	now := r.l.clock.Now()
	ttl, err := r.l.lessor.Renew(r.id, now)
	switch {
	case errors.Is(err, lease.ErrNotFound):
		r.unknown()
	case errors.Is(err, lease.ErrNotPrimary):
		r.elsewhere()
	case errors.Is(err, lease.ErrExpired):
		r.await(r.l.lessor.Gone(r.id, now))
	case errors.Is(err, lease.ErrCheckpointed):
		r.l.checkpoint(&pb.LeaseCheckpointRequest{Checkpoints: []*pb.LeaseCheckpoint{{ID: r.id}}}, func(err error) {
			if err != nil {
				r.done(0, err)
				return
			}
			r.extend()
		})
	default:
		r.done(ttl, err)
	}
}

// await goes on when an expired lease is gone, which the client is told then;
// unless this member stood still, and finds that the lease lives on. Nothing but
// two registrations waits, and each is taken back when the other comes first.
func (r *renewal) await(gone context.Context) {
	var (
		mu                 sync.Mutex // held until both are registered
		over               bool
		stopGone, stopCall func() bool
	)
	first := func(stop *func() bool) bool {
		mu.Lock()
		defer mu.Unlock()
		(*stop)()
		was := over
		over = true
		return !was
	}
	mu.Lock()
	defer mu.Unlock()
	stopGone = context.AfterFunc(gone, func() {
		if first(&stopCall) {
			r.renew()
		}
	})
	stopCall = context.AfterFunc(r.ctx, func() {
		if first(&stopGone) {
			r.done(0, context.Cause(r.ctx))
		}
	})
}

// elsewhere has the leader renew the lease.
func (r *renewal) elsewhere() {
	f := r.l.forwards
	if r.here || f.to == nil && r.l.node.Leader() != r.l.member {
		r.done(0, fmt.Errorf("renew lease %x: %w", r.id, lease.ErrNotPrimary))
		return
	}
	started := f.start(func() {
		var ttl int64
		err := f.ask(r.ctx, r.deadline, func(ctx context.Context, to leaseForwarder) (err error) {
			ttl, err = to.RenewLease(ctx, r.id)
			return err
		})
		switch {
		case errors.Is(err, errLeads):
			r.renew()
		case errors.Is(err, lease.ErrNotFound):
			r.unknown()
		default:
			r.done(ttl, err)
		}
	})
	if !started {
		r.done(0, fmt.Errorf("%d renewals wait for the leader: %w", maxForwardsWaiting, consensus.ErrTooManyRequests))
	}
}

// Status implements rpc.Leases.
func (l *leases) Status(ctx context.Context, u rpc.Identity, id int64, keys bool) (rpc.LeaseStatus, error) {
	unknown := rpc.LeaseStatus{ID: id, TTL: -1}
	deadline := l.deadline(ctx)
	if err := l.caughtUp(ctx, deadline); err != nil {
		return rpc.LeaseStatus{}, err
	}
	if _, ok := l.machine().Leases().Lookup(id); !ok {
		return unknown, nil
	}
	if keys { // before anybody else is asked
		if err := l.mayRead(u, l.machine().Leases().Keys(id)); err != nil {
			return rpc.LeaseStatus{}, err
		}
	}
	s, err := l.status(id, keys)
	for errors.Is(err, lease.ErrNotPrimary) {
		if s, err = l.askStatus(ctx, deadline, id, keys); !errors.Is(err, errLeads) {
			break
		}
		s, err = l.status(id, keys)
	}
	switch {
	case errors.Is(err, lease.ErrNotFound):
		return unknown, nil
	case err != nil:
		return rpc.LeaseStatus{}, err
	}
	// Those that were attached meanwhile are keys too.
	if err := l.mayRead(u, s.Keys); err != nil {
		return rpc.LeaseStatus{}, err
	}
	return s, nil
}

// askStatus asks the leader, or fails with errLeads.
func (l *leases) askStatus(ctx context.Context, deadline time.Time, id int64, keys bool) (rpc.LeaseStatus, error) {
	type result struct {
		s   rpc.LeaseStatus
		err error
	}
	got := make(chan result, 1)
	started := l.forwards.start(func() {
		var r result
		r.err = l.forwards.ask(ctx, deadline, func(ctx context.Context, to leaseForwarder) (err error) {
			r.s, err = to.LeaseTimeToLive(ctx, id, keys)
			return err
		})
		got <- r
	})
	if !started {
		return rpc.LeaseStatus{}, fmt.Errorf("%d requests about leases wait for the leader: %w", maxForwardsWaiting, consensus.ErrTooManyRequests)
	}
	select {
	case r := <-got:
		return r.s, r.err
	case <-ctx.Done():
		return rpc.LeaseStatus{}, context.Cause(ctx)
	}
}

// statusHere answers another member, which has checked who asks. It fails with
// lease.ErrNotPrimary if this member does not lead, and with lease.ErrNotFound.
func (l *leases) statusHere(ctx context.Context, id int64, keys bool) (rpc.LeaseStatus, error) {
	if err := l.caughtUp(ctx, l.deadline(ctx)); err != nil {
		return rpc.LeaseStatus{}, err
	}
	return l.status(id, keys)
}

// status is what this member knows as the leader.
func (l *leases) status(id int64, keys bool) (rpc.LeaseStatus, error) {
	t := l.machine().Leases()
	left, err := l.lessor.Remaining(id, l.clock.Now())
	if err != nil {
		return rpc.LeaseStatus{}, err
	}
	known, ok := t.Lookup(id)
	if !ok {
		return rpc.LeaseStatus{}, fmt.Errorf("lease %x: %w", id, lease.ErrNotFound)
	}
	s := rpc.LeaseStatus{ID: id, TTL: int64(left / time.Second), GrantedTTL: known.TTL}
	if keys {
		s.Keys = t.Keys(id)
	}
	return s, nil
}

// IDs implements rpc.Leases.
func (l *leases) IDs(u rpc.Identity) ([]int64, error) {
	t := l.machine().Leases()
	a, _, _ := l.machine().Tables()
	if a.Enabled() && a.CheckAdmin(u.User) != nil {
		for _, known := range t.All() {
			var refused error
			t.EveryKey(known.ID, func(key []byte) bool {
				refused = a.CheckRange(u.User, u.AuthRevision, key, nil)
				return refused == nil
			})
			if refused != nil {
				return nil, refused
			}
		}
	}
	return l.lessor.IDs(), nil
}

// mayUse checks for the right to write every key of a lease.
func (l *leases) mayUse(u rpc.Identity, id int64) error {
	a, _, _ := l.machine().Tables()
	if !a.Enabled() || a.CheckAdmin(u.User) == nil {
		return nil
	}
	var refused error
	l.machine().Leases().EveryKey(id, func(key []byte) bool {
		refused = a.CheckPut(u.User, u.AuthRevision, key)
		return refused == nil
	})
	return refused
}

// mayRead checks for the right to read each of some keys.
func (l *leases) mayRead(u rpc.Identity, keys [][]byte) error {
	a, _, _ := l.machine().Tables()
	for _, k := range keys {
		if err := a.CheckRange(u.User, u.AuthRevision, k, nil); err != nil {
			return err
		}
	}
	return nil
}

// caughtUp waits until this member has applied all that was committed when it
// was asked.
func (l *leases) caughtUp(ctx context.Context, deadline time.Time) error {
	done := make(chan error, 1)
	l.node.ReadIndex(deadline, func(err error) { done <- err })
	return wait(ctx, done)
}

// caughtUp waits until this member has applied all that was committed when it
// was asked.
func (m *Member) caughtUp(ctx context.Context) error {
	done := make(chan error, 1)
	deadline, _ := ctx.Deadline()
	proposer{Node: m.node}.ReadIndex(deadline, func(err error) { done <- err })
	return wait(ctx, done)
}

// wait returns what comes out of done, or why ctx ended.
func wait(ctx context.Context, done <-chan error) error {
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("waiting: %w", ctx.Err())
	}
}
