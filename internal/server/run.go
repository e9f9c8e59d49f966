package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// stopGrace is how long a stop waits for calls in hand.
const stopGrace = 5 * time.Second

// fail stops the member with the first error.
func (m *Member) fail(err error) {
	select {
	case m.failed <- err:
	default:
	}
}

// startWorkers starts what runs beside the calls.
func (m *Member) startWorkers(ctx context.Context) {
	work := func(name string, f func(context.Context) error) {
		m.workers.Go(func() {
			if err := f(ctx); err != nil && !errors.Is(err, context.Canceled) {
				m.fail(fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	plain := func(f func(context.Context)) func(context.Context) error {
		return func(ctx context.Context) error { f(ctx); return nil }
	}
	work("consensus", func(context.Context) error { return m.node.Run(context.WithoutCancel(ctx)) })
	work("watch", m.hub.Run)
	work("leader", plain(m.keeper.Run))
	work("versions", plain(m.versions.Run))
	for _, g := range m.guards {
		work("disk guard", plain(func(ctx context.Context) { g.Run(ctx, m.clock) }))
	}
	work("flush", m.flush)
	work("flush watch", m.watchFlushes)
	work("compaction", m.compact)
	work("reclaim", m.reclaimSpace)
	work("quota", plain(m.raiseAlarms))
	work("quota watch", plain(m.watchQuota))
	work("hash checks", plain(m.newChecker().Run))
	work("memory limit", plain(m.limitMemory))
	work("hot", plain(m.countHot))
}

// flush makes durable what was applied, when consensus asks. It is not done on
// the raft loop: while Pebble waits for disk, even starting a flush waits.
func (m *Member) flush(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.flushNow:
		}
		g := m.hold()
		if err := g.store.StartFlush(); err != nil {
			m.log.Warn("flush could not be started", "error", err)
		}
		g.release()
	}
}

// watchFlushes learns after each flush what the store has made durable, below
// which the raft log may be cut.
func (m *Member) watchFlushes(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.flushed:
		}
		g := m.hold()
		index, _, err := mvcc.AppliedOf(g.store.DurableReader())
		g.release()
		if err != nil {
			return fmt.Errorf("reading what is durable: %w", err)
		}
		m.raiseDurable(index)
	}
}

// raiseDurable notes what is durable. A flush of a store that a snapshot has
// replaced must not take it back.
func (m *Member) raiseDurable(index uint64) {
	for {
		known := m.durable.Load()
		if index <= known || m.durable.CompareAndSwap(known, index) {
			return
		}
	}
}

// takePart returns when this member takes part in its cluster: what it tells of
// itself is applied here, so everything committed before is too (B2), and the
// cluster has agreed on its version.
func (m *Member) takePart(ctx context.Context) error {
	a := m.newAnnouncer()
	if err := a.announce(ctx); err != nil {
		return err
	}
	for m.root().Version() == "" {
		if err := a.wait(ctx, "waiting for the cluster to agree on its version"); err != nil {
			return err
		}
	}
	return nil
}

func (m *Member) proposeAndWait(ctx context.Context, kind command.Kind, msg proto.Message) error {
	done := make(chan error, 1)
	m.proposer().propose(kind, msg, func(err error) { done <- err })
	return wait(ctx, done)
}

func (m *Member) proposeFeatureLevel(ctx context.Context, l command.FeatureLevel) error {
	h := command.Header{ID: m.ids.Next()}
	data, err := command.AppendFeatureLevel(nil, h, l)
	done := make(chan error, 1)
	m.proposer().enter(h.ID, data, err, func(err error) { done <- err })
	return wait(ctx, done)
}

// Wait blocks until ctx ends or the member fails, then stops it: calls in hand
// are answered, the store is flushed, and the next start is fast. A member that
// the cluster has removed ends in the same way, with ErrRemoved.
func (m *Member) Wait(ctx context.Context) error {
	var failure error
	select {
	case <-ctx.Done():
		m.log.Info("stopping", "member", fmt.Sprintf("%x", m.id.member))
	case failure = <-m.failed:
	}
	grace := stopGrace
	if failure != nil && !errors.Is(failure, ErrRemoved) {
		grace = 0 // nothing can be answered any more, and clients have other members
	}
	err := errors.Join(failure, m.close(grace))
	if err == nil {
		m.log.Info("stopped", "member", fmt.Sprintf("%x", m.id.member))
	}
	return err
}

// close ends what was started, in the order that keeps B3. With some grace,
// another member takes over first, if this one leads others: clients then need
// not wait out an election.
func (m *Member) close(grace time.Duration) error {
	var errs []error
	if m.node != nil && grace > 0 {
		// Who takes over may be about to stop as well.
		ctx, cancel := context.WithTimeout(context.Background(), 2*m.cfg.Tick()*time.Duration(m.cfg.ElectionTicks()))
		if err := m.node.HandOver(ctx); err != nil {
			m.log.Warn("no other member took over before this one stopped", "error", err)
		}
		cancel()
	}
	if m.edge != nil {
		if m.rpc != nil {
			m.rpc.EndStreams()
		}
		m.edge.close(grace)
	}
	if m.node != nil {
		errs = append(errs, m.node.Close())
	}
	if m.transport != nil {
		errs = append(errs, m.transport.Close())
	}
	if m.client != nil {
		errs = append(errs, m.client.Close())
	}
	if m.edge != nil {
		m.edge.closePeers()
	}
	m.stop()
	m.workers.Wait()
	if m.rpc != nil {
		m.rpc.Close()
	}
	m.retiring.Wait()
	if g := m.gen.Load(); g != nil {
		if !g.awaitReaders(stopGrace) {
			m.log.Warn("the store is closed under calls that still read it", "waited", stopGrace)
		}
		errs = append(errs, g.close())
	}
	if m.raftLog != nil {
		errs = append(errs, m.raftLog.Close())
	}
	if m.logDir != nil {
		errs = append(errs, m.logDir.Close())
	}
	if m.dir != nil {
		errs = append(errs, m.dir.Close())
	}
	return errors.Join(errs...)
}

// systemProposer proposes what the server itself asks for.
type systemProposer struct {
	m    *Member
	term uint64 // in which this member must lead, or 0
}

func (m *Member) proposer() systemProposer { return systemProposer{m: m} }

// leading is a proposer for the leader of a term.
func (p systemProposer) leading(term uint64) systemProposer { return systemProposer{p.m, term} }

// propose puts a message into the log on nobody's behalf.
func (p systemProposer) propose(kind command.Kind, msg proto.Message, done func(error)) {
	p.proposeAs(command.Header{}, kind, msg, done)
}

func (p systemProposer) proposeAs(h command.Header, kind command.Kind, msg proto.Message, done func(error)) {
	h.ID = p.m.ids.Next()
	data, err := command.AppendMessage(nil, kind, h, msg)
	p.enter(h.ID, data, err, done)
}

// enter puts an entry into the log, unless it could not be made.
func (p systemProposer) enter(id uint64, data []byte, err error, done func(error)) {
	if err == nil {
		err = p.m.node.Propose(consensus.Proposal{ID: id, Data: data, Term: p.term, Done: func(r consensus.Result, err error) {
			release(r)
			done(errors.Join(err, r.Err))
		}})
	}
	if err != nil {
		done(err)
	}
}

// release gives up what a reply that nobody reads pins.
func release(r consensus.Result) {
	if reply, ok := r.Reply.(*state.Reply); ok {
		reply.Release()
	}
}

// rootUser is in whose name the leader revokes expired leases, as in etcd.
const rootUser = "root"

// Revoke implements leader.Proposer.
func (p systemProposer) Revoke(term uint64, id int64, done func(error)) {
	a, _, _ := p.m.machine().Tables()
	h := command.Header{}
	if a.Enabled() {
		h.Username, h.AuthRevision = rootUser, a.Revision()
	}
	p.leading(term).proposeAs(h, command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: id}, done)
}

// Checkpoint implements leader.Proposer.
func (p systemProposer) Checkpoint(term uint64, r *pb.LeaseCheckpointRequest, done func(error)) {
	p.leading(term).propose(command.KindLeaseCheckpoint, r, done)
}

// checkpoint is for a lease that is renewed. That its whole TTL is left may be
// said by anybody.
func (p systemProposer) checkpoint(r *pb.LeaseCheckpointRequest, done func(error)) {
	p.propose(command.KindLeaseCheckpoint, r, done)
}

// Compact implements leader.Proposer.
func (p systemProposer) Compact(term uint64, revision int64, done func(error)) {
	p.leading(term).propose(command.KindCompaction, &pb.CompactionRequest{Revision: revision}, done)
}
