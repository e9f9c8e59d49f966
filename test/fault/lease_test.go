package fault

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
)

const (
	heldLeases = 40              // of each kind: more than a leader revokes at once
	keptFor    = 5 * time.Second // the TTL of those that are renewed right up to the stop, and again after it
	leftFor    = 8 * time.Second // of those that are never renewed

	pausedHeartbeat = 300 * time.Millisecond
	pausedElection  = 3 * time.Second

	// lessorPass is how often a leader looks at its leases: that much of a standstill it cannot tell from its usual rest.
	lessorPass = 500 * time.Millisecond
)

// TestPausedLeader has a leader stand still for longer than its leases live. Nobody could renew them with it meanwhile, so that none may be revoked
// for it: alone, a member gives each lease what it had left; beside others, the leader that these have elected gives each its time anew. A lease
// that its client then renews at once lives on, and one that is left alone ends, but not sooner than that.
func TestPausedLeader(t *testing.T) {
	p, err := program()
	if err != nil {
		t.Fatal(err)
	}
	if p.Name != "engram" {
		return // it is a promise of Engram's: etcd's leader revokes as soon as it goes on, though another leads by then
	}
	for _, members := range []int{1, 3} {
		t.Run(fmt.Sprintf("members=%d", members), func(t *testing.T) { pausedLeader(t, members) })
	}
}

func pausedLeader(t *testing.T, members int) {
	b := gather(t, members, func(c *cluster.Cluster) {
		c.Flags = []string{fmt.Sprintf("--heartbeat-interval=%d", pausedHeartbeat.Milliseconds()), fmt.Sprintf("--election-timeout=%d", pausedElection.Milliseconds())}
	})
	leader := b.leader()
	kept, left := b.hold(keptFor), b.hold(leftFor)
	b.must(each(kept, b.keepAlive))
	b.must(leader.Pause())
	stopped := time.Now()
	longest := keptFor
	var elected time.Time // not sooner than this
	if members == 1 {
		longest = leftFor
	} else {
		elected = b.elected(leader, stopped)
	}
	b.until(stopped.Add(longest + lessorPass)) // by the clock of the one that stands still these have ended

	resumed := time.Now()
	lives := func(l *held) time.Time { // when it may end, if it is not renewed again
		if members == 1 {
			return resumed.Add(l.renewed.Add(l.ttl).Sub(stopped) - lessorPass)
		}
		return elected.Add(pausedElection + l.ttl)
	}
	renewed := make(chan error, 1)
	go func() { // those through the leader wait for it already
		renewed <- each(kept, func(l *held) error {
			until := lives(l)
			for {
				err := b.keepAlive(l)
				if err == nil {
					return nil
				}
				if errors.Is(err, rpctypes.ErrLeaseNotFound) && time.Now().Before(until) {
					return broken.Errorf("%v after the leader went on, %v before it may end: %w", time.Since(resumed), time.Until(until), err)
				}
				if time.Now().After(until) {
					return fmt.Errorf("not renewed %v after the leader went on, when it may end: %w", time.Since(resumed), err)
				}
			}
		})
	}()
	b.must(errors.Join(leader.Continue(), <-renewed))

	// Later the test's clock may be ahead of an answer that was right, so what is judged is that a lease is there while it must be.
	ended := 0
	for ended < len(left) {
		b.must(each(kept, b.keepAlive))
		gone := make([]bool, len(left))
		b.must(each(left, func(l *held) error {
			r, err := l.client.TimeToLive(b.ctx, l.id)
			if err != nil {
				return err
			}
			if gone[l.n] = r.TTL < 0; gone[l.n] && time.Now().Before(lives(l)) {
				return broken.Errorf("it has ended %v after the leader went on, %v too soon", time.Since(resumed), time.Until(lives(l)))
			}
			return nil
		}))
		ended = 0
		for _, g := range gone {
			if g {
				ended++
			}
		}
		b.until(time.Now().Add(lessorPass / 2)) // leases end by the clock
	}
	b.Logf("the leader stood still for %v; all that were left alone had ended %v later", resumed.Sub(stopped), time.Since(resumed))
	b.must(each(kept, b.keepAlive))
	for _, m := range b.c.Members() {
		client, err := m.Client()
		b.must(err)
		r, err := client.Get(b.ctx, "", clientv3.WithPrefix())
		b.must(err)
		if len(r.Kvs) != len(kept) {
			b.Error(broken.Errorf("%v has %d keys, want those of the %d leases that were kept alive", m, len(r.Kvs), len(kept)))
		}
	}
	_, err := b.c.CheckHash(b.ctx)
	b.must(err)
}

// held is a lease with a key.
type held struct {
	n       int // of its kind
	id      clientv3.LeaseID
	ttl     time.Duration
	client  *clientv3.Client // of the member that is asked for it
	renewed time.Time        // not before this
}

// hold grants leases, through all members.
func (b *trial) hold(ttl time.Duration) []*held {
	b.Helper()
	all := make([]*held, heldLeases)
	for i := range all {
		client, err := b.c.Members()[i%len(b.c.Members())].Client()
		b.must(err)
		all[i] = &held{n: i, ttl: ttl, client: client}
	}
	b.must(each(all, func(l *held) error {
		l.renewed = time.Now()
		r, err := l.client.Grant(b.ctx, int64(l.ttl/time.Second))
		if err != nil {
			return err
		}
		l.id = r.ID
		_, err = l.client.Put(b.ctx, fmt.Sprintf("%v/%d", l.ttl, l.n), "", clientv3.WithLease(l.id))
		return err
	}))
	return all
}

func (b *trial) keepAlive(l *held) error {
	began := time.Now()
	r, err := l.client.KeepAliveOnce(b.ctx, l.id)
	if err != nil {
		return err
	}
	if got := time.Duration(r.TTL) * time.Second; got != l.ttl {
		return broken.Errorf("renewed for %v, granted for %v", got, l.ttl)
	}
	l.renewed = began
	return nil
}

// each does something with all leases at once.
func each(all []*held, f func(*held) error) error {
	errs := make([]error, len(all))
	var work sync.WaitGroup
	for i, l := range all {
		work.Go(func() {
			if err := f(l); err != nil {
				errs[i] = fmt.Errorf("lease %d of %v: %w", l.n, l.ttl, err)
			}
		})
	}
	work.Wait()
	return errors.Join(errs...)
}

// elected waits until the others have another leader than the one that stands still since stopped, and returns a time at which they did not
// yet have one.
func (b *trial) elected(old *cluster.Member, stopped time.Time) time.Time {
	b.Helper()
	others := b.c.Running()
	for notYet := stopped; ; {
		asked, all := time.Now(), 0
		for _, m := range others {
			s, err := m.Status(b.ctx)
			b.must(err)
			if s.Leader != 0 && s.Leader != old.ID {
				all++
			}
		}
		switch all {
		case 0:
			notYet = asked
		case len(others):
			return notYet
		}
		b.until(asked.Add(pausedHeartbeat / 10)) // of other processes: there is no event to wait for
	}
}

// until waits for a time.
func (b *trial) until(t time.Time) {
	b.Helper()
	select {
	case <-time.After(time.Until(t)):
	case <-b.ctx.Done():
		b.Fatal(b.ctx.Err())
	}
}
