package grpcserver

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// outbox is the queue between the handler of a stream and its connection. It is
// bounded by messages and bytes of its own and by bytes that all streams share; a
// message counts till it is written. One message of any size fits into an empty
// outbox as long as the shared bytes are not used up, so the bound on memory is
// the shared one and one message.
//
// The lock of the outbox is taken before that of the budget, and both before that
// of the connection, which wake takes.
type outbox struct {
	maxMessages, maxBytes int
	shared                *outboxBudget
	wake                  func()       // has the connection look at the stream; does not block
	cut                   func()       // ends the stream; does not block
	moved                 atomic.Int64 // when a message was last written, or came while there was none; Unix ns

	mu      sync.Mutex
	queue   []queued // the first are being written
	taken   int      // how many those are
	bytes   int      // of queue
	refused bool     // the receiver is owed a Ready
	want    load     // what the last Send that was refused was to queue
	paused  bool     // a Send was refused, and the receiver has not had its Ready
	held    bool     // the receiver wants no request now
	ending  bool     // with endErr, once the queue is empty
	endErr  error
	closed  bool
}

type queued struct {
	Message
	size int
}

// load is what a Send is to queue.
type load struct{ messages, bytes int }

func newOutbox(maxMessages, maxBytes int, shared *outboxBudget, wake, cut func()) *outbox {
	return &outbox{maxMessages: maxMessages, maxBytes: maxBytes, shared: shared, wake: wake, cut: cut}
}

// Send implements StreamOut.
func (o *outbox) Send(ms []Message) bool {
	l := load{messages: len(ms)}
	for i := range ms {
		l.bytes += ms[i].Size()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return false
	}
	if !o.fits(l) || !o.shared.take(l.bytes, o.bytes, o) {
		o.refused, o.paused, o.want = true, true, l
		o.wake()
		return false
	}
	if len(o.queue) == 0 {
		o.moved.Store(o.shared.now().UnixNano())
	}
	for _, m := range ms {
		o.queue = append(o.queue, queued{m, m.Size()})
	}
	o.bytes += l.bytes
	o.wake()
	return true
}

// fits says that the outbox's own bounds let a Send in.
func (o *outbox) fits(l load) bool {
	return len(o.queue) == 0 || len(o.queue)+l.messages <= o.maxMessages && o.bytes+l.bytes <= o.maxBytes
}

// Hold implements StreamOut.
func (o *outbox) Hold() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.held = true
}

// Resume implements StreamOut.
func (o *outbox) Resume() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.held {
		o.held = false
		o.wake()
	}
}

// End implements StreamOut.
func (o *outbox) End(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ending || o.closed {
		return
	}
	o.ending, o.endErr = true, err
	o.wake()
}

// ended says that the stream is to end now, and why.
func (o *outbox) ended() (why error, now bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.endErr, o.ending && len(o.queue) == 0
}

// idle is called when the connection has done all that there was to do. Others
// that wait for room are told, in case that it was this one's turn and it needed
// none.
func (o *outbox) idle() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.closed {
		o.shared.give(0, o.bytes, o)
	}
}

// take returns the message to write next; it stays in the queue till wrote.
func (o *outbox) take() (Message, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || len(o.queue) == o.taken {
		return Message{}, false
	}
	o.taken++
	return o.queue[o.taken-1].Message, true
}

// wrote removes the first message that take returned and that is not yet removed.
// More says that there is something left to do for the stream.
func (o *outbox) wrote(now time.Time) (more bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return false
	}
	size := o.queue[0].size
	o.queue[0] = queued{}
	if o.queue = o.queue[1:]; len(o.queue) == 0 && cap(o.queue) > 8 {
		o.queue = nil // so that an idle stream holds nothing
	}
	o.taken--
	o.bytes -= size
	o.moved.Store(now.UnixNano())
	o.shared.give(size, o.bytes, o)
	return o.ending || o.refused || len(o.queue) > o.taken
}

// owesReady says that the receiver is to be told of room, and takes that as
// done. There must be some room, lest each message be refused and announced, and
// enough for what was refused, lest it be refused again at once. Until there is,
// what is written has the outbox looked at again; if nothing is in it, the budget
// does.
func (o *outbox) owesReady() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || !o.refused || len(o.queue) > o.maxMessages/2 || o.bytes > o.maxBytes/2 && len(o.queue) > 0 {
		return false
	}
	if !o.fits(o.want) || !o.shared.has(o.want.bytes, o.bytes, o) {
		return false
	}
	o.refused = false
	return true
}

