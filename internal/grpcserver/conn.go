package grpcserver

import (
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
)

// conn is one HTTP/2 connection. Its reader goroutine reads frames and runs the
// handlers of unary calls; whoever holds the writing token writes.
type conn struct {
	s          *Server
	nc         net.Conn
	w          wire
	remote     net.Addr
	tls        *tls.ConnectionState // nil in cleartext
	commonName string

	reader // what only the reader goroutine touches

	lastRead   atomic.Int64 // Unix ns
	batches    atomic.Int64 // that were read
	moved      atomic.Int64 // when the socket last took something, Unix ns
	holding    atomic.Int64 // answers whose senders wait till they have left memory
	held       atomic.Int64 // bytes of open streams and of requests that are not complete or not taken
	earned     atomic.Int64 // bytes that were sent and not yet counted for the client
	goroutines atomic.Int64 // that serve calls
	window     atomic.Int64 // what the client may still send

	// See awaitRoom.
	working atomic.Int64  // unary calls that are with their handlers
	waiting atomic.Bool   // the reader does
	slack   chan struct{} // capacity 1
	halted  chan struct{} // closed when the connection is to end
	halt    sync.Once

	mu        sync.Mutex
	streams   map[uint32]*stream
	calls     int    // of streams: unary ones served from raw bytes
	maxID     uint32 // highest stream that the client began
	backlog   backlog
	recent    [64]recentStream
	recentAt  uint8
	deadlines deadlineHeap
	alarm     *timer // for the first of deadlines
	alarmAt   time.Time

	// What is sent, and what may be.
	out        output
	ready      []*stream // have data and a window for it, in turn
	sendWindow int64
	peerWindow int64 // with which the client's streams begin
	peerFrame  int
	peerTable  uint32       // how large a table of header fields the client keeps for us
	shrunk     bool         // it made that smaller, and was not told that we use none
	queued     atomic.Int64 // bytes that wait in streams and that their sender does not count
	turn       int64        // when streams last had their turn to send, Unix ns
	replies    int          // bytes of control frames in out
	attention  []*stream

	writing  bool       // the token
	written  sync.Cond  // it was given back after closed was set
	blocked  bool       // the holder of the token waits for the socket
	parsing  bool       // the reader will write when it is done with its batch
	dirty    bool       // among the flushers' connections
	closed   bool       // nothing is taken to be sent any more
	broken   bool       // a write failed
	failure  *connError // ends the connection; found by another goroutine than the reader
	answered bool       // something of a call was sent since the last ping
	quit     bool       // to be closed once all is written
	telling  int        // goroutines of handlers that may have a sender to tell

	draining bool   // GOAWAY was sent or is to be
	lastID   uint32 // the last stream that is served once drained is set
	drained  bool   // the final GOAWAY was sent
	drain    *timer

	keepalive *timer
	// pinged says that a keepalive ping waits for its answer, pingedAfter how many
	// batches had been read before.
	pinged      bool
	pingedAfter int64

	// Of the holder of the token.
	batch output
	left  [][]byte // of batch, not yet written
	spare []*stream
}

// recentStream is a stream that was closed lately.
type recentStream struct {
	id    uint32
	reset bool // by us, so that more frames of it may be on their way
}

func (s *Server) newConn(nc net.Conn, w wire, state *tls.ConnectionState) *conn {
	c := &conn{
		s: s, nc: nc, w: w, remote: nc.RemoteAddr(), tls: state,
		streams: map[uint32]*stream{}, slack: make(chan struct{}, 1), halted: make(chan struct{}),
		sendWindow: defaultWindow, peerWindow: defaultWindow, peerFrame: maxFrame, peerTable: tableBytes,
	}
	c.written.L = &c.mu
	if state != nil && len(state.VerifiedChains) > 0 {
		c.commonName = state.VerifiedChains[0][0].Subject.CommonName
	}
	c.reader.init(c)
	switch w := w.(type) {
	case *socket:
		w.wrote = c.progress
	case *tlsWire:
		w.sock.wrote = c.progress
	case *blockingWire:
		w.wrote = c.progress
	}
	limitUnacknowledged(nc, s.o.KeepaliveTimeout)
	c.alarm = newTimer(c.expire)
	c.drain = newTimer(c.finishDrain)
	c.keepalive = newTimer(c.keepAlive)
	return c
}

// progress notes that the socket took something.
func (c *conn) progress() { c.moved.Store(c.s.o.Clock.Now().UnixNano()) }

