package index

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// model is the index as the spec tells it: for each key every revision ever
// written, and a mark on those that a compaction removed.
type model struct {
	keys   map[string][]modelRev
	newest int64
}

type modelRev struct {
	Revision
	create, version int64
	lease           int64
	size            uint32
	ref             ValueRef
	tombstone       bool
	gone            bool
}

func newModel() *model { return &model{keys: map[string][]modelRev{}} }

func (m *model) clone() *model {
	c := &model{keys: make(map[string][]modelRev, len(m.keys)), newest: m.newest}
	for k, revs := range m.keys {
		c.keys[k] = slices.Clone(revs)
	}
	return c
}

func (m *model) sorted() []string { return slices.Sorted(maps.Keys(m.keys)) }

// generations cuts the revisions of a key after each tombstone. The last
// generation is open and may be empty.
func (m *model) generations(key string) [][]modelRev {
	var gens [][]modelRev
	revs := m.keys[key]
	start := 0
	for i := range revs {
		if revs[i].tombstone {
			gens = append(gens, revs[start:i+1])
			start = i + 1
		}
	}
	return append(gens, revs[start:])
}

// get walks the generations from the newest.
func (m *model) get(key string, at int64) (Item, bool) {
	if at <= 0 || at >= m.newest {
		at = m.newest
	}
	gens := m.generations(key)
	for i := len(gens) - 1; i >= 0; i-- {
		g := gens[i]
		if len(g) == 0 {
			continue
		}
		last := g[len(g)-1]
		if last.tombstone && last.Main <= at {
			return Item{}, false
		}
		if g[0].Main > at {
			continue
		}
		for j := len(g) - 1; j >= 0; j-- {
			if g[j].Main > at {
				continue
			}
			if g[j].gone {
				return Item{}, false
			}
			later := 0
			puts := 0
			for n, r := range g {
				if !r.tombstone {
					puts++
					if n > j {
						later++
					}
				}
			}
			it := Item{Key: []byte(key), Create: g[0].Main, Mod: g[j].Revision, Version: int64(puts - later), Size: g[j].size}
			if i == len(gens)-1 && j == len(g)-1 {
				it.Lease, it.Ref = g[j].lease, g[j].ref
			}
			return it, true
		}
	}
	return Item{}, false
}

func (m *model) put(key string, rev Revision, lease int64, size uint32, ref ValueRef) {
	r := modelRev{Revision: rev, create: rev.Main, version: 1, lease: lease, size: size, ref: ref}
	if it, ok := m.get(key, 0); ok {
		r.create, r.version = it.Create, it.Version+1
	}
	m.keys[key] = append(m.keys[key], r)
	m.newest = max(m.newest, rev.Main)
}

func (m *model) delete(key string, rev Revision, size uint32) {
	m.keys[key] = append(m.keys[key], modelRev{Revision: rev, size: size, tombstone: true})
	m.newest = max(m.newest, rev.Main)
}

// survivor returns the one revision not newer than at that a compaction keeps.
func (m *model) survivor(key string, at int64) (Revision, bool) {
	gens := m.generations(key)
	for i, g := range gens {
		closed := i < len(gens)-1
		if closed && g[len(g)-1].Main < at {
			continue
		}
		for j := len(g) - 1; j >= 0; j-- {
			if g[j].Main <= at {
				return g[j].Revision, true
			}
		}
		return Revision{}, false
	}
	return Revision{}, false
}

// compact marks what goes and returns it as text.
func (m *model) compact(at int64) []string {
	var dropped []string
	for key, revs := range m.keys {
		keep, ok := m.survivor(key, at)
		for i := range revs {
			if r := &revs[i]; !r.gone && r.Main <= at && !(ok && r.Revision == keep) {
				r.gone = true
				dropped = append(dropped, fmt.Sprint(r.Revision, r.size, r.tombstone))
			}
		}
	}
	slices.Sort(dropped)
	return dropped
}

func (m *model) keep(at int64) []Revision {
	var revs []Revision
	for _, k := range m.sorted() {
		if it, ok := m.get(k, at); ok {
			revs = append(revs, it.Mod)
		}
	}
	return revs
}

func inRange(k string, key, end []byte) bool {
	switch {
	case len(end) == 0:
		return k == string(key)
	case len(end) == 1 && end[0] == 0:
		return k >= string(key)
	}
	return k >= string(key) && k < string(end)
}

func (m *model) ascend(key, end []byte, at int64) []Item {
	var items []Item
	for _, k := range m.sorted() {
		if !inRange(k, key, end) {
			continue
		}
		if it, ok := m.get(k, at); ok {
			items = append(items, it)
		}
	}
	return items
}

