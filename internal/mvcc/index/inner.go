package index

import "slices"

// fanout is the most children of an inner node.
const fanout = 32

// inner is a node above the leaves. Those at height 1 are the most by far and are
// copied the most, so they have nothing but pointers: a leaf knows its own sum.
type inner struct {
	epoch  uint64      // the writer may change the node while its own epoch is the same
	height int         // 1 above leaves
	kids   []child     // the children, nil at height 1
	leaves []*leaf     // the children at height 1, else nil
	seps   *separators // between the children; shared with copies of the node
}

// child is a part of the tree below a node of height 2 or more.
type child struct {
	sum
	inner *inner
}

// sum is what a node knows of a child without looking into it.
type sum struct {
	live         int64 // keys
	bytes        int64 // encoded size of the live revisions
	history      int64 // revisions that are not live: superseded ones and tombstones
	historyBytes int64 // encoded size of those
	prune        int64 // a compaction below this revision finds nothing to remove; math.MaxInt64 if none ever does
}

func newInner(epoch uint64, height int) *inner {
	return &inner{epoch: epoch, height: height, seps: &separators{}}
}

func (n *inner) len() int { return len(n.kids) + len(n.leaves) }

// sumOf returns what child i holds.
func (n *inner) sumOf(i int) *sum {
	if n.height > 1 {
		return &n.kids[i].sum
	}
	return &n.leaves[i].total
}

// own returns n itself or a copy that the writer of epoch may change.
func (n *inner) own(epoch uint64) *inner {
	if n.epoch == epoch {
		return n
	}
	return &inner{epoch: epoch, height: n.height, kids: slices.Clone(n.kids), leaves: slices.Clone(n.leaves), seps: n.seps}
}

// find returns the child that holds key, if any does.
func (n *inner) find(key []byte) int { return n.seps.find(key) }

// start returns the first child that may hold a key not less than from.
func (n *inner) start(from []byte) int {
	if len(from) == 0 {
		return 0
	}
	return n.find(from)
}

// sum returns the sum over the children.
func (n *inner) sum() sum {
	s := noSum()
	for i := range n.len() {
		s.add(*n.sumOf(i))
	}
	return s
}

// insert puts a node at i; sep divides it from the child to its left.
func (n *inner) insert(i int, sep []byte, kid *inner) {
	n.kids = slices.Insert(n.kids, i, child{kid.sum(), kid})
	n.seps = newSeparators(slices.Insert(n.seps.list(), i, sep))
}

// insertLeaf is insert at height 1.
func (n *inner) insertLeaf(i int, sep []byte, l *leaf) {
	n.leaves = slices.Insert(n.leaves, i, l)
	n.seps = newSeparators(slices.Insert(n.seps.list(), i, sep))
}

// remove takes child i out.
func (n *inner) remove(i int) {
	if n.height > 1 {
		n.kids = slices.Delete(n.kids, i, i+1)
	} else {
		n.leaves = slices.Delete(n.leaves, i, i+1)
	}
	n.seps = newSeparators(slices.Delete(n.seps.list(), i, i+1))
}

// split moves the children from m on to a new node, and returns it with the
// separator between the two.
func (n *inner) split(m int) (right *inner, sep []byte) {
	list := n.seps.list()
	right = &inner{epoch: n.epoch, height: n.height, seps: newSeparators(list[m:])}
	if n.height > 1 {
		right.kids, n.kids = slices.Clone(n.kids[m:]), slices.Clone(n.kids[:m])
	} else {
		right.leaves, n.leaves = slices.Clone(n.leaves[m:]), slices.Clone(n.leaves[:m])
	}
	n.seps = newSeparators(list[:m])
	return right, list[m]
}

// join appends the children of r, which lies right of n behind sep.
func (n *inner) join(sep []byte, r *inner) {
	n.kids, n.leaves = append(n.kids, r.kids...), append(n.leaves, r.leaves...)
	n.seps = newSeparators(slices.Concat(n.seps.list(), [][]byte{sep}, r.seps.list()[1:]))
}

func noSum() sum { return sum{prune: maxRevision} }

func (s *sum) add(o sum) {
	s.live += o.live
	s.bytes += o.bytes
	s.history += o.history
	s.historyBytes += o.historyBytes
	s.prune = min(s.prune, o.prune)
}
