package consensus

import (
	"encoding/binary"
	"slices"
	"time"
)

// Read waits until this member may serve a linearizable read.
type Read struct {
	// Done is called exactly once, from a completion worker. It must not block.
	Done func(error)
	// Deadline may shorten Options.RequestTimeout; the zero value does not.
	Deadline time.Time
}

// readGroup is all that one confirmed round serves, waiting for the machine to get there.
type readGroup struct {
	index uint64
	reads []Read
}

// reads holds the reads without an answer. All lists are in order of arrival, so the oldest is always in front.
//
// A round is one question to the leader. Those that arrive while it is under way wait for the next: the index it
// confirms may be older than they are.
type reads struct {
	waiting []Read
	round   []Read   // served by the round under way; empty if there is none
	ids     []uint64 // names under which the round was asked so far; any of them answers it
	leader  uint64   // whom it was asked of
	asked   time.Time
	groups  []readGroup
}

func (rs *reads) len() int {
	n := len(rs.waiting) + len(rs.round)
	for i := range rs.groups {
		n += len(rs.groups[i].reads)
	}
	return n
}

// begin makes a round of all that wait.
func (rs *reads) begin() {
	rs.round, rs.waiting = rs.waiting, rs.round[:0]
	rs.ids = rs.ids[:0]
}

// maxRoundNames is how many names a round keeps, youngest first: it may be asked that often if its reads wait long.
const maxRoundNames = 64

// ask notes that the round is asked under a new name and returns the context that carries it.
func (rs *reads) ask(id, leader uint64, now time.Time) []byte {
	if len(rs.ids) >= maxRoundNames {
		rs.ids = slices.Delete(rs.ids, 0, 1)
	}
	rs.ids = append(rs.ids, id)
	rs.leader, rs.asked = leader, now
	return binary.BigEndian.AppendUint64(nil, id)
}

// confirm ends the round if ctx answers it: its reads now wait for the machine to reach index.
func (rs *reads) confirm(ctx []byte, index uint64) bool {
	if len(ctx) != 8 || len(rs.round) == 0 || !slices.Contains(rs.ids, binary.BigEndian.Uint64(ctx)) {
		return false
	}
	rs.groups = append(rs.groups, readGroup{index: index, reads: slices.Clone(rs.round)})
	rs.endRound()
	return true
}

func (rs *reads) endRound() {
	clear(rs.round)
	rs.round, rs.ids, rs.leader = rs.round[:0], rs.ids[:0], 0
}

// fail ends the round with err.
func (rs *reads) fail(err error, out *Output) {
	for _, r := range rs.round {
		out.Reads = append(out.Reads, ReadCompletion{r.Done, err})
	}
	rs.endRound()
}

// applied answers all groups that index satisfies.
func (rs *reads) applied(index uint64, out *Output) {
	rs.groups = slices.DeleteFunc(rs.groups, func(g readGroup) bool {
		if g.index > index {
			return false
		}
		for _, r := range g.reads {
			out.Reads = append(out.Reads, ReadCompletion{r.Done, nil})
		}
		return true
	})
}

// expire fails every read whose deadline has come, or all if now is the zero time, and returns how many.
func (rs *reads) expire(now time.Time, err error, out *Output) int {
	n := 0
	due := func(r Read) bool {
		if !now.IsZero() && r.Deadline.After(now) {
			return false
		}
		out.Reads = append(out.Reads, ReadCompletion{r.Done, err})
		n++
		return true
	}
	for i := range rs.groups {
		rs.groups[i].reads = slices.DeleteFunc(rs.groups[i].reads, due)
	}
	rs.groups = slices.DeleteFunc(rs.groups, func(g readGroup) bool { return len(g.reads) == 0 })
	if rs.round = slices.DeleteFunc(rs.round, due); len(rs.round) == 0 {
		rs.endRound()
	}
	rs.waiting = slices.DeleteFunc(rs.waiting, due)
	return n
}
