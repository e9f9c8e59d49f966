package grpcserver

import (
	"encoding/binary"
	"errors"
	"os"
	"time"

	"golang.org/x/net/http2"
)

// reader is the state of a connection that only its reader goroutine touches.
type reader struct {
	buf     *[readBytes]byte // nil while waiting
	pos     int              // of the first byte that was not looked at
	filled  int
	rest    []byte // less than a frame, while waiting
	spaceFn func() []byte
	parkFn  func()

	now     time.Time // of the batch in hand
	arena   []byte    // what is left of the batch's messages
	last    *stream   // that a frame was for
	greeted bool      // its SETTINGS came

	unpack   *unpacker
	requests requests
	block    headerBlock

	idle, resets bucket
	pingAt       time.Time
	strikes      int
}

// headerBlock is a header block whose frames are coming in.
type headerBlock struct {
	open      bool
	stream    uint32
	end       bool // END_STREAM
	malformed bool // depends on itself
	frames    int
	bytes     []byte
	held      int // bytes that count among those held
}

func (r *reader) init(c *conn) {
	r.spaceFn, r.parkFn = r.space, r.park
	c.window.Store(connWindow)
	r.unpack = newUnpacker(c.s.o.MaxHeaderBytes)
	r.idle, r.resets = newBucket(idleBurst, idleRate), newBucket(resetBurst, resetRate)
}

// space returns where to read more into. There is room for more than a frame.
func (r *reader) space() []byte {
	if r.buf == nil {
		r.buf = readBuffers.Get().(*[readBytes]byte)
		r.pos, r.filled = 0, copy(r.buf[:], r.rest)
	}
	return r.buf[r.filled:]
}

// park keeps what is left of a batch and gives the buffer back.
func (r *reader) park() {
	if r.buf == nil {
		return
	}
	if r.pos == r.filled {
		r.rest = nil
	} else {
		r.rest = append(r.rest[:0], r.buf[r.pos:r.filled]...)
	}
	r.release()
}

func (r *reader) release() {
	if r.buf != nil {
		readBuffers.Put(r.buf)
		r.buf = nil
	}
}

// own returns a copy of b that belongs to whoever gets it. The messages of one
// batch share their memory.
func (r *reader) own(b []byte) []byte {
	if cap(r.arena) < len(b) {
		r.arena = make([]byte, 0, max(len(b), r.filled-r.pos+len(b)))
	}
	m := append(r.arena, b...)
	r.arena = m[len(m):]
	return m[:len(m):len(m)]
}

// readAll serves what the client sends until the connection ends, and says why
// it does.
func (c *conn) readAll(first []byte) error {
	copy(c.space(), first[len(preface):])
	c.filled = len(first) - len(preface)
	n := c.filled
	for {
		c.now = c.s.o.Clock.Now()
		c.lastRead.Store(c.now.UnixNano())
		c.batches.Add(1)
		c.s.metrics.reads.Add(1)
		c.s.metrics.received.Add(int64(n))
		c.mu.Lock()
		c.parsing = true
		c.mu.Unlock()
		bad := c.parse()
		c.arena = nil
		if bad == nil {
			bad = c.failed()
		}
		c.mu.Lock()
		c.parsing = false
		mine := !c.writing
		if mine {
			c.writing = true
		}
		c.mu.Unlock()
		if mine {
			c.flush(false)
		}
		if bad == nil {
			bad = c.awaitRoom()
		}
		if bad != nil {
			return bad
		}
		var err error
		if n, err = c.w.read(c.spaceFn, c.parkFn); err != nil {
			if bad := c.failed(); bad != nil {
				return bad
			}
			return err
		}
		c.filled += n
	}
}

// widen gives back the connection's window, unless calls are held back: what they
// take is bounded by it. The lock is held.
func (c *conn) widen() {
	used := connWindow - c.window.Load()
	if used < connWindow/4 || c.backlog.first != nil {
		return
	}
	c.window.Add(used)
	c.control(frameHeaderLen+4, func(b []byte) []byte { return appendWindowUpdate(b, 0, uint32(used)) })
}

