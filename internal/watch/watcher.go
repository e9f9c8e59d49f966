package watch

// condition is where a watcher gets its events from.
type condition uint8

const (
	// parked: it catches up, but its stream has no room, so nothing is read for it.
	parked condition = iota
	// behind: it catches up, fed from history.
	behind
	// live: it is fed with what is published.
	live
)

// watcher is one subscription of a stream. The hub's lock covers it.
type watcher struct {
	id     int64
	stream *Stream
	span   span
	filter
	fragment bool
	progress bool // wants progress notices

	// next is the lowest revision whose events it may lack. A live watcher
	// lacks none up to Hub.delivered, whatever next is, and wants none below next.
	next int64
	// quiet is false if it got events since its last progress notice was due.
	quiet bool

	cond  condition
	group *group // unless parked
	place int    // in group.members
	order int    // in stream.order
	// round is the catch-up round that serves it.
	round uint64
}

// filter is what a watcher wants of the events of its keys. Watchers of one
// group with equal filters share their lists of events.
type filter struct {
	prevKV   bool
	noPut    bool
	noDelete bool
}

const filterCount = 8

// number is an index for arrays of filterCount.
func (f filter) number() int {
	n := 0
	if f.prevKV {
		n |= 1
	}
	if f.noPut {
		n |= 2
	}
	if f.noDelete {
		n |= 4
	}
	return n
}

func (f filter) wants(e *entry) bool {
	if e.event.Delete {
		return !f.noDelete
	}
	return !f.noPut
}

// fallBack has a live watcher catch up from next on.
func (h *Hub) fallBack(w *watcher, next int64) {
	h.live.remove(w)
	w.next = next
	h.behind.add(w)
}

// park takes a watcher that catches up out of the rounds till its stream has room.
func (h *Hub) park(w *watcher) {
	h.behind.remove(w)
	w.stream.parked++
}

// unpark gives the watchers of a stream that has room again to CatchUp.
func (h *Hub) unpark(s *Stream) {
	if s.parked == 0 {
		return
	}
	for _, w := range s.order {
		if w.cond == parked {
			h.behind.add(w)
		}
	}
	s.parked = 0
	wake(h.catchUpWake)
}

// enliven hands a watcher that has caught up over to the live ones. Its next is
// above claimed, so no Deliver under way or to come leaves a gap, and none
// repeats an event since watchers skip what is below their next.
func (h *Hub) enliven(w *watcher) {
	if w.next <= h.claimed {
		broken("watcher at revision %d goes live, events are claimed to %d", w.next, h.claimed)
	}
	h.behind.remove(w)
	h.live.add(w)
}

// forget removes a watcher from wherever it is.
func (h *Hub) forget(w *watcher) {
	switch w.cond {
	case live:
		h.live.remove(w)
	case behind:
		h.behind.remove(w)
	case parked:
		w.stream.parked--
	}
	s := w.stream
	last := len(s.order) - 1
	s.order[w.order] = s.order[last]
	s.order[w.order].order = w.order
	s.order[last] = nil
	s.order = s.order[:last]
	delete(s.watchers, w.id)
	h.count--
}
