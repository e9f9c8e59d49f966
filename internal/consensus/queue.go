package consensus

import "sync"

// queue hands items from one goroutine to the next in order, all that wait at once. It has no limit of its own: whoever
// puts into it is bounded by something else, named where the queue is declared.
type queue[T any] struct {
	mu     sync.Mutex
	filled sync.Cond
	items  []T
	parked bool // the consumer waits in take
	closed bool

	work sync.Mutex // held by whoever works off what was taken, where the producer may do so, see claim
}

func newQueue[T any]() *queue[T] {
	q := &queue[T]{}
	q.filled.L = &q.mu
	return q
}

// put appends copies of items. After close they are dropped.
func (q *queue[T]) put(items ...T) {
	if len(items) == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	q.items = append(q.items, items...)
	q.filled.Signal()
}

// take waits for items and returns all of them; spare, emptied, holds the next ones. After close it returns what is left,
// then false.
func (q *queue[T]) take(spare []T) ([]T, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.items) == 0 {
		if q.closed {
			return nil, false
		}
		q.parked = true
		q.filled.Wait()
		q.parked = false
	}
	items := q.items
	clear(spare)
	q.items = spare[:0]
	return items, true
}

// claim lets the only producer do the consumer's work, if the consumer has nothing to do: true if so, and then the work lock is held.
// What is put meanwhile waits for it, so the order is kept.
func (q *queue[T]) claim() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.parked && len(q.items) == 0 && !q.closed && q.work.TryLock()
}

func (q *queue[T]) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.items)
}

func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.filled.Signal()
}

// mailbox gathers everything the raft loop has to hear, until it comes round.
type mailbox struct {
	wake chan struct{} // holds one token while there is something to take

	mu       sync.Mutex
	in       Input
	received int64 // bytes of in.Received
	closed   bool
}

// open locks the mailbox for a change; false if it is closed, and then not locked.
func (b *mailbox) open() bool {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return false
	}
	return true
}

// shut unlocks the mailbox after a change and wakes the loop.
func (b *mailbox) shut() {
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// take returns what has gathered. used is the Input taken before, which Core is done with; its slices gather the next.
func (b *mailbox) take(used Input) Input {
	clear(used.Received)
	clear(used.Stored)
	clear(used.Applied)
	clear(used.Proposals)
	clear(used.ConfChanges)
	clear(used.Reads)
	next := Input{
		Received: used.Received[:0], Stored: used.Stored[:0], Applied: used.Applied[:0], Proposals: used.Proposals[:0],
		ConfChanges: used.ConfChanges[:0], Cancels: used.Cancels[:0], Reads: used.Reads[:0], Unreachable: used.Unreachable[:0],
		Snapshots: used.Snapshots[:0],
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	in := b.in
	b.in, b.received = next, 0
	return in
}

func (b *mailbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
}
