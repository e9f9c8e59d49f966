package leader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

func at(hash uint32, compacted int64) Hash {
	return Hash{Hash: hash, CompactRevision: compacted, HashRevision: 10, Revision: 10}
}

func TestJudge(t *testing.T) {
	ahead := at(1, 3)
	ahead.Revision = 11
	for _, c := range []struct {
		story   string
		members int
		told    map[uint64]Hash
		want    []uint64
	}{
		{"alone", 1, nil, nil},
		{"all alike", 3, map[uint64]Hash{2: at(1, 3), 3: at(1, 3)}, nil},
		{"one differs", 3, map[uint64]Hash{2: at(1, 3), 3: at(9, 3)}, []uint64{3}},
		{"the leader differs", 3, map[uint64]Hash{2: at(9, 3), 3: at(9, 3)}, []uint64{1}},
		{"two of five differ", 5, map[uint64]Hash{2: at(1, 3), 3: at(8, 3), 4: at(9, 3), 5: at(1, 3)}, []uint64{3, 4}},
		{"one against one, the third is away", 3, map[uint64]Hash{2: at(9, 3)}, []uint64{0}},
		{"two members", 2, map[uint64]Hash{2: at(9, 3)}, []uint64{0}},
		{"three different hashes", 3, map[uint64]Hash{2: at(8, 3), 3: at(9, 3)}, []uint64{0}},
		{"compacted elsewhere: not to be compared", 3, map[uint64]Hash{2: at(9, 2), 3: at(1, 3)}, nil},
		{"compacted beyond the leader", 3, map[uint64]Hash{2: at(9, 4), 3: at(1, 3)}, []uint64{2}},
		{"ahead of the leader", 3, map[uint64]Hash{2: ahead, 3: at(1, 3)}, []uint64{2}},
	} {
		var got []uint64
		suspects, _ := judge(1, c.members, at(1, 3), Standing{Revision: 10, CompactRevision: 3}, c.told)
		for _, s := range suspects {
			got = append(got, s.Member)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: suspects %x, want %x", c.story, got, c.want)
		}
	}
}

// checkRig is a cluster of hashes.
type checkRig struct {
	t       *testing.T
	clk     *clock.Fake
	checker *Checker
	ended   chan string // a comparison came to an end

	mu        sync.Mutex
	own       Hash           // the newest
	cached    map[int64]Hash // own ones that a compaction left, by revision
	stands    Standing
	empty     bool
	peers     map[uint64]Hash
	failing   map[uint64]error
	asked     int
	onAsk     func(n int) // before the n-th question is answered
	compacted []Hash
	raised    []uint64
}

func newCheckRig(t *testing.T) *checkRig {
	r := &checkRig{
		t: t, clk: clock.NewFake(time.Unix(1_000_000, 0)), ended: make(chan string, 16),
		own: at(1, 3), stands: Standing{Revision: 10, CompactRevision: 3}, cached: map[int64]Hash{}, peers: map[uint64]Hash{2: at(1, 3), 3: at(1, 3)}, failing: map[uint64]error{},
	}
	r.checker = NewChecker(CheckerOptions{
		Self: 1, Peers: func() []uint64 { return []uint64{2, 3} }, Leads: func() bool { return true },
		Hash: func(_ context.Context, rev int64) (Hash, bool, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if h, ok := r.cached[rev]; ok {
				return h, !r.empty, nil
			}
			return r.own, !r.empty, nil
		},
		Stands:      func() Standing { return r.stands },
		Compactions: func() []Hash { return r.compacted },
		Ask: func(_ context.Context, peer uint64, rev int64) (Hash, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.asked++
			if r.onAsk != nil {
				r.onAsk(r.asked)
			}
			if err := r.failing[peer]; err != nil {
				return Hash{}, err
			}
			for _, h := range r.compacted {
				if h.HashRevision == rev {
					h.Hash = r.peers[peer].Hash
					return h, nil
				}
			}
			return r.peers[peer], nil
		},
		Barrier: func(context.Context) error { return nil },
		Alarm:   func(m uint64) bool { return slices.Contains(r.raised, m) },
		Raise:   func(_ context.Context, m uint64) error { r.raised = append(r.raised, m); return nil },
		Every:   time.Hour, CompactEvery: time.Minute, Clock: r.clk, Logger: slog.New(slog.DiscardHandler),
		Checked: func(kind string, differ int) { r.ended <- fmt.Sprintf("%s %d", kind, differ) },
	})
	return r
}

