package index

import "bytes"

// Tree is the writer's handle on the index. One goroutine at a time may use
// it; what others read is a Root.
type Tree struct {
	top    *inner // height at least 1, perhaps without children
	epoch  uint64 // nodes of this epoch are not yet seen by any Root
	newest int64  // the highest main revision written
	// changes counts what was written, so that a Place of before is noticed.
	changes uint64
}

// maxHeight is more than any tree in memory has: each node has fanout children.
const maxHeight = 12

// Place is where a key is in a Tree, or would be put, until the next change. It
// spares a write the way down that was gone to see what there is.
type Place struct {
	kids    [maxHeight]uint16 // which child, by the height of the node
	row     int
	found   bool // dead or alive
	changes uint64
}

// Find returns where key is or belongs, and its live revision if it has one.
func (t *Tree) Find(key []byte) (p Place, it Item, ok bool) {
	p.changes = t.changes
	n := t.top
	if n.len() == 0 {
		return p, Item{}, false
	}
	for ; n.height > 1; n = n.kids[p.kids[n.height]].inner {
		p.kids[n.height] = uint16(n.find(key))
	}
	p.kids[1] = uint16(n.find(key))
	l := n.leaves[p.kids[1]]
	if p.row, p.found = l.search(key); p.found && l.row(p.row).live() {
		return p, l.item(p.row), true
	}
	return p, Item{}, false
}

// New returns an empty Tree.
func New() *Tree { return &Tree{top: newInner(1, 1), epoch: 1} }

// Root returns the present contents. It takes constant time; what is written
// afterwards goes to copies.
func (t *Tree) Root() Root {
	t.epoch++
	return Root{top: t.top, newest: t.newest}
}

// Now returns the present contents without freezing them: the Root is valid
// only until the next change of t, and only for the writer. It spares the copy
// of the nodes that a Root taken before a small change would cost.
func (t *Tree) Now() Root { return Root{top: t.top, newest: t.newest} }

// change is one Put or Delete on its way down the tree and back.
type change struct {
	key   []byte
	rev   Revision
	lease int64
	size  uint32
	ref   ValueRef
	put   bool
	place Place

	prev    Item // the live revision before the change
	existed bool
	delta   sum // what the change adds on the path to its leaf
}

// Put adds a revision of key, which creates the key if it is not live. It
// copies key. It returns the revision that was live before, if there was one.
// A rev that is not newer than what the key has is a broken invariant.
func (t *Tree) Put(key []byte, rev Revision, lease int64, size uint32, ref ValueRef) (prev Item, existed bool) {
	place, _, _ := t.Find(key)
	return t.PutAt(place, key, rev, lease, size, ref)
}

// PutAt is Put at the place that Find returned for key. The tree was not changed
// since.
func (t *Tree) PutAt(place Place, key []byte, rev Revision, lease int64, size uint32, ref ValueRef) (prev Item, existed bool) {
	return t.run(&change{key: key, rev: rev, lease: lease, size: size, ref: ref, put: true, place: place})
}

// Delete adds a tombstone of tombstoneSize bytes if key is live, and returns
// the revision that was live before. Otherwise it changes nothing and returns
// false. A rev that is not newer than what the key has is a broken invariant.
func (t *Tree) Delete(key []byte, rev Revision, tombstoneSize uint32) (prev Item, existed bool) {
	place, _, ok := t.Find(key)
	if !ok {
		return Item{}, false
	}
	return t.run(&change{key: key, rev: rev, size: tombstoneSize, place: place})
}

// SetRef changes where the value of the live revision of key lies. It does
// nothing and returns false if that revision is not mod.
func (t *Tree) SetRef(key []byte, mod Revision, ref ValueRef) bool {
	l, i := t.top.lookup(key)
	if l == nil || !l.row(i).live() || l.row(i).rev() != mod {
		return false
	}
	if l.row(i).ref == ref {
		return true
	}
	t.changes++
	t.top = t.top.own(t.epoch)
	n := t.top
	for n.height > 1 {
		k := n.find(key)
		n.kids[k].inner = n.kids[k].inner.own(t.epoch)
		n = n.kids[k].inner
	}
	k := n.find(key)
	l = l.own(t.epoch)
	n.leaves[k] = l
	l.change(i).ref = ref
	return true
}

