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

// metricsSeats are those of the listeners for metrics, which are out of ownFiles.
const metricsSeats = 64

// seats are the connections that may be open at a time on the listeners that share
// them; each of them is an element. A listener that waits for somebody has one, too.
type seats chan struct{}

// newSeats returns the seats that a limit of open files leaves; 0 is an unknown
// one. Those that gRPC and HTTP share are divided if HTTP has listeners of its own,
// and metrics never share: what tells how a member is must not be out of reach when
// clients have taken all that they may.
func newSeats(files float64, ownHTTP bool) (clients, overHTTP, metrics seats) {
	if files == 0 {
		files = 1 << 20
	}
	all := min(max(files/2, files-ownFiles), 1<<30)
	metrics = make(seats, int(min((files-all)/8, metricsSeats)))
	clients = make(seats, int(all))
	if overHTTP = clients; ownHTTP {
		clients, overHTTP = make(seats, int(all*3/4)), make(seats, int(all/4))
	}
	return clients, overHTTP, metrics
}

// on returns a listener whose connections have seats. While all are taken it does
// not accept, and tells full: who comes waits in the system's queue.
func (s seats) on(l net.Listener, full *seldom) net.Listener {
	return &seatedListener{Listener: l, seats: s, full: full, closed: make(chan struct{})}
}

type seatedListener struct {
	net.Listener
	seats  seats
	full   *seldom
	once   sync.Once
	closed chan struct{}
}

// Accept implements net.Listener.
func (l *seatedListener) Accept() (net.Conn, error) {
	if !l.sit() {
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.seats
		return nil, err
	}
	return &seatedConn{socket: c.(socket), seats: l.seats}, nil
}

// sit takes a seat. It returns false if the listener is closed before there is one.
func (l *seatedListener) sit() bool {
	select {
	case l.seats <- struct{}{}:
		return true
	default:
	}
	l.full.warn("on", l.Addr().String(), "connections", cap(l.seats))
	select {
	case l.seats <- struct{}{}:
		return true
	case <-l.closed:
		return false
	}
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
