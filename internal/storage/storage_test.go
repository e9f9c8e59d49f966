package storage

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

func openMem(t testing.TB) *Store {
	t.Helper()
	s := mustOpen(t, Options{FS: vfs.NewMem(), Dir: "db"})
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func mustOpen(t testing.TB, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func commit(t testing.TB, s *Store, b *Batch) {
	t.Helper()
	if err := s.Commit(b); err != nil {
		t.Fatal(err)
	}
}

func set(t testing.TB, s *Store, row, value string) {
	t.Helper()
	b := s.NewBatch()
	b.Set(RowKey(TableMeta, []byte(row)), []byte(value))
	commit(t, s, b)
}

func want(t testing.TB, r Reader, row, value string) {
	t.Helper()
	got, err := r.Get(RowKey(TableMeta, []byte(row)))
	if errors.Is(err, ErrNotFound) {
		got, err = []byte("absent"), nil
	}
	if err != nil || string(got) != value {
		t.Errorf("%s is %q (%v), want %q", row, got, err, value)
	}
}

// Only what was flushed is durable, and Close flushes; Abandon does not.
func TestDurability(t *testing.T) {
	fs := vfs.NewMem()
	flushed := make(chan struct{}, 10)
	s := mustOpen(t, Options{FS: fs, Dir: "db", OnFlush: func() { flushed <- struct{}{} }})
	set(t, s, "x", "1")
	want(t, s, "x", "1")
	want(t, s.DurableReader(), "x", "absent")
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	<-flushed
	want(t, s.DurableReader(), "x", "1")

	set(t, s, "x", "2")
	want(t, s.DurableReader(), "x", "1")
	if err := s.StartFlush(); err != nil {
		t.Fatal(err)
	}
	<-flushed
	want(t, s.DurableReader(), "x", "2")

	set(t, s, "x", "3")
	snapshot := s.Snapshot()
	set(t, s, "x", "4")
	want(t, snapshot, "x", "3")
	if err := snapshot.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Abandon(); err != nil {
		t.Fatal(err)
	}

	s = mustOpen(t, Options{FS: fs, Dir: "db"})
	want(t, s, "x", "2")
	set(t, s, "x", "5")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = mustOpen(t, Options{FS: fs, Dir: "db"})
	want(t, s, "x", "5")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// With Manual no compaction makes room, so nothing may wait for one.
func TestManualNeverStalls(t *testing.T) {
	s := mustOpen(t, Options{FS: vfs.NewMem(), Dir: "db", Manual: true})
	for n := range 40 {
		set(t, s, "x", fmt.Sprint(n))
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	want(t, s, "x", "39")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// A power cut while Pebble goes over to a new MANIFEST leaves a store that opens,
// whatever the directory remembers of names that were not synced.
func TestCrashAtNewManifest(t *testing.T) {
	for seed := range uint64(60) {
		rnd := rand.New(rand.NewPCG(seed, 5))
		mem := vfs.NewCrashableMem()
		var clone *vfs.MemFS
		fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			// Between the marker's creation and the sync of the directory.
			if clone == nil && op.Kind == errorfs.OpRemove && strings.Contains(op.Path, "marker.manifest") {
				clone = mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rnd})
			}
			return nil
		}))
		s := mustOpen(t, Options{FS: fs, Dir: "db"})
		set(t, s, "x", "1")
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		clone = nil
		s = mustOpen(t, Options{FS: fs, Dir: "db"}) // begins a new MANIFEST
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if clone == nil {
			t.Fatal("no marker was moved")
		}
		s, err := Open(Options{FS: clone, Dir: "db"})
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		want(t, s, "x", "1")
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOtherFormat(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, Options{FS: fs, Dir: "db"})
	set(t, s, MetaFormat, string(binary.BigEndian.AppendUint32(nil, FormatVersion+1)))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{FS: fs, Dir: "db"}); !errors.Is(err, ErrFormat) {
		t.Fatalf("another format was opened: %v", err)
	}
}

func TestRows(t *testing.T) {
	s := openMem(t)
	set(t, s, "a", "1")
	set(t, s, "z", "2")
	b := s.NewBatch()
	b.Set(RowKey(TableAlarm, []byte("other")), nil)
	commit(t, s, b)
	stop := errors.New("stop")
	var got []string
	err := Rows(s, TableMeta, func(name, value []byte) error {
		got = append(got, string(name)+"="+string(value))
		if string(name) == "z" {
			return stop
		}
		return nil
	})
	if want := []string{"a=1", "format=\x00\x00\x00\x01", "z=2"}; !slices.Equal(got, want) || !errors.Is(err, stop) {
		t.Errorf("rows are %q (%v), want %q", got, err, want)
	}
}

