package index

import (
	"runtime"
	"testing"
)

// allocated returns how many bytes fn allocates.
func allocated(fn func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// TestLongHistory: what is done with a key that was written very often takes little
// memory for each revision, and none for those that a compaction forgets.
func TestLongHistory(t *testing.T) {
	const n = 1_000_000
	tree := New()
	for rev := int64(2); rev < n+2; rev++ {
		tree.Put([]byte("hot"), Revision{Main: rev}, 0, 20, 0)
	}
	tree.Put([]byte("cold"), Revision{Main: n + 2}, 0, 20, 0)
	tree.Put([]byte("cold"), Revision{Main: n + 3}, 0, 20, 0)
	var blocks int64
	if got := allocated(func() {
		err := tree.Root().Encode(1<<10, func(block []byte, _ int) error {
			blocks += int64(len(block))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}); got > 8*blocks {
		t.Errorf("encoding it in %d bytes allocated %d", blocks, got)
	}
	const rev = 48 // bytes of a Rev
	if got := allocated(func() {
		revs := 0
		tree.Root().Walk(nil, func(r *Record) bool { revs += len(r.Revs); return true })
		if revs != n+2 {
			t.Errorf("%d revisions", revs)
		}
	}); got > n*(rev+8) {
		t.Errorf("a walk allocated %d", got)
	}
	for _, at := range []int64{n / 2, n - 100, n + 3} {
		if got := allocated(func() {
			if tree.Compact(at, nil, 10, nil) != nil {
				t.Errorf("compaction at %d ended early", at)
			}
		}); got > 128*(n+2-at)+256<<10 { // growing garbage included
			t.Errorf("compaction at %d allocated %d", at, got)
		}
		if err := tree.Root().Verify(); err != nil {
			t.Fatal(err)
		}
		if got, want := tree.Root().History(), max(0, n+1-at)+min(1, n+3-at); got != want {
			t.Errorf("compacted at %d: %d superseded revisions, not %d", at, got, want)
		}
	}
}
