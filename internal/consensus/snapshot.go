package consensus

import (
	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// This file is about snapshots, which a leader sends instead of entries that its log has forgotten. Core handles what they are
// of; the state itself goes from server to server beside it.

// snapshot says what a snapshot sent now would be of.
func (c *Core) snapshot() (*raftpb.Snapshot, error) {
	if c.confMoving || c.applied == 0 {
		return nil, raft.ErrSnapshotTemporarilyUnavailable // raft asks again with the member's next answer to a heartbeat
	}
	return &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: new(c.applied), Term: new(c.appliedTerm), ConfState: proto.Clone(c.confState).(*raftpb.ConfState),
	}}, nil
}

// onRestored hears that raft has taken a snapshot: its log now begins after it, and nothing more is handed over until it is
// installed. What waits to be handed over is superfluous; what the applier has may be applied or not.
func (c *Core) onRestored(meta *raftpb.SnapshotMetadata) {
	c.restored, c.last = meta.GetIndex(), meta.GetIndex()
	c.opt.Metrics.SnapshotApplying.Set(1)
	c.confInApply = false
	if len(c.held) > 0 {
		// raft counts what it has handed out against a limit.
		c.step(&raftpb.Message{
			Type: raftpb.MsgStorageApplyResp.Enum(), To: new(c.opt.ID), From: new(raft.LocalApplyThread), Entries: c.held,
		})
		c.held = nil
	}
}

// onInstalled hears that the machine is what the snapshot says. Which proposals of this member the snapshot covers nobody can
// tell: they end at their deadlines.
func (c *Core) onInstalled(meta *raftpb.SnapshotMetadata, out *Output) {
	if meta.GetIndex() >= c.restored { // or another one is already on its way
		c.opt.Metrics.SnapshotApplying.Set(0)
	}
	c.applied, c.appliedTerm = meta.GetIndex(), meta.GetTerm()
	c.cutTo = max(c.cutTo, meta.GetIndex())
	c.durable, c.dirtySince, c.asked = c.applied, c.now, false
	c.conf(proto.Clone(meta.GetConfState()).(*raftpb.ConfState))
	out.Events = append(out.Events, SnapshotInstalled{Index: c.applied, Term: c.appliedTerm},
		MembersChanged{Index: c.applied, ConfState: c.confState})
}
