package index

import (
	"bytes"
	"encoding/binary"
	"slices"
)

const (
	leafRows     = 64      // most rows of a leaf
	leafKeyBytes = 1 << 16 // a leaf with two rows or more is split when its keys exceed this
)

// row is the newest revision of one key. Version 0 marks a tombstone: then
// create and ref are 0 as well.
type row struct {
	create, mod, version int64
	ref                  ValueRef
	sub, size            uint32
	hist                 link   // the revision before, in leaf.hist
	key                  uint32 // place in leaf.keys: uvarint length, key
}

func (r *row) live() bool    { return r.version != 0 }
func (r *row) rev() Revision { return Revision{r.mod, int64(r.sub)} }

// entry returns the row as it enters the history.
func (r *row) entry() entry {
	return entry{main: r.mod, create: r.create, version: r.version, sub: r.sub, size: r.size, tombstone: !r.live()}
}

// leaf holds the rows of neighbouring keys.
//
// A copy shares hints and leases with its leaf until they change, slots until
// they are full, and keys and hist for good: these are only appended to. So a
// change of a row costs the copy of little more than the places of the rows, and
// that of all rows once in a while.
type leaf struct {
	epoch     uint64 // the writer may change the leaf while its own epoch is the same
	total     sum    // of all rows
	prefix    uint32 // length of what all keys have in common, perhaps less
	rows      uint8  // how many
	shared    uint8  // slots below it are seen by older leaves, those from it on by none
	ownHints  bool   // hints are not shared with an older leaf
	ownLeases bool   // leases are not shared with an older leaf
	at        [leafRows]uint8
	hints     *[leafRows]uint32 // the first 4 bytes of each key after prefix: most steps of a search need no more
	slots     []row             // an arena: row i is the one at[i]; those that no row names are older
	keys      []byte            // an arena, in no order
	leases    []int64           // nil if all are 0
	hist      history
}

// len returns the number of rows.
func (l *leaf) len() int { return int(l.rows) }

// row returns row i, to be read only.
func (l *leaf) row(i int) *row { return &l.slots[l.at[i]] }

// change returns row i in a slot that no older leaf sees. The leaf is the
// writer's own.
func (l *leaf) change(i int) *row {
	s := l.at[i]
	if s < l.shared {
		s = l.add(*l.row(i))
		l.at[i] = s
	}
	return &l.slots[s]
}

// add puts a row into a slot.
func (l *leaf) add(r row) (slot uint8) {
	if len(l.slots) == cap(l.slots) {
		l.repack(spareSlots(l.len()))
	}
	l.slots = append(l.slots, r)
	return uint8(len(l.slots) - 1)
}

// spareSlots is how many slots a leaf of n rows has for changes when its slots
// are packed: with a quarter, a change costs the copy of four rows beside its own.
func spareSlots(n int) int { return max(4, n/4) }

// repack moves the rows to slots that only this leaf has, with some to spare.
func (l *leaf) repack(spare int) {
	n := l.len()
	slots := slices.Grow([]row(nil), n+spare)[:n]
	for i := range n {
		slots[i] = *l.row(i)
		l.at[i] = uint8(i)
	}
	l.slots, l.shared = slots, 0
}

// key returns the key of row i.
func (l *leaf) key(i int) []byte {
	off := uint(l.row(i).key)
	n := uint64(l.keys[off])
	if n < 0x80 {
		off++
	} else {
		var size int
		n, size = binary.Uvarint(l.keys[off:])
		off += uint(size)
	}
	end := off + uint(n)
	return l.keys[off:end:end]
}

func (l *leaf) lease(i int) int64 {
	if l.leases == nil {
		return 0
	}
	return l.leases[i]
}

// item returns the newest revision of row i, which is live.
func (l *leaf) item(i int) Item {
	r := l.row(i)
	return Item{
		Key: l.key(i), Create: r.create, Mod: Revision{r.mod, int64(r.sub)}, Version: r.version,
		Lease: l.lease(i), Size: r.size, Ref: r.ref,
	}
}

// itemAt returns the newest revision of row i that is not newer than bound,
// unless it is a tombstone or missing.
func (l *leaf) itemAt(i int, bound Revision) (Item, bool) {
	r := l.row(i)
	if r.rev().Compare(bound) <= 0 {
		if !r.live() {
			return Item{}, false
		}
		return l.item(i), true
	}
	var e entry
	if !l.hist.find(r.hist, bound, &e) || e.tombstone {
		return Item{}, false
	}
	return Item{Key: l.key(i), Create: e.create, Mod: e.rev(), Version: e.version, Size: e.size}, true
}

