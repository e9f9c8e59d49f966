package raftlog

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"go.etcd.io/raft/v3/raftpb"
)

func fileBytes(t testing.TB, fs *vfs.MemFS, path string) []byte {
	t.Helper()
	b, err := fs.UnsafeGetFileDataBuffer(path)
	if err != nil {
		t.Fatal(err)
	}
	return slices.Clone(b)
}

func putFile(t testing.TB, fs vfs.FS, path string, b []byte) {
	t.Helper()
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(slices.Clone(b)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

func flipByte(t testing.TB, fs *vfs.MemFS, path string, offset int64, mask byte) {
	t.Helper()
	b := fileBytes(t, fs, path)
	b[offset] ^= mask
	putFile(t, fs, path, b)
}

func copyFS(t testing.TB, fs *vfs.MemFS) *vfs.MemFS {
	t.Helper()
	to := vfs.NewMem()
	if ok, err := vfs.Clone(fs, to, "", ""); err != nil || !ok {
		t.Fatal(ok, err)
	}
	return to
}

// smallLog writes a log of two segments that has every kind of record. It returns
// the file system as a crash right after the last Sync leaves it, the contents
// after each record in the last Write, and where that Write begins.
func smallLog(t testing.TB, o *Options) (fs *vfs.MemFS, states []contents, path string, begin, end int64) {
	fs = vfs.NewMem()
	*o = testOptions(fs)
	o.SegmentBytes = 2048
	l := mustOpen(t, *o)
	write(t, l, Append{
		Snapshot:  &Snapshot{Index: 10, Term: 2, Dir: "state-7", ConfState: &raftpb.ConfState{Voters: []uint64{1, 2}}},
		HardState: hard(2, 1, 10),
	})
	write(t, l, Append{Entries: entries(11, 16, 2, 120)})
	write(t, l, Append{Entries: entries(15, 22, 3, 70), HardState: hard(3, 1, 14)})
	if err := l.Compact(12); err != nil {
		t.Fatal(err)
	}
	if l.Segments() != 2 {
		t.Fatalf("%d segments", l.Segments())
	}
	states = append(states, readAll(t, l))
	begin = int64(l.end - l.st.lastSegment().base)
	last := entries(23, 25, 3, 33)
	for i := range last {
		write(t, l, Append{Entries: last[i : i+1]})
		states = append(states, readAll(t, l))
	}
	// The three were one batch: nothing says that the first two were synced.
	seg := l.st.lastSegment()
	path, end = seg.path, int64(l.end-seg.base)
	synced := l.st.end - uint64(end-begin)
	if err := l.Abandon(); err != nil {
		t.Fatal(err)
	}
	b := fileBytes(t, fs, path)
	for at := begin; at < end; {
		f := decodeFrame(b[at:])
		f.synced = synced
		sealRecord(b[at:at+f.size()], f, seg.seed)
		at += f.size()
	}
	putFile(t, fs, path, b[:end])
	return fs, states, path, begin, end
}

// TestTornTail cuts the file at every length, and also leaves zeros, or the bytes
// of an older segment, behind each cut.
func TestTornTail(t *testing.T) {
	var o Options
	fs, states, path, begin, end := smallLog(t, &o)
	whole := fileBytes(t, fs, path)
	junk := make([]byte, len(whole))
	copy(junk, fileBytes(t, fs, fs.PathJoin(testDir, mustList(t, fs)[0])))
	for n := begin; n <= end; n++ {
		for _, tail := range []string{"nothing", "zeros", "junk"} {
			b := slices.Clone(whole)
			switch tail {
			case "nothing":
				b = b[:n]
			case "zeros":
				clear(b[n:])
			case "junk":
				copy(b[n:], junk[n:])
			}
			fs := copyFS(t, fs)
			putFile(t, fs, path, b)
			o.FS = fs
			l, err := Open(o)
			if err != nil {
				t.Fatalf("cut at %d, then %s: %v", n, tail, err)
			}
			got := readAll(t, l)
			i := slices.IndexFunc(states, got.equal)
			if i < 0 {
				t.Fatalf("cut at %d, then %s: not a prefix: %v", n, tail, got)
			}
			if n == end && i != len(states)-1 {
				t.Fatalf("nothing cut, yet only %d records are there", i)
			}
			// What is appended afterwards is there, and nothing of the cut tail.
			write(t, l, Append{Entries: entries(got.entries[len(got.entries)-1].index+1, 40, 4, 9)})
			want := readAll(t, l)
			if err := l.Abandon(); err != nil {
				t.Fatal(err)
			}
			l = mustOpen(t, o)
			if again := readAll(t, l); !again.equal(want) {
				t.Fatalf("cut at %d, then %s: second life lost\n%v\nhas\n%v", n, tail, want, again)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	// One byte less than what is known to be synced is damage.
	fs2 := copyFS(t, fs)
	putFile(t, fs2, path, whole)
	o.FS = fs2
	l := mustOpen(t, o) // marks the end
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	flipByte(t, fs2, path, end-1, 1)
	wantDamage(t, o, path, -1)
}

func mustList(t testing.TB, fs vfs.FS) []string {
	t.Helper()
	names, err := listSegments(fs, testDir)
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func wantDamage(t *testing.T, o Options, path string, offset int64) {
	t.Helper()
	l, err := Open(o)
	if err == nil {
		_ = l.Close()
		t.Fatalf("damage in %s was not noticed", path)
	}
	var d *DamageError
	if !errors.As(err, &d) || !errors.Is(err, ErrDamaged) {
		t.Fatalf("not a DamageError: %v", err)
	}
	if d.File != path || offset >= 0 && d.Offset != offset {
		t.Fatalf("damage at offset %d of %s was reported as %v", offset, path, err)
	}
	for _, part := range []string{d.File, fmt.Sprint(d.Offset), d.Held, "ctl rebuild"} {
		if part == "" || !strings.Contains(err.Error(), part) {
			t.Fatalf("%q is not in the error: %v", part, err)
		}
	}
}

// TestBitFlips flips bits at every byte of every file.
func TestBitFlips(t *testing.T) {
	var o Options
	fs, states, lastPath, begin, end := smallLog(t, &o)
	full := states[len(states)-1]
	counts := map[string]int{}
	for _, name := range mustList(t, fs) {
		path := fs.PathJoin(testDir, name)
		starts := recordStarts(t, fs, name)
		n := int64(len(fileBytes(t, fs, path)))
		for at := range n {
			for _, mask := range []byte{0x01, 0x80, 0xff} {
				fs := copyFS(t, fs)
				flipByte(t, fs, path, at, mask)
				o.FS = fs
				record := startOf(starts, at)
				inTail := path == lastPath && at >= begin
				l, err := Open(o)
				var d *DamageError
				switch {
				case err == nil:
					got := readAll(t, l)
					i := slices.IndexFunc(states, got.equal)
					used := at < starts[len(starts)-1] // else: beyond the segment's end
					switch {
					case i < 0 || used && !inTail:
						t.Fatalf("byte %d of %s changed by %#x: accepted as %v", at, path, mask, got)
					case used && got.equal(full):
						t.Fatalf("byte %d of %s changed by %#x: not noticed", at, path, mask)
					}
					counts["cut"]++
					if err := l.Abandon(); err != nil {
						t.Fatal(err)
					}
				case errors.As(err, &d):
					if inTail || d.File != path || d.Offset != record {
						t.Fatalf("byte %d of %s (record %d, last mark %d): %v", at, path, record, begin, err)
					}
					counts["refused"]++
				default:
					t.Fatalf("byte %d of %s: %v", at, path, err)
				}
			}
		}
	}
	if counts["cut"] < int(end-begin) || counts["refused"] < 1000 {
		t.Fatalf("too few cases: %v", counts)
	}
}

// recordStarts returns the offsets of the records of a segment, and its end.
func recordStarts(t *testing.T, fs vfs.FS, name string) []int64 {
	t.Helper()
	s, err := openScanner(fs, testDir, name)
	if err != nil {
		t.Fatal(err)
	}
	starts := []int64{0}
	end, err := s.records(s.size, func(offset int64, _ *frame, _ []byte) error {
		starts = append(starts, offset)
		return nil
	})
	if err := errors.Join(err, s.close()); err != nil {
		t.Fatal(err)
	}
	return append(starts, end)
}

func startOf(starts []int64, at int64) int64 {
	i, found := slices.BinarySearch(starts, at)
	if found {
		return starts[i]
	}
	return starts[i-1]
}

// TestMissingSegment removes files that are needed.
func TestMissingSegment(t *testing.T) {
	fs := vfs.NewMem()
	o := testOptions(fs)
	o.SegmentBytes = minSegmentBytes
	l := mustOpen(t, o)
	for i := uint64(1); i < 12; i++ {
		write(t, l, Append{Entries: entries(i, i, 1, 400)})
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	names := mustList(t, fs)
	for i := range len(names) - 1 {
		fs := copyFS(t, fs)
		if err := fs.Remove(fs.PathJoin(testDir, names[i])); err != nil {
			t.Fatal(err)
		}
		o.FS = fs
		// The first file after the gap is named.
		wantDamage(t, o, fs.PathJoin(testDir, names[i+1]), 0)
	}
}

// TestZeroedBlock zeroes a stretch in the middle of the log, as a disk does that
// lost a write.
func TestZeroedBlock(t *testing.T) {
	var o Options
	fs, _, path, begin, _ := smallLog(t, &o)
	o.FS = fs
	name := mustList(t, fs)[1]
	starts := recordStarts(t, fs, name)
	b := fileBytes(t, fs, path)
	at := starts[2]
	clear(b[at : begin-8])
	putFile(t, fs, path, b)
	wantDamage(t, o, path, at)
}

// TestReadDamage changes a segment under an open log.
func TestReadDamage(t *testing.T) {
	fs := vfs.NewMem()
	o := testOptions(fs)
	l := closeAtEnd(t, mustOpen(t, o))
	write(t, l, Append{Entries: entries(1, 9, 1, 300)})
	seg, i := l.st.find(3)
	offset := int64(seg.spots[i].unit) * alignment
	f, err := fs.OpenReadWrite(seg.path, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{0xff}, offset+40); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"Prefetch": l.Prefetch(1, 5, NoLimit),
		"Replay":   l.Replay(1, 5, func(*raftpb.Entry) error { return nil }),
		"Entries":  func() error { _, err := l.Entries(1, 5, NoLimit); return err }(),
	} {
		var d *DamageError
		if !errors.As(err, &d) || d.File != seg.path || d.Offset != offset {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := l.Entries(1, 3, NoLimit); err != nil {
		t.Errorf("undamaged entries: %v", err)
	}
}

// TestMisplacedRecords puts whole records, with right checksums, where they were
// not written: one of the same segment, and one that another log with the same
// identity wrote at the same position.
func TestMisplacedRecords(t *testing.T) {
	fs, other := vfs.NewMem(), vfs.NewMem()
	o := testOptions(fs)
	l := mustOpen(t, o)
	write(t, l, Append{Entries: entries(1, 2, 1, 40)})
	write(t, l, Append{HardState: hard(1, 1, 0)})
	end := int64(l.end - l.st.lastSegment().base)
	path := l.st.lastSegment().path
	oo := testOptions(other)
	oo.Rand = func() uint64 { return 99 }
	ol := mustOpen(t, oo)
	write(t, ol, Append{Entries: entries(1, 2, 1, 40)})
	write(t, ol, Append{HardState: hard(1, 1, 0)})
	write(t, ol, Append{Entries: entries(3, 3, 1, 40)})
	want := readAll(t, l)
	if err := errors.Join(l.Abandon(), ol.Abandon()); err != nil {
		t.Fatal(err)
	}
	whole := fileBytes(t, fs, path)
	starts := recordStarts(t, fs, fs.PathBase(path))
	foreign := fileBytes(t, other, path)
	for name, record := range map[string][]byte{
		"of the same segment": whole[starts[2]:starts[3]], // entry 2
		"of another log":      foreign[end:],
	} {
		fs := copyFS(t, fs)
		putFile(t, fs, path, append(slices.Clone(whole), record...))
		o.FS = fs
		l := mustOpen(t, o)
		if got := readAll(t, l); !got.equal(want) {
			t.Errorf("a record %s was taken: %v", name, got)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOpenRewritesTail checks that what no mark covers is written once more at
// Open before it is synced: after a failed sync the operating system may hold
// pages for written that are not.
func TestOpenRewritesTail(t *testing.T) {
	var o Options
	fs, _, path, begin, end := smallLog(t, &o)
	var ops []string
	o.FS = errorfs.Wrap(fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Path == path && (op.Kind == errorfs.OpFileWriteAt || op.Kind == errorfs.OpFileSyncData) {
			ops = append(ops, fmt.Sprintf("%v %d", op.Kind == errorfs.OpFileSyncData, op.Offset))
		}
		return nil
	}))
	l := mustOpen(t, o)
	if err := l.Abandon(); err != nil {
		t.Fatal(err)
	}
	want := []string{
		fmt.Sprintf("false %d", begin), "true 0", // the tail, a sync
		fmt.Sprintf("false %d", end), "true 0", // the mark, a sync
	}
	if !slices.Equal(ops, want) {
		t.Fatalf("is a sync, offset: %q, want %q", ops, want)
	}
}
