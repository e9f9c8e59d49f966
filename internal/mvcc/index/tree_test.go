package index

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// TestHotKey writes few keys so often that their history spans many chunks,
// among neighbours that make their leaf split.
func TestHotKey(t *testing.T) {
	const n = 60_000
	tree := New()
	for i := range int64(n) {
		rev := Revision{Main: i + 2}
		tree.Put([]byte("hot"), rev, 0, 100, 0)
		rev.Sub++
		if i%3 == 0 {
			tree.Delete([]byte("warm"), rev, 5)
		} else {
			tree.Put([]byte("warm"), rev, 0, 100, 0)
		}
		if i%64 == 0 {
			rev.Sub++
			tree.Put(fmt.Appendf(nil, "h%d", i), rev, 0, 1, 0)
			tree.Put(fmt.Appendf(nil, "x%d", i), rev, 0, 1, 0)
			tree.Root()
		}
	}
	check := func(r Root, from int64) {
		t.Helper()
		if err := r.Verify(); err != nil {
			t.Fatal(err)
		}
		for at := from; at < n+2; at += 97 {
			if it, ok := r.Get([]byte("hot"), at); !ok || it.Mod.Main != at || it.Version != at-1 || it.Create != 2 {
				t.Fatalf("hot at %d: %+v %v", at, it, ok)
			}
			i := at - 2
			it, ok := r.Get([]byte("warm"), at)
			if ok != (i%3 != 0) || ok && (it.Mod.Main != at || it.Version != i%3 || it.Create != at-i%3+1) {
				t.Fatalf("warm at %d: %+v %v", at, it, ok)
			}
		}
	}
	before := tree.Root()
	check(before, 2)
	hotLeaf, _ := tree.top.lookup([]byte("hot"))
	if len(hotLeaf.hist.full) < 10 {
		t.Fatalf("history of %d chunks does not test their borders", len(hotLeaf.hist.full))
	}
	dropped := 0
	if next := tree.Compact(n/2, nil, 1<<30, func(Revision, uint32, bool) { dropped++ }); next != nil {
		t.Fatalf("compaction stopped at %q", next)
	}
	if left := before.History() - tree.Root().History(); int64(dropped) != left || dropped < n/2 {
		t.Fatalf("%d dropped, history shrank by %d", dropped, left)
	}
	check(tree.Root(), n/2)
	check(before, 2)
}

// TestLargeKeys has keys so large that leaves are split by their bytes.
func TestLargeKeys(t *testing.T) {
	tree := New()
	rng := rand.New(rand.NewPCG(1, 1))
	want := map[string]bool{}
	for i := range 150 {
		key := bytes.Repeat([]byte{byte('a' + rng.IntN(3))}, rng.IntN(40_000))
		if want[string(key)] {
			continue
		}
		want[string(key)] = true
		tree.Put(key, Revision{Main: int64(i) + 2}, 0, 1, 0)
		if i%20 == 0 {
			tree.Root()
		}
	}
	r := tree.Root()
	if err := r.Verify(); err != nil {
		t.Fatal(err)
	}
	if r.Len() != int64(len(want)) {
		t.Fatalf("%d keys, want %d", r.Len(), len(want))
	}
	for key := range want {
		if _, ok := r.Get([]byte(key), 0); !ok {
			t.Fatalf("a key of %d bytes is absent", len(key))
		}
	}
	r.top.leavesIn(nil, nil, false, func(l *leaf, _, _ int) bool {
		if l.len() > 2 && len(l.keys) > leafKeyBytes+40_010 {
			t.Fatalf("leaf of %d rows and %d bytes of keys", l.len(), len(l.keys))
		}
		return true
	})
}

