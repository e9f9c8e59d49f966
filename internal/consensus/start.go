package consensus

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// origin is where raft starts from.
type origin struct {
	first, last          uint64 // of the log
	applied, appliedTerm uint64 // by the machine
	term, commit         uint64
	conf                 *raftpb.ConfState
}

// reconcile checks that log and machine belong together and tells the log what the machine knows better: who the members
// are as of the last entry applied, and that whatever has been applied was committed. A commit index that moved alone
// is not synced, so the log may not know, and raft does not tolerate applied entries that are not committed.
func reconcile(l Log, m Machine) (origin, error) {
	first, err := l.FirstIndex()
	if err != nil {
		return origin{}, fmt.Errorf("consensus: first index of the log: %w", err)
	}
	last, err := l.LastIndex()
	if err != nil {
		return origin{}, fmt.Errorf("consensus: last index of the log: %w", err)
	}
	applied, term := m.Applied()
	if s, ok := l.Installed(); ok {
		// The log begins after the snapshot, so only that state and what follows from it can go on.
		if applied < s.Index {
			return origin{}, fmt.Errorf("%w: the log says that the snapshot of index %d was installed from %q, the store opened has applied index %d: was an older copy of the store put back?",
				ErrLogGap, s.Index, s.Dir, applied)
		}
		if applied == s.Index {
			if err := fits(s, m); err != nil {
				return origin{}, err
			}
		}
	}
	switch {
	case applied > last:
		return origin{}, fmt.Errorf("%w: the store has applied index %d, the log ends at %d; was the log lost, or an older copy of it put back?",
			ErrStoreAhead, applied, last)
	case first > applied+1:
		return origin{}, fmt.Errorf("%w: the store has applied index %d and needs %d next, the log begins at %d; was an older copy of the store put back?",
			ErrLogGap, applied, applied+1, first)
	}
	if applied > 0 {
		switch logTerm, err := l.Term(applied); {
		case errors.Is(err, raft.ErrCompacted):
		case err != nil:
			return origin{}, fmt.Errorf("consensus: term of index %d in the log: %w", applied, err)
		case logTerm != term:
			return origin{}, fmt.Errorf("%w: index %d has term %d in the store and term %d in the log", ErrStoreMismatch, applied, term, logTerm)
		}
	}
	cs := m.ConfState()
	if cs == nil {
		cs = &raftpb.ConfState{}
	}
	l.SetInitialState(applied, cs)
	hs, _, err := l.InitialState()
	if err != nil {
		return origin{}, fmt.Errorf("consensus: hard state of the log: %w", err)
	}
	if commit := hs.GetCommit(); commit > last || commit < applied {
		return origin{}, fmt.Errorf("%w: the log says that index %d is committed; it ends at %d, and the store has applied %d",
			ErrStoreMismatch, commit, last, applied)
	}
	return origin{first: first, last: last, applied: applied, appliedTerm: term, term: hs.GetTerm(), commit: hs.GetCommit(), conf: cs}, nil
}

// guarded is the log as raft reads it. raft panics when reading fails; here it is given nothing instead, and the loop ends
// with the log's own error, which names file and offset.
type guarded struct {
	Log
	failed   error // the first failure
	snapshot func() (*raftpb.Snapshot, error)
}

// Snapshot implements raft.Storage: what a snapshot sent now would be of. Its state is put to it by the transport.
func (g *guarded) Snapshot() (*raftpb.Snapshot, error) { return g.snapshot() }

// Entries implements raft.Storage.
func (g *guarded) Entries(lo, hi, maxSize uint64) ([]*raftpb.Entry, error) {
	es, err := g.Log.Entries(lo, hi, maxSize)
	switch {
	case err == nil:
		return es, nil
	case errors.Is(err, raft.ErrCompacted): // raft compares, and does not look inside
		return nil, raft.ErrCompacted
	case errors.Is(err, raft.ErrUnavailable):
		return nil, raft.ErrUnavailable
	}
	if g.failed == nil {
		g.failed = fmt.Errorf("consensus: reading entries %d to %d of the log: %w", lo, hi-1, err)
	}
	return nil, nil
}
