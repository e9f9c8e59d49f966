package grpcserver

import (
	"encoding/binary"
	"slices"

	"golang.org/x/net/http2"
)

// Lengths of what stands around an answer.
const (
	messagePrefix = 5
	maxHead       = 256 // of a header block that is put together in a chunk
	streamAhead   = 64 << 10
)

// sendQueue is what a stream has to send and that its client does not let it, or
// that others are before. The connection's lock covers it.
type sendQueue struct {
	items []outItem
	bytes int
	moved int64 // when some of it was last sent, or the first came whose sender waits; Unix ns
	// end, if set, follows the items and ends the stream; an empty one is an empty
	// DATA frame.
	end    []byte
	ending bool
}

// outItem is a message that is partly sent.
type outItem struct {
	message Message
	prefix  [messagePrefix]byte
	body    Body // behind the head, instead of a rest
	part    int  // 0 is the prefix, 1 the head, then the rest
	off     int
	left    int
	fn      func() // told once the bytes have left memory
	tell    bool   // its bidirectional stream is told
	counted int
	record  sentRecord
}

func (it *outItem) current() []byte {
	switch it.part {
	case 0:
		return it.prefix[:]
	case 1:
		return it.message.Head
	}
	return it.message.Rest[it.part-2]
}

// newItem makes an item of a message.
func newItem(m Message, body Body, compressed bool) outItem {
	it := outItem{message: m, body: body}
	size := m.Size()
	if body != nil {
		size += body.Size()
	}
	if compressed {
		it.prefix[0] = 1
	}
	binary.BigEndian.PutUint32(it.prefix[1:], uint32(size))
	it.left = messagePrefix + size
	return it
}

// enqueue adds an item to a stream's queue. The lock is held.
func (c *conn) enqueue(s *stream, it outItem) {
	if s.q == nil {
		s.q = &sendQueue{}
	}
	s.q.items = append(s.q.items, it)
	s.q.bytes += it.left
	if it.fn != nil {
		c.holding.Add(1)
		if len(s.q.items) == 1 || s.q.moved == 0 {
			s.q.moved = c.s.o.Clock.Now().UnixNano()
		}
		it.left = 0
	}
	if !it.tell {
		s.q.items[len(s.q.items)-1].counted = it.left + itemCost
		c.charge(it.left + itemCost)
	}
	c.ripen(s)
}

// overfull says that more answers wait than a connection may have, all but those
// that their senders count: for itself, or now that so many wait for all. The lock
// is held.
func (c *conn) overfull() bool {
	n := c.queued.Load() + int64(c.out.bytes)
	return n > int64(c.s.o.OutputBytes) || n > crowdedBytes && c.s.queued.Load() > overfullShare*int64(c.s.o.HeldBytes)
}

// charge counts bytes that wait in streams, and what keeping them takes. The lock
// is held.
func (c *conn) charge(n int) {
	c.queued.Add(int64(n))
	c.s.queued.Add(int64(n))
}

// ripen puts a stream among those that can send. The lock is held.
func (c *conn) ripen(s *stream) {
	if s.ripe || s.q == nil || s.q.bytes == 0 || s.sendWindow <= 0 {
		return
	}
	s.ripe = true
	c.ready = append(c.ready, s)
}

// fill moves data of the streams into the output, one frame of each in turn, as
// far as the windows allow. The lock is held.
func (c *conn) fill() {
	if c.sendWindow > 0 && len(c.ready) > 0 {
		c.turn = c.s.o.Clock.Now().UnixNano()
	}
	for c.sendWindow > 0 && len(c.ready) > 0 && c.out.bytes < highWater {
		s := c.ready[0]
		c.ready[0] = nil
		if c.ready = c.ready[1:]; len(c.ready) == 0 {
			c.ready = nil
		}
		s.ripe = false
		if s.gone.Load() {
			continue
		}
		c.emit(s)
		if s.q.bytes > 0 {
			c.ripen(s)
		} else if s.q.ending {
			c.finish(s, s.q.end)
		}
	}
}

