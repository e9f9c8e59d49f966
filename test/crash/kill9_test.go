package crash

import (
	"errors"
	"flag"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "run this seed only, 0 for the usual ones")
	livesFlag = flag.Int("lives", 0, "lives of each seed, 0 for the usual number")
)

// seeds are those to be run: n of them, others in each run, or the one asked for.
func seeds(t testing.TB, n int) []uint64 {
	t.Helper()
	if *seedFlag != 0 {
		return []uint64{*seedFlag}
	}
	out := make([]uint64, n)
	for i := range out {
		out[i] = rand.Uint64() >> 32
	}
	return out
}

// replay is the line that runs a seed again.
func replay(t testing.TB, seed uint64) {
	t.Helper()
	t.Logf("replay: go test ./test/crash -run '^%s$' -seed %d", t.Name(), seed)
}

// TestKill9 kills a process under load at random moments, dozens of times on one
// data directory.
func TestKill9(t *testing.T) {
	lives := 6
	if long() {
		lives = 60
	}
	if *livesFlag != 0 {
		lives = *livesFlag
	}
	for _, seed := range seeds(t, 1) {
		replay(t, seed)
		rnd := rand.New(rand.NewPCG(seed, 1))
		dir := filepath.Join(t.TempDir(), "data")
		w := newLoad(seed)
		for n := range lives {
			p, err := startProcess(t, dir, "--snapshot-catchup-entries=100")
			if err != nil {
				t.Fatalf("life %d: %v", n, err)
			}
			l, err := w.begin(p.addr, rnd.IntN(500))
			if err != nil {
				t.Fatalf("life %d: %v\n%s", n, err, p.output)
			}
			select {
			case <-l.enough:
			case <-p.exited:
				t.Fatalf("life %d: the process ended by itself: %v\n%s", n, p.err, p.output)
			case <-time.After(time.Minute):
				t.Fatalf("life %d: too few answers within a minute: %v\n%s", n, w.failed(), p.output)
			}
			p.kill()
			l.gone()
		}
		p, err := startProcess(t, dir)
		if err != nil {
			t.Fatal(err)
		}
		w.finish(t, p.addr)
		if err := p.stop(); err != nil {
			t.Error(err)
		}
	}
}

// finish audits a member for the last time and judges what was tried.
func (w *load) finish(t testing.TB, addr string) {
	t.Helper()
	if err := w.end(addr, t.Logf); err != nil {
		t.Error(err)
	}
}

// end is finish for those who want the error.
func (w *load) end(addr string, logf func(string, ...any)) error {
	l, err := w.begin(addr, 50)
	if err != nil {
		return err
	}
	select {
	case <-l.enough:
	case <-time.After(time.Minute):
	}
	l.gone()
	if err := errors.Join(w.failed(), w.journal.check()); err != nil {
		return err
	}
	g := w.ledger
	logf("%d answers, %d events up to revision %d, compacted at %d, %d leases; of the requests without an answer %d took place, %d did not; %d operations on shared keys",
		g.count, len(g.records), g.seen(), g.compacted, len(g.leases), g.kept, g.dropped, len(w.journal.history))
	if g.compacted == 0 || len(g.leases) == 0 || len(w.journal.history) == 0 {
		return errTooLittle
	}
	return nil
}
