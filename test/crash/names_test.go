package crash

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// lying are the names that kills have left, with their numbers taken out, and how often.
type lying map[string]int

// look fails the test for each name in a data directory that `engram util verify` would not know.
func (l lying) look(t *testing.T, dir string) {
	t.Helper()
	unknown, err := datadir.Unknown(storage.DefaultFS, dir, "")
	if err != nil {
		t.Fatal(err)
	}
	if len(unknown) > 0 {
		t.Errorf("%s has names that nobody knows: %q", dir, unknown)
	}
	err = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		name := strings.TrimPrefix(path, dir)
		if err == nil && strings.HasSuffix(name, "/store") {
			return filepath.SkipDir
		}
		l[strings.Map(func(r rune) rune {
			if r >= '0' && r <= '9' {
				return -1
			}
			return r
		}, name)]++
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (l lying) String() string { return fmt.Sprint(slices.Sorted(maps.Keys(l))) }

// mostStart is up to when members are killed after their start, even if the first one took longer.
const mostStart = 500 * time.Millisecond

// TestNamesOfStarts kills members somewhere in their first start, and in later ones.
func TestNamesOfStarts(t *testing.T) {
	births, lives := 8, 3
	if long() {
		births = 60
	}
	seen := lying{}
	for _, seed := range seeds(t, 1) {
		replay(t, seed)
		rnd := rand.New(rand.NewPCG(seed, 3))
		start := func(dir string) (*process, <-chan string) {
			return spawn(t, dir, "--auto-tls", "--peer-auto-tls", "--listen-client-urls=https://127.0.0.1:0", "--advertise-client-urls=https://127.0.0.1:0")
		}
		began := time.Now()
		p, ready := start(filepath.Join(t.TempDir(), "data"))
		select {
		case <-ready:
		case <-p.exited:
			t.Fatalf("it ended while starting: %v\n%s", p.err, p.output)
		}
		takes := min(time.Since(began), mostStart) // as do those that follow, more or less
		p.kill()
		for range births {
			dir := filepath.Join(t.TempDir(), "data")
			for range lives {
				p, _ := start(dir)
				select {
				case <-time.After(time.Duration(rnd.Int64N(int64(takes)))): // the moment is what is tested
				case <-p.exited:
					t.Fatalf("it ended by itself: %v\n%s", p.err, p.output)
				}
				p.kill()
				if _, err := os.Stat(dir); err == nil {
					seen.look(t, dir)
				}
			}
			if err := os.RemoveAll(dir); err != nil { // its log has tens of megabytes to itself
				t.Fatal(err)
			}
		}
	}
	t.Logf("seen: %v", seen)
	for _, name := range []string{"/IDENTITY", "/fixtures/client/key.pem", "/fixtures/peer/cert.pem", "/log/spare-"} {
		if long() && seen[name] == 0 { // a few kills may miss a moment
			t.Errorf("no kill left %s", name)
		}
	}
}

// TestNamesOfSnapshots kills a member while it takes a snapshot in, and the one that sends it.
func TestNamesOfSnapshots(t *testing.T) {
	rounds := 2 // of both
	if long() {
		rounds = 20
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	p, err := cluster.Build(cluster.DefaultProgram)
	if err != nil {
		t.Fatal(err)
	}
	c := cluster.New(t.TempDir())
	c.Flags = []string{"--snapshot-catchup-entries=10", "--unsafe-no-fsync"}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.Logs())
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(c.Start(ctx, p))
	first := c.Members()[0]
	put := func(key, value string, n int) {
		t.Helper()
		client, err := first.Client()
		must(err)
		for i := range n {
			_, err := client.Put(ctx, fmt.Sprintf("%s/%d", key, i), value)
			must(err)
		}
	}
	put("large", strings.Repeat("0123456789abcdef", 1<<15), 150) // 75 MiB
	learner, err := c.Add(ctx, p, true)
	must(err)
	seen := lying{}
	for round := range rounds {
		must(learner.Kill())
		put("small", "v", 300)
		must(first.Stop()) // then all of it is durable in the store, and the log can be cut
		must(first.Restart(ctx))
		put("small", "v", 300)
		// What is seen as soon as it is there ends at any moment after.
		pattern, victim := filepath.Join(learner.DataDir, datadir.SnapshotPrefix+"*"+datadir.ReceivingSuffix), learner
		if round%2 == 1 {
			pattern, victim = filepath.Join(first.DataDir, datadir.SendingPrefix+"*"), first
		}
		must(learner.Spawn())
		for {
			found, err := filepath.Glob(pattern)
			must(err)
			if len(found) > 0 {
				break
			}
			select {
			case <-ctx.Done():
				t.Fatalf("no %s: %v", pattern, ctx.Err())
			case <-learner.Exited():
				t.Fatal("the learner ended by itself")
			case <-time.After(time.Millisecond): // another process: there is no event to wait for
			}
		}
		must(victim.Kill())
		seen.look(t, victim.DataDir)
		must(victim.Spawn())
		must(first.Ready(ctx))
		must(learner.Ready(ctx))
	}
	t.Logf("seen: %v", seen)
	for _, part := range []string{datadir.ReceivingSuffix, "/" + datadir.SendingPrefix} {
		if !strings.Contains(seen.String(), part) {
			t.Errorf("no kill left a name with %s", part)
		}
	}
}
