package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
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
	work("disk guard", plain(func(ctx context.Context) { m.guard.Run(ctx, m.clock) }))
	work("flush", m.flush)
	work("flush watch", m.watchFlushes)
	work("compaction", m.compact)
	work("reclaim", m.reclaimSpace)
	work("quota", plain(m.raiseAlarms))
	work("memory limit", plain(m.limitMemory))
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
		if err := m.store.StartFlush(); err != nil {
			m.log.Warn("flush could not be started", "error", err)
		}
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
		index, _, err := mvcc.AppliedOf(m.store.DurableReader())
		if err != nil {
			return fmt.Errorf("reading what is durable: %w", err)
		}
		m.durable.Store(index)
	}
}

// compact does the physical work of compactions, a step at a time.
func (m *Member) compact(ctx context.Context) error {
	for {
		more, pause, err := m.machine.CompactStep()
		if err != nil {
			return err
		}
		var timer <-chan time.Time
		if more {
			timer = time.After(pause)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-timer:
		case <-m.compacted:
		}
	}
}

// reclaimSpace gives the space of deleted revisions back to the disk when asked.
func (m *Member) reclaimSpace(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.reclaim:
		}
		began, before := time.Now(), m.store.DiskBytes()
		m.timed.defragging.Set(1)
		lower, upper := storage.RevisionBounds(0, 0)
		err := errors.Join(m.store.Flush(), m.store.Reclaim(ctx, lower, upper))
		m.timed.defragging.Set(0)
		m.timed.defrag.Observe(time.Since(began).Seconds())
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			m.log.Warn("reclaiming space failed", "error", err)
			continue
		}
		m.log.Info("space reclaimed", "before-bytes", before, "after-bytes", m.store.DiskBytes(), "took", time.Since(began))
	}
}

// raiseAlarms proposes the NOSPACE alarm when a request passed the quota.
func (m *Member) raiseAlarms(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.overQuota:
		}
		_, _, alarms := m.machine.Tables()
		if alarms.Has(pb.AlarmType_NOSPACE) {
			continue
		}
		m.log.Warn("the store is above its quota: alarm NOSPACE is raised", "quota-bytes", m.cfg.Quota(), "usage-bytes", m.machine.Root().UsageBytes())
		r := &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: m.id.member, Alarm: pb.AlarmType_NOSPACE}
		done := make(chan error, 1)
		m.proposer().propose(command.KindAlarm, r, func(err error) { done <- err })
		if err := wait(ctx, done); err != nil {
			m.log.Warn("raising alarm NOSPACE failed", "error", err)
		}
	}
}

// publish tells the cluster this member's name and client URLs, and as its
// leader the cluster version, and returns when both are applied here. So
// everything committed before is applied too (B2).
func (m *Member) publish(ctx context.Context) error {
	urls := make([]string, len(m.cfg.AdvertiseClient))
	for i := range m.cfg.AdvertiseClient {
		urls[i] = m.cfg.AdvertiseClient[i].String()
	}
	for {
		if err := m.caughtUp(ctx); err != nil {
			if retry := m.waitAfter(ctx, "waiting for a leader", err); retry != nil {
				return retry
			}
			continue
		}
		_, members, _ := m.machine.Tables()
		self := members.Member(m.id.member)
		if self == nil {
			return fmt.Errorf("this member, %x, is not in the cluster that its data directory describes", m.id.member)
		}
		var err error
		switch {
		case self.Name != m.cfg.Name || !slices.Equal(self.ClientURLs, urls):
			err = m.proposeAndWait(ctx, command.KindClusterMemberAttrSet, &membershippb.ClusterMemberAttrSetRequest{
				Member_ID: m.id.member, MemberAttributes: &membershippb.Attributes{Name: m.cfg.Name, ClientUrls: urls},
			})
		case members.Version() == "":
			err = m.proposeAndWait(ctx, command.KindClusterVersionSet, &membershippb.ClusterVersionSetRequest{Ver: config.ClusterVersion})
		default:
			return nil
		}
		if err != nil {
			if retry := m.waitAfter(ctx, "publishing this member", err); retry != nil {
				return retry
			}
		}
	}
}

// waitAfter pauses after a failed try, or says why there will be none.
func (m *Member) waitAfter(ctx context.Context, doing string, err error) error {
	m.log.Warn(doing+" failed, trying again", "error", err)
	select {
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", doing, ctx.Err())
	case err := <-m.failed:
		return err
	case <-time.After(200 * time.Millisecond):
		return nil
	}
}

func (m *Member) proposeAndWait(ctx context.Context, kind command.Kind, msg proto.Message) error {
	done := make(chan error, 1)
	m.proposer().propose(kind, msg, func(err error) { done <- err })
	return wait(ctx, done)
}

// Wait blocks until ctx ends or the member fails, then stops it: calls in hand
// are answered, the store is flushed, and the next start is fast.
func (m *Member) Wait(ctx context.Context) error {
	var failure error
	select {
	case <-ctx.Done():
		m.log.Info("stopping", "member", fmt.Sprintf("%x", m.id.member))
	case failure = <-m.failed:
	}
	grace := stopGrace
	if failure != nil {
		grace = 0 // nothing can be answered any more, and clients have other members
	}
	err := errors.Join(failure, m.close(grace))
	if err == nil {
		m.log.Info("stopped", "member", fmt.Sprintf("%x", m.id.member))
	}
	return err
}

// close ends what was started, in the order that keeps B3.
func (m *Member) close(grace time.Duration) error {
	var errs []error
	if m.edge != nil {
		m.rpc.EndStreams()
		m.edge.close(grace)
	}
	if m.node != nil {
		errs = append(errs, m.node.Close())
	}
	m.stop()
	m.workers.Wait()
	if m.rpc != nil {
		m.rpc.Close()
	}
	if m.machine != nil {
		errs = append(errs, m.machine.Close())
	}
	if m.store != nil {
		errs = append(errs, m.store.Close())
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
type systemProposer struct{ m *Member }

func (m *Member) proposer() systemProposer { return systemProposer{m} }

// propose puts a message into the log on nobody's behalf.
func (p systemProposer) propose(kind command.Kind, msg proto.Message, done func(error)) {
	p.proposeAs(command.Header{}, kind, msg, done)
}

func (p systemProposer) proposeAs(h command.Header, kind command.Kind, msg proto.Message, done func(error)) {
	h.ID = p.m.ids.Next()
	data, err := command.AppendMessage(nil, kind, h, msg)
	if err == nil {
		err = p.m.node.Propose(consensus.Proposal{ID: h.ID, Data: data, Done: func(r consensus.Result, err error) {
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
func (p systemProposer) Revoke(id int64, done func(error)) {
	a, _, _ := p.m.machine.Tables()
	h := command.Header{}
	if a.Enabled() {
		h.Username, h.AuthRevision = rootUser, a.Revision()
	}
	p.proposeAs(h, command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: id}, done)
}

// Checkpoint implements leader.Proposer.
func (p systemProposer) Checkpoint(r *pb.LeaseCheckpointRequest, done func(error)) {
	p.propose(command.KindLeaseCheckpoint, r, done)
}

// Compact implements leader.Proposer.
func (p systemProposer) Compact(revision int64, done func(error)) {
	p.propose(command.KindCompaction, &pb.CompactionRequest{Revision: revision}, done)
}
