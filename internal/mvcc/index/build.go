package index

import (
	"bytes"
	"fmt"
)

// Builder leaves room in its nodes, so that the first writes after a start do
// not split all of them.
const (
	builtRows = leafRows * 7 / 8
	builtKids = fanout * 7 / 8
)

// Builder makes a Tree from the records of all keys, given in key order.
type Builder struct {
	leaf    *leaf    // being filled
	sep     []byte   // divides leaf from the one before
	levels  []*inner // the last node of each height from 1 on, being filled
	last    []byte   // key of the last record
	started bool
	newest  int64
}

// NewBuilder returns a Builder without records.
func NewBuilder() *Builder { return &Builder{leaf: newLeaf(1, builtRows, 4096)} }

// Add appends a key, which must be greater than the one before. It copies
// what it needs. An invalid record or a wrong order is an error that wraps
// ErrRecord and leaves the Builder as it was.
func (b *Builder) Add(r *Record) error {
	if err := r.Validate(); err != nil {
		return err
	}
	if b.started && bytes.Compare(b.last, r.Key) >= 0 {
		return fmt.Errorf("%w: key %q after key %q", ErrRecord, r.Key, b.last)
	}
	n := b.leaf.len()
	if n >= builtRows || n >= 2 && len(b.leaf.keys)+len(r.Key) > leafKeyBytes {
		b.flush(separator(b.last, r.Key))
	}
	newest := r.Revs[len(r.Revs)-1]
	var l link
	for i := range r.Revs[:len(r.Revs)-1] {
		v := &r.Revs[i]
		e := entry{main: v.Main, create: v.Create, version: v.Version, sub: uint32(v.Sub), size: v.Size, tombstone: v.Tombstone}
		l = b.leaf.hist.push(&e, l)
	}
	ref := r.Ref
	if newest.Tombstone {
		ref = 0
	}
	b.leaf.push(r.Key, row{
		create: newest.Create, mod: newest.Main, version: newest.Version, ref: ref,
		sub: uint32(newest.Sub), size: newest.Size, hist: l,
	}, r.Lease)
	b.last, b.started = b.leaf.key(b.leaf.len()-1), true
	b.newest = max(b.newest, newest.Main)
	return nil
}

// flush moves the leaf into the tree. next divides it from the leaf after it.
func (b *Builder) flush(next []byte) {
	l := b.leaf
	b.leaf = newLeaf(1, builtRows, len(l.keys)+len(l.keys)/8)
	l.seal()
	l.total = l.sum(l.historyBytes(0, l.len()))
	n := b.level(1)
	n.insertLeaf(n.len(), b.sep, l)
	b.moveUp(n)
	b.sep = next
}

// level returns the last node of a height.
func (b *Builder) level(height int) *inner {
	if len(b.levels) < height {
		b.levels = append(b.levels, newInner(1, height))
	}
	return b.levels[height-1]
}

// moveUp makes n a child of the last node above it if it is full, and another
// one is filled in its place.
func (b *Builder) moveUp(n *inner) {
	if n.len() == builtKids {
		b.levels[n.height-1] = newInner(1, n.height)
		b.push(n)
	}
}

// push adds n to the last node above it.
func (b *Builder) push(n *inner) {
	above := b.level(n.height + 1)
	above.insert(above.len(), n.seps.at(0), n)
	b.moveUp(above)
}

// Tree returns the Tree of all that was added. The Builder must not be used
// any more.
func (b *Builder) Tree() *Tree {
	t := New()
	t.newest = b.newest
	if b.leaf.len() > 0 {
		b.flush(nil)
	}
	for height := 1; height < len(b.levels); height++ {
		if n := b.levels[height-1]; n.len() > 0 {
			b.push(n)
		}
	}
	if len(b.levels) > 0 {
		t.top = b.levels[len(b.levels)-1]
	}
	for t.top.height > 1 && t.top.len() == 1 {
		t.top = t.top.kids[0].inner
	}
	return t
}
