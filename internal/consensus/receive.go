package consensus

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// receive steps messages of peers. With the gate shut this member takes no entries, whoever they come from, and so
// acknowledges none, but for those that Options.LastGate lets pass and those without content; it still hears heartbeats and votes,
// so that the cluster keeps its leader.
func (c *Core) receive(msgs []*raftpb.Message) {
	if len(msgs) == 0 {
		return
	}
	shut := c.opt.Gate() != nil
	for _, m := range msgs {
		if err := c.check(m); err != nil {
			c.refuse(m, err)
			continue
		}
		if shut {
			if m = c.passing(m); m == nil {
				continue
			}
		}
		switch m.GetType() {
		case raftpb.MsgAppResp:
			c.answered(m)
		case raftpb.MsgHeartbeatResp:
			c.answered(m)
			m = c.withoutForgedCount(m)
		case raftpb.MsgProp:
			if c.keep(m) {
				continue
			}
		case raftpb.MsgReadIndex:
			if !c.knowsCommitted() && c.rn.BasicStatus().RaftState == raft.StateLeader {
				c.askedEarly(m)
				continue
			}
		}
		c.step(m)
	}
}

// askedEarly keeps a question of another member until this leader can answer it. raft would answer as a lone voter at once, and
// otherwise keep as many as come. Who asks again no longer waits for an answer to what it asked before.
func (c *Core) askedEarly(m *raftpb.Message) {
	c.early = slices.DeleteFunc(c.early, func(old *raftpb.Message) bool { return old.GetFrom() == m.GetFrom() })
	if c.isMember(m.GetFrom()) {
		c.early = append(c.early, m)
	}
}

// maxKeptBytes bounds the proposals of other members that are kept.
const maxKeptBytes = 16 << 20

// kept is a message with proposals of another member, and when it came.
type kept struct {
	message *raftpb.Message
	at      time.Time
}

// keep holds back proposals of another member while raft would drop them, and tells whether it did: their proposers would hear
// nothing until they time out. That is so while this member hands over leadership and until it knows who leads next.
func (c *Core) keep(m *raftpb.Message) bool {
	size := proto.Size(m)
	if !c.unsettled() || c.keptBytes+size > maxKeptBytes {
		return false
	}
	c.kept, c.keptBytes = append(c.kept, kept{m, c.now}), c.keptBytes+size
	return true
}

// passKept gives raft what was kept, once it takes it. What is older than two election time-outs is dropped.
func (c *Core) passKept() {
	if len(c.kept) == 0 {
		return
	}
	stays := c.unsettled()
	waiting := c.kept
	c.kept, c.keptBytes = nil, 0
	for _, k := range waiting {
		switch m := k.message; {
		case c.now.Sub(k.at) > 2*c.opt.electionTimeout():
			c.opt.Logger.Debug("dropped proposals, nobody leads", "from", m.GetFrom(), "count", len(m.GetEntries()))
		case stays:
			c.kept, c.keptBytes = append(c.kept, k), c.keptBytes+proto.Size(m)
		default: // as one of this member's own, or whoever leads now might get it from itself
			c.step(&raftpb.Message{Type: m.Type, From: new(c.opt.ID), Entries: m.Entries})
		}
	}
}

// unsettled tells whether raft drops proposals as things are.
func (c *Core) unsettled() bool {
	st := c.rn.BasicStatus()
	return st.Lead == raft.None || handsOver(st)
}

// handsOver tells whether raft leads and is giving that up.
func handsOver(st raft.BasicStatus) bool {
	return st.RaftState == raft.StateLeader && st.LeadTransferee != raft.None
}

// passing returns what is taken of a message while the gate is shut, nil if nothing is. Of proposals that another member passes on in
// one message each is asked for by itself, as it would be here: what frees space may travel with what does not. Appends stay whole.
// Those of nothing but empty entries always pass: they take next to no room, and with one of them a leader's term begins. Should
// all disks be full, whoever leads could answer no read without it.
func (c *Core) passing(m *raftpb.Message) *raftpb.Message {
	switch {
	case len(m.GetEntries()) == 0:
	case m.GetType() == raftpb.MsgApp:
		if slices.ContainsFunc(m.GetEntries(), hasContent) && c.opt.LastGate() != nil {
			return nil
		}
	case m.GetType() == raftpb.MsgProp:
		var entries []*raftpb.Entry
		for _, e := range m.GetEntries() {
			if e.GetType() == raftpb.EntryNormal && c.opt.Pass(e.GetData()) == nil {
				entries = append(entries, e)
			}
		}
		if len(entries) == 0 {
			return nil
		}
		return &raftpb.Message{Type: m.Type, From: m.From, To: m.To, Entries: entries}
	}
	return m
}

