package play

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"
)

const (
	linkDir     = "links"
	maxConns    = 64 // on one link; two members need about ten
	linkDialing = 2 * time.Second
)

// network is what lies between the members. They advertise the socket `<name>.peer` in their working directory, and each
// member works in a directory of its own: so one advertised URL leads each of the others to another socket, that of its own link.
// A link forwards to the port that the other member listens on, unless one of the two is cut off.
type network struct {
	dir string

	mu    sync.Mutex // covers all below
	ports map[string]int
	cut   map[string]bool
	links map[pair]*link
}

type pair struct{ from, to string }

// link carries the connections that one member opens to another.
type link struct {
	pair
	net      *network
	listener net.Listener
	conns    map[net.Conn]bool // both ends of each; covered by net.mu
	workers  sync.WaitGroup
}

func newNetwork(dir string) *network {
	return &network{dir: dir, ports: map[string]int{}, cut: map[string]bool{}, links: map[pair]*link{}}
}

// peerURL is where the other members find a member.
func peerURL(name string) string { return "unix://" + name + ".peer" }

// workDir is the directory that a member is to run in.
func (n *network) workDir(name string) string { return filepath.Join(n.dir, name) }

// join links a member with all others, both ways.
func (n *network) join(name string) error {
	if err := os.MkdirAll(n.workDir(name), 0o700); err != nil {
		return err
	}
	n.mu.Lock()
	others := make([]string, 0, len(n.ports))
	for other := range n.ports {
		others = append(others, other)
	}
	n.ports[name] = 0
	n.mu.Unlock()
	// A member also asks itself, by its advertised URL.
	errs := []error{n.link(pair{name, name})}
	for _, other := range others {
		errs = append(errs, n.link(pair{name, other}), n.link(pair{other, name}))
	}
	return errors.Join(errs...)
}

func (n *network) link(p pair) error {
	path := filepath.Join(n.workDir(p.from), p.to+".peer")
	listener, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("link from %s to %s: %w; if the path is too long, TMPDIR names another place", p.from, p.to, err)
	}
	l := &link{pair: p, net: n, listener: listener, conns: map[net.Conn]bool{}}
	n.mu.Lock()
	n.links[p] = l
	n.mu.Unlock()
	l.workers.Go(l.accept)
	return nil
}

// leave ends all links of a member.
func (n *network) leave(name string) {
	n.mu.Lock()
	delete(n.ports, name)
	delete(n.cut, name)
	n.mu.Unlock()
	n.end(func(p pair) bool { return p.from == name || p.to == name })
	_ = os.RemoveAll(n.workDir(name)) // an empty directory in the scratch space, which is removed at the end
}

func (n *network) close() { n.end(func(pair) bool { return true }) }

func (n *network) end(which func(pair) bool) {
	n.mu.Lock()
	var ended []*link
	for p, l := range n.links {
		if which(p) {
			delete(n.links, p)
			l.drop()
			ended = append(ended, l)
		}
	}
	n.mu.Unlock()
	for _, l := range ended {
		_ = l.listener.Close()
		l.workers.Wait()
	}
}

// listens says which port a member listens on.
func (n *network) listens(name string, port int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ports[name] = port
}

// setCut cuts a member off, or heals it. A cut ends the connections of its links and lets none through.
func (n *network) setCut(name string, cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[name] = cut
	for p, l := range n.links {
		if !n.open(p) {
			l.drop()
		}
	}
}

// open says that a link lets through. n.mu is held.
func (n *network) open(p pair) bool { return p.from == p.to || !n.cut[p.from] && !n.cut[p.to] }

// drop ends the connections. net.mu is held.
func (l *link) drop() {
	for c := range l.conns {
		_ = c.Close()
		delete(l.conns, c)
	}
}

func (l *link) accept() {
	for {
		conn, err := l.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // too many open files, perhaps: what is not accepted waits
			time.Sleep(50 * time.Millisecond)
			continue
		}
		if port := l.admit(conn); port == 0 {
			_ = conn.Close()
		} else {
			l.workers.Go(func() { l.carry(conn, port) })
		}
	}
}

// admit counts a connection in if the link lets through, and returns the port to connect it with, or 0.
func (l *link) admit(c net.Conn) int {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	if l.net.links[l.pair] != l || !l.net.open(l.pair) || len(l.conns) >= 2*maxConns {
		return 0
	}
	l.conns[c] = true
	return l.net.ports[l.to]
}

// carry copies both ways until one side ends.
func (l *link) carry(near net.Conn, port int) {
	defer l.forget(near)
	far, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), linkDialing)
	if err != nil {
		return // the member does not run: who dialled sees its connection end
	}
	defer l.forget(far)
	if l.admit(far) == 0 { // cut off meanwhile
		return
	}
	done := make(chan struct{}, 2)
	for _, ends := range [][2]net.Conn{{near, far}, {far, near}} {
		go func() {
			_, _ = io.Copy(ends[0], ends[1]) // the end of either connection, for whatever reason, ends both
			done <- struct{}{}
		}()
	}
	<-done
	_, _ = near.Close(), far.Close()
	<-done
}

// forget ends a connection and takes it off the count.
func (l *link) forget(c net.Conn) {
	_ = c.Close()
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	delete(l.conns, c)
}
