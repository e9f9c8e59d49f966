package watch

import (
	"container/heap"
	"math"
	"time"
)

// Deliver gives live watchers a chunk of what was published since, then sends
// the progress notices that are due at now. More says that it should be called
// again at once; next is when a notice is due, zero if none is. An error is the
// disk's; the hub is of no use after it.
func (h *Hub) Deliver(now time.Time) (more bool, next time.Time, err error) {
	f := &h.delivery
	h.mu.Lock()
	source, epoch := h.source, h.epoch
	var ok bool
	f.entries, f.upTo, ok = h.recent.since(f.entries[:0], h.claimed+1, math.MaxInt64, h.opts.ChunkBytes)
	if !ok {
		h.overrun()
	} else if len(f.entries) > 0 {
		f.recent = true
		f.revision = f.upTo
		h.claimed = f.upTo
		_, compacted := source.Revision()
		f.match(h.live, compacted)
		if len(f.prevs) > 0 {
			h.mu.Unlock()
			err = f.lookUp(source)
			h.mu.Lock()
			if err != nil {
				h.mu.Unlock()
				return false, time.Time{}, err
			}
		}
		if h.epoch == epoch {
			f.send(h.live)
			h.delivered = max(h.delivered, f.upTo) // more if all have left meanwhile, see pass
		}
	}
	f.finish()
	h.answerProgress()
	h.noticeProgress(now)
	if len(h.ticks) > 0 {
		next = h.ticks[0].tick
	}
	h.observe()
	_, published := h.recent.span()
	more = h.claimed < published
	behind := h.behind.count > 0
	h.mu.Unlock()
	if behind {
		wake(h.catchUpWake)
	}
	return more, next, nil
}

// overrun has all live watchers catch up: so much was published since the last
// Deliver that the oldest of it is no longer in memory.
func (h *Hub) overrun() {
	_, published := h.recent.span()
	for _, w := range h.live.watchers() {
		if next := max(w.next, h.delivered+1); next <= published {
			h.fallBack(w, next)
		}
	}
	h.claimed, h.delivered = published, published
}

// answerProgress answers the progress requests whose revision was reached.
func (h *Hub) answerProgress() {
	waiting := h.asking[:0]
	for _, s := range h.asking {
		if h.delivered < s.wanted || s.stalled {
			waiting = append(waiting, s)
			continue
		}
		s.asking = false
		if !s.allLive(h.delivered) {
			continue
		}
		if !s.sendOne(h.encodeControl(control{revision: h.delivered, watchID: noWatcher})) {
			s.asking = true // again when it is ready
			waiting = append(waiting, s)
		}
	}
	clear(h.asking[len(waiting):])
	h.asking = waiting
}

// allLive says that the stream has watchers, and all have seen what there is up
// to revision, and wait for nothing beyond the next.
func (s *Stream) allLive(revision int64) bool {
	for _, w := range s.order {
		if !w.synced(revision) {
			return false
		}
	}
	return len(s.order) > 0
}

func (w *watcher) synced(revision int64) bool {
	return w.cond == live && w.next <= revision+1
}

// noticeProgress sends the notices that are due.
func (h *Hub) noticeProgress(now time.Time) {
	for len(h.ticks) > 0 && !h.ticks[0].tick.After(now) {
		s := h.ticks[0]
		s.tick = h.nextTick(now)
		heap.Fix(&h.ticks, 0)
		for _, w := range s.order {
			if !w.progress || !w.synced(h.delivered) {
				continue
			}
			if w.quiet {
				s.sendOne(h.encodeControl(control{revision: h.delivered, watchID: w.id}))
			}
			w.quiet = true
		}
	}
}
