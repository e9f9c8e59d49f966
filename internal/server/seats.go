package server

import (
	"net"
	"sync"
	"syscall"
)

// ownFiles is how many files a member may open for itself: the tables that the
// store keeps open (Pebble's default is 1000), and 150, as etcd keeps, for its log,
// the other members and what is open for a moment. A member that cannot open the
// next file of its log stops, so clients do not get these; but where there are few
// files they may have half of them.
const ownFiles = 1000 + 150

// seats are the connections that clients may have open at a time, on all listeners
// together; each of them is an element.
type seats chan struct{}

// newSeats returns the seats that a limit of open files leaves; 0 is an unknown one.
func newSeats(files float64) seats {
	if files == 0 {
		files = 1 << 20
	}
	return make(seats, int(min(max(files/2, files-ownFiles), 1<<30)))
}

// on returns a listener whose connections have seats. While all are taken it does
// not accept: who comes waits in the system's queue.
func (s seats) on(l net.Listener) net.Listener {
	return &seatedListener{Listener: l, seats: s, closed: make(chan struct{})}
}

type seatedListener struct {
	net.Listener
	seats  seats
	once   sync.Once
	closed chan struct{}
}

// Accept implements net.Listener.
func (l *seatedListener) Accept() (net.Conn, error) {
	select {
	case l.seats <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.seats
		return nil, err
	}
	return &seatedConn{socket: c.(socket), seats: l.seats}, nil
}

// Close implements net.Listener.
func (l *seatedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// socket is what TCP and unix connections have beside net.Conn's methods and a gRPC
// server makes use of.
type socket interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// seatedConn gives its seat back when it is closed.
type seatedConn struct {
	socket
	seats seats
	once  sync.Once
}

// Close implements net.Conn.
func (c *seatedConn) Close() error {
	err := c.socket.Close()
	c.once.Do(func() { <-c.seats })
	return err
}
