package watch

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/mvcc"
)

// client is one stream with a reader that checks W1 to W4 on all that it reads.
type client struct {
	name   string
	store  *fakeStore
	sink   *fakeSink
	stream *Stream

	mu      sync.Mutex
	nextID  int64
	watches map[int64]*watchModel // created or asked for
	stats   *coverage
}

// watchModel is what a client knows of one watcher.
type watchModel struct {
	request  Request
	created  bool
	over     bool
	from     int64 // the first revision that it is owed
	seen     mvcc.Revision
	progress int64 // the highest revision told by a notice
	partial  int64 // the revision that a fragment left unfinished
}

// coverage counts what a run has exercised.
type coverage struct {
	mu     sync.Mutex
	counts map[string]int
}

func (c *coverage) add(what string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[what] += n
}

func newClient(h *Hub, store *fakeStore, name string, cap int, stats *coverage) *client {
	c := &client{name: name, store: store, sink: newFakeSink(cap), nextID: 1, watches: map[int64]*watchModel{}, stats: stats}
	c.stream = h.NewStream(c.sink)
	return c
}

// create adds a random watcher.
func (c *client) create(r *rand.Rand) {
	req := Request{PrevKV: r.IntN(2) == 0, Fragment: r.IntN(3) == 0, ProgressNotify: r.IntN(2) == 0, NoPut: r.IntN(8) == 0, NoDelete: r.IntN(8) == 0}
	req.Key = randomKey(r)
	switch r.IntN(4) {
	case 0:
		req.End = []byte{0}
	case 1:
		req.End = randomKey(r)
		if bytes.Compare(req.Key, req.End) >= 0 {
			req.End = nil
		}
	}
	revision, _ := c.store.Revision()
	switch r.IntN(4) {
	case 0:
		req.Start = 1 + r.Int64N(revision+1)
	case 1:
		req.Start = max(1, revision-r.Int64N(6)+2)
	}
	c.mu.Lock()
	req.ID = c.nextID
	c.nextID++
	c.watches[req.ID] = &watchModel{request: req, from: req.Start}
	c.mu.Unlock()
	if err := c.stream.Create(req); err != nil {
		panic(err)
	}
}

func (c *client) cancelOne(r *rand.Rand) {
	c.mu.Lock()
	id := 1 + r.Int64N(c.nextID)
	c.mu.Unlock()
	if err := c.stream.Cancel(id); err != nil {
		panic(err)
	}
}

// read takes up to n responses and checks them.
func (c *client) read(n int) int {
	rs, ready := c.sink.recv(n)
	for _, r := range rs {
		c.check(r)
	}
	if ready {
		c.stats.add("ready", 1)
		c.stream.Ready()
	}
	return len(rs)
}

