package consensus

import (
	"errors"
	"slices"
	"sync"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/raftlog"
)

// memLog is a Log in memory that can crash: what was not synced is lost, or an exact prefix of it survives.
type memLog struct {
	mu       sync.Mutex
	st       memState
	durable  memState
	pending  []raftlog.Append // written, not synced
	mustSync bool
	applied  uint64
	conf     *raftpb.ConfState
	failNext error
	failRead error
	lies     bool // claims that nothing needs a sync
	syncs    int
	marks    int
}

type memState struct {
	cut, cutTerm uint64
	entries      []*raftpb.Entry // the first has index cut+1
	hard         *raftpb.HardState
	snap         *raftlog.Snapshot
}

func newMemLog() *memLog { return &memLog{} }

func (s *memState) last() uint64 { return s.cut + uint64(len(s.entries)) }

func (s *memState) clone() memState {
	c := *s
	c.entries = slices.Clone(s.entries)
	return c
}

func (s *memState) add(a raftlog.Append) error {
	if n := a.Snapshot; n != nil {
		if n.Index <= s.cut || n.Index < s.hard.GetCommit() {
			return errors.New("memlog: snapshot out of order")
		}
		s.snap, s.cut, s.cutTerm, s.entries = n, n.Index, n.Term, nil
	}
	if len(a.Entries) > 0 {
		first := a.Entries[0].GetIndex()
		if first <= s.cut || first > s.last()+1 {
			return errors.New("memlog: entries out of order")
		}
		kept := s.entries
		if n := first - s.cut - 1; n < uint64(len(kept)) {
			kept = kept[:n:n] // readers may hold the entries replaced
		}
		s.entries = append(kept, a.Entries...)
	}
	if a.HardState != nil {
		s.hard = a.HardState
	}
	return nil
}

// crash returns the log as a restart finds it: what was synced, and the first keep appends after that.
func (l *memLog) crash(keep int) *memLog {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.durable.clone()
	for _, a := range l.pending[:min(keep, len(l.pending))] {
		if err := st.add(a); err != nil {
			panic(err)
		}
	}
	return &memLog{st: st, durable: st.clone()}
}

func (s *memState) compact(index uint64) {
	if index <= s.cut || index > s.last() {
		return
	}
	s.cutTerm = s.entries[index-s.cut-1].GetTerm()
	s.entries = slices.Clone(s.entries[index-s.cut:])
	s.cut = index
}

func (l *memLog) Installed() (raftlog.Snapshot, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.st.snap == nil {
		return raftlog.Snapshot{}, false
	}
	return *l.st.snap, true
}

func (l *memLog) InitialState() (*raftpb.HardState, *raftpb.ConfState, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.st.hard == nil && l.applied == 0 && l.st.cut == 0 {
		return nil, proto.Clone(l.conf).(*raftpb.ConfState), nil
	}
	hs := &raftpb.HardState{Term: new(l.st.hard.GetTerm()), Vote: new(l.st.hard.GetVote()),
		Commit: new(max(l.st.hard.GetCommit(), l.st.cut, l.applied))}
	return hs, proto.Clone(l.conf).(*raftpb.ConfState), nil
}

func (l *memLog) SetInitialState(applied uint64, cs *raftpb.ConfState) {
	l.applied, l.conf = applied, cs
}
func (l *memLog) SetOnMiss(func(lo, hi uint64) bool)     {}
func (l *memLog) Prepare() error                         { return nil }
func (l *memLog) Prefetch(lo, hi, maxBytes uint64) error { return nil }

func (l *memLog) Entries(lo, hi, maxSize uint64) ([]*raftpb.Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failRead != nil {
		return nil, l.failRead
	}
	if lo <= l.st.cut {
		return nil, raft.ErrCompacted
	}
	if hi > l.st.last()+1 {
		return nil, raft.ErrUnavailable
	}
	var out []*raftpb.Entry
	size := uint64(0)
	for _, e := range l.st.entries[lo-l.st.cut-1 : hi-l.st.cut-1] {
		size += uint64(proto.Size(e))
		if len(out) > 0 && size > maxSize {
			break
		}
		out = append(out, e)
	}
	return out, nil
}

func (l *memLog) Term(i uint64) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case i < l.st.cut:
		return 0, raft.ErrCompacted
	case i == l.st.cut:
		return l.st.cutTerm, nil
	case i > l.st.last():
		return 0, raft.ErrUnavailable
	}
	return l.st.entries[i-l.st.cut-1].GetTerm(), nil
}

func (l *memLog) FirstIndex() (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.st.cut + 1, nil
}

func (l *memLog) LastIndex() (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.st.last(), nil
}

func (l *memLog) Snapshot() (*raftpb.Snapshot, error) { panic("the log is not asked for a snapshot") }

func (l *memLog) Write(appends []raftlog.Append) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.failNext; err != nil {
		l.failNext = nil
		return false, err
	}
	for _, a := range appends {
		old := l.st.hard
		l.mustSync = l.mustSync || len(a.Entries) > 0 || a.Snapshot != nil ||
			a.HardState != nil && (a.HardState.GetTerm() != old.GetTerm() || a.HardState.GetVote() != old.GetVote())
		if err := l.st.add(a); err != nil {
			return false, err
		}
		if a.Snapshot != nil { // a record of its own, which a crash may leave alone
			l.pending = append(l.pending, raftlog.Append{Snapshot: a.Snapshot})
			a.Snapshot = nil
		}
		l.pending = append(l.pending, a)
	}
	return l.mustSync && !l.lies, nil
}

func (l *memLog) Sync() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.pending {
		if err := l.durable.add(a); err != nil {
			return err
		}
	}
	clear(l.pending)
	l.pending, l.mustSync = l.pending[:0], false
	l.syncs++
	return nil
}

func (l *memLog) Mark() error {
	if err := l.Sync(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.marks++
	return nil
}

func (l *memLog) Compact(index uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.st.compact(index)
	l.durable.compact(index)
	return nil
}

func (l *memLog) SizeAfter(index uint64) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return int64(l.st.last()-min(max(index, l.st.cut), l.st.last())) * memEntryBytes
}

// memEntryBytes is what an entry counts as, whatever it holds.
const memEntryBytes = 100
