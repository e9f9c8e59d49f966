package raftlog

import (
	"errors"
	"math"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

func TestIdentity(t *testing.T) {
	fs := vfs.NewMem()
	o := testOptions(fs)
	if ok, err := Exists(fs, testDir); ok || err != nil {
		t.Fatal(ok, err)
	}
	l := mustOpen(t, o)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if ok, err := Exists(fs, testDir); !ok || err != nil {
		t.Fatal(ok, err)
	}
	o.Identity.MemberID = 0xb
	if _, err := Open(o); !errors.Is(err, ErrIdentity) {
		t.Fatal(err)
	}
	o.Identity = Identity{}
	l = mustOpen(t, o)
	if id := l.Identity(); id != (Identity{0xc, 0xa}) {
		t.Fatal(id)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
	if _, err := l.Write(nil); !errors.Is(err, ErrClosed) {
		t.Fatal(err)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{}, {FS: vfs.NewMem()}, {FS: vfs.NewMem(), Dir: "d", SegmentBytes: 100}} {
		if _, err := Open(o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

func TestInitialState(t *testing.T) {
	o := testOptions(vfs.NewMem())
	l := closeAtEnd(t, mustOpen(t, o))
	hs, cs, err := l.InitialState()
	if hs != nil || cs == nil || err != nil {
		t.Fatal(hs, cs, err)
	}
	if _, err := l.Snapshot(); err != raft.ErrSnapshotTemporarilyUnavailable {
		t.Fatal(err)
	}
	write(t, l, Append{Entries: entries(1, 9, 1, 10), HardState: hard(3, 2, 4)})
	l.SetInitialState(7, &raftpb.ConfState{Voters: []uint64{5}})
	hs, cs, _ = l.InitialState()
	if hs.GetTerm() != 3 || hs.GetVote() != 2 || hs.GetCommit() != 7 || cs.GetVoters()[0] != 5 {
		t.Fatal(hs, cs)
	}
	write(t, l, Append{Snapshot: &Snapshot{Index: 20, Term: 3, Dir: "s", ConfState: &raftpb.ConfState{Voters: []uint64{6}}}})
	s, err := l.Snapshot()
	if err != nil || s.GetMetadata().GetIndex() != 20 || s.GetMetadata().GetTerm() != 3 || s.GetMetadata().GetConfState().GetVoters()[0] != 6 {
		t.Fatal(s, err)
	}
	l.SetSnapshot(func() (*raftpb.Snapshot, error) { return nil, raft.ErrSnapshotTemporarilyUnavailable })
	if _, err := l.Snapshot(); err != raft.ErrSnapshotTemporarilyUnavailable {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = closeAtEnd(t, mustOpen(t, o))
	hs, cs, _ = l.InitialState()
	if hs.GetCommit() != 20 || cs.GetVoters()[0] != 6 {
		t.Fatal(hs, cs)
	}
	if at, ok := l.Installed(); !ok || at.Dir != "s" || at.Index != 20 {
		t.Fatal(at, ok)
	}
}

// TestRefused gives Write what a correct raft never does.
func TestRefused(t *testing.T) {
	l := closeAtEnd(t, mustOpen(t, testOptions(vfs.NewMem())))
	write(t, l, Append{Entries: entries(1, 9, 1, 10), HardState: hard(1, 1, 6)})
	if err := l.Compact(3); err != nil {
		t.Fatal(err)
	}
	before := readAll(t, l)
	for name, as := range map[string][]Append{
		"a gap":                    {{Entries: entries(11, 12, 1, 1)}},
		"a gap inside":             {{Entries: append(entries(10, 10, 1, 1), entries(12, 12, 1, 1)...)}},
		"a compacted entry":        {{Entries: entries(3, 4, 1, 10)}},
		"a committed entry":        {{Entries: entries(5, 5, 2, 10)}},
		"a snapshot in the past":   {{Snapshot: &Snapshot{Index: 5, Term: 1}}},
		"before the snapshot":      {{Snapshot: &Snapshot{Index: 50, Term: 1}}, {Entries: entries(20, 20, 1, 10)}},
		"a good one and a bad one": {{Entries: entries(10, 11, 1, 1)}, {Entries: entries(13, 13, 1, 1)}},
	} {
		if _, err := l.Write(as); !errors.Is(err, ErrOrder) {
			t.Errorf("%s: %v", name, err)
		}
		if got := readAll(t, l); !got.equal(before) {
			t.Errorf("%s changed the log to %v", name, got)
		}
	}
	if must, err := l.Write([]Append{{HardState: hard(1, 1, 8)}}); must || err != nil {
		t.Errorf("a commit alone: must sync %v, %v", must, err)
	}
	if must, err := l.Write([]Append{{HardState: hard(1, 2, 8)}}); !must || err != nil {
		t.Errorf("a vote: must sync %v, %v", must, err)
	}
	if must, err := l.Write([]Append{{HardState: hard(1, 2, 9)}}); !must || err != nil {
		t.Errorf("a commit after an unsynced vote: must sync %v, %v", must, err)
	}
}

func TestEncodedSize(t *testing.T) {
	kinds := []*raftpb.EntryType{nil, raftpb.EntryNormal.Enum(), raftpb.EntryConfChangeV2.Enum()}
	for _, n := range []uint64{0, 1, 127, 128, 1 << 20, math.MaxUint64} {
		for _, k := range kinds {
			for _, d := range [][]byte{nil, {}, make([]byte, 127), make([]byte, 128), make([]byte, 70000)} {
				for _, e := range []*raftpb.Entry{{Index: &n, Term: &n, Type: k, Data: d}, {Index: &n, Data: d}} {
					if got, want := encodedSize(e), uint64(proto.Size(e)); got != want {
						t.Fatalf("%v: %d, want %d", e, got, want)
					}
				}
			}
		}
	}
}

// TestEntriesLikeRaft compares Entries with raft's own storage in memory.
func TestEntriesLikeRaft(t *testing.T) {
	o := testOptions(vfs.NewMem())
	o.CacheBytes = 1500
	l := closeAtEnd(t, mustOpen(t, o))
	mem := raft.NewMemoryStorage()
	es := entries(1, 30, 1, 60)
	write(t, l, Append{Entries: es})
	if err := errors.Join(mem.Append(es), mem.Compact(4), l.Compact(4)); err != nil {
		t.Fatal(err)
	}
	for lo := uint64(1); lo <= 30; lo++ {
		for hi := lo; hi <= 31; hi++ {
			for _, size := range []uint64{0, 1, 130, 400, 1 << 20} {
				got, err := l.Entries(lo, hi, size)
				want, wantErr := mem.Entries(lo, hi, size)
				if err != wantErr || len(got) > len(want) || len(want) > 0 && len(got) == 0 {
					t.Fatalf("[%d,%d) of %d bytes: %d entries, %v; want %d, %v", lo, hi, size, len(got), err, len(want), wantErr)
				}
				if l.tail.from(lo) != nil && len(got) != len(want) {
					t.Fatalf("[%d,%d) of %d bytes: %d cached entries, want %d", lo, hi, size, len(got), len(want))
				}
				for i := range got {
					if !proto.Equal(got[i], want[i]) {
						t.Fatalf("%v, want %v", got[i], want[i])
					}
				}
			}
		}
	}
	for i := uint64(0); i < 33; i++ {
		got, err := l.Term(i)
		want, wantErr := mem.Term(i)
		if got != want || err != wantErr {
			t.Fatalf("term of %d: %d %v, want %d %v", i, got, err, want, wantErr)
		}
	}
}

func TestMissAndPrefetch(t *testing.T) {
	o := testOptions(vfs.NewMem())
	l := closeAtEnd(t, mustOpen(t, o))
	write(t, l, Append{Entries: entries(1, 40, 1, 100)})
	var asked [][2]uint64
	l.SetOnMiss(func(lo, hi uint64) bool { asked = append(asked, [2]uint64{lo, hi}); return lo > 1 })
	if got, err := l.Entries(3, 9, NoLimit); len(got) != 0 || err != nil || len(asked) != 1 || asked[0] != [2]uint64{3, 9} {
		t.Fatal(got, err, asked)
	}
	if got, err := l.Entries(1, 9, NoLimit); len(got) != 8 || err != nil {
		t.Fatal("refused to wait, so it must read:", got, err)
	}
	if err := l.Prefetch(3, 9, 500); err != nil {
		t.Fatal(err)
	}
	asked = nil
	got, err := l.Entries(3, 41, NoLimit)
	if len(got) == 0 || len(got) > 6 || err != nil || len(asked) != 0 {
		t.Fatal(len(got), err, asked)
	}
	for i := range got {
		if flat(got[i]) != flat(entries(1, 40, 1, 100)[2+i]) {
			t.Fatal(got[i])
		}
	}
	// Replacing the tail drops what was prefetched of it, compaction too.
	if err := l.Prefetch(20, 24, NoLimit); err != nil {
		t.Fatal(err)
	}
	write(t, l, Append{Entries: entries(22, 22, 2, 10)})
	if got, _ := l.Entries(20, 22, NoLimit); len(got) != 0 {
		t.Fatal("a window survived the truncation:", got)
	}
	if got, _ := l.Entries(22, 23, NoLimit); len(got) != 1 || got[0].GetTerm() != 2 {
		t.Fatal(got)
	}
	if err := l.Compact(15); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Entries(3, 9, NoLimit); err != raft.ErrCompacted {
		t.Fatal(err)
	}
	if err := l.Prefetch(3, 9, NoLimit); err != raft.ErrCompacted {
		t.Fatal(err)
	}
	if l.windows.bytes != 0 || len(l.windows.list) != 0 {
		t.Fatalf("windows hold %d bytes", l.windows.bytes)
	}
}

func TestBudgets(t *testing.T) {
	o := testOptions(vfs.NewMem())
	o.CacheBytes, o.PrefetchBytes = 3000, 3000
	l := closeAtEnd(t, mustOpen(t, o))
	for i := uint64(1); i < 200; i++ {
		write(t, l, Append{Entries: entries(i, i, 1, int(i*7%400))})
		if err := l.Prefetch(1+i/2, i+1, 700); err != nil {
			t.Fatal(err)
		}
		sum := int64(0)
		for _, e := range l.tail.entries {
			sum += memoryOf(e)
		}
		if sum != l.tail.bytes || sum > o.CacheBytes {
			t.Fatalf("the cache has %d bytes and thinks %d", sum, l.tail.bytes)
		}
		sum = 0
		for _, w := range l.windows.list {
			sum += w.bytes
		}
		if sum != l.windows.bytes || sum > o.PrefetchBytes || len(l.windows.list) > maxWindows {
			t.Fatalf("%d windows have %d bytes and think %d", len(l.windows.list), sum, l.windows.bytes)
		}
	}
}

// Between the record of a snapshot and its installation the machine is behind all that the log has.
func TestSizeAfterSnapshot(t *testing.T) {
	l := closeAtEnd(t, mustOpen(t, testOptions(vfs.NewMem())))
	write(t, l, Append{Entries: entries(1, 20, 1, 100)})
	write(t, l, Append{Snapshot: &Snapshot{Index: 50, Term: 2, Dir: "s"}})
	for _, index := range []uint64{0, 10, 49, 50, 51} {
		if n := l.SizeAfter(index); n != 0 {
			t.Errorf("%d bytes after entry %d, and there is none", n, index)
		}
	}
	write(t, l, Append{Entries: entries(51, 51, 2, 100)})
	if a, b := l.SizeAfter(10), l.SizeAfter(50); a != b || a < 100 {
		t.Errorf("%d bytes after entry 10, %d after entry 50", a, b)
	}
}

func TestSizesAndRecycling(t *testing.T) {
	fs := vfs.NewMem()
	o := testOptions(fs)
	l := closeAtEnd(t, mustOpen(t, o))
	if n := l.SizeAfter(0); n != 0 {
		t.Fatal(n)
	}
	for i := uint64(1); i <= 40; i++ {
		write(t, l, Append{Entries: entries(i, i, 1, 400)})
	}
	for i := uint64(1); i < 40; i++ {
		if d := l.SizeAfter(i-1) - l.SizeAfter(i); d < recordSize(entryPrefix+400) || d > o.SegmentBytes {
			t.Fatalf("entry %d is %d bytes", i, d)
		}
	}
	if l.SizeAfter(40) != 0 || l.SizeAfter(0) > l.Size() || l.SizeAfter(0) < 40*400 {
		t.Fatal(l.SizeAfter(40), l.SizeAfter(0), l.Size())
	}
	n, size := l.Segments(), l.Size()
	if err := l.Compact(30); err != nil {
		t.Fatal(err)
	}
	if l.Segments() >= n || l.Size() >= size || l.spare == nil {
		t.Fatalf("%d segments of %d left, %d bytes of %d", l.Segments(), n, l.Size(), size)
	}
	// The log goes on in the recycled file, and its old bytes are not seen.
	name := l.spare.name
	for i := uint64(41); l.spare != nil; i++ {
		write(t, l, Append{Entries: entries(i, i, 1, 400)})
	}
	if _, err := fs.Stat(l.path(name)); err == nil {
		t.Fatal("the spare was not used")
	}
	if n := len(fileBytes(t, fs, l.st.lastSegment().path)); int64(n) < o.SegmentBytes/2 {
		t.Fatalf("the new segment has %d bytes: not a recycled one", n)
	}
	want := readAll(t, l)
	if err := l.Abandon(); err != nil {
		t.Fatal(err)
	}
	l = closeAtEnd(t, mustOpen(t, o))
	if got := readAll(t, l); !got.equal(want) {
		t.Fatalf("got %v\nwant %v", got, want)
	}
}

func TestLargeWrite(t *testing.T) {
	o := testOptions(vfs.NewMem())
	l := closeAtEnd(t, mustOpen(t, o))
	write(t, l, Append{Entries: entries(1, 1, 1, 10)})
	write(t, l, Append{Entries: entries(2, 3, 1, 20000)})
	write(t, l, Append{Entries: entries(4, 4, 1, 600000)})
	want := readAll(t, l)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = closeAtEnd(t, mustOpen(t, o))
	if got := readAll(t, l); !got.equal(want) || len(got.entries) != 4 {
		t.Fatal(got)
	}
}

// TestOnDisk runs on the operating system's files, where space is preallocated.
func TestOnDisk(t *testing.T) {
	o := testOptions(vfs.Default)
	o.Dir = vfs.Default.PathJoin(t.TempDir(), "raft")
	l := closeAtEnd(t, mustOpen(t, o))
	for i := uint64(1); i <= 60; i++ {
		write(t, l, Append{Entries: entries(i, i, 1, 300), HardState: hard(1, 1, i)})
		if i%13 == 0 {
			if err := errors.Join(l.Prepare(), l.Compact(i-5)); err != nil {
				t.Fatal(err)
			}
		}
	}
	want := readAll(t, l)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = closeAtEnd(t, mustOpen(t, o))
	if got := readAll(t, l); !got.equal(want) {
		t.Fatalf("got %v\nwant %v", got, want)
	}
}

func TestMetrics(t *testing.T) {
	o := testOptions(vfs.NewMem())
	o.Metrics = NewMetrics()
	reg := prometheus.NewRegistry()
	reg.MustRegister(o.Metrics.Collectors()...)
	l := closeAtEnd(t, mustOpen(t, o))
	write(t, l, Append{Entries: entries(1, 1, 1, 10)})
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range all {
		m := f.GetMetric()[0]
		values[f.GetName()] = m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		if b := m.GetHistogram().GetBucket(); b != nil && (len(b) != 14 || b[0].GetUpperBound() != 0.001 || math.Abs(b[13].GetUpperBound()-8.192) > 1e-9) {
			t.Errorf("buckets of %s: %v", f.GetName(), b)
		}
	}
	if values["etcd_disk_wal_write_bytes_total"] < 50 || values["etcd_disk_wal_fsync_duration_seconds"] < 2 ||
		values["etcd_disk_wal_write_duration_seconds"] < 2 {
		t.Error(values)
	}
}

// TestConcurrency reads from several goroutines while the log grows, is cut at
// both ends and its files are reused. Its point is the race detector, and that
// no reader sees a wrong entry.
func TestConcurrency(t *testing.T) {
	o := testOptions(vfs.NewMem())
	l := closeAtEnd(t, mustOpen(t, o))
	write(t, l, Append{Entries: entries(1, 1, 1, 100), HardState: hard(1, 1, 1)})
	done := make(chan struct{})
	var wg sync.WaitGroup
	reader := func(f func(first, last uint64) error) {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				first, _ := l.FirstIndex()
				last, _ := l.LastIndex()
				if err := f(first, last); err != nil && err != raft.ErrCompacted && err != raft.ErrUnavailable {
					t.Error(err)
					return
				}
			}
		})
	}
	check := func(e *raftpb.Entry) error {
		if want := entries(e.GetIndex(), e.GetIndex(), e.GetTerm(), 100)[0]; flat(e) != flat(want) {
			return errors.New("a wrong entry was read")
		}
		return nil
	}
	reader(func(first, last uint64) error { return l.Replay(first, last+1, check) })
	reader(func(first, last uint64) error { return l.Prefetch(first+3, last+1, 1000) })
	reader(func(first, last uint64) error {
		es, err := l.Entries(first+3, last+1, 800)
		for _, e := range es {
			err = errors.Join(err, check(e))
		}
		return err
	})
	reader(func(first, last uint64) error {
		_, err := l.Term(last)
		_, _, _ = l.InitialState()
		_, _ = l.Size(), l.SizeAfter(first+2)
		return err
	})
	reader(func(first, last uint64) error {
		if last < 40 {
			return nil
		}
		err := l.Prepare()
		if last > first+40 {
			err = errors.Join(err, l.Compact(last-35))
		}
		return err
	})
	term, last := uint64(1), uint64(1)
	for i := range 1000 {
		first := last + 1
		if i%50 == 49 {
			term, first = term+1, last-5
		}
		last = first + uint64(i%4)
		if i%50 == 49 {
			last = first + 1
		}
		write(t, l, Append{Entries: entries(first, last, term, 100), HardState: hard(term, 1, 1)})
	}
	close(done)
	wg.Wait()
}
