package server

import (
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"testing"

	"github.com/engram-kv/engram/internal/clock"
)

func TestSeats(t *testing.T) {
	for files, want := range map[float64]struct{ clients, metrics int }{
		0: {1<<20 - ownFiles, metricsSeats}, 100: {50, 6}, 1024: {512, metricsSeats}, 4096: {4096 - ownFiles, metricsSeats}, 1 << 64: {1 << 30, metricsSeats},
	} {
		clients, overHTTP, metrics := newSeats(files, false)
		if cap(clients) != want.clients || overHTTP != clients || cap(metrics) != want.metrics {
			t.Errorf("%.0f files leave %d connections to clients and %d to metrics, not %+v", files, cap(clients), cap(metrics), want)
		}
		clients, overHTTP, metrics = newSeats(files, true)
		if all := cap(clients) + cap(overHTTP); all > want.clients || all < want.clients-1 || cap(overHTTP) != want.clients/4 || cap(metrics) != want.metrics {
			t.Errorf("%.0f files leave %d connections to clients, %d over HTTP and %d to metrics, not %+v", files, cap(clients), cap(overHTTP), cap(metrics), want)
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
	full := &seldom{log: slog.New(slog.DiscardHandler), clock: clock.Real()}
	one, other := s.on(tcp, full), s.on(unix, full)
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
