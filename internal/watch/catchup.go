package watch

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/engram-kv/engram/internal/mvcc"
)

// CatchUp moves the watchers that are behind on by one chunk: those that need
// what is in memory, then those of the shared pass through history. It cancels
// those whose next revision is compacted and hands over to the live ones those
// that have caught up. More says that it should be called again at once. An
// error is the disk's or ctx's.
func (h *Hub) CatchUp(ctx context.Context) (more bool, err error) {
	h.mu.Lock()
	h.sweep()
	idle := h.behind.count == 0
	h.mu.Unlock()
	if idle {
		return false, nil
	}
	if err := h.catchUpRecent(); err != nil {
		return false, err
	}
	if err := h.catchUpHistory(ctx); err != nil {
		return false, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.observe()
	return h.behind.count > 0, nil
}

// sweep cancels the watchers that history has left behind and hands over those
// that lack nothing.
func (h *Hub) sweep() {
	_, compacted := h.source.Revision()
	var moving []*watcher
	for _, g := range h.behind.all {
		for _, w := range g.members {
			if w.next < compacted || w.next > h.claimed {
				moving = append(moving, w)
			}
		}
	}
	for _, w := range moving {
		if w.next < compacted {
			h.cancelCompacted(w, compacted)
		} else {
			h.enliven(w)
		}
	}
}

// cancelCompacted ends a watcher whose events are gone. The header of this
// response has no revision.
func (h *Hub) cancelCompacted(w *watcher, compacted int64) {
	if !w.stream.sendOne(h.encodeControl(control{watchID: w.id, canceled: true, compact: compacted})) {
		h.park(w)
		return
	}
	h.forget(w)
	h.opts.Metrics.Watchers.Dec()
}

// lowest returns the lowest next revision in [from, to) of the watchers that
// are behind, or 0 if there is none.
func (h *Hub) lowest(from, to int64) int64 {
	lowest := int64(math.MaxInt64)
	for _, g := range h.behind.all {
		for _, w := range g.members {
			if w.next >= from && w.next < to {
				lowest = min(lowest, w.next)
			}
		}
	}
	if lowest == math.MaxInt64 {
		return 0
	}
	return lowest
}

// catchUpRecent serves the watchers that lack only what is in memory. They need
// not wait for those that lack more.
func (h *Hub) catchUpRecent() error {
	f := &h.catchUp
	h.mu.Lock()
	first, _ := h.recent.span()
	from := h.lowest(first, math.MaxInt64)
	if from == 0 {
		h.mu.Unlock()
		return nil
	}
	source, epoch := h.source, h.epoch
	var ok bool
	f.entries, f.upTo, ok = h.recent.since(f.entries[:0], from, h.claimed, h.opts.ChunkBytes)
	f.recent = true
	defer h.mu.Unlock()
	defer f.finish()
	if !ok { // dropped meanwhile; history has it
		return nil
	}
	return h.round(f, source, epoch, from)
}

// catchUpHistory reads one chunk of history for all watchers that lack it.
func (h *Hub) catchUpHistory(ctx context.Context) error {
	f := &h.catchUp
	h.mu.Lock()
	first, _ := h.recent.span()
	from := h.lowest(h.cursor, first)
	if from == 0 {
		from = h.lowest(0, first) // a new pass
	}
	if from == 0 {
		h.cursor = 0
		h.mu.Unlock()
		return nil
	}
	to := min(h.claimed, first-1)
	source, epoch := h.source, h.epoch
	h.mu.Unlock()

	next, err := source.History(ctx, from, to, h.opts.ChunkBytes, f.gather)
	h.mu.Lock()
	defer h.mu.Unlock()
	defer f.finish()
	if errors.Is(err, mvcc.ErrCompacted) {
		return nil // the next sweep cancels who is concerned
	}
	if err != nil {
		return fmt.Errorf("read history from revision %d to %d: %w", from, to, err)
	}
	if next <= from || next > to+1 {
		broken("history from revision %d to %d goes on at %d", from, to, next)
	}
	if h.epoch != epoch {
		return nil
	}
	f.upTo, f.recent = next-1, false
	h.cursor = next
	return h.round(f, source, epoch, from)
}

// gather takes one event of history.
func (f *fanOut) gather(ev mvcc.Event) {
	if n := len(f.entries); n > 0 && ev.Rev.Compare(f.entries[n-1].event.Rev) <= 0 {
		broken("history gives revision %v after %v", ev.Rev, f.entries[n-1].event.Rev)
	}
	e := new(entry)
	e.init(ev, appendEventField(make([]byte, 0, eventFieldSize(&ev, nil)), &ev, nil))
	f.entries = append(f.entries, e)
}

// round gives f.entries, the events from revision from to f.upTo, to the
// watchers that are behind and lack no earlier ones. The hub's lock is held,
// but not while values are looked up.
func (h *Hub) round(f *fanOut, source Source, epoch uint64, from int64) error {
	_, compacted := source.Revision()
	f.match(h.behind, compacted)
	for _, g := range h.behind.all {
		for _, w := range g.members {
			if w.next >= from && w.next <= f.upTo {
				w.round = f.number
				f.served = append(f.served, w)
			}
		}
	}
	if len(f.prevs) > 0 {
		h.mu.Unlock()
		err := f.lookUp(source)
		h.mu.Lock()
		if err != nil {
			return err
		}
	}
	if h.epoch != epoch {
		return nil
	}
	f.revision = max(h.delivered, f.upTo)
	f.send(h.behind)
	for _, w := range f.served {
		if w.round != f.number { // parked or gone
			continue
		}
		w.next = f.upTo + 1
		if w.next > h.claimed {
			h.enliven(w)
		}
	}
	return nil
}
