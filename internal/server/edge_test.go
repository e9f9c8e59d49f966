package server

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

// TestRefusals: a peer that is refused is logged; those that come soon after it
// are counted.
func TestRefusals(t *testing.T) {
	var out strings.Builder
	now := clock.NewFake(time.Unix(1_000_000, 0))
	r := &refusals{log: slog.New(slog.NewTextHandler(&out, nil)), clock: now}
	for range 3 {
		r.add(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 7), Port: 5}, errors.New("no SAN fits"))
	}
	now.Advance(refusalPause)
	r.add(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 8), Port: 6}, errors.New("EOF"))
	got := out.String()
	if strings.Count(got, "\n") != 2 || !strings.Contains(got, `from=10.0.0.7:5 error="no SAN fits" count=1`) || !strings.Contains(got, "from=10.0.0.8:6 error=EOF count=3") {
		t.Errorf("logged:\n%s", got)
	}
}

// TestSilentPeer: who connects to a peer URL and says nothing, or nothing more,
// is hung up on.
func TestSilentPeer(t *testing.T) {
	t.Parallel()
	m := start(t, t.TempDir())
	defer stop(t, m)
	for _, says := range []string{"", "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"} {
		conn, err := net.Dial("tcp", m.edge.peer[0].Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, says); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(6 * peerSilence))
		got, err := io.ReadAll(conn)
		if err != nil || strings.HasPrefix(string(got), "HTTP/1.1 200") != (says != "") {
			t.Errorf("after %q: %q, %v", says, got, err)
		}
	}
}