// run checks the whole store and turns the clock until it came to an end.
func (r *checkRig) run(check func(context.Context) error) string {
	r.t.Helper()
	over := make(chan error, 1)
	go func() { over <- check(r.t.Context()) }()
	for {
		select {
		case err := <-over:
			if err != nil {
				r.t.Fatal(err)
			}
			select {
			case e := <-r.ended:
				return e
			default:
				return ""
			}
		case <-time.After(time.Millisecond):
			r.clk.Advance(roundPause)
		}
	}
}

func (r *checkRig) whole(ctx context.Context) error { return r.checker.whole(ctx, CheckStore) }

func TestCheckerRaisesForWhoDiffersAgainAndAgain(t *testing.T) {
	r := newCheckRig(t)
	if got := r.run(r.whole); got != "store 0" || r.asked != 2 {
		t.Fatalf("all alike: %q after %d questions", got, r.asked)
	}
	r.peers[3] = at(9, 3)
	r.asked = 0
	if got := r.run(r.whole); got != "store 1" || r.asked != 2*rounds || !slices.Equal(r.raised, []uint64{3}) {
		t.Fatalf("one differs: %q after %d questions, raised %x", got, r.asked, r.raised)
	}
	if r.run(r.whole); len(r.raised) != 1 {
		t.Fatalf("raised %x", r.raised)
	}
}

// A difference that goes away was none: a false alarm stops a healthy cluster.
func TestCheckerForgetsWhatIsNotRepeated(t *testing.T) {
	for last := 1; last < rounds; last++ {
		r := newCheckRig(t)
		r.peers[2] = at(9, 3)
		r.onAsk = func(n int) {
			if n > 2*last {
				r.peers[2] = at(1, 3)
			}
		}
		if got := r.run(r.whole); got != "store 0" || len(r.raised) != 0 {
			t.Fatalf("gone after %d rounds: %q, raised %x", last, got, r.raised)
		}
	}
	// Another one each time.
	r := newCheckRig(t)
	r.onAsk = func(n int) {
		r.peers = map[uint64]Hash{2: at(1, 3), 3: at(1, 3)}
		r.peers[2+uint64((n-1)/2)%2] = at(9, 3)
	}
	if got := r.run(r.whole); got != "store 0" || len(r.raised) != 0 {
		t.Fatalf("another one each time: %q, raised %x", got, r.raised)
	}
}

func TestCheckerDoesNotCompareWithNothing(t *testing.T) {
	r := newCheckRig(t)
	r.empty, r.peers[2] = true, at(9, 3)
	if got := r.run(r.whole); got != "" || len(r.raised) != 0 {
		t.Fatalf("an empty store: %q, raised %x", got, r.raised)
	}
	r = newCheckRig(t)
	r.failing[2], r.failing[3] = errors.New("down"), errors.New("down")
	if got := r.run(r.whole); got != "" || len(r.raised) != 0 {
		t.Fatalf("nobody answers: %q, raised %x", got, r.raised)
	}
	r = newCheckRig(t)
	r.peers[2], r.peers[3] = at(9, 2), at(9, 2)
	if got := r.run(r.whole); got != "" || len(r.raised) != 0 {
		t.Fatalf("compacted elsewhere: %q, raised %x", got, r.raised)
	}
	r.peers[3] = at(1, 3)
	if got := r.run(r.whole); got != "store 0" || len(r.raised) != 0 {
		t.Fatalf("one of them can be compared: %q, raised %x", got, r.raised)
	}
}

// The newest compaction is at the newest revision. Who remembers the hash that it left answers with the compaction before; who has
// started since reads its store and answers with that one.
func TestCheckerKnowsHowFarItIsCompacted(t *testing.T) {
	remembered, read := at(1, 3), at(1, 10)
	for _, c := range []struct {
		story  string
		leader map[int64]Hash
		peers  map[uint64]Hash
		want   string
	}{
		{"one follower has started since", map[int64]Hash{10: remembered}, map[uint64]Hash{2: read, 3: remembered}, "store 0"},
		{"both have", map[int64]Hash{10: remembered}, map[uint64]Hash{2: read, 3: read}, ""},
		{"the leader has", nil, map[uint64]Hash{2: remembered, 3: read}, "store 0"},
	} {
		r := newCheckRig(t)
		r.own, r.stands, r.cached, r.peers = read, Standing{Revision: 10, CompactRevision: 10}, c.leader, c.peers
		if got := r.run(r.whole); got != c.want || len(r.raised) != 0 {
			t.Errorf("%s: %q, raised %x", c.story, got, r.raised)
		}
	}
	r := newCheckRig(t)
	r.peers[2] = at(1, 10)
	if r.run(r.whole); !slices.Equal(r.raised, []uint64{2}) {
		t.Errorf("compacted beyond the leader: raised %x", r.raised)
	}
}

