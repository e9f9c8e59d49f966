package consensus

import "time"

// waiters holds the proposals without an answer, by ID, and finds those whose deadline has passed.
//
// Deadlines lie in a wheel of one slot per tick, so that neither a timer nor a goroutine belongs to a proposal, and
// completing one costs no search. A deadline beyond the wheel's rim waits in the last slot and is looked at again.
type waiters struct {
	byID  map[uint64]*waiter
	tick  time.Duration
	epoch time.Time
	now   int64     // ticks since epoch, of the last expiry
	slots []*waiter // heads of rings; nil is empty
	spare *waiter   // finished ones for the next proposals, linked by next
}

type waiter struct {
	id         uint64
	done       func(Result, error)
	size       int
	start      time.Time
	deadline   time.Time
	slot       int
	prev, next *waiter
}

// newWaiters makes a wheel that reaches as far as longest.
func newWaiters(tick, longest time.Duration, now time.Time) *waiters {
	return &waiters{
		byID: map[uint64]*waiter{}, tick: tick, epoch: now,
		slots: make([]*waiter, int(longest/tick)+2),
	}
}

func (ws *waiters) len() int { return len(ws.byID) }

// add takes a waiter in. It reports false if the ID is taken.
func (ws *waiters) add(id uint64, done func(Result, error), size int, start, deadline time.Time) bool {
	if _, ok := ws.byID[id]; ok {
		return false
	}
	w := ws.spare
	if w != nil {
		ws.spare = w.next
	} else {
		w = &waiter{}
	}
	*w = waiter{id: id, done: done, size: size, start: start, deadline: deadline}
	ws.byID[id] = w
	ws.place(w)
	return true
}

// place puts w at the end of the slot of the first tick at or after its deadline, or of the farthest slot there is.
func (ws *waiters) place(w *waiter) {
	due := int64((w.deadline.Sub(ws.epoch) + ws.tick - 1) / ws.tick)
	due = min(max(due, ws.now+1), ws.now+int64(len(ws.slots)))
	w.slot = int(due % int64(len(ws.slots)))
	head := ws.slots[w.slot]
	if head == nil {
		w.prev, w.next = w, w
		ws.slots[w.slot] = w
		return
	}
	w.prev, w.next = head.prev, head
	head.prev.next, head.prev = w, w
}

func (ws *waiters) unlink(w *waiter) {
	if w.next == w {
		ws.slots[w.slot] = nil
		return
	}
	w.prev.next, w.next.prev = w.next, w.prev
	if ws.slots[w.slot] == w {
		ws.slots[w.slot] = w.next
	}
}

// has tells whether a proposal with this ID still waits.
func (ws *waiters) has(id uint64) bool {
	_, ok := ws.byID[id]
	return ok
}

// take removes the waiter with this ID and returns what it held.
func (ws *waiters) take(id uint64) (waiter, bool) {
	w, ok := ws.byID[id]
	if !ok {
		return waiter{}, false
	}
	ws.unlink(w)
	return ws.release(w), true
}

// release forgets an unlinked waiter.
func (ws *waiters) release(w *waiter) waiter {
	delete(ws.byID, w.id)
	held := *w
	*w = waiter{next: ws.spare}
	ws.spare = w
	return held
}

// expire removes everything due at now and hands it to fn, by slot and in the order it came.
func (ws *waiters) expire(now time.Time, fn func(waiter)) {
	to := int64(now.Sub(ws.epoch) / ws.tick)
	// After a long pause once around the wheel sees every slot.
	from := max(ws.now, to-int64(len(ws.slots)))
	ws.now = max(ws.now, to)
	for t := from + 1; t <= to; t++ {
		slot := int(t % int64(len(ws.slots)))
		head := ws.slots[slot]
		ws.slots[slot] = nil
		for w := head; w != nil; {
			next := w.next
			if next == head {
				next = nil
			}
			if w.deadline.After(now) {
				ws.place(w)
			} else {
				fn(ws.release(w))
			}
			w = next
		}
	}
}

// drain removes everything and hands it to fn, in a fixed order.
func (ws *waiters) drain(fn func(waiter)) {
	for i := range ws.slots {
		for ws.slots[i] != nil {
			w := ws.slots[i]
			ws.unlink(w)
			fn(ws.release(w))
		}
	}
}
