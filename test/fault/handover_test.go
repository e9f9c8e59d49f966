package fault

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/cluster"
	"github.com/engram-kv/engram/test/internal/stall"
)

const (
	// patience is how long followers wait for a leader, and then as long again at most: so long that no busy machine passes for it.
	patience  = 5 * time.Second
	putEvery  = 2 * time.Millisecond // through each follower
	stopTurns = 3
)

// TestGracefulStop stops the leader with SIGTERM under a steady load of puts through the others: it hands over first, so that nobody waits until
// they miss it, and passes on to the next one what is passed on to it just then: each put is answered.
func TestGracefulStop(t *testing.T) {
	b := gather(t, 3, func(c *cluster.Cluster) {
		c.Flags = []string{fmt.Sprintf("--heartbeat-interval=%d", patience.Milliseconds()/10), fmt.Sprintf("--election-timeout=%d", patience.Milliseconds())}
	})
	stalls, err := stall.Begin()
	b.must(err)
	defer func() { b.must(stalls.Close()) }()
	for turn := range stopTurns {
		leader := b.leader()
		p := b.puts(b.followers())
		b.must(p.answers(b.ctx, calm))
		began := time.Now()
		b.must(leader.Stop())
		ended := time.Now()
		b.must(p.answers(b.ctx, calm))
		gap, err := p.stop(began)
		machine := stalls.Longest(began)
		b.Logf("turn %d: %v stopped within %v; for %v no put was answered, the machine stood still for %v", turn, leader, ended.Sub(began), gap, machine)
		b.must(err)
		if gap > patience/5+machine {
			b.Errorf("when the leader %v stopped no put was answered for %v: it did not hand over, want %v at most beside the %v for which the machine stood still",
				leader, gap, patience/5, machine)
		}
		b.must(leader.Restart(b.ctx))
		b.must(b.whole())
	}
	_, err = b.c.CheckHash(b.ctx)
	b.must(err)
}

// puts is a steady load: none waits for another.
type puts struct {
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu     sync.Mutex
	acked  []time.Time
	failed error
	more   chan struct{} // closed and replaced at each answer
}

func (b *trial) puts(through []*cluster.Member) *puts {
	b.Helper()
	p := &puts{more: make(chan struct{})}
	begin, cancel := context.WithCancel(b.ctx)
	p.cancel = cancel
	b.Cleanup(cancel)
	for _, m := range through {
		client, err := m.Client()
		b.must(err)
		p.work.Go(func() {
			tick := time.NewTicker(putEvery)
			defer tick.Stop()
			for {
				select {
				case <-begin.Done():
					return
				case <-tick.C:
				}
				p.work.Go(func() { p.put(b.ctx, client, m.Name) }) // there are no more than the ticks of the load's time
			}
		})
	}
	return p
}

func (p *puts) put(ctx context.Context, client *clientv3.Client, key string) {
	_, err := client.Put(ctx, key, time.Now().String())
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.failed = errors.Join(p.failed, err)
		return
	}
	p.acked = append(p.acked, time.Now())
	close(p.more)
	p.more = make(chan struct{})
}

// answers waits for so many more.
func (p *puts) answers(ctx context.Context, n int) error {
	for goal := -1; ; {
		p.mu.Lock()
		have, more := len(p.acked), p.more
		p.mu.Unlock()
		if goal < 0 {
			goal = have + n
		}
		if have >= goal {
			return nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return fmt.Errorf("%d answers are missing: %w", goal-have, ctx.Err())
		}
	}
}

// stop ends the load when all is answered and returns for how long no put was answered since a time, at most, and what failed.
func (p *puts) stop(since time.Time) (gap time.Duration, failed error) {
	p.cancel()
	p.work.Wait()
	for _, t := range p.acked {
		if t.After(since) {
			gap, since = max(gap, t.Sub(since)), t
		}
	}
	return gap, p.failed
}