// awaitRoom waits while very many calls are with their handlers or held back, or
// while very much waits for a full socket: who sends calls faster than they can be
// answered, or than it reads the answers, is not read for a while. While answers
// wait for the client's windows it is read all the same, as those are widened by
// what it sends, and so may be the room that handlers wait for. Who does not even
// read what control frames are answered with is cut off.
func (c *conn) awaitRoom() error {
	if c.working.Load() < maxWorking && c.backlog.n.Load() == 0 && !c.stuffed(1) || !c.pauses(1) {
		return nil
	}
	c.waiting.Store(true)
	defer c.waiting.Store(false)
	stall := c.s.o.Clock.NewTimer(c.s.o.StreamStall)
	defer stall.Stop()
	for c.pauses(2) {
		select {
		case <-c.slack:
		case <-c.halted:
			return nil
		case <-stall.C():
			c.mu.Lock()
			unread := c.blocked && c.replies > maxReplies
			c.mu.Unlock()
			if unread {
				return calm(limitReplies, "answers to control frames are not read")
			}
			stall.Reset(c.s.o.StreamStall)
		}
	}
	return nil
}

// stuffed says that the socket is full and that much waits for it: more than a
// part of what leads to refusals.
func (c *conn) stuffed(part int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isStuffed(part)
}

func (c *conn) isStuffed(part int) bool {
	most := c.s.o.OutputBytes / 8 / part
	return c.blocked && (c.queued.Load()+int64(c.out.bytes) > int64(most) || c.replies > maxReplies/part)
}

// pauses says that the reader is to wait, or, with a higher part, to go on
// waiting.
func (c *conn) pauses(part int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isStuffed(part) {
		return true
	}
	if c.queued.Load() > 0 && !c.blocked {
		return false // for the client's windows, as far as is known
	}
	return c.backlog.first != nil || c.working.Load() >= int64(maxWorking/part)
}

// nudge has the reader look whether it may go on.
func (c *conn) nudge() {
	if c.waiting.Load() {
		select {
		case c.slack <- struct{}{}:
		default:
		}
	}
}

// answeredOne notes that a handler has replied.
func (c *conn) answeredOne() {
	if c.working.Add(-1) == maxWorking/2-1 {
		c.nudge()
		if c.backlog.n.Load() > 0 { // this call's end need not have anything written
			c.mu.Lock()
			c.kick()
			c.mu.Unlock()
		}
	}
}

// parse handles all frames in the buffer.
func (c *conn) parse() error {
	for {
		b := c.buf[c.pos:c.filled]
		if len(b) < frameHeaderLen {
			break
		}
		h := parseFrameHeader(b)
		if h.length > maxFrame {
			return &connError{code: http2.ErrCodeFrameSize, why: "frame is larger than SETTINGS_MAX_FRAME_SIZE"}
		}
		if len(b) < frameHeaderLen+h.length {
			break
		}
		c.pos += frameHeaderLen + h.length
		if err := c.frame(h, b[frameHeaderLen:frameHeaderLen+h.length]); err != nil {
			return err
		}
	}
	if c.pos > 0 {
		c.filled = copy(c.buf[:], c.buf[c.pos:c.filled])
		c.pos = 0
	}
	return nil
}

// spend takes the cost of a frame that carries no call. What the client was sent
// counts for it: who reads much sends many WINDOW_UPDATE frames.
func (c *conn) spend() bool {
	if c.idle.take(c.now) {
		return true
	}
	c.idle.give(float64(c.earned.Swap(0)) / earnedBytes)
	return c.idle.take(c.now)
}

func frameSize(why string) *connError { return &connError{code: http2.ErrCodeFrameSize, why: why} }

