package consensus

import (
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/raftlog"
)

// ForceNew makes one member of a cluster whose majority is lost a cluster of its own, before it starts: entries that are not
// known to be committed are dropped, and committed ones appended that remove everyone else. What the lost members
// acknowledged and this one did not hear of is lost.
//
// applied and appliedConf are the machine's; what follows in the log, up to the commit index, counts as well. context is this
// member as JSON, for the case that it is no member any more. The log is synced when ForceNew returns nil. Called again it
// finds nothing left to do.
func ForceNew(l Log, self, applied uint64, appliedConf *raftpb.ConfState, context []byte) error {
	first, err := l.FirstIndex()
	if err != nil {
		return fmt.Errorf("consensus: first index of the log: %w", err)
	}
	last, err := l.LastIndex()
	if err != nil {
		return fmt.Errorf("consensus: last index of the log: %w", err)
	}
	if applied > last {
		return fmt.Errorf("%w: the store has applied index %d, the log ends at %d", ErrStoreAhead, applied, last)
	}
	if first > applied+1 {
		return fmt.Errorf("%w: the store has applied index %d and needs %d next, the log begins at %d", ErrLogGap, applied, applied+1, first)
	}
	if appliedConf == nil {
		appliedConf = &raftpb.ConfState{}
	}
	l.SetInitialState(applied, appliedConf) // applied means committed
	hs, _, err := l.InitialState()
	if err != nil {
		return fmt.Errorf("consensus: hard state of the log: %w", err)
	}
	commit := hs.GetCommit()
	if commit == 0 || commit > last {
		return fmt.Errorf("%w: index %d is committed, the log ends at %d: there is no cluster here to make a new one of", ErrStoreMismatch, commit, last)
	}
	members, err := membersAt(l, applied, commit, appliedConf)
	if err != nil {
		return err
	}
	if learner, ok := members[self]; ok && learner {
		return fmt.Errorf("consensus: this member, %x, is a learner and cannot lead: make the new cluster of a voter's data directory", self)
	}
	changes, err := alone(self, members, context)
	if err != nil {
		return err
	}
	if len(changes) == 0 && last > commit {
		changes = []*raftpb.Entry{{Type: raftpb.EntryNormal.Enum()}} // takes the place of what is dropped
	}
	for i, e := range changes {
		e.Index, e.Term = new(commit+1+uint64(i)), new(hs.GetTerm())
	}
	state := &raftpb.HardState{Term: new(hs.GetTerm()), Vote: new(hs.GetVote()), Commit: new(commit + uint64(len(changes)))}
	if _, err := l.Write([]raftlog.Append{{Entries: changes, HardState: state}}); err != nil {
		return fmt.Errorf("consensus: writing the new cluster to the log: %w", err)
	}
	if err := l.Sync(); err != nil {
		return fmt.Errorf("consensus: syncing the log: %w", err)
	}
	return nil
}

// membersAt returns the members as of index commit, each with whether it is a learner.
func membersAt(l Log, applied, commit uint64, cs *raftpb.ConfState) (map[uint64]bool, error) {
	members := map[uint64]bool{}
	for _, id := range cs.GetVoters() {
		members[id] = false
	}
	for _, id := range cs.GetLearners() {
		members[id] = true
	}
	for lo := applied + 1; lo <= commit; {
		entries, err := l.Entries(lo, commit+1, 4<<20)
		if err == nil && len(entries) == 0 {
			err = raft.ErrUnavailable
		}
		if err != nil {
			return nil, fmt.Errorf("consensus: reading entries %d to %d of the log: %w", lo, commit, err)
		}
		for _, e := range entries {
			lo++
			if e.GetType() != raftpb.EntryConfChange {
				continue
			}
			var cc raftpb.ConfChange
			if err := proto.Unmarshal(e.GetData(), &cc); err != nil {
				return nil, fmt.Errorf("consensus: the conf change at index %d cannot be read: %w", e.GetIndex(), err)
			}
			switch cc.GetType() {
			case raftpb.ConfChangeAddNode:
				members[cc.GetNodeId()] = false
			case raftpb.ConfChangeAddLearnerNode:
				members[cc.GetNodeId()] = true
			case raftpb.ConfChangeRemoveNode:
				delete(members, cc.GetNodeId())
			}
		}
	}
	delete(members, raft.None)
	return members, nil
}

// alone returns the conf changes after which self is the only member.
func alone(self uint64, members map[uint64]bool, context []byte) ([]*raftpb.Entry, error) {
	var changes []*raftpb.ConfChange
	if _, ok := members[self]; !ok {
		if len(context) == 0 {
			return nil, errors.New("consensus: this member is to be added to its own cluster: give its description as context")
		}
		changes = append(changes, &raftpb.ConfChange{Type: raftpb.ConfChangeAddNode.Enum(), NodeId: new(self), Context: context})
	}
	var others []uint64
	for id := range members {
		if id != self {
			others = append(others, id)
		}
	}
	slices.Sort(others)
	for _, id := range others {
		changes = append(changes, &raftpb.ConfChange{Type: raftpb.ConfChangeRemoveNode.Enum(), NodeId: new(id)})
	}
	entries := make([]*raftpb.Entry, len(changes))
	for i, cc := range changes {
		data, err := proto.Marshal(cc)
		if err != nil {
			return nil, fmt.Errorf("consensus: encoding the change of member %x: %w", cc.GetNodeId(), err)
		}
		entries[i] = &raftpb.Entry{Type: raftpb.EntryConfChange.Enum(), Data: data}
	}
	return entries, nil
}
