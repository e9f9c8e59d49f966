package index

import (
	"bytes"
	"slices"
)

// Compact forgets what no read at rev or later can see: of each key it keeps
// the revisions newer than rev and the newest of the others, unless that is a
// tombstone older than rev. A key of which nothing remains is gone.
//
// It works in steps. One call starts at the key from (nil for the first), and
// prunes at most maxKeys keys, at least one; subtrees that have nothing to
// prune cost nothing. It calls dropped, if that is not nil, with each revision
// that it removes, which otherwise it does not even visit, and returns the key to
// go on from, or nil when all is done. Between two calls the tree may change and
// Roots may be taken.
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

	places []link
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
			l, historyBytes := c.leaf(n.leaves[i])
			l = l.own(c.tree.epoch)
			l.total = l.sum(historyBytes)
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
// l itself if nothing was pruned, and the encoded size of what is not live in it.
func (c *compaction) leaf(l *leaf) (_ *leaf, historyBytes int64) {
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
		return l, l.total.historyBytes
	}
	p := newLeaf(c.tree.epoch, l.len(), len(l.keys))
	for i := range l.len() {
		r := *l.row(i)
		if !todo[i] {
			c.places = l.hist.places(r.hist, 0, c.places[:0])
		} else if gone := c.prune(&l.hist, &r); gone {
			continue
		}
		var bytes int64
		r.hist, bytes = p.hist.copy(&l.hist, c.places)
		if historyBytes += bytes; !r.live() {
			historyBytes += int64(r.size)
		}
		p.push(l.key(i), r, l.lease(i))
	}
	p.seal()
	return p, historyBytes
}

// prune finds the places of the entries of row r that stay: those newer than rev,
// and the survivor. Gone says that the row itself goes.
func (c *compaction) prune(h *history, r *row) (gone bool) {
	c.places = c.places[:0]
	if r.mod <= c.rev {
		gone = !r.live() && r.mod < c.rev
	} else {
		c.places = h.places(r.hist, c.rev, c.places)
		if n := len(c.places); n > 0 {
			var e entry
			if h.read(c.places[n-1], &e); e.tombstone && e.main < c.rev {
				c.places = c.places[:n-1]
			}
		}
	}
	if c.dropped != nil {
		c.tell(h, r, gone)
	}
	return gone
}

// tell calls dropped with what does not stay of row r, oldest first.
func (c *compaction) tell(h *history, r *row, gone bool) {
	var e entry
	for _, at := range slices.Backward(h.places(r.hist, 0, nil)[len(c.places):]) {
		h.read(at, &e)
		c.dropped(e.rev(), e.size, e.tombstone)
	}
	if gone {
		e = r.entry()
		c.dropped(e.rev(), e.size, true)
	}
}
