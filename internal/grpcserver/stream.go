package grpcserver

import (
	"context"
	"encoding/binary"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// stream is one HTTP/2 stream and the call that it carries. It is made for one
// call and left to the garbage collector, so that a handler may keep it and
// reply when it likes: what comes late finds it gone.
type stream struct {
	Call
	id     uint32
	length uint32 // of the reader: of the message
	req    *request
	m      *method // nil for a request that is refused or goes to HTTP
	began  time.Time

	replied    atomic.Bool  // the handler of a unary call has
	settled    atomic.Bool  // the outcome of a unary call is known
	dispatched atomic.Bool  // the handler has the message, or will not have it
	cost       uint32       // bytes that count while it is open, those of req too if no call before had the same
	kept       atomic.Int64 // bytes that hold counted
	gone       atomic.Bool  // it is none of the connection's streams any more
	remoteDone atomic.Bool  // the client has half-closed
	window     atomic.Int32 // what the client may still send
	consumed   atomic.Int32 // what was taken since the window was last raised

	// Of the reader: the one message of a unary call.
	received  int64 // bytes of DATA
	prefix    [messagePrefix]byte
	gotPrefix uint8
	whole     bool   // the message was passed on; what follows is nobody's
	body      []byte // what is there of it
	refusal   *status.Status

	inbox *inbox // of a call that takes many messages
	bidi  *bidi  // of a method with a StreamHandler

	// The connection's lock covers the rest.
	sendWindow int64
	q          *sendQueue
	head       []byte // header block of the answer, if not the request's
	headSent   bool
	ripe       bool
	attending  bool
	heapAt     int32      // in the connection's deadlines, -1 if not there
	held       *heldCall  // while it is held back
	sender     *sync.Cond // of a goroutine that sends; uses the connection's lock
	cut        error      // what the stream is to end with
	forget     func()     // of Method.Watch
}

// begin begins a stream of a header block that was just decoded.
func (c *conn) begin(id uint32, end, malformed bool) *connError {
	c.idle.give(callCredit)
	cost := uint32(streamCost)
	req := c.requests.find(c.unpack.fields)
	if req == nil {
		cost += min(c.unpack.size, c.unpack.limit)
		req = c.s.parseRequest(append([]*field(nil), c.unpack.fields...), c.tls != nil && c.s.o.HTTP != nil)
		if !c.unpack.tooLarge() {
			c.requests.keep(req, c.unpack.size)
		}
	}
	if req.method == nil || req.method.unary == nil {
		cost += wideCost - streamCost
	}
	s := &stream{id: id, req: req, cost: cost, began: c.now, heapAt: -1}
	s.conn, s.md, s.Method = c, req.md, req.path
	s.window.Store(recvWindow)
	if end {
		s.remoteDone.Store(true)
	}
	var code http2.ErrCode
	limit := ""
	c.mu.Lock()
	c.maxID = id
	switch {
	case c.drained:
		c.mu.Unlock()
		return nil // it was told that nobody would look
	case malformed || req.reset != 0 && !c.unpack.tooLarge() || end && req.length > 0:
		code = http2.ErrCodeProtocol
	case uint32(len(c.streams)) >= c.s.o.MaxStreams:
		code, limit = http2.ErrCodeRefusedStream, limitStreams
	case !c.hold(int(cost)):
		c.unhold(int(cost))
		code, limit = http2.ErrCodeRefusedStream, limitStreams
		if c.backlog.first != nil {
			limit = limitOutput // which is why so many are open
		}
	}
	if code != 0 {
		c.reset(id, code)
		c.remember(id, true)
		c.mu.Unlock()
		c.s.metrics.refused.Add(1)
		if limit != "" {
			return c.overstep(limit)
		}
		return nil
	}
	s.sendWindow = c.peerWindow
	refuse, httpStatus := req.refuse, req.httpStatus
	if c.unpack.tooLarge() {
		c.s.limited(limitHeaders, "remote", c.remote, "bytes", c.unpack.size)
		refuse = status.Newf(codes.ResourceExhausted, "grpc: received headers larger than max (%d vs. %d)", c.unpack.size, c.s.o.MaxHeaderBytes)
		httpStatus = http.StatusRequestHeaderFieldsTooLarge
	} else if refuse == nil && c.unpack.timed && req.grpc {
		timeout, err := parseTimeout(c.unpack.timeout)
		switch {
		case err != nil:
			refuse, httpStatus = status.Newf(codes.Internal, "malformed grpc-timeout: %v", err), http.StatusBadRequest
		case timeout <= 0:
			refuse = status.New(codes.DeadlineExceeded, "context deadline exceeded")
		default:
			s.deadline = c.now.Add(timeout)
		}
	}
	if refuse == nil {
		s.m = req.method
	}
	c.streams[id] = s
	if s.m != nil && s.m.unary != nil {
		c.calls++
		c.s.calls.Add(1)
		if !s.deadline.IsZero() {
			c.watchDeadline(s)
		}
	}
	c.mu.Unlock()
	m := c.s.metrics
	m.streams.Add(1)
	m.started.Add(1)
	c.last = s
	switch {
	case refuse != nil:
		m.refused.Add(1)
		s.refuse(refuse, httpStatus, end)
	case s.m == nil:
		c.s.beginHTTP(s, end)
	default:
		s.start(end)
	}
	if !s.deadline.IsZero() && s.m.unary == nil {
		// Only now is there all that must be ended.
		c.mu.Lock()
		if !s.gone.Load() {
			c.watchDeadline(s)
		}
		c.mu.Unlock()
	}
	return nil
}

// refuse answers a request that no handler sees. Nobody looks at its data, but
// what follows must still be HTTP/2, and of the length that it said it would be.
// So that is waited for, unless a gRPC client may be waiting for the answer.
func (s *stream) refuse(st *status.Status, httpStatus int, end bool) {
	if httpStatus != http.StatusOK {
		s.head = appendIndexedName(appendStatus(nil, httpStatus), 31, "application/grpc")
	} else {
		s.head = s.req.bare
		if s.head == nil {
			s.head = plainHead
		}
	}
	s.refusal = st
	if end || s.req.grpc && s.req.length < 0 {
		s.conn.refused(s)
	}
}

func (c *conn) refused(s *stream) {
	c.mu.Lock()
	if !s.gone.Load() {
		c.conclude(s, appendTrailer(nil, s.refusal, nil))
		c.kick()
	}
	c.mu.Unlock()
	s.Call.finish(endCanceled)
}

// start begins to serve a call whose method is known.
func (s *stream) start(end bool) {
	if st := s.m.stats; st != nil {
		st.Started()
	}
	switch {
	case s.m.stream != nil:
		s.startBidi()
	case s.m.goStream != nil:
		s.inbox = newInbox(s)
		s.watchEnd()
		s.conn.s.goServe(s, func() { s.serveStream() })
	}
	if end {
		s.take(nil, true)
	}
}

// take handles data of the client. It runs on the reader goroutine.
func (s *stream) take(data []byte, end bool) {
	switch {
	case s.refusal != nil:
		s.credit(len(data))
		if end {
			s.conn.refused(s)
		}
	case s.bidi != nil:
		s.bidi.take(data, end)
	case s.inbox != nil:
		s.inbox.take(data, end)
	default:
		s.takeOne(data, end)
	}
}

// takeOne takes data of the one message of a call. A message that is whole in
// one frame is copied once.
func (s *stream) takeOne(data []byte, end bool) {
	if s.whole || s.dispatched.Load() {
		return
	}
	if s.gotPrefix < messagePrefix {
		n := copy(s.prefix[s.gotPrefix:], data)
		s.gotPrefix += uint8(n)
		if data = data[n:]; s.gotPrefix < messagePrefix {
			if end {
				s.cutShort()
			}
			return
		}
		length := binary.BigEndian.Uint32(s.prefix[1:])
		if most := s.conn.s.o.MaxReceiveBytes; uint64(length) > uint64(most) {
			s.conn.s.limited(limitMessage, "remote", s.conn.remote, "bytes", length)
			s.refuseMessage(tooLarge(int64(length), most))
			return
		}
		s.length = length
	}
	length := int(s.length)
	if s.body == nil && len(data) >= length {
		s.dispatch(s.conn.own(data[:length]))
		return
	}
	n := min(len(data), length-len(s.body))
	if size := grown(s.body, n, length); size > cap(s.body) {
		if !s.hold(size - cap(s.body)) {
			s.refuseMessage(status.Convert(errHeld))
			return
		}
		s.body = append(make([]byte, 0, size), s.body...)
	}
	s.body = append(s.body, data[:n]...)
	left := length - len(s.body)
	if left == 0 {
		s.release()
		body := s.body
		s.body = nil
		s.dispatch(body)
		return
	}
	if end {
		s.cutShort()
		return
	}
	if s.gone.Load() { // at this moment; nobody else would give it back
		s.release()
		return
	}
	if more := left - int(s.window.Load()); more > 0 {
		s.raise(more)
	}
}

// grown returns the capacity that b should have for n bytes more of the total
// that is to come. A client has to send a good part of a message before it gets
// memory for all of it.
func grown(b []byte, n, total int) int {
	need := len(b) + n
	if cap(b) >= need {
		return cap(b)
	}
	return min(max(4*need, 32<<10), total)
}

func tooLarge(n int64, most int) *status.Status {
	return status.Newf(codes.ResourceExhausted, "grpc: received message larger than max (%d vs. %d)", n, most)
}

// cutShort refuses a call whose client half-closed before its message was there.
func (s *stream) cutShort() {
	text := "unexpected EOF"
	if s.gotPrefix < messagePrefix {
		text = "EOF"
	}
	s.refuseMessage(status.New(codes.Unknown, text))
}

// refuseMessage ends a call whose message is no good.
func (s *stream) refuseMessage(st *status.Status) {
	s.dispatched.Store(true)
	s.body = nil
	s.release()
	if s.settled.CompareAndSwap(false, true) {
		s.conclude(st)
	}
}

// hold counts bytes of the client's that are kept. It returns false if that is
// too many; they count until release all the same. Who calls it without the
// connection's lock has to look afterwards whether the stream is gone: drop, which
// gives back all that is kept, may have come before.
func (s *stream) hold(n int) bool {
	if s.count(n) {
		return true
	}
	s.conn.s.limited(limitHeld, "remote", s.conn.remote)
	return false
}

func (s *stream) count(n int) bool {
	s.kept.Add(int64(n))
	return s.conn.hold(n)
}

var errHeld = status.Error(codes.ResourceExhausted, "grpc: too many bytes of requests that are not complete or not read are held; send fewer at a time")

// release gives back all that hold counted.
func (s *stream) release() { s.conn.unhold(int(s.kept.Swap(0))) }

// letGo gives back n bytes of what hold counted, or what release has left of them:
// the stream may end at this moment.
func (s *stream) letGo(n int) {
	for {
		kept := s.kept.Load()
		some := min(int64(n), kept)
		if s.kept.CompareAndSwap(kept, kept-some) {
			s.conn.unhold(int(some))
			return
		}
	}
}

// credit says that n bytes of the client's were taken, and has it send more.
func (s *stream) credit(n int) {
	if n > 0 && s.consumed.Add(int32(n)) >= recvWindow/4 && !s.remoteDone.Load() {
		s.raise(int(s.consumed.Swap(0)))
	}
}

// raise lets the client send n bytes more on this stream.
func (s *stream) raise(n int) {
	if n <= 0 {
		return
	}
	c := s.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.gone.Load() {
		return
	}
	s.window.Add(int32(n))
	c.control(frameHeaderLen+4, func(b []byte) []byte { return appendWindowUpdate(b, s.id, uint32(n)) })
	c.kick()
}

// dispatch gives the message of a call to its handler, now or later.
func (s *stream) dispatch(raw []byte) {
	s.whole = true
	if s.holdBack(raw) {
		return
	}
	s.dispatched.Store(true)
	s.handle(raw)
}

// handle has the handler begin with the message.
func (s *stream) handle(raw []byte) {
	if s.prefix[0] != 0 {
		var st *status.Status
		if raw, st = s.conn.s.unpackMessage(s.prefix[0], raw, s.req); st != nil {
			s.refuseMessage(st)
			return
		}
	}
	m := s.m
	if m.stats != nil {
		m.stats.Received(len(raw))
	}
	switch {
	case m.unary != nil:
		s.conn.working.Add(1)
		m.unary(&s.Call, raw, s.reply)
	case m.sender != nil:
		s.watchEnd()
		s.conn.s.goServe(s, func() { s.serveSender(raw) })
	case m.goUnary != nil:
		s.conn.working.Add(1)
		s.conn.s.goServe(s, func() { s.serveUnary(raw) })
	}
}

// reply is what a unary handler answers with, once, from any goroutine.
func (s *stream) reply(raw []byte, err error) {
	c := s.conn
	if s.replied.Swap(true) {
		panic("grpcserver: the handler of " + s.Method + " replied twice")
	}
	c.answeredOne()
	if !s.settled.CompareAndSwap(false, true) {
		s.unsent()
		return
	}
	rest := s.rest
	s.rest = nil
	size := len(raw)
	if rest != nil {
		size += rest.Size()
	}
	if err == nil && size > c.s.o.MaxSendBytes {
		err = status.Errorf(codes.ResourceExhausted, "grpc: trying to send message larger than max (%d vs. %d)", size, c.s.o.MaxSendBytes)
	}
	if err != nil {
		s.Call.Sent()
		if !s.deadline.IsZero() && !c.s.o.Clock.Now().Before(s.deadline) {
			err = context.DeadlineExceeded // why the request failed, most likely
		}
		s.conclude(statusOf(err))
		return
	}
	compressed := false
	if s.packs(size) {
		if rest != nil {
			head := len(raw)
			raw = append(make([]byte, 0, size), raw...)[:size]
			rest.Fill(raw[head:])
			rest = nil
		}
		raw, compressed = pack(raw), true
	}
	c.mu.Lock()
	if s.gone.Load() {
		c.mu.Unlock()
		s.unsent()
		s.settle(codes.Canceled)
		return
	}
	fn := s.sent
	s.sent = nil
	c.answer(s, raw, rest, compressed, fn)
	over := c.overfull()
	flush := c.kickInline()
	c.mu.Unlock()
	if s.m.stats != nil {
		s.m.stats.Sent(size)
	}
	s.settle(codes.OK)
	if over {
		c.fail(calm(limitOutput, "answers are not read"))
	}
	if flush {
		c.flush(true)
	}
}

// unsent tells the sender of an answer that nobody gets.
func (s *stream) unsent() {
	c := s.conn
	c.mu.Lock()
	c.telling++
	c.mu.Unlock()
	s.Call.Sent()
	c.mu.Lock()
	c.toldOne()
	c.mu.Unlock()
}

// conclude answers a unary call with a status. Whoever calls it has set settled.
func (s *stream) conclude(st *status.Status) {
	c := s.conn
	c.mu.Lock()
	if !s.gone.Load() {
		c.conclude(s, appendTrailer(nil, st, nil))
		c.kick()
	}
	c.mu.Unlock()
	s.settle(st.Code())
}

// settle ends a call whose outcome is known, and has it counted.
func (s *stream) settle(code codes.Code) {
	s.Call.finish(endCanceled)
	if s.m != nil && s.m.stats != nil {
		s.m.stats.Finished(&s.Call, code, s.conn.s.o.Clock.Now().Sub(s.began))
	}
}

// over ends the call of a stream that was taken out: the client gave up, or the
// connection is gone.
func (s *stream) over(why uint32) {
	c := s.conn
	c.mu.Lock()
	drop := c.unsend(s)
	c.mu.Unlock()
	for _, fn := range drop {
		fn()
	}
	// The outcome is claimed before the handler learns that the call is over, lest
	// an answer that it gives to nobody be counted as one.
	claimed := s.bidi == nil && s.inbox == nil && s.m != nil && (s.m.unary != nil || !s.dispatched.Load()) &&
		s.settled.CompareAndSwap(false, true)
	s.Call.finish(why)
	switch {
	case s.bidi != nil:
		s.bidi.close(codeOf(why))
	case s.inbox != nil:
		s.inbox.wake()
	case claimed:
		s.settle(codeOf(why))
	}
	s.release()
}

func codeOf(why uint32) codes.Code {
	if why == endDeadline {
		return codes.DeadlineExceeded
	}
	return codes.Canceled
}

// timeOut ends a call whose deadline has passed. It runs on the timers'
// goroutine.
func (s *stream) timeOut() {
	st := status.New(codes.DeadlineExceeded, context.DeadlineExceeded.Error())
	ours := s.bidi == nil && s.refusal == nil && s.m != nil && (s.m.unary != nil || !s.dispatched.Load() && s.inbox == nil)
	claimed := ours && s.settled.CompareAndSwap(false, true) // before the handler learns of it, as in over
	s.Call.finish(endDeadline)
	switch {
	case s.refusal != nil || s.m == nil:
	case s.bidi != nil:
		s.endWith(st.Err())
	case claimed:
		s.conclude(st)
	case ours: // answered already
	default: // a goroutine serves it, and comes to its end by the context
		c := s.conn
		c.mu.Lock()
		drop := c.cutShort(s)
		if !s.gone.Load() {
			c.conclude(s, appendTrailer(nil, st, nil))
			c.kick()
		}
		c.mu.Unlock()
		for _, fn := range drop {
			fn()
		}
		if s.inbox != nil {
			s.inbox.wake()
		}
	}
	s.release()
}

// watchEnd has Method.Watch told of a stream.
func (s *stream) watchEnd() {
	if s.m.watch == nil {
		return
	}
	forget := s.m.watch(&s.Call, s.endWith)
	s.conn.mu.Lock()
	s.forget = forget
	s.conn.mu.Unlock()
}

// forgotten tells Method.Watch that the stream is over.
func (s *stream) forgotten() {
	s.conn.mu.Lock()
	forget := s.forget
	s.forget = nil
	s.conn.mu.Unlock()
	if forget != nil {
		forget()
	}
}

// endWith ends a stream from any goroutine; the first error counts. It does not
// block.
func (s *stream) endWith(err error) {
	c := s.conn
	c.mu.Lock()
	if s.cut == nil {
		s.cut = err
	}
	if s.bidi != nil && !s.gone.Load() {
		c.attendTo(s)
		c.kick()
	}
	if s.sender != nil {
		s.sender.Broadcast()
	}
	c.mu.Unlock()
	s.Call.finish(endCanceled)
	if s.inbox != nil {
		s.inbox.wake()
	}
}
