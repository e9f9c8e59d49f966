package index

import "bytes"

// Compact forgets what no read at rev or later can see: of each key it keeps
// the revisions newer than rev and the newest of the others, unless that is a
// tombstone older than rev. A key of which nothing remains is gone.
//
// It works in steps. One call starts at the key from (nil for the first), and
// prunes at most maxKeys keys, at least one; subtrees that have nothing to
// prune cost nothing. It calls dropped with each revision that it removes, and
// returns the key to go on from, or nil when all is done. Between two calls
// the tree may change and Roots may be taken.
func (t *Tree) Compact(rev int64, from []byte, maxKeys int, dropped func(rev Revision, size uint32, tombstone bool)) (next []byte) {
	c := &compaction{tree: t, rev: rev, from: from, left: max(1, maxKeys), dropped: dropped}
	if t.top.sum().prune > rev {
		return nil
	}
	t.changes++
	t.top = t.top.own(t.epoch)
	c.inner(t.top)
	for t.top.height > 1 && t.top.len() <= 1 {
		if t.top.len() == 0 {
			t.top = newInner(t.epoch, 1)
		} else {
			t.top = t.top.kids[0].inner
		}
	}
	return c.next
}

// compaction is one step.
type compaction struct {
	tree    *Tree
	rev     int64
	from    []byte // keys before it are done
	left    int    // keys that may still be pruned
	dropped func(Revision, uint32, bool)
	next    []byte // set when the step is over and there is more to do
	bytes   int64  // dropped from the leaf at hand

	entries []entry
}

// inner prunes below n, which the writer owns.
func (c *compaction) inner(n *inner) {
	first := n.start(c.from)
	i := first
	for ; i < n.len() && c.next == nil; i++ {
		if n.sumOf(i).prune > c.rev {
			continue
		}
		if n.height > 1 {
			kid := n.kids[i].inner.own(c.tree.epoch)
			c.inner(kid)
			n.kids[i] = child{sum: kid.sum(), inner: kid}
		} else {
			c.bytes = 0
			before := n.leaves[i].total.historyBytes
			l := c.leaf(n.leaves[i]).own(c.tree.epoch)
			l.total = l.sum(before - c.bytes)
			n.leaves[i] = l
		}
	}
	c.tidy(n, max(0, first-1), i)
}

// tidy removes empty children of n and joins small neighbours in [lo, hi].
func (c *compaction) tidy(n *inner, lo, hi int) {
	epoch := c.tree.epoch
	for i := min(hi, n.len()-1); i >= lo; i-- {
		if n.size(i) == 0 {
			n.remove(i)
			continue
		}
		if i+1 >= n.len() || n.size(i)+n.size(i+1) > n.capacity()*5/8 {
			continue
		}
		if n.height > 1 {
			joined, right := n.kids[i], n.kids[i+1]
			joined.add(right.sum)
			joined.inner = joined.inner.own(epoch)
			joined.inner.join(n.seps.at(i+1), right.inner)
			n.kids[i] = joined
		} else {
			left, right := n.leaves[i], n.leaves[i+1]
			if len(left.keys)+len(right.keys) > leafKeyBytes/2 {
				continue
			}
			n.leaves[i] = left.join(epoch, right)
		}
		n.remove(i + 1)
	}
}

// size returns how many rows or children child i has.
func (n *inner) size(i int) int {
	if n.height > 1 {
		return n.kids[i].inner.len()
	}
	return n.leaves[i].len()
}

// capacity returns the most rows or children that a child of n has.
func (n *inner) capacity() int {
	if n.height > 1 {
		return fanout
	}
	return leafRows
}

// prunable reports whether there is something to prune in row i.
func (c *compaction) prunable(l *leaf, i int) bool {
	r := l.row(i)
	if r.mod <= c.rev {
		return r.hist != 0 || !r.live() && r.mod < c.rev
	}
	var e entry
	if !l.hist.find(r.hist, Revision{c.rev, maxSub}, &e) {
		return false
	}
	return e.level > 0 || e.tombstone && e.main < c.rev
}

// leaf prunes the rows of l from c.from on and returns what remains, which is
// l itself if nothing was pruned.
func (c *compaction) leaf(l *leaf) *leaf {
	todo := make([]bool, l.len())
	some := false
	for i := range l.len() {
		if c.from != nil && bytes.Compare(l.key(i), c.from) < 0 || !c.prunable(l, i) {
			continue
		}
		if c.left == 0 {
			c.next = bytes.Clone(l.key(i))
			break
		}
		c.left--
		todo[i], some = true, true
	}
	if !some {
		return l
	}
	p := newLeaf(c.tree.epoch, l.len(), len(l.keys))
	for i := range l.len() {
		r := *l.row(i)
		c.entries = l.hist.list(r.hist, c.entries[:0])
		keep := c.entries
		if todo[i] {
			gone := false
			if keep, gone = c.prune(&r, keep); gone {
				continue
			}
		}
		r.hist = p.hist.pushAll(keep)
		p.push(l.key(i), r, l.lease(i))
	}
	p.seal()
	return p
}

// prune reports what is dropped of a key and returns the entries that stay;
// gone says that the row itself went as well.
func (c *compaction) prune(r *row, entries []entry) (keep []entry, gone bool) {
	kept := 0 // entries newer than rev, and the survivor
	newest := r.entry()
	if r.mod <= c.rev {
		gone = newest.tombstone && newest.main < c.rev
	} else {
		for kept < len(entries) && entries[kept].main > c.rev {
			kept++
		}
		if kept < len(entries) && !(entries[kept].tombstone && entries[kept].main < c.rev) {
			kept++
		}
	}
	for i := len(entries) - 1; i >= kept; i-- {
		e := &entries[i]
		c.bytes += int64(e.size)
		c.dropped(e.rev(), e.size, e.tombstone)
	}
	if gone {
		c.bytes += int64(newest.size)
		c.dropped(newest.rev(), newest.size, true)
	}
	return entries[:kept], gone
}
