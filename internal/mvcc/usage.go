package mvcc

import "sort"

// usageTable tells how many bytes of records a compaction frees, by the
// survivor rule: a record goes with the revision that superseded it, a
// tombstone one revision after its own. It is a function of the log, so that
// usage is equal on all members whatever each has removed from its disk.
type usageTable struct {
	// marks ascend in main; bytes is the sum of all that a compaction at main
	// or above frees, counted since the store began.
	marks []usageMark
	total int64 // bytes of the last mark
	base  int64 // what compactions have freed
	// carry is the size of the tombstones of the last revision: they are
	// freed from the next revision on.
	carry int64
}

type usageMark struct {
	main  int64
	bytes int64
}

// end closes the revision main, which superseded so many bytes and wrote so
// many bytes of tombstones. It is called for each revision in order.
func (u *usageTable) end(main, superseded, tombstones int64) {
	if freed := superseded + u.carry; freed > 0 {
		u.total += freed
		u.marks = append(u.marks, usageMark{main, u.total})
	}
	u.carry = tombstones
}

// compact forgets what a compaction at main frees and returns how much it is.
func (u *usageTable) compact(main int64) (freed int64) {
	n := sort.Search(len(u.marks), func(i int) bool { return u.marks[i].main > main })
	if n == 0 {
		return 0
	}
	freed = u.marks[n-1].bytes - u.base
	u.base += freed
	u.marks = u.marks[n:] // append moves them to a smaller array in time
	return freed
}