// TestOrderBroken shows that a revision out of order stops the program.
func TestOrderBroken(t *testing.T) {
	for _, c := range []struct {
		want  string
		write func(*Tree)
	}{
		{`key "k" written at 5 after 5.1`, func(t *Tree) { t.Put([]byte("k"), Revision{5, 0}, 0, 1, 0) }},
		{`key "k" written at 5.1 after 5.1`, func(t *Tree) { t.Delete([]byte("k"), Revision{5, 1}, 1) }},
		{`revision 0 of key "n"`, func(t *Tree) { t.Put([]byte("n"), Revision{0, 0}, 0, 1, 0) }},
		{`revision 6.-1 of key "n"`, func(t *Tree) { t.Put([]byte("n"), Revision{6, -1}, 0, 1, 0) }},
	} {
		tree := New()
		tree.Put([]byte("k"), Revision{5, 1}, 0, 1, 0)
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.Contains(got, c.want) {
					t.Errorf("panic %q, want %q", got, c.want)
				}
			}()
			c.write(tree)
		}()
	}
}

// TestZeroRoot reads the zero value.
func TestZeroRoot(t *testing.T) {
	var r Root
	open := []byte{0}
	r.Ascend(nil, open, 0, func(Item) bool { t.Fatal("an item"); return false })
	r.Walk(nil, func(*Record) bool { t.Fatal("a record"); return false })
	if _, ok := r.Get([]byte("k"), 0); ok {
		t.Fatal("a key")
	}
	if n, size := r.Count(nil, open); n != 0 || size != 0 || r.Len() != 0 || r.CountAt(nil, open, 3) != 0 || r.Verify() != nil {
		t.Fatal("not empty")
	}
}

// TestConcurrentReaders lets readers check old Roots while the writer goes on.
// Each put gives size and ref of the same number as its revision, so a reader
// can tell a torn item.
func TestConcurrentReaders(t *testing.T) {
	tree := New()
	var published atomic.Pointer[Root]
	publish := func() {
		r := tree.Root()
		published.Store(&r)
	}
	publish()
	var stop atomic.Bool
	var wg sync.WaitGroup
	for n := range 3 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(n), 7))
			for rounds := 0; !stop.Load() || rounds < 3; rounds++ {
				readRoot(t, *published.Load(), rng)
			}
		})
	}
	rng := rand.New(rand.NewPCG(8, 8))
	key := func() []byte { return fmt.Appendf(nil, "key/%04d", rng.IntN(2000)) }
	compacted := int64(0)
	for main := int64(2); main < 8000; main++ {
		rev := Revision{Main: main}
		if rng.IntN(4) == 0 {
			tree.Delete(key(), rev, 3)
		} else {
			tree.Put(key(), rev, main%3, uint32(main), ValueRef(main))
		}
		if main%2000 == 0 {
			for from := []byte(nil); ; {
				if from = tree.Compact(main-500, from, 100, func(Revision, uint32, bool) { compacted++ }); from == nil {
					break
				}
				publish()
			}
		}
		if main%16 == 0 {
			publish()
		}
	}
	stop.Store(true)
	wg.Wait()
	if compacted == 0 {
		t.Fatal("nothing was compacted")
	}
}

func readRoot(t *testing.T, r Root, rng *rand.Rand) {
	at := r.Newest() - rng.Int64N(400)
	var keys, size int64
	r.Ascend(nil, []byte{0}, 0, func(it Item) bool {
		if it.Mod.Main != int64(it.Size) || it.Mod.Main != int64(it.Ref) || it.Lease != it.Mod.Main%3 {
			t.Errorf("torn item %+v", it)
		}
		keys++
		size += int64(it.Size)
		return true
	})
	if n, bytes := r.Count(nil, []byte{0}); n != keys || bytes != size || n != r.Len() {
		t.Errorf("%d keys of %d bytes, counted %d of %d", keys, size, n, bytes)
	}
	r.Ascend([]byte("key/1"), []byte("key/2"), at, func(it Item) bool {
		if it.Mod.Main != int64(it.Size) || at > 0 && it.Mod.Main > at {
			t.Errorf("at %d: %+v", at, it)
		}
		return true
	})
	if rng.IntN(10) == 0 {
		if err := r.Verify(); err != nil {
			t.Error(err)
		}
	}
}
