package consensus

import (
	"container/heap"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"testing"
	"testing/cryptotest"
	"time"

	"go.etcd.io/raft/v3/raftpb"
)

// world is a whole cluster in one goroutine: Core, LogWriter and Applier of each member on a log in memory, a network and a
// clock, all moved by one seeded source of chance. Equal seeds give equal traces.
type world struct {
	rng     *rand.Rand
	now     time.Time
	seq     uint64
	size    int // founders
	members []*simMember
	net     network
	cut     map[uint64]bool // members on the far side of the partition, if any
	drop    float64
	quiet   bool // no more faults
	mutant  mutant
	trace   interface {
		io.Writer
		Sum64() uint64
	}

	check checker
	cover map[string]int
	extra int    // how far the lives of the extra members have got
	keep  uint64 // how many entries logs keep for those that lag
}

// mutant is a fault put in on purpose, to see that the checks find it.
type mutant int

const (
	sound      mutant = iota
	noSync            // the log says that it has synced and has not
	staleRead         // a member that was a leader answers reads without asking
	coveredRun        // entries that a snapshot covers are applied after it
)

// packet is something that happens later: a message that arrives, mostly.
type packet struct {
	at     time.Time
	seq    uint64
	happen func()
}

type network []packet

func (n network) Len() int { return len(n) }
func (n network) Less(i, j int) bool {
	return n[i].at.Before(n[j].at) || n[i].at.Equal(n[j].at) && n[i].seq < n[j].seq
}
func (n network) Swap(i, j int) { n[i], n[j] = n[j], n[i] }
func (n *network) Push(x any)   { *n = append(*n, x.(packet)) }
func (n *network) Pop() any {
	old := *n
	p := old[len(old)-1]
	*n = old[:len(old)-1]
	return p
}

const simTick = 100 * time.Millisecond

// simExtra is the first of the simExtras members that join and leave on the way, one after the other.
const (
	simExtra  = 9
	simExtras = 3
)

