package storage

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestRevisionKeyOrder(t *testing.T) {
	type rev struct{ main, sub int64 }
	revs := []rev{{0, 0}, {1, 0}, {1, 1}, {1, 255}, {1, 256}, {2, 0}, {255, 9}, {256, 0}, {1 << 40, 0}, {math.MaxInt64, math.MaxInt64}}
	var before []byte
	for _, r := range revs {
		k := AppendRevisionKey(nil, r.main, r.sub)
		if bytes.Compare(before, k) >= 0 {
			t.Errorf("key of %v is not above the one before", r)
		}
		before = k
		main, sub, err := ParseRevisionKey(k)
		if err != nil || main != r.main || sub != r.sub {
			t.Errorf("%v came back as %d %d %v", r, main, sub, err)
		}
		lower, upper := RevisionBounds(r.main, 0)
		if bytes.Compare(k, lower) < 0 || bytes.Compare(k, upper) >= 0 {
			t.Errorf("%v lies outside of its bounds", r)
		}
	}
	lower, upper := RevisionBounds(2, 5)
	for _, c := range []struct {
		r  rev
		in bool
	}{{rev{1, math.MaxInt64}, false}, {rev{2, 0}, true}, {rev{4, math.MaxInt64}, true}, {rev{5, 0}, false}} {
		k := AppendRevisionKey(nil, c.r.main, c.r.sub)
		if in := bytes.Compare(k, lower) >= 0 && bytes.Compare(k, upper) < 0; in != c.in {
			t.Errorf("%v in [2, 5): %v", c.r, in)
		}
	}
}

// Tables must not overlap each other or the revision log.
func TestTableBounds(t *testing.T) {
	tables := []Table{TableMeta, TableAlarm, TableAuth, TableAuthRole, TableAuthUser, TableCluster, TableLease, TableMember, TableMemberRemoved}
	if !slices.IsSorted(tables) {
		t.Fatal("tables are not in order")
	}
	logLower, logUpper := RevisionBounds(0, 0)
	last := []byte{}
	for _, table := range tables {
		lower, upper := TableBounds(table)
		if bytes.Compare(last, lower) > 0 || bytes.Compare(upper, logLower) > 0 && bytes.Compare(lower, logUpper) < 0 {
			t.Errorf("table %c overlaps another", table)
		}
		last = upper
		for _, row := range [][]byte{nil, {0}, {0xff, 0xff}, []byte("row")} {
			k := RowKey(table, row)
			if bytes.Compare(k, lower) < 0 || bytes.Compare(k, upper) >= 0 || !bytes.Equal(RowOf(k), row) {
				t.Errorf("row %x of table %c has key %x", row, table, k)
			}
		}
	}
}

func TestParseRevisionKeyRefuses(t *testing.T) {
	good := AppendRevisionKey(nil, 1, 2)
	for _, bad := range [][]byte{nil, good[:16], append(slices.Clone(good), 0), RowKey(TableMeta, good[1:])} {
		if _, _, err := ParseRevisionKey(bad); err == nil {
			t.Errorf("%x was accepted", bad)
		}
	}
}

func TestRevisionValue(t *testing.T) {
	for _, r := range []RevisionRecord{
		{KV: []byte{}},
		{KV: []byte("some bytes")},
		{KV: []byte("k"), Tombstone: true},
		{KV: []byte("v"), Applied: 7, Term: 3},
		{KV: []byte{}, Applied: math.MaxUint64, Term: math.MaxUint64, Tombstone: true},
	} {
		v := AppendRevisionValue(nil, r)
		if len(v) != r.valueSize() {
			t.Errorf("%+v has size %d, want %d", r, len(v), r.valueSize())
		}
		got, err := ParseRevisionValue(v)
		if err != nil || !bytes.Equal(got.KV, r.KV) || got.Tombstone != r.Tombstone || got.Applied != r.Applied || got.Term != r.Term {
			t.Errorf("%+v came back as %+v, %v", r, got, err)
		}
	}
	for _, bad := range [][]byte{nil, {4}, {0x80}, append([]byte{flagApplied}, make([]byte, appliedSize-1)...), append([]byte{flagApplied}, make([]byte, appliedSize)...)} {
		if r, err := ParseRevisionValue(bad); err == nil {
			t.Errorf("%x was accepted as %+v", bad, r)
		}
	}
}

func TestAppliedRefuses(t *testing.T) {
	for _, n := range []int{0, 15, 17} {
		if _, _, err := ParseApplied(make([]byte, n)); err == nil {
			t.Errorf("a mark of %d bytes was accepted", n)
		}
	}
}

// Whatever is accepted must come out again byte by byte.
func FuzzRevisionValue(f *testing.F) {
	f.Add([]byte{0})
	f.Add([]byte{1, 10, 1, 'a'})
	f.Add(AppendRevisionValue(nil, RevisionRecord{KV: []byte("kv"), Applied: 1 << 40, Term: 2}))
	f.Add(AppendRevisionValue(nil, RevisionRecord{KV: []byte("kv"), Applied: 0, Term: 2}))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseRevisionValue(b)
		if err != nil {
			return
		}
		if again := AppendRevisionValue(nil, r); !bytes.Equal(again, b) {
			t.Fatalf("%x came out as %x", b, again)
		}
	})
}

func FuzzRevisionKey(f *testing.F) {
	f.Add(AppendRevisionKey(nil, 1, 2))
	f.Add([]byte("r"))
	f.Fuzz(func(t *testing.T, b []byte) {
		main, sub, err := ParseRevisionKey(b)
		if err != nil {
			return
		}
		if again := AppendRevisionKey(nil, main, sub); !bytes.Equal(again, b) {
			t.Fatalf("%x came out as %x", b, again)
		}
	})
}

// The batch's own way to write records must be that of the Append functions.
func TestSetRevision(t *testing.T) {
	s := openMem(t)
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range int64(50) {
		r := RevisionRecord{KV: make([]byte, rnd.IntN(2000)), Tombstone: i%3 == 0, Applied: uint64(i % 2), Term: uint64(i % 2)}
		b := s.NewBatch()
		b.SetRevision(i, i+1, r)
		b.SetRevision(i, i+2, r)
		b.DeleteRevision(i, i+2, r.valueSize())
		commit(t, s, b)
		got, err := s.Get(AppendRevisionKey(nil, i, i+1))
		if err != nil || !bytes.Equal(got, AppendRevisionValue(nil, r)) {
			t.Fatalf("revision %d: %x, %v", i, got, err)
		}
		if v, err := s.Get(AppendRevisionKey(nil, i, i+2)); err != ErrNotFound {
			t.Fatalf("deleted revision %d: %x, %v", i, v, err)
		}
	}
}
