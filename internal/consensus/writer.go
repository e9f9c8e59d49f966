package consensus

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/raftlog"
)

// LogWriter writes to the log what raft wants there, in order. It is the log's only writer. Not safe for concurrent use.
type LogWriter struct {
	id      uint64
	log     Log
	appends []raftlog.Append
	stored  []*raftpb.Message
	send    []*raftpb.Message
}

// NewLogWriter returns the writer of member id's log.
func NewLogWriter(id uint64, l Log) *LogWriter {
	return &LogWriter{id: id, log: l}
}

// Step writes everything in appends, with one sync for all of it if any of it promises something. It returns the
// answers that may go out now: stored to this member's own Core, send to its peers; both lists are the writer's again at the
// next step. After raftlog.ErrNoSpace the same step may be tried again; after any other error nothing may be sent or
// written any more: bytes that were to be durable may not be.
func (w *LogWriter) Step(appends []*raftpb.Message) (stored, send []*raftpb.Message, err error) {
	clear(w.stored)
	clear(w.send)
	w.stored, w.send = w.stored[:0], w.send[:0]
	for _, m := range appends {
		a := raftlog.Append{Entries: m.GetEntries()}
		if m.Term != nil || m.Vote != nil || m.Commit != nil {
			a.HardState = &raftpb.HardState{Term: m.Term, Vote: m.Vote, Commit: m.Commit}
		}
		if len(a.Entries) > 0 || a.HardState != nil {
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
	err = w.write(len(w.stored)+len(w.send) > 0)
	clear(w.appends)
	w.appends = w.appends[:0]
	if err != nil {
		return nil, nil, err
	}
	return w.stored, w.send, nil
}

func (w *LogWriter) write(promises bool) error {
	mustSync, err := w.log.Write(w.appends)
	if err != nil {
		if errors.Is(err, raftlog.ErrNoSpace) {
			return err
		}
		return fmt.Errorf("consensus: writing to the log: %w", err)
	}
	if !mustSync || !promises {
		return nil
	}
	if err := w.log.Sync(); err != nil {
		return fmt.Errorf("consensus: syncing the log: %w", err)
	}
	return nil
}
