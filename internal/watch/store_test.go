package watch

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/storage"
)

// realStore applies the same transactions to an mvcc.Store and to the dumb one,
// which tells what watchers must see.
type realStore struct {
	disk    *storage.Store
	store   *mvcc.Store
	root    atomic.Pointer[mvcc.Root]
	model   *fakeStore
	applied uint64
}

func openRealStore(t testing.TB, o mvcc.Options) *realStore {
	disk, err := storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "db"})
	if err != nil {
		t.Fatal(err)
	}
	o.Storage = disk
	store, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	r := &realStore{disk: disk, store: store, model: newFakeStore()}
	r.publishRoot()
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
		if err := disk.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *realStore) publishRoot() {
	root := r.store.Root()
	r.root.Store(&root)
}

func (r *realStore) source() StoreSource {
	return StoreSource{Store: r.store, Root: func() mvcc.Root { return *r.root.Load() }}
}

// batch applies a batch in one go and returns its events.
func (r *realStore) batch(fill func(w *mvcc.Writer)) (mvcc.Root, []mvcc.Event) {
	b := r.disk.NewBatch()
	w := r.store.NewWriter(b)
	fill(w)
	r.applied++
	w.Seal(r.applied, 1)
	if err := r.disk.Commit(b); err != nil {
		panic(err)
	}
	w.Committed()
	r.publishRoot()
	return *r.root.Load(), w.Events()
}

func (r *realStore) apply(txns ...[]op) (mvcc.Root, []mvcc.Event) {
	return r.batch(func(w *mvcc.Writer) {
		for _, ops := range txns {
			w.Begin()
			for _, o := range ops {
				if o.value == nil {
					w.DeleteRange(o.key, nil, nil)
				} else { // the dumb store keeps sub in the lease
					w.Put(o.key, o.value, w.Changes())
				}
			}
			w.End()
			r.model.apply(ops...)
		}
	})
}

func (r *realStore) compact(rev int64) {
	r.batch(func(w *mvcc.Writer) {
		if err := w.Compact(rev); err != nil {
			panic(err)
		}
	})
	r.model.compact(rev)
}

func (r *realStore) compactStep() bool {
	more, _, err := r.store.CompactStep()
	if err != nil {
		panic(err)
	}
	r.publishRoot()
	return more
}

// TestStore drives a hub over the real store, compaction and its physical
// deletions included.
func TestStore(t *testing.T) {
	stats := &coverage{counts: map[string]int{}}
	for seed := range uint64(15) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			runStore(t, rand.New(rand.NewPCG(seed, 9)), stats)
		})
	}
	for _, what := range []string{"events", "previous values", "compacted", "progress of all", "deleted"} {
		if stats.counts[what] < 10 {
			t.Errorf("%q was exercised %d times only", what, stats.counts[what])
		}
	}
	t.Log(stats.counts)
}

func runStore(t *testing.T, r *rand.Rand, stats *coverage) {
	budget := []int64{-1, 2000, 0}[r.IntN(3)]
	real := openRealStore(t, mvcc.Options{ValueBudgetBytes: budget, CompactionBatch: 10, ViewAge: -1})
	fake := clock.NewFake(time.Unix(0, 0))
	h := New(Options{Source: real.source(), Clock: fake, RecentBytes: 1000 + r.IntN(10000), ChunkBytes: 50 + r.IntN(2000), FragmentBytes: 300})
	var clients []*client
	for i := range 3 {
		clients = append(clients, newClient(h, real.model, fmt.Sprint(i), 1+r.IntN(10), stats))
	}
	step := func() (more bool) {
		m1, _, err := h.Deliver(fake.Now())
		if err != nil {
			t.Fatal(err)
		}
		m2, err := h.CatchUp(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		return m1 || m2
	}
	for range 500 {
		c := clients[r.IntN(len(clients))]
		switch r.IntN(10) {
		case 0, 1, 2:
			txns := make([][]op, 1+r.IntN(3))
			for i := range txns {
				txns[i] = randomOps(r)
			}
			if root, events := real.apply(txns...); len(events) > 0 {
				h.Publish(root, events)
			}
		case 3, 4:
			step()
		case 5:
			c.create(r)
		case 6, 7:
			c.read(1 + r.IntN(10))
		case 8:
			if err := c.stream.Progress(); err != nil {
				t.Fatal(err)
			}
		case 9:
			revision, compacted := real.source().Revision()
			if r.IntN(3) == 0 && revision > compacted+1 {
				real.compact(max(compacted+1, revision-r.Int64N(30)))
			}
			for range r.IntN(5) {
				if real.compactStep() {
					stats.add("deleted", 1)
				}
			}
		}
	}
	for quiet := 0; quiet < 2; {
		quiet++
		for step() {
			quiet = 0
		}
		for _, c := range clients {
			if c.read(1000) > 0 {
				quiet = 0
			}
		}
	}
	for _, c := range clients {
		c.finished()
	}
	h.check()
}

// TestStoreSourceEvents compares what history gives with what was published.
func TestStoreSourceEvents(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	real := openRealStore(t, mvcc.Options{ValueBudgetBytes: -1})
	var published []mvcc.Event
	for range 200 {
		_, events := real.apply(randomOps(r))
		published = append(published, events...)
	}
	revision, _ := real.source().Revision()
	to := revision - 10
	var got []mvcc.Event
	for from := int64(1); from <= to; {
		next, err := real.source().History(t.Context(), from, to, 500, func(e mvcc.Event) { got = append(got, e) })
		if err != nil || next <= from || next > to+1 {
			t.Fatalf("history from %d: next %d, %v", from, next, err)
		}
		from = next
	}
	if len(got) == 0 || got[len(got)-1].Rev.Main != to {
		t.Fatalf("%d events, not up to %d", len(got), to)
	}
	for i, e := range got {
		p := published[i]
		if e.Rev != p.Rev || !bytes.Equal(e.Key, p.Key) || !bytes.Equal(e.KV, p.KV) || e.Delete != p.Delete || e.Create != p.Create || e.Prev != p.Prev {
			t.Fatalf("history gives %+v, published was %+v", e, p)
		}
	}
}
