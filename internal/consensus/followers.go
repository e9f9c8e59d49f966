package consensus

import (
	"fmt"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
)

// follower is what a leader remembers of another member, besides raft's own progress.
type follower struct {
	heard time.Time // when its last answer came
	beat  time.Time // when it was last sent a heartbeat
	ack   ackTimer
}

// maxBeats is how many heartbeat intervals may lie between two heartbeats: as real members have it.
const maxBeats = 2

// onHeartbeat notes that a follower is sent a heartbeat, which counts as late if the one before was too long ago.
func (c *Core) onHeartbeat(to uint64) {
	f := c.follower(to)
	if !f.beat.IsZero() && c.now.Sub(f.beat) > maxBeats*time.Duration(c.opt.HeartbeatTicks)*c.opt.Tick {
		c.opt.Metrics.HeartbeatsLate.Inc()
	}
	f.beat = c.now
}

// follower returns what is remembered of a member.
func (c *Core) follower(id uint64) *follower {
	f := c.followers[id]
	if f == nil {
		f = &follower{}
		c.followers[id] = f
	}
	return f
}

// Progress is how far a leader believes a member to be.
type Progress struct {
	ID      uint64
	Learner bool
	// Match is the last index known to be in the member's log.
	Match uint64
	// Active says that it was heard of within an election time-out, Replicating that it follows the log entry by entry.
	Active, Replicating bool
	// Snapshot is the index of the snapshot that is on its way to the member, 0 if none is.
	Snapshot uint64
	// AckLatency is how long the member takes to acknowledge an entry, smoothed, and at least as long as it has already taken
	// for one that it has not acknowledged yet. 0 if nothing is known.
	AckLatency time.Duration

	next uint64 // the first index not sent yet
}

// progress lists the members, in order of ID, if this one leads others.
func (c *Core) progress() []Progress {
	if c.role != raft.StateLeader || c.opt.Transport == nil {
		return nil
	}
	var list []Progress
	c.rn.WithProgress(func(id uint64, typ raft.ProgressType, pr tracker.Progress) {
		p := Progress{
			ID: id, Learner: typ == raft.ProgressTypeLearner, Match: pr.Match, Active: pr.RecentActive,
			Replicating: pr.State == tracker.StateReplicate, next: pr.Next,
		}
		if pr.State == tracker.StateSnapshot {
			p.Snapshot = pr.PendingSnapshot
		}
		if id != c.opt.ID {
			f := c.follower(id)
			// raft's own idea of it is forgotten once in an election time-out, and learned anew.
			p.Active = !f.heard.IsZero() && c.now.Sub(f.heard) <= c.opt.electionTimeout()
			if !p.Replicating {
				f.ack.forget()
			}
			p.AckLatency = f.ack.estimate(c.now)
		}
		list = append(list, p)
	})
	if len(c.followers) >= len(list) {
		for id := range c.followers {
			if !isMember(list, id) {
				delete(c.followers, id)
			}
		}
	}
	return list
}

func isMember(list []Progress, id uint64) bool {
	for i := range list {
		if list[i].ID == id {
			return true
		}
	}
	return false
}

// answered notes an answer of a follower, and what it has in its log if it says so.
func (c *Core) answered(m *raftpb.Message) {
	if c.role != raft.StateLeader || m.GetTerm() != c.term || !c.isMember(m.GetFrom()) {
		return
	}
	f := c.follower(m.GetFrom())
	f.heard = c.now
	if m.GetType() == raftpb.MsgAppResp && !m.GetReject() {
		f.ack.reached(m.GetIndex(), c.now)
	}
}

// neededBy returns up to where the log may be cut for a follower's sake, floor being the lowest index that anyone may hold it at:
// one that is down, or lags so far that a snapshot is cheaper, holds nothing.
func (p *Progress) neededBy(floor uint64) (uint64, bool) {
	switch {
	case !p.Active:
		return 0, false
	case p.Snapshot != 0:
		return p.Snapshot, p.Snapshot >= floor
	case p.Match >= floor:
		return p.Match, true
	}
	// It may have got a snapshot and not said so yet.
	return p.next - 1, !p.Replicating && p.next > floor
}

