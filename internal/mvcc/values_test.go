package mvcc

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/engram-kv/engram/internal/mvcc/index"
)

// remembered adds an entry with the given bytes.
func remembered(m *valueMemory, s string) index.ValueRef {
	buf, ref := m.add(len(s))
	copy(buf, s)
	return ref
}

func TestValueMemoryReads(t *testing.T) {
	m := newValueMemory(1<<20, 64)
	var refs []index.ValueRef
	var want []string
	for i := range 200 {
		s := bytes.Repeat([]byte{byte(i)}, i) // from 60 on larger than a slab
		refs, want = append(refs, remembered(m, string(s))), append(want, string(s))
	}
	for i, ref := range refs {
		if got := m.get(ref); string(got) != want[i] {
			t.Fatalf("entry %d is %x", i, got)
		}
		if cap(m.get(ref)) != len(m.get(ref)) {
			t.Fatalf("entry %d can be appended to in place", i)
		}
	}
	if m.get(0) != nil || m.has(0) || m.get(index.ValueRef(1<<62|999<<offsetBits)) != nil {
		t.Error("refs that lead nowhere find something")
	}
}

// A slab goes with its last live entry, and its slot is used again; the old
// ref then misses.
func TestValueMemoryDropsEmptySlabs(t *testing.T) {
	m := newValueMemory(1<<20, 32)
	a := remembered(m, "0123456789012345")
	kept := m.get(a)
	b := remembered(m, "9876543210987654") // does not fit beside a
	m.dead(a, 16)
	if !m.has(a) {
		t.Fatal("gone before trim, when it may not be on disk")
	}
	m.trim(0, nil)
	if m.has(a) || !m.has(b) {
		t.Fatalf("after trim: a %v, b %v", m.has(a), m.has(b))
	}
	c := remembered(m, "cccccccccccccccc")
	if int(a>>offsetBits)&(maxSlots-1) != int(c>>offsetBits)&(maxSlots-1) {
		t.Fatal("the slot is not used again")
	}
	if m.get(a) != nil || string(m.get(c)) != "cccccccccccccccc" || string(kept) != "0123456789012345" {
		t.Error("a slot used again confuses its entries")
	}
}

// Keys that are written again and again take no more than a few times their
// size, however large the budget is, and all of them stay in memory.
func TestValueMemoryCleansSparseSlabs(t *testing.T) {
	const slabBytes, keys, size = 4096, 200, 60
	f := newFixture(t, func(o *Options) { o.slabBytes = slabBytes })
	rnd := rand.New(rand.NewPCG(1, 2))
	latest := map[string]string{}
	var most int64
	for i := range 20_000 {
		n := i
		if i >= keys {
			n = 1 + rnd.IntN(keys-1) // the first key is written once
		}
		k, v := fmt.Sprintf("k%03d", n), fmt.Sprintf("%0*d", size, i)
		f.put(k, v)
		latest[k] = v
		most = max(most, f.values.bytes)
	}
	// A slab is clean once 1 of sparseShare is left of it. Keys written at random
	// leave that after ln(sparseShare) rounds, which is less than 3.
	if live := f.Root().index.Bytes(); most > 4*live+4*slabBytes {
		t.Errorf("%d bytes of slabs for %d live ones", most, live)
	}
	v := f.View(f.Root())
	defer v.Release()
	for k, want := range latest {
		kv, item, ok, err := v.Get([]byte(k), 0)
		if err != nil || !ok || string(ValueOf(kv)) != want {
			t.Fatalf("%s is %q %v %v, want %q", k, kv, ok, err, want)
		}
		if !f.values.has(item.Ref) {
			t.Errorf("%s is not in memory", k)
		}
	}
}

