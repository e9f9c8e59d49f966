package watch

import (
	"math"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/internal/mvcc"
)

// fanOut is the work of one round: match a run of entries with watchers (under
// the hub's lock), look up previous values that are wanted (without it), send
// (under it). Deliver and CatchUp have one each. Whatever may change between
// the phases is told by Hub.epoch, by a watcher's next, or by its round.
type fanOut struct {
	hub    *Hub
	number uint64 // of the round
	recent bool   // the entries are Hub.recent's

	entries   []*entry
	upTo      int64 // the revision that the round reaches to
	revision  int64 // what headers say
	compacted int64

	groups []*group   // that have hits
	prevs  []*entry   // that lack a previous value which is wanted
	served []*watcher // of a catch-up round

	head      []byte // the header field
	arena     []byte // prefixes are cut from it
	last      []byte // the last prefix
	lastID    int64
	lists     [filterCount][]piece // of the present group, for watchers that want all hits
	made      [filterCount]bool
	own       []piece // scratch, for a watcher that wants the later hits only
	responses []Response
}

// piece is what one response to a watcher holds: events of whole revisions.
type piece struct {
	first  int64 // revision of the first event
	last   int64
	events [][]byte
	bytes  int
}

// match starts a round over f.entries. The hub's lock is held.
func (f *fanOut) match(m *matcher, compacted int64) {
	f.number++
	f.compacted = compacted
	f.groups, f.prevs, f.served = f.groups[:0], f.prevs[:0], f.served[:0]
	for i, e := range f.entries {
		wanted := false
		m.each(e.event.Key, func(g *group) {
			if g.round != f.number {
				g.round, g.hits = f.number, g.hits[:0]
				f.groups = append(f.groups, g)
			}
			g.hits = append(g.hits, int32(i))
			wanted = wanted || g.wantPrev > 0
		})
		if wanted && e.lacksPrev(compacted) {
			f.prevs = append(f.prevs, e)
		}
	}
}

// lookUp fetches the previous values that match found to be wanted.
func (f *fanOut) lookUp(source Source) error {
	if len(f.prevs) == 0 {
		return nil
	}
	events := make([]mvcc.Event, len(f.prevs))
	for i, e := range f.prevs {
		events[i] = e.event
	}
	return source.Previous(events, func(i int, kv []byte) {
		e := f.prevs[i]
		e.setPrev(kv)
		if f.recent {
			f.hub.recent.addPrev(e.main(), len(e.plain)+len(kv))
		}
	})
}

// send gives the round's events to the watchers of m. A watcher whose sink has
// no room is parked, with the first revision that it lacks. The hub's lock is held.
func (f *fanOut) send(m *matcher) {
	h := f.hub
	f.head = h.header(f.revision)
	f.last = nil
	for _, g := range f.groups {
		f.made = [filterCount]bool{}
		lowest := f.entries[g.hits[0]].main()
		highest := f.entries[g.hits[len(g.hits)-1]].main()
		// From the end, as remove moves the last member to the free place.
		for i := len(g.members) - 1; i >= 0; i-- {
			w := g.members[i]
			if w.next > highest || m.cond == behind && w.round != f.number {
				continue
			}
			from := f.give(w, f.pieces(g, w, lowest))
			if from == 0 {
				continue
			}
			if m.cond == live {
				h.fallBack(w, from)
			}
			w.next = from
			h.park(w)
		}
		clearTail(&g.hits)
	}
}

// clearTail gives the memory of unusually many hits back.
func clearTail(hits *[]int32) {
	if cap(*hits) > 4096 {
		*hits = nil
	}
}

// pieces returns what w is to get of a group's hits, whose first is of revision lowest.
func (f *fanOut) pieces(g *group, w *watcher, lowest int64) []piece {
	if w.next > lowest {
		f.own = f.cut(f.own[:0], g, w.filter, w.next)
		return f.own
	}
	n := w.filter.number()
	if !f.made[n] {
		f.lists[n] = f.cut(f.lists[n][:0], g, w.filter, 0)
		f.made[n] = true
	}
	return f.lists[n]
}

// cut makes pieces of the hits of g from revision next on that pass the filter.
func (f *fanOut) cut(dst []piece, g *group, flt filter, next int64) []piece {
	revisions := 0
	for _, i := range g.hits {
		e := f.entries[i]
		main := e.main()
		if main < next || !flt.wants(e) {
			continue
		}
		p := len(dst) - 1
		if p < 0 || dst[p].last != main {
			if p < 0 || revisions >= f.hub.opts.BatchRevisions || dst[p].bytes >= f.hub.opts.BatchBytes {
				dst = append(dst, piece{first: main})
				p++
				revisions = 0
			}
			revisions++
		}
		b := e.encoded(flt.prevKV, f.compacted)
		dst[p].events = append(dst[p].events, b)
		dst[p].bytes += len(b)
		dst[p].last = main
	}
	return dst
}

// give sends pieces to a watcher and returns 0, or the first revision of the
// piece that its sink refused.
func (f *fanOut) give(w *watcher, pieces []piece) (refused int64) {
	for i := range pieces {
		p := &pieces[i]
		f.responses = f.responses[:0]
		if limit := f.hub.opts.FragmentBytes; w.fragment && len(p.events) > 1 && len(f.prefix(w.id))+p.bytes >= limit {
			f.fragment(w.id, p, limit)
		} else {
			f.responses = append(f.responses, Response{Kind: KindEvents, Prefix: f.prefix(w.id), Events: p.events})
		}
		if !w.stream.send(f.responses) {
			return p.first
		}
		w.quiet = false
		f.hub.opts.Metrics.Events.Add(float64(len(p.events)))
	}
	return 0
}

// fragment splits a piece into responses below limit, or of one event, all but
// the last marked as fragments.
func (f *fanOut) fragment(id int64, p *piece, limit int) {
	prefix := f.prefix(id)
	part := appendBool(append(make([]byte, 0, len(prefix)+2), prefix...), responseFragment, true)
	start, bytes := 0, len(part)
	for i, e := range p.events {
		if i > start && bytes+len(e) >= limit {
			f.responses = append(f.responses, Response{Kind: KindEvents, Prefix: part, Events: p.events[start:i:i]})
			start, bytes = i, len(part)
		}
		bytes += len(e)
	}
	f.responses = append(f.responses, Response{Kind: KindEvents, Prefix: prefix, Events: p.events[start:]})
}

// prefix returns the header and watch id of a response with events. Most
// streams number their watchers alike, so the last one is often wanted again.
func (f *fanOut) prefix(id int64) []byte {
	if f.last != nil && f.lastID == id {
		return f.last
	}
	need := len(f.head) + 1 + protowire.SizeVarint(math.MaxUint64)
	if cap(f.arena)-len(f.arena) < need {
		f.arena = make([]byte, 0, max(1024, need))
	}
	start := len(f.arena)
	f.arena = append(f.arena, f.head...)
	f.arena = appendVarint(f.arena, responseWatchID, uint64(id))
	f.last, f.lastID = f.arena[start:len(f.arena):len(f.arena)], id
	return f.last
}

// finish lets go of what the round held.
func (f *fanOut) finish() {
	clear(f.entries)
	clear(f.groups)
	clear(f.prevs)
	clear(f.served)
	f.entries, f.groups, f.prevs, f.served = f.entries[:0], f.groups[:0], f.prevs[:0], f.served[:0]
	f.last = nil
	clear(f.responses[:cap(f.responses)])
	clear(f.own[:cap(f.own)])
	for n := range f.lists {
		clear(f.lists[n][:cap(f.lists[n])])
	}
}
