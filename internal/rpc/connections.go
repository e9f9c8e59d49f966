package rpc

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Listen returns l with its connections tied to the calls that they carry.
// grpc-go says when it has sent a large response, but not when it drops one
// because the connection broke. A response on a connection that was accepted
// elsewhere counts as sent once grpc-go has it.
func Listen(l net.Listener) net.Listener { return tiedListener{l} }

type tiedListener struct{ net.Listener }

func (l tiedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	u := &unsent{held: map[*func()]struct{}{}}
	tied := &tiedConn{Conn: c, addr: tiedAddr{c.RemoteAddr(), u}}
	u.wrote.Store(time.Now().UnixNano())
	u.close = func() { _ = tied.Close() }
	return tied, nil
}

// tiedConn releases what was to be sent on it when it is closed. Calls find it
// by their peer's address.
type tiedConn struct {
	net.Conn
	addr tiedAddr
}

func (c *tiedConn) RemoteAddr() net.Addr { return c.addr }

// Write notes when the client last took something.
func (c *tiedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.addr.unsent.wrote.Store(time.Now().UnixNano())
	return n, err
}

func (c *tiedConn) Close() error {
	err := c.Conn.Close()
	c.addr.unsent.drop()
	return err
}

type tiedAddr struct {
	net.Addr
	unsent *unsent
}

// unsent is the responses that a connection has still to send.
type unsent struct {
	wrote atomic.Int64 // when something was last written, Unix ns
	close func()       // closes the connection

	mu      sync.Mutex
	held    map[*func()]struct{}
	dropped bool
}

// hold keeps sent until the function that it returns is called, or until the
// connection is closed; sent is then called, once.
func (u *unsent) hold(sent func()) (release func()) {
	u.mu.Lock()
	dropped := u.dropped
	if !dropped {
		u.held[&sent] = struct{}{}
	}
	u.mu.Unlock()
	if dropped {
		sent()
	}
	return func() { u.release(&sent) }
}

func (u *unsent) release(sent *func()) {
	u.mu.Lock()
	_, held := u.held[sent]
	delete(u.held, sent)
	u.mu.Unlock()
	if held {
		(*sent)()
	}
}

func (u *unsent) drop() {
	u.mu.Lock()
	held := u.held
	u.held, u.dropped = nil, true
	u.mu.Unlock()
	for sent := range held {
		(*sent)()
	}
}

// unread knows the connections that have large answers to send. When others
// find no room for theirs it closes those on which nothing has moved for long: a
// client that was stopped, say, would hold its room for as long as it is there.
type unread struct {
	stall time.Duration

	mu    sync.Mutex
	conns map[*unsent]int // answers held
	swept time.Time
}

func newUnread(stall time.Duration) *unread {
	return &unread{stall: stall, conns: map[*unsent]int{}}
}

// hold counts an answer on a connection until the function that it returns,
// which calls sent, is called.
func (u *unread) hold(c *unsent, sent func()) func() {
	u.mu.Lock()
	if u.conns[c]++; u.conns[c] == 1 {
		c.wrote.Store(time.Now().UnixNano()) // it had nothing to write before
	}
	u.mu.Unlock()
	return func() {
		u.mu.Lock()
		if u.conns[c]--; u.conns[c] == 0 {
			delete(u.conns, c)
		}
		u.mu.Unlock()
		sent()
	}
}

// sweep closes the connections that hold answers and do not move.
func (u *unread) sweep() {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	if now.Sub(u.swept) < u.stall/10 {
		return
	}
	u.swept = now
	for c := range u.conns {
		if now.Sub(time.Unix(0, c.wrote.Load())) > u.stall {
			go c.close() // which may wait for a last write
		}
	}
}