// frame handles one frame. An error ends the connection.
func (c *conn) frame(h frameHeader, p []byte) error {
	if c.block.open && (h.typ != frameContinuation || h.stream != c.block.stream) {
		return protocolError("frame inside of a header block")
	}
	if !c.greeted {
		if h.typ != frameSettings || h.flags&flagAck != 0 {
			return protocolError("the first frame is not SETTINGS")
		}
		c.greeted = true
	}
	switch h.typ {
	case frameData:
		return nilOr(c.dataFrame(h, p))
	case frameHeaders:
		return nilOr(c.headersFrame(h, p))
	case frameContinuation:
		return nilOr(c.continuationFrame(h, p))
	case frameWindowUpdate:
		return nilOr(c.windowFrame(h, p))
	case frameRSTStream:
		return nilOr(c.resetFrame(h, p))
	}
	if !c.spend() {
		return calm(limitFlood, "too many frames that carry no calls")
	}
	switch h.typ {
	case frameSettings:
		return nilOr(c.settingsFrame(h, p))
	case framePing:
		return nilOr(c.pingFrame(h, p))
	case framePriority:
		switch {
		case h.stream == 0:
			return protocolError("PRIORITY on stream 0")
		case len(p) != 5:
			c.streamError(h.stream, http2.ErrCodeFrameSize)
		case binary.BigEndian.Uint32(p)&maxWindow == h.stream:
			c.streamError(h.stream, http2.ErrCodeProtocol)
		}
	case framePushPromise:
		return protocolError("PUSH_PROMISE from a client")
	case frameGoAway:
		switch {
		case h.stream != 0:
			return protocolError("GOAWAY on a stream")
		case len(p) < 8:
			return frameSize("GOAWAY is too short")
		}
	}
	return nil // frames of unknown types are ignored
}

// nilOr makes an error of a connError, nil of nil.
func nilOr(e *connError) error {
	if e == nil {
		return nil
	}
	return e
}

// unpad returns the payload of a frame without its padding.
func unpad(h frameHeader, p []byte) ([]byte, *connError) {
	if h.flags&flagPadded == 0 {
		return p, nil
	}
	if len(p) == 0 {
		return nil, frameSize("padded frame without a pad length")
	}
	n := int(p[0])
	if p = p[1:]; n > len(p) {
		return nil, protocolError("more padding than payload")
	}
	return p[:len(p)-n], nil
}

// find returns an open stream, nil if there is none of that number.
func (c *conn) find(id uint32) *stream {
	if s := c.last; s != nil && s.id == id && !s.gone.Load() {
		return s
	}
	c.mu.Lock()
	s := c.streams[id]
	c.mu.Unlock()
	if s != nil {
		c.last = s
	}
	return s
}

// closedStream judges a frame on a stream that is not open. Nil means that it is
// to be ignored.
func (c *conn) closedStream(id uint32) *connError {
	c.mu.Lock()
	defer c.mu.Unlock()
	if id%2 == 0 || id > c.maxID {
		return protocolError("frame on a stream that was not begun")
	}
	if found, reset := c.recall(id); found && !reset {
		c.reset(id, http2.ErrCodeStreamClosed)
	}
	return nil
}

func (c *conn) dataFrame(h frameHeader, p []byte) *connError {
	if h.stream == 0 {
		return protocolError("DATA on stream 0")
	}
	switch left := c.window.Add(-int64(h.length)); {
	case left < 0:
		return &connError{code: http2.ErrCodeFlowControl, why: "more data than the connection's window"}
	case left <= connWindow-connWindow/4:
		c.mu.Lock()
		c.widen()
		c.mu.Unlock()
	}
	data, bad := unpad(h, p)
	if bad != nil {
		return bad
	}
	end := h.flags&flagEndStream != 0
	if len(data) < messagePrefix && !end && !c.spend() { // no message is shorter
		return calm(limitFlood, "too many frames that carry no data")
	}
	s := c.find(h.stream)
	if s == nil {
		if !c.spend() {
			return calm(limitFlood, "too many frames on closed streams")
		}
		return c.closedStream(h.stream)
	}
	if s.remoteDone.Load() {
		c.streamError(h.stream, http2.ErrCodeStreamClosed)
		return nil
	}
	if s.window.Add(-int32(h.length)) < 0 {
		c.streamError(h.stream, http2.ErrCodeFlowControl)
		return nil
	}
	s.received += int64(len(data))
	if s.req.length >= 0 && (s.received > s.req.length || end && s.received < s.req.length) {
		c.streamError(h.stream, http2.ErrCodeProtocol)
		return nil
	}
	if pad := h.length - len(data); pad > 0 {
		s.credit(pad)
	}
	if end {
		s.remoteDone.Store(true)
	}
	s.take(data, end)
	return nil
}

