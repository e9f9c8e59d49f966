// Package consensus puts commands in an order every member agrees on.
//
// It drives raft by hand and knows no key: data goes in, the same data comes out committed, and whoever proposed is told
// what its own machine answered. It opens no file and no connection: the log, the machine and the peers are interfaces,
// and time arrives as an argument.
//
// Three plain step functions do the work: Core (raft, waiters, reads), LogWriter (one write and one sync for all that
// waits) and Applier (committed entries to the machine). Node is the handful of goroutines that drive them in a server; a
// simulation drives them all from one goroutine. DESIGN.md tells why. Invariants:
//
//	C1: a proposal that was taken has its Done called exactly once, never from the applier.
//	C2: the machine gets every committed entry once, in index order, and never one that is not durable here.
//	C3: no vote and no acknowledgement leaves before what it promises is synced.
//	C4: a batch for the machine ends at a conf change, and the next one begins after raft has taken that change.
//	C5: a read is answered at an index that a quorum confirmed after the read arrived, and that is applied here.
//	C6: the log is cut only below what the machine has made durable.
//	C7: everything that waits here is counted against a limit.
//	C8: a snapshot is installed after the log says durably that it is, with the machine idle, and acknowledged after that.
package consensus

import (
	"errors"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/raftlog"
)

// The errors a caller may get, from Propose itself or through Done. Whether a proposal that failed with ErrStopped,
// ErrCanceled or one of the time-outs was or will be applied is unknown to the caller, and stays so.
var (
	// ErrStopped: the member is stopping or has stopped.
	ErrStopped = errors.New("consensus: stopped")
	// ErrTooManyRequests: a queue is full, or the machine is too far behind what is committed. Nothing was proposed.
	ErrTooManyRequests = errors.New("consensus: too many requests")
	// ErrProposalDropped: raft did not take the proposal (leadership is moving). Nothing was proposed.
	ErrProposalDropped = errors.New("consensus: proposal dropped")
	// ErrDuplicateID: a proposal with this ID waits already. Nothing was proposed.
	ErrDuplicateID = errors.New("consensus: an equal proposal id is in use")
	// ErrTimeout: no answer before the deadline.
	ErrTimeout = errors.New("consensus: request timed out")
	// ErrTimeoutDueToLeaderFail: as ErrTimeout, for a proposal made shortly before the present leader was elected.
	ErrTimeoutDueToLeaderFail = errors.New("consensus: request timed out, possibly due to previous leader failure")
	// ErrTimeoutDueToConnectionLost: as ErrTimeout, when the leader (or on the leader a quorum) was not connected all the while.
	ErrTimeoutDueToConnectionLost = errors.New("consensus: request timed out, possibly due to connection lost")
	// ErrCanceled: Cancel was called.
	ErrCanceled = errors.New("consensus: request cancelled")
	// ErrLeaderChanged: another leader was elected while a read waited for its index, or before what only this one may propose
	// (Proposal.Term) was in the log.
	ErrLeaderChanged = errors.New("consensus: leader changed")
	// ErrStoreAhead: the machine has applied entries that the log does not hold.
	ErrStoreAhead = errors.New("consensus: store is ahead of the log")
	// ErrLogGap: the log begins after the entry the machine needs next.
	ErrLogGap = errors.New("consensus: log begins too late for the store")
	// ErrStoreMismatch: log and machine disagree about the term of the entry last applied, or about an installed snapshot.
	ErrStoreMismatch = errors.New("consensus: store and log do not belong together")
	// ErrLogLost: a leader knows that this member acknowledged entries that its log does not hold.
	ErrLogLost = errors.New("consensus: the log has lost what was acknowledged")
	// ErrNoSuccessor: no other voter is connected that could lead.
	ErrNoSuccessor = errors.New("consensus: no other voter is connected to hand leadership to")
)

