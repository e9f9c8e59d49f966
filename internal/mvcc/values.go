package mvcc

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/engram-kv/engram/internal/mvcc/index"
)

// valueMemory keeps the encoded KeyValues of live keys in few large slabs, so
// that reads of the present seldom touch Pebble and the garbage collector has
// little to follow. The writer adds; anyone reads. A slab that is dropped
// stays valid for those who hold slices of it, and is freed when the last one
// lets go.
//
// An entry is its length (4 bytes) and the encoded KeyValue; whether it is
// live the index knows. A ref names slab and offset:
//
//	generation (24 bits) | slot (20 bits) | offset (20 bits)
//
// A slot is used again with another generation, so that an old ref misses
// instead of reading another key's value.
type valueMemory struct {
	slots atomic.Pointer[[]atomic.Pointer[slab]]

	// Below: the writer's.
	budget    int64
	slabBytes int
	current   *slab
	used      int // of current
	bytes     int64
	slabs     []*slab // in order of creation
	gens      []uint32
	freeSlots []uint32
	empty     []*slab // lost their last live entry; freed at trim
	cleaning  *slab
	cleanAt   int
}

type slab struct {
	gen  uint32
	slot uint32
	buf  []byte
	// end is how much of buf is filled, set when the slab is no longer current.
	end int
	// live is the size of the live entries, their heads included. The writer's.
	live int64
	// touched says that a reader was here since the hand of the clock came by.
	touched atomic.Bool
}

const (
	entryHead     = 4
	offsetBits    = 20
	slotBits      = 20
	maxSlots      = 1 << slotBits
	maxGen        = 1<<24 - 1
	slabBytesFull = 1 << offsetBits
)

func makeRef(s *slab, off int) index.ValueRef {
	return index.ValueRef(uint64(s.gen)<<(slotBits+offsetBits) | uint64(s.slot)<<offsetBits | uint64(off))
}

func newValueMemory(budget int64, slabBytes int) *valueMemory {
	m := &valueMemory{budget: max(budget, 0), slabBytes: slabBytes}
	slots := make([]atomic.Pointer[slab], 64)
	m.slots.Store(&slots)
	return m
}

// slab returns the slab of a ref, nil if it was dropped.
func (m *valueMemory) slab(ref index.ValueRef) *slab {
	slot := int(ref>>offsetBits) & (maxSlots - 1)
	slots := *m.slots.Load()
	if ref == 0 || slot >= len(slots) {
		return nil
	}
	s := slots[slot].Load()
	if s == nil || s.gen != uint32(ref>>(slotBits+offsetBits)) {
		return nil
	}
	return s
}

// has says whether get would find ref now.
func (m *valueMemory) has(ref index.ValueRef) bool { return m.slab(ref) != nil }

// get returns the entry at ref, nil if its slab was dropped.
func (m *valueMemory) get(ref index.ValueRef) []byte {
	s := m.slab(ref)
	if s == nil {
		return nil
	}
	if !s.touched.Load() {
		s.touched.Store(true)
	}
	return s.entry(int(ref) & (slabBytesFull - 1))
}

func (s *slab) entry(off int) []byte {
	n := int(binary.LittleEndian.Uint32(s.buf[off:]))
	start := off + entryHead
	return s.buf[start : start+n : start+n]
}

// add makes room for an entry of n bytes, which the caller fills before the
// ref is published.
func (m *valueMemory) add(n int) ([]byte, index.ValueRef) {
	need := entryHead + n
	if need > m.slabBytes {
		s := m.newSlab(need)
		s.end, s.live = need, int64(need)
		binary.LittleEndian.PutUint32(s.buf, uint32(n))
		return s.buf[entryHead:need:need], makeRef(s, 0)
	}
	if m.current == nil || m.used+need > len(m.current.buf) {
		m.retire()
		m.current, m.used = m.newSlab(m.slabBytes), 0
	}
	s, off := m.current, m.used
	m.used += need
	s.live += int64(need)
	binary.LittleEndian.PutUint32(s.buf[off:], uint32(n))
	return s.buf[off+entryHead : off+need : off+need], makeRef(s, off)
}