func TestIterSeesItsMoment(t *testing.T) {
	s := openMem(t)
	put := func(main int64) {
		b := s.NewBatch()
		b.SetRevision(main, 0, RevisionRecord{KV: []byte("kv")})
		commit(t, s, b)
	}
	for main := range int64(5) {
		put(main)
	}
	lower, upper := RevisionBounds(1, 4)
	iter, err := s.Iter(context.Background(), lower, upper)
	if err != nil {
		t.Fatal(err)
	}
	b := s.NewBatch()
	b.DeleteRange(lower, upper)
	commit(t, s, b)
	put(2)
	var got []int64
	for ok := iter.First(); ok; ok = iter.Next() {
		main, _, err := ParseRevisionKey(iter.Key())
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, main)
	}
	if err := errors.Join(iter.Error(), iter.Close()); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, []int64{1, 2, 3}) {
		t.Errorf("iterator saw %v", got)
	}
}

// crashWorkload commits numbered batches. Each sets a row to its number and
// changes other keys by a rule that depends on the number alone, so that the
// contents after n batches can be told.
type crashWorkload struct {
	seed uint64
}

// rnd returns the numbers that batch n is made of.
func (w crashWorkload) rnd(n int) *rand.Rand { return rand.New(rand.NewPCG(w.seed, uint64(n))) }

const (
	crashKeys = 200
	crashRow  = "batch"
)

// fill makes batch n.
func (w crashWorkload) fill(b *Batch, n int) {
	rnd := w.rnd(n)
	size := 1 + rnd.IntN(400)
	if rnd.IntN(20) == 0 {
		size = 40 << 10 // a few of these are larger than a memtable
	}
	for range 1 + rnd.IntN(6) {
		main := rnd.Int64N(crashKeys)
		switch rnd.IntN(8) {
		case 0:
			lower, upper := RevisionBounds(main, main+1+rnd.Int64N(20))
			b.DeleteRange(lower, upper)
		case 1:
			b.DeleteRevision(main, 0, size)
		default:
			b.SetRevision(main, 0, RevisionRecord{KV: crashValue(n, size), Applied: uint64(n), Term: 1})
		}
	}
	b.Set(RowKey(TableMeta, []byte(crashRow)), binary.BigEndian.AppendUint64(nil, uint64(n)))
}

func crashValue(n, size int) []byte {
	v := make([]byte, size)
	for i := range v {
		v[i] = byte(n + i)
	}
	return v
}

// state is what a store should hold after n batches: the batch that wrote each
// key, and the length of its value.
func (w crashWorkload) state(n int) string {
	type written struct{ batch, size int }
	keys := map[int64]written{}
	for i := 1; i <= n; i++ {
		rnd := w.rnd(i)
		size := 1 + rnd.IntN(400)
		if rnd.IntN(20) == 0 {
			size = 40 << 10
		}
		for range 1 + rnd.IntN(6) {
			main := rnd.Int64N(crashKeys)
			switch rnd.IntN(8) {
			case 0:
				to := main + 1 + rnd.Int64N(20)
				for k := main; k < to; k++ {
					delete(keys, k)
				}
			case 1:
				delete(keys, main)
			default:
				keys[main] = written{i, size}
			}
		}
	}
	s := fmt.Sprintf("batch %d:", n)
	for k := range int64(crashKeys) {
		if v, ok := keys[k]; ok {
			s += fmt.Sprintf(" %d=%d/%d", k, v.batch, v.size)
		}
	}
	return s
}

// contents describes a store as state does. It uses one iterator, since a
// DurableReader moves on with each flush.
func contents(t *testing.T, r Reader) (n int, s string) {
	t.Helper()
	lower, _ := TableBounds(TableMeta)
	logLower, upper := RevisionBounds(0, 0)
	iter, err := r.Iter(context.Background(), lower, upper)
	if err != nil {
		t.Fatal(err)
	}
	for ok := iter.First(); ok; ok = iter.Next() {
		if bytes.Compare(iter.Key(), logLower) < 0 {
			if string(RowOf(iter.Key())) == crashRow {
				n = int(binary.BigEndian.Uint64(iter.Value()))
			}
			continue
		}
		main, _, err := ParseRevisionKey(iter.Key())
		if err != nil {
			t.Fatal(err)
		}
		rec, err := ParseRevisionValue(iter.Value())
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(rec.KV, crashValue(int(rec.Applied), len(rec.KV))) {
			t.Fatalf("key %d of batch %d has other bytes", main, rec.Applied)
		}
		s += fmt.Sprintf(" %d=%d/%d", main, rec.Applied, len(rec.KV))
	}
	if err := errors.Join(iter.Error(), iter.Close()); err != nil {
		t.Fatal(err)
	}
	return n, fmt.Sprintf("batch %d:", n) + s
}