// serve serves the connection until it ends. First are bytes that were read
// already; they begin with the preface.
func (c *conn) serve(first []byte) {
	if !c.s.add(c) {
		_ = c.nc.Close()
		return
	}
	now := c.s.o.Clock.Now()
	c.lastRead.Store(now.UnixNano())
	c.moved.Store(now.UnixNano())
	c.s.timers.set(c.keepalive, now.Add(c.s.o.KeepaliveTime))
	c.mu.Lock()
	b := c.out.room(128)
	b = appendFrameHeader(b, 6*3, frameSettings, 0, 0)
	b = appendSetting(b, settingMaxFrameSize, maxFrame)
	b = appendSetting(b, settingInitialWindowSize, recvWindow)
	b = appendSetting(b, settingMaxHeaderListSize, c.s.o.MaxHeaderBytes)
	if c.s.o.MaxStreams != ^uint32(0) {
		b[2] += 6
		b = appendSetting(b, settingMaxConcurrentStreams, c.s.o.MaxStreams)
	}
	b = appendWindowUpdate(b, 0, connWindow-defaultWindow)
	c.out.used(b)
	c.mu.Unlock()
	c.end(c.readAll(first))
}

// end ends the connection and everything on it. It runs on the reader goroutine,
// so that no receiver of a stream is closed from inside one of its own calls.
func (c *conn) end(why error) {
	var ce *connError
	c.dropBlock()
	c.mu.Lock()
	tell := errors.As(why, &ce) && !c.broken
	if tell {
		c.goAway(c.maxID, ce.code, ce.why)
	}
	c.closed = true
	streams := c.streams
	c.streams = nil
	cost := 0
	for _, s := range streams {
		s.gone.Store(true)
		cost += int(s.cost)
	}
	c.unhold(cost)
	c.s.metrics.streams.Add(-int64(len(streams)))
	c.s.calls.Add(-int64(c.calls))
	c.ready, c.attention, c.deadlines = nil, nil, nil
	c.forgetBacklog()
	c.mu.Unlock()
	for _, s := range streams {
		s.over(endCanceled)
	}
	if tell {
		if ce.limit != "" {
			c.s.limited(ce.limit, "remote", c.remote, "reason", ce.why)
		} else {
			c.s.o.Logger.Debug("connection of a client broke the protocol", "remote", c.remote, "reason", ce.why)
		}
	}
	if tell || c.quit {
		c.flushNow()
		c.linger()
	}
	if t, ok := c.w.(*tlsWire); ok && c.token() {
		t.goodbye()
		c.mu.Lock()
		c.surrender()
		c.mu.Unlock()
	}
	_ = c.w.close()
	c.dropOutput()
	for _, t := range []*timer{c.alarm, c.drain, c.keepalive} {
		c.s.timers.stop(t)
	}
	c.reader.release()
	c.s.remove(c)
}

// dropOutput waits until nobody writes any more, and tells the senders of what is
// left that it will not be. The socket is closed, so that nobody waits for it.
func (c *conn) dropOutput() {
	c.mu.Lock()
	for c.writing || c.telling > 0 {
		c.written.Wait()
	}
	c.writing = true // for good
	c.broken = true
	c.out.takeAll(&c.batch)
	c.mu.Unlock()
	c.told(false)
}

// toldOne ends what telling counts. The lock is held.
func (c *conn) toldOne() {
	if c.telling--; c.closed {
		c.written.Broadcast()
	}
}

// lingerTime and lingerBytes bound how long the client's bytes are thrown away so
// that it can read why its connection ends: closing a socket with unread bytes
// would take that away from it.
const (
	lingerTime  = time.Second
	lingerBytes = 1 << 20
)

func (c *conn) linger() {
	_ = c.nc.SetReadDeadline(time.Now().Add(lingerTime))
	if t, ok := c.w.(*tlsWire); ok && c.token() {
		t.goodbye()
		c.mu.Lock()
		c.surrender()
		c.mu.Unlock()
	}
	if h, ok := c.nc.(interface{ CloseWrite() error }); ok && c.quiet() {
		_ = h.CloseWrite()
	}
	for n := 0; n < lingerBytes; {
		c.pos, c.filled = 0, 0
		m, err := c.w.read(c.spaceFn, c.parkFn)
		if err != nil {
			return
		}
		n += m
	}
	c.s.limited(limitUnreadInput, "remote", c.remote)
}

// quiet says that nobody writes and that there is nothing to write.
func (c *conn) quiet() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.writing && c.out.empty()
}

// fail ends the connection from outside of its reader.
func (c *conn) fail(e *connError) {
	c.mu.Lock()
	c.doom(e)
	c.mu.Unlock()
	c.halt.Do(func() { close(c.halted) })
	_ = c.nc.SetReadDeadline(time.Unix(1, 0)) // has the reader look
}

// doom notes why the connection is to end, which fail then sees to. The lock is held.
func (c *conn) doom(e *connError) {
	if c.failure == nil {
		c.failure = e
	}
}

// hangUp closes the connection without a word: the client does not read, or
// there is nobody.
func (c *conn) hangUp() {
	c.halt.Do(func() { close(c.halted) })
	_ = c.nc.Close()
}

// goAway queues a GOAWAY. The lock is held.
func (c *conn) goAway(last uint32, code http2.ErrCode, why string) {
	b := appendGoAway(c.out.room(frameHeaderLen+8+len(why)), last, code, why)
	c.out.used(b)
}