func (c *client) check(r *etcdserverpb.WatchResponse) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.WatchId == noWatcher {
		c.stats.add("progress of all", 1)
		for id, w := range c.watches {
			if w.created && !w.over {
				c.told(id, w, r.Header.Revision)
			}
		}
		return
	}
	w := c.watches[r.WatchId]
	if w == nil || w.over {
		c.fail(r.WatchId, w, "response for a watcher that is not there: %s", show(r))
	}
	switch {
	case r.Created:
		if w.created {
			c.fail(r.WatchId, w, "created twice")
		}
		w.created = true
		if w.from == 0 {
			w.from = r.Header.Revision + 1
		}
		return
	case !w.created:
		c.fail(r.WatchId, w, "%s before created", show(r))
	case r.Canceled:
		w.over = true
		if r.CompactRevision != 0 {
			c.stats.add("compacted", 1)
			// What was compacted must be something that it lacked.
			if next := max(w.seen.Main+1, w.from); next > r.CompactRevision && w.progress < r.CompactRevision-1 {
				c.fail(r.WatchId, w, "cancelled at %d, but it had all below", r.CompactRevision)
			}
		}
		return
	case len(r.Events) == 0:
		c.stats.add("progress of one", 1)
		c.told(r.WatchId, w, r.Header.Revision)
		return
	}
	first, last := r.Events[0].Kv.ModRevision, r.Events[len(r.Events)-1].Kv.ModRevision
	switch {
	case w.partial != 0 && first != w.partial && first <= w.partial, w.partial == 0 && first <= w.seen.Main:
		c.fail(r.WatchId, w, "revision %d again, or split: %s", first, show(r)) // W1, W4
	case first <= w.progress:
		c.fail(r.WatchId, w, "an event of %d after notice for %d", first, w.progress) // W3
	case r.Header.Revision < last:
		c.fail(r.WatchId, w, "header is behind the events: %s", show(r))
	}
	want := c.wanted(w, last)
	for i, e := range r.Events {
		if i >= len(want) {
			c.fail(r.WatchId, w, "not expected: %s", showEvent(e))
		}
		if !c.same(w, want[i], e) {
			c.fail(r.WatchId, w, "expected %q at %v, got %s at %d", want[i].Key, want[i].Rev, showEvent(e), e.Kv.ModRevision)
		}
		w.seen = want[i].Rev
	}
	w.partial = 0
	if r.Fragment {
		w.partial = last
		c.stats.add("fragments", 1)
	} else if len(r.Events) != len(want) {
		c.fail(r.WatchId, w, "revision %d is incomplete: %s", last, show(r))
	}
	c.stats.add("events", len(r.Events))
}

// wanted returns the events that w lacks up to a revision.
func (c *client) wanted(w *watchModel, upTo int64) (want []mvcc.Event) {
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	span, _ := newSpan(w.request.Key, w.request.End)
	for _, ev := range c.store.events[c.store.search(max(w.from, w.seen.Main)):] {
		if ev.Rev.Main > upTo {
			break
		}
		in := bytes.Equal(ev.Key, span.key)
		if !span.single {
			in = bytes.Compare(ev.Key, span.key) >= 0 && (span.end == nil || bytes.Compare(ev.Key, span.end) < 0)
		}
		if in && ev.Rev.Compare(w.seen) > 0 && !(ev.Delete && w.request.NoDelete) && !(!ev.Delete && w.request.NoPut) {
			want = append(want, ev)
		}
	}
	return want
}

func (c *client) same(w *watchModel, ev mvcc.Event, got *mvccpb.Event) bool {
	raw, _ := proto.MarshalOptions{Deterministic: true}.Marshal(got.Kv)
	if !bytes.Equal(raw, ev.KV) || (got.Type == mvccpb.Event_DELETE) != ev.Delete {
		return false
	}
	if got.PrevKv == nil {
		c.store.mu.Lock()
		defer c.store.mu.Unlock()
		// Only compaction excuses a missing previous value.
		return !w.request.PrevKV || ev.Prev == (mvcc.Revision{}) || ev.Rev.Main-1 < c.store.compacted
	}
	c.stats.add("previous values", 1)
	prev, _ := proto.MarshalOptions{Deterministic: true}.Marshal(got.PrevKv)
	c.store.mu.Lock()
	defer c.store.mu.Unlock()
	return w.request.PrevKV && bytes.Equal(prev, c.store.values[ev.Prev])
}

// told checks W3.
func (c *client) told(id int64, w *watchModel, revision int64) {
	if want := c.wanted(w, revision); len(want) > 0 && want[0].Rev.Main <= revision {
		c.fail(id, w, "notice for %d before the event at %v", revision, want[0].Rev)
	}
	w.progress = max(w.progress, revision)
}

func (c *client) fail(id int64, w *watchModel, format string, args ...any) {
	panic(fmt.Sprintf("stream %s, watcher %d (%+v): %s", c.name, id, w, fmt.Sprintf(format, args...)))
}

// finished checks that every watcher has got all.
func (c *client) finished() {
	c.mu.Lock()
	defer c.mu.Unlock()
	revision, _ := c.store.Revision()
	for id, w := range c.watches {
		if !w.created {
			c.fail(id, w, "never created")
		}
		if want := c.wanted(w, revision); !w.over && len(want) > 0 {
			c.fail(id, w, "%d events are missing at the end, the first at %v", len(want), want[0].Rev)
		}
	}
}

