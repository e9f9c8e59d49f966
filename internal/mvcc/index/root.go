package index

import (
	"bytes"
)

// Root is an immutable moment of a Tree. Any goroutine may use it; the zero
// value is empty. A revision "at" that is 0 or less, or not less than the
// newest, means the present of this Root.
//
// Ranges are given as in the API: a nil or empty end means the single key, an
// end of one zero byte means all keys from key on, otherwise [key, end).
type Root struct {
	top    *inner
	newest int64
}

// Newest returns the highest main revision ever written, 0 for an empty Root.
func (r Root) Newest() int64 { return r.newest }

// Len returns the number of live keys.
func (r Root) Len() int64 { return r.sum().live }

// Bytes returns the encoded size of all live revisions.
func (r Root) Bytes() int64 { return r.sum().bytes }

// History returns the number of retained revisions that are not live:
// superseded ones and tombstones.
func (r Root) History() int64 { return r.sum().history }

func (r Root) sum() sum {
	if r.top == nil {
		return sum{}
	}
	return r.top.sum()
}

func (r Root) present(at int64) bool { return at <= 0 || at >= r.newest }

// bound returns the newest revision that a read at may see.
func (r Root) bound(at int64) Revision {
	if r.present(at) {
		return Revision{maxRevision, maxSub}
	}
	return Revision{at, maxSub}
}

// Get returns key as it was at a revision, or false if it was absent.
func (r Root) Get(key []byte, at int64) (Item, bool) { return r.get(key, r.bound(at)) }

// Before returns key as it was just before rev, or false if it was absent.
func (r Root) Before(key []byte, rev Revision) (Item, bool) {
	return r.get(key, Revision{rev.Main, rev.Sub - 1})
}

func (r Root) get(key []byte, bound Revision) (Item, bool) {
	l, i := r.top.lookup(key)
	if l == nil {
		return Item{}, false
	}
	return l.itemAt(i, bound)
}

// lookup returns the row of key, dead or alive, or a nil leaf.
func (n *inner) lookup(key []byte) (*leaf, int) {
	if n == nil || n.len() == 0 {
		return nil, 0
	}
	for n.height > 1 {
		n = n.kids[n.find(key)].inner
	}
	l := n.leaves[n.find(key)]
	i, found := l.search(key)
	if !found {
		return nil, 0
	}
	return l, i
}

// Ascend calls fn with the keys of a range as they were at a revision, in
// order, until fn returns false. To go on later, start at the last key with a
// zero byte appended.
func (r Root) Ascend(key, end []byte, at int64, fn func(Item) bool) {
	if r.top == nil {
		return
	}
	if len(end) == 0 {
		if it, ok := r.Get(key, at); ok {
			fn(it)
		}
		return
	}
	hi, open := openEnd(end)
	if !open && bytes.Compare(key, hi) >= 0 {
		return
	}
	if r.present(at) {
		r.top.leavesIn(key, hi, true, func(l *leaf, from, to int) bool {
			for i := from; i < to; i++ {
				if l.row(i).live() && !fn(l.item(i)) {
					return false
				}
			}
			return true
		})
		return
	}
	bound := r.bound(at)
	r.top.leavesIn(key, hi, false, func(l *leaf, from, to int) bool {
		for i := from; i < to; i++ {
			if it, ok := l.itemAt(i, bound); ok && !fn(it) {
				return false
			}
		}
		return true
	})
}

// openEnd returns the upper bound that end stands for, nil for none.
func openEnd(end []byte) (hi []byte, open bool) {
	if len(end) == 1 && end[0] == 0 {
		return nil, true
	}
	return end, false
}

// leavesIn calls fn with each leaf that has rows in [lo, hi) and the interval
// of these rows, until fn returns false. A nil hi means no end. With live it
// passes over leaves that hold no live key.
func (n *inner) leavesIn(lo, hi []byte, live bool, fn func(l *leaf, from, to int) bool) bool {
	for i := n.start(lo); i < n.len(); i++ {
		if i > 0 && hi != nil && bytes.Compare(n.seps.at(i), hi) >= 0 {
			return true
		}
		kidLo, kidHi := lo, hi
		lo = nil // only the first child has keys below it
		if i+1 < n.len() && hi != nil && bytes.Compare(n.seps.at(i+1), hi) <= 0 {
			kidHi = nil
		}
		if live && n.sumOf(i).live == 0 {
			continue
		}
		if n.height > 1 {
			if !n.kids[i].inner.leavesIn(kidLo, kidHi, live, fn) {
				return false
			}
			continue
		}
		l := n.leaves[i]
		from, to := 0, l.len()
		if len(kidLo) > 0 {
			from, _ = l.search(kidLo)
		}
		if kidHi != nil {
			to, _ = l.search(kidHi)
		}
		if from < to && !fn(l, from, to) {
			return false
		}
	}
	return true
}

