package grpcserver

import (
	"encoding/binary"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// errUnread ends a stream whose client does not read while memory is short.
var errUnread = status.Error(codes.ResourceExhausted, "etcdserver: the stream was not read for too long while the memory for streams was used up")

// bidi serves a stream whose handler gets its messages one by one. It has no
// goroutine: requests are given to the receiver by the connection's reader, or by
// whoever holds the writing token once the receiver wants them again; answers are
// taken from the outbox by the holder of the token.
type bidi struct {
	s        *stream
	out      *outbox
	receiver StreamReceiver

	mu         sync.Mutex
	buf        []byte // what the client sent and the receiver has not taken
	eof        bool   // nothing follows buf
	halfClosed bool   // the receiver was told
	delivering bool   // some goroutine gives messages to the receiver

	gate   sync.RWMutex // held for reading by calls of the receiver
	closed bool
}

// startBidi begins a stream. Its handler may call the outbox at once; whoever
// then looks at the stream waits until there is a receiver.
func (s *stream) startBidi() {
	o := &s.conn.s.o
	b := &bidi{s: s}
	b.out = newOutbox(o.StreamMessages, o.StreamBytes, s.conn.s.budget, b.wake, func() { s.endWith(errUnread) })
	b.gate.Lock()
	s.bidi = b
	s.watchEnd()
	b.receiver = s.m.stream(&s.Call, b.out)
	b.gate.Unlock()
}

// wake has the holder of the token look at the stream.
func (b *bidi) wake() {
	c := b.s.conn
	c.mu.Lock()
	if !b.s.gone.Load() {
		c.attendTo(b.s)
		c.kick()
	}
	c.mu.Unlock()
}

// enter begins a call of the receiver, unless the stream is over.
func (b *bidi) enter() bool {
	b.gate.RLock()
	if b.closed {
		b.gate.RUnlock()
		return false
	}
	return true
}

func (b *bidi) leave() { b.gate.RUnlock() }

// attend does what there is to do for the stream. The caller holds the token and
// is in no call of a receiver.
func (b *bidi) attend() {
	c, s := b.s.conn, b.s
	c.mu.Lock()
	cut := s.cut
	c.mu.Unlock()
	if s.gone.Load() {
		return
	}
	if cut != nil {
		b.end(statusOf(cut))
		return
	}
	if b.out.owesReady() {
		if !b.enter() {
			return
		}
		b.receiver.Ready()
		b.leave()
		b.out.told()
	}
	b.pull()
	b.deliver()
	if err, now := b.out.ended(); now {
		b.end(statusOf(err))
		return
	}
	b.out.idle()
}

// pull moves messages from the outbox to the connection, which does not take all
// at once: they would be sent even if the stream ended.
func (b *bidi) pull() {
	c, s := b.s.conn, b.s
	var now time.Time
	for {
		c.mu.Lock()
		full := s.q != nil && s.q.bytes >= streamAhead
		c.mu.Unlock()
		if full || s.gone.Load() {
			return
		}
		m, ok := b.out.take()
		if !ok {
			return
		}
		if now.IsZero() {
			now = c.s.o.Clock.Now()
		}
		wire, compressed := m, false
		if s.packs(m.Size()) {
			wire, compressed = Message{Head: pack(join(m)), Kind: m.Kind}, true
		}
		it := newItem(wire, nil, compressed)
		it.tell, it.record = true, sentRecord{message: m, began: now}
		c.mu.Lock()
		if !s.gone.Load() {
			c.enqueue(s, it)
		}
		c.mu.Unlock()
		if st := s.m.stats; st != nil {
			st.Sent(m.Size())
		}
	}
}

// wrote notes that the first message that was pulled is written.
func (b *bidi) wrote(r *sentRecord, now time.Time) {
	if b.s.gone.Load() {
		return
	}
	more := b.out.wrote(now)
	if b.enter() {
		b.receiver.Sent(r.message, now.Sub(r.began))
		b.leave()
	}
	if more {
		b.wake()
	}
}

// take takes data of the client. It runs on the reader goroutine.
func (b *bidi) take(data []byte, end bool) {
	b.mu.Lock()
	b.eof = b.eof || end
	if len(b.buf) == 0 && !b.delivering {
		// The usual case: whole messages, and a receiver that wants them.
		b.delivering = true
		b.mu.Unlock()
		data = b.direct(data)
		b.mu.Lock()
		b.delivering = false
	}
	kept := true
	if len(data) > 0 {
		kept = b.s.hold(len(data))
		b.buf = append(b.buf, data...)
	}
	idle := !b.delivering
	b.mu.Unlock()
	switch {
	case b.s.gone.Load(): // at this moment; nobody else would give it back
		b.s.release()
	case !kept:
		b.s.endWith(errHeld)
	case idle:
		b.deliver()
	}
}

// direct gives the receiver the whole messages in data for as long as it wants
// some, and returns the rest.
func (b *bidi) direct(data []byte) []byte {
	for b.out.wantsRequest() {
		n, st := b.next(data)
		if st != nil {
			b.end(st)
			return nil
		}
		if n == 0 {
			break
		}
		raw := b.s.conn.own(data[messagePrefix:n])
		flag := data[0]
		data = data[n:]
		b.s.credit(n)
		if !b.message(flag, raw) {
			return nil
		}
	}
	return data
}

// next returns the length of the message that data begins with, prefix included,
// 0 if it is not whole.
func (b *bidi) next(data []byte) (int, *status.Status) {
	if len(data) < messagePrefix {
		return 0, nil
	}
	length := binary.BigEndian.Uint32(data[1:])
	if most := b.s.conn.s.o.MaxReceiveBytes; uint64(length) > uint64(most) {
		b.s.conn.s.limited(limitMessage, "remote", b.s.conn.remote, "bytes", length)
		return 0, tooLarge(int64(length), most)
	}
	n := messagePrefix + int(length)
	if len(data) < n {
		return 0, nil
	}
	return n, nil
}

// message gives the receiver one message. It returns false if the stream is over.
func (b *bidi) message(flag byte, raw []byte) bool {
	s := b.s
	if flag != 0 {
		var st *status.Status
		if raw, st = s.conn.s.unpackMessage(flag, raw, s.req); st != nil {
			b.end(st)
			return false
		}
	}
	if st := s.m.stats; st != nil {
		st.Received(len(raw))
	}
	if !b.enter() {
		return false
	}
	err := b.receiver.Message(raw)
	b.leave()
	if err != nil {
		b.end(statusOf(err))
		return false
	}
	return true
}

// deliver gives the receiver what is kept for it, for as long as it wants some.
func (b *bidi) deliver() {
	b.mu.Lock()
	if b.delivering {
		b.mu.Unlock()
		return // that goroutine looks again before it leaves
	}
	b.delivering = true
	for {
		if !b.out.wantsRequest() {
			break
		}
		n, st := b.next(b.buf)
		if st != nil {
			b.mu.Unlock()
			b.end(st)
			return
		}
		if n > 0 {
			flag, raw := b.buf[0], append([]byte(nil), b.buf[messagePrefix:n]...)
			if b.buf = b.buf[n:]; len(b.buf) == 0 {
				b.buf = nil
			}
			b.mu.Unlock()
			b.s.letGo(n)
			b.s.credit(n)
			if !b.message(flag, raw) {
				return // delivering stays set: nothing is to be given any more
			}
			b.mu.Lock()
			continue
		}
		if b.eof && !b.halfClosed {
			b.halfClosed = true
			cut := len(b.buf) > 0
			b.mu.Unlock()
			if cut {
				b.end(status.New(codes.Internal, "unexpected EOF"))
				return
			}
			if !b.enter() {
				return
			}
			over := b.receiver.HalfClose()
			b.leave()
			if over {
				b.out.End(nil)
			}
			b.mu.Lock()
			continue
		}
		// A message that is longer than the window must be let in.
		more := 0
		if len(b.buf) >= messagePrefix && !b.eof {
			more = messagePrefix + int(binary.BigEndian.Uint32(b.buf[1:])) - len(b.buf) - int(b.s.window.Load())
		}
		if more <= 0 {
			break
		}
		b.delivering = false
		b.mu.Unlock()
		b.s.raise(more)
		return
	}
	b.delivering = false
	b.mu.Unlock()
}

// end ends the stream now, whatever is queued. A message that is partly sent goes
// first, lest the client take the status for a broken message.
func (b *bidi) end(st *status.Status) {
	c, s := b.s.conn, b.s
	c.mu.Lock()
	if s.gone.Load() {
		c.mu.Unlock()
		return
	}
	c.cutShort(s) // the outbox counted what is dropped
	c.conclude(s, appendTrailer(nil, st, nil))
	over := c.overfull()
	c.kick()
	c.mu.Unlock()
	b.close(st.Code())
	if over {
		c.fail(calm(limitOutput, "answers are not read"))
	}
}

// close is the end of a stream that was taken out of its connection. It waits
// for the calls of the receiver that are under way.
func (b *bidi) close(code codes.Code) {
	b.out.close()
	b.gate.Lock()
	was := b.closed
	b.closed = true
	b.gate.Unlock()
	if was {
		return
	}
	b.receiver.Close()
	b.s.forgotten()
	b.mu.Lock()
	b.buf, b.delivering = nil, true
	b.mu.Unlock()
	b.s.release()
	b.s.settle(code)
}

// join returns a message in one slice.
func join(m Message) []byte {
	if len(m.Rest) == 0 {
		return m.Head
	}
	b := append(make([]byte, 0, m.Size()), m.Head...)
	for _, p := range m.Rest {
		b = append(b, p...)
	}
	return b
}
