package edge

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/edge/member"
)

// The good client puts, reads what it has put and watches, at a rate that is fixed whatever the answers take.
const (
	goodEvery  = 10 * time.Millisecond
	goodWithin = 30 * time.Second // a call; what it may take is judged by the side
	goodPrefix = "good/"
)

// good is a client that means well.
type good struct {
	client *clientv3.Client
	halt   chan struct{} // closed: no more calls
	silent atomic.Bool   // for a while
	stop   context.CancelFunc
	calls  sync.WaitGroup

	mu        sync.Mutex
	latencies []time.Duration // from the moment at which a put was due to the answer of the read that followed it
	errs      []error
	puts      int
	events    int
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
	g := &good{client: dial(t), halt: make(chan struct{}), stop: stop}
	watch := g.client.Watch(clientv3.WithRequireLeader(ctx), goodPrefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	if first, ok := <-watch; !ok || first.Err() != nil {
		t.Fatalf("the good client's watch was not created: %v", first.Err())
	}
	go func() {
		for r := range watch {
			g.mu.Lock()
			if g.events += len(r.Events); r.Err() != nil && ctx.Err() == nil {
				g.errs = append(g.errs, fmt.Errorf("watch: %w", r.Err()))
			}
			g.mu.Unlock()
		}
	}()
	g.calls.Go(func() {
		tick := time.NewTicker(goodEvery)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-g.halt:
				return
			case <-ctx.Done():
				return
			case due := <-tick.C:
				if !g.silent.Load() {
					g.calls.Go(func() { g.call(i, due) })
				}
			}
		}
	})
	return g
}

// call puts and reads back.
func (g *good) call(i int, due time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), goodWithin)
	defer cancel()
	key := fmt.Sprintf("%s%03d", goodPrefix, i%1000)
	value := fmt.Sprint(i)
	put, err := g.client.Put(ctx, key, value)
	if err == nil {
		var got *clientv3.GetResponse
		got, err = g.client.Get(ctx, key)
		if err == nil && (len(got.Kvs) != 1 || got.Kvs[0].ModRevision < put.Header.Revision) {
			err = fmt.Errorf("put at revision %d, and read %v after it", put.Header.Revision, got.Kvs)
		}
	}
	took := time.Since(due)
	g.mu.Lock()
	defer g.mu.Unlock()
	if err != nil {
		g.errs = append(g.errs, fmt.Errorf("after %v: %w", took, err))
		return
	}
	g.puts++
	g.latencies = append(g.latencies, took)
}

// lap is what was seen since the last lap.
func (g *good) lap() (latencies []time.Duration, errs []error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	latencies, errs = g.latencies, g.errs
	g.latencies, g.errs = nil, nil
	slices.Sort(latencies)
	return latencies, errs
}

// end stops, and checks that the watch has seen each put.
func (g *good) end(t testing.TB) {
	t.Helper()
	defer g.stop()
	close(g.halt)
	g.calls.Wait()
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
}

// share returns the latency that so many per thousand do not exceed.
func share(sorted []time.Duration, perThousand int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, len(sorted)*perThousand/1000)]
}
