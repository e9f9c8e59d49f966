package play

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	catchUpWithin = 60 * time.Second // of a new member, before it votes
	changePause   = 100 * time.Millisecond
	leaveWithin   = 5 * time.Second // of a removed member, to end by itself
)

func (p *player) add(ctx context.Context, _ []string) error {
	c := p.cluster
	if len(c.list()) >= maxMembers {
		return fmt.Errorf("there are %d members, and play runs no more: remove one first", maxMembers)
	}
	var next int
	c.locked(func() { next = c.last + 1 })
	m, err := c.newMember(next)
	if err != nil {
		return err
	}
	c.locked(func() { m.learner = true })
	var cluster string
	err = p.change(ctx, "add", func(ctx context.Context, client *clientv3.Client) error {
		r, err := client.MemberAddAsLearner(ctx, []string{peerURL(m.name)})
		if err != nil {
			return err
		}
		c.locked(func() { m.id = r.Member.GetID() })
		cluster = clusterText(r)
		return nil
	})
	if err != nil {
		return errors.Join(err, c.forget(m))
	}
	m.birth = birth{cluster, "existing"}
	if err := c.launch(m); err != nil {
		return errors.Join(err, p.takeOut(ctx, m), c.forget(m))
	}
	p.say("%s was added as a learner: it gets the data and has no vote yet.", m.name)
	return p.promote(ctx, m)
}

// change does f, a change of the members, and does it again while the leader finds it too risky: it wants to have been connected
// with the others for five seconds.
func (p *player) change(ctx context.Context, what string, f func(context.Context, *clientv3.Client) error) error {
	told := false
	err := p.call(ctx, what, callOptions{}, func(ctx context.Context, client *clientv3.Client) error {
		for {
			err := f(ctx, client)
			if !errors.Is(err, rpctypes.ErrUnhealthy) {
				return err
			}
			if !told {
				told = true
				p.say("Waiting until all members have been connected for 5 s: before that a change could endanger the majority …")
			}
			if !pause(ctx, changePause) {
				return err
			}
		}
	})
	switch q := p.cluster.quorum(); {
	case err == nil:
	case strings.Contains(err.Error(), rpctypes.ErrUnhealthy.Error()) && len(q.down) > 0,
		strings.Contains(err.Error(), rpctypes.ErrMemberNotEnoughStarted.Error()):
		cure := "Bring them back first, or remove one of them"
		if !q.majority() {
			cure = upper(q.cures())
		}
		return fmt.Errorf("%s was refused, for it could cost the majority while voters are missing (%s). %s", what, q.missing(), cure)
	}
	return err
}

// clusterText is the cluster as --initial-cluster has it. A member that has not started tells no name, but its URL does.
func clusterText(r *clientv3.MemberAddResponse) string {
	var parts []string
	for _, m := range r.Members {
		for _, u := range m.GetPeerURLs() {
			name := strings.TrimSuffix(strings.TrimPrefix(u, "unix://"), ".peer")
			parts = append(parts, name+"="+u)
		}
	}
	return strings.Join(parts, ",")
}

// promote makes a learner a voter when it has caught up.
func (p *player) promote(ctx context.Context, m *member) error {
	c := p.cluster
	var id uint64
	learner := false
	c.locked(func() { id, learner = m.id, m.learner })
	if !learner {
		return fmt.Errorf("%s votes already", m.name)
	}
	began := time.Now()
	promote := func(ctx context.Context, client *clientv3.Client) error {
		for {
			_, err := client.MemberPromote(ctx, id)
			switch {
			case !errors.Is(err, rpctypes.ErrMemberLearnerNotReady) && !errors.Is(err, rpctypes.ErrUnhealthy):
				return err
			case !p.runs(m):
				return errors.New(m.name + " ended before it had caught up, its log is " + m.logFile())
			case !pause(ctx, changePause):
				return err
			}
		}
	}
	err := p.callWithin(ctx, "promote", callOptions{}, catchUpWithin, promote)
	if err != nil {
		return fmt.Errorf("%w.\n%s stays a learner: promote %s tries again, remove %s takes it out", err, m.name, m.name, m.name)
	}
	c.locked(func() { m.learner = false })
	p.say("%s has caught up after %.1f s, and votes.", m.name, time.Since(began).Seconds())
	p.settle(ctx)
	return nil
}

func (p *player) remove(ctx context.Context, m *member) error {
	c := p.cluster
	if len(c.list()) == 1 {
		return fmt.Errorf("%s is the last member: quit ends the cluster", m.name)
	}
	c.locked(func() { m.leaving = true })
	if err := p.takeOut(ctx, m); err != nil {
		c.locked(func() { m.leaving = false })
		return err
	}
	how := ""
	if p.runs(m) && p.state(m) == string(running) {
		limit, cancel := context.WithTimeout(ctx, leaveWithin)
		select {
		case <-m.process.ended:
			how = " It heard of it and ended by itself."
		case <-limit.Done():
		}
		cancel()
	}
	if p.runs(m) {
		how = " It could not hear of it and was stopped."
		sig := syscall.SIGTERM
		if p.state(m) != string(running) {
			sig = syscall.SIGKILL
		}
		if err := c.end(ctx, m, stopped, sig); err != nil {
			return err
		}
	}
	if err := c.forget(m); err != nil {
		return fmt.Errorf("%s was removed, but not all of its data: %w", m.name, err)
	}
	p.say("%s was removed from the cluster for good, and its data deleted.%s", m.name, how)
	p.settle(ctx)
	return nil
}

// takeOut has the others strike the member off.
func (p *player) takeOut(ctx context.Context, m *member) error {
	var id uint64
	p.cluster.locked(func() { id = m.id })
	if id == 0 {
		return fmt.Errorf("%s has not answered yet, so its ID is not known: wait until status shows it", m.name)
	}
	return p.change(ctx, "remove", func(ctx context.Context, client *clientv3.Client) error {
		_, err := client.MemberRemove(ctx, id)
		if errors.Is(err, rpctypes.ErrMemberNotFound) { // an attempt that seemed to fail has succeeded
			return nil
		}
		return err
	})
}

func (p *player) moveLeader(ctx context.Context, m *member) error {
	c := p.cluster
	leader := c.leader()
	switch {
	case leader == nil:
		return fmt.Errorf("no member leads now: %s", c.quorum().words())
	case leader == m:
		return fmt.Errorf("%s leads already", m.name)
	case p.cure(m) != "":
		return fmt.Errorf("%s cannot lead: it is %s. Type %s", m.name, p.state(m), p.cure(m))
	}
	var id uint64
	c.locked(func() { id = m.id })
	began := time.Now()
	err := p.call(ctx, "move-leader", callOptions{at: leader.name}, func(ctx context.Context, client *clientv3.Client) error {
		_, err := client.MoveLeader(ctx, id)
		return err
	})
	if err != nil {
		return err
	}
	p.say("%s handed over to %s in %s.", leader.name, m.name, millis(time.Since(began)))
	c.settle(ctx)
	p.say("%s", c.quorum().words())
	return nil
}
