package server

import (
	"context"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/state"
)

// This file gives rpc what it asks for. Each adapter says one thing of the
// member in rpc's words and decides nothing.

// proposer is rpc.Consensus.
type proposer struct {
	*consensus.Node
	ids   *consensus.IDs
	quota quota
}

// NextID implements rpc.Consensus.
func (p proposer) NextID() uint64 { return p.ids.Next() }

// Term implements rpc.Consensus: headers carry the term of the last applied entry.
func (p proposer) Term() uint64 { return p.AppliedTerm() }

// Propose implements rpc.Consensus.
func (p proposer) Propose(r rpc.Proposal) error {
	if err := p.quota.pass(r.Data); err != nil {
		return err
	}
	return p.Node.Propose(consensus.Proposal{
		ID: r.ID, Data: r.Data, Deadline: r.Deadline,
		Done: func(res consensus.Result, err error) {
			reply, _ := res.Reply.(*state.Reply)
			if err == nil {
				err = res.Err
			}
			r.Done(reply, err)
		},
	})
}

// ReadIndex implements rpc.Consensus.
func (p proposer) ReadIndex(deadline time.Time, done func(error)) {
	if p.MayReadNow() {
		done(nil)
		return
	}
	p.Node.ReadIndex(deadline, done)
}

// machine is consensus.Machine on the member's present generation.
type machine struct{ m *Member }

// Applied implements consensus.Machine.
func (a machine) Applied() (index, term uint64) { return a.m.machine().Applied() }

// ConfState implements consensus.Machine.
func (a machine) ConfState() *raftpb.ConfState { return a.m.machine().ConfState() }

// Apply implements consensus.Machine.
func (a machine) Apply(entries []*raftpb.Entry) ([]consensus.Result, error) {
	began := time.Now()
	results, err := a.m.machine().Apply(entries)
	if err != nil {
		return nil, err
	}
	a.m.applied(entries, results, time.Since(began))
	out := make([]consensus.Result, len(results))
	for i := range results {
		r := &results[i]
		if r.ConfChange != nil {
			a.m.departure.applied(r.ConfChange)
		}
		out[i] = consensus.Result{Index: r.Index, Term: r.Term, ID: r.ID, Err: r.Err, ConfChange: r.ConfChange, Empty: r.Empty}
		if r.Reply != nil {
			out[i].Reply = r.Reply
			if r.Reply.Pins() { // it is read later, and a snapshot may come in between
				r.Reply.OnRelease = a.m.hold().release
			}
			if r.Reply.CompactionDone != nil {
				notify(a.m.compacted)
			}
		}
		if r.OverQuota {
			notify(a.m.overQuota)
		}
	}
	return out, nil
}

// applied counts a batch of entries, and warns of one that took long.
func (m *Member) applied(entries []*raftpb.Entry, results []state.Result, took time.Duration) {
	m.timed.commit.Observe(took.Seconds())
	m.timed.apply.applied(entries, results, took)
	if took > m.cfg.WarningApply {
		m.timed.slowApplies.Inc()
		m.log.Warn("applying entries took too long", "entries", len(entries), "took", took, "expected", m.cfg.WarningApply)
	}
}

// views is rpc.Views.
type views struct{ m *Member }

// View implements rpc.Views.
func (v views) View() rpc.View {
	g := v.m.hold()
	return view{g.machine.View(), g}
}

// view is rpc.View. It keeps the store open that it reads.
type view struct {
	*state.View
	g *generation
}

// Release implements rpc.View.
func (v view) Release() {
	v.View.Release()
	v.g.release()
}

// KV implements rpc.View.
func (v view) KV() *mvcc.View { return v.View.View }

// MayCall implements rpc.View.
func (v view) MayCall(u rpc.Identity) error { return v.Auth().CheckCaller(u.User) }

// MayRead implements rpc.View.
func (v view) MayRead(u rpc.Identity, key, end []byte) error {
	return v.Auth().CheckRange(u.User, u.AuthRevision, key, end)
}

