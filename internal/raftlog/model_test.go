package raftlog

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// model is a raft log without any cleverness.
type model struct {
	contents
}

func (m *model) last() uint64 { return m.compacted.index + uint64(len(m.entries)) }

func (m *model) term(i uint64) uint64 {
	if i == m.compacted.index {
		return m.compacted.term
	}
	return m.entries[i-m.compacted.index-1].term
}

func (m *model) clone() model {
	c := *m
	c.entries = slices.Clone(m.entries)
	return c
}

func (m *model) append(a Append) {
	if s := a.Snapshot; s != nil {
		m.compacted, m.entries = point{s.Index, s.Term}, nil
		m.installed = fmt.Sprintf("%d/%d %s %v", s.Index, s.Term, s.Dir, s.ConfState.GetVoters())
	}
	for _, e := range a.Entries {
		m.entries = append(m.entries[:e.GetIndex()-m.compacted.index-1:e.GetIndex()-m.compacted.index-1], flat(e))
	}
	if h, ok := hardStateOf(a.HardState); ok {
		m.hard = h
	}
}

func (m *model) compact(i uint64) {
	if i > m.compacted.index {
		t := m.term(i)
		m.entries = slices.Clone(m.entries[i-m.compacted.index:])
		m.compacted = point{i, t}
	}
}

// generator makes appends that a raft could ask for.
type generator struct {
	*rand.Rand
	seen map[string]int // coverage
}

func (g *generator) appends(m *model) []Append {
	next := m.clone()
	var out []Append
	for range 1 + g.IntN(3) {
		a := g.append(&next)
		next.append(a)
		out = append(out, a)
	}
	return out
}

func (g *generator) append(m *model) Append {
	var a Append
	h := m.hard
	h.term = max(h.term, m.term(m.last())) // a crash may have kept an entry and not the hard state after it
	switch g.IntN(20) {
	case 0: // snapshot
		s := &Snapshot{
			Index: m.last() + 1 + g.Uint64N(5), Term: max(h.term, 1), Dir: fmt.Sprintf("state-%d", g.IntN(100)),
			ConfState: &raftpb.ConfState{Voters: []uint64{1, 2 + g.Uint64N(3)}},
		}
		a.Snapshot = s
		h.term, h.commit = s.Term, s.Index
		g.seen["snapshot"]++
	case 1, 2, 3: // a new term, whose entries may replace the uncommitted ones
		h.term, h.vote = h.term+1, g.Uint64N(4)
		first := h.commit + 1 + g.Uint64N(m.last()-h.commit+1)
		a.Entries = entries(first, first+g.Uint64N(8), h.term, g.IntN(200))
		g.seen["replace"]++
	case 4: // commit only
		h.commit += g.Uint64N(m.last() - h.commit + 1)
		g.seen["commit"]++
	case 5: // vote only
		h.term, h.vote = h.term+1, g.Uint64N(4)
		g.seen["vote"]++
	default:
		h.term = max(h.term, 1)
		n := g.Uint64N(12)
		a.Entries = entries(m.last()+1, m.last()+n, h.term, g.IntN(300))
		h.commit += g.Uint64N(m.last() + n - h.commit + 1)
		g.seen["append"]++
	}
	if h != m.hard {
		a.HardState = hard(h.term, h.vote, h.commit)
	}
	return a
}

func TestModel(t *testing.T) {
	seen := map[string]int{}
	for seed := range uint64(25) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { runModel(t, seed, seen) })
	}
	for _, k := range []string{"append", "replace", "snapshot", "commit", "vote", "compact", "reopen", "abandon", "prefetch", "order", "roll"} {
		if seen[k] == 0 {
			t.Errorf("no run did %s: %v", k, seen)
		}
	}
}

func runModel(t *testing.T, seed uint64, seen map[string]int) {
	g := &generator{rand.New(rand.NewPCG(seed, 1)), seen}
	o := testOptions(vfs.NewMem())
	o.SegmentBytes = minSegmentBytes << g.IntN(4)
	l := mustOpen(t, o)
	defer func() { _ = l.Abandon() }()
	var m model
	for step := range 150 {
		switch g.IntN(14) {
		case 0:
			if m.hard.commit > m.compacted.index {
				i := m.compacted.index + 1 + g.Uint64N(m.hard.commit-m.compacted.index)
				if err := l.Compact(i); err != nil {
					t.Fatal(err)
				}
				m.compact(i)
				seen["compact"]++
			}
		case 1:
			var err error
			if g.IntN(2) == 0 {
				err = l.Close()
				seen["reopen"]++
			} else {
				err = l.Abandon() // the memory file system loses nothing
				seen["abandon"]++
			}
			if err != nil {
				t.Fatal(err)
			}
			l = mustOpen(t, o)
		case 2:
			if err := l.Mark(); err != nil {
				t.Fatal(err)
			}
		case 3:
			if err := l.Prepare(); err != nil {
				t.Fatal(err)
			}
		case 4:
			if len(m.entries) > 0 {
				lo := m.compacted.index + 1 + g.Uint64N(uint64(len(m.entries)))
				if err := l.Prefetch(lo, m.last()+1, g.Uint64N(3000)); err != nil {
					t.Fatal(err)
				}
				seen["prefetch"]++
			}
		case 5: // what must be refused, and change nothing
			_, err := l.Write([]Append{{Entries: entries(m.last()+2, m.last()+3, 9, 3)}})
			if !errors.Is(err, ErrOrder) {
				t.Fatal(err)
			}
			if err := l.Compact(m.last() + 1); !errors.Is(err, raft.ErrUnavailable) {
				t.Fatal(err)
			}
			seen["order"]++
		default:
			as := g.appends(&m)
			n := l.Segments()
			wantSync := false
			for _, a := range as {
				h, _ := hardStateOf(a.HardState)
				wantSync = wantSync || len(a.Entries) > 0 || a.Snapshot != nil ||
					a.HardState != nil && (h.term != m.hard.term || h.vote != m.hard.vote)
				m.append(a)
			}
			must, err := l.Write(as)
			if err != nil {
				t.Fatal(err)
			}
			if must != wantSync {
				t.Fatalf("must sync: %v, want %v", must, wantSync)
			}
			if err := l.Sync(); err != nil {
				t.Fatal(err)
			}
			if l.Segments() > n {
				seen["roll"]++
			}
		}
		want := m.contents
		want.hard.commit = max(want.hard.commit, want.compacted.index)
		if got := readAll(t, l); !got.equal(want) {
			t.Fatalf("step %d:\n got %v\nwant %v", step, got, want)
		}
	}
}
