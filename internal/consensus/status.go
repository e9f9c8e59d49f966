package consensus

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3"
)

// Status is what this member knows about its cluster and itself.
type Status struct {
	// Leader is 0 if none is known.
	Leader uint64
	// Term is raft's; AppliedTerm is that of the last entry applied.
	Term, AppliedTerm uint64
	Commit, Applied   uint64
	Learner           bool
	// LeaderChanges counts the leaders seen since the start.
	LeaderChanges uint64
	// Pending counts proposals without an answer.
	Pending int64
	// PersistLatency is how long this member's log takes to store entries, smoothed, and at least as long as what is being
	// stored has already taken. As of the last tick.
	PersistLatency time.Duration
}

// cell publishes the loop's state to everyone else, field by field.
type cell struct {
	leader, term, appliedTerm, commit, applied, leaderSeen atomic.Uint64
	learner                                                atomic.Bool
	soleReader                                             atomic.Bool
	ticked                                                 atomic.Int64 // nanoseconds after Node.born
	members                                                atomic.Pointer[[]Progress]
	voters                                                 atomic.Pointer[[]uint64]
	persist                                                atomic.Int64

	mu      sync.Mutex
	changed chan struct{} // closed at the next change of leader; nil if nobody waits
}

// leaderChanges returns a channel that is closed when the leader changes.
func (s *cell) leaderChanges() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

func (s *cell) wakeLeaderWaiters() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// publish shows what c knows. The order carries MayReadNow: whoever sees soleReader set sees a commit index at least as new,
// and commit is never shown later than messages carrying it are sent.
func (s *cell) publish(c *Core) {
	sole := c.sole && c.role == raft.StateLeader && c.canAsk()
	if !sole {
		s.soleReader.Store(false)
	}
	s.commit.Store(c.commit)
	s.applied.Store(c.applied)
	s.appliedTerm.Store(c.appliedTerm)
	s.leader.Store(c.leader)
	s.term.Store(c.term)
	s.leaderSeen.Store(c.leaderSeen)
	s.learner.Store(c.learner)
	if v := s.voters.Load(); v == nil || !slices.Equal(*v, c.voters) {
		voters := c.voters // replaced, never changed
		s.voters.Store(&voters)
	}
	if sole {
		s.soleReader.Store(true)
	}
}

// Status returns the member's present view of things. The fields may be from different moments, a step apart.
func (n *Node) Status() Status {
	return Status{
		Leader: n.cell.leader.Load(), Term: n.cell.term.Load(), AppliedTerm: n.cell.appliedTerm.Load(),
		Commit: n.cell.commit.Load(), Applied: n.cell.applied.Load(), Learner: n.cell.learner.Load(),
		LeaderChanges: n.cell.leaderSeen.Load(), Pending: n.pending.Load(), PersistLatency: time.Duration(n.cell.persist.Load()),
	}
}

// Leader returns the leader's ID, 0 if none is known.
func (n *Node) Leader() uint64 { return n.cell.leader.Load() }

// IsLeader reports whether this member believes to lead. A leader that was cut off believes so for up to an election time-out.
func (n *Node) IsLeader() bool { return n.Leader() == n.opt.ID }

// Term returns raft's current term, AppliedTerm that of the last entry applied.
func (n *Node) Term() uint64        { return n.cell.term.Load() }
func (n *Node) AppliedTerm() uint64 { return n.cell.appliedTerm.Load() }

// Committed returns the highest index known to be committed.
func (n *Node) Committed() uint64 { return n.cell.commit.Load() }

// Applied returns the last index the machine has applied.
func (n *Node) Applied() uint64 { return n.cell.applied.Load() }

// Learner reports whether this member has no vote.
func (n *Node) Learner() bool { return n.cell.learner.Load() }

// SinceTick returns how long ago the loop last heard its clock tick: much more than Options.Tick means that this member stalled.
func (n *Node) SinceTick() time.Duration {
	return n.opt.Clock.Now().Sub(n.born) - time.Duration(n.cell.ticked.Load())
}

// Progress returns how far the members are, as of the last tick, in order of ID; nil if this member does not lead others.
// The list is shared: read only.
func (n *Node) Progress() []Progress {
	if list := n.cell.members.Load(); list != nil {
		return *list
	}
	return nil
}

// MayReadNow reports whether a view of the machine pinned after this call is linearizable without asking anyone: this member
// is the only voter, leads, and has applied all that was ever committed. If not, ReadIndex tells when.
func (n *Node) MayReadNow() bool {
	if !n.cell.soleReader.Load() {
		return false
	}
	commit := n.cell.commit.Load()
	return n.cell.applied.Load() >= commit
}