func randomKey(r *rand.Rand) []byte { return fmt.Appendf(nil, "k%02d", r.IntN(30)) }

func randomOps(r *rand.Rand) []op {
	ops := make([]op, 0, 4)
	for range 1 + r.IntN(4) {
		o := op{key: randomKey(r)}
		if r.IntN(3) > 0 {
			o.value = bytes.Repeat([]byte{'v'}, 1+r.IntN(60))
		}
		if !slices.ContainsFunc(ops, func(p op) bool { return bytes.Equal(p.key, o.key) }) {
			ops = append(ops, o)
		}
	}
	return ops
}

// TestModel drives a hub with random steps in one goroutine; things also happen
// in the midst of steps, where the hub lets go of its lock. Seed by seed it is
// the same run each time.
func TestModel(t *testing.T) {
	stats := &coverage{counts: map[string]int{}}
	for seed := range uint64(120) {
		func() {
			defer func() {
				if p := recover(); p != nil {
					t.Fatalf("seed %d: %v", seed, p)
				}
			}()
			runModel(rand.New(rand.NewPCG(seed, 0)), stats)
		}()
	}
	t.Log(stats.counts)
	for _, what := range []string{"events", "previous values", "fragments", "progress of all", "progress of one", "compacted", "ready", "overrun", "reset", "history"} {
		if stats.counts[what] < 20 {
			t.Errorf("%q was exercised %d times only", what, stats.counts[what])
		}
	}
}

func runModel(r *rand.Rand, stats *coverage) {
	store := newFakeStore()
	fake := clock.NewFake(time.Unix(0, 0))
	h := New(Options{
		Source: store, Clock: fake, Rand: rand.New(rand.NewPCG(r.Uint64(), 0)),
		RecentBytes: 500 + r.IntN(20000), ChunkBytes: 50 + r.IntN(2000), BatchRevisions: 1 + r.IntN(20), BatchBytes: 50 + r.IntN(1000),
		FragmentBytes: 60 + r.IntN(300), ProgressInterval: time.Second,
	})
	var clients []*client
	for i := range 1 + r.IntN(4) {
		clients = append(clients, newClient(h, store, fmt.Sprint(i), 1+r.IntN(20), stats))
	}
	var held [][]mvcc.Event
	publish := func() {
		for _, events := range held {
			h.publish(events[len(events)-1].Rev.Main, events)
		}
		held = nil
	}
	deliver := func() bool {
		if first, _ := h.recent.span(); first > h.claimed+1 {
			stats.add("overrun", 1)
		}
		more, _, err := h.Deliver(fake.Now())
		if err != nil {
			panic(err)
		}
		return more
	}
	catchUp := func() bool {
		more, err := h.CatchUp(context.Background())
		if err != nil {
			panic(err)
		}
		return more
	}
	// outside is what others may do at any time, also between phases of a step.
	outside := func() {
		c := clients[r.IntN(len(clients))]
		switch r.IntN(10) {
		case 0, 1, 2, 3:
			for range 1 + r.IntN(3) {
				if events := store.apply(randomOps(r)...); len(events) > 0 {
					held = append(held, events)
				}
			}
			if r.IntN(2) == 0 {
				publish()
			}
		case 4:
			c.create(r)
		case 5:
			if r.IntN(3) == 0 {
				c.cancelOne(r)
			} else if err := c.stream.Progress(); err != nil {
				panic(err)
			}
		case 6, 7, 8:
			c.read(1 + r.IntN(10))
		case 9:
			if revision, compacted := store.Revision(); r.IntN(4) == 0 && revision > compacted {
				store.compact(max(compacted+1, revision-r.Int64N(20)))
			}
		}
	}
	reset := func() {
		held = nil // the snapshot has them
		stats.add("reset", 1)
		h.Reset(store)
	}
	store.midway = func() {
		switch n := r.IntN(100); {
		case n < 50:
			outside()
		case n < 53:
			reset()
		}
	}
	for range 400 {
		switch r.IntN(8) {
		case 0, 1:
			deliver()
		case 2, 3:
			catchUp()
		case 4:
			fake.Advance(time.Duration(r.IntN(400)) * time.Millisecond)
			if r.IntN(20) == 0 {
				reset()
			}
		default:
			outside()
		}
		h.check()
	}
	store.midway = nil
	publish()
	for quiet := 0; quiet < 2; {
		quiet++
		for deliver() || catchUp() {
			quiet = 0
		}
		for _, c := range clients {
			if c.read(1000) > 0 {
				quiet = 0
			}
		}
		h.check()
	}
	if revision, _ := store.Revision(); h.delivered != revision || h.claimed != revision {
		panic(fmt.Sprintf("delivered to %d, claimed to %d of %d", h.delivered, h.claimed, revision))
	}
	for _, c := range clients {
		c.finished()
		c.stream.Close()
	}
	h.check()
	stats.add("history", store.scans)
}

