package index

import (
	"bytes"
	"encoding/binary"
)

// separators divide the children of a node: all keys of child i are not less
// than separator i, all keys of child i-1 are less. Separator 0 lies before
// the first child; find does not use it. They are immutable, since only splits
// and joins change them, and lie in one piece of memory, since every search
// passes through them.
type separators struct {
	count  int
	prefix int                // length of what separators 1 and up have in common
	hints  [fanout + 1]uint64 // the first 8 bytes of each after prefix
	ends   [fanout + 1]uint32 // where each ends in bytes
	bytes  []byte
}

// newSeparators copies list.
func newSeparators(list [][]byte) *separators {
	s := &separators{count: len(list)}
	size := 0
	for _, sep := range list {
		size += len(sep)
	}
	s.bytes = make([]byte, 0, size)
	for i, sep := range list {
		s.bytes = append(s.bytes, sep...)
		s.ends[i] = uint32(len(s.bytes))
	}
	if len(list) > 1 {
		s.prefix = commonPrefix(list[1], list[len(list)-1])
	}
	for i := 1; i < len(list); i++ {
		s.hints[i] = hint(list[i][s.prefix:])
	}
	return s
}

// at returns separator i, which must not be written to.
func (s *separators) at(i int) []byte {
	var start uint32
	if i > 0 {
		start = s.ends[i-1]
	}
	return s.bytes[start:s.ends[i]:s.ends[i]]
}

// list returns all separators. They alias s.
func (s *separators) list() [][]byte {
	list := make([][]byte, s.count, s.count+1)
	for i := range list {
		list[i] = s.at(i)
	}
	return list
}

// find returns the last child whose separator is not greater than key, and
// the first child if there is none.
func (s *separators) find(key []byte) int {
	if s.count < 2 {
		return 0
	}
	p := s.prefix
	if p > 0 {
		if c := bytes.Compare(key[:min(p, len(key))], s.at(1)[:p]); c < 0 {
			return 0
		} else if c > 0 {
			return s.count - 1
		}
	}
	rest := key[p:]
	want := hint(rest)
	lo, hi := 1, s.count
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if have := s.hints[mid]; have < want || have == want && bytes.Compare(s.at(mid)[p:], rest) <= 0 {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo - 1
}

// hint returns the first 8 bytes of a key's rest, as a number that sorts like
// them.
func hint(rest []byte) uint64 {
	if len(rest) >= 8 {
		return binary.BigEndian.Uint64(rest)
	}
	var h uint64
	for i, b := range rest {
		h |= uint64(b) << (56 - 8*i)
	}
	return h
}

// separator returns the shortest key that is greater than left and not
// greater than right.
func separator(left, right []byte) []byte {
	return bytes.Clone(right[:commonPrefix(left, right)+1])
}

func commonPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}
