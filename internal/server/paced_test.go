package server

import (
	"bufio"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestPaceIsShown: a metric tells what keeps a backup from its full pace.
func TestPaceIsShown(t *testing.T) {
	m := start(t, t.TempDir())
	defer stop(t, m)
	share := func() float64 {
		t.Helper()
		resp, err := http.Get("http://" + m.ClientAddrs()[0] + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		lines := bufio.NewScanner(resp.Body)
		for lines.Scan() {
			if value, ok := strings.CutPrefix(lines.Text(), "engram_pace_share "); ok {
				share, err := strconv.ParseFloat(value, 64)
				if err != nil {
					t.Fatal(err)
				}
				return share
			}
		}
		t.Fatal("there is no such metric ", lines.Err())
		return 0
	}
	if got := share(); got != 1 {
		t.Errorf("share %v while nothing goes on, want 1", got)
	}
	work := m.pace.Begin()
	defer work.End()
	// The member's own log has a sync now and then, which ends the one that is late here.
	for began := time.Now(); share() == 1; {
		if time.Since(began) > time.Minute {
			t.Fatal("the share is 1 still, while every sync is late")
		}
		m.pace.SyncBegan()
		time.Sleep(50 * time.Millisecond) // is how long this sync takes
		m.pace.SyncEnded()
	}
}