// records returns what Walk should yield, the keys' revisions that are left.
func (m *model) records() []Record {
	var recs []Record
	for _, k := range m.sorted() {
		r := Record{Key: []byte(k)}
		for _, v := range m.keys[k] {
			if !v.gone {
				r.Revs = append(r.Revs, Rev{v.Revision, v.create, v.version, v.size, v.tombstone})
				r.Lease, r.Ref = v.lease, v.ref
			}
		}
		if len(r.Revs) > 0 {
			recs = append(recs, r)
		}
	}
	return recs
}

func walkAll(r Root, from []byte) []Record {
	var recs []Record
	r.Walk(from, func(rec *Record) bool {
		c := *rec
		c.Revs = slices.Clone(rec.Revs)
		recs = append(recs, c)
		return true
	})
	return recs
}

func sameItem(a, b Item) bool {
	return bytes.Equal(a.Key, b.Key) && a.Create == b.Create && a.Mod == b.Mod && a.Version == b.Version &&
		a.Lease == b.Lease && a.Size == b.Size && a.Ref == b.Ref
}

func sameItems(a, b []Item) bool { return slices.EqualFunc(a, b, sameItem) }

func sameRecord(a, b Record) bool {
	return bytes.Equal(a.Key, b.Key) && a.Lease == b.Lease && a.Ref == b.Ref && slices.Equal(a.Revs, b.Revs)
}

func show[T any](items []T) string {
	var b bytes.Buffer
	for i := range items {
		fmt.Fprintf(&b, "%+v\n", items[i])
	}
	return b.String()
}

func collect(r Root, key, end []byte, at int64) []Item {
	var items []Item
	r.Ascend(key, end, at, func(it Item) bool {
		items = append(items, it)
		return true
	})
	return items
}

// compareAll compares a Root with its model in whole, as of a revision.
func compareAll(t *testing.T, r Root, m *model, at int64) {
	t.Helper()
	if err := r.Verify(); err != nil {
		t.Fatal(err)
	}
	records := m.records()
	if got := walkAll(r, nil); !slices.EqualFunc(got, records, sameRecord) {
		t.Fatalf("walk:\n%s\nwant:\n%s", show(got), show(records))
	}
	all := []byte{0}
	live := m.ascend(nil, all, 0)
	if got := collect(r, nil, all, 0); !sameItems(got, live) {
		t.Fatalf("live:\n%s\nwant:\n%s", show(got), show(live))
	}
	var size, history int64
	for _, it := range live {
		size += int64(it.Size)
	}
	for _, rec := range records {
		history += int64(len(rec.Revs))
	}
	history -= int64(len(live))
	if r.Len() != int64(len(live)) || r.Bytes() != size || r.History() != history || r.Newest() != m.newest {
		t.Fatalf("%d keys, %d bytes, history %d, newest %d; want %d, %d, %d, %d",
			r.Len(), r.Bytes(), r.History(), r.Newest(), len(live), size, history, m.newest)
	}
	past := m.ascend(nil, all, at)
	if got := collect(r, nil, all, at); !sameItems(got, past) {
		t.Fatalf("at %d:\n%s\nwant:\n%s", at, show(got), show(past))
	}
	var keep []Revision
	r.Keep(at, func(v Revision) { keep = append(keep, v) })
	if !slices.Equal(keep, m.keep(at)) {
		t.Fatalf("keep at %d: %v, want %v", at, keep, m.keep(at))
	}
}

// driver runs random operations on a Tree and its model.
type driver struct {
	t         *testing.T
	rng       *rand.Rand
	tree      *Tree
	model     *model
	main      int64
	compacted int64
	nkeys     int
	near      int64 // compactions happen at most this far back, if not 0
	coverage  map[string]int
}

func newDriver(t *testing.T, seed uint64, nkeys int) *driver {
	return &driver{t: t, rng: rand.New(rand.NewPCG(seed, 1)), tree: New(), model: newModel(), main: 1, nkeys: nkeys, coverage: map[string]int{}}
}

// key returns one of nkeys keys of many shapes: long common prefixes, zero
// bytes, 0xff, prefixes of each other, some longer than 127 bytes.
func (d *driver) key() []byte {
	i := d.rng.IntN(d.nkeys)
	switch i % 7 {
	case 0:
		return fmt.Appendf(nil, "/registry/pods/%03d/%d", i/50, i)
	case 1:
		return bytes.Repeat([]byte{'k'}, 1+i/7%300)
	case 2:
		return []byte{'z', byte(i >> 8), 0, byte(i)}
	case 3:
		return []byte{0xff, byte(i), byte(i >> 8)}
	case 4:
		return fmt.Appendf(nil, "%d", i)
	case 5:
		return append(bytes.Repeat([]byte{0}, i%5), byte(i), byte(i>>8))
	}
	return fmt.Appendf(nil, "/registry/leases/%d", i)
}

