package server

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/config"
)

// stepClock is a fake clock that is turned in small steps, each only when those
// who wait for tickers have taken the ring before. So nobody misses one, and no
// member takes the hurry for a standstill of its own.
type stepClock struct {
	*clock.Fake
	mu      sync.Mutex
	tickers map[*stepTicker]struct{}
}

type stepTicker struct {
	clock.Ticker
	clock *stepClock
}

func newStepClock() *stepClock {
	return &stepClock{Fake: clock.NewFake(time.Unix(1_700_000_000, 0)), tickers: map[*stepTicker]struct{}{}}
}

// NewTicker implements clock.Clock.
func (c *stepClock) NewTicker(d time.Duration) clock.Ticker {
	t := &stepTicker{c.Fake.NewTicker(d), c}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tickers[t] = struct{}{}
	return t
}

// Stop implements clock.Ticker.
func (t *stepTicker) Stop() {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	delete(t.clock.tickers, t)
	t.Ticker.Stop()
}

func (c *stepClock) taken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t := range c.tickers {
		if len(t.C()) > 0 {
			return false
		}
	}
	return true
}

// turn turns the clock by d.
func (c *stepClock) turn(d time.Duration) {
	for d > 0 {
		step := min(d, 100*time.Millisecond)
		d -= step
		c.Advance(step)
		for !c.taken() {
			runtime.Gosched()
		}
	}
}

// life is one life of a member on a disk that a power cut can take away.
type life struct {
	t      *testing.T
	disk   *vfs.MemFS
	clock  *stepClock
	member *Member
	client *clientv3.Client
	start  time.Duration // what its clock was turned until it served
}

// live starts a member; its clock begins anew, as that of another machine might.
func live(t *testing.T, disk *vfs.MemFS) *life {
	t.Helper()
	cfg, err := config.Parse("engram", []string{
		"--data-dir=data", "--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:0",
		"--listen-peer-urls=http://127.0.0.1:0", "--disk-reserve-bytes=0",
	}, nil)
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	l := &life{t: t, disk: disk, clock: newStepClock()}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	// The only voter needs no ticks to be elected, but its start looks now and then
	// how far it is.
	began, started := l.clock.Now(), make(chan struct{})
	go func() {
		defer close(started)
		l.member, err = StartWith(ctx, cfg, slog.New(slog.DiscardHandler), Seams{FS: disk, Clock: l.clock})
	}()
	for waits := true; waits; {
		select {
		case <-started:
			waits = false
		case <-time.After(2 * time.Millisecond):
			l.clock.turn(10 * time.Millisecond)
		}
	}
	l.start = l.clock.Now().Sub(began)
	if err != nil {
		t.Fatal(err)
	}
	l.client = client(t, l.member)
	return l
}

// cut takes the power away: what was not synced is gone. The put makes sure that
// what was proposed before it is. The member itself is ended afterwards, which
// changes nothing for the next one.
func (l *life) cut() *vfs.MemFS {
	l.t.Helper()
	if _, err := l.client.Put(l.t.Context(), "mark", ""); err != nil {
		l.t.Fatal(err)
	}
	left := l.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 0, RNG: rand.New(rand.NewPCG(1, 1))})
	l.end()
	return left
}

func (l *life) end() {
	l.t.Helper()
	_ = l.client.Close()
	stop(l.t, l.member)
}

func (l *life) grant(ttl int64) clientv3.LeaseID {
	l.t.Helper()
	g, err := l.client.Grant(l.t.Context(), ttl)
	if err != nil {
		l.t.Fatal(err)
	}
	return g.ID
}

// left wants a lease to live that long, to the second; one that is older than
// this life may have lost what the start took.
func (l *life) left(id clientv3.LeaseID, want int64) {
	l.t.Helper()
	got, err := l.client.TimeToLive(l.t.Context(), id)
	if err != nil {
		l.t.Fatal(err)
	}
	if got.TTL < want-1-int64(l.start/time.Second) && want > 0 || got.TTL > want+1 {
		l.t.Errorf("lease of %d s lives %d s more, it should be %d", got.GrantedTTL, got.TTL, want)
	}
}

// TestRemainingTTLOverRestarts: what is left of a long lease is in the log every
// five minutes, and a member that comes back after a power cut goes on from there
// rather than from what was granted. As in etcd with its LeaseCheckpoint on, the
// time in which no member ran does not count.
func TestRemainingTTLOverRestarts(t *testing.T) {
	l := live(t, vfs.NewCrashableMem())
	long := l.grant(600)
	if _, err := l.client.Put(t.Context(), "a", "1", clientv3.WithLease(long)); err != nil {
		t.Fatal(err)
	}
	l.clock.turn(200 * time.Second)
	l.left(long, 400)

	// No checkpoint is due yet: it lives as long as was granted, and an election
	// time-out.
	l = live(t, l.cut())
	l.left(long, 601)
	l.clock.turn(310 * time.Second)
	l.left(long, 291)
	young := l.grant(600)

	// Now there is one, of when 301 were left.
	l = live(t, l.cut())
	l.left(long, 302)
	l.left(young, 601)

	// A renewal takes it back.
	if kept, err := l.client.KeepAliveOnce(t.Context(), long); err != nil || kept.TTL != 600 {
		t.Fatal(kept, err)
	}
	l.left(long, 600)
	l = live(t, l.cut())
	l.left(long, 601)

	// Checkpointed again and then left alone, it ends: after what was left when
	// the member went down, and not before.
	l.clock.turn(310 * time.Second)
	l = live(t, l.cut())
	defer l.end()
	l.left(long, 302)
	l.clock.turn(300*time.Second - l.start)
	if got, err := l.client.Get(t.Context(), "a"); err != nil || len(got.Kvs) != 1 {
		t.Fatal("its key is gone too early", got, err)
	}
	gone := l.client.Watch(t.Context(), "a")
	l.clock.turn(l.start + 4*time.Second)
	if w := <-gone; len(w.Events) != 1 || w.Events[0].Type != clientv3.EventTypeDelete {
		t.Fatalf("its key did not go: %+v", w)
	}
	l.left(long, -1)
}
