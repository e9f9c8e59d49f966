package state

import (
	"errors"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/member"
)

// clusterRequest runs what members tell each other through the log.
func (b *batch) clusterRequest(c *command.Command, _ *Reply) error {
	switch msg := c.Msg.(type) {
	case *membershippb.ClusterVersionSetRequest:
		// A version beyond ours means entries that this member would misread.
		if err := b.m.members.SetVersion(b.store, msg); err != nil {
			return errDisk{err}
		}
		return nil
	case *membershippb.ClusterMemberAttrSetRequest:
		return b.m.members.SetAttributes(b.store, msg)
	case *membershippb.DowngradeInfoSetRequest:
		b.m.members.SetDowngrade(b.store, msg)
		return nil
	case *pb.DowngradeVersionTestRequest:
		return nil
	}
	return errDisk{fmt.Errorf("no rule for %v", c.Kind)}
}

// featureLevel sets the level from which on entries may mean more than they mean
// to etcd, if the membership is still the one it was found for.
func (b *batch) featureLevel(l *command.FeatureLevel) error {
	before := b.m.members.Root().FeatureLevel()
	if err := b.m.members.SetFeatureLevel(b.store, l.Level, l.Fingerprint); err != nil {
		return errDisk{err} // entries would mean what this member cannot know
	}
	b.logFeatureLevel(before)
	return nil
}

func (b *batch) logFeatureLevel(before uint64) {
	if now := b.m.members.Root().FeatureLevel(); now != before {
		b.m.o.Logger.Info("the cluster's feature level changed", "from", before, "to", now, "index", b.index)
	}
}

// confChange runs a membership entry (state-machine.md, section 2.9).
func (b *batch) confChange(e *raftpb.Entry, r *Result) error {
	cc := new(raftpb.ConfChange)
	if err := proto.Unmarshal(e.GetData(), cc); err != nil {
		return fmt.Errorf("membership change: %w", err)
	}
	r.ID = cc.GetId()
	level := b.m.members.Root().FeatureLevel()
	r.ConfChange, r.Err = b.m.members.ApplyConfChange(b.store, cc)
	if errors.Is(r.Err, member.ErrMalformed) {
		b.m.o.Logger.Warn("malformed membership change is refused", "index", e.GetIndex(), "error", r.Err)
	}
	b.logFeatureLevel(level)
	b.noteFull()
	r.Reply = &Reply{}
	return nil
}
