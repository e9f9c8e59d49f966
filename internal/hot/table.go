package hot

import "container/heap"

// table counts names, as Space-Saving does: there is a place for so many, and a
// new name takes the place, and the weight, of the lightest.
type table struct {
	most   int
	byName map[string]*entry
	heap   lightest
}

type entry struct {
	counts
	name   string
	weight float64
	// doubt is the part of weight that may be other names'.
	doubt float64
	at    int // in the heap
}

// forgotten is the weight below which a name need not be kept.
const forgotten = 1.0 / 64

func newTable(most int) *table { return &table{most: most, byName: make(map[string]*entry, most)} }

func (t *table) add(name []byte, s *sample) {
	e := t.byName[string(name)]
	switch {
	case e != nil:
	case len(t.heap) < t.most:
		e = &entry{name: string(name)}
		heap.Push(&t.heap, e)
		t.byName[e.name] = e
	default:
		e = t.heap[0]
		delete(t.byName, e.name)
		*e = entry{name: string(name), weight: e.weight, doubt: e.weight, at: e.at}
		t.byName[e.name] = e
	}
	e.add(s)
	e.weight += s.scale * (1 + float64(s.bytes)/weightBytes)
	heap.Fix(&t.heap, e.at)
}

// decay multiplies all by f, which keeps their order, and drops what has become
// nothing.
func (t *table) decay(f float64) {
	kept := t.heap[:0]
	for _, e := range t.heap {
		e.counts.decay(f)
		e.weight *= f
		e.doubt *= f
		if e.weight < forgotten {
			delete(t.byName, e.name)
			continue
		}
		e.at = len(kept)
		kept = append(kept, e)
	}
	if len(kept) < len(t.heap) {
		clear(t.heap[len(kept):])
		t.heap = kept
		heap.Init(&t.heap)
	}
}

// lightest is a heap of entries.
type lightest []*entry

// Len, Less, Swap, Push and Pop implement heap.Interface.
func (h lightest) Len() int           { return len(h) }
func (h lightest) Less(i, j int) bool { return h[i].weight < h[j].weight }
func (h lightest) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}
func (h *lightest) Push(e any) {
	e.(*entry).at = len(*h)
	*h = append(*h, e.(*entry))
}
func (h *lightest) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return e
}