// MayAdminister implements rpc.View.
func (v view) MayAdminister(u rpc.Identity) error {
	return v.Auth().CheckAdmin(u.User)
}

// tablesBytes is what Status reckons for the small tables, so that a store in
// use never seems to take nothing.
const tablesBytes = 4 << 10

// Status implements rpc.Maintenance.
func (m *Member) Status() rpc.StoreStatus {
	_, members, _ := m.machine().Tables()
	g := m.hold()
	defer g.release()
	usage := tablesBytes + g.machine.Root().UsageBytes()
	s := rpc.StoreStatus{
		// What is not flushed yet is in use and in no file: never tell less than that.
		SizeBytes: max(int64(g.store.RecentDiskBytes()), usage), UsageBytes: usage, QuotaBytes: m.cfg.Quota(),
		Version: config.EtcdVersion, ClusterVersion: minorOf(members.Version()), StorageVersion: storageVersion(members),
		Downgrade: &pb.DowngradeInfo{Enabled: members.Downgrade().Enabled, TargetVersion: members.Downgrade().Target},
	}
	return s
}

// minorOf cuts the patch off a version: 3.7.0 becomes 3.7.
func minorOf(version string) string {
	for i := len(version) - 1; i > 0; i-- {
		if version[i] == '.' {
			return version[:i]
		}
	}
	return version
}

// Alarms implements rpc.Maintenance.
func (m *Member) Alarms() []*pb.AlarmMember {
	_, _, alarms := m.machine().Tables()
	var out []*pb.AlarmMember
	for _, a := range alarms.List(pb.AlarmType_NONE) {
		out = append(out, &pb.AlarmMember{MemberID: a.Member, Alarm: a.Type})
	}
	return out
}

// hashesAtOnce is how many hashes run at once for clients, and as many for other
// members. Each reads the whole store; the others wait their turn.
const hashesAtOnce = 2

type hashSlots chan struct{}

// take waits for a slot, which give returns.
func (s hashSlots) take(ctx context.Context) error {
	select {
	case s <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for %d other hashes: %w", cap(s), ctx.Err())
	}
}

func (s hashSlots) give() { <-s }

// turn returns a pace for a hash that takes a slot before anything is read, and
// what gives it back. Each further call goes to pace, unless that is nil.
func (s hashSlots) turn(ctx context.Context, pace func(bytes int) error) (paced func(bytes int) error, end func()) {
	taken := false
	paced = func(bytes int) error {
		if !taken {
			if err := s.take(ctx); err != nil {
				return err
			}
			taken = true
		}
		if pace == nil {
			return nil
		}
		return pace(bytes)
	}
	return paced, func() {
		if taken {
			s.give()
		}
	}
}

// Hash implements rpc.Maintenance.
func (m *Member) Hash(ctx context.Context) (uint32, int64, error) {
	if err := m.hashing.take(ctx); err != nil {
		return 0, 0, err
	}
	defer m.hashing.give()
	began := time.Now()
	defer func() { m.timed.hash.Observe(time.Since(began).Seconds()) }()
	g := m.hold()
	defer g.release()
	return g.machine.Hash(ctx)
}

// HashKV implements rpc.Maintenance.
func (m *Member) HashKV(ctx context.Context, revision int64) (rpc.HashKV, error) {
	pace, end := m.hashing.turn(ctx, nil)
	defer end()
	began := time.Now()
	defer func() { m.timed.hashRevision.Observe(time.Since(began).Seconds()) }()
	g := m.hold()
	defer g.release()
	h, err := g.machine.Keys().HashKVPaced(ctx, g.machine.Root(), revision, pace)
	return rpc.HashKV(h), err
}

// CompactionDone implements rpc.Maintenance.
func (m *Member) CompactionDone(revision int64) <-chan struct{} {
	return m.machine().Keys().CompactionDone(revision)
}

// Reclaim implements rpc.Maintenance: the space of deleted revisions comes back
// in the background, one request at a time.
func (m *Member) Reclaim() error {
	select {
	case m.reclaim <- struct{}{}:
	default: // one is waiting to begin already
	}
	return nil
}
