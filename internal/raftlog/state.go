package raftlog

import (
	"fmt"
	"slices"
	"sort"
)

// state is what the records of a log, read in order, add up to. Open builds it
// from the files and Write carries it on; both use the same methods.
type state struct {
	identity  Identity
	hard      hardState
	snap      *Snapshot
	compacted point
	last      uint64    // index of the last entry; compacted.index if there is none
	terms     []termRun // ascending; covers compacted.index to last
	segments  []*segment
	end       uint64 // position after the last record
}

// termRun says that entries from index first on, up to the next run, have term.
type termRun struct{ first, term uint64 }

// spot is where an entry lies in its segment.
type spot struct {
	unit uint32 // offset of its frame / alignment
	size uint32 // of its payload
}

func (s *state) first() uint64 { return s.compacted.index + 1 }

func (s *state) lastSegment() *segment { return s.segments[len(s.segments)-1] }

// beginSegment adds a segment. The first one brings what earlier ones, no longer
// there, had said.
func (s *state) beginSegment(seg *segment) {
	if len(s.segments) == 0 {
		h := &seg.header
		s.identity, s.hard, s.snap, s.compacted = h.identity, h.hard, h.snap, h.compacted
		s.last = h.first - 1
		s.terms = []termRun{{h.compacted.index, h.compacted.term}}
	}
	seg.first = s.last + 1
	s.segments = append(s.segments, seg)
}

// addEntry notes an entry of the last segment. It replaces those at its index
// and above.
func (s *state) addEntry(p point, at spot) error {
	if p.index > s.last+1 {
		return fmt.Errorf("entry %d after entry %d", p.index, s.last)
	}
	if p.index <= s.compacted.index {
		return fmt.Errorf("entry %d after the log was compacted at %d", p.index, s.compacted.index)
	}
	if p.index <= s.last {
		s.truncate(p.index)
	}
	seg := s.lastSegment()
	if len(seg.spots) == 0 {
		seg.first = p.index
		if n := len(s.segments); n > 1 && seg.spots == nil {
			seg.spots = make([]spot, 0, len(s.segments[n-2].spots)) // likely as many
		}
	}
	seg.spots = append(seg.spots, at)
	if s.terms[len(s.terms)-1].term != p.term {
		s.terms = append(s.terms, termRun{p.index, p.term})
	}
	s.last = p.index
	return nil
}

// truncate drops the entries at index and above; index > compacted.index.
func (s *state) truncate(index uint64) {
	for _, seg := range slices.Backward(s.segments) {
		if index >= seg.first+uint64(len(seg.spots)) {
			break
		}
		seg.spots = seg.spots[:max(index, seg.first)-seg.first]
		seg.first = min(seg.first, index)
	}
	for s.terms[len(s.terms)-1].first >= index {
		s.terms = s.terms[:len(s.terms)-1]
	}
	s.last = index - 1
}

// restore drops all entries and begins anew after an installed snapshot.
func (s *state) restore(snap *Snapshot) {
	for _, seg := range s.segments {
		seg.spots, seg.first = nil, snap.Index+1
	}
	s.snap = snap
	s.compacted = point{snap.Index, snap.Term}
	s.last = snap.Index
	s.terms = []termRun{{snap.Index, snap.Term}}
}

// compact drops the entries up to p, an entry of the log.
func (s *state) compact(p point) {
	if p.index <= s.compacted.index {
		return
	}
	for _, seg := range s.segments {
		if seg.first > p.index {
			break
		}
		n := min(p.index+1-seg.first, uint64(len(seg.spots)))
		seg.spots = slices.Clone(seg.spots[n:])
		seg.first += n
	}
	i := s.termRunOf(p.index)
	s.terms = slices.Clone(s.terms[max(i, 0):])
	s.terms[0] = termRun{p.index, p.term}
	s.compacted = p
}

// checkCompact reports why p cannot be an entry of the log. Entries below the
// first one present, whose segments are gone, may have had any term.
func (s *state) checkCompact(p point) error {
	if p.index > s.last {
		return fmt.Errorf("compaction at %d after entry %d", p.index, s.last)
	}
	i := s.termRunOf(p.index)
	if p.index <= s.compacted.index || s.terms[i].term == p.term {
		return nil
	}
	present := s.last + 1
	for _, seg := range s.segments {
		if len(seg.spots) > 0 {
			present = seg.first
			break
		}
	}
	if p.index >= present || present <= s.last && s.termRunOf(present) == i {
		return fmt.Errorf("compaction at %d of term %d, but the entry has term %d", p.index, p.term, s.terms[i].term)
	}
	return nil
}

// termRunOf returns the place in terms of the run that covers index.
func (s *state) termRunOf(index uint64) int {
	return sort.Search(len(s.terms), func(i int) bool { return s.terms[i].first > index }) - 1
}

// term returns the term of an entry from compacted.index to last.
func (s *state) term(index uint64) uint64 { return s.terms[s.termRunOf(index)].term }

// dead returns how many of the leading segments hold no entry any more. The
// last segment always stays.
func (s *state) dead() int {
	n := 0
	for n < len(s.segments)-1 && len(s.segments[n].spots) == 0 {
		n++
	}
	return n
}

// find returns the segment that holds the entry at index, which must exist.
func (s *state) find(index uint64) (*segment, int) {
	// Segments without entries may stand between, so the search is for the
	// last one that begins at or below index and has any.
	i := sort.Search(len(s.segments), func(i int) bool { return s.segments[i].first > index }) - 1
	for len(s.segments[i].spots) == 0 {
		i--
	}
	seg := s.segments[i]
	return seg, int(index - seg.first)
}

func (s *state) sizeAfter(index uint64) int64 {
	index = max(index, s.compacted.index) // after a snapshot there may be nothing beyond it
	if index >= s.last {
		return 0
	}
	seg, i := s.find(index + 1)
	return int64(s.end - seg.base - uint64(seg.spots[i].unit)*alignment)
}

// complete checks that the entries follow compacted without a gap.
func (s *state) complete() error {
	if s.last < s.compacted.index {
		return fmt.Errorf("the log ends at entry %d but was compacted at %d", s.last, s.compacted.index)
	}
	if s.last == s.compacted.index {
		return nil
	}
	for _, seg := range s.segments {
		if len(seg.spots) > 0 {
			if seg.first != s.first() {
				return fmt.Errorf("the log begins at entry %d but was compacted at %d", seg.first, s.compacted.index)
			}
			return nil
		}
	}
	return fmt.Errorf("no entries between %d and %d", s.compacted.index, s.last)
}
