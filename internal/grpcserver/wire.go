package grpcserver

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// wire is a connection to read from and to write to without blocking whoever
// has something to write.
type wire interface {
	// read waits for bytes and reads into what buffer returns, which is called
	// when there is something to read, so that a connection that waits holds no
	// buffer. Park is called before it waits.
	read(buffer func() []byte, park func()) (n int, err error)
	// write writes parts, all of them if block is set; else it returns false if
	// the socket took less. Only one call may be made at a time. What was written
	// is taken from parts.
	write(parts *[][]byte, block bool) (all bool, err error)
	close() error
}

// readBytes is the size of buffers to read into.
const readBytes = 64 << 10

var readBuffers = sync.Pool{New: func() any { return new([readBytes]byte) }}

// newWire returns the best wire for a connection.
func newWire(c net.Conn) wire {
	if sc, ok := c.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			return newSocket(c, raw)
		}
	}
	return &blockingWire{Conn: c}
}

// socket is a wire on a file descriptor. A write is tried at once; only when the
// socket's buffer is full does somebody wait.
type socket struct {
	net.Conn
	raw   syscall.RawConn
	wrote func() // called when the client took something; may be nil

	// Of the read in hand. The functions are made once.
	buffer  func() []byte
	park    func()
	n       int
	err     error
	reading func(uintptr) bool

	// Of the write in hand.
	parts   *[][]byte
	block   bool
	all     bool
	werr    error
	writing func(uintptr) bool
}

func newSocket(c net.Conn, raw syscall.RawConn) *socket {
	s := &socket{Conn: c, raw: raw}
	s.reading, s.writing = s.tryRead, s.tryWrite
	return s
}

func (s *socket) read(buffer func() []byte, park func()) (int, error) {
	s.buffer, s.park, s.n, s.err = buffer, park, 0, nil
	if err := s.raw.Read(s.reading); err != nil {
		return 0, err
	}
	if s.n == 0 && s.err == nil {
		return 0, io.EOF
	}
	return s.n, s.err
}

func (s *socket) tryRead(fd uintptr) (done bool) {
	b := s.buffer()
	for {
		n, err := unix.Read(int(fd), b)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			s.park()
			return false
		}
		s.n, s.err = max(n, 0), err
		return true
	}
}

func (s *socket) write(parts *[][]byte, block bool) (bool, error) {
	s.parts, s.block, s.all, s.werr = parts, block, false, nil
	if err := s.raw.Write(s.writing); err != nil {
		return false, err
	}
	return s.all, s.werr
}

// mostParts is how many parts one system call takes.
const mostParts = 1024

func (s *socket) tryWrite(fd uintptr) (done bool) {
	for len(*s.parts) > 0 {
		var n int
		var err error
		if ps := *s.parts; len(ps) == 1 {
			n, err = unix.Write(int(fd), ps[0])
		} else {
			n, err = unix.Writev(int(fd), ps[:min(len(ps), mostParts)])
		}
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return !s.block
		case err != nil:
			s.werr = err
			return true
		}
		*s.parts = skip(*s.parts, n)
		if s.wrote != nil {
			s.wrote()
		}
	}
	s.all = true
	return true
}

func (s *socket) close() error { return s.Conn.Close() }

// skip takes n bytes off the front of parts.
func skip(parts [][]byte, n int) [][]byte {
	for len(parts) > 0 && n >= len(parts[0]) {
		n -= len(parts[0])
		parts[0] = nil
		parts = parts[1:]
	}
	if n > 0 {
		parts[0] = parts[0][n:]
	}
	return parts
}

// blockingWire is a wire on anything. Its writes always block.
type blockingWire struct {
	net.Conn
	wrote func() // as of socket
}

func (w *blockingWire) read(buffer func() []byte, _ func()) (int, error) {
	return w.Conn.Read(buffer())
}

func (w *blockingWire) write(parts *[][]byte, block bool) (bool, error) {
	if !block {
		return len(*parts) == 0, nil
	}
	for len(*parts) > 0 {
		if _, err := w.Conn.Write((*parts)[0]); err != nil {
			return false, err
		}
		*parts = (*parts)[1:]
		if w.wrote != nil {
			w.wrote()
		}
	}
	return true, nil
}

