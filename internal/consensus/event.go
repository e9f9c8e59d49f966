package consensus

import (
	"time"

	"go.etcd.io/raft/v3/raftpb"
)

// Event is a rare happening that Options.Listener hears of: one of the types below.
type Event interface{ event() }

// LeaderChanged says that this member knows another leader than before, or none (0).
type LeaderChanged struct {
	Old, New uint64
	Term     uint64
}

// LeadershipConfirmed says that this member, as leader, has applied the first entry of its term: from now on it knows
// everything its predecessors acknowledged. What only a leader does (expiring leases, say) may begin.
type LeadershipConfirmed struct {
	Term, Index uint64
}

// MembersChanged says that raft runs with these members from the given index on.
type MembersChanged struct {
	Index     uint64
	ConfState *raftpb.ConfState
}

// SnapshotInstalled says that the machine's state was replaced by a snapshot of the leader's, as of entry Index.
type SnapshotInstalled struct {
	Index, Term uint64
}

// LeadershipHandedOver says that this member, as leader, asked a voter to take over, for Reason. Own is the time that its own log
// takes to store an entry, Theirs that which the other takes to acknowledge one.
type LeadershipHandedOver struct {
	To          uint64
	Own, Theirs time.Duration
	Reason      string
}

// LogCut says that the log was allowed to forget all entries up to and including Index.
type LogCut struct {
	Index, Durable uint64
}

// FlushAsked says that the machine was asked to make its state durable so that the log can be cut.
type FlushAsked struct {
	LogBytes int64
	Applied  uint64
	Durable  uint64
}

func (LeaderChanged) event()        {}
func (LeadershipConfirmed) event()  {}
func (MembersChanged) event()       {}
func (SnapshotInstalled) event()    {}
func (LeadershipHandedOver) event() {}
func (LogCut) event()               {}
func (FlushAsked) event()           {}
