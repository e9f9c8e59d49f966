package play

import (
	"context"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	askWithin   = time.Second            // of one member, how it is
	settleLimit = 15 * time.Second       // of waiting until the members agree on a leader
	settlePause = 50 * time.Millisecond  // between two looks
	lookPause   = 500 * time.Millisecond // between two looks when nobody waits
)

// sight is what a member last said of itself.
type sight struct {
	answered bool // to the last question
	err      error
	id       uint64
	leader   uint64 // whom it takes for the leader, 0 for nobody
	term     uint64
	applied  uint64
	revision int64
	keys     int64
	dbBytes  int64
	learner  bool
	errors   []string
}

func (s *sight) leads() bool { return s.answered && s.leader != 0 && s.leader == s.id }

// look asks all members that run how they are, side by side.
func (c *cluster) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	var asking sync.WaitGroup
	for _, m := range c.which(func(m *member) bool { return m.condition == running }) {
		asking.Go(func() {
			c.mu.Lock()
			p, url := m.process, m.clientURL()
			c.mu.Unlock()
			s := ask(ctx, m.client, url)
			c.mu.Lock()
			defer c.mu.Unlock()
			if m.process != p { // started again meanwhile
				return
			}
			if !s.answered && ctx.Err() == context.Canceled {
				return
			}
			m.seen = s
			if s.answered {
				m.id = s.id
			}
		})
	}
	asking.Wait()
	c.lookWhoVotes(ctx)
}

// lookWhoVotes asks the leader who votes. A member that was promoted may not have heard of it itself, so what it says does not count.
func (c *cluster) lookWhoVotes(ctx context.Context) {
	leader := c.leader()
	if leader == nil {
		return
	}
	list, err := leader.client.MemberList(ctx) // linearizable: what a command has changed is in it
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, known := range list.Members {
		for _, m := range c.members {
			if m.id == known.GetID() {
				m.learner = known.GetIsLearner()
			}
		}
	}
}

func ask(ctx context.Context, client *clientv3.Client, url string) sight {
	status, err := client.Status(ctx, url)
	if err != nil {
		return sight{err: err}
	}
	s := sight{
		answered: true, id: status.Header.GetMemberId(), leader: status.Leader, term: status.RaftTerm, applied: status.RaftAppliedIndex,
		revision: status.Header.GetRevision(), dbBytes: status.DbSize, learner: status.IsLearner, errors: status.Errors,
	}
	keys, err := client.Get(ctx, "", clientv3.WithFromKey(), clientv3.WithCountOnly(), clientv3.WithSerializable())
	if err != nil {
		s.keys = -1
		return s
	}
	s.keys = keys.Count
	return s
}

// leader is the member that leads those that can reach each other, nil if none is known to.
func (c *cluster) leader() *member {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leaderNow()
}

// leaderNow is leader for who holds c.mu. Of two that say they lead, the one of the lower term has not heard yet.
func (c *cluster) leaderNow() *member {
	var leader *member
	for _, m := range c.members {
		if m.reachable() && m.seen.leads() && (leader == nil || m.seen.term > leader.seen.term) {
			leader = m
		}
	}
	return leader
}

// settled says that the members that can reach each other have answered and agree on a leader among them.
func (c *cluster) settled() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	leader := c.leaderNow()
	if leader == nil {
		return false
	}
	for _, m := range c.members {
		if m.reachable() && (!m.seen.answered || m.seen.leader != leader.seen.id || m.seen.term != leader.seen.term) {
			return false
		}
	}
	return true
}

// settle looks again and again until the members agree on a leader, which only a majority can. It gives up after a while,
// when there is no majority, or when ctx ends.
func (c *cluster) settle(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, settleLimit)
	defer cancel()
	for {
		c.look(ctx)
		if !c.quorum().majority() {
			return false
		}
		if c.settled() {
			return true
		}
		if !pause(ctx, settlePause) {
			return false
		}
	}
}

// pause returns false if ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
