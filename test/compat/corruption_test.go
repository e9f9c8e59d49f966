package compat

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/internal/cluster"
	"github.com/engram-kv/engram/test/internal/history"
)

// TestMixedHashChecks has a mixed cluster under load and compaction compare hashes all the time, while leadership goes
// round: a real member acts on the first difference it sees, and so must see none. No alarm is raised.
func TestMixedHashChecks(t *testing.T) {
	t.Parallel() // it waits more than it works
	soak := 40 * time.Second
	if os.Getenv("ENGRAM_CI") != "" {
		soak = 2 * time.Minute
	}
	for name, programs := range compositions(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := mixedContext(t)
			c := newCluster(t, "--unsafe-no-fsync", "--corrupt-check-time=1s", "--compact-hash-check-time=1s", "--feature-gates=CompactHashCheck=true,InitialCorruptCheck=true")
			check(t, c.Start(ctx, programs...))
			l, err := history.Start(c, history.Options{Seed: rand.Uint64(), Compact: true})
			check(t, err)
			defer l.Abandon()
			began := time.Now()
			compared := 0.0 // by Engram's members, in all their lives
			for turn := 0; time.Since(began) < soak; turn++ {
				m := c.Members()[turn%3]
				check(t, l.Answers(ctx, 500))
				check(t, l.Disturb(func() error { return c.MoveLeader(ctx, m) }))
				if turn%4 == 3 { // hashes of compactions are forgotten, and the first comparison is made
					compared += checksOf(t, m) // which the new process counts from zero
					check(t, l.Disturb(func() error { return errors.Join(m.Stop(), m.Restart(ctx)) }))
				}
				// Long enough for each leader to compare some times.
				for led := time.Now(); time.Since(led) < 5*time.Second; {
					check(t, l.Answers(ctx, 100))
				}
				client, err := m.Client()
				check(t, err)
				alarms, err := client.AlarmList(ctx)
				check(t, err)
				if len(alarms.Alarms) > 0 {
					t.Fatalf("after %v, with %s leading: alarms %v", time.Since(began), m, alarms.Alarms)
				}
			}
			_, err = l.Judge(ctx)
			check(t, err)
			for _, m := range c.Members() {
				compared += checksOf(t, m)
			}
			if compared < 5 && programs[2].Name == "engram" {
				t.Errorf("Engram's members compared %v times in %v", compared, soak)
			}
		})
	}
}

// checksOf is how many comparisons of a member ended equal since it was started; 0 of etcd, which does not tell.
func checksOf(t *testing.T, m *cluster.Member) (n float64) {
	t.Helper()
	resp, err := http.Get(m.ClientURL + "/metrics")
	check(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	check(t, err)
	for line := range strings.SplitSeq(string(body), "\n") {
		var v float64
		if strings.HasPrefix(line, "engram_hash_checks_total") && strings.Contains(line, `result="equal"`) {
			if _, err := fmt.Sscan(line[strings.LastIndex(line, " ")+1:], &v); err == nil {
				n += v
			}
		}
	}
	return n
}