// txn runs one transaction of some changes with one main revision.
func (d *driver) txn() {
	rev := Revision{Main: d.main + 1}
	deleted := map[string]bool{}
	for range 1 + d.rng.IntN(4)*d.rng.IntN(3) {
		key := d.key()
		if d.rng.IntN(20) == 0 {
			key = []byte("hot")
		}
		if deleted[string(key)] {
			continue // the API forbids a put after a delete in one transaction
		}
		want, live := d.model.get(string(key), 0)
		var prev Item
		var existed bool
		if d.rng.IntN(4) == 0 {
			size := uint32(d.rng.IntN(100))
			prev, existed = d.tree.Delete(key, rev, size)
			if live {
				deleted[string(key)] = true
				d.model.delete(string(key), rev, size)
				rev.Sub++
				d.coverage["delete"]++
			} else {
				d.coverage["delete absent"]++
			}
		} else {
			lease := int64(d.rng.IntN(3)-1) * int64(d.rng.IntN(2))
			size, ref := uint32(d.rng.IntN(1<<20)), ValueRef(d.rng.Uint64()>>1)
			prev, existed = d.tree.Put(key, rev, lease, size, ref)
			d.model.put(string(key), rev, lease, size, ref)
			rev.Sub++
			d.coverage[fmt.Sprintf("put existing=%v", live)]++
		}
		if existed != live || !sameItem(prev, want) {
			d.t.Fatalf("key %q at %v: before was %+v %v, want %+v %v", key, rev, prev, existed, want, live)
		}
	}
	if rev.Sub > 0 {
		d.main++
	}
}

// past returns a revision that may be read.
func (d *driver) past() int64 {
	from := max(d.compacted, 1)
	if d.near > 0 {
		from = max(from, d.main-d.near)
	}
	return from + d.rng.Int64N(d.main-from+1)
}

func (d *driver) read(r Root, m *model, at int64) {
	key, end := d.key(), d.key()
	switch d.rng.IntN(5) {
	case 0:
		end = nil
	case 1:
		end = []byte{0}
	case 2:
		key = key[:min(len(key), d.rng.IntN(4))]
	}
	want := m.ascend(key, end, at)
	if got := collect(r, key, end, at); !sameItems(got, want) {
		d.t.Fatalf("[%q, %q) at %d:\n%s\nwant:\n%s", key, end, at, show(got), show(want))
	}
	if got := r.CountAt(key, end, at); got != int64(len(want)) {
		d.t.Fatalf("count [%q, %q) at %d: %d, want %d", key, end, at, got, len(want))
	}
	var bytes int64
	want = m.ascend(key, end, 0)
	for _, it := range want {
		bytes += int64(it.Size)
	}
	if n, size := r.Count(key, end); n != int64(len(want)) || size != bytes {
		d.t.Fatalf("count [%q, %q): %d keys of %d bytes, want %d of %d", key, end, n, size, len(want), bytes)
	}
	d.measure(r, m, key, end)
	d.coverage[fmt.Sprintf("read some=%v", len(want) > 0)]++
	got, ok := r.Get(key, at)
	if it, live := m.get(string(key), at); ok != live || !sameItem(got, it) {
		d.t.Fatalf("get %q at %d: %+v %v, want %+v %v", key, at, got, ok, it, live)
	}
}

// measure compares what a range holds, history included, in whole and key by key.
func (d *driver) measure(r Root, m *model, key, end []byte) {
	var want Measure
	var rows, wantRows []string
	for _, rec := range m.records() {
		if !inRange(string(rec.Key), key, end) {
			continue
		}
		var one Measure
		for i, v := range rec.Revs {
			if i == len(rec.Revs)-1 && !v.Tombstone {
				one.Keys, one.Bytes = 1, int64(v.Size)
				continue
			}
			one.History++
			one.HistoryBytes += int64(v.Size)
		}
		want.Add(one)
		wantRows = append(wantRows, fmt.Sprintf("%q %v", rec.Key, one))
	}
	if got := r.Measure(key, end); got != want {
		d.t.Fatalf("measure [%q, %q): %+v, want %+v", key, end, got, want)
	}
	if len(end) == 0 {
		return
	}
	r.Rows(key, end, func(k []byte, m Measure) bool {
		rows = append(rows, fmt.Sprintf("%q %v", k, m))
		return true
	})
	if !slices.Equal(rows, wantRows) {
		d.t.Fatalf("rows of [%q, %q):\n%v\nwant:\n%v", key, end, rows, wantRows)
	}
	if first, ok := r.First(key, end); ok != (len(rows) > 0) || ok && !strings.HasPrefix(rows[0], fmt.Sprintf("%q ", first)) {
		d.t.Fatalf("first of [%q, %q): %q %v, want %v", key, end, first, ok, rows)
	}
}

