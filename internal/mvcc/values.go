package mvcc

import (
	"encoding/binary"
	"math/bits"
	"sync/atomic"

	"github.com/engram-kv/engram/internal/mvcc/index"
)

// valueMemory keeps the encoded KeyValues of live keys in few large slabs, so
// that reads of the present seldom touch Pebble and the garbage collector has
// little to follow. The writer adds; anyone reads. A slab that is dropped
// stays valid for those who hold slices of it, and is freed when the last one
// lets go.
//
// A slab of which little is live any more is cleaned: its live entries move to
// another one. Without that, keys which are written again and again would
// fill the whole budget with what nobody needs, and each of these writes would
// cost fresh memory.
//
// An entry is its length (4 bytes) and the encoded KeyValue. A ref names slab
// and offset:
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
	written   filling // what is written
	moved     filling // what is moved here: apart, so that who holds on to what was written holds little else
	bytes     int64
	slabs     []*slab // in order of creation
	gens      []uint32
	freeSlots []uint32
	empty     []*slab // lost their last live entry; freed at trim
	sparse    []*slab // have few live entries left; cleaned in trim
	cleaning  *slab
	cleanAt   int
}

// filling is a slab to which entries are added.
type filling struct {
	slab *slab // nil if there is none
	used int
}

type slab struct {
	gen  uint32
	slot uint32
	buf  []byte
	// live is the space of the live entries, and starts has a bit for each of
	// them: its offset in units of entryAlign. The writer's.
	live   int64
	starts []uint64
	sparse bool // it is or was in valueMemory.sparse; the writer's
	// touched says that a reader was here since the hand of the clock came by.
	touched atomic.Bool
}

const (
	entryHead     = 4
	entryAlign    = 8  // entries begin at multiples of it
	sparseShare   = 16 // a slab is sparse when this part of it is live, or less
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
	kv, _ := m.find(ref)
	return kv
}

// find is get, and also returns the slab that holds the entry.
func (m *valueMemory) find(ref index.ValueRef) ([]byte, *slab) {
	s := m.slab(ref)
	if s == nil {
		return nil, nil
	}
	if !s.touched.Load() {
		s.touched.Store(true)
	}
	return s.entry(int(ref) & (slabBytesFull - 1)), s
}

// entrySize is what an entry of n bytes takes of a slab.
func entrySize(n int) int { return (entryHead + n + entryAlign - 1) &^ (entryAlign - 1) }

// note says that the entry at off, of n bytes, is live now, or no longer.
func (s *slab) note(off, n int, live bool) {
	bit := uint(off / entryAlign)
	if live {
		s.live += int64(entrySize(n))
		s.starts[bit/64] |= 1 << (bit % 64)
	} else {
		s.live -= int64(entrySize(n))
		s.starts[bit/64] &^= 1 << (bit % 64)
	}
}

// nextLive returns the first live entry that begins at off or behind it.
func (s *slab) nextLive(off int) (at int, ok bool) {
	from := ^uint64(0) << (uint(off/entryAlign) % 64)
	for w := off / entryAlign / 64; w < len(s.starts); w++ {
		if set := s.starts[w] & from; set != 0 {
			return (w*64 + bits.TrailingZeros64(set)) * entryAlign, true
		}
		from = ^uint64(0)
	}
	return 0, false
}

func (s *slab) entry(off int) []byte {
	n := int(binary.LittleEndian.Uint32(s.buf[off:]))
	start := off + entryHead
	return s.buf[start : start+n : start+n]
}

// add makes room for an entry of n bytes that is written, which the caller fills
// before the ref is published.
func (m *valueMemory) add(n int) ([]byte, index.ValueRef) { return m.addTo(&m.written, n) }

// addMoved is add for an entry that was written before.
func (m *valueMemory) addMoved(n int) ([]byte, index.ValueRef) { return m.addTo(&m.moved, n) }

