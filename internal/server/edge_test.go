package server

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

// TestSeldom: a warning is logged; those that come soon after it are counted.
func TestSeldom(t *testing.T) {
	var out strings.Builder
	now := clock.NewFake(time.Unix(1_000_000, 0))
	s := &seldom{log: slog.New(slog.NewTextHandler(&out, nil)), clock: now, message: "refused"}
	for range 3 {
		s.warn("from", "10.0.0.7:5", "error", "no SAN fits")
	}
	now.Advance(seldomPause)
	s.warn("from", "10.0.0.8:6", "error", "EOF")
	got := out.String()
	if strings.Count(got, "msg=refused") != 2 || !strings.Contains(got, `from=10.0.0.7:5 error="no SAN fits" count=1`) || !strings.Contains(got, "from=10.0.0.8:6 error=EOF count=3") {
		t.Errorf("logged:\n%s", got)
	}
}

// heard passes on lines of a log.
type heard chan string

func (h heard) Write(line []byte) (int, error) {
	select {
	case h <- string(line):
	default: // nobody reads so many
	}
	return len(line), nil
}

// TestHealthWhenClientsTookAll: when clients have taken all connections that they may have, what tells how the member is goes on, on every listener
// that is not theirs, and the log says why they wait.
func TestHealthWhenClientsTookAll(t *testing.T) {
	log := make(heard, 1000)
	m, err := tryStartWith(t, t.TempDir(), slog.New(slog.NewTextHandler(log, nil)), Seams{}, "--listen-client-http-urls=http://localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, m)
	all := m.edge.client[0].Listener.(*seatedListener).seats
	for taken := true; taken; {
		select {
		case all <- struct{}{}:
		default:
			taken = false
		}
	}
	conn, err := net.Dial("tcp", m.ClientAddrs()[0]) // this one there was a seat for, and for the next one is none
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for told, late := false, time.After(20*time.Second); !told; {
		select {
		case line := <-log:
			told = strings.Contains(line, "as many connections are open as may be")
			if told && !strings.Contains(line, fmt.Sprintf("on=%s connections=%d", m.ClientAddrs()[0], cap(all))) {
				t.Error(line)
			}
		case <-late:
			t.Fatal("nobody is told")
		}
	}
	// Who says nothing gives its seat up after 20 s.
	asks := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for _, l := range []*listener{m.edge.metrics[0], m.edge.clientHTTP[0]} {
		for range 2 { // the first one would leave its seat to clients
			resp, err := asks.Get("http://" + l.Addr().String() + "/health")
			if err != nil {
				t.Fatal(err)
			}
			if _ = resp.Body.Close(); resp.StatusCode != http.StatusOK {
				t.Errorf("health: %s", resp.Status)
			}
		}
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
