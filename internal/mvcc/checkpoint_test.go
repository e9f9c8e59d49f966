package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/engram-kv/engram/internal/mvcc/index"
)

// describe prints all that an index holds.
func describe(r index.Root) string {
	var s strings.Builder
	r.Walk(nil, func(rec *index.Record) bool {
		fmt.Fprintf(&s, "%q lease %d %v\n", rec.Key, rec.Lease, rec.Revs)
		return true
	})
	return s.String()
}

func filled(t testing.TB) *fixture {
	f := newFixture(t, nil)
	for i := range 500 {
		f.put(fmt.Sprintf("key/%03d", i*7%300), strings.Repeat("x", i%50))
	}
	f.del("key/007")
	return f
}

func checkpointBytes(t testing.TB, f *fixture) []byte {
	t.Helper()
	var b bytes.Buffer
	f.check(writeCheckpoint(&b, f.Root(), f.index))
	return b.Bytes()
}

// readBack loads a checkpoint into an index.
func readBack(b []byte) (ix index.Root, revision int64, applied uint64, err error) {
	build := newBuilder()
	err = readCheckpoint(bytes.NewReader(b), func(r int64, a uint64) error {
		revision, applied = r, a
		return nil
	}, build.add)
	if err != nil {
		return index.Root{}, 0, 0, err
	}
	return build.index.Tree().Root(), revision, applied, nil
}

func TestCheckpointRoundTrip(t *testing.T) {
	f := filled(t)
	ix, revision, applied, err := readBack(checkpointBytes(t, f))
	f.check(err)
	if revision != f.Root().Revision() || applied != f.index {
		t.Errorf("revision %d applied %d, want %d and %d", revision, applied, f.Root().Revision(), f.index)
	}
	if got, want := describe(ix), describe(f.Root().index); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	empty := newFixture(t, nil)
	if ix, _, _, err := readBack(checkpointBytes(t, empty)); err != nil || ix.Len() != 0 {
		t.Errorf("empty: %d keys, %v", ix.Len(), err)
	}
}

// No single damaged byte and no cut goes unnoticed.
func TestCheckpointDamage(t *testing.T) {
	f := filled(t)
	good := checkpointBytes(t, f)
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 1 << (i % 8)
		if _, _, _, err := readBack(bad); !errors.Is(err, errCheckpoint) {
			t.Fatalf("byte %d changed: %v", i, err)
		}
	}
	for n := range good {
		if n%13 > 0 && n < len(good)-20 {
			continue
		}
		if _, _, _, err := readBack(good[:n]); !errors.Is(err, errCheckpoint) {
			t.Fatalf("cut at %d: %v", n, err)
		}
	}
	if _, _, _, err := readBack(append(good, 0)); !errors.Is(err, errCheckpoint) {
		t.Fatalf("one byte more: %v", err)
	}
}

// A checkpoint takes little memory beside a block, also for a key that was written
// very often.
func TestCheckpointOfLongHistory(t *testing.T) {
	f := newFixture(t, nil)
	const n = 200_000
	for range 20 {
		f.apply(func(w *Writer) {
			for range n / 20 {
				w.Begin()
				w.Put([]byte("hot"), []byte("v"), 0)
				w.End()
			}
		})
	}
	var out bytes.Buffer
	out.Grow(16 * n)
	f.check(f.storage.Flush()) // what goes on beside would count
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f.check(writeCheckpoint(&out, f.Root(), f.index))
	runtime.ReadMemStats(&after)
	if got := after.TotalAlloc - before.TotalAlloc; got > 8*uint64(out.Len())+1<<20 {
		t.Errorf("a checkpoint of %d bytes allocated %d", out.Len(), got)
	}
	ix, _, _, err := readBack(out.Bytes())
	f.check(err)
	if got := ix.History(); got != n-1 {
		t.Errorf("%d superseded revisions, want %d", got, n-1)
	}
}

