package index

import (
	"bytes"
	"errors"
	"io"
	"math"
	"slices"
	"testing"
)

// TestReload sends a large random tree through Encoder, Decoder and Builder,
// and goes on working with the result.
func TestReload(t *testing.T) {
	for _, nkeys := range []int{1, 200, 3000} {
		d := newDriver(t, 9, nkeys)
		for range 2 * nkeys {
			d.txn()
		}
		tree, err := reload(d.tree.Root())
		if err != nil {
			t.Fatal(err)
		}
		m := d.model.clone()
		for _, revs := range m.keys {
			for i := range revs {
				revs[i].ref = 0
			}
		}
		compareAll(t, tree.Root(), m, d.past())
		d.tree, d.model = tree, m
		for range nkeys {
			d.txn()
		}
		d.compact()
		compareAll(t, d.tree.Root(), d.model, d.past())
	}
	if tree, err := reload(New().Root()); err != nil || tree.Root().Len() != 0 {
		t.Fatalf("empty tree: %v", err)
	}
}

func put(main, sub, create, version int64) Rev {
	return Rev{Revision: Revision{main, sub}, Create: create, Version: version, Size: 9}
}

func tombstone(main, sub int64) Rev {
	return Rev{Revision: Revision{main, sub}, Size: 5, Tombstone: true}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		name  string
		good  bool
		lease int64
		revs  []Rev
	}{
		{"two lives", true, 3, []Rev{put(2, 0, 2, 1), put(2, 1, 2, 2), tombstone(4, 0), put(4, 1, 4, 1)}},
		{"beginning lost", true, 0, []Rev{put(9, 0, 2, 7), put(10, 0, 2, 8)}},
		{"only a tombstone", true, 0, []Rev{tombstone(4, 0)}},
		{"largest", true, math.MinInt64, []Rev{put(math.MaxInt64, maxSub, 1, math.MaxInt64)}},
		{"no revisions", false, 0, nil},
		{"main 0", false, 0, []Rev{put(0, 0, 0, 1)}},
		{"negative sub", false, 0, []Rev{put(2, -1, 2, 1)}},
		{"large sub", false, 0, []Rev{put(2, maxSub+1, 2, 1)}},
		{"created later", false, 0, []Rev{put(2, 0, 3, 2)}},
		{"version 0", false, 0, []Rev{put(2, 0, 2, 0)}},
		{"version 1 of an older creation", false, 0, []Rev{put(3, 0, 2, 1)}},
		{"same revision", false, 0, []Rev{put(2, 0, 2, 1), put(2, 0, 2, 2)}},
		{"older revision", false, 0, []Rev{put(3, 0, 2, 2), put(2, 5, 2, 3)}},
		{"version skipped", false, 0, []Rev{put(2, 0, 2, 1), put(3, 0, 2, 3)}},
		{"other creation", false, 0, []Rev{put(3, 0, 2, 2), put(4, 0, 3, 3)}},
		{"two tombstones", false, 0, []Rev{tombstone(3, 0), tombstone(4, 0)}},
		{"version 2 after a tombstone", false, 0, []Rev{tombstone(3, 0), put(5, 0, 4, 2)}},
		{"tombstone with a version", false, 0, []Rev{{Revision: Revision{3, 0}, Version: 1, Tombstone: true}}},
		{"tombstone with a lease", false, 3, []Rev{tombstone(3, 0)}},
	} {
		r := Record{Key: []byte("k"), Lease: c.lease, Revs: c.revs}
		err := r.Validate()
		if c.good != (err == nil) || err != nil && !errors.Is(err, ErrRecord) {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := NewBuilder().Add(&r); (got == nil) != c.good {
			t.Errorf("%s: Builder says %v", c.name, got)
		}
		if !c.good {
			continue
		}
		var enc Encoder
		var back Record
		if err := NewDecoder(enc.Append(nil, &r)).Next(&back); err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if !bytes.Equal(back.Key, r.Key) || back.Lease != r.Lease || !slices.Equal(back.Revs, r.Revs) {
			t.Errorf("%s: got back %+v", c.name, back)
		}
	}
}

func TestBuilderOrder(t *testing.T) {
	b := NewBuilder()
	for _, c := range []struct {
		key  string
		good bool
	}{{"", true}, {"", false}, {"b", true}, {"a", false}, {"b", false}, {"b\x00", true}} {
		err := b.Add(&Record{Key: []byte(c.key), Revs: []Rev{put(2, 0, 2, 1)}})
		if (err == nil) != c.good || err != nil && !errors.Is(err, ErrRecord) {
			t.Errorf("key %q: %v", c.key, err)
		}
	}
	if r := b.Tree().Root(); r.Len() != 3 || r.Verify() != nil {
		t.Errorf("%d keys, %v", r.Len(), r.Verify())
	}
}

// FuzzDecoder feeds the Decoder any bytes: it must answer with valid records
// or one lasting error, and what it accepts must survive another round.
func FuzzDecoder(f *testing.F) {
	var enc Encoder
	var seed []byte
	for _, r := range []Record{
		{Key: []byte("a/b"), Lease: -5, Revs: []Rev{put(2, 0, 2, 1), put(3, 7, 2, 2)}},
		{Key: []byte("a/c"), Revs: []Rev{tombstone(4, 0), put(6, 0, 6, 1), tombstone(7, 1)}},
		{Key: bytes.Repeat([]byte("k"), 300), Revs: []Rev{put(1<<40, 0, 1<<33, 12)}},
	} {
		seed = enc.Append(seed, &r)
		f.Add(bytes.Clone(seed))
	}
	f.Add(seed[:len(seed)-1])
	f.Add([]byte{5, 0, 0})
	f.Add([]byte{0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Add([]byte{0, 1, 'k', 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0})
	f.Fuzz(func(t *testing.T, block []byte) {
		d := NewDecoder(block)
		var enc Encoder
		var again []byte
		var r Record
		var recs []Record
		for {
			err := d.Next(&r)
			if err == io.EOF {
				break
			}
			if err != nil {
				if !errors.Is(err, ErrRecord) || d.Next(&r) != err {
					t.Fatalf("error %v, then %v", err, d.Next(&r))
				}
				break
			}
			if err := r.Validate(); err != nil {
				t.Fatal(err)
			}
			recs = append(recs, Record{Key: bytes.Clone(r.Key), Lease: r.Lease, Revs: slices.Clone(r.Revs)})
			again = enc.Append(again, &r)
		}
		d = NewDecoder(again)
		for i := range recs {
			if err := d.Next(&r); err != nil {
				t.Fatal(err)
			}
			if want := &recs[i]; !bytes.Equal(r.Key, want.Key) || r.Lease != want.Lease || !slices.Equal(r.Revs, want.Revs) {
				t.Fatalf("%+v became %+v", want, r)
			}
		}
		if err := d.Next(&r); err != io.EOF {
			t.Fatalf("%v at the end", err)
		}
	})
}
