package index

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

// link is the place of an entry in a history, plus one; 0 means none.
type link uint32

const (
	entryAlign   = 4                       // entries start at multiples of it, so that a link spans 16 GiB
	chunkBits    = 14                      // in units of entryAlign
	chunkSize    = entryAlign << chunkBits // bytes
	maxEntrySize = 64                      // bytes: a header byte, three numbers of 10, four of 5, padding
	maxChunks    = 1 << (32 - chunkBits)   // a link has no more bits
	chunkMask    = 1<<chunkBits - 1
)

// history holds the superseded revisions of all keys of one leaf. It only
// grows at its end, so leaves of different age share its memory (I3): a leaf
// reads no further than the lengths it was copied with.
//
// The entries of a key form a list from the newest to the oldest. Each also
// has a jump to an entry further back, chosen as in a skew-binary number: a
// jump of level k passes over 2^k-1 entries, so a search takes O(log n) steps
// even in a key that was written a million times since the last compaction.
//
//	header (1 byte: tombstone, has sub, level<<2) | distance to the one before (level > 0) |
//	distance of the jump (level > 1) | main | size | sub (if marked) |
//	main - create | version (both not for a tombstone) | padding to a multiple of 4
//
// Numbers are uvarints, distances count units of 4 bytes.
type history struct {
	full [][]byte // chunks of at most chunkSize that are no longer written
	tail []byte   // the chunk after them
}

// entry is a decoded revision of a history.
type entry struct {
	main, create, version int64
	sub, size             uint32
	tombstone             bool
	level                 uint8
	before, jump          link // before is 0 in the oldest; jump equals before at level 1
}

const (
	entryTombstone = 1 << 0
	entrySub       = 1 << 1
	entryLevel     = 2
)

func (e *entry) rev() Revision { return Revision{e.main, int64(e.sub)} }

// bytes returns the memory from the entry at l on.
func (h *history) bytes(l link) []byte {
	unit := uint32(l - 1)
	chunk, off := int(unit>>chunkBits), int(unit&chunkMask)*entryAlign
	if chunk < len(h.full) {
		return h.full[chunk][off:]
	}
	return h.tail[off:]
}

// links decodes what a search needs, and returns the bytes that follow.
func (h *history) links(l link, e *entry) []byte {
	b := h.bytes(l)
	head := b[0]
	e.tombstone = head&entryTombstone != 0
	e.level = head >> entryLevel
	e.before, e.jump = 0, 0
	b = b[1:]
	if e.level > 0 {
		var d uint64
		d, b = uvarint(b)
		e.before = l - link(d)
		e.jump = e.before
		if e.level > 1 {
			d, b = uvarint(b)
			e.jump = l - link(d)
		}
	}
	main, b := uvarint(b)
	e.main = int64(main)
	return b
}

// read decodes the entry at l.
func (h *history) read(l link, e *entry) {
	hasSub := h.bytes(l)[0]&entrySub != 0
	b := h.links(l, e)
	var n uint64
	n, b = uvarint(b)
	e.size = uint32(n)
	e.sub = 0
	if hasSub {
		n, b = uvarint(b)
		e.sub = uint32(n)
	}
	e.create, e.version = 0, 0
	if !e.tombstone {
		n, b = uvarint(b)
		e.create = e.main - int64(n)
		n, _ = uvarint(b)
		e.version = int64(n)
	}
}

// push appends e as the successor of the entry at before, and returns its
// place. It sets e's links.
func (h *history) push(e *entry, before link) link {
	if cap(h.tail)-len(h.tail) < maxEntrySize {
		h.grow()
	}
	unit := uint32(len(h.full))<<chunkBits | uint32(len(h.tail)/entryAlign)
	l := link(unit) + 1
	e.before, e.jump, e.level = before, before, 0
	if before != 0 {
		e.level = 1
		var p, j entry
		h.links(before, &p)
		if p.level > 0 {
			if h.links(p.jump, &j); j.level == p.level {
				e.jump, e.level = j.jump, p.level+1
			}
		}
	}
	head := e.level << entryLevel
	if e.tombstone {
		head |= entryTombstone
	}
	if e.sub != 0 {
		head |= entrySub
	}
	b := append(h.tail, head)
	if e.level > 0 {
		b = binary.AppendUvarint(b, uint64(l-e.before))
	}
	if e.level > 1 {
		b = binary.AppendUvarint(b, uint64(l-e.jump))
	}
	b = binary.AppendUvarint(b, uint64(e.main))
	b = binary.AppendUvarint(b, uint64(e.size))
	if e.sub != 0 {
		b = binary.AppendUvarint(b, uint64(e.sub))
	}
	if !e.tombstone {
		b = binary.AppendUvarint(b, uint64(e.main-e.create))
		b = binary.AppendUvarint(b, uint64(e.version))
	}
	for len(b)%entryAlign != 0 {
		b = append(b, 0)
	}
	h.tail = b
	return l
}

