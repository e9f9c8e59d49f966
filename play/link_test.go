package play

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// echo listens as a member does, and sends back what it gets.
func echo(t *testing.T) (port int) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func newTestNetwork(t *testing.T, names ...string) *network {
	t.Helper()
	dir, err := os.MkdirTemp("", "links-") // t.TempDir would be too long for a socket on some systems
	if err != nil {
		t.Fatal(err)
	}
	n := newNetwork(dir)
	t.Cleanup(func() {
		n.close()
		_ = os.RemoveAll(dir)
	})
	for _, name := range names {
		if err := n.join(name); err != nil {
			t.Fatal(err)
		}
		n.listens(name, echo(t))
	}
	return n
}

// dial opens a connection from a member to another, as its process would from its working directory.
func dial(t *testing.T, n *network, from, to string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", filepath.Join(n.workDir(from), to+".peer"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

// carries says if a connection carries a byte there and back.
func carries(t *testing.T, c net.Conn) bool {
	t.Helper()
	var b [1]byte
	if _, err := c.Write([]byte("x")); err != nil {
		return false
	}
	_, err := io.ReadFull(c, b[:])
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the connection is neither open nor ended")
	}
	return err == nil
}

// TestCut cuts one member off: what is open from and to it ends, nothing new gets through either way, and the rest goes on.
func TestCut(t *testing.T) {
	n := newTestNetwork(t, "m1", "m2", "m3")
	open := map[pair]net.Conn{}
	for _, p := range []pair{{"m1", "m2"}, {"m2", "m1"}, {"m1", "m3"}, {"m3", "m1"}, {"m2", "m3"}, {"m3", "m2"}} {
		open[p] = dial(t, n, p.from, p.to)
		if !carries(t, open[p]) {
			t.Fatalf("%v carries nothing", p)
		}
	}
	n.setCut("m1", true)
	for p, c := range open {
		cut := p.from == "m1" || p.to == "m1"
		if carries(t, c) == cut {
			t.Errorf("%v with m1 cut off: the open connection has the wrong end", p)
		}
		if carries(t, dial(t, n, p.from, p.to)) == cut {
			t.Errorf("%v with m1 cut off: a new connection has the wrong end", p)
		}
	}
	n.setCut("m3", true)
	n.setCut("m1", false)
	for p := range open {
		if carries(t, dial(t, n, p.from, p.to)) == (p.from == "m3" || p.to == "m3") {
			t.Errorf("%v with m3 cut off instead: a new connection has the wrong end", p)
		}
	}
}

// TestLinkBounds: a link takes only so many connections, gives the places of ended ones back, and ends one whose member does not run.
func TestLinkBounds(t *testing.T) {
	n := newTestNetwork(t, "m1", "m2")
	var conns []net.Conn
	for range maxConns {
		c := dial(t, n, "m1", "m2")
		if !carries(t, c) {
			t.Fatalf("connection %d is refused", len(conns)+1)
		}
		conns = append(conns, c)
	}
	if carries(t, dial(t, n, "m1", "m2")) {
		t.Errorf("more than %d connections", maxConns)
	}
	if !carries(t, dial(t, n, "m2", "m1")) {
		t.Error("the other direction is full, too")
	}
	for _, c := range conns {
		_ = c.Close()
	}
	for deadline := time.Now().Add(10 * time.Second); !carries(t, dial(t, n, "m1", "m2")); {
		if time.Now().After(deadline) {
			t.Fatal("ended connections keep their places")
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n.listens("m2", l.Addr().(*net.TCPAddr).Port)
	_ = l.Close()
	if carries(t, dial(t, n, "m1", "m2")) {
		t.Error("a member that does not run answers")
	}
	n.leave("m2")
	if _, err := os.Stat(n.workDir("m2")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of a member that left: %v", err)
	}
	if _, err := net.Dial("unix", filepath.Join(n.workDir("m1"), "m2.peer")); err == nil {
		t.Error("a link to a member that left is open")
	}
}