// Result is what the machine made of one entry.
type Result struct {
	Index, Term uint64
	// ID is the identity of the request or conf change the entry carried, 0 if it carried none.
	ID uint64
	// Reply belongs to the machine and its callers; it is handed through untouched.
	Reply any
	// Err is the caller's error, equal on every member. The entry was applied all the same.
	Err error
	// ConfChange is set for conf changes only: the change as accepted, or with its node_id zeroed if it was refused.
	ConfChange *raftpb.ConfChange
	// Empty marks an entry without data: a new leader's first.
	Empty bool
}

// Machine is the state machine as seen from here.
type Machine interface {
	// Apply runs entries in order and returns one result for each entry it consumed: all of them, or a prefix that ends at
	// the first conf change. It is called from one goroutine. The entries are immutable and may be kept. An error means
	// that the disk failed; the member stops.
	Apply(entries []*raftpb.Entry) ([]Result, error)
	// Applied returns index and term of the last entry applied, 0 and 0 if there is none. Called before Run, and right after
	// Install.
	Applied() (index, term uint64)
	// ConfState returns the members after the last entry applied. Called when Applied is.
	ConfState() *raftpb.ConfState
	// Received tells whether the state belonging to a snapshot of this index and term has arrived and is synced, and in which
	// directory. From then on the answer stays, until a later snapshot is installed. It may be called from any goroutine
	// and must not block for long.
	Received(index, term uint64) (dir string, ok bool)
	// Install replaces the machine's state by the one in s.Dir, as of entry s.Index. The log already says durably that this
	// is the state: a start after a crash opens s.Dir, whether Install had begun or ended. No Apply runs meanwhile, and the next
	// one continues after s.Index. An error stops the member.
	Install(s raftlog.Snapshot) error
}

// Log is the durable raft log: package raftlog, or a test's. Its comments say who may call what; here the writer calls
// Write, Sync and Mark, another goroutine Compact, Prepare and Prefetch, and raft the rest. Its Snapshot is not asked.
type Log interface {
	raft.Storage
	// Installed returns the snapshot last installed on this member, if any. Called before raft starts.
	Installed() (raftlog.Snapshot, bool)
	// SetInitialState says, before raft starts, who the members are as of the last entry applied, and that everything up to
	// it is committed.
	SetInitialState(applied uint64, cs *raftpb.ConfState)
	// SetOnMiss has f asked whether entries that are not in memory may come later.
	SetOnMiss(f func(lo, hi uint64) (later bool))
	// Write adds to the log; it is durable after Sync. raftlog.ErrNoSpace leaves the log as it was and may be tried again; any
	// other error is final. mustSync is true if what is not yet durable includes more than a commit index.
	Write(appends []raftlog.Append) (mustSync bool, err error)
	Sync() error
	// Mark notes durably that all is synced; called when nothing else is to be written.
	Mark() error
	// Prepare makes room in good time, Prefetch reads entries into memory, Compact forgets those up to and including index.
	Prepare() error
	Prefetch(lo, hi, maxBytes uint64) error
	Compact(index uint64) error
	// SizeAfter returns the bytes of the log after the entry at index.
	SizeAfter(index uint64) int64
}

// Transport carries messages to the other members.
type Transport interface {
	// Send queues messages; it never blocks and may drop any of them. The messages are immutable; the slice is the caller's.
	Send(msgs []*raftpb.Message)
	// ActiveSince returns since when the member is connected, the zero time if it is not.
	ActiveSince(member uint64) time.Time
}

// Proposal asks for one command to be put into the log.
type Proposal struct {
	// ID identifies the command; its entry's Result carries the same ID. Never 0; see IDs.
	ID uint64
	// Data is the encoded command. It is immutable from now on: log and peers may still read it after Done.
	Data []byte
	// Deadline may shorten Options.RequestTimeout; the zero value does not. It is honoured to within a tick.
	Deadline time.Time
	// Term, if not 0, has the command put into the log by this member as the leader of that term or not at all: ErrLeaderChanged
	// says that it does not lead in it any more. What only a leader may ask for is not to be passed on to the next one.
	Term uint64
	// Done is called exactly once, from a completion worker or the loop, in the order in which proposals complete. It must not block.
	Done func(Result, error)
}