func (d *driver) setRef() {
	key := d.key()
	it, live := d.model.get(string(key), 0)
	if d.tree.SetRef(key, it.Mod, 77) != live {
		d.t.Fatalf("SetRef %q", key)
	}
	if d.tree.SetRef(key, Revision{it.Mod.Main, it.Mod.Sub + 1}, 78) {
		d.t.Fatalf("SetRef %q of another revision", key)
	}
	if live {
		revs := d.model.keys[string(key)]
		revs[len(revs)-1].ref = 77
		d.coverage["ref"]++
	}
}

// compact compacts in steps, with writes in between.
func (d *driver) compact() {
	at := d.past()
	if at <= d.compacted {
		return
	}
	d.compacted = at
	want := d.model.compact(at)
	var got []string
	from, max := []byte(nil), 1+d.rng.IntN(50)
	for {
		touched := 0
		next := d.tree.Compact(at, from, max, func(v Revision, size uint32, tombstone bool) {
			got = append(got, fmt.Sprint(v, size, tombstone))
			touched++
		})
		if next == nil {
			break
		}
		if touched == 0 || bytes.Compare(next, from) <= 0 {
			d.t.Fatalf("compaction from %q to %q dropped %d", from, next, touched)
		}
		from = next
		if d.rng.IntN(3) == 0 {
			d.tree.Root()
		}
		d.txn()
		d.coverage["compaction step"]++
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		d.t.Fatalf("compaction at %d dropped\n%v\nwant\n%v", at, got, want)
	}
	for range d.tree.top.len() {
		// Nothing is left to do at the same revision.
		d.tree.Compact(at, nil, 1, func(v Revision, _ uint32, _ bool) { d.t.Fatalf("dropped %v twice", v) })
	}
	d.coverage["compaction"]++
}

func TestAgainstModel(t *testing.T) {
	for _, c := range []struct {
		nkeys, steps int
		compactions  int   // about so many
		near         int64 // see driver
	}{
		{7, 1500, 300, 10},
		{60, 2000, 20, 0},
		{300, 2500, 40, 100},
		{2000, 6000, 10, 0},
	} {
		t.Run(fmt.Sprintf("%d keys", c.nkeys), func(t *testing.T) {
			d := newDriver(t, uint64(c.nkeys), c.nkeys)
			d.near = c.near
			type moment struct {
				root  Root
				model *model
				at    int64
			}
			var kept []moment
			every := c.steps / 12
			for i := range c.steps {
				d.txn()
				switch d.rng.IntN(40) {
				case 0:
					d.tree.Root()
				case 1:
					d.read(d.tree.Root(), d.model, d.past())
				case 2:
					d.setRef()
				}
				if d.rng.IntN(c.steps/c.compactions) == 0 {
					d.compact()
				}
				if i%every == 0 {
					m := moment{d.tree.Root(), d.model.clone(), d.past()}
					compareAll(t, m.root, m.model, m.at)
					kept = append(kept, m)
				}
			}
			for _, m := range kept {
				compareAll(t, m.root, m.model, m.at)
			}
			t.Log(d.coverage)
			for _, what := range []string{"delete", "delete absent", "put existing=true", "put existing=false", "read some=true", "ref", "compaction", "compaction step"} {
				if d.coverage[what] == 0 {
					t.Errorf("the test never did: %s", what)
				}
			}

			// Everything deleted and compacted away leaves an empty tree.
			d.main++
			rev := Revision{Main: d.main}
			for _, it := range collect(d.tree.Root(), nil, []byte{0}, 0) {
				d.tree.Delete(it.Key, rev, 5)
				rev.Sub++
			}
			for from := []byte(nil); ; {
				if from = d.tree.Compact(d.main+1, from, 100, func(Revision, uint32, bool) {}); from == nil {
					break
				}
			}
			if r := d.tree.Root(); r.Len() != 0 || r.History() != 0 || r.top.height != 1 || r.top.len() != 0 {
				t.Fatalf("%d keys, history %d, height %d remain", r.Len(), r.History(), r.top.height)
			}
		})
	}
}