// emit sends one frame of a stream's data. The lock is held.
func (c *conn) emit(s *stream) {
	q := s.q
	n := int(min(int64(q.bytes), int64(c.peerFrame), int64(maxFrame), s.sendWindow, c.sendWindow))
	if n <= 0 {
		return
	}
	c.sendHead(s)
	c.answered = true
	q.moved = c.turn
	s.sendWindow -= int64(n)
	c.sendWindow -= int64(n)
	was := q.bytes
	q.bytes -= n
	flags := byte(0)
	if q.bytes == 0 && q.ending && len(q.end) == 0 {
		flags = flagEndStream
	}
	c.out.used(appendFrameHeader(c.out.room(frameHeaderLen), n, frameData, flags, s.id))
	for n > 0 {
		it := &q.items[0]
		for it.left > 0 && n > 0 {
			if it.part > 1 && it.body != nil {
				k := min(it.left, n)
				c.out.fill(it.body, k)
				it.left -= k
				n -= k
				continue
			}
			p := it.current()[it.off:]
			if len(p) == 0 {
				it.part, it.off = it.part+1, 0
				continue
			}
			k := min(len(p), n)
			c.out.add(p[:k:k])
			it.off += k
			it.left -= k
			n -= k
		}
		if it.left > 0 {
			break
		}
		c.passed(s, it)
		*it = outItem{}
		if q.items = q.items[1:]; len(q.items) == 0 {
			q.items = nil
		}
	}
	if was > streamAhead && q.bytes <= streamAhead && s.sender != nil {
		s.sender.Broadcast()
	}
	if was > 0 && q.bytes <= streamAhead/2 && s.bidi != nil {
		c.attendTo(s)
	}
}

// passed notes that all of an item is in the output. The lock is held.
func (c *conn) passed(s *stream, it *outItem) {
	c.charge(-it.counted)
	switch {
	case it.tell:
		it.record.stream, it.record.message = s, it.message
		c.out.sent = append(c.out.sent, it.record)
	case it.fn != nil:
		c.out.sent = append(c.out.sent, sentRecord{fn: c.release(it.fn)})
	}
}

// release returns fn as it is to be called when its bytes have left.
func (c *conn) release(fn func()) func() {
	return func() {
		c.holding.Add(-1)
		fn()
	}
}

// cutShort drops what a stream has not begun to send, and returns what is to be
// called without the lock, which is held. A message that was begun stays; if the
// outbox counted it the connection does from now on.
func (c *conn) cutShort(s *stream) (drop []func()) {
	if s.q == nil || len(s.q.items) == 0 || s.q.items[0].part == 0 && s.q.items[0].off == 0 {
		return c.unsend(s)
	}
	begun := s.q.items[0]
	s.q.items = s.q.items[1:]
	drop = c.unsend(s)
	if begun.tell {
		begun.tell, begun.counted = false, begun.left
		c.charge(begun.left)
	}
	s.q.items, s.q.bytes = []outItem{begun}, begun.left
	c.ripen(s)
	return drop
}

// unsend empties a stream's queue and returns what is to be called without the
// lock, which is held.
func (c *conn) unsend(s *stream) (drop []func()) {
	if s.sender != nil {
		s.sender.Broadcast()
	}
	if s.q == nil {
		return nil
	}
	for i := range s.q.items {
		it := &s.q.items[i]
		c.charge(-it.counted)
		if it.fn != nil {
			drop = append(drop, c.release(it.fn))
		}
	}
	s.q.items, s.q.bytes = nil, 0
	return drop
}

// endStalled ends what holds answers whose senders wait, and of which the client has
// taken nothing since before: the connection if its socket is full, else streams
// of it, whatever the others do.
func (c *conn) endStalled(before int64) {
	c.mu.Lock()
	if c.blocked && c.moved.Load() < before {
		c.mu.Unlock()
		c.s.limited(limitStalled, "remote", c.remote)
		c.hangUp()
		return
	}
	var ended []*stream
	for _, s := range c.streams {
		if c.stoodStill(s, before) {
			if s.cut == nil {
				s.cut = errUnread
			}
			code := http2.ErrCodeEnhanceYourCalm
			if s.m.unary != nil {
				code = http2.ErrCodeInternal // it may have written: neither refused, nor to be repeated
			}
			c.reset(s.id, code)
			c.drop(s, true)
			ended = append(ended, s)
		}
	}
	if len(ended) == 0 {
		c.mu.Unlock()
		return
	}
	c.telling++
	c.kick()
	c.mu.Unlock()
	for _, s := range ended {
		c.s.limited(limitStalled, "remote", c.remote, "stream", s.id)
		s.over(endCanceled)
	}
	c.mu.Lock()
	c.toldOne()
	c.mu.Unlock()
}

// stoodStill says that a stream holds such an answer and that its client has let
// in nothing since before. What waits for others of the connection, or for the
// socket, is not the stream's fault. The lock is held.
func (c *conn) stoodStill(s *stream, before int64) bool {
	q := s.q
	if q == nil || !slices.ContainsFunc(q.items, func(it outItem) bool { return it.fn != nil }) {
		return false
	}
	switch {
	case c.blocked && q.moved == c.turn: // what it sent last has not left
		return false
	case s.ripe && (c.blocked || c.sendWindow > 0):
		return false
	case s.ripe: // the connection's window is closed
		return max(q.moved, c.turn) < before
	}
	return q.moved < before
}

