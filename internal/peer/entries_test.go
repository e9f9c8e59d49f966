package peer

import (
	"bytes"
	"testing"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// TestEntryReader: entries of all lengths, read one after the other, are what protobuf makes of them, and one's
// data ends where it ends.
func TestEntryReader(t *testing.T) {
	var entries []*raftpb.Entry
	for i, size := range []int{0, 1, 300, entryPiece/4 - 8, entryPiece / 4, entryPiece, 3*entryPiece + 1, 5} {
		entries = append(entries, &raftpb.Entry{
			Type: raftpb.EntryType(i % 3).Enum(), Term: proto.Uint64(uint64(i)), Index: proto.Uint64(1 << (7 * i)),
			Data: bytes.Repeat([]byte{byte(i)}, size),
		})
	}
	entries = append(entries, &raftpb.Entry{Term: proto.Uint64(1), Index: proto.Uint64(2)}, &raftpb.Entry{})
	for range 3 * entriesOfBlock {
		entries = append(entries, entries[2])
	}
	var r entryReader
	var got []*raftpb.Entry
	for i, want := range entries {
		b, err := proto.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		e, n, err := r.next(bytes.NewReader(b), len(b), len(entries)-i)
		if err != nil || n != len(b) {
			t.Fatal(n, err)
		}
		if cap(e.Data) != len(e.Data) && len(e.Data) <= entryPiece/4 {
			t.Errorf("entry %d could be appended to: %d of %d bytes", i, len(e.Data), cap(e.Data))
		}
		got = append(got, e)
	}
	for i := range entries {
		if !proto.Equal(got[i], entries[i]) {
			t.Errorf("entry %d is %.200v, want %.200v", i, got[i], entries[i])
		}
	}
	if _, n, err := r.next(bytes.NewReader([]byte{8}), 9, 1); n != 1 || err == nil {
		t.Errorf("a short entry: %d bytes, %v", n, err)
	}
}

// TestEntriesShareMemory: a follower's cost of an entry is not several allocations.
func TestEntriesShareMemory(t *testing.T) {
	e := &msgAppEncoder{}
	full, _ := e.append(nil, msgApp(1, 2, 3, 4, 1, 300))
	compact, _ := e.append(nil, msgApp(1, 2, 3, 5, 1000, 300))
	if compact[0] != msgAppCompact {
		t.Fatal(compact[0])
	}
	d := &msgAppDecoder{local: 2, remote: 1}
	src := bytes.NewReader(full)
	d.r = src
	if _, err := d.decode(); err != nil {
		t.Fatal(err)
	}
	st := d.st
	allocs := testing.AllocsPerRun(10, func() {
		src.Reset(compact)
		d.st = st
		if m, err := d.decode(); err != nil || len(m.Entries) != 1000 {
			t.Fatal(err)
		}
	})
	if allocs > 100 {
		t.Errorf("1,000 entries of 300 bytes took %v allocations", allocs)
	}
}

// FuzzEntry: what is decoded without protobuf is what protobuf makes of it.
func FuzzEntry(f *testing.F) {
	for _, e := range msgApp(1, 2, 3, 4, 2, 5).Entries {
		b, _ := proto.Marshal(e)
		f.Add(b)
	}
	f.Add(unhex("0803"))
	f.Add(unhex("080122001802"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c entryCell
		if !c.decode(b) {
			if !proto.Equal(&c.entry, &raftpb.Entry{}) {
				t.Fatalf("refused, and yet it is %v", &c.entry)
			}
			return
		}
		want := &raftpb.Entry{}
		if err := proto.Unmarshal(b, want); err != nil {
			t.Fatalf("taken, but protobuf refuses it: %v", err)
		}
		if !proto.Equal(&c.entry, want) {
			t.Fatalf("%v, want %v", &c.entry, want)
		}
	})
}
