package mvcc

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/storage"
)

// fixture is a store with its disk, driven as the applier drives it.
type fixture struct {
	t       testing.TB
	fs      *vfs.MemFS
	storage *storage.Store
	*Store
	options func(*Options)
	mem     uint64 // memtable bytes
	now     time.Time
	index   uint64
	events  []Event // of the last batch
}

func newFixture(t testing.TB, options func(*Options)) *fixture {
	f := &fixture{t: t, fs: vfs.NewCrashableMem(), options: options, mem: 1 << 20, now: time.Unix(1000, 0)}
	f.open()
	t.Cleanup(func() {
		if f.storage != nil {
			f.check(f.storage.Abandon())
		}
	})
	return f
}

func (f *fixture) check(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) open() {
	f.t.Helper()
	var err error
	f.storage, err = storage.Open(storage.Options{FS: f.fs, Dir: "db", MemTableBytes: f.mem})
	f.check(err)
	o := Options{Storage: f.storage, FS: f.fs, Dir: "index", Now: func() time.Time { return f.now }, Go: func(job func()) { job() }}
	if f.options != nil {
		f.options(&o)
	}
	f.Store, err = Open(o)
	f.check(err)
	f.index, _ = f.Applied()
}

// reopen closes cleanly and opens again.
func (f *fixture) reopen() {
	f.t.Helper()
	f.check(f.Store.Close())
	f.check(f.storage.Close())
	f.open()
}

// apply makes one batch.
func (f *fixture) apply(fn func(w *Writer)) *Writer {
	f.t.Helper()
	b := f.storage.NewBatch()
	w := f.NewWriter(b)
	fn(w)
	f.index++
	w.Seal(f.index, 1)
	f.check(f.storage.Commit(b))
	w.Committed()
	f.events = w.Events()
	return w
}

// put writes pairs of key and value, a revision each, in one batch.
func (f *fixture) put(pairs ...string) {
	f.t.Helper()
	f.apply(func(w *Writer) {
		for i := 0; i < len(pairs); i += 2 {
			w.Begin()
			w.Put([]byte(pairs[i]), []byte(pairs[i+1]), 0)
			w.End()
		}
	})
}

func (f *fixture) del(key string) {
	f.t.Helper()
	f.apply(func(w *Writer) {
		w.Begin()
		w.DeleteRange([]byte(key), nil, nil)
		w.End()
	})
}

func (f *fixture) compact(rev int64) {
	f.t.Helper()
	f.apply(func(w *Writer) { f.check(w.Compact(rev)) })
}

// work runs background steps till there are none.
func (f *fixture) work() {
	f.t.Helper()
	for {
		more, pause, err := f.CompactStep()
		f.check(err)
		if !more {
			return
		}
		f.now = f.now.Add(pause)
	}
}

func (f *fixture) hash(rev int64) HashResult {
	f.t.Helper()
	h, err := f.HashKV(context.Background(), f.Root(), rev)
	f.check(err)
	return h
}

// The vectors of state-machine.md, section 11, come from a running etcd.
func TestHashVectors(t *testing.T) {
	f := newFixture(t, nil)
	f.put("a", "1", "a", "2", "b", "1")
	f.del("a")
	f.put("c", "1")
	want := func(rev int64, want HashResult) {
		t.Helper()
		if got := f.hash(rev); got != want {
			t.Errorf("HashKV(%d) = %+v, want %+v", rev, got, want)
		}
	}
	want(0, HashResult{1306755273, -1, 6, 6})
	f.compact(4)
	want(0, HashResult{3684001879, 4, 6, 6}) // before anything is deleted
	f.work()
	want(0, HashResult{3684001879, 4, 6, 6})
	want(5, HashResult{1010904130, 4, 5, 6})
	want(4, HashResult{1662700350, -1, 4, 6})
}

// A restore from backup raises the revision by a record with an empty value,
// and schedules a compaction there: state-machine.md 6.3. The record stays as
// the key "", which no range can name.
func TestRaisedRevision(t *testing.T) {
	f := newFixture(t, nil)
	f.put("a", "1", "a", "2", "b", "1")
	f.check(f.Store.Close())
	for _, main := range []int64{1000, 3000} {
		b := f.storage.NewBatch()
		b.SetRevision(main, 0, storage.RevisionRecord{})
		setRevisionRow(b, storage.MetaScheduledCompact, main)
		f.check(f.storage.Commit(b))
		f.check(f.saver.remove())
		f.check(f.storage.Close())
		f.open()
		if r := f.Root(); r.Revision() != main || r.CompactRevision() != main {
			t.Fatalf("revision %d, compact revision %d", r.Revision(), r.CompactRevision())
		}
		before := f.hash(0)
		f.work()
		if after := f.hash(0); after != before {
			t.Errorf("hash %+v, after deletion %+v", before, after)
		}
		if res, err := f.view().Range(context.Background(), []byte{0}, []byte{0}, RangeOptions{}); err != nil || res.Count != 2 {
			t.Errorf("%+v, %v", res, err)
		}
		f.reopen()
		if after := f.hash(0); after != before {
			t.Errorf("hash %+v, after a restart %+v", before, after)
		}
	}
	var records []int64
	lower, upper := storage.RevisionBounds(0, 0)
	f.check(f.eachRecord(context.Background(), lower, upper, nil, func(r *logRecord) bool {
		records = append(records, r.rev.Main)
		return true
	}))
	if want := []int64{3, 4, 3000}; !slices.Equal(records, want) {
		t.Errorf("records %v, want %v", records, want)
	}
	f.put("a", "3")
	if rev := f.Root().Revision(); rev != 3001 {
		t.Errorf("the next revision is %d", rev)
	}
}

// view pins the present till the test ends.
func (f *fixture) view() *View {
	v := f.View(f.Root())
	f.t.Cleanup(v.Release)
	return v
}

// The mark of the durable contents never runs ahead of them.
func TestAppliedOf(t *testing.T) {
	f := newFixture(t, nil)
	f.put("a", "1")
	f.check(f.storage.Flush())
	f.put("b", "1")
	f.apply(func(w *Writer) {}) // an entry without effect
	if index, term := f.Applied(); index != 3 || term != 1 {
		t.Errorf("applied %d at term %d", index, term)
	}
	for _, c := range []struct {
		r    storage.Reader
		want uint64
	}{{f.storage, 3}, {f.storage.DurableReader(), 1}} {
		if index, _, err := AppliedOf(c.r); err != nil || index != c.want {
			t.Errorf("%T: applied %d, %v; want %d", c.r, index, err, c.want)
		}
	}
}
