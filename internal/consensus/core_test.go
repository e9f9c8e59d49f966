package consensus

import (
	"errors"
	"strings"
	"testing"
	"testing/cryptotest"
	"time"

	"github.com/cockroachdb/datadriven"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/raftlog"
)

func TestCore(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		cryptotest.SetGlobalRandom(t, 1)
		start := time.Unix(1e9, 0)
		s := &script{t: t, now: start, born: start, ids: NewIDs(1, start), connected: map[uint64]time.Time{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.t = t
			return s.run(d)
		})
	})
}

func TestTimeoutErrors(t *testing.T) {
	at := func(seconds int) time.Time { return time.Unix(1e9+int64(seconds), 0) }
	opt, err := Options{ID: 1, Log: newMemLog(), Machine: newListMachine(), IDs: NewIDs(1, at(0))}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name      string
		leader    uint64
		since     int // the leader was elected
		start     int
		connected map[uint64]time.Time
		want      error
	}{
		{name: "long before the election", leader: 1, since: 10, start: 7, want: ErrTimeoutDueToConnectionLost},
		{name: "shortly before the election", leader: 1, since: 10, start: 8, want: ErrTimeoutDueToLeaderFail},
		{name: "no leader", leader: 0, since: 10, start: 12, want: ErrTimeout},
		{name: "leader not connected", leader: 2, since: 10, start: 12, want: ErrTimeoutDueToConnectionLost},
		{name: "leader connected again", leader: 2, since: 10, start: 12, connected: map[uint64]time.Time{2: at(13)}, want: ErrTimeoutDueToConnectionLost},
		{name: "leader connected", leader: 2, since: 10, start: 12, connected: map[uint64]time.Time{2: at(12)}, want: ErrTimeout},
		{name: "leading without quorum", leader: 1, since: 10, start: 12, want: ErrTimeoutDueToConnectionLost},
		{name: "leading with quorum", leader: 1, since: 10, start: 12, connected: map[uint64]time.Time{3: at(1)}, want: ErrTimeout},
	} {
		c := &Core{opt: opt, leader: tc.leader, leaderSince: at(tc.since), voters: []uint64{1, 2, 3}}
		c.opt.Transport = &script{connected: tc.connected}
		if err := c.timeoutError(at(tc.start)); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
}

func TestOpenRefusesWhatDoesNotFit(t *testing.T) {
	entries := func(first uint64, terms ...uint64) []raftlog.Append {
		var a raftlog.Append
		for i, term := range terms {
			a.Entries = append(a.Entries, &raftpb.Entry{Index: new(first + uint64(i)), Term: new(term)})
		}
		a.HardState = &raftpb.HardState{Term: new(terms[len(terms)-1]), Commit: new(uint64(1))}
		return []raftlog.Append{a}
	}
	fill := func(cut uint64) *memLog {
		l := newMemLog()
		if _, err := l.Write(entries(1, 1, 1, 2, 2, 3)); err != nil {
			t.Fatal(err)
		}
		if err := l.Compact(cut); err != nil {
			t.Fatal(err)
		}
		return l
	}
	for _, tc := range []struct {
		name        string
		cut         uint64
		index, term uint64
		want        error
		says        string
	}{
		{name: "replay all", cut: 0, index: 0, term: 0},
		{name: "replay some", cut: 2, index: 3, term: 2},
		{name: "needs the first entry held", cut: 2, index: 2, term: 1},
		{name: "ahead", index: 6, term: 3, want: ErrStoreAhead, says: "the store has applied index 6, the log ends at 5"},
		{name: "gap", cut: 3, index: 2, term: 1, want: ErrLogGap, says: "needs 3 next, the log begins at 4"},
		{name: "other history", index: 4, term: 1, want: ErrStoreMismatch, says: "index 4 has term 1 in the store and term 2 in the log"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newListMachine()
			m.index, m.term, m.conf = tc.index, tc.term, &raftpb.ConfState{Voters: []uint64{1}}
			c, err := NewCore(Options{ID: 1, Log: fill(tc.cut), Machine: m, IDs: NewIDs(1, time.Now())}, time.Now())
			if !errors.Is(err, tc.want) || tc.want != nil && !strings.Contains(err.Error(), tc.says) {
				t.Fatalf("got %v, want %v saying %q", err, tc.want, tc.says)
			}
			if err == nil && c.commit != max(1, tc.index) {
				t.Fatalf("commit is %d: what was applied was committed", c.commit)
			}
		})
	}
}