// search returns the first row whose key is not less than key, and whether it
// is equal.
func (l *leaf) search(key []byte) (int, bool) {
	if l.rows == 0 {
		return 0, false
	}
	p, lo := int(l.prefix), 0
	if len(key) >= p {
		// Assume that key begins like the others. When it is found, that has
		// spared a look at a distant part of the memory.
		rest := key[p:]
		want := leafHint(rest)
		for hi := l.len(); lo < hi; {
			mid := int(uint(lo+hi) >> 1)
			if have := l.hints[mid]; have < want {
				lo = mid + 1
			} else if have > want {
				hi = mid
			} else if k := l.key(mid); bytes.Equal(k, key) {
				return mid, true
			} else if bytes.Compare(k[p:], rest) < 0 {
				lo = mid + 1
			} else {
				hi = mid
			}
		}
	}
	if c := bytes.Compare(key[:min(p, len(key))], l.key(0)[:p]); c < 0 {
		return 0, false
	} else if c > 0 {
		return l.len(), false
	}
	return lo, false
}

func leafHint(rest []byte) uint32 { return uint32(hint(rest) >> 32) }

// full reports whether the leaf must be split before a key is added.
func (l *leaf) full(key []byte) bool {
	n := l.len()
	return n >= leafRows || n >= 2 && len(l.keys)+len(key) > leafKeyBytes
}

// own returns l itself or a copy that the writer of epoch may change.
func (l *leaf) own(epoch uint64) *leaf {
	if l.epoch == epoch {
		return l
	}
	c := *l
	c.epoch, c.shared = epoch, uint8(len(l.slots))
	c.ownHints, c.ownLeases = false, false
	return &c
}

// room returns a capacity for n leases that leaves some to grow.
func room(n int) int { return min((n+7)&^7, max(leafRows, n)) }

// insert adds a row at i, where search put the key.
func (l *leaf) insert(i int, key []byte, r row, lease int64) {
	r.key = l.addKey(key)
	n := l.len()
	slot := l.add(r)
	copy(l.at[i+1:], l.at[i:n])
	l.at[i] = slot
	l.rows++
	if !l.ownHints {
		hints := *l.hints
		l.hints, l.ownHints = &hints, true
	}
	copy(l.hints[i+1:], l.hints[i:n])
	if p := l.common(key); p < int(l.prefix) || n == 0 {
		l.prefix = uint32(p)
		l.fillHints()
	} else {
		l.hints[i] = leafHint(key[l.prefix:])
	}
	if lease != 0 || l.leases != nil {
		leases := make([]int64, n+1, room(n+1))
		if l.leases != nil {
			copy(leases, l.leases[:i])
			copy(leases[i+1:], l.leases[i:])
		}
		leases[i] = lease
		l.leases, l.ownLeases = leases, true
	}
}

// common returns how much of prefix a key has in common with the others; a
// single row has nothing in common yet.
func (l *leaf) common(key []byte) int {
	if l.rows == 1 {
		return len(key)
	}
	other := l.key(0)
	if bytes.Equal(other, key) {
		other = l.key(l.len() - 1)
	}
	return commonPrefix(key, other)
}

// addKey appends a key to the arena and returns its place.
func (l *leaf) addKey(key []byte) uint32 {
	need := len(key) + uvarintLen(uint64(len(key)))
	if cap(l.keys)-len(l.keys) < need {
		grown := make([]byte, len(l.keys), len(l.keys)+need+len(l.keys)/8)
		copy(grown, l.keys)
		l.keys = grown
	}
	off := len(l.keys)
	l.keys = binary.AppendUvarint(l.keys, uint64(len(key)))
	l.keys = append(l.keys, key...)
	return uint32(off)
}

// fillHints fills hints for the present prefix.
func (l *leaf) fillHints() {
	for i := range l.len() {
		l.hints[i] = leafHint(l.key(i)[l.prefix:])
	}
}

// setLease changes the lease of row i.
func (l *leaf) setLease(i int, lease int64) {
	if l.lease(i) == lease {
		return
	}
	if !l.ownLeases {
		leases := make([]int64, l.len())
		copy(leases, l.leases)
		l.leases, l.ownLeases = leases, true
	}
	l.leases[i] = lease
}

// historyBytes returns the encoded size of what is not live in rows [lo, hi). It
// visits their whole history.
func (l *leaf) historyBytes(lo, hi int) (n int64) {
	for i := lo; i < hi; i++ {
		r := l.row(i)
		if !r.live() {
			n += int64(r.size)
		}
		n += l.hist.size(r.hist)
	}
	return n
}

// revs calls fn with every retained revision of row i, oldest first, given the
// places of its history. The next call overwrites a Rev.
func (l *leaf) revs(i int, places []link, fn func(*Rev)) {
	var e entry
	var rev Rev
	for _, at := range slices.Backward(places) {
		l.hist.read(at, &e)
		rev = e.record()
		fn(&rev)
	}
	e = l.row(i).entry()
	rev = e.record()
	fn(&rev)
}

// sumRow returns what row i adds to the sum of its leaf, but for historyBytes and
// prune.
func (l *leaf) sumRow(i int) sum {
	r := l.row(i)
	s := noSum()
	s.history = l.hist.len(r.hist)
	if r.live() {
		s.live, s.bytes = 1, int64(r.size)
	} else {
		s.history++
	}
	return s
}

