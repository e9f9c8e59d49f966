package consensus

import (
	"errors"
	"testing"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/raftlog"
)

// TestWriterSyncsMembersAfterNoSpace: that a conf change is committed is synced, also where the disk had no room for it at first.
func TestWriterSyncsMembersAfterNoSpace(t *testing.T) {
	log := newMemLog()
	w := NewLogWriter(1, log, NewApplier(newListMachine()))
	entry := func(index uint64, typ raftpb.EntryType) *raftpb.Entry {
		return &raftpb.Entry{Index: new(index), Term: new(uint64(1)), Type: typ.Enum()}
	}
	// step returns how many syncs there were.
	step := func(commit uint64, entries ...*raftpb.Entry) (int, error) {
		before := log.syncs
		m := &raftpb.Message{Type: raftpb.MsgStorageAppend.Enum(), To: new(raft.LocalAppendThread), Term: new(uint64(1)), Commit: new(commit), Entries: entries}
		_, _, err := w.Step([]*raftpb.Message{m})
		return log.syncs - before, err
	}
	for _, tc := range []struct {
		what    string
		commit  uint64
		entries []*raftpb.Entry
		syncs   int
	}{
		{"the first commit index since the start, before which there may be changes", 1, []*raftpb.Entry{entry(1, raftpb.EntryNormal)}, 1},
		{"entries that nobody waits for", 1, []*raftpb.Entry{entry(2, raftpb.EntryConfChange), entry(3, raftpb.EntryNormal)}, 0},
		{"the change is committed", 2, nil, 1},
		{"it was synced before", 3, nil, 0},
		{"a change and its commit index in one", 4, []*raftpb.Entry{entry(4, raftpb.EntryConfChange)}, 1},
	} {
		log.failNext = raftlog.ErrNoSpace
		if syncs, err := step(tc.commit, tc.entries...); !errors.Is(err, raftlog.ErrNoSpace) || syncs != 0 {
			t.Fatalf("%s, without room: %d syncs, %v", tc.what, syncs, err)
		}
		if syncs, err := step(tc.commit, tc.entries...); err != nil || syncs != tc.syncs {
			t.Errorf("%s, with room again: %d syncs, want %d, %v", tc.what, syncs, tc.syncs, err)
		}
	}
}
