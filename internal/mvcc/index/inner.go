package index

import "slices"

// fanout is the most children of an inner node.
const fanout = 32

// inner is a node above the leaves.
type inner struct {
	epoch  uint64 // the writer may change the node while its own epoch is the same
	height int    // 1 above leaves
	kids   []child
	seps   *separators // between the children; shared with copies of the node
}

// child is a part of the tree below a node.
type child struct {
	sum
	inner *inner // nil at height 1
	leaf  *leaf  // nil above height 1
}

// sum is what a node knows of a child without looking into it.
type sum struct {
	live    int64 // keys
	bytes   int64 // encoded size of the live revisions
	history int64 // revisions that are not live: superseded ones and tombstones
	prune   int64 // a compaction below this revision finds nothing to remove; math.MaxInt64 if none ever does
}

func newInner(epoch uint64, height int) *inner {
	return &inner{epoch: epoch, height: height, seps: &separators{}}
}

func (n *inner) len() int { return len(n.kids) }

// own returns n itself or a copy that the writer of epoch may change.
func (n *inner) own(epoch uint64) *inner {
	if n.epoch == epoch {
		return n
	}
	return &inner{epoch: epoch, height: n.height, kids: slices.Clone(n.kids), seps: n.seps}
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
	for i := range n.kids {
		s.add(n.kids[i].sum)
	}
	return s
}

// insert puts a child at i; sep divides it from the child to its left.
func (n *inner) insert(i int, sep []byte, c child) {
	n.kids = slices.Insert(n.kids, i, c)
	n.seps = newSeparators(slices.Insert(n.seps.list(), i, sep))
}

// push adds a last child.
func (n *inner) push(sep []byte, c child) { n.insert(n.len(), sep, c) }

// remove takes child i out.
func (n *inner) remove(i int) {
	n.kids = slices.Delete(n.kids, i, i+1)
	n.seps = newSeparators(slices.Delete(n.seps.list(), i, i+1))
}

// split moves the children from m on to a new node, and returns it with the
// separator between the two.
func (n *inner) split(m int) (right *inner, sep []byte) {
	list := n.seps.list()
	right = &inner{epoch: n.epoch, height: n.height, kids: slices.Clone(n.kids[m:]), seps: newSeparators(list[m:])}
	n.kids = slices.Clone(n.kids[:m])
	n.seps = newSeparators(list[:m])
	return right, list[m]
}

// join appends the children of r, which lies right of n behind sep.
func (n *inner) join(sep []byte, r *inner) {
	n.kids = append(n.kids, r.kids...)
	n.seps = newSeparators(slices.Concat(n.seps.list(), [][]byte{sep}, r.seps.list()[1:]))
}

func noSum() sum { return sum{prune: maxRevision} }

func (s *sum) add(o sum) {
	s.live += o.live
	s.bytes += o.bytes
	s.history += o.history
	s.prune = min(s.prune, o.prune)
}
