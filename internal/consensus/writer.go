package consensus

import (
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/raftlog"
)

// LogWriter writes to the log what raft wants there, in order, snapshots included, which it then has the machine install. It is
// the log's only writer. Not safe for concurrent use.
type LogWriter struct {
	id      uint64
	log     Log
	applier *Applier
	appends []raftlog.Append
	stored  []*raftpb.Message
	send    []*raftpb.Message
	failed  error // of an earlier step: there are no others after it

	// confs are the indexes of conf changes in the log that were not seen to be committed; heard says that a commit index was
	// written since the start, before which there may be others.
	confs []uint64
	heard bool
}

// NewLogWriter returns the writer of member id's log; a is the applier of the same member.
func NewLogWriter(id uint64, l Log, a *Applier) *LogWriter {
	return &LogWriter{id: id, log: l, applier: a}
}

// Step writes everything in appends, with one sync for all of it if any of it promises something. If there is a snapshot, it
// waits for the applier and installs it. It returns the answers that may go out now: stored to this member's own Core, send to its
// peers; both lists are the writer's again at the next step. After raftlog.ErrNoSpace the same step may be tried again; any other
// error is that of all later steps, too: bytes that were to be durable may not be, so nothing may be sent or written any more.
func (w *LogWriter) Step(appends []*raftpb.Message) (stored, send []*raftpb.Message, err error) {
	if w.failed != nil {
		return nil, nil, w.failed
	}
	defer func() {
		if err != nil && !errors.Is(err, raftlog.ErrNoSpace) {
			w.failed = err
		}
	}()
	clear(w.stored)
	clear(w.send)
	w.stored, w.send = w.stored[:0], w.send[:0]
	var snap *raftlog.Snapshot
	for _, m := range appends {
		a := raftlog.Append{Entries: m.GetEntries()}
		if s := m.GetSnapshot(); !raft.IsEmptySnap(s) {
			if a.Snapshot, err = w.received(s.GetMetadata()); err != nil {
				return nil, nil, err
			}
			snap = a.Snapshot // of several the last one is the state, the log says
		}
		if m.Term != nil || m.Vote != nil || m.Commit != nil {
			a.HardState = &raftpb.HardState{Term: m.Term, Vote: m.Vote, Commit: m.Commit}
		}
		if len(a.Entries) > 0 || a.HardState != nil || a.Snapshot != nil {
			w.appends = append(w.appends, a)
		}
		for _, r := range m.GetResponses() {
			if r.GetTo() == w.id {
				w.stored = append(w.stored, r)
			} else {
				w.send = append(w.send, r)
			}
		}
	}
	err = w.write(len(w.stored)+len(w.send) > 0 || snap != nil)
	clear(w.appends)
	w.appends = w.appends[:0]
	if err == nil && snap != nil {
		err = w.applier.install(*snap)
	}
	if err != nil {
		return nil, nil, err
	}
	return w.stored, w.send, nil
}

// received makes the log's record of a snapshot: it names the directory that holds the state.
func (w *LogWriter) received(meta *raftpb.SnapshotMetadata) (*raftlog.Snapshot, error) {
	dir, ok := w.applier.m.Received(meta.GetIndex(), meta.GetTerm())
	if !ok {
		return nil, fmt.Errorf("consensus: the state of the snapshot of index %d and term %d is gone: restart this member, and it is sent another",
			meta.GetIndex(), meta.GetTerm())
	}
	return &raftlog.Snapshot{Index: meta.GetIndex(), Term: meta.GetTerm(), Dir: dir, ConfState: meta.GetConfState()}, nil
}

// changesMembers tells whether what was just written says that a conf change is committed. Such a commit index is synced, though none
// was promised: whoever it removes goes away, and this member, after a power cut, must not wait for the other's vote.
func (w *LogWriter) changesMembers() bool {
	found := false
	for i := range w.appends {
		a := &w.appends[i]
		for _, e := range a.Entries {
			if e.GetType() != raftpb.EntryNormal {
				w.confs = append(w.confs, e.GetIndex())
			}
		}
		commit := a.HardState.GetCommit()
		if commit == 0 {
			continue
		}
		before := len(w.confs)
		w.confs = slices.DeleteFunc(w.confs, func(index uint64) bool { return index <= commit })
		found = found || !w.heard || len(w.confs) < before
		w.heard = true
	}
	return found
}

func (w *LogWriter) write(promises bool) error {
	mustSync, err := w.log.Write(w.appends)
	if err != nil {
		if errors.Is(err, raftlog.ErrNoSpace) {
			return err
		}
		return fmt.Errorf("consensus: writing to the log: %w", err)
	}
	// Not before all of it is written: what found no room comes again, and must not look as if it had been seen.
	if changes := w.changesMembers(); !(mustSync && promises) && !changes {
		return nil
	}
	if err := w.log.Sync(); err != nil {
		return fmt.Errorf("consensus: syncing the log: %w", err)
	}
	return nil
}