// sendHead sends the header block of an answer before anything else. The lock is
// held.
func (c *conn) sendHead(s *stream) {
	if s.headSent {
		return
	}
	s.headSent = true
	head := s.head
	if head == nil {
		head = s.req.head
	}
	c.headers(s.id, head, 0)
}

// headers sends a header block. The lock is held.
func (c *conn) headers(id uint32, block []byte, flags byte) {
	c.answered = true
	if c.shrunk { // RFC 9113, section 4.3.1: the next block has to begin with that
		c.shrunk = false
		block = append([]byte{tableOfNone}, block...)
	}
	typ := byte(frameHeaders)
	for {
		n := min(len(block), c.peerFrame, maxFrame)
		if n == len(block) {
			flags |= flagEndHeaders
		}
		c.out.used(appendFrameHeader(c.out.room(frameHeaderLen), n, typ, flags, id))
		for part := block[:n]; len(part) > 0; {
			k := min(len(part), copiedBytes)
			c.out.add(part[:k])
			part = part[k:]
		}
		if block = block[n:]; len(block) == 0 {
			return
		}
		typ, flags = frameContinuation, 0
	}
}

// conclude ends a stream with a trailer once its data is sent; an empty one
// stands for the end of a body. It may come before the data. The lock is held.
func (c *conn) conclude(s *stream, trailer []byte) {
	if s.q != nil && s.q.bytes > 0 {
		s.q.ending, s.q.end = true, trailer
		return
	}
	c.finish(s, trailer)
}

// finish sends the end of a stream, all of whose data is sent. The lock is held.
func (c *conn) finish(s *stream, trailer []byte) {
	switch {
	case len(trailer) > 0 && s.headSent:
		c.headers(s.id, trailer, flagEndStream)
	case len(trailer) > 0: // the head and the trailer in one block
		head := s.head
		if head == nil {
			head = s.req.bare
		}
		s.headSent = true
		c.headers(s.id, append(head[:len(head):len(head)], trailer...), flagEndStream)
	case s.q == nil || !s.q.ending: // else the last data frame said so
		c.sendHead(s)
		c.out.used(appendFrameHeader(c.out.room(frameHeaderLen), 0, frameData, flagEndStream, s.id))
	}
	rst := !s.remoteDone.Load()
	if rst {
		c.reset(s.id, http2.ErrCodeNo)
	}
	c.drop(s, rst)
}

// answer sends the whole answer of a unary call. The lock is held.
func (c *conn) answer(s *stream, raw []byte, rest Body, compressed bool, fn func()) {
	n := messagePrefix + len(raw)
	if len(raw) > copiedBytes || rest != nil || len(c.ready) > 0 || int64(n) > min(s.sendWindow, c.sendWindow) ||
		c.out.bytes >= highWater || len(s.req.head) > maxHead || s.headSent || s.head != nil || c.shrunk {
		it := newItem(Message{Head: raw}, rest, compressed)
		it.fn = fn
		c.enqueue(s, it)
		c.conclude(s, okTrailer)
		return
	}
	// The usual case: three frames, put together in one place.
	head := s.req.head
	b := c.out.room(3*frameHeaderLen + len(head) + n + len(okTrailer))
	b = appendFrameHeader(b, len(head), frameHeaders, flagEndHeaders, s.id)
	b = append(b, head...)
	b = appendFrameHeader(b, n, frameData, 0, s.id)
	flag := byte(0)
	if compressed {
		flag = 1
	}
	b = append(b, flag, byte(len(raw)>>24), byte(len(raw)>>16), byte(len(raw)>>8), byte(len(raw)))
	b = append(b, raw...)
	b = appendFrameHeader(b, len(okTrailer), frameHeaders, flagEndHeaders|flagEndStream, s.id)
	b = append(b, okTrailer...)
	c.out.used(b)
	c.sendWindow -= int64(n)
	c.answered = true
	if fn != nil {
		// The bytes were copied; what they were copied to is counted by the output.
		c.out.sent = append(c.out.sent, sentRecord{fn: fn})
	}
	rst := !s.remoteDone.Load()
	if rst {
		c.reset(s.id, http2.ErrCodeNo)
	}
	c.drop(s, rst)
}

// raise adds to the window of a stream. The lock is held.
func (c *conn) raise(s *stream, n int64) bool {
	if s.sendWindow+n > maxWindow {
		return false
	}
	s.sendWindow += n
	c.ripen(s)
	return true
}

// attendTo has the holder of the token look at a bidirectional stream. The lock
// is held.
func (c *conn) attendTo(s *stream) {
	if !s.attending {
		s.attending = true
		c.attention = append(c.attention, s)
	}
}