func hasContent(e *raftpb.Entry) bool {
	return e.GetType() != raftpb.EntryNormal || len(e.GetData()) > 0
}

// refusedPause is how often refused messages are logged: whoever sends one may send many.
const refusedPause = time.Second

func (c *Core) refuse(m *raftpb.Message, err error) {
	c.refused++
	if !c.refusedAt.IsZero() && c.now.Sub(c.refusedAt) < refusedPause {
		return
	}
	c.opt.Logger.Warn("refused a message", "type", m.GetType(), "from", m.GetFrom(), "error", err, "count", c.refused)
	c.refusedAt, c.refused = c.now, 0
}

// maxTerm is far above what elections can reach; raft counts on from the highest term it hears of, and must not overflow.
const maxTerm = 1 << 62

// check keeps out what would make raft panic or put into the log what no member can apply: raft trusts its peers, but one
// broken peer must not take this member along.
func (c *Core) check(m *raftpb.Message) error {
	if m.GetFrom() == c.opt.ID || m.GetTo() != c.opt.ID {
		return fmt.Errorf("from %x to %x, this is %x", m.GetFrom(), m.GetTo(), c.opt.ID)
	}
	if m.GetFrom() == raft.None || raft.IsLocalMsgTarget(m.GetFrom()) {
		return fmt.Errorf("from %x, which is no member's id", m.GetFrom())
	}
	switch m.GetType() {
	case raftpb.MsgProp, raftpb.MsgReadIndex:
		// They are passed on to the leader as they are, and raft gives nothing of a term to what has one.
		if m.GetTerm() != 0 {
			return fmt.Errorf("of term %d, and belongs to none", m.GetTerm())
		}
	default:
		if t := m.GetTerm(); t == 0 || t > maxTerm {
			return fmt.Errorf("of term %d: terms go from 1 to %d", t, uint64(maxTerm))
		}
	}
	switch m.GetType() {
	case raftpb.MsgProp:
		if len(m.GetEntries()) == 0 {
			return fmt.Errorf("a proposal without entries")
		}
		for _, e := range m.GetEntries() {
			if err := checkEntry(e); err != nil {
				return err
			}
		}
	case raftpb.MsgApp:
		return c.checkAppend(m)
	case raftpb.MsgAppResp:
		if !m.GetReject() && m.GetTerm() == c.term && c.role == raft.StateLeader && m.GetIndex() > c.last {
			return fmt.Errorf("index %d is acknowledged, the log ends at %d", m.GetIndex(), c.last)
		}
	case raftpb.MsgHeartbeat:
		return c.checkHeartbeat(m)
	case raftpb.MsgReadIndex, raftpb.MsgReadIndexResp:
		if len(m.GetEntries()) != 1 {
			return fmt.Errorf("%d contexts instead of one", len(m.GetEntries()))
		}
	case raftpb.MsgSnap:
		return c.checkSnapshot(m)
	case raftpb.MsgTransferLeader:
		// From is whom to hand over to. A member that does not lead would pass it on, which raft does not survive with a term.
		if !c.isMember(m.GetFrom()) || c.rn.BasicStatus().RaftState != raft.StateLeader {
			return fmt.Errorf("leadership is to go to %x: no member, or this one does not lead", m.GetFrom())
		}
	case raftpb.MsgTimeoutNow:
		if !c.isMember(m.GetFrom()) {
			return fmt.Errorf("an election is asked for by %x, no member", m.GetFrom())
		}
	case raftpb.MsgVote, raftpb.MsgVoteResp, raftpb.MsgPreVote, raftpb.MsgPreVoteResp, raftpb.MsgHeartbeatResp:
	default:
		return fmt.Errorf("a message that members do not send each other")
	}
	return nil
}

func (c *Core) isMember(id uint64) bool {
	return slices.Contains(c.voters, id) || slices.Contains(c.confState.GetLearners(), id)
}

// checkEntry checks what an entry holds.
func checkEntry(e *raftpb.Entry) error {
	switch e.GetType() {
	case raftpb.EntryNormal:
	case raftpb.EntryConfChange:
		if err := proto.Unmarshal(e.GetData(), &raftpb.ConfChange{}); err != nil {
			return fmt.Errorf("a conf change that cannot be read: %w", err)
		}
	default:
		return fmt.Errorf("an entry of type %v", e.GetType())
	}
	return nil
}

