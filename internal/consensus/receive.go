package consensus

import (
	"fmt"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// receive steps messages of peers. With the gate shut this member takes no entries, whoever they come from, and so
// acknowledges none; it still hears heartbeats and votes, so that the cluster keeps its leader.
func (c *Core) receive(msgs []*raftpb.Message) {
	if len(msgs) == 0 {
		return
	}
	shut := c.opt.Gate() != nil
	for _, m := range msgs {
		if err := c.check(m); err != nil {
			c.opt.Logger.Warn("refused a message", "type", m.GetType(), "from", m.GetFrom(), "error", err)
			continue
		}
		if shut && len(m.GetEntries()) > 0 && (m.GetType() == raftpb.MsgApp || m.GetType() == raftpb.MsgProp) {
			continue
		}
		c.step(m)
	}
}

// check keeps out what would make raft panic or put into the log what no member can apply: raft trusts its peers, but one
// broken peer must not take this member along.
func (c *Core) check(m *raftpb.Message) error {
	if m.GetFrom() == c.opt.ID || m.GetTo() != c.opt.ID {
		return fmt.Errorf("from %x to %x, this is %x", m.GetFrom(), m.GetTo(), c.opt.ID)
	}
	switch m.GetType() {
	case raftpb.MsgProp:
		if len(m.GetEntries()) == 0 {
			return fmt.Errorf("a proposal without entries")
		}
		for _, e := range m.GetEntries() {
			switch e.GetType() {
			case raftpb.EntryNormal:
			case raftpb.EntryConfChange:
				if err := proto.Unmarshal(e.GetData(), &raftpb.ConfChange{}); err != nil {
					return fmt.Errorf("a conf change that cannot be read: %w", err)
				}
			default:
				return fmt.Errorf("a proposal of type %v", e.GetType())
			}
		}
	case raftpb.MsgApp:
		for i, e := range m.GetEntries() {
			if want := m.GetIndex() + 1 + uint64(i); e.GetIndex() != want {
				return fmt.Errorf("entry %d where %d belongs", e.GetIndex(), want)
			}
			if e.GetTerm() > m.GetTerm() {
				return fmt.Errorf("entry %d of term %d from a leader of term %d", e.GetIndex(), e.GetTerm(), m.GetTerm())
			}
		}
	case raftpb.MsgReadIndex, raftpb.MsgReadIndexResp:
		if len(m.GetEntries()) != 1 {
			return fmt.Errorf("%d contexts instead of one", len(m.GetEntries()))
		}
	case raftpb.MsgSnap:
		return fmt.Errorf("snapshots cannot be installed over this stream")
	}
	return nil
}
