package edge

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/edge/member"
	"github.com/engram-kv/engram/test/internal/broken"
)

// The good client puts, reads what it has put and watches, at a rate that is fixed whatever the answers take.
const (
	goodEvery  = 10 * time.Millisecond
	goodWithin = 30 * time.Second // a call; what it may take is judged by the side
	goodPrefix = "good/"
)

// good is a client that means well.
type good struct {
	client  *clientv3.Client
	halt    chan struct{} // closed: no more calls
	calling sync.WaitGroup
	stop    context.CancelFunc

	mu     sync.Mutex
	silent bool // for a while
	lap    *lap
	puts   int
	events int
}

// lap is what the good client got in a time, and of the calls that were due in it.
type lap struct {
	began     time.Time
	took      time.Duration   // set in the end, without what it was silent
	hushed    time.Duration   // that it was silent
	calls     sync.WaitGroup  // without an answer
	latencies []time.Duration // from the moment at which a put was due to the answer of the read that followed it; sorted in the end
	errs      []error
}

// beGood begins, over TLS or not, and goes on until end.
func beGood(t testing.TB, m *member.Member, secure bool) *good {
	t.Helper()
	dial := m.Dial
	if secure {
		dial = func(t testing.TB, change ...func(*clientv3.Config)) *clientv3.Client {
			return m.DialTLS(t, "", change...)
		}
	}
	ctx, stop := context.WithCancel(context.Background()) // the test's own ends before its cleanups
	t.Cleanup(stop)
	g := &good{client: dial(t), halt: make(chan struct{}), stop: stop, lap: &lap{began: time.Now()}}
	watch := g.client.Watch(clientv3.WithRequireLeader(ctx), goodPrefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	if first, ok := <-watch; !ok || first.Err() != nil {
		t.Fatalf("the good client's watch was not created: %v", first.Err())
	}
	go func() {
		for r := range watch {
			g.mu.Lock()
			if g.events += len(r.Events); r.Err() != nil && ctx.Err() == nil {
				g.lap.errs = append(g.lap.errs, fmt.Errorf("watch: %w", r.Err()))
			}
			g.mu.Unlock()
		}
	}()
	g.calling.Go(func() {
		tick := time.NewTicker(goodEvery)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-g.halt:
				return
			case <-ctx.Done():
				return
			case due := <-tick.C:
				g.mu.Lock()
				if l := g.lap; !g.silent {
					l.calls.Go(func() { g.call(l, i, due) })
				}
				g.mu.Unlock()
			}
		}
	})
	return g
}

// call puts and reads back.
func (g *good) call(l *lap, i int, due time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), goodWithin)
	defer cancel()
	key := fmt.Sprintf("%s%03d", goodPrefix, i%1000)
	value := fmt.Sprint(i)
	put, err := g.client.Put(ctx, key, value)
	if err == nil {
		var got *clientv3.GetResponse
		got, err = g.client.Get(ctx, key)
		if err == nil && (len(got.Kvs) != 1 || got.Kvs[0].ModRevision < put.Header.Revision) {
			err = broken.Errorf("put at revision %d, and read %v after it", put.Header.Revision, got.Kvs)
		}
	}
	took := time.Since(due)
	g.mu.Lock()
	defer g.mu.Unlock()
	if err != nil {
		l.errs = append(l.errs, fmt.Errorf("after %v: %w", took, err))
		return
	}
	g.puts++
	l.latencies = append(l.latencies, took)
}

// next ends the lap and begins another. It waits for the answers of the calls that were due in the one that ends, which a member that
// stood still at its end has not given yet.
func (g *good) next() *lap {
	g.mu.Lock()
	l := g.lap
	l.took = time.Since(l.began) - l.hushed
	g.lap = &lap{began: time.Now()}
	g.mu.Unlock()
	l.calls.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	slices.Sort(l.latencies)
	return l
}

// hush keeps it from calling until speak is called, in the same lap.
func (g *good) hush() (speak func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	began := time.Now()
	g.silent = true
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.silent = false
		g.lap.hushed += time.Since(began)
	}
}

// end stops, checks that the watch has seen each put, and returns the last lap.
func (g *good) end(t testing.TB) *lap {
	t.Helper()
	defer g.stop()
	close(g.halt)
	g.calling.Wait()
	last := g.next()
	deadline := time.Now().Add(goodWithin)
	for {
		g.mu.Lock()
		puts, events := g.puts, g.events
		g.mu.Unlock()
		if events >= puts {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("the good client's watch saw %d of %d puts", events, puts)
			break
		}
		time.Sleep(poll)
	}
	return last
}

// share returns the latency that so many per thousand do not exceed.
func share(sorted []time.Duration, perThousand int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, len(sorted)*perThousand/1000)]
}