// A history that no block can hold makes no file that a start would call damaged.
func TestCheckpointBlockTooLong(t *testing.T) {
	defer func(most uint32) { maxCheckpointBlock = most }(maxCheckpointBlock)
	f := newFixture(t, nil)
	f.put("a", "1", "b", "1")
	for i := range 300 {
		f.put("hot", fmt.Sprint(i))
	}
	var out bytes.Buffer
	maxCheckpointBlock = 400
	if err := writeCheckpoint(&out, f.Root(), f.index); !errors.Is(err, errNoCheckpoint) {
		t.Errorf("a block beyond the limit: %v", err)
	}
	f.reopen() // without a checkpoint
	f.check(f.saverHolds(false))
	f.compact(100)
	f.work()
	f.check(f.saverHolds(false))
	f.compact(f.Root().Revision()) // after which one can be made
	f.work()
	f.reopen()
	f.check(f.saverHolds(true))
	if got := f.Root().Keys(); got != 3 {
		t.Errorf("%d keys, want 3", got)
	}
}

func FuzzReadCheckpoint(f *testing.F) {
	x := newFixture(f, nil)
	f.Add(checkpointBytes(f, x))
	x.put("a", "1", "a", "2", "b", "3")
	x.del("b")
	f.Add(checkpointBytes(f, x))
	f.Fuzz(func(t *testing.T, b []byte) {
		ix, revision, applied, err := readBack(b)
		if err != nil {
			return
		}
		var again bytes.Buffer
		if err := writeCheckpoint(&again, Root{index: ix, revision: revision}, applied); err != nil {
			t.Fatal(err)
		}
		ix2, _, _, err := readBack(again.Bytes())
		if err != nil || describe(ix) != describe(ix2) {
			t.Fatalf("%x does not come back: %v", b, err)
		}
	})
}

// A damaged checkpoint, and one that knows more than the store, are put aside.
func TestUselessCheckpoint(t *testing.T) {
	f := filled(t)
	f.check(f.Store.Close())
	want := describe(f.Root().index)
	path := f.saver.path(CheckpointFile)
	read := func() []byte {
		file, err := f.fs.Open(path)
		f.check(err)
		defer file.Close()
		info, err := file.Stat()
		f.check(err)
		b := make([]byte, info.Size())
		_, err = file.ReadAt(b, 0)
		f.check(err)
		return b
	}
	write := func(b []byte) {
		file, err := f.fs.Create(path, vfs.WriteCategoryUnspecified)
		f.check(err)
		_, err = file.Write(b)
		f.check(errors.Join(err, file.Close()))
	}
	good := read()
	f.put("later", "1")
	f.check(f.Store.Close())
	ahead := read()
	f.check(f.storage.Abandon())
	// The last put was flushed with its checkpoint, so a store from before it
	// is what another directory would be.
	for name, b := range map[string][]byte{"damaged": append(bytes.Clone(good[:100]), good[101:]...), "good": good} {
		write(b)
		f.open()
		f.check(f.saverHolds(name == "good"))
		if got := describe(f.Root().index); !strings.HasPrefix(got, want) || !strings.Contains(got, "later") {
			t.Errorf("%s: the index is\n%s", name, got)
		}
		f.check(f.storage.Abandon())
	}
	f.fs = vfs.NewCrashableMem()
	f.open()
	f.put("a", "1")
	f.check(f.storage.Flush())
	f.check(f.storage.Abandon())
	write(ahead)
	f.open()
	f.check(f.saverHolds(false))
	if got := f.Root().Keys(); got != 1 {
		t.Errorf("ahead: %d keys, want 1", got)
	}
}

// saverHolds checks whether a checkpoint was loaded, and is there.
func (f *fixture) saverHolds(want bool) error {
	_, err := f.fs.Stat(f.saver.path(CheckpointFile))
	if loaded := f.saver.revision >= 0; loaded != want || (err == nil) != want {
		return fmt.Errorf("checkpoint loaded %v, on disk: %v; want %v", loaded, err, want)
	}
	return nil
}

