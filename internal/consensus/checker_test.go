package consensus

import (
	"encoding/binary"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
)

// checker watches a whole cluster from outside.
type checker struct {
	err error
	// log is what was applied anywhere, by index: no two members may differ, and no entry may change.
	log     map[uint64]entrySeen
	at      map[uint64]uint64 // index of each command applied
	highest uint64            // index applied anywhere
	// proposals: how often each was called back; -1 if its member crashed before.
	proposals map[uint64]int
	// acked is the highest index whose proposer, or a reader, was told that it is there: every later read must include it.
	acked uint64
	reads map[int]int
	n     int
}

type entrySeen struct {
	term uint64
	conf bool
	data string
}

func newChecker() checker {
	return checker{log: map[uint64]entrySeen{}, at: map[uint64]uint64{}, proposals: map[uint64]int{}, reads: map[int]int{}}
}

func (c *checker) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
}

// applied checks one entry and its result as they come out of a member's applier.
func (c *checker) applied(member uint64, e *raftpb.Entry, r *Result) error {
	seen := entrySeen{e.GetTerm(), e.GetType() == raftpb.EntryConfChange, string(e.GetData())}
	if was, ok := c.log[e.GetIndex()]; ok && was != seen {
		return fmt.Errorf("member %d applies %v at %d, where another applied %v", member, seen, e.GetIndex(), was)
	}
	if r.Index != e.GetIndex() {
		return fmt.Errorf("member %d: result of %d beside entry %d", member, r.Index, e.GetIndex())
	}
	c.log[e.GetIndex()] = seen
	c.highest = max(c.highest, e.GetIndex())
	if e.GetType() == raftpb.EntryNormal && len(e.GetData()) > 0 {
		c.at[binary.BigEndian.Uint64(e.GetData())] = e.GetIndex()
	} else if r.ID != 0 {
		c.at[r.ID] = e.GetIndex()
	}
	return nil
}

func (c *checker) proposed(id uint64) {
	if _, ok := c.proposals[id]; ok {
		c.fail("id %x was made twice", id)
	}
	c.proposals[id] = 0
}

// gone says that the member crashed: nobody is left to be called back.
func (c *checker) gone(id uint64) { c.proposals[id] = -1 }

func (c *checker) done(id uint64, text string, r Result, err error) {
	if c.proposals[id]++; c.proposals[id] != 1 {
		c.fail("proposal %x was called back %d times", id, c.proposals[id])
	}
	if err != nil {
		return
	}
	if at, ok := c.at[id]; !ok || at != r.Index || r.ID != id {
		c.fail("proposal %x was told index %d, id %x; applied at %d (%v)", id, r.Index, r.ID, at, ok)
	}
	if text != "" && text != "refuse" && r.Reply != text {
		c.fail("proposal %x got the reply %v to %q", id, r.Reply, text)
	}
	if text == "refuse" && r.Err == nil {
		c.fail("proposal %x was not refused", id)
	}
	c.acked = max(c.acked, r.Index)
}

func (c *checker) readBegun() (token int, floor uint64) {
	c.n++
	c.reads[c.n] = 0
	return c.n, c.acked
}

// readDone checks a read at a member whose machine has applied index.
func (c *checker) readDone(token int, err error, member uint64, life int, floor, index uint64) {
	if c.reads[token]++; c.reads[token] != 1 {
		c.fail("read %d was called back %d times", token, c.reads[token])
	}
	if err != nil {
		return
	}
	if index < floor {
		c.fail("member %d, life %d: a read saw index %d after %d had been acknowledged", member, life, index, floor)
	}
	c.acked = max(c.acked, index)
}

// holds checks that a machine, whatever snapshots brought it there, holds all that was applied anywhere up to where it is.
func (c *checker) holds(sm *simMember) error {
	list := sm.machine.list
	for i := uint64(1); i <= sm.machine.index; i++ {
		e, ok := c.log[i]
		if !ok {
			return fmt.Errorf("member %d is at index %d, and nobody applied %d", sm.id, sm.machine.index, i)
		}
		if e.conf || e.data == "" || e.data[8:] == "refuse" {
			continue
		}
		if len(list) == 0 || list[0].index != i || list[0].term != e.term || string(encode(list[0].id, list[0].text)) != e.data {
			return fmt.Errorf("member %d, at index %d, lacks what was applied at %d", sm.id, sm.machine.index, i)
		}
		list = list[1:]
	}
	if len(list) > 0 {
		return fmt.Errorf("member %d, at index %d, holds more than was applied: %v", sm.id, sm.machine.index, list[0])
	}
	return nil
}

func (c *checker) settle() error {
	if c.err != nil {
		return c.err
	}
	for id, n := range c.proposals {
		if n == 0 {
			return fmt.Errorf("proposal %x was never called back", id)
		}
	}
	for i := uint64(1); i <= c.highest; i++ {
		if _, ok := c.log[i]; !ok {
			return fmt.Errorf("index %d of %d was never applied", i, c.highest)
		}
	}
	return nil
}