func newWorld(seed uint64, size int, m mutant) (*world, error) {
	w := &world{
		rng: rand.New(rand.NewPCG(seed, uint64(size))), now: time.Unix(1e9, 0), trace: fnv.New64a(), mutant: m, size: size,
		cover: map[string]int{}, cut: map[uint64]bool{}, drop: 0.05,
	}
	w.keep = []uint64{20, 60, 300}[w.rng.IntN(3)]
	w.check = newChecker()
	var founders []Founder
	for i := range size {
		founders = append(founders, Founder{ID: uint64(i + 1)})
	}
	ids := founders
	if size > 1 {
		for i := range simExtras {
			ids = append(ids[:size+i:size+i], Founder{ID: uint64(simExtra + i)})
		}
	}
	for _, f := range ids {
		sm := &simMember{w: w, id: f.ID, log: newMemLog(), flushed: newListMachine(), waiting: map[uint64]bool{}}
		sm.disk = sm.flushed.disk
		if f.ID < simExtra {
			if err := Bootstrap(sm.log, founders); err != nil {
				return nil, err
			}
		}
		w.members = append(w.members, sm)
		if err := sm.start(); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// later has f happen after d.
func (w *world) later(d time.Duration, f func()) {
	w.seq++
	heap.Push(&w.net, packet{w.now.Add(d), w.seq, f})
}

// member returns the member with this ID, nil if there is none.
func (w *world) member(id uint64) *simMember {
	for _, sm := range w.members {
		if sm.id == id {
			return sm
		}
	}
	return nil
}

func (w *world) chance(p float64) bool { return w.rng.Float64() < p }

func (w *world) note(format string, args ...any) { fmt.Fprintf(w.trace, format+"\n", args...) }

// run lets the world go on for some time of its own.
func (w *world) run(d time.Duration) error {
	for end := w.now.Add(d); w.now.Before(end); {
		w.now = w.now.Add(time.Duration(1+w.rng.IntN(10)) * time.Millisecond)
		w.disturb()
		for len(w.net) > 0 && !w.net[0].at.After(w.now) {
			heap.Pop(&w.net).(packet).happen()
		}
		for _, sm := range w.members {
			if err := sm.live(); err != nil {
				return fmt.Errorf("at %v: %w", w.now.Sub(time.Unix(1e9, 0)), err)
			}
		}
		if w.check.err != nil {
			return fmt.Errorf("at %v: %w", w.now.Sub(time.Unix(1e9, 0)), w.check.err)
		}
	}
	return nil
}

func (w *world) deliver(m *raftpb.Message) {
	if w.cut[m.GetFrom()] != w.cut[m.GetTo()] {
		w.cover["partitioned"]++
		return
	}
	if sm := w.member(m.GetTo()); sm != nil && sm.core != nil {
		w.note("%d<-%d %v %d %d %d", m.GetTo(), m.GetFrom(), m.GetType(), m.GetTerm(), m.GetIndex(), len(m.GetEntries()))
		sm.in.Received = append(sm.in.Received, m)
	}
}

// disturb is the bad luck of one moment.
func (w *world) disturb() {
	if w.quiet {
		return
	}
	if w.chance(0.002) {
		clear(w.cut)
		if w.chance(0.5) {
			w.cover["partition"]++
			for _, sm := range w.members {
				w.cut[sm.id] = w.chance(0.4)
			}
		}
	}
	sm := w.members[w.rng.IntN(len(w.members))]
	switch {
	case sm.core == nil:
	case w.chance(0.001):
		sm.crash()
	case w.chance(0.001):
		w.cover["stalled"]++
		sm.stalled = w.now.Add(time.Duration(w.rng.IntN(3000)) * time.Millisecond)
	case w.chance(0.003):
		w.cover["applies nothing"]++
		sm.lazy = w.now.Add(time.Duration(2000+w.rng.IntN(8000)) * time.Millisecond)
		if w.chance(0.5) { // and then it is cut off, so that a snapshot may find entries waiting
			clear(w.cut)
			w.cut[sm.id] = true
		}
	case w.chance(0.003):
		sm.in.TransferTo = uint64(1 + w.rng.IntN(len(w.members)))
	case w.chance(0.002):
		sm.in.HandOver = true
	}
}

// simulate runs one world through trouble, then lets it come to rest, and checks what must hold at the end.
func simulate(t *testing.T, seed uint64, size int, m mutant) (w *world, err error) {
	cryptotest.SetGlobalRandom(t, seed) // raft draws its election time-outs from there
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	w, err = newWorld(seed, size, m)
	if err != nil {
		return w, err
	}
	if err := w.run(20 * time.Second); err != nil {
		return w, err
	}
	w.quiet, w.drop = true, 0
	clear(w.cut)
	if err := w.run(12 * time.Second); err != nil {
		return w, err
	}
	return w, w.settle()
}

// settle checks the end: everyone has applied the same, and everyone was answered once.
func (w *world) settle() error {
	before := len(w.check.log)
	for _, sm := range w.members {
		if err := w.check.holds(sm); err != nil {
			return err
		}
		if index, _ := sm.machine.Applied(); sm.id < simExtra && index+200 < w.check.highest {
			return fmt.Errorf("member %d has applied %d of %d entries, twelve seconds after the last fault", sm.id, index, w.check.highest)
		}
		var out Output
		sm.core.Stop(&sm.in, &out)
		for _, c := range out.Completions {
			c.Done(c.Result, c.Err)
		}
		for _, c := range out.Reads {
			c.Done(c.Err)
		}
	}
	if before < 50 {
		return fmt.Errorf("only %d entries were applied", before)
	}
	return w.check.settle()
}

var (
	simSeeds = flag.Uint64("seeds", 0, "how many seeds to simulate; 0 is few, and checks that they cover everything")
	simSeed  = flag.Uint64("seed", 0, "first seed to simulate")
)

var seedsBySize = map[int]uint64{1: 100, 3: 30, 5: 8}

func TestSimulation(t *testing.T) {
	for _, size := range []int{1, 3, 5} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			first, seeds, cover := uint64(0), seedsBySize[size], map[string]int{}
			if *simSeeds > 0 {
				first, seeds = *simSeed, *simSeeds
			} else if raceDetector {
				seeds = 1
			}
			for seed := first; seed < first+seeds; seed++ {
				w, err := simulate(t, seed, size, sound)
				if err != nil {
					t.Fatalf("%v\nreplay: go test ./internal/consensus -run 'TestSimulation/^%d$' -seeds 1 -seed %d", err, size, seed)
				}
				for k, v := range w.cover {
					cover[k] += v
				}
			}
			want := []string{"crashed", "crashed with unsynced appends", "restarted", "proposal: <nil>", "read: <nil>",
				"consensus.LeaderChanged", "consensus.LeadershipConfirmed", "proposal: consensus: request cancelled", "flushed"}
			if size == 1 {
				want = append(want, "log cut", "consensus.LogCut")
			} else {
				want = append(want, "dropped", "duplicated", "partition", "partitioned", "conf change: <nil>", "read: consensus: leader changed",
					"read: consensus: request timed out", "proposal: consensus: request timed out",
					"proposal: consensus: request timed out, possibly due to connection lost", "log cut", "consensus.SnapshotInstalled",
					"crashed with a snapshot unsynced", "crashed in an install: false", "crashed in an install: true",
					"snapshot sent: false", "snapshot sent: true", "applies nothing", "entries covered by a snapshot")
			}
			for _, k := range want {
				if cover[k] == 0 && seeds >= seedsBySize[size] {
					t.Errorf("no %q in any run: %v", k, cover)
				}
			}
			t.Log(cover)
		})
	}
}

func TestSimulationRepeats(t *testing.T) {
	for _, size := range []int{1, 3} {
		if raceDetector && size > 1 {
			continue
		}
		a, err := simulate(t, 7, size, sound)
		if err != nil {
			t.Fatal(err)
		}
		b, err := simulate(t, 7, size, sound)
		if err != nil {
			t.Fatal(err)
		}
		if a.trace.Sum64() != b.trace.Sum64() {
			t.Fatalf("size %d: the same seed gave traces %x and %x", size, a.trace.Sum64(), b.trace.Sum64())
		}
		c, err := simulate(t, 8, size, sound)
		if err != nil {
			t.Fatal(err)
		}
		if a.trace.Sum64() == c.trace.Sum64() {
			t.Fatalf("size %d: two seeds gave one trace", size)
		}
	}
}

// TestSimulationFindsMutants shows that the checks can fail.
func TestSimulationFindsMutants(t *testing.T) {
	for m, name := range map[mutant]string{noSync: "no sync", staleRead: "stale read", coveredRun: "covered entries"} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(50) {
				if _, err := simulate(t, seed, 3, m); err != nil {
					t.Logf("found with seed %d: %v", seed, err)
					return
				}
			}
			t.Fatal("not found")
		})
	}
}