func TestOptionsReportEverything(t *testing.T) {
	_, err := Open(Options{ElectionTicks: 1, MaxInflightBytes: 1, MaxInflight: -1})
	for _, want := range []string{"Options.ID", "Options.Log", "Options.Machine", "Options.IDs", "ElectionTicks is 1", "MaxInflight is -1", "MaxInflightBytes is 1"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
}

func TestBootstrap(t *testing.T) {
	l := newMemLog()
	if err := Bootstrap(l, []Founder{{ID: 9, Context: []byte("b")}, {ID: 3, Context: []byte("a")}}); err != nil {
		t.Fatal(err)
	}
	l = l.crash(0) // synced
	hs, _, err := func() (*raftpb.HardState, *raftpb.ConfState, error) {
		l.SetInitialState(0, &raftpb.ConfState{})
		return l.InitialState()
	}()
	if err != nil || hs.GetTerm() != 1 || hs.GetCommit() != 2 {
		t.Fatalf("hard state %v, %v", hs, err)
	}
	es, err := l.Entries(1, 3, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	// AddNode is type 0 and written all the same, as the field is set.
	for i, want := range []string{"\x10\x00\x18\x03\x22\x01a", "\x10\x00\x18\x09\x22\x01b"} {
		if string(es[i].GetData()) != want || es[i].GetTerm() != 1 || es[i].GetType() != raftpb.EntryConfChange {
			t.Errorf("entry %d is %v, want data %q", i+1, es[i], want)
		}
	}
	if err := Bootstrap(l, []Founder{{ID: 1}}); err == nil {
		t.Error("a log with entries was bootstrapped")
	}
	for _, bad := range [][]Founder{nil, {{ID: 0}}, {{ID: 2}, {ID: 2}}} {
		if err := Bootstrap(newMemLog(), bad); err == nil {
			t.Errorf("bootstrapped with %v", bad)
		}
	}
}

func TestIDs(t *testing.T) {
	start := time.UnixMilli(0x123456789ab)
	ids := NewIDs(0xabcdef0123, start)
	if got, want := ids.Next(), uint64(0x0123_23456789ab_01); got != want {
		t.Fatalf("first id %x, want %x", got, want)
	}
	seen := map[uint64]bool{}
	for range 1000 {
		id := ids.Next()
		if seen[id] || id>>48 != 0x0123 {
			t.Fatalf("id %x", id)
		}
		seen[id] = true
	}
	if NewIDs(0xffff, start).NextLease() <= 0 {
		t.Fatal("a lease id must be positive")
	}
}

// TestUnawaitedReplies: a reply that nobody waits for is given up, in a step and at the end alike; one that somebody waits for is his.
func TestUnawaitedReplies(t *testing.T) {
	for name, end := range map[string]func(*Core, *Input, *Output){"step": (*Core).Step, "stop": (*Core).Stop} {
		t.Run(name, func(t *testing.T) {
			now := time.Unix(1e9, 0)
			l, m := newMemLog(), newListMachine()
			m.index, m.term, m.conf = 1, 1, &raftpb.ConfState{Voters: []uint64{1, 2}}
			var entries []*raftpb.Entry
			for i := range uint64(3) {
				entries = append(entries, &raftpb.Entry{Index: new(i + 1), Term: new(uint64(1))})
			}
			if _, err := l.Write([]raftlog.Append{{Entries: entries, HardState: &raftpb.HardState{Term: new(uint64(1)), Commit: new(uint64(3))}}}); err != nil {
				t.Fatal(err)
			}
			var discarded []any
			c, err := NewCore(Options{ID: 1, Log: l, Machine: m, IDs: NewIDs(1, now), Discard: func(r Result) { discarded = append(discarded, r.Reply) }}, now)
			if err != nil {
				t.Fatal(err)
			}
			var out Output
			c.Step(&Input{Now: now}, &out)
			if len(out.Apply) != 2 {
				t.Fatalf("%d entries are to be applied", len(out.Apply))
			}
			c.waiters.add(7, func(Result, error) {}, 0, now, now.Add(time.Minute))
			applied := Applied{Entries: out.Apply, Results: []Result{{Index: 2, ID: 6, Reply: "nobody's"}, {Index: 3, ID: 7, Reply: "awaited"}}}
			out = Output{}
			end(c, &Input{Now: now, Applied: []Applied{applied}}, &out)
			if len(out.Completions) != 1 || out.Completions[0].Result.Reply != "awaited" || out.Completions[0].Err != nil {
				t.Errorf("completed: %+v", out.Completions)
			}
			if len(discarded) != 1 || discarded[0] != "nobody's" {
				t.Errorf("discarded: %v", discarded)
			}
		})
	}
}
