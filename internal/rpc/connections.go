package rpc

import (
	"net"
	"sync"
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
	return &tiedConn{Conn: c, addr: tiedAddr{c.RemoteAddr(), &unsent{held: map[*func()]struct{}{}}}}, nil
}

// tiedConn releases what was to be sent on it when it is closed. Calls find it
// by their peer's address.
type tiedConn struct {
	net.Conn
	addr tiedAddr
}

func (c *tiedConn) RemoteAddr() net.Addr { return c.addr }

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
