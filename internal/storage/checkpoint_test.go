package storage

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestCheckpointIsPrefix takes checkpoints while batches are committed: each is
// an exact prefix of them, with those committed before it began, and survives a
// power cut.
func TestCheckpointIsPrefix(t *testing.T) {
	taken, beside := 0, 0
	for seed := range uint64(4) {
		w := crashWorkload{seed}
		rnd := rand.New(rand.NewPCG(seed, 7))
		fs := vfs.NewCrashableMem()
		s := mustOpen(t, Options{FS: fs, Dir: "db", MemTableBytes: 16 << 10})
		var committed atomic.Int64
		written := make(chan error, 1)
		begun := make(chan struct{}) // closed at the first checkpoint, without which the writer does not get far
		begin := sync.OnceFunc(func() { close(begun) })
		go func() {
			for n := 1; n <= 300; n++ {
				if n == 100 {
					<-begun
				}
				b := s.NewBatch()
				w.fill(b, n)
				if err := s.Commit(b); err != nil {
					written <- err
					return
				}
				committed.Store(int64(n))
			}
			written <- nil
		}()
		var err error
		for done := false; !done; {
			select {
			case err = <-written:
				done = true // and take one more of all
			default:
			}
			before := int(committed.Load())
			begin()
			dir := fmt.Sprintf("sending-%d/store", taken)
			if err := s.Checkpoint(dir); err != nil {
				t.Fatal(err)
			}
			after := int(committed.Load()) + 1 // one may be on its way
			taken++
			if after > before+1 {
				beside++
			}
			clone := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rnd.IntN(101), RNG: rnd})
			for _, from := range []*vfs.MemFS{fs, clone} {
				names, err := from.List(dir)
				if err != nil {
					t.Fatal(err)
				}
				c := mustOpen(t, Options{FS: from, Dir: dir, ReadOnly: true})
				n, got := contents(t, c)
				if want := w.state(n); got != want {
					t.Fatalf("seed %d: a checkpoint taken at batch %d has\n%s\nwant\n%s", seed, before, got, want)
				}
				if n < before || n > after {
					t.Fatalf("seed %d: a checkpoint has %d batches, %d were committed before it, %d after it", seed, n, before, after)
				}
				if err := c.Close(); err != nil {
					t.Fatal(err)
				}
				now, err := from.List(dir)
				if err != nil {
					t.Fatal(err)
				}
				// Reading leaves nothing behind but the lock.
				now = slices.DeleteFunc(now, func(name string) bool { return name == "LOCK" })
				if slices.Sort(now); !slices.Equal(slices.Sorted(slices.Values(names)), now) {
					t.Fatalf("reading turned %q into %q", names, now)
				}
				for _, name := range now {
					if info, err := from.Stat(from.PathJoin(dir, name)); err != nil || strings.HasSuffix(name, ".log") && info.Size() > 0 {
						t.Fatalf("%s: %v, %v: a write-ahead log that is off is empty", name, info, err)
					}
				}
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Abandon(); err != nil {
			t.Fatal(err)
		}
	}
	if taken < 8 || beside == 0 {
		t.Errorf("%d checkpoints, during %d of which batches were committed: the test tries nothing", taken, beside)
	}
}

// TestReadOnly: it makes no store, and changes none.
func TestReadOnly(t *testing.T) {
	fs := vfs.NewMem()
	if _, err := Open(Options{FS: fs, Dir: "db", ReadOnly: true}); err == nil {
		t.Error("a store that is not there was opened")
	}
	s := mustOpen(t, Options{FS: fs, Dir: "db"})
	set(t, s, "x", "1")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, Options{FS: fs, Dir: "db", ReadOnly: true})
	want(t, s, "x", "1")
	b := s.NewBatch()
	b.Set(RowKey(TableMeta, []byte("x")), nil)
	if err := s.Commit(b); err == nil {
		t.Error("it was written to")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