func TestCheckerFindsItself(t *testing.T) {
	r := newCheckRig(t)
	r.onAsk = func(n int) { r.own.Hash++ }
	if r.run(r.whole); !slices.Equal(r.raised, []uint64{1}) {
		t.Fatalf("two hashes of its own: raised %x", r.raised)
	}
}

func TestCheckerComparesCompactions(t *testing.T) {
	r := newCheckRig(t)
	for rev := int64(5); rev < 8; rev++ {
		r.compacted = append(r.compacted, Hash{Hash: 1, CompactRevision: rev - 1, HashRevision: rev})
	}
	if got := r.run(r.checker.compactions); got != "compaction 0" || r.asked != 2 {
		t.Fatalf("all alike: %q after %d questions", got, r.asked)
	}
	if r.run(r.checker.compactions); r.asked != 2 {
		t.Fatal("what was agreed on is asked again")
	}
	// Who has not answered may yet.
	r.compacted = append(r.compacted, Hash{Hash: 1, CompactRevision: 7, HashRevision: 8})
	r.failing[3] = errors.New("down")
	if got := r.run(r.checker.compactions); got != "" {
		t.Fatalf("one does not answer: %q", got)
	}
	delete(r.failing, 3)
	if got := r.run(r.checker.compactions); got != "compaction 0" {
		t.Fatalf("it answers: %q", got)
	}
	// A difference in what was deleted is no alarm if what is kept is alike.
	r.compacted = append(r.compacted, Hash{Hash: 7, CompactRevision: 8, HashRevision: 9})
	if got := r.run(r.checker.compactions); got != "compaction 0" || len(r.raised) != 0 {
		t.Fatalf("alike now: %q, raised %x", got, r.raised)
	}
	r.compacted = append(r.compacted, Hash{Hash: 1, CompactRevision: 9, HashRevision: 11})
	r.peers[2] = at(9, 3)
	if got := r.run(r.checker.compactions); got != "compaction 1" || !slices.Equal(r.raised, []uint64{2}) {
		t.Fatalf("one differs: %q, raised %x", got, r.raised)
	}
}

// A peer that does not remember a compaction reads its whole store to answer.
func TestCheckerGivesUpACompaction(t *testing.T) {
	r := newCheckRig(t)
	r.compacted = []Hash{{Hash: 1, CompactRevision: 4, HashRevision: 5}}
	r.failing[3] = errors.New("down")
	for range 10 {
		r.run(r.checker.compactions)
	}
	if r.asked != 2*maxLooks {
		t.Fatalf("%d questions, want %d", r.asked, 2*maxLooks)
	}
	r.compacted = append(r.compacted, Hash{Hash: 1, CompactRevision: 5, HashRevision: 7})
	delete(r.failing, 3)
	if got := r.run(r.checker.compactions); got != "compaction 0" {
		t.Fatalf("the next one: %q", got)
	}
}

// TestCheckerRuns: the clock has it look at both kinds, and only a leader looks.
func TestCheckerRuns(t *testing.T) {
	r := newCheckRig(t)
	var leads atomic.Bool
	looked := make(chan struct{}, 1000)
	r.checker.o.Leads = func() bool {
		defer func() { looked <- struct{}{} }()
		return leads.Load()
	}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() { r.checker.Run(ctx); close(over) }()
	defer func() { cancel(); <-over }()
	r.clk.WaitAlarms(2)
	r.clk.Advance(time.Hour) // both fall due
	<-looked
	<-looked
	r.mu.Lock()
	asked := r.asked
	r.mu.Unlock()
	if asked != 0 {
		t.Fatal("a follower asks")
	}
	leads.Store(true)
	for {
		r.clk.Advance(time.Hour)
		select {
		case got := <-r.ended:
			if got != "store 0" {
				t.Fatal(got)
			}
			return
		case <-time.After(time.Millisecond):
		}
	}
}
