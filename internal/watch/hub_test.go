package watch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/mvcc"
)

// check verifies the tree.
func (m *matcher) check() {
	var nodes []*group
	var walk func(g *group)
	walk = func(g *group) {
		if g == nil {
			return
		}
		walk(g.left)
		nodes = append(nodes, g)
		walk(g.right)
		high := g.high
		if g.update(); compareEnds(high, g.high) != 0 {
			broken("range [%q, %q) has highest end %q, its tree says %q", g.key, g.end, g.high, high)
		}
		for _, c := range [...]*group{g.left, g.right} {
			if c != nil && c.priority > g.priority {
				broken("range [%q, %q) lies above one of higher priority", g.key, g.end)
			}
		}
	}
	walk(m.tree)
	if !slices.IsSortedFunc(nodes, func(a, b *group) int { return a.compare(b.span) }) {
		broken("ranges are out of order")
	}
	if len(nodes)+len(m.keys) != len(m.all) {
		broken("%d ranges and %d keys in %d groups", len(nodes), len(m.keys), len(m.all))
	}
}

// TestMatcher compares the matcher with a plain list while ranges come and go.
func TestMatcher(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	m := newMatcher(live)
	var all []*watcher
	key := func() []byte { return fmt.Appendf(nil, "%03d", r.IntN(500)) }
	for i := range 6000 {
		if len(all) > 0 && r.IntN(100) < 45 {
			at := r.IntN(len(all))
			m.remove(all[at])
			all = slices.Delete(all, at, at+1)
		} else {
			ends := [][]byte{nil, {0}, key(), key()}
			if s, ok := newSpan(key(), ends[r.IntN(len(ends))]); ok {
				w := &watcher{span: s, filter: filter{prevKV: r.IntN(2) == 0}}
				m.add(w)
				all = append(all, w)
			}
		}
		if i%50 != 0 {
			continue
		}
		m.check()
		k := key()
		var want, got []*watcher
		for _, w := range all {
			if covers(w.span, k) {
				want = append(want, w)
			}
		}
		m.each(k, func(g *group) {
			got = append(got, g.members...)
			n := 0
			for _, w := range g.members {
				if w.prevKV {
					n++
				}
			}
			if n != g.wantPrev {
				t.Fatalf("%d members want previous values, the group says %d", n, g.wantPrev)
			}
		})
		byAddress := func(ws []*watcher) map[*watcher]bool {
			set := map[*watcher]bool{}
			for _, w := range ws {
				set[w] = true
			}
			return set
		}
		if len(got) != len(want) || len(byAddress(got)) != len(want) {
			t.Fatalf("%d watchers match %s, want %d", len(got), k, len(want))
		}
		for w := range byAddress(want) {
			if !byAddress(got)[w] {
				t.Fatalf("[%s, %s) does not match %s", w.span.key, w.span.end, k)
			}
		}
	}
	if len(m.watchers()) != len(all) || m.count != len(all) {
		t.Fatalf("%d watchers, want %d", m.count, len(all))
	}
}

// failingSource is a disk that fails.
type failingSource struct {
	*fakeStore
	history, previous error
}

func (f failingSource) History(ctx context.Context, from, to int64, maxBytes int, fn func(mvcc.Event)) (int64, error) {
	if f.history != nil {
		return 0, f.history
	}
	return f.fakeStore.History(ctx, from, to, maxBytes, fn)
}

func (f failingSource) Previous(events []mvcc.Event, found func(int, []byte)) error {
	if f.previous != nil {
		return f.previous
	}
	return f.fakeStore.Previous(events, found)
}

// TestRunEndsWithTheDisk checks that a failure is not passed over: a gap would
// look like silence to clients.
func TestRunEndsWithTheDisk(t *testing.T) {
	broken := errors.New("bad block")
	for name, source := range map[string]failingSource{
		"history":  {fakeStore: newFakeStore(), history: broken},
		"previous": {fakeStore: newFakeStore(), previous: broken},
	} {
		t.Run(name, func(t *testing.T) {
			put := func() []mvcc.Event { return source.apply(op{[]byte("a"), []byte("1")}) }
			put() // not in memory
			h := New(Options{Source: source})
			if err := h.NewStream(newFakeSink(10)).Create(Request{Key: []byte("a"), PrevKV: true, Start: 2}); err != nil {
				t.Fatal(err)
			}
			if name == "previous" {
				if err := h.NewStream(newFakeSink(10)).Create(Request{Key: []byte("a"), PrevKV: true}); err != nil {
					t.Fatal(err)
				}
				h.publish(3, put())
			}
			if err := h.Run(t.Context()); !errors.Is(err, broken) {
				t.Fatalf("Run returned %v", err)
			}
		})
	}
}