func (c *conn) headersFrame(h frameHeader, p []byte) *connError {
	if h.stream == 0 {
		return protocolError("HEADERS on stream 0")
	}
	p, bad := unpad(h, p)
	if bad != nil {
		return bad
	}
	malformed := false
	if h.flags&flagPriority != 0 {
		if len(p) < 5 {
			return frameSize("HEADERS is too short for its priority")
		}
		malformed = binary.BigEndian.Uint32(p)&maxWindow == h.stream
		p = p[5:]
	}
	end := h.flags&flagEndStream != 0
	if h.flags&flagEndHeaders != 0 {
		return c.headerBlock(h.stream, p, end, malformed)
	}
	c.block = headerBlock{open: true, stream: h.stream, end: end, malformed: malformed, frames: 1, bytes: append([]byte(nil), p...)}
	return nil
}

func (c *conn) continuationFrame(h frameHeader, p []byte) *connError {
	b := &c.block
	if !b.open {
		return protocolError("CONTINUATION without a header block")
	}
	b.frames++
	if b.frames > maxContinuations || uint32(len(b.bytes)+len(p)) > 2*c.s.o.MaxHeaderBytes+maxFrame {
		return calm(limitContinued, "a header block is too long")
	}
	b.bytes = append(b.bytes, p...)
	b.held += len(p)
	if !c.hold(len(p)) {
		return calm(limitHeld, "too many bytes of header blocks that are not complete")
	}
	if h.flags&flagEndHeaders == 0 {
		return nil
	}
	whole := *b
	c.dropBlock()
	return c.headerBlock(whole.stream, whole.bytes, whole.end, whole.malformed)
}

// dropBlock forgets a header block whose frames were coming in.
func (c *conn) dropBlock() {
	c.unhold(c.block.held)
	c.block = headerBlock{}
}