// What survives a crash is an exact prefix of the committed batches. Pebble
// does not promise it for a store without a write-ahead log, and all of
// Engram's durability rests on it: so here it is tried, with memtables of 16
// KiB, batches larger than that, range deletes, and clones of the disk taken
// at many points with more or less of what was not synced.
func TestCrashLeavesPrefix(t *testing.T) {
	lost, survived, clones := 0, 0, 0
	for seed := range uint64(6) {
		w := crashWorkload{seed}
		rnd := rand.New(rand.NewPCG(seed, 99))
		fs := vfs.NewCrashableMem()
		s := mustOpen(t, Options{FS: fs, Dir: "db", MemTableBytes: 16 << 10})
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
		for n := 1; n <= 200; n++ {
			b := s.NewBatch()
			w.fill(b, n)
			commit(t, s, b)
			if rnd.IntN(40) == 0 {
				if err := s.StartFlush(); err != nil {
					t.Fatal(err)
				}
			}
			if rnd.IntN(8) > 0 {
				continue
			}
			durable, durableState := contents(t, s.DurableReader())
			if durableState != w.state(durable) {
				t.Fatalf("seed %d: DurableReader sees\n%s, want\n%s", seed, durableState, w.state(durable))
			}
			clone := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rnd.IntN(101), RNG: rnd})
			got := checkCrash(t, clone, w, durable, n)
			clones++
			lost += n - got
			survived += got
		}
		if err := s.Abandon(); err != nil {
			t.Fatal(err)
		}
	}
	if lost == 0 || survived == 0 {
		t.Errorf("%d clones lost %d batches and kept %d: the experiment tries nothing", clones, lost, survived)
	}
}

// checkCrash opens a clone and returns how many batches survived: at least
// those that were durable, and at most those committed.
func checkCrash(t *testing.T, fs *vfs.MemFS, w crashWorkload, durable, committed int) int {
	t.Helper()
	s := mustOpen(t, Options{FS: fs, Dir: "db", MemTableBytes: 16 << 10})
	n, got := contents(t, s)
	if want := w.state(n); got != want {
		t.Fatalf("seed %d: after a crash at batch %d the store has\n%s\nwant\n%s", w.seed, committed, got, want)
	}
	if n < durable || n > committed {
		t.Fatalf("seed %d: %d batches survived, %d were durable, %d committed", w.seed, n, durable, committed)
	}
	if err := s.Abandon(); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestStoreWithoutMarkerIsRefused: Pebble takes a directory without the marker
// for a new one, and deletes its tables.
func TestStoreWithoutMarkerIsRefused(t *testing.T) {
	fs := vfs.NewMem()
	s, err := Open(Options{FS: fs, Dir: "d"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	names, err := fs.List("d")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasPrefix(name, "marker.manifest.") {
			if err := fs.Remove("d/" + name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := Open(Options{FS: fs, Dir: "d"}); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), ".sst") {
		t.Fatalf("opened, or refused without a reason: %v", err)
	}
}

// While the cache is spared it keeps little of what is read, and afterwards as
// much as before.
func TestSpareCache(t *testing.T) {
	s, err := Open(Options{FS: vfs.NewMem(), CacheBytes: 64 << 20, Manual: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	b := s.NewBatch()
	for i := range 32 << 10 {
		value := make([]byte, 1<<10)
		binary.BigEndian.PutUint64(value[i%1000:], uint64(i)*0x9e3779b97f4a7c15)
		b.Set(AppendRevisionKey(nil, int64(i+2), 0), value)
	}
	if err := errors.Join(s.Commit(b), s.Flush()); err != nil {
		t.Fatal(err)
	}
	read := func() {
		lower, upper := RevisionBounds(0, 0)
		iter, err := s.Iter(t.Context(), lower, upper)
		if err != nil {
			t.Fatal(err)
		}
		defer iter.Close()
		for ok := iter.First(); ok; ok = iter.Next() {
		}
	}

	done := s.SpareCache()
	if read(); s.cache.Size() > spareCacheBytes {
		t.Errorf("%d bytes in a cache that is spared", s.cache.Size())
	}
	done()
	if read(); s.cache.Size() < 30<<20 {
		t.Errorf("%d bytes in the cache afterwards", s.cache.Size())
	}
}