// TestRunNoticesProgress turns the clock of a running hub.
func TestRunNoticesProgress(t *testing.T) {
	store, fake := newFakeStore(), clock.NewFake(time.Unix(0, 0))
	h := New(Options{Source: store, Clock: fake, ProgressInterval: time.Minute})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	sink := newFakeSink(10)
	if err := h.NewStream(sink).Create(Request{Key: []byte("a"), ProgressNotify: true}); err != nil {
		t.Fatal(err)
	}
	<-sink.arrived
	if rs, _ := sink.recv(1); !rs[0].Created {
		t.Fatal("no created response")
	}
	for range 3 {
		// Before the interval is over there is none, after a tenth more there must be.
		fake.WaitAlarms(1)
		fake.Advance(time.Minute - time.Second)
		fake.WaitAlarms(1)
		select {
		case <-sink.arrived:
			t.Fatal("a notice came early")
		default:
		}
		fake.Advance(7 * time.Second)
		<-sink.arrived
		if rs, _ := sink.recv(1); len(rs) != 1 || len(rs[0].Events) != 0 || rs[0].WatchId != 0 {
			t.Fatalf("got %v", rs)
		}
	}
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestNobodyIsWoken: events that nobody watches wake no goroutine, and are there for whoever comes later.
func TestNobodyIsWoken(t *testing.T) {
	store, fake := newFakeStore(), clock.NewFake(time.Unix(0, 0))
	h := New(Options{Source: store, Clock: fake})
	revision := int64(1)
	put := func() {
		revision++
		h.publish(revision, store.apply(op{[]byte("a"), []byte("1")}))
	}
	for range 3 {
		put()
	}
	if len(h.deliverWake) != 0 {
		t.Fatal("events without watchers woke the hub")
	}
	h.check()
	now, old := newFakeSink(10), newFakeSink(10)
	if err := h.NewStream(now).Create(Request{Key: []byte("a")}); err != nil {
		t.Fatal(err)
	}
	if err := h.NewStream(old).Create(Request{Key: []byte("a"), Start: 3}); err != nil {
		t.Fatal(err)
	}
	put()
	if len(h.deliverWake) != 1 {
		t.Fatal("an event with watchers did not wake the hub")
	}
	for more := true; more; {
		var err error
		if _, _, err = h.Deliver(fake.Now()); err == nil {
			more, err = h.CatchUp(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for sink, want := range map[*fakeSink][]int64{now: {5}, old: {3, 4, 5}} {
		var got []int64
		rs, _ := sink.recv(10)
		for _, r := range rs {
			for _, e := range r.Events {
				got = append(got, e.Kv.ModRevision)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("got the events of revisions %v, want %v", got, want)
		}
	}
	h.check()
}

// TestCongestion bounds what a client can make the hub keep for it.
func TestCongestion(t *testing.T) {
	h := New(Options{Source: newFakeStore()})
	s := h.NewStream(newFakeSink(1))
	var err error
	n := 0
	for ; err == nil && n < 10*maxControls; n++ {
		err = s.Create(Request{Key: []byte("a")})
	}
	if !errors.Is(err, ErrCongested) || n != maxControls+2 {
		t.Fatalf("after %d requests: %v", n, err)
	}
	h.check()
}

// TestPassIsShared checks that far-back watchers of different starts cost one
// pass, and that later ones do not hold up those that are ahead.
func TestPassIsShared(t *testing.T) {
	store := newFakeStore()
	var last []mvcc.Event
	for i := range 10000 {
		last = store.apply(op{fmt.Appendf(nil, "k%03d", i%100), []byte("v")})
	}
	h := New(Options{Source: store, ChunkBytes: 2000})
	h.publish(last[0].Rev.Main+1, store.apply(op{[]byte("k000"), []byte("v")}))
	if _, _, err := h.Deliver(time.Time{}); err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if err := h.NewStream(newFakeSink(1e6)).Create(Request{Key: fmt.Appendf(nil, "k%03d", i), Start: int64(2 + 50*i)}); err != nil {
			t.Fatal(err)
		}
	}
	steps := 0
	for more := true; more; steps++ {
		var err error
		if more, err = h.CatchUp(t.Context()); err != nil {
			t.Fatal(err)
		}
		if steps == 50 { // too late for this pass
			if err := h.NewStream(newFakeSink(1e6)).Create(Request{Key: []byte("late"), Start: 2}); err != nil {
				t.Fatal(err)
			}
		}
		if store.scanned > 10000 && h.behind.count > 1 {
			t.Fatalf("%d watchers are behind in the second pass", h.behind.count)
		}
	}
	if store.scanned != 2*10000 {
		t.Fatalf("read %d events for two passes of 10000", store.scanned)
	}
}

// countingSink takes everything and keeps nothing.
type countingSink struct{ events int }

func (c *countingSink) Send(rs []Response) bool {
	for _, r := range rs {
		c.events += len(r.Events)
	}
	return true
}

// BenchmarkPublish is what the applier pays for an event of 300 bytes.
func BenchmarkPublish(b *testing.B) {
	store := newFakeStore()
	h := New(Options{Source: store})
	events := store.apply(op{[]byte("k"), bytes.Repeat([]byte("v"), 300)})
	b.ReportAllocs()
	for i := range b.N {
		events[0].Rev.Main = int64(i + 2)
		h.publish(int64(i+2), events)
	}
}

// BenchmarkFanOut delivers one event to 1000 watchers of one prefix, each in a
// stream of its own.
func BenchmarkFanOut(b *testing.B) { benchmarkFanOut(b, 1, func(int) []byte { return []byte("k") }) }

// BenchmarkFanOutOneStream has them all in one stream, as behind a proxy.
func BenchmarkFanOutOneStream(b *testing.B) {
	benchmarkFanOut(b, 1000, func(int) []byte { return []byte("k") })
}

// BenchmarkManyRanges has 20000 watchers of different ranges, of which one matches.
func BenchmarkManyRanges(b *testing.B) {
	store := newFakeStore()
	h := New(Options{Source: store})
	s := h.NewStream(&countingSink{})
	for i := range 20000 {
		if err := s.Create(Request{Key: fmt.Appendf(nil, "k%06d/", i), End: fmt.Appendf(nil, "k%06d0", i)}); err != nil {
			b.Fatal(err)
		}
	}
	events := store.apply(op{[]byte("k010000/x"), []byte("v")})
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		deliverOne(b, h, events, int64(i+2))
	}
}

func benchmarkFanOut(b *testing.B, perStream int, key func(int) []byte) {
	store := newFakeStore()
	h := New(Options{Source: store})
	sink := &countingSink{}
	var s *Stream
	for i := range 1000 {
		if i%perStream == 0 {
			s = h.NewStream(sink)
		}
		if err := s.Create(Request{Key: key(i), End: []byte("l")}); err != nil {
			b.Fatal(err)
		}
	}
	events := store.apply(op{[]byte("key"), bytes.Repeat([]byte("v"), 300)})
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		deliverOne(b, h, events, int64(i+2))
	}
	if sink.events != 1000*b.N {
		b.Fatalf("%d events for %d publications", sink.events, b.N)
	}
}

func deliverOne(b *testing.B, h *Hub, events []mvcc.Event, revision int64) {
	events[0].Rev.Main = revision
	h.publish(revision, events)
	if _, _, err := h.Deliver(time.Time{}); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkResume has 1000 one-key watchers resume 100,000 revisions back; an
// operation is all of them together.
func BenchmarkResume(b *testing.B) {
	real := openRealStore(b, mvcc.Options{})
	const revisions = 100_000
	value := bytes.Repeat([]byte("v"), 100)
	for i := 0; i < revisions; i += 1000 {
		real.batch(func(w *mvcc.Writer) {
			for k := range 1000 {
				w.Begin()
				w.Put(fmt.Appendf(nil, "key%05d", (i+k)%1000), value, 0)
				w.End()
			}
		})
	}
	b.ResetTimer()
	for range b.N {
		h := New(Options{Source: real.source()})
		sink := &countingSink{}
		for i := range 1000 {
			if err := h.NewStream(sink).Create(Request{Key: fmt.Appendf(nil, "key%05d", i), Start: 2}); err != nil {
				b.Fatal(err)
			}
		}
		for more := true; more; {
			var err error
			if more, err = h.CatchUp(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
		if sink.events != revisions {
			b.Fatalf("%d events", sink.events)
		}
	}
}
