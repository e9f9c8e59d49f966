package storage

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestDamageIsNamed: a block that is not what was written is told by file and
// offset, with what it held, and is not read.
func TestDamageIsNamed(t *testing.T) {
	fs := vfs.NewMem()
	s, err := Open(Options{FS: fs, Dir: "store"})
	if err != nil {
		t.Fatal(err)
	}
	for main := range int64(200) {
		b := s.NewBatch()
		b.SetRevision(main+2, 0, RevisionRecord{KV: []byte(fmt.Sprintf("%0500d", main*7919))})
		if err := s.Commit(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	names, err := fs.List("store")
	if err != nil {
		t.Fatal(err)
	}
	table := ""
	for _, name := range names {
		if info, err := fs.Stat("store/" + name); err == nil && strings.HasSuffix(name, ".sst") && info.Size() > 4000 {
			table = "store/" + name
		}
	}
	f, err := fs.OpenReadWrite(table, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatalf("of %v: %v", names, err)
	}
	if _, err := f.WriteAt([]byte{0xff, 0xff, 0xff}, 100); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}

	var told error
	s, err = Open(Options{FS: fs, Dir: "store", OnCorruption: func(err error) { told = err }})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Abandon()
	value, err := s.Get(AppendRevisionKey(nil, 2, 0))
	if err == nil {
		t.Fatalf("it read %.40q", value)
	}
	var damage *DamageError
	if !errors.As(told, &damage) || !errors.Is(told, ErrDamaged) || damage.File != table || damage.Length == 0 || damage.Offset > 100 {
		t.Fatalf("told %v", told)
	}
	for _, want := range []string{table, "at offset 0", "records of the revisions 2 to 201", "checksum", "engram ctl rebuild"} {
		if !strings.Contains(told.Error(), want) {
			t.Errorf("the error does not say %q: %v", want, told)
		}
	}
}

// TestRevisionSlices: the slices are all of the log, in order, and small.
func TestRevisionSlices(t *testing.T) {
	s, err := Open(Options{FS: vfs.NewMem(), Dir: "store", MemTableBytes: 256 << 10})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const last = 2000
	for main := range int64(last + 1) {
		b := s.NewBatch()
		b.SetRevision(main, 0, RevisionRecord{KV: []byte(fmt.Sprintf("%01000d", main*7919*7919))})
		if err := s.Commit(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	whole, err := s.RevisionSlices(last, 1<<40)
	if err != nil || len(whole) != 1 {
		t.Fatalf("in large slices: %d, %v", len(whole), err)
	}
	small, err := s.RevisionSlices(last, 16<<10)
	if err != nil || len(small) < 4 {
		t.Fatalf("in small slices: %d, %v", len(small), err)
	}
	lower, upper := RevisionBounds(0, last+1)
	for _, b := range small {
		if string(b.Lower) != string(lower) {
			t.Fatalf("a slice begins at %x, the one before ends at %x", b.Lower, lower)
		}
		lower = b.Upper
	}
	if string(lower) != string(upper) {
		t.Fatalf("the last slice ends at %x, the log at %x", lower, upper)
	}
	one, err := s.RevisionSlices(last, 0)
	if err != nil || len(one) > last+1 {
		t.Fatalf("in slices of nothing: %d, %v", len(one), err)
	}
}
