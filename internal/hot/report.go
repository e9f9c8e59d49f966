package hot

import (
	"cmp"
	"slices"
	"time"
)

// Rates are how often things happened, a second, and the bytes that they moved.
type Rates struct {
	Reads, Writes, Events, Bytes float64
}

// Row is a name and its rates.
type Row struct {
	Name string
	Rates
	// Doubt is the part of the row's weight that may be other names', 0 to 1.
	Doubt float64
}

// Report is what a member is busiest with, the busiest first.
type Report struct {
	Window                  time.Duration // that the figures speak of, about
	Sampling                int           // one thing of so many is counted now
	Total                   Rates
	Prefixes, Keys, Clients []Row
}

// Top returns the first rows of each table; depth is how many segments a prefix
// has, from 1 to MaxDepth.
func (s *Sampler) Top(now time.Time, depth, limit int) Report {
	s.counting.Lock()
	defer s.counting.Unlock()
	s.tick(now)
	depth = min(max(depth, 1), MaxDepth)
	return Report{
		Window: time.Duration(s.seconds * float64(time.Second)), Sampling: int(s.mask.Load()) + 1, Total: s.rates(&s.total),
		Prefixes: s.rows(s.prefixes[depth-1], limit), Keys: s.rows(s.keys, limit), Clients: s.rows(s.clients, limit),
	}
}

func (s *Sampler) rates(c *counts) Rates {
	seconds := max(s.seconds, time.Millisecond.Seconds())
	return Rates{Reads: c.of[Read] / seconds, Writes: c.of[Write] / seconds, Events: c.of[Event] / seconds, Bytes: c.bytes / seconds}
}

func (s *Sampler) rows(t *table, limit int) []Row {
	entries := slices.Clone(t.heap)
	slices.SortFunc(entries, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(b.weight, a.weight), cmp.Compare(a.name, b.name))
	})
	var rows []Row
	for _, e := range entries[:min(max(limit, 0), len(entries))] {
		rows = append(rows, Row{Name: e.name, Rates: s.rates(&e.counts), Doubt: e.doubt / e.weight})
	}
	return rows
}
