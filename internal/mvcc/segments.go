package mvcc

import (
	"bytes"
	"cmp"
	"container/heap"
	"context"
	"slices"

	"github.com/engram-kv/engram/internal/keypath"
	"github.com/engram-kv/engram/internal/mvcc/index"
)

// Segment is the part of a range whose keys begin with the same path, or one key.
type Segment struct {
	// Path is the whole key if Group is false, else what its keys begin with,
	// the delimiter included.
	Path  []byte
	Group bool
	index.Measure
}

// SegmentOrder says which segments come first.
type SegmentOrder uint8

// The orders of segments: by path, or the largest first.
const (
	SegmentsByPath SegmentOrder = iota
	SegmentsByTotal
	SegmentsByLive
	SegmentsByHistory
	SegmentsByKeys
)

// SegmentOptions say how a range is cut into segments.
type SegmentOptions struct {
	// Prefix is what all keys begin with.
	Prefix []byte
	// Delimiter ends a segment; without one every key is a segment.
	Delimiter []byte
	// Depth is how many delimiters behind the prefix a segment has; one that
	// follows the prefix at once does not count. At least 1.
	Depth int
	// From is the first key of interest, to go on where an answer ended.
	From []byte
	// Order chooses which Limit segments are returned. Most bounds those that are
	// looked at.
	Order       SegmentOrder
	Limit, Most int
}

// Segments is what a range holds by path.
type Segments struct {
	Rows []Segment
	// Others are the segments that were looked at and are not among the rows.
	Others      index.Measure
	OthersCount int
	// Total is the whole of what the options' prefix covers, from its first key.
	Total index.Measure
	// Next is where to go on, nil if all was looked at.
	Next []byte
}

// Segments measures the parts of a range, from the index alone. A segment takes
// logarithmic time, however many keys it has.
func (v *View) Segments(ctx context.Context, o SegmentOptions) (Segments, error) {
	begin, end := keypath.Range(o.Prefix)
	var out Segments
	out.Total = v.root.index.Measure(begin, end)
	from := o.Prefix
	if bytes.Compare(o.From, from) > 0 {
		from = o.From
	}
	rows := ranking{order: o.Order, limit: max(1, o.Limit)}
	check := walkCheck{ctx: ctx}
	looked, full := 0, false
	// add takes a segment, or says that there is no room for it.
	add := func(s Segment) bool {
		if looked == o.Most || o.Order == SegmentsByPath && len(rows.segments) == rows.limit || check.stop() {
			full = true
			return false
		}
		looked++
		if dropped, ok := rows.add(s); ok {
			out.Others.Add(dropped.Measure)
			out.OthersCount++
		}
		return true
	}
	if len(o.Delimiter) == 0 {
		v.root.index.Rows(from, end, func(key []byte, m index.Measure) bool {
			if !add(Segment{Path: key, Measure: m}) {
				out.Next = key
				return false
			}
			return true
		})
	} else {
		for {
			key, ok := v.root.index.First(from, end)
			if !ok {
				break
			}
			path, group := keypath.Cut(key, len(o.Prefix), o.Delimiter, max(1, o.Depth))
			s := Segment{Path: path, Group: group}
			next, last := append(bytes.Clone(key), 0), false
			if group {
				_, next = keypath.Range(path)
				last = len(next) == 1 && next[0] == 0
				s.Measure = v.root.index.Measure(path, next)
			} else {
				s.Measure = v.root.index.Measure(key, nil)
			}
			if !add(s) {
				out.Next = path
				break
			}
			if last {
				break
			}
			from = next
		}
	}
	if err := ctx.Err(); err != nil && full {
		return Segments{}, err
	}
	out.Rows = rows.sorted()
	return out, nil
}

// ranking keeps the first segments of an order: a heap whose top is the last.
type ranking struct {
	order    SegmentOrder
	limit    int
	segments []Segment
}

// add takes s in, and returns the segment that has to leave for it, maybe s.
func (r *ranking) add(s Segment) (dropped Segment, ok bool) {
	if r.order == SegmentsByPath {
		r.segments = append(r.segments, s)
		return Segment{}, false
	}
	heap.Push(r, s)
	if len(r.segments) <= r.limit {
		return Segment{}, false
	}
	return heap.Pop(r).(Segment), true
}

func (r *ranking) sorted() []Segment {
	slices.SortFunc(r.segments, r.compare)
	return r.segments
}

// compare puts what comes first in the answer first.
func (r *ranking) compare(a, b Segment) int {
	size := func(s *Segment) int64 {
		switch r.order {
		case SegmentsByTotal:
			return s.Bytes + s.HistoryBytes
		case SegmentsByLive:
			return s.Bytes
		case SegmentsByHistory:
			return s.HistoryBytes
		case SegmentsByKeys:
			return s.Keys
		}
		return 0
	}
	return cmp.Or(cmp.Compare(size(&b), size(&a)), bytes.Compare(a.Path, b.Path))
}

// Len, Less, Swap, Push and Pop implement heap.Interface.
func (r *ranking) Len() int           { return len(r.segments) }
func (r *ranking) Less(i, j int) bool { return r.compare(r.segments[i], r.segments[j]) > 0 }
func (r *ranking) Swap(i, j int)      { r.segments[i], r.segments[j] = r.segments[j], r.segments[i] }
func (r *ranking) Push(s any)         { r.segments = append(r.segments, s.(Segment)) }
func (r *ranking) Pop() any {
	last := len(r.segments) - 1
	s := r.segments[last]
	r.segments = r.segments[:last]
	return s
}