// Over budget a mostly dead slab that is read is cleaned, in bounded steps,
// and cold slabs are dropped before warm ones.
func TestValueMemoryTrim(t *testing.T) {
	const slabBytes = 1000
	m := newValueMemory(5*slabBytes, slabBytes)
	live := map[index.ValueRef]string{}
	add := func(s string) index.ValueRef {
		ref := remembered(m, s)
		live[ref] = s
		return ref
	}
	moves := 0
	move := func(ref index.ValueRef, kv []byte) {
		moves++
		if s, ok := live[ref]; ok {
			if s != string(kv) {
				t.Fatalf("entry %x is %q, want %q", ref, kv, s)
			}
			m.dead(ref, uint32(len(s)))
			delete(live, ref)
			live[remembered(m, s)] = s
		}
	}
	entry := func(slab, i int) string { return fmt.Sprintf("%-96s", fmt.Sprint(slab, "/", i)) }
	var sparse []index.ValueRef
	for i := range 10 {
		sparse = append(sparse, add(entry(0, i)))
	}
	for _, ref := range sparse[2:] {
		m.dead(ref, 96)
		delete(live, ref)
	}
	for slab := 1; slab <= 5; slab++ {
		for i := range 10 {
			add(entry(slab, i))
		}
	}
	// Six slabs, five allowed: the sparse one is cleaned, one entry a time.
	m.get(sparse[0])
	for m.has(sparse[1]) {
		before := moves
		m.trim(1, move)
		if moves-before > 1 {
			t.Fatalf("%d moves, 1 allowed", moves-before)
		}
	}
	for ref, s := range live {
		if string(m.get(ref)) != s && s[:2] == "0/" {
			t.Errorf("entry %q was lost by cleaning", s)
		}
	}
	if m.bytes > m.budget {
		m.trim(100, move)
	}
	if m.bytes > m.budget {
		t.Errorf("%d bytes, budget %d", m.bytes, m.budget)
	}

	// Those that are read stay, those that are only written go.
	for slab := 6; slab <= 12; slab++ {
		for ref, s := range live {
			if s[:2] == "5/" {
				m.get(ref)
			}
		}
		for i := range 10 {
			add(entry(slab, i))
		}
		m.trim(100, move)
		if m.bytes > m.budget {
			t.Errorf("slab %d: %d bytes, budget %d", slab, m.bytes, m.budget)
		}
	}
	hot := 0
	for ref, s := range live {
		if s[:2] == "5/" && m.has(ref) {
			hot++
		}
	}
	if hot != 10 {
		t.Errorf("%d of 10 entries that are always read are left", hot)
	}
}

// After a start memory fills from disk, newest first, within its budget.
func TestWarm(t *testing.T) {
	for _, c := range []struct {
		budget int64
		all    bool
	}{{1 << 20, true}, {8 << 10, false}, {-1, false}} {
		warmed := 0
		f := newFixture(t, func(o *Options) {
			o.slabBytes, o.ValueBudgetBytes = 1<<10, c.budget
			o.OnWarm = func() { warmed++ }
		})
		for i := range 600 {
			f.put(fmt.Sprintf("k%03d", i%400), fmt.Sprintf("%050d", i))
		}
		f.work()
		f.reopen()
		warmed = 0
		in := func() (n int) {
			v := f.View(f.Root())
			defer v.Release()
			v.Items([]byte{0}, []byte{0}, func(it index.Item) bool {
				if f.values.has(it.Ref) {
					n++
				}
				return true
			})
			return n
		}
		if n := in(); n != 0 {
			t.Fatalf("%d values in memory after the start", n)
		}
		f.work()
		f.work()
		if warmed != 1 {
			t.Errorf("budget %d: told %d times that memory is warm", c.budget, warmed)
		}
		if n := in(); c.all != (n == 400) || c.budget > 0 && n == 0 || f.values.bytes > max(c.budget, 0) {
			t.Errorf("budget %d: %d values of %d bytes after warming", c.budget, n, f.values.bytes)
		}
		v := f.View(f.Root())
		if got := v.InMemory([]byte{0}, []byte{0}, 1<<20); got != c.all {
			t.Errorf("budget %d: in memory %v", c.budget, got)
		}
		if v.InMemory([]byte{0}, []byte{0}, 100) {
			t.Error("all values fit into 100 bytes")
		}
		if !v.InMemory([]byte("k599"), nil, 0) {
			t.Errorf("budget %d: a key that is not there needs the disk", c.budget)
		}
		v.Release()
	}
}

// A value that is read from disk comes into memory with a later batch.
func TestPromotion(t *testing.T) {
	f := newFixture(t, nil)
	f.put("a", "1", "b", "2")
	f.reopen()
	v := f.View(f.Root())
	if v.InMemory([]byte("a"), nil, 100) {
		t.Fatal("in memory after the start")
	}
	if _, _, ok, err := v.Get([]byte("a"), 0); !ok || err != nil {
		t.Fatal(ok, err)
	}
	v.Release()
	f.put("c", "3")
	v = f.View(f.Root())
	if !v.InMemory([]byte("a"), nil, 100) || v.InMemory([]byte("b"), nil, 100) {
		t.Errorf("a in memory %v, b %v", v.InMemory([]byte("a"), nil, 100), v.InMemory([]byte("b"), nil, 100))
	}
	v.Release()
}