// TestConcurrent runs the hub as the server does, with readers of all speeds,
// and lets the race detector look on.
func TestConcurrent(t *testing.T) {
	stats := &coverage{counts: map[string]int{}}
	store := newFakeStore()
	h := New(Options{
		Source: store, RecentBytes: 30000, ChunkBytes: 1500, BatchRevisions: 10, FragmentBytes: 300, ProgressInterval: 3 * time.Millisecond,
	})
	ctx, stop := context.WithCancel(t.Context())
	hubDone := make(chan error, 1)
	go func() { hubDone <- h.Run(ctx) }()

	const transactions = 10000
	written := make(chan struct{}) // closed when all are
	pace := make(chan struct{})    // the writer waits for some reader to have read on
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(written)
		r := rand.New(rand.NewPCG(1, 2))
		for i := range transactions {
			<-pace
			if events := store.apply(randomOps(r)...); len(events) > 0 {
				h.publish(events[len(events)-1].Rev.Main, events)
			}
			if i%500 == 499 {
				revision, _ := store.Revision()
				store.compact(revision - 250)
			}
		}
	})
	var clients []*client
	for i := range 8 {
		c := newClient(h, store, fmt.Sprint(i), 1+i*4, stats)
		clients = append(clients, c)
		r := rand.New(rand.NewPCG(uint64(i), 3))
		for range 5 {
			c.create(r)
		}
		wg.Go(func() {
			for {
				if i%2 == 1 || r.IntN(20) == 0 { // every other reader is slow
					c.read(1 + r.IntN(3))
				}
				switch r.IntN(100) {
				case 0:
					c.create(r)
				case 1:
					c.cancelOne(r)
				case 2:
					if err := c.stream.Progress(); err != nil {
						panic(err)
					}
				}
				select {
				case <-written:
					return
				case pace <- struct{}{}:
				}
			}
		})
	}
	wg.Wait()
	// All is read once a notice for the last revision has come, or no watcher is left.
	revision, _ := store.Revision()
	for _, c := range clients {
		if err := c.stream.Create(Request{Key: []byte("~"), ID: -5}); err != nil {
			t.Fatal(err)
		}
		c.mu.Lock()
		last := &watchModel{request: Request{Key: []byte("~")}}
		c.watches[-5] = last
		c.mu.Unlock()
		for told := int64(0); told < revision; {
			if err := c.stream.Progress(); err != nil {
				t.Fatal(err)
			}
			if c.read(100) == 0 {
				select {
				case <-c.sink.arrived:
				case <-time.After(20 * time.Millisecond): // no answer is owed while a watcher is behind: ask again
				}
			}
			c.mu.Lock()
			told = last.progress
			c.mu.Unlock()
		}
		c.finished()
	}
	h.check()
	stop()
	if err := <-hubDone; err != nil {
		t.Fatal(err)
	}
	t.Log(stats.counts)
	for _, what := range []string{"events", "previous values", "ready"} {
		if stats.counts[what] < 5 {
			t.Errorf("%q was exercised %d times only", what, stats.counts[what])
		}
	}
}