// pruneAt returns the lowest revision at which a compaction removes a revision
// of row i.
func (l *leaf) pruneAt(i int) int64 {
	r := l.row(i)
	if r.hist == 0 {
		if r.live() {
			return maxRevision
		}
		return r.mod + 1
	}
	var old, next entry
	superseded := r.mod
	if l.hist.oldest(r.hist, &old, &next) {
		superseded = next.main
	}
	if old.tombstone {
		return min(superseded, old.main+1)
	}
	return superseded
}

// sum returns the exact sum. Its historyBytes are given, for a change knows them
// without a visit to the history.
func (l *leaf) sum(historyBytes int64) sum {
	s := noSum()
	s.historyBytes = historyBytes
	for i := range l.len() {
		s.add(l.sumRow(i))
		s.prune = min(s.prune, l.pruneAt(i))
	}
	return s
}

// push appends a row whose key is greater than those before; seal must follow.
// r.hist must be a place in l.hist already.
func (l *leaf) push(key []byte, r row, lease int64) {
	r.key = l.addKey(key)
	l.at[l.rows] = uint8(len(l.slots))
	l.slots = append(l.slots, r)
	l.rows++
	if lease != 0 && l.leases == nil {
		l.leases = make([]int64, l.len()-1, leafRows)
	}
	if l.leases != nil {
		l.leases = append(l.leases, lease)
	}
}

// seal ends a series of pushes: it gives unused memory back and fills prefix
// and hints.
func (l *leaf) seal() {
	l.slots, l.leases, l.keys = clip(l.slots), clip(l.leases), clip(l.keys)
	l.hist.tail = clip(l.hist.tail)
	l.ownLeases = l.leases != nil
	l.prefix = 0
	if n := l.len(); n > 0 {
		l.prefix = uint32(commonPrefix(l.key(0), l.key(n-1)))
	}
	l.fillHints()
}

// clip returns s in memory of its own size, unless little would be saved.
func clip[T any](s []T) []T {
	if cap(s)-len(s) <= len(s)/16 {
		return s
	}
	return append([]T(nil), s...)
}

// newLeaf returns an empty leaf with room for rows and keyBytes.
func newLeaf(epoch uint64, rows, keyBytes int) *leaf {
	return &leaf{epoch: epoch, total: noSum(), hints: new([leafRows]uint32), ownHints: true, slots: make([]row, 0, rows), keys: make([]byte, 0, keyBytes)}
}

// part returns rows [lo, hi) as a leaf of its own. With keep it goes on with
// the history of l, whose other entries become garbage until a compaction;
// at most one part may keep it.
func (l *leaf) part(epoch uint64, lo, hi int, keep bool) *leaf {
	size := 0
	for i := lo; i < hi; i++ {
		size += len(l.key(i)) + binary.MaxVarintLen32
	}
	p := newLeaf(epoch, hi-lo, size)
	if keep {
		p.hist = l.hist
	}
	var places []link
	for i := lo; i < hi; i++ {
		r := *l.row(i)
		if !keep && r.hist != 0 {
			places = l.hist.places(r.hist, 0, places[:0])
			r.hist, _ = p.hist.copy(&l.hist, places)
		}
		p.push(l.key(i), r, l.lease(i))
	}
	p.sealKeeping(keep)
	return p
}

// sealKeeping is seal for a leaf whose history is shared with an older leaf:
// it must not move.
func (l *leaf) sealKeeping(keep bool) {
	hist := l.hist
	l.seal()
	if keep {
		l.hist = hist
	}
}

// split divides l before row m. Only the shorter of the two histories is visited,
// which has to be copied anyway.
func (l *leaf) split(epoch uint64, m int) (left, right *leaf) {
	var low, high, lowBytes, highBytes int64
	for i := range l.len() {
		if n := l.hist.len(l.row(i).hist); i < m {
			low += n
		} else {
			high += n
		}
	}
	if low < high {
		lowBytes = l.historyBytes(0, m)
		highBytes = l.total.historyBytes - lowBytes
	} else {
		highBytes = l.historyBytes(m, l.len())
		lowBytes = l.total.historyBytes - highBytes
	}
	left, right = l.part(epoch, 0, m, low >= high), l.part(epoch, m, l.len(), low < high)
	left.total, right.total = left.sum(lowBytes), right.sum(highBytes)
	return left, right
}

// join returns the rows of l and then those of r in one leaf.
func (l *leaf) join(epoch uint64, r *leaf) *leaf {
	j := newLeaf(epoch, l.len()+r.len(), len(l.keys)+len(r.keys))
	var places []link
	for _, src := range []*leaf{l, r} {
		for i := range src.len() {
			row := *src.row(i)
			places = src.hist.places(row.hist, 0, places[:0])
			row.hist, _ = j.hist.copy(&src.hist, places)
			j.push(src.key(i), row, src.lease(i))
		}
	}
	j.seal()
	j.total = l.total
	j.total.add(r.total)
	return j
}
