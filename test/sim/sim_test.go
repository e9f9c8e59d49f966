package sim

import (
	"flag"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"testing"
	"testing/cryptotest"
	"time"

	"github.com/engram-kv/engram/test/internal/broken"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "first seed to run; alone, unless -seeds is given")
	seedsFlag = flag.Uint64("seeds", 0, "how many seeds to run; 0 is few, which have to cover everything")
	linesFlag = flag.Bool("lines", false, "print the trace as it happens")
	onceFlag  = flag.Bool("once", false, "run each seed once, and do not compare traces")
)

// simulate lives through one world.
func simulate(t *testing.T, seed uint64, m mutant) (w *world, err error) {
	cryptotest.SetGlobalRandom(t, seed) // raft draws its election time-outs from there
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	w = newWorld(seed, m)
	return w, w.run()
}

// defaultSeeds are run without flags.
const defaultSeeds = 100

func TestSim(t *testing.T) {
	first, count := max(1, *seedFlag), *seedsFlag
	switch {
	case count == 0 && *seedFlag != 0:
		count = 1
	case count == 0:
		count = defaultSeeds
	}
	cover := map[string]int{}
	began, longest, which := time.Now(), time.Duration(0), uint64(0)
	for seed := first; seed < first+count; seed++ {
		start := time.Now()
		w, err := simulate(t, seed, sound)
		if err != nil {
			t.Fatal(broken.Errorf("seed %d: %v\nthe end of the trace:\n%s\nreplay: go test ./test/sim -run 'TestSim$' -seed %d", seed, err, w.trace.end(), seed))
		}
		if !*onceFlag {
			again, err := simulate(t, seed, sound)
			if err != nil || again.trace.hash.Sum64() != w.trace.hash.Sum64() {
				t.Fatal(broken.Errorf("seed %d: the first run gave trace %016x of %d lines, the second %016x of %d, %v\n"+
					"replay: go test ./test/sim -run 'TestSim$' -seed %d",
					seed, w.trace.hash.Sum64(), w.trace.n, again.trace.hash.Sum64(), again.trace.n, err, seed))
			}
		}
		for k, v := range w.cover {
			cover[k] += v
		}
		if took := time.Since(start); took > longest {
			longest, which = took, seed
		}
	}
	for _, k := range slices.Sorted(maps.Keys(cover)) {
		t.Logf("%8d %s", cover[k], k)
	}
	t.Logf("%d seeds in %v, the longest is %d: %v", count, time.Since(began).Round(time.Millisecond), which, longest.Round(time.Millisecond))
	want := []string{}
	if count >= defaultSeeds {
		want = append(want, often...)
	}
	if count >= 10*defaultSeeds {
		want = append(want, seldom...)
	}
	for _, k := range want {
		if cover[k] == 0 {
			t.Errorf("no run saw %q", k)
		}
	}
}

// often is what a hundred seeds have to see, seldom what a thousand have to.
var often = []string{
	"at rest", "history", "crash", "crash while starting", "crash while writing the log",
	"message lost", "message duplicated", "message cut off", "message of a removed member",
	"snapshot sent", "snapshot received", "snapshot installed", "log cut", "flush", "compaction", "prefetch",
	"change ConfChangeAddLearnerNode", "change ConfChangeAddNode", "change ConfChangeRemoveNode",
	"g: answered", "g: unknown", "p: answered", "p: unknown", "p: refused", "c: answered", "d: answered", "s: answered", "r: answered",
	"l: answered", "k: answered", "a: answered", "lease ended", "lease renewed",
	"revision watched", "watcher full", "progress notice",
}

var seldom = []string{
	"crash while receiving a snapshot", "crash while installing a snapshot", "snapshot installed over an older state", "snapshot lost",
	"leases extended after a standstill", "watcher compacted", "consensus.LeadershipHandedOver", "error: consensus: stopped",
	"error: consensus: proposal dropped", "error: the disk is full",
}

// mutantSeeds is within how many seeds a mutant is to be found.
const mutantSeeds = 250

// TestMutants shows that the checks can fail.
func TestMutants(t *testing.T) {
	for _, m := range slices.Sorted(maps.Keys(mutants)) {
		t.Run(mutants[m], func(t *testing.T) {
			for seed := range uint64(mutantSeeds) {
				if _, err := simulate(t, seed+1, m); err != nil {
					t.Logf("found with seed %d: %.400v", seed+1, err)
					return
				}
			}
			t.Errorf("not found with %d seeds", mutantSeeds)
		})
	}
}