func (t *Tree) run(c *change) (prev Item, existed bool) {
	if c.rev.Main < 1 || c.rev.Sub < 0 || c.rev.Sub > maxSub {
		broken("revision %v of key %q", c.rev, c.key)
	}
	if c.place.changes != t.changes {
		broken("key %q written at a place found %d changes ago", c.key, t.changes-c.place.changes)
	}
	t.changes++
	t.top = t.top.own(t.epoch)
	if right, sep := t.apply(t.top, c); right != nil {
		top := newInner(t.epoch, t.top.height+1)
		top.insert(0, nil, t.top)
		top.insert(1, sep, right)
		t.top = top
	}
	t.newest = max(t.newest, c.rev.Main)
	return c.prev, c.existed
}

// apply runs c below n, which the writer owns. If n had to be split it
// returns the new node right of it.
func (t *Tree) apply(n *inner, c *change) (right *inner, sep []byte) {
	i := int(c.place.kids[n.height])
	if n.height > 1 {
		kid := n.kids[i].inner.own(t.epoch)
		n.kids[i].inner = kid
		if r, s := t.apply(kid, c); r != nil {
			n.kids[i].sum = kid.sum()
			n.insert(i+1, s, r)
		} else {
			n.kids[i].add(c.delta)
		}
	} else {
		t.applyLeaf(n, i, c)
	}
	if n.len() > fanout {
		m := n.len() / 2
		if i == n.len()-2 {
			m = n.len() - 1 // keys arrive in order: leave full nodes behind
		}
		return n.split(m)
	}
	return nil, nil
}

// applyLeaf runs c in child i of n, which is of height 1.
func (t *Tree) applyLeaf(n *inner, i int, c *change) {
	if n.len() == 0 {
		n.insertLeaf(0, nil, newLeaf(t.epoch, 1, len(c.key)+1))
	}
	l := n.leaves[i]
	at := c.place.row
	if c.place.found {
		l = l.own(t.epoch)
		l.update(at, c)
		l.total.add(c.delta)
		n.leaves[i] = l
		return
	}
	if l.full(c.key) {
		i, at = t.splitLeaf(n, i, at, c.key)
	}
	l = n.leaves[i].own(t.epoch)
	n.leaves[i] = l
	l.insert(at, c.key, row{create: c.rev.Main, mod: c.rev.Main, version: 1, ref: c.ref, sub: uint32(c.rev.Sub), size: c.size}, c.lease)
	c.delta = noSum()
	c.delta.live, c.delta.bytes = 1, int64(c.size)
	l.total.add(c.delta)
}

// splitLeaf divides child i of n before a key is inserted as its row at, and
// returns the child and the row where it goes now.
func (t *Tree) splitLeaf(n *inner, i, at int, key []byte) (int, int) {
	l := n.leaves[i]
	m := l.len() / 2
	if at == l.len() {
		m = at - 1 // keys arrive in order: leave full leaves behind
	}
	left, right := l.split(t.epoch, m)
	sep := separator(left.key(m-1), right.key(0))
	n.leaves[i] = left
	n.insertLeaf(i+1, sep, right)
	if bytes.Compare(key, sep) >= 0 {
		return i + 1, at - m
	}
	return i, at
}

// update makes c the newest revision of row i.
func (l *leaf) update(i int, c *change) {
	r := l.change(i)
	if r.rev().Compare(c.rev) >= 0 {
		broken("key %q written at %v after %v", c.key, c.rev, r.rev())
	}
	c.delta = noSum()
	c.delta.history, c.delta.historyBytes, c.delta.prune = 1, int64(r.size), c.rev.Main
	old := r.entry()
	if r.live() {
		c.prev, c.existed = l.item(i), true
		c.delta.live, c.delta.bytes = -1, -int64(r.size)
	} else {
		c.delta.history, c.delta.historyBytes = 0, 0 // it counted before already
	}
	r.hist = l.hist.push(&old, r.hist)
	create, version := r.create, r.version+1
	if !r.live() {
		create = c.rev.Main
	}
	*r = row{mod: c.rev.Main, sub: uint32(c.rev.Sub), size: c.size, hist: r.hist, key: r.key}
	if c.put {
		r.create, r.version, r.ref = create, version, c.ref
		c.delta.live++
		c.delta.bytes += int64(c.size)
	} else {
		c.delta.history++
		c.delta.historyBytes += int64(c.size)
	}
	l.setLease(i, c.lease)
}
