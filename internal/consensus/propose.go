package consensus

import (
	"fmt"
	"slices"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// register takes proposals in, or refuses them: from here on each has a waiter.
func (c *Core) register(in *Input, out *Output) {
	if len(in.Proposals)+len(in.ConfChanges) == 0 {
		return
	}
	refused := c.opt.Gate()
	for i := range in.Proposals {
		p := &in.Proposals[i]
		deadline := c.now.Add(c.opt.RequestTimeout)
		if !p.Deadline.IsZero() && p.Deadline.Before(deadline) {
			deadline = p.Deadline
		}
		err := refused
		if err != nil {
			err = c.opt.Pass(p.Data)
		}
		if err == nil && c.commit > c.applied+c.opt.MaxBacklog {
			err = fmt.Errorf("%d entries are committed and not yet applied: %w", c.commit-c.applied, ErrTooManyRequests)
		}
		if c.admit(p.ID, p.Done, len(p.Data), deadline, err, out) {
			c.queue = append(c.queue, proposal{p.ID, p.Data, raftpb.EntryNormal, p.Term})
		}
	}
	for i := range in.ConfChanges {
		p := &in.ConfChanges[i]
		deadline := p.Deadline
		if deadline.IsZero() {
			deadline = c.now.Add(c.opt.RequestTimeout)
		}
		data, err := proto.Marshal(p.Change)
		if refused != nil {
			err = refused
		}
		if c.admit(p.Change.GetId(), p.Done, confSize(p.Change), deadline, err, out) {
			c.confs = append(c.confs, proposal{p.Change.GetId(), data, raftpb.EntryConfChange, 0})
		}
	}
}

// confSize counts a conf change against Options.MaxPendingBytes.
func confSize(cc *raftpb.ConfChange) int { return proto.Size(cc) }

// admit makes a waiter, or completes with err.
func (c *Core) admit(id uint64, done func(Result, error), size int, deadline time.Time, err error, out *Output) bool {
	if err == nil {
		if c.waiters.add(id, done, size, c.now, deadline) {
			return true
		}
		err = fmt.Errorf("proposal %x: %w", id, ErrDuplicateID)
	}
	c.opt.Metrics.ProposalsFailed.Inc()
	out.Completions = append(out.Completions, Completion{done, Result{}, err, size})
	return false
}

// propose gives raft what waits, once a leader is known that is not about to hand over: everything in one message, unless that grew
// too long. What is sent to a leader that was removed would be lost, and its proposers would wait for nothing.
func (c *Core) propose(out *Output) {
	if len(c.queue)+len(c.confs) == 0 || c.leader == raft.None || c.leaderGone {
		return
	}
	if st := c.rn.BasicStatus(); c.moved(st) || handsOver(st) {
		return
	}
	for len(c.queue) > 0 {
		c.queue = slices.Delete(c.queue, 0, c.proposeBatch(out))
	}
	c.proposeConf(out)
}

// proposeBatch steps one message with as many proposals as fit and returns how many it disposed of.
func (c *Core) proposeBatch(out *Output) int {
	leading := c.role == raft.StateLeader
	limit := c.opt.MaxForwardBytes
	if leading {
		limit = c.opt.MaxProposeBytes
	}
	n, bytes := 0, 0
	for n < len(c.queue) && (n == 0 || bytes+len(c.queue[n].data) <= limit) {
		bytes += len(c.queue[n].data) + entryOverhead
		n++
	}
	// A leader's raft copies the entries; a follower's message is on its way for as long as the transport likes.
	entries, batch := c.entries, c.batch[:0]
	if !leading {
		entries, batch = nil, make([]*raftpb.Entry, 0, n)
	}
	if cap(entries) < n {
		entries = make([]raftpb.Entry, n)
	}
	entries = entries[:cap(entries)]
	for i := range n {
		p := &c.queue[i]
		if p.term != 0 && (!leading || p.term != c.term) {
			c.complete(p.id, Result{}, fmt.Errorf("%w: proposed by the leader of term %d", ErrLeaderChanged, p.term), out)
		}
		// Whoever timed out while no leader was known is not proposed any more.
		if c.waiters.has(p.id) {
			e := &entries[len(batch)]
			e.Data = p.data
			batch = append(batch, e)
		}
	}
	if len(batch) == 0 {
		return n
	}
	err := c.rn.Step(&raftpb.Message{Type: raftpb.MsgProp.Enum(), From: new(c.opt.ID), Entries: batch})
	if err != nil {
		err = c.dropped(err)
		for i := range n {
			c.complete(c.queue[i].id, Result{}, err, out)
		}
	}
	if leading {
		for _, e := range batch {
			e.Data = nil
		}
		clear(batch)
		c.entries, c.batch = entries, batch[:0]
		// One burst must not hold its memory for ever.
		if len(entries) > maxIdleBatch {
			c.entries, c.batch = nil, nil
		}
	}
	return n
}

// entryOverhead is about what an entry takes in a message besides its data.
const entryOverhead = 16

// maxIdleBatch is how many entries the slab for batches may keep.
const maxIdleBatch = 16384

// dropped says why raft did not take a proposal.
func (c *Core) dropped(err error) error {
	if c.isMember(c.opt.ID) && c.mayHandOver() {
		return fmt.Errorf("%d bytes of log wait for a quorum: %w", c.opt.MaxUncommittedBytes, ErrTooManyRequests)
	}
	return fmt.Errorf("%w: leader %x, %v", ErrProposalDropped, c.leader, err)
}

// proposeConf gives raft the next conf change. A leader waits until it has applied the first entry of its term and the
// change before: raft would put an empty entry in its place, and the proposer would learn nothing until it times out.
func (c *Core) proposeConf(out *Output) {
	if c.confSent != 0 && !c.waiters.has(c.confSent) {
		c.confSent = 0
	}
	for len(c.confs) > 0 && c.confSent == 0 {
		p := c.confs[0]
		if !c.waiters.has(p.id) {
			c.confs = slices.Delete(c.confs, 0, 1)
			continue
		}
		leading := c.role == raft.StateLeader
		if leading && (!c.confirmed || c.confStuck) {
			return
		}
		batch := []*raftpb.Entry{{Type: p.typ.Enum(), Data: p.data}}
		if err := c.rn.Step(&raftpb.Message{Type: raftpb.MsgProp.Enum(), From: new(c.opt.ID), Entries: batch}); err != nil {
			c.confs = slices.Delete(c.confs, 0, 1)
			c.complete(p.id, Result{}, c.dropped(err), out)
			continue
		}
		if leading && batch[0].GetType() != raftpb.EntryConfChange {
			c.confStuck = true
			return
		}
		c.confSent = p.id
		c.confs = slices.Delete(c.confs, 0, 1)
	}
}

// timeoutError says what may have become of a proposal made at start.
func (c *Core) timeoutError(start time.Time) error {
	if !c.leaderSince.IsZero() && !start.After(c.leaderSince) && !start.Before(c.leaderSince.Add(-2*c.opt.electionTimeout())) {
		return ErrTimeoutDueToLeaderFail
	}
	switch {
	case c.leader == raft.None:
		return ErrTimeout
	case c.leader != c.opt.ID:
		if !c.connectedSince(c.leader, start) {
			return ErrTimeoutDueToConnectionLost
		}
	default:
		connected := 0
		for _, id := range c.voters {
			if id == c.opt.ID || c.connectedSince(id, start) {
				connected++
			}
		}
		if connected < len(c.voters)/2+1 {
			return ErrTimeoutDueToConnectionLost
		}
	}
	return ErrTimeout
}

func (c *Core) connectedSince(member uint64, t time.Time) bool {
	if c.opt.Transport == nil {
		return false
	}
	since := c.opt.Transport.ActiveSince(member)
	return !since.IsZero() && !since.After(t)
}
