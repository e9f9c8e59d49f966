package consensus

import (
	"sync/atomic"
	"time"
)

// IDs makes identifiers that no other member makes, and that this member did not make before a restart: requests, conf
// changes, generated leases and read rounds take theirs from the same source. Safe for concurrent use.
type IDs struct {
	prefix uint64
	first  uint64
	n      atomic.Uint64
}

// NewIDs returns a source for a member started at the given time. The low 16 bits of the member ID go on top, below them
// 40 bits of milliseconds and 8 bits of a counter, which overflows into the milliseconds on purpose: 256 identifiers a
// millisecond can be made for as long as the member runs before they could meet those of its next start.
func NewIDs(member uint64, start time.Time) *IDs {
	ids := &IDs{prefix: (member & 0xffff) << 48}
	ids.first = (uint64(start.UnixMilli()) & (1<<40 - 1)) << 8
	ids.n.Store(ids.first)
	return ids
}

// Next returns a new identifier, never 0.
func (g *IDs) Next() uint64 {
	for {
		if id := g.prefix | g.n.Add(1)&(1<<48-1); id != 0 {
			return id
		}
	}
}

// Made reports whether an identifier came from this source: it belongs to something that was asked for here since the start.
func (g *IDs) Made(id uint64) bool {
	const rest = 1<<48 - 1
	return id&^rest == g.prefix && (id-g.first-1)&rest < g.n.Load()-g.first
}

// NextLease returns a new lease identifier: positive as a signed number, never 0.
func (g *IDs) NextLease() int64 {
	for {
		if id := int64(g.Next() & (1<<63 - 1)); id != 0 {
			return id
		}
	}
}