func (m *valueMemory) addTo(f *filling, n int) ([]byte, index.ValueRef) {
	need := entrySize(n)
	if need > m.slabBytes {
		s := m.newSlab(entryHead+n, 1)
		s.note(0, n, true)
		binary.LittleEndian.PutUint32(s.buf, uint32(n))
		return s.buf[entryHead:], makeRef(s, 0)
	}
	if f.slab == nil || f.used+need > len(f.slab.buf) {
		if full := f.slab; full != nil {
			f.slab = nil
			m.look(full)
		}
		f.slab, f.used = m.newSlab(m.slabBytes, m.slabBytes/entryAlign), 0
	}
	s, off := f.slab, f.used
	f.used += need
	s.note(off, n, true)
	binary.LittleEndian.PutUint32(s.buf[off:], uint32(n))
	start, end := off+entryHead, off+entryHead+n
	return s.buf[start:end:end], makeRef(s, off)
}

// filled says that s is one to which entries are added.
func (m *valueMemory) filled(s *slab) bool { return s == m.written.slab || s == m.moved.slab }

// look sees if s, to which nothing is added any more, can be given up.
func (m *valueMemory) look(s *slab) {
	if s.live == 0 {
		m.empty = append(m.empty, s)
	} else if !s.sparse && s.live*sparseShare <= int64(len(s.buf)) {
		s.sparse = true
		m.sparse = append(m.sparse, s)
	}
}

// newSlab makes a slab with room for so many entries of the least size.
func (m *valueMemory) newSlab(size, entries int) *slab {
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
	s := &slab{gen: m.gens[slot], slot: slot, buf: make([]byte, size), starts: make([]uint64, (entries+63)/64)}
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
	s.note(int(ref)&(slabBytesFull-1), int(n), false)
	if !m.filled(s) {
		m.look(s)
	}
}

// held says that s was not dropped.
func (m *valueMemory) held(s *slab) bool { return (*m.slots.Load())[s.slot].Load() == s }

func (m *valueMemory) drop(s *slab) {
	if !m.held(s) {
		return // it was dropped for another reason already
	}
	(*m.slots.Load())[s.slot].Store(nil)
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

// trim brings the memory back to its budget and cleans sparse slabs. All entries
// must be on disk. A slab that is cleaned is dropped once move was called for each
// of its live entries, and has copied it. At most so many moves are made in one
// call; the budget is passed by a few slabs meanwhile.
func (m *valueMemory) trim(moves int, move func(ref index.ValueRef, kv []byte)) {
	for _, s := range m.empty {
		m.drop(s)
	}
	m.empty = m.empty[:0]
	for {
		if m.cleaning == nil {
			if m.cleaning, m.cleanAt = m.dirty(), 0; m.cleaning == nil {
				return
			}
		}
		s := m.cleaning
		at, more := s.nextLive(m.cleanAt)
		for ; more && moves > 0; moves-- {
			m.cleanAt = at + entryAlign
			move(makeRef(s, at), s.entry(at))
			at, more = s.nextLive(m.cleanAt)
		}
		if more && m.bytes <= m.budget+4*int64(m.slabBytes) {
			return // the next batch goes on
		}
		m.drop(s)
	}
}

// dirty returns the next slab to clean, nil if there is none. Over budget it is
// one that is mostly dead but read, and others are dropped until one is found.
func (m *valueMemory) dirty() *slab {
	for m.bytes > m.budget {
		victim := m.victim()
		if victim == nil {
			break // only slabs that are being filled are left
		}
		if victim.touched.Load() && 2*victim.live <= int64(len(victim.buf)) {
			return victim
		}
		m.drop(victim)
	}
	for len(m.sparse) > 0 {
		last := len(m.sparse) - 1
		s := m.sparse[last]
		m.sparse[last], m.sparse = nil, m.sparse[:last]
		if m.held(s) {
			return s
		}
	}
	return nil
}

// victim chooses the slab to give up: one that is mostly dead, else the oldest
// that nobody has read since the hand of the clock came by. It is nil if only
// those that are being filled are left.
func (m *valueMemory) victim() *slab {
	var least, cold, oldest *slab
	for _, s := range m.slabs {
		if m.filled(s) {
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
