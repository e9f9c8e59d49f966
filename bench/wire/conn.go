// Package wire is the client side of gRPC over HTTP/2, made to cost little: a load generator shares the machine with the
// server, so what it spends, the server lacks.
//
// It speaks cleartext HTTP/2 and TLS, keeps both sides' flow control, and knows no retries, deadlines or compression. Conn is
// the main type; a Call belongs to its user, who may use it again and again, so that a call allocates nothing. What a burst of
// answers leads to is written in one system call. Invariants:
//
//	W1: each Start that returned nil is followed by exactly one End, also when the connection fails.
//	W2: callbacks of one Conn run one after another, on its reading goroutine, and without a lock of Conn held.
//	W3: what waits to be sent is bounded by what the user has started: requests keep within the server's windows and its
//	    limit of streams, and frames that answer the server's own are bounded (maxUnsent).
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
)

const (
	streamWindow = 8 << 20  // bytes a stream may receive that we have not yet taken
	connWindow   = 64 << 20 // bytes a connection may
	frameMax     = 16384    // HTTP/2's default, which we leave as it is
	firstWindow  = 65535    // HTTP/2's initial window
	maxWindow    = 1<<31 - 1
	frameHeader  = 9
	prefixBytes  = 5 // gRPC's message prefix: compressed flag, length
	ringSize     = 256
)

// ErrClosed is the cause of what ends with Close.
var ErrClosed = errors.New("connection closed")

// Conn is one connection. Its methods may be called by any goroutine, also from callbacks.
type Conn struct {
	nc       net.Conn // read from, and closed
	out      writer
	address  string
	onClose  func(error)
	ready    chan struct{} // closed with the server's first settings, or with the connection
	closed   chan struct{} // closed when the last callback has returned
	received atomic.Int64

	mu          sync.Mutex
	err         error // why it ended; no call begins any more
	draining    *Error
	header      headerWriter
	buf         []byte // frames not yet written
	held        int    // while above 0 buf is kept for a common write
	sent        int64
	window      int64 // bytes the server still takes on this connection
	streamFirst int64 // its window of a new stream
	frameMost   int   // its largest frame
	streamsMost uint32
	nextID      uint32
	open        uint32
	ring        [ringSize]*Call // open streams by id, where the place was free
	others      map[uint32]*Call
	waiting     []*Call // for a stream
	blocked     []*Call // for window, oldest first
	posted      []func()
}

// writer is where frames go.
type writer interface {
	Write([]byte) (int, error)
}

// Call is one call, made of any of a Conn. Its user owns it; it may be used again after End, also within it.
type Call struct {
	Handler Handler
	// Pieces has the messages' bytes handed out as they come, through Handler.Piece, instead of whole.
	Pieces bool

	conn     *Conn
	serial   uint64 // counts Starts
	id       uint32 // 0 while it waits for a stream
	method   string
	end      bool   // our side ends after what is pending
	ended    bool   // our side has ended
	blocked  bool   // in conn.blocked
	pending  []byte // to be sent, from pendAt on
	pendAt   int
	window   int64 // bytes the server still takes on this stream
	taken    int   // bytes since the stream's last window update
	prefix   [prefixBytes]byte
	prefixed int
	left     int    // bytes of the message that are still to come
	part     []byte // the message so far, unless it is handed out in pieces
	answered bool   // the response's headers were seen
}

// Handler gets what comes of calls. Byte slices are valid during the callback only.
type Handler interface {
	// Message gets each message of a call without Pieces.
	Message(c *Call, m []byte)
	// Piece gets the next bytes of a message of a call with Pieces, and whether they are its last.
	Piece(c *Call, p []byte, last bool)
	// End comes once, last; err is nil if the status was OK.
	End(c *Call, err *Error)
}

// Error is a call's end other than OK: a status the server sent, or Unavailable for what befell the connection.
type Error struct {
	Code    codes.Code
	Message string
}

func (e *Error) Error() string { return e.Code.String() + ": " + e.Message }

func unavailable(format string, args ...any) *Error {
	return &Error{Code: codes.Unavailable, Message: fmt.Sprintf(format, args...)}
}