func (m *valueMemory) retire() {
	if s := m.current; s != nil {
		s.end = m.used
		m.current = nil
		if s.live == 0 {
			m.empty = append(m.empty, s)
		}
	}
}

func (m *valueMemory) newSlab(size int) *slab {
	var slot uint32
	if n := len(m.freeSlots); n > 0 {
		slot, m.freeSlots = m.freeSlots[n-1], m.freeSlots[:n-1]
	} else {
		slot = uint32(len(m.gens))
		if slot == maxSlots {
			broken("value memory of %d bytes has all %d slots in use", m.bytes, maxSlots)
		}
		m.gens = append(m.gens, 0)
	}
	m.gens[slot] = m.gens[slot]%maxGen + 1
	s := &slab{gen: m.gens[slot], slot: slot, buf: make([]byte, size)}
	slots := *m.slots.Load()
	if int(slot) >= len(slots) {
		grown := make([]atomic.Pointer[slab], 2*len(slots))
		for i := range slots {
			grown[i].Store(slots[i].Load())
		}
		m.slots.Store(&grown)
		slots = grown
	}
	slots[slot].Store(s)
	m.slabs = append(m.slabs, s)
	m.bytes += int64(size)
	return s
}

// dead says that the live entry at ref, of n bytes, is superseded.
func (m *valueMemory) dead(ref index.ValueRef, n uint32) {
	s := m.slab(ref)
	if s == nil {
		return
	}
	s.live -= entryHead + int64(n)
	if s.live == 0 && s != m.current {
		m.empty = append(m.empty, s)
	}
}

func (m *valueMemory) drop(s *slab) {
	slots := *m.slots.Load()
	if slots[s.slot].Load() != s {
		return // it was dropped for another reason already
	}
	slots[s.slot].Store(nil)
	m.freeSlots = append(m.freeSlots, s.slot)
	m.bytes -= int64(len(s.buf))
	for i, o := range m.slabs {
		if o == s {
			m.slabs = append(m.slabs[:i], m.slabs[i+1:]...)
			break
		}
	}
	if s == m.cleaning {
		m.cleaning = nil
	}
}

// full says that nothing should be added but what is written.
func (m *valueMemory) full() bool { return m.bytes+int64(m.slabBytes) > m.budget }

// trim brings the memory back to its budget. All its entries must be on disk.
// A slab that is mostly dead but read is cleaned: move is called for each entry
// and copies it if it is live. At most so many moves are made in one call; the
// budget is passed by a few slabs meanwhile.
func (m *valueMemory) trim(moves int, move func(ref index.ValueRef, kv []byte)) {
	for _, s := range m.empty {
		m.drop(s)
	}
	m.empty = m.empty[:0]
	for m.bytes > m.budget {
		if m.cleaning == nil {
			victim := m.victim()
			if victim == nil {
				return // only the slab that is being filled is left
			}
			if !victim.touched.Load() || 2*victim.live > int64(len(victim.buf)) {
				m.drop(victim)
				continue
			}
			m.cleaning, m.cleanAt = victim, 0
		}
		s := m.cleaning
		for ; m.cleanAt < s.end && moves > 0 && s.live > 0; moves-- {
			kv := s.entry(m.cleanAt)
			move(makeRef(s, m.cleanAt), kv)
			m.cleanAt += entryHead + len(kv)
		}
		if m.cleanAt < s.end && s.live > 0 && m.bytes <= m.budget+4*int64(m.slabBytes) {
			return // the next batch goes on
		}
		m.drop(s)
	}
}

// victim chooses the slab to give up: one that is mostly dead, else the oldest
// that nobody has read since the hand of the clock came by. It is nil if only
// the current one is left.
func (m *valueMemory) victim() *slab {
	var least, cold, oldest *slab
	for _, s := range m.slabs {
		if s == m.current {
			continue
		}
		if oldest == nil {
			oldest = s
		}
		if least == nil || s.live*int64(len(least.buf)) < least.live*int64(len(s.buf)) {
			least = s
		}
		if cold == nil && !s.touched.Load() {
			cold = s
		}
	}
	switch {
	case least != nil && 2*least.live <= int64(len(least.buf)):
		return least
	case cold != nil:
		return cold
	}
	for _, s := range m.slabs {
		s.touched.Store(false)
	}
	return oldest
}