func (w *blockingWire) close() error { return w.Conn.Close() }

// limitUnacknowledged bounds how long the kernel waits for a client that does not
// acknowledge what was sent: as long as for the answer to a ping.
func limitUnacknowledged(c net.Conn, limit time.Duration) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return
	}
	if raw, err := sc.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			// What is no TCP, or a kernel that does not know it, goes on as ever.
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(limit/time.Millisecond))
		})
	}
}

// tlsWire is TLS over a socket. The records are made in memory, between the
// plain side and the socket, so nothing blocks in crypto/tls either.
type tlsWire struct {
	sock  *socket
	conn  *tls.Conn
	pipe  *tlsPipe
	out   [][]byte
	spare []byte
}

// recordHeader is the length of what a TLS record begins with.
const recordHeader = 5

// recordBytes is the largest payload of a TLS record.
const recordBytes = 16 << 10

// keptBytes is how large a buffer a connection that has nothing to write keeps.
const keptBytes = 4 << 10

func (w *tlsWire) read(buffer func() []byte, park func()) (int, error) {
	if !w.pipe.whole() {
		park()
		if err := w.pipe.fill(); err != nil {
			return 0, err
		}
	}
	// A whole record waits, so this does not block. All of it is taken: of what
	// stayed in crypto/tls nobody would know.
	b := buffer()
	n, err := w.conn.Read(b)
	for err == nil && len(b)-n >= recordBytes && w.pipe.whole() {
		var m int
		m, err = w.conn.Read(b[n:])
		n += m
	}
	if n > 0 {
		return n, nil // an error comes again
	}
	return n, err
}

func (w *tlsWire) write(parts *[][]byte, block bool) (bool, error) {
	for {
		if len(w.out) == 0 {
			w.spare = w.pipe.take(w.spare)
			if len(w.spare) > 0 {
				w.out = append(w.out[:0], w.spare)
			}
		}
		if len(w.out) > 0 {
			all, err := w.sock.write(&w.out, block)
			if !all || err != nil {
				return false, err
			}
			continue
		}
		if len(*parts) == 0 {
			if cap(w.spare) > keptBytes {
				w.spare = nil
			}
			w.pipe.shrink()
			return true, nil
		}
		if err := w.seal(parts); err != nil {
			return false, err
		}
	}
}

// seal encrypts some of the parts.
func (w *tlsWire) seal(parts *[][]byte) error {
	chunk := chunks.Get().(*[chunkBytes]byte) // for small parts that become one record
	defer chunks.Put(chunk)
	total := 0
	for len(*parts) > 0 && total < 4*recordBytes {
		p := (*parts)[0]
		if len(p) >= recordBytes {
			p = p[:recordBytes]
		} else if len(*parts) > 1 {
			plain := chunk[:0]
			for _, q := range *parts {
				plain = append(plain, q[:min(len(q), recordBytes-len(plain))]...)
				if len(plain) == recordBytes {
					break
				}
			}
			p = plain
		}
		if _, err := w.conn.Write(p); err != nil {
			return err
		}
		total += len(p)
		*parts = skip(*parts, len(p))
	}
	return nil
}

func (w *tlsWire) close() error { return w.sock.close() }

// goodbye says that nothing follows, as far as the socket takes it.
func (w *tlsWire) goodbye() {
	_ = w.conn.CloseWrite()
	var none [][]byte
	_, _ = w.write(&none, false)
}

// tlsPipe is what crypto/tls reads from and writes to.
type tlsPipe struct {
	net.Conn
	sock *socket

	in       []byte // ciphertext that was read and not yet taken
	inBuffer *[readBytes]byte
	record   int    // how much of a record that was begun is left to take
	carry    []byte // less than a record, while waiting
	async    bool   // HTTP/2 is spoken: writes go to memory
	spaceFn  func() []byte
	parkFn   func()

	mu  sync.Mutex
	out []byte
}

