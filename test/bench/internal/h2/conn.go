// Package h2 is the client side of gRPC over plain HTTP/2, made to cost little.
//
// It is for load only: a benchmark's generator shares the machine with the server, so what it spends, the server lacks.
// It does no TLS, no retries, no deadlines and no compression. Conn is the main type. Invariants:
//
//	H1: every Call ends with exactly one callback, also when the connection fails.
//	H2: callbacks of one Conn run one after another, on its reader.
//	H3: the queue of unsent requests is bounded by the calls the user has open.
package h2

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

const (
	streamWindow = 4 << 20  // bytes a stream may receive unacknowledged
	connWindow   = 64 << 20 // bytes a connection may
	frameMax     = 16384    // HTTP/2's default
	firstWindow  = 65535    // HTTP/2's initial window, ours to send within
	dialWithin   = time.Second
	prefixBytes  = 5 // gRPC's message prefix: compressed flag, length
)

// MaxRequest is the longest message that Call and Stream.Send take: it fits a stream's first window, so that only the
// connection's window need be kept.
const MaxRequest = firstWindow - prefixBytes

// ErrClosed is what open calls end with when the connection is closed.
var ErrClosed = errors.New("h2: connection closed")

// StatusError is a call's end other than OK.
type StatusError struct {
	Code    string // gRPC status code, decimal
	Message string // percent-encoded, as received
}

func (e *StatusError) Error() string { return "grpc status " + e.Code + ": " + e.Message }

// Conn is one connection. All methods may be called by any goroutine, also from callbacks.
type Conn struct {
	nc      net.Conn
	address string
	wake    chan struct{} // capacity 1: something to write
	done    chan struct{} // closed with the connection

	mu      sync.Mutex
	queue   []outgoing
	control []byte // encoded frames that need no window
	window  int64  // bytes the server still takes
	next    uint32 // stream id
	streams map[uint32]*call
	err     error // why it ended
}

// outgoing is a request that waits to be written. data is a whole gRPC message with its prefix.
type outgoing struct {
	id   uint32
	path string // empty: the stream has its headers already
	data []byte
	end  bool
}

// call is one open stream.
type call struct {
	message  func([]byte) // each message; nil for unary calls
	done     func(body []byte, err error)
	buf      []byte // a message begun, with its prefix
	body     []byte // the unary answer, once whole
	have     bool
	received int // bytes since the stream's last window update
}

// Dial connects to a server at host:port.
func Dial(address string) (*Conn, error) {
	nc, err := net.DialTimeout("tcp", address, dialWithin)
	if err != nil {
		return nil, err
	}
	c := &Conn{
		nc: nc, address: address, wake: make(chan struct{}, 1), done: make(chan struct{}),
		window: firstWindow, next: 1, streams: make(map[uint32]*call),
	}
	c.control = append(c.control, http2.ClientPreface...)
	c.control = appendFrame(c.control, http2.FrameSettings, 0, 0, binary.BigEndian.AppendUint32([]byte{0, byte(http2.SettingInitialWindowSize)}, streamWindow))
	c.control = appendWindow(c.control, 0, connWindow-firstWindow)
	go c.write()
	go c.read()
	c.wakeWriter()
	return c, nil
}

// Call sends a unary request and returns; done is called once with the answer, which is valid only during the callback.
// The request is copied.
func (c *Conn) Call(path string, request []byte, done func(body []byte, err error)) {
	c.open(path, request, &call{done: done}, true)
}

// Do is Call that waits. The answer is the caller's.
func (c *Conn) Do(path string, request []byte, within time.Duration) ([]byte, error) {
	type answer struct {
		body []byte
		err  error
	}
	ch := make(chan answer, 1)
	c.Call(path, request, func(body []byte, err error) { ch <- answer{append([]byte(nil), body...), err} })
	select {
	case a := <-ch:
		return a.body, a.err
	case <-time.After(within):
		return nil, fmt.Errorf("%s at %s: no answer within %v", path, c.address, within)
	}
}

// Stream is an open call that sends and receives many messages.
type Stream struct {
	c  *Conn
	id uint32
}

// Open starts a stream. message is called with each message, valid only during the callback; done once, at the end.
// All that is sent on it must not exceed MaxRequest bytes in its life.
func (c *Conn) Open(path string, first []byte, message func([]byte), done func(error)) *Stream {
	id := c.open(path, first, &call{message: message, done: func(_ []byte, err error) { done(err) }}, false)
	return &Stream{c: c, id: id}
}

// Send sends one more message.
func (s *Stream) Send(message []byte) {
	s.c.mu.Lock()
	s.c.queue = append(s.c.queue, outgoing{id: s.id, data: envelope(message)})
	s.c.mu.Unlock()
	s.c.wakeWriter()
}

