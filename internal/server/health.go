package server

import (
	"fmt"
	"time"

	"github.com/engram-kv/engram/internal/member"
)

// healthInterval is for how long a member must have been connected to count as
// such when members are changed.
const healthInterval = 5 * time.Second

// health is what the rules about changing members look at: the strict
// reconfiguration checks (peer-protocol.md, section 4.6).
type health struct {
	members   []*member.Member
	connected func(id uint64) bool // this member always is
}

// health takes stock.
func (c *membership) health() health {
	limit := c.clock.Now().Add(-healthInterval)
	return health{members: c.root().List(), connected: func(id uint64) bool {
		since := c.active(id)
		return id == c.self || !since.IsZero() && !since.After(limit)
	}}
}

// voters counts those who vote but for one, and of them who has started and who
// is connected.
func (h health) voters(but uint64) (all, started, connected int) {
	for _, m := range h.members {
		if m.IsLearner || m.ID == but {
			continue
		}
		all++
		if m.Name != "" {
			started++
		}
		if h.connected(m.ID) {
			connected++
		}
	}
	return all, started, connected
}

// mayAdd judges the addition of a member. Where etcd wants a learner's addition
// to be as safe as a voter's, here it is enough that a quorum is connected: a
// learner changes no quorum, and it is what a dead member is replaced with.
func (h health) mayAdd(learner bool) error {
	all, started, connected := h.voters(0)
	if learner {
		return h.enough("connected", connected, all/2+1, all, member.ErrUnhealthy)
	}
	after := all + 1
	if started != 1 || after != 2 {
		if err := h.enough("started", started, after/2+1, all, member.ErrNotEnoughStarted); err != nil {
			return err
		}
	}
	if all == 1 {
		return nil
	}
	return h.enough("connected", connected, (all+1)/2+1, all, member.ErrUnhealthy)
}

// mayRemove judges the removal of a member.
func (h health) mayRemove(id uint64) error {
	for _, m := range h.members {
		if m.ID == id && m.IsLearner {
			return nil
		}
	}
	rest, started, _ := h.voters(id)
	if err := h.enough("started and staying", started, rest/2+1, rest, member.ErrNotEnoughStarted); err != nil {
		return err
	}
	if !h.connected(id) {
		return nil // it does not take part anyway
	}
	all, _, connected := h.voters(0)
	return h.enough("connected and staying", connected-1, 1+(all-1)/2, all, member.ErrUnhealthy)
}

// mayPromote judges a learner's becoming a voter, on the leader.
func (h health) mayPromote() error {
	all, started, _ := h.voters(0)
	return h.enough("started, the learner included,", started+1, (all+1)/2+1, all+1, member.ErrNotEnoughStarted)
}

// enough is nil if there are as many voters as needed.
func (h health) enough(what string, have, need, of int, sentinel error) error {
	if have >= need {
		return nil
	}
	return fmt.Errorf("%d of %d voters are %s, %d are needed (start the others first, or remove those that will not come back): %w", have, of, what, need, sentinel)
}
