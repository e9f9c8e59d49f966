package server

import (
	"errors"
	"net"
	"path/filepath"
	"testing"
)

func TestSeats(t *testing.T) {
	for files, want := range map[float64]int{0: 1<<20 - ownFiles, 100: 50, 1024: 512, 4096: 4096 - ownFiles, 1 << 64: 1 << 30} {
		if got := cap(newSeats(files)); got != want {
			t.Errorf("%.0f files leave %d connections, not %d", files, got, want)
		}
	}
}

// Two listeners share their seats: who comes when all are taken is let in as soon
// as somebody leaves.
func TestSeatsAreShared(t *testing.T) {
	s := make(seats, 2)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	unix, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	one, other := s.on(tcp), s.on(unix)
	come := func(l net.Listener) net.Conn {
		c, err := net.Dial(l.Addr().Network(), l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	accept := func(l net.Listener) net.Conn {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	come(one)
	come(other)
	first, second := accept(one), accept(other)
	come(other)
	third := make(chan net.Conn)
	go func() { third <- accept(other) }()
	select {
	case <-third:
		t.Fatal("more connections than seats")
	default:
	}
	_ = first.Close()
	_ = first.Close() // its seat is given back once
	c := <-third
	if len(s) != 2 {
		t.Errorf("%d seats are taken", len(s))
	}
	// A listener that waits for a seat can be closed.
	failed := make(chan error)
	go func() { _, err := one.Accept(); failed <- err }()
	_ = one.Close()
	if err := <-failed; !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
	_ = other.Close()
	_ = second.Close()
	_ = c.Close()
	if _, err := other.Accept(); !errors.Is(err, net.ErrClosed) || len(s) != 0 {
		t.Errorf("%v, and %d seats are taken", err, len(s))
	}
}
