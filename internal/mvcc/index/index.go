// Package index keeps, in memory and in key order, which revisions every key
// has and where their values lie.
//
// It knows neither values nor disk: a revision is numbers (see Item), its value
// is found by Revision or, if it lies in memory, by an opaque ValueRef. Tree is
// the writer's handle; Root is an immutable moment of it that any goroutine may
// read without a lock.
//
// The structure is a B+tree that is copied on write. Leaves hold arrays without
// pointers, so that a million keys cost the garbage collector little, and a
// copy shares most of them; leaves hold sums over their rows and inner nodes
// over their children, so that counting a range and finding what a compaction
// can remove skip whole subtrees. Invariants:
//
//	I1: keys ascend strictly within a leaf and from leaf to leaf, and separators agree with them.
//	I2: revisions of a key ascend strictly; the newest is the row, older ones form its history.
//	I3: a Root never changes: the writer changes only nodes made since the last Root, and
//	    appends to shared arenas only beyond what an older node can see.
//	I4: the sums of a leaf or child equal what it holds; prune is a lower bound.
//	I5: Create and Version are stored with every revision, so they survive compaction.
package index

import (
	"cmp"
	"fmt"
	"math"
)

// Revision names one change: Main counts the store's write transactions, Sub
// the changes inside one.
type Revision struct{ Main, Sub int64 }

// Compare returns -1, 0 or +1 as r is older than, equal to or newer than o.
func (r Revision) Compare(o Revision) int {
	if c := cmp.Compare(r.Main, o.Main); c != 0 {
		return c
	}
	return cmp.Compare(r.Sub, o.Sub)
}

// Less reports whether r is older than o.
func (r Revision) Less(o Revision) bool { return r.Compare(o) < 0 }

// String returns "main.sub", or "main" when Sub is 0.
func (r Revision) String() string {
	if r.Sub == 0 {
		return fmt.Sprint(r.Main)
	}
	return fmt.Sprintf("%d.%d", r.Main, r.Sub)
}

// ValueRef says where a value lies in memory; 0 means only on disk. The index
// keeps it for the newest revision of a key and never interprets it.
type ValueRef uint64

// Item is one key at one revision.
type Item struct {
	Key     []byte   // aliases immutable memory of the index: may be kept, must not be written
	Create  int64    // main revision of the put that created the key
	Mod     Revision // the change that wrote this value
	Version int64    // number of puts since the creation, which is 1
	Lease   int64    // only of the newest revision; 0 for older ones
	Size    uint32   // length of the encoded KeyValue record, in bytes
	Ref     ValueRef // only of the newest revision; 0 for older ones
}

// maxSub is the largest Sub the index can hold.
const maxSub = math.MaxUint32

// maxRevision stands for a revision that is never reached.
const maxRevision = math.MaxInt64

// broken stops the program on a broken invariant: going on would make this
// member's state differ from the others'.
func broken(format string, args ...any) {
	panic("index: broken invariant: " + fmt.Sprintf(format, args...))
}
