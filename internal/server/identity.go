package server

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/leader"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/raftlog"
)

// identity says which member of which cluster this is.
type identity struct{ cluster, member uint64 }

// founder describes this member at the birth of its cluster.
func (m *Member) founder() (identity, consensus.Founder, error) {
	members, err := m.cfg.InitialMembers()
	if err != nil {
		return identity{}, consensus.Founder{}, err
	}
	if len(members) != 1 {
		return identity{}, consensus.Founder{}, fmt.Errorf("--initial-cluster names %d members: this version runs one member alone", len(members))
	}
	self := members[0]
	if self.Name != m.cfg.Name {
		return identity{}, consensus.Founder{}, fmt.Errorf("couldn't find local name %q in the initial cluster configuration", m.cfg.Name)
	}
	advertised := make([]string, len(m.cfg.AdvertisePeer))
	for i := range m.cfg.AdvertisePeer {
		advertised[i] = m.cfg.AdvertisePeer[i].String()
	}
	slices.Sort(advertised)
	if !slices.Equal(advertised, self.PeerURLs) {
		return identity{}, consensus.Founder{}, fmt.Errorf("--initial-cluster has %s=%s but missing from --initial-advertise-peer-urls=%s: give this member the same peer URLs in both",
			self.Name, strings.Join(self.PeerURLs, ","), strings.Join(advertised, ","))
	}
	if m.cfg.InitialClusterState == "existing" {
		return identity{}, consensus.Founder{}, errors.New("--initial-cluster-state=existing: this version cannot join a cluster, start it with new")
	}
	id := member.FoundingID(self.PeerURLs, m.cfg.InitialClusterToken)
	birth := member.Context{Member: member.Member{ID: id, PeerURLs: self.PeerURLs, Name: self.Name}}
	return identity{cluster: member.ClusterID([]uint64{id}), member: id}, consensus.Founder{ID: id, Context: birth.Encode()}, nil
}

// openConsensus opens the raft log, founds a cluster if there is none, and
// prepares the loop.
func (m *Member) openConsensus(metrics *metrics) error {
	dir := m.dir.join(logDir)
	if m.cfg.WALDir != "" {
		dir = m.cfg.WALDir
	}
	fs := m.seams.FS
	logFS := fs
	if m.cfg.UnsafeNoFsync {
		m.log.Warn("--unsafe-no-fsync: acknowledged writes are lost if this machine stops")
		logFS = noSync{fs}
	}
	exists, err := raftlog.Exists(fs, dir)
	if err != nil {
		return fmt.Errorf("raft log in %s: %w", dir, err)
	}
	applied, _ := m.machine.Applied()
	if !exists && applied > 0 {
		return fmt.Errorf("the store in %s has applied index %d but %s holds no raft log: put the log back, or restore a backup into an empty directory", m.dir.path, applied, dir)
	}
	known, born, err := m.dir.readIdentity()
	if err != nil {
		return err
	}
	if !exists && born {
		return fmt.Errorf("%s belongs to member %x, but %s holds no raft log: put the log back, or restore a backup into an empty directory", m.dir.path, known.member, dir)
	}
	if m.logDir, err = openLogDir(fs, dir); err != nil {
		return err
	}
	o := raftlog.Options{FS: logFS, Dir: dir, CacheBytes: m.budgets().logCache, Logger: m.log, Metrics: metrics.raftlog}
	var founder consensus.Founder
	if !exists {
		if m.id, founder, err = m.founder(); err != nil {
			return err
		}
		o.Identity = raftlog.Identity{ClusterID: m.id.cluster, MemberID: m.id.member}
	}
	if m.raftLog, err = raftlog.Open(through(m.seams.RaftLog, o)); err != nil {
		return err
	}
	if founded, err := consensus.Founded(m.raftLog); err != nil {
		return err
	} else if !founded && applied == 0 { // new, or a crash came before all of the first entries
		if exists {
			if m.id, founder, err = m.founder(); err != nil {
				return err
			}
		}
		if err := consensus.Bootstrap(m.raftLog, []consensus.Founder{founder}); err != nil {
			return err
		}
	}
	whose := m.raftLog.Identity()
	m.id = identity{cluster: whose.ClusterID, member: whose.MemberID}
	if !born {
		if err := m.dir.writeIdentity(m.id); err != nil {
			return err
		}
	} else if m.id != known {
		return fmt.Errorf("%s belongs to member %x, the raft log in %s to member %x: put the log back that belongs to the store", m.dir.path, known.member, dir, m.id.member)
	}
	m.ids = consensus.NewIDs(m.id.member, time.Now())
	m.durable.Store(applied) // what was read at start is on disk

	m.lessor = lease.NewLessor(m.machine.Leases(), lease.LessorOptions{Now: m.clock.Now, Retry: m.cfg.RequestTimeout(), Metrics: metrics.lease})
	compaction, err := m.cfg.AutoCompaction()
	if err != nil {
		return err
	}
	m.keeper = leader.New(leader.Options{
		Lessor: m.lessor, Proposer: m.proposer(), Clock: m.clock, Logger: m.log,
		Compactor:       &leader.Compactor{Period: compaction.Period, Revisions: compaction.Revisions},
		Revision:        func() int64 { return m.machine.Root().Revision() },
		ElectionTimeout: m.cfg.Tick() * time.Duration(m.cfg.ElectionTicks()),
	})
	m.node, err = consensus.Open(through(m.seams.Consensus, consensus.Options{
		ID: m.id.member, IDs: m.ids, Log: m.raftLog, Machine: machine{m.machine, m},
		Clock: m.clock, Logger: m.log, Metrics: metrics.consensus, Listener: m.onEvent,
		Discard: func(r consensus.Result) { release(r) },
		Tick:    m.cfg.Tick(), ElectionTicks: m.cfg.ElectionTicks(), NoPreVote: !m.cfg.PreVote, NoTickAdvance: !m.cfg.TickAdvance,
		RequestTimeout: m.cfg.RequestTimeout(), CatchUpEntries: m.cfg.CatchUpEntries,
		Gate: m.guard.Gate, DurableApplied: m.durable.Load,
		StartFlush: func() { notify(m.flushNow) },
	}))
	if err != nil {
		return fmt.Errorf("store in %s, raft log in %s: %w", m.dir.join(storeDir), dir, err)
	}
	return nil
}

// onEvent hears of rare happenings, on the raft goroutine.
func (m *Member) onEvent(e consensus.Event) {
	switch e := e.(type) {
	case consensus.LeaderChanged:
		m.log.Info("leader changed", "member", fmt.Sprintf("%x", m.id.member), "leader", fmt.Sprintf("%x", e.New), "term", e.Term)
		if e.New != m.id.member {
			m.keeper.Follow()
		}
	case consensus.LeadershipConfirmed:
		m.keeper.Lead(e.Term)
	}
}