// Start begins a call with its first message; with end that is also the last. The message is copied. An error means that
// the call did not begin and that End will not come.
func (c *Conn) Start(k *Call, method string, message []byte, end bool) *Error {
	if len(message) > maxMessage {
		return &Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("a request of %d bytes: at most %d can be sent", len(message), maxMessage)}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return unavailable("%v", c.err)
	}
	if c.draining != nil {
		return c.draining
	}
	k.serial++
	k.conn, k.method, k.end, k.ended, k.blocked, k.answered = c, method, end, false, false, false
	k.id, k.taken, k.prefixed, k.left, k.pendAt = 0, 0, 0, 0, 0
	k.pending, k.part = k.pending[:0], k.part[:0]
	if c.open >= c.streamsMost {
		k.pending = appendMessage(k.pending, message)
		c.waiting = append(c.waiting, k)
		return nil
	}
	c.begin(k)
	c.send(k, message)
	c.flush()
	return nil
}

// Send sends one more message on a call that was started without end.
func (c *Conn) Send(k *Call, message []byte) *Error {
	if len(message) > maxMessage {
		return &Error{Code: codes.ResourceExhausted, Message: fmt.Sprintf("a request of %d bytes: at most %d can be sent", len(message), maxMessage)}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.err != nil:
		return unavailable("%v", c.err)
	case k.end || k.conn != c:
		return &Error{Code: codes.Internal, Message: "the call takes no more messages"}
	case k.id == 0: // still waits for a stream
		k.pending = appendMessage(k.pending, message)
		return nil
	}
	c.send(k, message)
	c.flush()
	return nil
}

// Cancel ends a call with a code and text of the user's, unless it ends by itself before. It returns at once.
func (c *Conn) Cancel(k *Call, code codes.Code, text string) {
	c.mu.Lock()
	serial := k.serial
	c.mu.Unlock()
	c.post(func() {
		c.mu.Lock()
		if k.conn != c || k.serial != serial { // it has ended
			c.mu.Unlock()
			return
		}
		if k.id == 0 {
			c.waiting, k.conn = drop(c.waiting, k), nil
		} else {
			c.buf = appendReset(c.buf, k.id, http2.ErrCodeCancel)
			c.remove(k)
		}
		c.flush()
		c.mu.Unlock()
		k.Handler.End(k, &Error{Code: code, Message: text})
	})
}

// Hold keeps back what is started until as many Releases, so that it goes out in one write.
func (c *Conn) Hold() {
	c.mu.Lock()
	c.held++
	c.mu.Unlock()
}

// Release ends one Hold.
func (c *Conn) Release() {
	c.mu.Lock()
	c.held--
	c.flush()
	c.mu.Unlock()
}

// SetField sets a metadata field that all further calls carry.
func (c *Conn) SetField(name, value string) {
	c.mu.Lock()
	c.header.set(name, value)
	c.mu.Unlock()
}

// Bytes are those of frames sent and of bytes received so far, without what TLS adds.
func (c *Conn) Bytes() (sent, received int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sent, c.received.Load()
}

// Close ends the connection, and open calls with Unavailable. It waits for the last callback, so it must not be called from one.
func (c *Conn) Close() {
	c.fail(ErrClosed)
	<-c.closed
}

// fail lets the reading goroutine end everything.
func (c *Conn) fail(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.mu.Unlock()
	c.nc.Close() // a reader that waits returns
}

// post has f run on the reading goroutine. It does not run on a connection that has ended.
func (c *Conn) post(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.posted = append(c.posted, f)
		c.nc.SetReadDeadline(time.Unix(1, 0)) // wakes the reader; on a broken connection it needs no waking
	}
}

// begin opens a stream. c.mu is held, as for all below.
func (c *Conn) begin(k *Call) {
	k.id = c.nextID
	c.nextID += 2
	c.open++
	k.window = c.streamFirst
	if slot := &c.ring[k.id>>1%ringSize]; *slot == nil {
		*slot = k
	} else {
		c.others[k.id] = k
	}
	c.buf = c.header.append(c.buf, k.id, k.method, c.frameMost)
	if c.nextID > maxStreamID && c.draining == nil {
		c.draining = unavailable("the connection has used up its stream ids")
	}
}

const maxStreamID = 1<<31 - 1000