// told says that the receiver has had its Ready. If it found room for all that
// had waited, it may be given requests again: not before, lest their answers
// pile up while it waits for its turn.
func (o *outbox) told() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.refused && o.paused {
		o.paused = false
		o.wake()
	}
}

// wantsRequest says that the next request may be given to the receiver: no Send
// was refused since its last Ready, and it holds none back.
func (o *outbox) wantsRequest() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return !o.paused && !o.held && !o.ending && !o.closed
}

// close drops what was not written.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return
	}
	o.closed = true
	o.queue, o.taken = nil, 0
	o.shared.leave(o.bytes, o)
	o.bytes = 0
}

// outboxBudget is the bytes that the outboxes of all streams may hold. The more
// are used, the fewer one outbox may have, so that slow clients do not take all
// from the others; and if they do after all, one message each, those that have
// read nothing for long are cut off.
type outboxBudget struct {
	limit int
	stall time.Duration
	now   func() time.Time
	later func(time.Duration) // has again called once that has passed

	mu      sync.Mutex
	used    int
	holders map[*outbox]struct{} // that have messages
	waiting []*outbox            // were refused as all is used, oldest first
	swept   time.Time            // when stalled ones were last looked for
	armed   bool                 // later was called, and again was not yet
}

func newOutboxBudget(limit int, stall time.Duration, now func() time.Time, later func(time.Duration)) *outboxBudget {
	return &outboxBudget{limit: limit, stall: stall, now: now, later: later, holders: map[*outbox]struct{}{}}
}

// again has those that wait look whether the bytes of others move now, for as
// long as some wait.
func (b *outboxBudget) again() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.armed = false
	if len(b.waiting) == 0 {
		return
	}
	b.sweep()
	b.arm()
}

func (b *outboxBudget) arm() {
	if !b.armed {
		b.armed = true
		b.later(b.stall / 2)
	}
}

// held is how many bytes all outboxes hold.
func (b *outboxBudget) held() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}

// take takes n bytes for an outbox that holds some already, if it may have them
// as has tells.
func (b *outboxBudget) take(n, held int, o *outbox) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.leaves(n, held, o) {
		return false
	}
	b.used += n
	if n > 0 {
		b.holders[o] = struct{}{}
	}
	return true
}

// has says that an outbox that holds some bytes already may have n more. If it
// may not, and all is used, it is signalled once that is no longer so.
func (b *outboxBudget) has(n, held int, o *outbox) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.leaves(n, held, o)
}

// leaves is has for who holds the lock.
func (b *outboxBudget) leaves(n, held int, o *outbox) bool {
	if b.used >= b.limit {
		if !slices.Contains(b.waiting, o) {
			b.waiting = append(b.waiting, o)
		}
		b.sweep()
		b.arm()
		return false
	}
	return held == 0 || held+n <= b.limit-b.used // else it will have room once it has written
}

// sweep cuts off who has read nothing for long.
func (b *outboxBudget) sweep() {
	now := b.now()
	if now.Sub(b.swept) < b.stall/10 {
		return
	}
	b.swept = now
	for o := range b.holders {
		if now.Sub(time.Unix(0, o.moved.Load())) > b.stall {
			o.cut()
		}
	}
}

// give returns n bytes of an outbox, which then holds left, and has some of
// those that wait look again. Each of them calls give in turn, so all get theirs.
func (b *outboxBudget) give(n, left int, o *outbox) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	if left == 0 {
		delete(b.holders, o)
	}
	if b.used >= b.limit {
		return
	}
	some := min(8, len(b.waiting))
	for _, o := range b.waiting[:some] {
		o.wake()
	}
	b.waiting = slices.Delete(b.waiting, 0, some)
}

// leave is the last give of an outbox.
func (b *outboxBudget) leave(n int, o *outbox) {
	b.mu.Lock()
	b.waiting = slices.DeleteFunc(b.waiting, func(w *outbox) bool { return w == o })
	b.mu.Unlock()
	b.give(n, 0, o)
}