// headerBlock handles a whole header block. It is decoded in any case, as it may
// change the table.
func (c *conn) headerBlock(id uint32, block []byte, end, malformed bool) *connError {
	if err := c.unpack.decode(block); err != nil {
		return &connError{code: http2.ErrCodeCompression, why: err.Error()}
	}
	if id > c.maxID && id%2 == 1 { // maxID is only set here
		return c.begin(id, end, malformed)
	}
	if !c.spend() {
		return calm(limitFlood, "too many header blocks that begin no calls")
	}
	s := c.find(id)
	if s == nil {
		if id%2 == 0 {
			return protocolError("a client begins a stream of even number")
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		switch found, reset := c.recall(id); {
		case !found:
			return protocolError("a stream of a lower number than one before")
		case !reset:
			return &connError{code: http2.ErrCodeStreamClosed, why: "HEADERS on a closed stream"}
		}
		return nil
	}
	switch {
	case s.remoteDone.Load():
		c.streamError(id, http2.ErrCodeStreamClosed)
		return nil
	case !end || malformed || !trailing(c.unpack.fields), s.req.length >= 0 && s.received != s.req.length:
		c.streamError(id, http2.ErrCodeProtocol)
		return nil
	}
	s.remoteDone.Store(true)
	s.take(nil, true)
	return nil
}

// trailing says that fields may be a trailer.
func trailing(fields []*field) bool {
	for _, f := range fields {
		if f.kind == kindInvalid || f.name[0] == ':' {
			return false
		}
	}
	return true
}

// streamError resets a stream, which may not be open.
func (c *conn) streamError(id uint32, code http2.ErrCode) {
	c.mu.Lock()
	if id > c.maxID && id%2 == 1 {
		// It never opens. What may follow is on its way already.
		c.maxID = id
	}
	s := c.streams[id]
	c.reset(id, code)
	if s == nil {
		c.remember(id, true)
		c.mu.Unlock()
		return
	}
	mine := c.drop(s, true)
	c.mu.Unlock()
	if mine {
		s.over(endCanceled)
	}
}

func (c *conn) resetFrame(h frameHeader, p []byte) *connError {
	if h.stream == 0 {
		return protocolError("RST_STREAM on stream 0")
	}
	if len(p) != 4 {
		return frameSize("RST_STREAM must have 4 bytes")
	}
	s := c.find(h.stream)
	if s == nil {
		if !c.spend() {
			return calm(limitFlood, "too many frames on closed streams")
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if h.stream%2 == 0 || h.stream > c.maxID {
			return protocolError("RST_STREAM on a stream that was not begun")
		}
		return nil
	}
	if c.now.Sub(s.began) < youngCall && !c.resets.take(c.now) {
		return calm(limitResets, "too many calls are given up as soon as they are made")
	}
	c.mu.Lock()
	mine := c.drop(s, false)
	c.mu.Unlock()
	if mine {
		s.over(endCanceled)
	}
	return nil
}

func (c *conn) windowFrame(h frameHeader, p []byte) *connError {
	if len(p) != 4 {
		return frameSize("WINDOW_UPDATE must have 4 bytes")
	}
	n := int64(binary.BigEndian.Uint32(p) & maxWindow)
	if !c.spend() {
		return calm(limitFlood, "too many frames that carry no calls")
	}
	if h.stream == 0 {
		if n == 0 {
			return protocolError("WINDOW_UPDATE of 0")
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.sendWindow += n; c.sendWindow > maxWindow {
			return &connError{code: http2.ErrCodeFlowControl, why: "the connection's window is too large"}
		}
		return nil
	}
	c.mu.Lock()
	if s := c.streams[h.stream]; s != nil {
		var code http2.ErrCode
		switch {
		case n == 0:
			code = http2.ErrCodeProtocol
		case !c.raise(s, n):
			code = http2.ErrCodeFlowControl
		}
		c.mu.Unlock()
		if code != 0 {
			c.streamError(h.stream, code)
		}
		return nil
	}
	defer c.mu.Unlock()
	if h.stream%2 == 0 || h.stream > c.maxID {
		return protocolError("WINDOW_UPDATE on a stream that was not begun")
	}
	return nil
}

func (c *conn) settingsFrame(h frameHeader, p []byte) *connError {
	switch {
	case h.stream != 0:
		return protocolError("SETTINGS on a stream")
	case h.flags&flagAck != 0 && len(p) > 0:
		return frameSize("SETTINGS with ACK and values")
	case len(p)%6 != 0:
		return frameSize("SETTINGS is no list of settings")
	case h.flags&flagAck != 0:
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for ; len(p) > 0; p = p[6:] {
		v := binary.BigEndian.Uint32(p[2:])
		switch binary.BigEndian.Uint16(p) {
		case settingHeaderTableSize:
			c.shrunk = c.shrunk || v < c.peerTable
			c.peerTable = v
		case settingEnablePush:
			if v > 1 {
				return protocolError("SETTINGS_ENABLE_PUSH is neither 0 nor 1")
			}
		case settingInitialWindowSize:
			if v > maxWindow {
				return &connError{code: http2.ErrCodeFlowControl, why: "SETTINGS_INITIAL_WINDOW_SIZE is too large"}
			}
			d := int64(v) - c.peerWindow
			c.peerWindow = int64(v)
			c.idle.left -= float64(len(c.streams)) / 64 // it costs that much more
			for _, s := range c.streams {
				if !c.raise(s, d) {
					return &connError{code: http2.ErrCodeFlowControl, why: "SETTINGS_INITIAL_WINDOW_SIZE makes a window too large"}
				}
			}
		case settingMaxFrameSize:
			if v < 1<<14 || v > 1<<24-1 {
				return protocolError("SETTINGS_MAX_FRAME_SIZE is out of range")
			}
			c.peerFrame = int(v)
		}
	}
	c.control(frameHeaderLen, func(b []byte) []byte { return appendFrameHeader(b, 0, frameSettings, flagAck, 0) })
	return nil
}

func (c *conn) pingFrame(h frameHeader, p []byte) *connError {
	if h.stream != 0 {
		return protocolError("PING on a stream")
	}
	if len(p) != 8 {
		return frameSize("PING must have 8 bytes")
	}
	data := [8]byte(p)
	if h.flags&flagAck == 0 {
		return c.ping(data)
	}
	if data == drainingPing {
		c.finishDrainIfAsked()
	}
	return nil
}

// finishDrainIfAsked ends a drain whose first part the client has seen.
func (c *conn) finishDrainIfAsked() {
	c.mu.Lock()
	asked := c.draining
	c.mu.Unlock()
	if asked {
		c.s.timers.stop(c.drain)
		c.finishDrain()
	}
}

// failed is why another goroutine ended the connection, nil if none did.
func (c *conn) failed() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return nilOr(c.failure)
}

// timedOut says that a read deadline has passed.
func timedOut(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }
