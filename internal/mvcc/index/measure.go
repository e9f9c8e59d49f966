package index

import "bytes"

// Measure is what a range holds: its live revisions, and the others that are
// retained, superseded ones and tombstones.
type Measure struct {
	Keys, Bytes           int64
	History, HistoryBytes int64
}

// Add adds another range's measure.
func (m *Measure) Add(o Measure) {
	m.Keys += o.Keys
	m.Bytes += o.Bytes
	m.History += o.History
	m.HistoryBytes += o.HistoryBytes
}

func (m *Measure) addSum(s *sum) {
	m.Keys += s.live
	m.Bytes += s.bytes
	m.History += s.history
	m.HistoryBytes += s.historyBytes
}

// Measure returns what a range holds. It takes logarithmic time, and visits the
// history of no more keys than two leaves have: those at the range's ends.
func (r Root) Measure(key, end []byte) (m Measure) {
	if r.top == nil {
		return m
	}
	if len(end) == 0 {
		if l, i := r.top.lookup(key); l != nil {
			m.addRow(l, i)
		}
		return m
	}
	hi, open := openEnd(end)
	if open || bytes.Compare(key, hi) < 0 {
		r.top.measure(key, hi, &m)
	}
	return m
}

// measure adds what [lo, hi) holds below n; nil means no bound.
func (n *inner) measure(lo, hi []byte, m *Measure) {
	for i := n.start(lo); i < n.len(); i++ {
		if i > 0 && hi != nil && bytes.Compare(n.seps.at(i), hi) >= 0 {
			return
		}
		kidLo, kidHi := lo, hi
		lo = nil // only the first child has keys below it
		if i+1 < n.len() && hi != nil && bytes.Compare(n.seps.at(i+1), hi) <= 0 {
			kidHi = nil
		}
		switch {
		case len(kidLo) == 0 && kidHi == nil:
			m.addSum(n.sumOf(i))
		case n.height > 1:
			n.kids[i].inner.measure(kidLo, kidHi, m)
		default:
			l := n.leaves[i]
			from, to := 0, l.len()
			if len(kidLo) > 0 {
				from, _ = l.search(kidLo)
			}
			if kidHi != nil {
				to, _ = l.search(kidHi)
			}
			for i := from; i < to; i++ {
				m.addRow(l, i)
			}
		}
	}
}

func (m *Measure) addRow(l *leaf, i int) {
	s := l.sumRow(i)
	s.historyBytes = l.historyBytes(i, i+1)
	m.addSum(&s)
}

// First returns the first key of [from, end) that the index knows, live or with
// history alone. An end of one zero byte means all keys from from on.
func (r Root) First(from, end []byte) (key []byte, ok bool) {
	if r.top == nil {
		return nil, false
	}
	hi, _ := openEnd(end)
	r.top.leavesIn(from, hi, false, func(l *leaf, i, _ int) bool {
		key, ok = l.key(i), true
		return false
	})
	return key, ok
}

// Rows calls fn with each key of a range that the index knows, in order, and what
// it holds, until fn returns false. The key may be kept.
func (r Root) Rows(from, end []byte, fn func(key []byte, m Measure) bool) {
	if r.top == nil {
		return
	}
	hi, _ := openEnd(end)
	r.top.leavesIn(from, hi, false, func(l *leaf, lo, to int) bool {
		for i := lo; i < to; i++ {
			var m Measure
			m.addRow(l, i)
			if !fn(l.key(i), m) {
				return false
			}
		}
		return true
	})
}
