package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/leader"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/raftlog"
)

// ErrNoLog: a member that was born, or has applied something, has lost its raft log.
var ErrNoLog = errors.New("no raft log")

// identity says which member of which cluster this is.
type identity struct {
	cluster, member uint64
	joined          bool // it came to a cluster that was there, so its log has no first entries of its own
}

// equal says that it is the same member.
func (i identity) equal(o identity) bool { return i.cluster == o.cluster && i.member == o.member }

// openState opens the raft log and the state that belongs to it. A member
// without a log is born here.
func (m *Member) openState(ctx context.Context, metrics *metrics) error {
	dir := m.logPath()
	exists, err := raftlog.Exists(m.seams.FS, dir)
	if err != nil {
		return fmt.Errorf("raft log in %s: %w", dir, err)
	}
	known, born, err := m.dir.readIdentity()
	if err != nil {
		return err
	}
	if !exists && born {
		return fmt.Errorf("%s belongs to member %x, but %s holds %w: put the log back, or restore a backup into an empty directory", m.dir.path, known.member, dir, ErrNoLog)
	}
	if m.logDir, err = openLogDir(m.seams.FS, dir); err != nil {
		return err
	}
	o := raftlog.Options{FS: m.seams.FS, Dir: dir, CacheBytes: m.budgets().logCache, Logger: m.log, Metrics: metrics.raftlog, Syncs: m.pace}
	if m.cfg.UnsafeNoFsync {
		m.log.Warn("--unsafe-no-fsync: acknowledged writes are lost if this machine stops")
		o.FS = noSync{m.seams.FS}
	}
	if exists {
		err = m.openKnown(ctx, o, known, born)
	} else {
		err = m.openNew(ctx, o)
	}
	if err != nil {
		return err
	}
	applied, _ := m.machine().Applied()
	m.durable.Store(applied) // what was read at start is on disk
	m.ids = consensus.NewIDs(m.id.member, time.Now())
	return nil
}

// logPath is the directory of the raft log.
func (m *Member) logPath() string {
	if m.cfg.WALDir != "" {
		return m.cfg.WALDir
	}
	return m.dir.join(logDir)
}

// openKnown opens a member that has been started before.
func (m *Member) openKnown(ctx context.Context, o raftlog.Options, known identity, born bool) (err error) {
	if m.raftLog, err = raftlog.Open(through(m.seams.RaftLog, o)); err != nil {
		return err
	}
	whose := m.raftLog.Identity()
	m.id = identity{cluster: whose.ClusterID, member: whose.MemberID}
	if born && !m.id.equal(known) {
		return fmt.Errorf("%s belongs to member %x by its file IDENTITY, the raft log in %s to member %x: put the log back that belongs to the store; if the file is damaged, rebuild this member with `engram ctl rebuild`", m.dir.path, known.member, o.Dir, m.id.member)
	}
	installed, _ := m.raftLog.Installed()
	if err := m.openPresent(installed.Dir); err != nil {
		return err
	}
	applied, _ := m.machine().Applied()
	if m.cfg.ForceNewCluster {
		return m.forceNew(applied)
	}
	founded, err := consensus.Founded(m.raftLog)
	if err != nil || founded || applied > 0 || known.joined {
		return err
	}
	// A crash came before all of the first entries, or before it was noted that there are none.
	b, err := planBirth(ctx, m.cfg, m.client, m.clock, m.log)
	if err != nil {
		return err
	}
	if !m.id.equal(b.id) {
		return fmt.Errorf("the raft log in %s was begun for member %x of cluster %x, the flags now describe member %x of cluster %x: give the same flags again, or delete the directory",
			o.Dir, m.id.member, m.id.cluster, b.id.member, b.id.cluster)
	}
	return m.bear(b)
}

// forceNew makes this member a cluster of its own: the operator says that the
// others are lost for good.
func (m *Member) forceNew(applied uint64) error {
	m.log.Warn("--force-new-cluster: all other members are removed, and what only they know is lost; start them never again with their data, and this one without the flag next time",
		"member", fmt.Sprintf("%x", m.id.member))
	alone := member.Context{Member: member.Member{ID: m.id.member, PeerURLs: []string{"http://localhost:2380"}}}
	return consensus.ForceNew(m.raftLog, m.id.member, applied, m.machine().ConfState(), alone.Encode())
}

