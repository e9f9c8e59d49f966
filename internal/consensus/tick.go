package consensus

import (
	"slices"
	"sort"
	"time"

	"go.etcd.io/raft/v3"
)

// onTick does what is done once in a while: deadlines, retries, and the length of the log.
func (c *Core) onTick(out *Output) {
	c.waiters.expire(c.now, func(w waiter) {
		c.opt.Metrics.ProposalsFailed.Inc()
		out.Completions = append(out.Completions, Completion{w.done, Result{}, c.timeoutError(w.start), w.size})
	})
	// Without a leader both only grow, and changes behind one that is under way do; those who gave up must not count twice.
	gaveUp := func(p proposal) bool { return !c.waiters.has(p.id) }
	c.queue = slices.DeleteFunc(c.queue, gaveUp)
	c.confs = slices.DeleteFunc(c.confs, gaveUp)
	if n := c.reads.expire(c.now, ErrTimeout, out); n > 0 {
		c.opt.Metrics.ReadIndexesFailed.Inc()
	}
	c.shortenFirstElection()
	c.members = c.progress()
	c.persist.tick()
	c.leaveFullDisk(out)
	c.leaveSlowDisk(out)
	c.keepLogShort(out)
}

// askReads begins a round for the reads that wait, or asks again one that has no answer. Those of other members come first.
func (c *Core) askReads(out *Output) {
	if len(c.early) > 0 && c.knowsCommitted() {
		for _, m := range c.early {
			c.step(m)
		}
		c.early = nil
	}
	rs := &c.reads
	if len(rs.waiting)+len(rs.round) == 0 || !c.canAsk() || c.raftHasMoved() {
		return
	}
	if c.sole && c.role == raft.StateLeader {
		// Nobody else can have committed anything: what is committed here is all there is.
		c.readAt(c.commit, out)
		return
	}
	if len(rs.round) == 0 {
		rs.begin()
	} else if c.now.Sub(rs.asked) < c.opt.ReadRetry {
		return
	} else {
		c.opt.Metrics.SlowReadIndexes.Inc()
	}
	c.rn.ReadIndex(rs.ask(c.opt.IDs.Next(), c.leader, c.now))
}

// canAsk tells whether a sound answer can come.
func (c *Core) canAsk() bool {
	if c.role == raft.StateLeader {
		return c.knowsCommitted()
	}
	return c.leader != raft.None && !c.leaderGone
}

// knowsCommitted tells whether this member leads and, asking a majority if there are others, can tell what is committed: only once it
// has committed an entry of its own term, before which it may not know all that its predecessors acknowledged, and not after it was
// removed: of the voters left, should it be one, raft would not ask that one.
func (c *Core) knowsCommitted() bool {
	return c.firstOfTerm != 0 && c.commit >= c.firstOfTerm && slices.Contains(c.voters, c.opt.ID)
}

// readAt lets all reads go on once index is applied.
func (c *Core) readAt(index uint64, out *Output) {
	rs := &c.reads
	for _, list := range [...][]Read{rs.round, rs.waiting} {
		if len(list) == 0 {
			continue
		}
		if c.applied < index {
			rs.groups = append(rs.groups, readGroup{index: index, reads: append([]Read(nil), list...)})
			continue
		}
		for _, r := range list {
			out.Reads = append(out.Reads, ReadCompletion{r.Done, nil})
		}
	}
	clear(rs.waiting)
	rs.waiting = rs.waiting[:0]
	rs.endRound()
}

// shortenFirstElection skips most of the first election time-out once two peers are connected: after a restart of a whole
// cluster nobody needs to wait that long for a leader that cannot be there. One peer is not enough, for two members that start
// together would stand against each other.
func (c *Core) shortenFirstElection() {
	if c.advanceUntil.IsZero() || c.opt.Transport == nil {
		return
	}
	if c.now.After(c.advanceUntil) || c.leader != raft.None {
		c.advanceUntil = time.Time{}
		return
	}
	active := 0
	for _, id := range c.voters {
		if id != c.opt.ID && !c.opt.Transport.ActiveSince(id).IsZero() {
			active++
		}
	}
	if active < 2 {
		return
	}
	c.advanceUntil = time.Time{}
	for range c.opt.ElectionTicks - 2 {
		c.rn.Tick()
	}
}

// keepLogShort asks for a flush when too much of the log is needed by the machine alone, and lets the log forget what neither
// the machine nor a live follower needs, nor one that may come back soon.
func (c *Core) keepLogShort(out *Output) {
	durable := c.applied
	if c.opt.DurableApplied != nil {
		durable = min(c.opt.DurableApplied(), c.applied)
	}
	if durable != c.durable || durable == c.applied {
		c.durable, c.dirtySince, c.asked = durable, c.now, false
	}
	if durable < c.applied {
		bytes, age := c.opt.Log.SizeAfter(durable), c.now.Sub(c.dirtySince)
		if age >= c.opt.FlushAge || bytes >= c.opt.FlushLogBytes && !c.asked {
			// Asked again after another FlushAge, should this one come to nothing.
			c.asked, c.dirtySince = true, c.now
			out.StartFlush = true
			out.Events = append(out.Events, FlushAsked{LogBytes: bytes, Applied: c.applied, Durable: durable})
		}
	}
	to := uint64(0)
	if c.applied > c.opt.CatchUpEntries {
		to = c.applied - c.opt.CatchUpEntries
	}
	floor := c.fitting(c.opt.CatchUpBytes)
	to = min(max(to, floor), durable)
	for i := range c.members {
		if p := &c.members[i]; p.ID != c.opt.ID {
			if index, holds := p.neededBy(floor); holds {
				to = min(to, index)
			}
		}
	}
	if to <= c.cutTo {
		return
	}
	// Cutting is cheap, but not so cheap that every tick should do it.
	if to-c.cutTo > c.opt.CatchUpEntries/10 || c.opt.Log.SizeAfter(c.cutTo)-c.opt.Log.SizeAfter(to) > c.opt.CatchUpBytes/10 {
		c.cutTo = to
		out.CutTo = to
		out.Events = append(out.Events, LogCut{Index: to, Durable: durable})
	}
}

// fitting returns the lowest index at or above the cut after which at most limit bytes of log lie.
func (c *Core) fitting(limit int64) uint64 {
	n := sort.Search(int(c.applied-min(c.cutTo, c.applied)), func(i int) bool {
		return c.opt.Log.SizeAfter(c.cutTo+uint64(i)) <= limit
	})
	return c.cutTo + uint64(n)
}