// Count returns how many live keys a range has and the encoded size of their
// revisions, in logarithmic time.
func (r Root) Count(key, end []byte) (keys, bytes int64) {
	if r.top == nil {
		return 0, 0
	}
	if len(end) == 0 {
		if it, ok := r.Get(key, 0); ok {
			return 1, int64(it.Size)
		}
		return 0, 0
	}
	hi, open := openEnd(end)
	var upper sum
	if open {
		upper = r.top.sum()
	} else {
		upper = r.top.below(hi)
	}
	lower := r.top.below(key)
	if lower.live > upper.live {
		return 0, 0 // end <= key
	}
	return upper.live - lower.live, upper.bytes - lower.bytes
}

// below returns live and bytes of the keys less than key.
func (n *inner) below(key []byte) sum {
	var s sum
	for n.len() > 0 {
		k := n.find(key)
		for i := range k {
			kid := n.sumOf(i)
			s.live += kid.live
			s.bytes += kid.bytes
		}
		if n.height > 1 {
			n = n.kids[k].inner
			continue
		}
		l := n.leaves[k]
		to, _ := l.search(key)
		for i := range to {
			if r := l.row(i); r.live() {
				s.live++
				s.bytes += int64(r.size)
			}
		}
		return s
	}
	return s
}

// CountAt returns how many keys a range had at a revision. It takes
// logarithmic time for the present and visits every key for the past.
func (r Root) CountAt(key, end []byte, at int64) int64 {
	if r.present(at) {
		keys, _ := r.Count(key, end)
		return keys
	}
	var keys int64
	r.Ascend(key, end, at, func(Item) bool {
		keys++
		return true
	})
	return keys
}

// Keep calls yield with the revisions that were live at a revision, in key
// order.
func (r Root) Keep(at int64, yield func(Revision)) {
	r.Ascend(nil, []byte{0}, at, func(it Item) bool {
		yield(it.Mod)
		return true
	})
}

// Walk calls fn with everything known of each key from a key on, in order,
// until fn returns false. The Record and its Revs are overwritten by the next
// call; the Key may be kept.
func (r Root) Walk(from []byte, fn func(*Record) bool) {
	if r.top == nil {
		return
	}
	var rec Record
	var places []link
	r.top.leavesIn(from, nil, false, func(l *leaf, from, to int) bool {
		for i := from; i < to; i++ {
			row := l.row(i)
			rec.Key, rec.Lease, rec.Ref = l.key(i), l.lease(i), row.ref
			places = l.hist.places(row.hist, 0, places[:0])
			rec.Revs = grow(rec.Revs[:0], len(places)+1)
			l.revs(i, places, func(v *Rev) { rec.Revs = append(rec.Revs, *v) })
			if !fn(&rec) {
				return false
			}
		}
		return true
	})
}

// Encode gives write what Walk tells, as Encoder has it, in blocks that end with
// the key that makes them blockBytes long. The next overwrites a block. An error
// of write ends it.
func (r Root) Encode(blockBytes int, write func(block []byte, records int) error) (err error) {
	if r.top == nil {
		return nil
	}
	var (
		enc     Encoder
		block   []byte
		records int
		places  []link
	)
	flush := func() {
		err = write(block, records)
		block, records = block[:0], 0
		enc.Reset()
	}
	r.top.leavesIn(nil, nil, false, func(l *leaf, from, to int) bool {
		for i := from; i < to && err == nil; i++ {
			places = l.hist.places(l.row(i).hist, 0, places[:0])
			block = enc.begin(block, l.key(i), l.lease(i), len(places)+1)
			l.revs(i, places, func(v *Rev) { block = enc.rev(block, v) })
			if records++; len(block) >= blockBytes {
				flush()
			}
		}
		return err == nil
	})
	if err == nil && records > 0 {
		flush()
	}
	return err
}

func (e *entry) record() Rev {
	return Rev{Revision: e.rev(), Create: e.create, Version: e.version, Size: e.size, Tombstone: e.tombstone}
}