// openNew makes a member out of the flags.
func (m *Member) openNew(ctx context.Context, o raftlog.Options) error {
	if err := m.openPresent(""); err != nil {
		return err
	}
	if applied, _ := m.machine().Applied(); applied > 0 {
		return fmt.Errorf("the store in %s has applied index %d but %s holds %w: put the log back, or restore a backup into an empty directory", m.dir.path, applied, o.Dir, ErrNoLog)
	}
	b, err := planBirth(ctx, m.cfg, m.client, m.clock, m.log)
	if err != nil {
		return err
	}
	m.id = b.id
	o.Identity = raftlog.Identity{ClusterID: m.id.cluster, MemberID: m.id.member}
	if m.raftLog, err = raftlog.Open(through(m.seams.RaftLog, o)); err != nil {
		return err
	}
	return m.bear(b)
}

// bear puts the first entries into the log, of which one that joins has none,
// and notes whose directory this is.
func (m *Member) bear(b birth) error {
	m.remotes = b.remotes
	if len(b.founders) > 0 {
		if err := consensus.Bootstrap(m.raftLog, b.founders); err != nil {
			return err
		}
	}
	id := m.id
	id.joined = len(b.founders) == 0
	return m.dir.writeIdentity(id)
}

// openPresent opens the generation in a directory and deletes all others.
func (m *Member) openPresent(dir string) error {
	if err := m.removeLeftovers(dir); err != nil {
		return fmt.Errorf("deleting what snapshots left behind: %w", err)
	}
	g, err := m.openGeneration(dir)
	if err != nil {
		return err
	}
	m.gen.Store(g)
	return nil
}

// openConsensus prepares the loop.
func (m *Member) openConsensus(metrics *metrics) error {
	m.openTransport(metrics)
	m.lessor = lease.NewLessor(m.machine().Leases(), lease.LessorOptions{Now: m.clock.Now, Retry: m.cfg.RequestTimeout(), Metrics: metrics.lease})
	compaction, err := m.cfg.AutoCompaction()
	if err != nil {
		return err
	}
	m.keeper = leader.New(leader.Options{
		Lessor: m.lessor, Proposer: m.proposer(), Clock: m.clock, Logger: m.log,
		Compactor:       &leader.Compactor{Period: compaction.Period, Revisions: compaction.Revisions},
		Stands:          m.stands,
		SpaceUse:        m.spaceUse,
		ElectionTimeout: m.cfg.Tick() * time.Duration(m.cfg.ElectionTicks()),
	})
	m.node, err = consensus.Open(through(m.seams.Consensus, consensus.Options{
		ID: m.id.member, IDs: m.ids, Log: m.raftLog, Machine: machine{m},
		Transport: m.transport,
		Clock:     m.clock, Logger: m.log, Metrics: metrics.consensus, Listener: m.onEvent,
		Discard: func(r consensus.Result) { release(r) },
		Tick:    m.cfg.Tick(), ElectionTicks: m.cfg.ElectionTicks(), NoPreVote: !m.cfg.PreVote, NoTickAdvance: !m.cfg.TickAdvance,
		RequestTimeout: m.cfg.RequestTimeout(), CatchUpEntries: m.cfg.CatchUpEntries,
		Gate: m.guards.Gate, Pass: func(data []byte) error { return m.guards.Pass(data, m.machine()) }, LastGate: m.guards.LastGate, DurableApplied: m.durable.Load,
		StartFlush: func() { notify(m.flushNow) },
	}))
	if err != nil {
		return fmt.Errorf("store in %s, raft log in %s: %w", m.join(m.gen.Load().dir, storeDir), m.logPath(), err)
	}
	return nil
}

// onEvent hears of rare happenings, on the raft goroutine.
func (m *Member) onEvent(e consensus.Event) {
	switch e := e.(type) {
	case consensus.LeaderChanged:
		m.log.Info("leader changed", "member", fmt.Sprintf("%x", m.id.member), "leader", fmt.Sprintf("%x", e.New), "term", e.Term)
		if e.New != m.id.member {
			m.leading.Store(false)
			m.keeper.Follow()
		}
		m.leases.leaderChanged()
	case consensus.LeadershipConfirmed:
		m.leading.Store(true)
		m.keeper.Lead(e.Term)
		m.versions.Wake()
	case consensus.LeadershipHandedOver:
		m.log.Warn("this member asked another one to lead", "member", fmt.Sprintf("%x", m.id.member), "to", fmt.Sprintf("%x", e.To),
			"own-latency", e.Own, "their-latency", e.Theirs, "reason", e.Reason)
	case consensus.LogCut:
		m.log.Debug("raft log cut", "index", e.Index, "durable", e.Durable)
	case consensus.MembersChanged:
		m.refreshPeers()
		m.versions.Wake()
	case consensus.SnapshotInstalled:
		m.refreshPeers()
		if m.root().Removed(m.id.member) {
			m.departure.told(fmt.Errorf("the snapshot of index %d has it among the removed", e.Index))
		}
	}
}