func newTLSPipe(s *socket) *tlsPipe {
	p := &tlsPipe{Conn: s.Conn, sock: s}
	p.spaceFn, p.parkFn = p.space, p.release
	return p
}

// Read implements net.Conn. It stops at the end of a record: what crypto/tls read
// ahead would be where nobody knows of it.
func (p *tlsPipe) Read(b []byte) (int, error) {
	for p.record == 0 {
		if len(p.in) >= recordHeader {
			p.record = recordHeader + int(p.in[3])<<8 + int(p.in[4])
			break
		}
		if err := p.fill(); err != nil {
			return 0, err
		}
	}
	if len(p.in) == 0 {
		if err := p.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(b, p.in[:min(p.record, len(p.in))])
	p.record -= n
	if p.in = p.in[n:]; len(p.in) == 0 {
		p.release()
	}
	return n, nil
}

// whole says that a whole record can be read without waiting.
func (p *tlsPipe) whole() bool {
	return len(p.in) >= recordHeader && len(p.in) >= recordHeader+int(p.in[3])<<8+int(p.in[4])
}

// fill waits until a whole record is there, or more than one may have.
func (p *tlsPipe) fill() error {
	for {
		n, err := p.sock.read(p.spaceFn, p.parkFn)
		if err != nil {
			return err
		}
		p.in = p.inBuffer[:len(p.in)+n]
		if p.whole() || !p.async || len(p.in) == readBytes {
			return nil
		}
	}
}

// space returns where to read more into.
func (p *tlsPipe) space() []byte {
	if p.inBuffer == nil {
		p.inBuffer = readBuffers.Get().(*[readBytes]byte)
		p.in = p.inBuffer[:copy(p.inBuffer[:], p.in)]
	} else if len(p.in) == 0 || &p.in[0] != &p.inBuffer[0] {
		p.in = p.inBuffer[:copy(p.inBuffer[:], p.in)]
	}
	return p.inBuffer[len(p.in):]
}

// release gives the buffer back and keeps what is in it.
func (p *tlsPipe) release() {
	if p.inBuffer == nil {
		return
	}
	if len(p.in) == 0 {
		p.carry = nil
	} else {
		p.carry = append(p.carry[:0], p.in...)
	}
	p.in = p.carry
	readBuffers.Put(p.inBuffer)
	p.inBuffer = nil
}

// Write implements net.Conn.
func (p *tlsPipe) Write(b []byte) (int, error) {
	if !p.async {
		return p.Conn.Write(b)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out = append(p.out, b...)
	return len(b), nil
}

// take returns what is to be written and uses spare's memory from now on.
func (p *tlsPipe) take(spare []byte) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.out
	p.out = spare[:0]
	return out
}

// shrink gives up a large buffer that is not in use.
func (p *tlsPipe) shrink() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.out) == 0 && cap(p.out) > keptBytes {
		p.out = nil
	}
}

// waiting says that crypto/tls had something to write by itself.
func (p *tlsPipe) waiting() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.out) > 0
}

// SetWriteDeadline implements net.Conn. CloseWrite sets one; a write to memory
// needs none, and one on the socket would break the writer that waits there.
func (p *tlsPipe) SetWriteDeadline(t time.Time) error {
	if p.async {
		return nil
	}
	return p.Conn.SetWriteDeadline(t)
}

// handshakeTLS makes a wire of a raw connection. It blocks; the connection's
// deadline bounds it.
func handshakeTLS(c net.Conn, config *tls.Config) (wire, *tls.Conn, error) {
	if ready, ok := c.(*tls.Conn); ok {
		err := ready.Handshake()
		return &blockingWire{Conn: ready}, ready, err
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		conn := tls.Server(c, config)
		err := conn.Handshake()
		return &blockingWire{Conn: conn}, conn, err
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, nil, errors.Join(err, c.Close())
	}
	sock := newSocket(c, raw)
	pipe := newTLSPipe(sock)
	conn := tls.Server(pipe, config)
	if err := conn.Handshake(); err != nil {
		return nil, nil, err
	}
	return &tlsWire{sock: sock, conn: conn, pipe: pipe}, conn, nil
}
