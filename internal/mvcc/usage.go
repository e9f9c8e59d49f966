package mvcc

import (
	"slices"
	"sort"
)

// usageTable tells how many bytes of records a compaction frees, by the
// survivor rule: a record goes with the revision that superseded it, a
// tombstone one revision after its own. It is a function of the log, so that
// usage is equal on all members whatever each has removed from its disk.
type usageTable struct {
	// marks ascend in main, and none of the chunks is empty. There are as many as
	// revisions since the last compaction, so that one array for all would be
	// copied again and again as it grows.
	marks [][]usageMark
	total int64 // bytes of the last mark
	base  int64 // what compactions have freed
	// carry is the size of the tombstones of the last revision: they are
	// freed from the next revision on.
	carry int64
}

// usageMark says that a compaction at main frees bytes, counted since the store
// began.
type usageMark struct {
	main  int64
	bytes int64
}

// usageChunk is how many marks lie in one array.
const usageChunk = 4096

// end closes the revision main, which superseded so many bytes and wrote so
// many bytes of tombstones. It is called for each revision in order.
func (u *usageTable) end(main, superseded, tombstones int64) {
	if freed := superseded + u.carry; freed > 0 {
		u.add(main, freed)
	}
	u.carry = tombstones
}

// add notes that a compaction at main, which is not below the last mark, frees
// so many more bytes.
func (u *usageTable) add(main, freed int64) {
	u.total += freed
	last := len(u.marks) - 1
	if last >= 0 {
		if newest := &u.marks[last][len(u.marks[last])-1]; newest.main == main {
			newest.bytes = u.total
			return
		}
	}
	if last < 0 || len(u.marks[last]) == cap(u.marks[last]) {
		u.marks = append(u.marks, make([]usageMark, 0, usageChunk))
		last++
	}
	u.marks[last] = append(u.marks[last], usageMark{main, u.total})
}

// compact forgets what a compaction at main frees and returns how much it is.
func (u *usageTable) compact(main int64) (freed int64) {
	above := sort.Search(len(u.marks), func(i int) bool { return u.marks[i][0].main > main })
	if above == 0 {
		return 0
	}
	chunk := u.marks[above-1]
	n := sort.Search(len(chunk), func(i int) bool { return chunk[i].main > main })
	freed = chunk[n-1].bytes - u.base
	u.base += freed
	if n < len(chunk) {
		above--
		u.marks[above] = chunk[n:]
	}
	u.marks = slices.Delete(u.marks, 0, above)
	return freed
}