// grow makes room for one more entry in tail. Small histories grow by a
// quarter, to waste little where leaves are many.
func (h *history) grow() {
	if len(h.tail)+maxEntrySize > chunkSize {
		if len(h.full)+1 >= maxChunks {
			broken("the history of one leaf exceeds %d chunks of %d bytes: compact more often", maxChunks, chunkSize)
		}
		h.full = append(h.full, h.tail)
		h.tail = nil
	}
	room := min(chunkSize, len(h.tail)+maxEntrySize+len(h.tail)/4)
	h.tail = append(make([]byte, 0, room), h.tail...)
}

// len returns the number of entries from l on back.
func (h *history) len(l link) int64 {
	if l == 0 {
		return 0
	}
	n := int64(1)
	for {
		var e entry
		h.links(l, &e)
		if e.level == 0 {
			return n
		}
		n += int64(1)<<e.level - 1
		l = e.jump
	}
}

// size returns the encoded size of the revisions from l on back.
func (h *history) size(l link) (n int64) {
	for l != 0 {
		var e entry
		bytes, _ := uvarint(h.links(l, &e))
		n += int64(bytes)
		l = e.before
	}
	return n
}

// find returns the newest entry not newer than bound, looking from l on back.
func (h *history) find(l link, bound Revision, e *entry) bool {
	for l != 0 {
		h.read(l, e)
		if e.rev().Compare(bound) <= 0 {
			return true
		}
		if e.level == 0 {
			return false
		}
		l = e.before
		if e.level > 1 {
			var j entry
			if h.read(e.jump, &j); j.rev().Compare(bound) > 0 {
				l = e.jump
			}
		}
	}
	return false
}

// oldest reads the oldest entry from l on back, and its successor, which is
// not found if l is the oldest itself.
func (h *history) oldest(l link, old, next *entry) (found bool) {
	h.read(l, old)
	for old.level != 0 {
		*next, found = *old, true
		var j entry
		if h.read(old.jump, &j); old.level > 1 && j.level != 0 {
			*old = j
			continue
		}
		h.read(old.before, old)
	}
	return found
}

// grow is slices.Grow, which allocates the room twice where nothing is optimised, as under the race detector.
func grow[T any](s []T, n int) []T {
	if cap(s)-len(s) >= n {
		return s
	}
	return append(make([]T, 0, max(len(s)+n, 2*cap(s))), s...)
}

// places appends to dst where the entries from l on back are, newest first, to
// the first that is not newer than main revision bound. A key may have millions
// of them: they are decoded one at a time.
func (h *history) places(l link, bound int64, dst []link) []link {
	if bound == 0 { // all
		dst = grow(dst, int(h.len(l)))
	}
	for l != 0 {
		var e entry
		h.links(l, &e)
		dst = append(dst, l)
		if e.main <= bound {
			break
		}
		l = e.before
	}
	return dst
}

// copy pushes the entries of src at places, which are given newest first, and
// returns the place of the newest and the encoded size of all revisions.
func (h *history) copy(src *history, places []link) (l link, bytes int64) {
	var e entry
	for _, from := range slices.Backward(places) {
		src.read(from, &e)
		bytes += int64(e.size)
		l = h.push(&e, l)
	}
	return l, bytes
}

// uvarint decodes a number that push has written.
func uvarint(b []byte) (uint64, []byte) {
	if b[0] < 0x80 {
		return uint64(b[0]), b[1:]
	}
	if b[1] < 0x80 {
		return uint64(b[0]&0x7f) | uint64(b[1])<<7, b[2:]
	}
	n, size := binary.Uvarint(b)
	return n, b[size:]
}

// uvarintLen returns the bytes that n takes.
func uvarintLen(n uint64) int { return (bits.Len64(n|1) + 6) / 7 }