func (c *Core) checkAppend(m *raftpb.Message) error {
	term := m.GetLogTerm()
	for i, e := range m.GetEntries() {
		if want := m.GetIndex() + 1 + uint64(i); e.GetIndex() != want {
			return fmt.Errorf("entry %d where %d belongs", e.GetIndex(), want)
		}
		if e.GetTerm() > m.GetTerm() {
			return fmt.Errorf("entry %d of term %d from a leader of term %d", e.GetIndex(), e.GetTerm(), m.GetTerm())
		}
		if e.GetTerm() < term || e.GetTerm() == 0 {
			return fmt.Errorf("entry %d of term %d after one of term %d", e.GetIndex(), e.GetTerm(), term)
		}
		term = e.GetTerm()
		if err := checkEntry(e); err != nil {
			return err
		}
	}
	return nil
}

// checkHeartbeat compares the commit index, of which a leader tells each member as much as that one has acknowledged, with the end
// of the log. If a voter that leads knows better, then this member no longer has what it promised to have, and what it goes on to
// promise is worth nothing: it stops.
func (c *Core) checkHeartbeat(m *raftpb.Message) error {
	if m.GetCommit() <= c.last || m.GetTerm() < c.term {
		return nil
	}
	err := fmt.Errorf("%w: the leader, %x, knows that index %d was acknowledged here, the log ends at %d: rebuild this member from its peers with `engram ctl rebuild`",
		ErrLogLost, m.GetFrom(), m.GetCommit(), c.last)
	if slices.Contains(c.voters, m.GetFrom()) && c.failed == nil {
		c.failed = err
	}
	return err
}

// checkSnapshot lets a snapshot pass whose state has arrived. Its metadata is what raft works with from now on, so it has to make
// sense.
func (c *Core) checkSnapshot(m *raftpb.Message) error {
	meta := m.GetSnapshot().GetMetadata()
	if meta.GetIndex() == 0 || meta.GetTerm() == 0 || meta.GetTerm() > m.GetTerm() {
		return fmt.Errorf("a snapshot of index %d and term %d from a leader of term %d", meta.GetIndex(), meta.GetTerm(), m.GetTerm())
	}
	if err := c.checkMembers(meta.GetConfState()); err != nil {
		return fmt.Errorf("a snapshot of index %d %w", meta.GetIndex(), err)
	}
	if _, ok := c.opt.Machine.Received(meta.GetIndex(), meta.GetTerm()); !ok {
		return fmt.Errorf("a snapshot of index %d and term %d whose state has not arrived", meta.GetIndex(), meta.GetTerm())
	}
	return nil
}

// checkMembers checks the members of a snapshot: this one among them, and nothing that makes raft panic.
func (c *Core) checkMembers(cs *raftpb.ConfState) error {
	if len(cs.GetVoters()) == 0 {
		return fmt.Errorf("without voters")
	}
	if len(cs.GetVotersOutgoing())+len(cs.GetLearnersNext()) > 0 || cs.GetAutoLeave() {
		return fmt.Errorf("amid a joint change of members, which etcd does not make")
	}
	seen := map[uint64]bool{}
	for _, list := range [...][]uint64{cs.GetVoters(), cs.GetLearners()} {
		for _, id := range list {
			if id == raft.None || raft.IsLocalMsgTarget(id) || seen[id] {
				return fmt.Errorf("with the member id %x, which is none or there twice", id)
			}
			seen[id] = true
		}
	}
	if !seen[c.opt.ID] {
		return fmt.Errorf("with voters %x and learners %x, and this member, %x, not among them", cs.GetVoters(), cs.GetLearners(), c.opt.ID)
	}
	return nil
}

// withoutForgedCount takes out of an answer to a heartbeat what cannot be an echo: raft reads the context as a count of reads,
// without asking how long it is, and takes a count that it never sent for so many answers.
func (c *Core) withoutForgedCount(m *raftpb.Message) *raftpb.Message {
	ctx := m.GetContext()
	if len(ctx) == 0 || len(ctx) == 8 && binary.LittleEndian.Uint64(ctx) <= c.beat {
		return m
	}
	return &raftpb.Message{Type: m.Type, From: m.From, To: m.To, Term: m.Term}
}