// control queues a control frame; the lock is held. Who makes us answer and does
// not read the answers is cut off by the reader.
func (c *conn) control(n int, add func([]byte) []byte) {
	b := add(c.out.room(n))
	c.out.used(b)
	c.replies += len(b)
}

// reset queues a RST_STREAM. The lock is held.
func (c *conn) reset(id uint32, code http2.ErrCode) {
	b := appendRSTStream(c.out.room(frameHeaderLen+4), id, code)
	c.out.used(b)
	c.replies += len(b)
}

// remember notes that a stream was closed. The lock is held.
func (c *conn) remember(id uint32, reset bool) {
	c.recent[c.recentAt%uint8(len(c.recent))] = recentStream{id, reset}
	c.recentAt++
}

// recall says whether a stream was closed lately, and by whom.
func (c *conn) recall(id uint32) (found, reset bool) {
	for _, r := range c.recent {
		if r.id == id {
			return true, r.reset
		}
	}
	return false, false
}

// drop takes a stream out; the lock is held. It returns false if it was out
// already.
func (c *conn) drop(s *stream, reset bool) bool {
	if s.gone.Swap(true) {
		return false
	}
	delete(c.streams, s.id)
	c.unhold(int(s.cost))
	s.release() // what came since the call was over; who takes more looks at gone afterwards
	c.unlist(s)
	c.remember(s.id, reset)
	if s.m != nil && s.m.unary != nil {
		c.calls--
		c.s.calls.Add(-1)
	}
	if s.heapAt >= 0 {
		c.deadlines.remove(s)
	}
	c.s.metrics.streams.Add(-1)
	if c.drained && len(c.streams) == 0 {
		c.quit = true
	}
	return true
}

// hold counts bytes that the client has us keep, and returns false if that is too
// many; they count until unhold all the same. The more all clients have, the less
// one may, so that some is left for the others.
func (c *conn) hold(n int) bool {
	own, all := c.held.Add(int64(n)), c.s.held.Add(int64(n))
	most := int64(c.s.o.HeldBytes)
	one := 2 * int64(c.s.o.MaxReceiveBytes) // a large message must get through
	return own <= max(min(most/heldShare, heldBytes), one) && own+all <= max(most, 2*one)
}

// unhold gives back what hold counted.
func (c *conn) unhold(n int) {
	if n != 0 {
		c.held.Add(-int64(n))
		c.s.held.Add(-int64(n))
	}
}

// expire ends the calls whose deadline has passed.
func (c *conn) expire() {
	now := c.s.o.Clock.Now()
	for {
		c.mu.Lock()
		if len(c.deadlines) == 0 {
			c.alarmAt = time.Time{}
			c.mu.Unlock()
			return
		}
		s := c.deadlines[0]
		if s.deadline.After(now) {
			c.alarmAt = s.deadline
			c.s.timers.set(c.alarm, s.deadline) // under the lock, lest it override an earlier one
			c.mu.Unlock()
			return
		}
		c.deadlines.remove(s)
		c.mu.Unlock()
		s.timeOut()
	}
}

// watchDeadline has the stream end at its deadline. The lock is held.
func (c *conn) watchDeadline(s *stream) {
	c.deadlines.add(s)
	if c.deadlines[0] == s && (c.alarmAt.IsZero() || s.deadline.Before(c.alarmAt)) {
		c.alarmAt = s.deadline
		c.s.timers.set(c.alarm, s.deadline)
	}
}

// deadlineHeap is the streams with a deadline, the earliest first. It is no
// heap.Interface for the sake of the calls that pass through it.
type deadlineHeap []*stream

func (h *deadlineHeap) add(s *stream) {
	*h = append(*h, s)
	h.up(len(*h) - 1)
}

func (h *deadlineHeap) remove(s *stream) {
	i, last := int(s.heapAt), len(*h)-1
	moved := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	s.heapAt = -1
	if i == last {
		return
	}
	(*h)[i] = moved
	moved.heapAt = int32(i)
	h.down(i)
	h.up(int(moved.heapAt))
}

func (h deadlineHeap) up(i int) {
	s := h[i]
	for i > 0 {
		p := (i - 1) / 2
		if !s.deadline.Before(h[p].deadline) {
			break
		}
		h[i] = h[p]
		h[i].heapAt = int32(i)
		i = p
	}
	h[i] = s
	s.heapAt = int32(i)
}

func (h deadlineHeap) down(i int) {
	s := h[i]
	for {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if r := child + 1; r < len(h) && h[r].deadline.Before(h[child].deadline) {
			child = r
		}
		if !h[child].deadline.Before(s.deadline) {
			break
		}
		h[i] = h[child]
		h[i].heapAt = int32(i)
		i = child
	}
	h[i] = s
	s.heapAt = int32(i)
}
