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

// confChange runs a membership entry (state-machine.md, section 2.9).
func (b *batch) confChange(e *raftpb.Entry, r *Result) error {
	cc := new(raftpb.ConfChange)
	if err := proto.Unmarshal(e.GetData(), cc); err != nil {
		return fmt.Errorf("membership change: %w", err)
	}
	r.ID = cc.GetId()
	r.ConfChange, r.Err = b.m.members.ApplyConfChange(b.store, cc)
	if errors.Is(r.Err, member.ErrMalformed) {
		b.m.o.Logger.Warn("malformed membership change is refused", "index", e.GetIndex(), "error", r.Err)
	}
	r.Reply = &Reply{}
	return nil
}
