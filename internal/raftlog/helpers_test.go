package raftlog

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"
)

const testDir = "raft"

// counter is an Options.Rand that can be repeated.
func counter() func() uint64 {
	n := uint64(0x9e3779b97f4a7c15)
	return func() uint64 { n = n*6364136223846793005 + 1442695040888963407; return n }
}

func testOptions(fs vfs.FS) Options {
	return Options{
		FS: fs, Dir: testDir, SegmentBytes: 4096, CacheBytes: 2000, PrefetchBytes: 4000,
		Identity: Identity{ClusterID: 0xc, MemberID: 0xa}, Rand: counter(),
	}
}

func mustOpen(t testing.TB, o Options) *Log {
	t.Helper()
	l, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// closeAtEnd closes the log when the test ends, unless it was closed before.
func closeAtEnd(t testing.TB, l *Log) *Log {
	t.Cleanup(func() { _ = l.Abandon() })
	return l
}

func entry(index, term uint64, data string) *raftpb.Entry {
	e := &raftpb.Entry{Index: &index, Term: &term, Type: raftpb.EntryNormal.Enum()}
	if data != "" {
		e.Data = []byte(data)
	}
	return e
}

// entries makes those from first to last, each with data that names it.
func entries(first, last, term uint64, size int) []*raftpb.Entry {
	var out []*raftpb.Entry
	for i := first; i <= last; i++ {
		d := fmt.Sprintf("%d/%d,", i, term)
		out = append(out, entry(i, term, strings.Repeat(d, size/len(d)+1)[:size]))
	}
	return out
}

func hard(term, vote, commit uint64) *raftpb.HardState {
	return &raftpb.HardState{Term: &term, Vote: &vote, Commit: &commit}
}

// write writes and syncs.
func write(t testing.TB, l *Log, appends ...Append) {
	t.Helper()
	if _, err := l.Write(appends); err != nil {
		t.Fatal(err)
	}
	if err := l.Sync(); err != nil {
		t.Fatal(err)
	}
}

// contents is all that a log answers, to be compared.
type contents struct {
	hard      hardState
	compacted point
	entries   []flatEntry
	installed string
}

type flatEntry struct {
	index, term uint64
	kind        raftpb.EntryType
	data        string
}

func flat(e *raftpb.Entry) flatEntry {
	return flatEntry{e.GetIndex(), e.GetTerm(), e.GetType(), string(e.GetData())}
}

// read gets the contents through the public methods, and checks that they agree.
func read(l *Log) (contents, error) {
	var c contents
	hs, _, err := l.InitialState()
	if err != nil {
		return c, err
	}
	c.hard, _ = hardStateOf(hs)
	first, _ := l.FirstIndex()
	last, _ := l.LastIndex()
	c.compacted.index = first - 1
	if c.compacted.term, err = l.Term(first - 1); err != nil {
		return c, err
	}
	if s, ok := l.Installed(); ok {
		c.installed = fmt.Sprintf("%d/%d %s %v", s.Index, s.Term, s.Dir, s.ConfState.GetVoters())
	}
	if err := l.Replay(first, last+1, func(e *raftpb.Entry) error {
		c.entries = append(c.entries, flat(e))
		return nil
	}); err != nil {
		return c, err
	}
	for i, e := range c.entries {
		if e.index != first+uint64(i) {
			return c, fmt.Errorf("entry %d at place of %d", e.index, first+uint64(i))
		}
		if term, err := l.Term(e.index); err != nil || term != e.term {
			return c, fmt.Errorf("entry %d: Term says %d (%v), entry says %d", e.index, term, err, e.term)
		}
	}
	for lo := first; lo <= last; {
		got, err := l.Entries(lo, last+1, 500)
		if err != nil {
			return c, err
		}
		if len(got) == 0 {
			return c, fmt.Errorf("no entries from %d", lo)
		}
		for i, e := range got {
			if flat(e) != c.entries[lo+uint64(i)-first] {
				return c, fmt.Errorf("Entries says %v, Replay %v", flat(e), c.entries[lo+uint64(i)-first])
			}
		}
		lo += uint64(len(got))
	}
	return c, nil
}

func (c contents) equal(o contents) bool {
	return c.hard == o.hard && c.compacted == o.compacted && c.installed == o.installed &&
		slices.Equal(c.entries, o.entries)
}

func (c contents) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "hard %v compacted %v installed %q entries", c.hard, c.compacted, c.installed)
	for _, e := range c.entries {
		fmt.Fprintf(&b, " %d/%d:%d", e.index, e.term, len(e.data))
	}
	return b.String()
}

func readAll(t testing.TB, l *Log) contents {
	t.Helper()
	c, err := read(l)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