// Close ends the connection and every open call with ErrClosed.
func (c *Conn) Close() { c.fail(ErrClosed) }

func (c *Conn) open(path string, request []byte, k *call, end bool) uint32 {
	if len(request) > MaxRequest {
		k.done(nil, fmt.Errorf("h2: %s with %d bytes: at most %d fit", path, len(request), MaxRequest))
		return 0
	}
	c.mu.Lock()
	if err := c.err; err != nil {
		c.mu.Unlock()
		k.done(nil, err)
		return 0
	}
	// Stream ids must rise on the wire, so id and place in the queue are taken together.
	id := c.next
	c.next += 2
	c.streams[id] = k
	c.queue = append(c.queue, outgoing{id: id, path: path, data: envelope(request), end: end})
	c.mu.Unlock()
	c.wakeWriter()
	return id
}

func envelope(message []byte) []byte {
	b := make([]byte, prefixBytes, prefixBytes+len(message))
	binary.BigEndian.PutUint32(b[1:], uint32(len(message)))
	return append(b, message...)
}

func (c *Conn) wakeWriter() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// fail ends everything that is open.
func (c *Conn) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	open := c.streams
	c.streams = nil
	c.mu.Unlock()
	close(c.done)
	c.nc.Close()
	for _, k := range open {
		k.done(nil, err)
	}
}

// write sends what waits, as much as the window allows, in one write.
func (c *Conn) write() {
	w := newHeaderWriter(c.address)
	var buf []byte
	for {
		select {
		case <-c.done:
			return
		case <-c.wake:
		}
		c.mu.Lock()
		buf = append(buf[:0], c.control...)
		c.control = c.control[:0]
		sent := 0
		for sent < len(c.queue) && c.window > 0 {
			o := &c.queue[sent]
			if o.path != "" {
				buf = appendFrame(buf, http2.FrameHeaders, http2.FlagHeadersEndHeaders, o.id, w.encode(o.path))
				o.path = ""
			}
			// The window may take a part only. A server need not open it again before a part of it was used.
			n := int(min(int64(len(o.data)), c.window, frameMax))
			flags := http2.Flags(0)
			if n == len(o.data) && o.end {
				flags = http2.FlagDataEndStream
			}
			buf = appendFrame(buf, http2.FrameData, flags, o.id, o.data[:n])
			c.window -= int64(n)
			if o.data = o.data[n:]; len(o.data) == 0 {
				sent++
			}
		}
		rest := copy(c.queue, c.queue[sent:])
		clear(c.queue[rest:])
		c.queue = c.queue[:rest]
		c.mu.Unlock()
		if len(buf) == 0 {
			continue
		}
		if _, err := c.nc.Write(buf); err != nil {
			c.fail(fmt.Errorf("h2: writing to %s: %w", c.address, err))
			return
		}
	}
}

func appendFrame(b []byte, t http2.FrameType, flags http2.Flags, stream uint32, payload []byte) []byte {
	n := len(payload)
	b = append(b, byte(n>>16), byte(n>>8), byte(n), byte(t), byte(flags))
	b = binary.BigEndian.AppendUint32(b, stream)
	return append(b, payload...)
}

func appendWindow(b []byte, stream uint32, bytes int) []byte {
	return appendFrame(b, http2.FrameWindowUpdate, 0, stream, binary.BigEndian.AppendUint32(nil, uint32(bytes)))
}

// headerWriter encodes request headers; after the first call of a path every field is an index.
type headerWriter struct {
	fields []hpack.HeaderField
	enc    *hpack.Encoder
	out    sliceWriter
}

type sliceWriter []byte

func (s *sliceWriter) Write(p []byte) (int, error) { *s = append(*s, p...); return len(p), nil }

func newHeaderWriter(authority string) *headerWriter {
	w := &headerWriter{fields: []hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path"}, {Name: ":authority", Value: authority},
		{Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"}, {Name: "user-agent", Value: "engram-bench"},
	}}
	w.enc = hpack.NewEncoder(&w.out)
	return w
}

func (w *headerWriter) encode(path string) []byte {
	w.out = w.out[:0]
	w.fields[2].Value = path
	for _, f := range w.fields {
		w.enc.WriteField(f) // a sliceWriter takes everything
	}
	return w.out
}

// read takes frames until the connection ends.
func (c *Conn) read() {
	r := &reader{c: c, framer: http2.NewFramer(nil, bufio.NewReaderSize(c.nc, 256<<10))}
	r.framer.SetReuseFrames()
	r.framer.SetMaxReadFrameSize(1 << 20)
	r.headers = hpack.NewDecoder(4096, r.field)
	for {
		f, err := r.framer.ReadFrame()
		if err == nil {
			err = r.frame(f)
		}
		if err != nil {
			c.fail(fmt.Errorf("h2: reading from %s: %w", c.address, err))
			return
		}
	}
}
