package grpcserver

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"
)

// readHeaderTimeout is what etcd gives an HTTP/1.1 client for its headers.
const readHeaderTimeout = 5 * time.Minute

// crowdTimeout replaces HandshakeTimeout while very many connections have not
// begun to speak.
const crowdTimeout = time.Second

// handle finds out what a connection speaks and serves it.
func (s *Server) handle(nc net.Conn, secure bool) {
	limit := s.o.HandshakeTimeout
	if s.handshakes.Add(1) > maxHandshakes {
		limit = min(limit, crowdTimeout)
	}
	_ = nc.SetDeadline(time.Now().Add(limit))
	c, first, err := s.shake(nc, secure)
	s.handshakes.Add(-1)
	if err != nil {
		if timedOut(err) {
			s.limited(limitHandshake, "remote", nc.RemoteAddr())
		}
		_ = nc.Close()
	} else if c != nil { // else it is somebody else's, with deadlines of theirs
		_ = nc.SetDeadline(time.Time{})
		s.ungreet(nc)
		c.serve(first)
		return
	}
	s.ungreet(nc)
}

// shake makes an HTTP/2 connection of nc, first being what was read of it, or
// hands it to HTTP/1.1 and returns nil.
func (s *Server) shake(nc net.Conn, secure bool) (c *conn, first []byte, err error) {
	w, state := newWire(nc), (*tls.ConnectionState)(nil)
	var over net.Conn = nc
	if secure {
		var conn *tls.Conn
		if w, conn, err = handshakeTLS(nc, s.o.TLS); err != nil {
			return nil, nil, err
		}
		st := conn.ConnectionState()
		state, over = &st, conn
		if st.NegotiatedProtocol == "http/1.1" {
			return nil, nil, s.handOver(nc, conn, nil, state)
		}
	}
	// While a connection says nothing it holds no buffer; thousands may.
	var buf *[readBytes]byte
	var kept [len(preface)]byte
	n := 0
	space := func() []byte {
		if buf == nil {
			buf = readBuffers.Get().(*[readBytes]byte)
			copy(buf[:], kept[:n])
		}
		return buf[n:]
	}
	park := func() {
		if buf != nil {
			copy(kept[:], buf[:n]) // not yet a preface
			readBuffers.Put(buf)
			buf = nil
		}
	}
	for n < len(preface) && (n == 0 || bytes.HasPrefix([]byte(preface), buf[:n])) {
		m, err := w.read(space, park)
		if err != nil {
			return nil, nil, err
		}
		n += m
	}
	defer readBuffers.Put(buf) // what is in it was copied
	if n >= len(preface) && bytes.HasPrefix(buf[:n], []byte(preface)) {
		if t, ok := w.(*tlsWire); ok {
			t.pipe.async = true
		}
		return s.newConn(nc, w, state), bytes.Clone(buf[:n]), nil
	}
	if state != nil && state.NegotiatedProtocol == "h2" {
		return nil, nil, errors.New("no HTTP/2 preface")
	}
	return nil, nil, s.handOver(nc, over, bytes.Clone(buf[:n]), state)
}

// handedOver is the connections that the HTTP/1.1 server is to serve, as a
// listener.
type handedOver struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// Accept implements net.Listener.
func (h *handedOver) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *handedOver) Close() error {
	h.once.Do(func() { close(h.closed) })
	return nil
}

// Addr implements net.Listener.
func (h *handedOver) Addr() net.Addr { return handedAddr{} }

type handedAddr struct{}

func (handedAddr) Network() string { return "tcp" }
func (handedAddr) String() string  { return "shared with gRPC" }

// replayed is a connection of which some bytes were read already.
type replayed struct {
	net.Conn
	first []byte
	tls   *tls.ConnectionState
}

func (r *replayed) Read(p []byte) (int, error) {
	if len(r.first) > 0 {
		n := copy(p, r.first)
		r.first = r.first[n:]
		return n, nil
	}
	return r.Conn.Read(p)
}

// stateKey finds the TLS state of a request whose connection http.Server does not
// know to be TLS.
type stateKey struct{}

func (s *Server) serveHTTP() {
	s.httpConns = &handedOver{conns: make(chan net.Conn), closed: make(chan struct{})}
	s.http = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if state, ok := r.Context().Value(stateKey{}).(*tls.ConnectionState); ok && r.TLS == nil {
				r.TLS = state
			}
			s.o.HTTP.ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: readHeaderTimeout,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if r, ok := c.(*replayed); ok && r.tls != nil {
				return context.WithValue(ctx, stateKey{}, r.tls)
			}
			return ctx
		},
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
	}
	go func() { _ = s.http.Serve(s.httpConns) }()
}

// handOver gives a connection to the HTTP/1.1 server.
func (s *Server) handOver(nc, over net.Conn, first []byte, state *tls.ConnectionState) error {
	if s.http == nil {
		return errors.New("HTTP/1.1 is not served here")
	}
	_ = nc.SetDeadline(time.Time{})
	if first != nil {
		over = &replayed{Conn: over, first: first, tls: state}
	}
	select {
	case s.httpConns.conns <- over:
		return nil
	case <-s.httpConns.closed:
		return net.ErrClosed
	}
}

// shutHTTP stops the HTTP/1.1 server, at once or when its requests are answered.
func (s *Server) shutHTTP(now bool) {
	if s.http == nil {
		return
	}
	_ = s.httpConns.Close()
	if now {
		_ = s.http.Close()
		return
	}
	_ = s.http.Shutdown(context.Background())
}