// successor returns the voter to which this leader would hand over: of those that have all that is committed, the one connected
// for the longest time; if there is none, the longest connected one, which raft lets catch up first. 0 if nobody is
// connected, or if this member leads nobody.
func (c *Core) successor() uint64 {
	var best uint64
	var since time.Time
	var ready bool
	for _, p := range c.progress() {
		if p.ID == c.opt.ID || p.Learner || !p.Active {
			continue
		}
		at, has := c.opt.Transport.ActiveSince(p.ID), p.Match >= c.commit
		if at.IsZero() || best != 0 && (ready && !has || ready == has && !at.Before(since)) {
			continue
		}
		best, since, ready = p.ID, at, has
	}
	return best
}

// mayHandOver tells whether raft leads, as of now, and is not handing over already. One that follows would pass the wish on.
func (c *Core) mayHandOver() bool {
	st := c.rn.BasicStatus()
	return st.RaftState == raft.StateLeader && st.LeadTransferee == raft.None
}

const (
	// slowStrikes is how many samples in a row must be above Options.SlowDisk, and slowFactor by how much another voter must be
	// better: moving leadership costs an election, and must not be done for a difference that a busy moment makes.
	slowStrikes = 3
	slowFactor  = 8
	// slowPause is how long this member does not hand over again.
	slowPause = time.Minute
	// ackFresh is how old a follower's last sample may be.
	ackFresh = 10 * time.Second
)

// fullPause is how long a leader whose disk is full does not try another voter.
const fullPause = 10 * time.Second

// leaveFullDisk hands leadership over while Options.Gate is shut here: this leader refuses everything, and another voter may
// have room. One that has not hands it on.
func (c *Core) leaveFullDisk(out *Output) {
	if c.role != raft.StateLeader || c.sole {
		return
	}
	full := c.opt.Gate()
	if full == nil || !c.handedOver.IsZero() && c.now.Sub(c.handedOver) < fullPause || !c.mayHandOver() {
		return
	}
	to := c.successor()
	if to == raft.None {
		return
	}
	c.handedOver = c.now
	c.rn.TransferLeader(to)
	out.Events = append(out.Events, LeadershipHandedOver{To: to, Own: c.persist.estimate(c.now), Reason: fmt.Sprintf("this leader takes no writes: %v", full)})
}

// leaveSlowDisk hands leadership to a voter that stores entries much faster than this leader does.
func (c *Core) leaveSlowDisk(out *Output) {
	limit := c.opt.SlowDisk
	if limit <= 0 || c.role != raft.StateLeader || c.persist.slowFor(limit, c.opt.Tick) < slowStrikes {
		return
	}
	own := c.persist.estimate(c.now)
	if own <= limit || !c.handedOver.IsZero() && c.now.Sub(c.handedOver) < slowPause || !c.mayHandOver() {
		return
	}
	var to uint64
	var theirs time.Duration
	for _, p := range c.members {
		if p.ID == c.opt.ID || p.Learner || !p.Active || !p.Replicating || p.Match < c.commit ||
			c.opt.Transport.ActiveSince(p.ID).IsZero() || p.AckLatency*slowFactor > own {
			continue
		}
		if at := c.follower(p.ID).ack.at; at.IsZero() || c.now.Sub(at) > ackFresh {
			continue
		}
		if to == 0 || p.AckLatency < theirs {
			to, theirs = p.ID, p.AckLatency
		}
	}
	if to == 0 {
		return
	}
	c.handedOver = c.now
	c.rn.TransferLeader(to)
	out.Events = append(out.Events, LeadershipHandedOver{To: to, Own: own, Theirs: theirs,
		Reason: fmt.Sprintf("storing entries takes this leader longer than %v", limit)})
}