// send writes a message as far as the windows allow and keeps the rest.
func (c *Conn) send(k *Call, message []byte) {
	n := len(message) + prefixBytes
	if k.pendAt == len(k.pending) && n <= c.frameMost && int64(n) <= c.window && int64(n) <= k.window {
		c.window -= int64(n)
		k.window -= int64(n)
		c.buf = appendFrameHeader(c.buf, n, http2.FrameData, endFlag(k.end), k.id)
		c.buf = appendMessage(c.buf, message)
		k.ended = k.end
		return
	}
	k.pending = appendMessage(k.pending, message)
	if !k.blocked && !c.sendPending(k) {
		c.block(k)
	}
}

func (c *Conn) block(k *Call) {
	k.blocked = true
	c.blocked = append(c.blocked, k)
}

// sendPending sends what the windows allow and tells if that was all.
func (c *Conn) sendPending(k *Call) bool {
	for k.pendAt < len(k.pending) {
		n := int(min(int64(len(k.pending)-k.pendAt), c.window, k.window, int64(c.frameMost)))
		if n <= 0 {
			return false
		}
		last := k.pendAt+n == len(k.pending)
		c.buf = appendFrameHeader(c.buf, n, http2.FrameData, endFlag(k.end && last), k.id)
		c.buf = append(c.buf, k.pending[k.pendAt:k.pendAt+n]...)
		k.pendAt += n
		c.window -= int64(n)
		k.window -= int64(n)
		k.ended = k.end && last
	}
	k.pending, k.pendAt = k.pending[:0], 0
	return true
}

// unblock sends what waited for a window.
func (c *Conn) unblock() {
	kept := c.blocked[:0]
	for _, k := range c.blocked {
		if k.blocked = !c.sendPending(k); k.blocked {
			kept = append(kept, k)
		}
	}
	clear(c.blocked[len(kept):])
	c.blocked = kept
}

func (c *Conn) lookup(id uint32) *Call {
	if k := c.ring[id>>1%ringSize]; k != nil && k.id == id {
		return k
	}
	if len(c.others) == 0 {
		return nil
	}
	return c.others[id]
}

// remove closes a stream on our side's books and lets the next call begin.
func (c *Conn) remove(k *Call) {
	if slot := &c.ring[k.id>>1%ringSize]; *slot == k {
		*slot = nil
	} else {
		delete(c.others, k.id)
	}
	if k.blocked {
		c.blocked, k.blocked = drop(c.blocked, k), false
	}
	k.conn, k.id = nil, 0
	c.open--
	for len(c.waiting) > 0 && c.open < c.streamsMost && c.draining == nil {
		next := c.waiting[0]
		c.waiting[0] = nil
		c.waiting = c.waiting[1:]
		c.begin(next)
		if !c.sendPending(next) {
			c.block(next)
		}
	}
}

// drop takes a call out of a queue.
func drop(queue []*Call, k *Call) []*Call {
	if i := slices.Index(queue, k); i >= 0 {
		return slices.Delete(queue, i, i+1)
	}
	return queue
}

// flush writes what is there, unless a burst of answers is being taken or the user holds it back.
func (c *Conn) flush() {
	if c.held > 0 || len(c.buf) == 0 || c.err != nil {
		return
	}
	c.sent += int64(len(c.buf))
	if _, err := c.out.Write(c.buf); err != nil {
		c.err = fmt.Errorf("writing to %s: %w", c.address, err)
		c.nc.Close()
	}
	if c.buf = c.buf[:0]; cap(c.buf) > keepBytes {
		c.buf = nil
	}
}

// keepBytes is how large a buffer is kept for the next use.
const keepBytes = 1 << 20

func endFlag(end bool) http2.Flags {
	if end {
		return http2.FlagDataEndStream
	}
	return 0
}

func appendMessage(b, message []byte) []byte {
	b = append(b, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(len(message)))
	return append(b, message...)
}

func appendFrameHeader(b []byte, n int, t http2.FrameType, flags http2.Flags, stream uint32) []byte {
	b = append(b, byte(n>>16), byte(n>>8), byte(n), byte(t), byte(flags))
	return binary.BigEndian.AppendUint32(b, stream)
}

func appendWindow(b []byte, stream uint32, bytes int) []byte {
	b = appendFrameHeader(b, 4, http2.FrameWindowUpdate, 0, stream)
	return binary.BigEndian.AppendUint32(b, uint32(bytes))
}

func appendReset(b []byte, stream uint32, code http2.ErrCode) []byte {
	b = appendFrameHeader(b, 4, http2.FrameRSTStream, 0, stream)
	return binary.BigEndian.AppendUint32(b, uint32(code))
}