// A compaction does not delete what a start from an older checkpoint would
// need, and goes on without a checkpoint if none can be written.
func TestCompactionNeedsCheckpoint(t *testing.T) {
	for _, broken := range []bool{false, true} {
		t.Run(fmt.Sprint("broken=", broken), func(t *testing.T) {
			fail := errorfs.Toggle{Injector: errorfs.InjectorFunc(func(op errorfs.Op) error {
				if op.Kind == errorfs.OpCreate && strings.HasSuffix(op.Path, CheckpointTemp) {
					return errorfs.ErrInjected
				}
				return nil
			})}
			f := newFixture(t, func(o *Options) { o.FS = errorfs.Wrap(o.FS, &fail) })
			f.put("a", "1", "b", "1")
			f.reopen()
			if broken {
				fail.On()
			}
			f.del("a") // after the checkpoint
			f.put("c", "1")
			f.compact(f.Root().Revision())
			f.work()
			fail.Off()
			f.check(f.saverHolds(!broken))
			f.check(f.storage.Flush())
			f.check(f.storage.Abandon())
			f.open()
			if got := f.Root().Keys(); got != 2 {
				t.Errorf("%d keys, want 2", got)
			}
		})
	}
}

// Checkpoints are made for volume, but not too often.
func TestCheckpointForVolume(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.CheckpointBytes, o.CheckpointInterval = 1000, time.Minute })
	value := strings.Repeat("x", 600)
	f.put("a", value, "b", value)
	if f.saver.revision != -1 {
		t.Error("a checkpoint before its interval is over")
	}
	f.now = f.now.Add(time.Minute)
	f.put("c", "1")
	if got := f.saver.revision; got != 4 {
		t.Errorf("checkpoint at %d, want 4", got)
	}
	f.now = f.now.Add(time.Minute)
	f.put("d", "1")
	if got := f.saver.revision; got != 4 {
		t.Errorf("checkpoint at %d without volume", got)
	}
	f.put("e", value, "f", value)
	if got := f.saver.revision; got != 7 {
		t.Errorf("checkpoint at %d, want 7", got)
	}
}

// Checkpoints that take long are further apart.
func TestCheckpointShare(t *testing.T) {
	var f *fixture
	took := 3 * time.Second
	f = newFixture(t, func(o *Options) {
		o.CheckpointBytes, o.CheckpointInterval = 1000, time.Second
		o.Go = func(job func()) { // on a slow disk
			f.now = f.now.Add(took)
			job()
		}
	})
	value := strings.Repeat("x", 1200)
	f.now = f.now.Add(time.Second)
	f.put("a", value)
	first := f.saver.revision
	if first == -1 {
		t.Fatal("no checkpoint")
	}
	next := func(interval time.Duration) {
		t.Helper()
		before := f.saver.revision
		f.now = f.now.Add(interval - took - time.Second)
		f.put("b", value)
		if f.saver.revision != before {
			t.Errorf("a checkpoint a second before %v were over since one of %v", interval, took)
		}
		f.now = f.now.Add(time.Second)
		took = time.Hour // of the one that begins now
		f.put("c", value)
		if f.saver.revision == before {
			t.Errorf("no checkpoint %v after the last", interval)
		}
	}
	next(savingShare * took)
	took = 0
	f.now = f.now.Add(-time.Hour)
	next(longestInterval)
}

// A checkpoint that did not follow a compaction is put aside.
func TestStaleCheckpoint(t *testing.T) {
	dir := "index"
	f := newFixture(t, func(o *Options) { o.Dir = dir })
	f.put("a", "1", "b", "1")
	f.reopen()
	f.check(f.saverHolds(true))
	dir = "" // as a tool would that does not know of it
	f.reopen()
	f.del("a")
	f.put("c", "1")
	f.compact(f.Root().Revision())
	f.work()
	dir = "index"
	f.reopen()
	f.check(f.saverHolds(false))
	if got := f.Root().Keys(); got != 2 {
		t.Errorf("%d keys, want 2", got)
	}
}
