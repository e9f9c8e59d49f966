package consensus

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// Core is the heart of the loop: raft, those who wait for it, and the rules of when to ask it what. Step takes everything
// that has happened and returns everything to be done about it. It has no goroutine and no clock, and with equal inputs
// (raft's random election time-outs included) it gives equal outputs. Not safe for concurrent use.
type Core struct {
	opt Options
	log *guarded
	rn  *raft.RawNode
	now time.Time

	// What raft last said about itself.
	role         raft.StateType
	leader, term uint64
	commit       uint64
	leaderSince  time.Time // when leader was last seen to become someone
	leaderGone   bool      // leader was removed since: it hears nobody any more, and another is to come
	sole         bool      // this member is the only voter
	learner      bool
	last         uint64 // index of the last entry given to the log
	beat         uint64 // highest count of reads asked about in heartbeats of this term
	// firstOfTerm is the index of the entry this leader began its term with; 0 if not leader.
	firstOfTerm uint64
	confirmed   bool // firstOfTerm has been applied

	// Committed entries not yet handed to the applier: there are some only behind a conf change that raft has not taken.
	held        []*raftpb.Entry
	confInApply bool
	applied     uint64
	appliedTerm uint64
	confState   *raftpb.ConfState // as of applied; from raft taking a snapshot until it is installed, as of before that
	confMoving  bool              // raft is being told of a conf change; applied has not caught up
	restored    uint64            // index of the snapshot that raft took last, installed or about to be

	waiters *waiters
	queue   []proposal // registered, not yet given to raft: no leader is known
	confs   []proposal // conf changes, given to raft one at a time
	// confSent is the conf change of this member that raft was given last and that still waits; confStuck says that raft
	// refused one because another may be pending, and that nothing has been applied since.
	confSent  uint64
	confStuck bool
	reads     reads
	// early are questions of other members that came before this leader could answer, of each member the last.
	early []*raftpb.Message

	cutTo      uint64    // up to where the log was allowed to forget
	durable    uint64    // what the machine had made durable at the last tick
	dirtySince time.Time // since when there is more to be made durable than that
	asked      bool      // a flush was asked for and durable has not moved since
	prefetch   Span      // asked for in this step
	fetching   bool      // a prefetch is under way

	campaign     bool      // stand for election as soon as that is possible: the only voter has nobody to wait for
	advanceUntil time.Time // until when a second peer may shorten the first election time-out
	voters       []uint64
	members      []Progress // refreshed once a tick, never changed afterwards
	leaderSeen   uint64     // how many leaders so far

	followers  map[uint64]*follower // of this leader, by ID
	persist    persistTimer
	handedOver time.Time // when leadership was last given up for a slow or full disk
	failed     error     // why no further step may follow, besides the log's failures
	refusedAt  time.Time // when a refused message was last logged
	refused    int       // not logged since

	kept      []kept // oldest first
	keptBytes int

	entries []raftpb.Entry // reused for batches that raft copies
	batch   []*raftpb.Entry
}

// proposal is a Proposal or a conf change on its way to raft. Its Done lies with the waiters.
type proposal struct {
	id   uint64
	data []byte
	typ  raftpb.EntryType
	term uint64 // Proposal.Term
}

// Input is what happened since the last step. Core keeps the entries, messages and data, not the slices holding them.
type Input struct {
	Now time.Time
	// Ticks is how many ticks have passed; more than one after another is a stall made up for.
	Ticks int
	// Received came from other members.
	Received []*raftpb.Message
	// Stored are answers of the log writer to this member, in its order.
	Stored []*raftpb.Message
	// Applied are the applier's reports, in order.
	Applied []Applied

	Proposals   []Proposal
	ConfChanges []ConfProposal
	Cancels     []uint64
	Reads       []Read

	// Prefetched says that a prefetch has ended, however.
	Prefetched bool
	// Unreachable are members that messages could not be sent to, Snapshots what became of snapshots.
	Unreachable []uint64
	Snapshots   []SnapshotReport
	// TransferTo asks the leader to hand over to this member, if not 0; HandOver, to whoever is best.
	TransferTo uint64
	HandOver   bool
}

// SnapshotReport says whether a member has received the snapshot that was sent to it.
type SnapshotReport struct {
	Member uint64
	OK     bool
}

// ConfProposal asks for a change of members. Its identity is the change's own id.
type ConfProposal struct {
	Change   *raftpb.ConfChange
	Deadline time.Time
	Done     func(Result, error)
}

// Output is what is to be done now. Lists are to be worked off in order; different lists go to different hands. Core fills the
// same Output again and again: the receiver takes what it needs before the next step.
type Output struct {
	// Send goes to other members, at once.
	Send []*raftpb.Message
	// Append goes to the log writer.
	Append []*raftpb.Message
	// CutTo, if not 0, is up to where the log may be compacted.
	CutTo uint64
	// Apply goes to the applier. Only the last one may be a conf change.
	Apply []*raftpb.Entry
	// Completions and Reads are finished: call Done.
	Completions []Completion
	Reads       []ReadCompletion
	// Prefetch are entries to be read into memory, if hi is not 0; Input.Prefetched ends it.
	Prefetch Span
	// StartFlush asks the machine to make durable what it has.
	StartFlush bool
	Events     []Event
}

// Span is the entries [Lo, Hi).
type Span struct{ Lo, Hi uint64 }

func (o *Output) reset() {
	clear(o.Send)
	clear(o.Append)
	clear(o.Apply)
	clear(o.Completions)
	clear(o.Reads)
	clear(o.Events)
	*o = Output{Send: o.Send[:0], Append: o.Append[:0], Apply: o.Apply[:0], Completions: o.Completions[:0],
		Reads: o.Reads[:0], Events: o.Events[:0]}
}

// Completion ends a proposal.
type Completion struct {
	Done   func(Result, error)
	Result Result
	Err    error
	// Size is the proposal's size in bytes, as counted against Options.MaxPendingBytes.
	Size int
}

// ReadCompletion ends a read.
type ReadCompletion struct {
	Done func(error)
	Err  error
}

// NewCore starts raft on what log and machine hold, and refuses a pair that does not fit together with ErrStoreAhead,
// ErrLogGap or ErrStoreMismatch.
func NewCore(opt Options, now time.Time) (*Core, error) {
	opt, err := opt.withDefaults()
	if err != nil {
		return nil, err
	}
	opt.Log.SetOnMiss(nil)
	from, err := reconcile(opt.Log, opt.Machine)
	if err != nil {
		return nil, err
	}
	c := &Core{
		opt: opt, now: now,
		role: raft.StateFollower, term: from.term, commit: from.commit, applied: from.applied, appliedTerm: from.appliedTerm,
		last: from.last, cutTo: from.first - 1, dirtySince: now, campaign: true,
		waiters: newWaiters(opt.Tick, opt.RequestTimeout, now), followers: map[uint64]*follower{},
	}
	c.log = &guarded{Log: opt.Log, snapshot: c.snapshot}
	c.conf(from.conf)
	c.rn, err = raft.NewRawNode(&raft.Config{
		ID:                        opt.ID,
		ElectionTick:              opt.ElectionTicks,
		HeartbeatTick:             opt.HeartbeatTicks,
		Storage:                   c.log,
		Applied:                   from.applied,
		AsyncStorageWrites:        true,
		MaxSizePerMsg:             opt.MaxMessageBytes,
		MaxCommittedSizePerReady:  opt.MaxApplyBytes,
		MaxUncommittedEntriesSize: opt.MaxUncommittedBytes,
		MaxInflightMsgs:           opt.MaxInflight,
		MaxInflightBytes:          opt.MaxInflightBytes,
		CheckQuorum:               true,
		PreVote:                   !opt.NoPreVote,
		Logger:                    raftLogger{opt.Logger},
	})
	if err != nil {
		return nil, fmt.Errorf("consensus: starting raft: %w", err)
	}
	opt.Log.SetOnMiss(c.onMiss)
	if !opt.NoTickAdvance {
		c.advanceUntil = now.Add(5 * time.Second)
	}
	return c, nil
}

// Step digests in and fills out with what follows from it.
func (c *Core) Step(in *Input, out *Output) {
	out.reset()
	c.now = in.Now
	c.prefetch = Span{}
	c.fetching = c.fetching && !in.Prefetched
	for _, m := range in.Stored {
		c.onStored(m, out)
	}
	for i := range in.Applied {
		c.onApplied(&in.Applied[i], out)
	}
	// Before the ticks: a heartbeat that has been waiting here must not be too late.
	c.receive(in.Received)
	for range in.Ticks {
		c.rn.Tick()
	}
	for _, id := range in.Unreachable {
		c.rn.ReportUnreachable(id)
	}
	for _, r := range in.Snapshots {
		status := raft.SnapshotFinish
		if !r.OK {
			status = raft.SnapshotFailure
		}
		c.rn.ReportSnapshot(r.Member, status)
	}
	if in.HandOver && c.mayHandOver() {
		in.TransferTo = c.successor()
	}
	if in.TransferTo != 0 {
		c.rn.TransferLeader(in.TransferTo)
	}
	c.register(in, out)
	// After the proposals: one may have been cancelled before it was even taken.
	for _, id := range in.Cancels {
		c.complete(id, Result{}, ErrCanceled, out)
	}
	latest := c.now.Add(c.opt.RequestTimeout)
	for _, r := range in.Reads {
		if r.Deadline.IsZero() || r.Deadline.After(latest) {
			r.Deadline = latest
		}
		c.reads.waiting = append(c.reads.waiting, r)
	}
	if in.Ticks > 0 {
		c.onTick(out)
	}
	for {
		c.standForElection()
		c.passKept()
		c.propose(out)
		c.askReads(out)
		if c.Err() != nil || !c.rn.HasReady() {
			break
		}
		c.ready(out)
	}
	c.reads.applied(c.applied, out)
	c.handOver(out)
	out.Prefetch = c.prefetch
}

// Err returns why no further step may follow, nil if one may: the log could not be read, or has lost what it held.
func (c *Core) Err() error {
	if c.failed != nil {
		return c.failed
	}
	return c.log.failed
}

// Stop ends everything that waits with ErrStopped, in's proposals and reads included; who was waiting for an entry that in
// reports as applied is told so. No step may follow.
func (c *Core) Stop(in *Input, out *Output) {
	out.reset()
	for i := range in.Applied {
		c.tell(in.Applied[i].Results, out)
	}
	c.waiters.drain(func(w waiter) {
		out.Completions = append(out.Completions, Completion{w.done, Result{}, ErrStopped, w.size})
	})
	for i := range in.Proposals {
		p := &in.Proposals[i]
		out.Completions = append(out.Completions, Completion{p.Done, Result{}, ErrStopped, len(p.Data)})
	}
	for i := range in.ConfChanges {
		p := &in.ConfChanges[i]
		out.Completions = append(out.Completions, Completion{p.Done, Result{}, ErrStopped, confSize(p.Change)})
	}
	c.reads.waiting = append(c.reads.waiting, in.Reads...)
	c.reads.expire(time.Time{}, ErrStopped, out)
}

// onMiss is asked by the log, within a step, whether entries that are not in memory may come later. Those for a peer that
// lags may: the next heartbeat has raft ask again. Those to be applied may not, for raft would go on asking.
func (c *Core) onMiss(lo, hi uint64) bool {
	if lo > c.applied {
		return false
	}
	if !c.fetching {
		c.fetching = true
		c.prefetch = Span{lo, hi}
	}
	return true
}

// step hands a message to raft. raft's errors say that a message came too late or from a stranger: nothing to be done.
func (c *Core) step(m *raftpb.Message) {
	if err := c.rn.Step(m); err != nil {
		c.opt.Logger.Debug("raft did not take a message", "type", m.GetType(), "from", m.GetFrom(), "error", err)
	}
}

// ready takes what raft wants done.
func (c *Core) ready(out *Output) {
	rd := c.rn.Ready()
	if hs := rd.HardState; !raft.IsEmptyHardState(hs) {
		c.term, c.commit = hs.GetTerm(), hs.GetCommit()
	}
	if rd.SoftState != nil {
		c.onSoftState(*rd.SoftState, out)
	}
	for _, rs := range rd.ReadStates {
		if !c.reads.confirm(rs.RequestCtx, rs.Index) {
			c.opt.Metrics.SlowReadIndexes.Inc()
		}
	}
	for _, m := range rd.Messages {
		switch m.GetTo() {
		case raft.LocalAppendThread:
			c.onAppend(m)
			out.Append = append(out.Append, m)
		case raft.LocalApplyThread:
			c.held = append(c.held, m.GetEntries()...)
		default:
			c.onSend(m)
			out.Send = append(out.Send, m)
		}
	}
}

// onStored hears what the log writer has done.
func (c *Core) onStored(m *raftpb.Message, out *Output) {
	c.step(m)
	if m.GetType() != raftpb.MsgStorageAppendResp {
		return
	}
	c.persist.stored(c.now, c.opt.SlowDisk)
	if s := m.GetSnapshot(); !raft.IsEmptySnap(s) {
		c.onInstalled(s.GetMetadata(), out)
	}
}

// onSend notes what a leader asks its followers.
func (c *Core) onSend(m *raftpb.Message) {
	switch m.GetType() {
	case raftpb.MsgHeartbeat:
		if ctx := m.GetContext(); len(ctx) == 8 {
			c.beat = max(c.beat, binary.LittleEndian.Uint64(ctx))
		}
		c.onHeartbeat(m.GetTo())
	case raftpb.MsgApp:
		if n := len(m.GetEntries()); n > 0 {
			c.follower(m.GetTo()).ack.begin(m.GetEntries()[n-1].GetIndex(), c.now)
		}
	}
}

// onAppend notes where the log will end, that a snapshot is about to take the place of what is applied, and where this leader's
// term begins.
func (c *Core) onAppend(m *raftpb.Message) {
	if s := m.GetSnapshot(); !raft.IsEmptySnap(s) {
		c.onRestored(s.GetMetadata())
	}
	if n := len(m.GetEntries()); n > 0 {
		c.last = m.GetEntries()[n-1].GetIndex()
	}
	if n := len(m.GetResponses()); n > 0 && m.GetResponses()[n-1].GetType() == raftpb.MsgStorageAppendResp {
		c.persist.sent(len(m.GetEntries()) > 0, c.now)
	}
	for _, e := range m.GetEntries() {
		if c.role == raft.StateLeader && c.firstOfTerm == 0 && e.GetTerm() == c.term {
			c.firstOfTerm = e.GetIndex()
		}
	}
}

// raftHasMoved tells whether raft leads or follows otherwise than role and leader say, as it may after a message or a tick of this
// step: ready is to hear of that before raft is given what depends on it. One that follows now passes proposals on as they are,
// without copying them, and one without a leader drops them.
func (c *Core) raftHasMoved() bool { return c.moved(c.rn.BasicStatus()) }

func (c *Core) moved(st raft.BasicStatus) bool { return st.RaftState != c.role || st.Lead != c.leader }

func (c *Core) onSoftState(s raft.SoftState, out *Output) {
	if s.RaftState != raft.StateLeader || c.role != raft.StateLeader {
		c.firstOfTerm, c.confirmed = 0, false
		c.beat, c.persist.strikes = 0, 0
		clear(c.followers)
	}
	if c.role = s.RaftState; c.role != raft.StateLeader {
		c.early = nil // the next leader is asked again
	}
	if s.Lead == c.leader {
		return
	}
	out.Events = append(out.Events, LeaderChanged{Old: c.leader, New: s.Lead, Term: c.term})
	c.leader, c.leaderGone = s.Lead, false
	c.confSent, c.confStuck = 0, false
	if s.Lead == raft.None {
		return
	}
	c.leaderSince = c.now
	c.leaderSeen++
	c.opt.Metrics.LeaderChanges.Inc()
	if c.reads.leader != raft.None && c.reads.leader != s.Lead {
		c.opt.Metrics.ReadIndexesFailed.Inc()
		c.reads.fail(ErrLeaderChanged, out)
	}
}

// handOver gives committed entries to the applier, up to the first conf change that raft has yet to take.
func (c *Core) handOver(out *Output) {
	n := 0
	for n < len(c.held) && !c.confInApply {
		c.confInApply = c.held[n].GetType() != raftpb.EntryNormal
		n++
	}
	if n == 0 {
		return
	}
	out.Apply = append(out.Apply, c.held[:n]...)
	rest := copy(c.held, c.held[n:])
	clear(c.held[rest:])
	c.held = c.held[:rest]
}

// onApplied tells raft and those who wait what the machine has done. raft first: whoever hears that a change of members is
// done may ask for the next one at once. Of entries at or below a snapshot that raft has taken meanwhile raft is not told how they
// changed the members: it knows of later members already.
func (c *Core) onApplied(a *Applied, out *Output) {
	entries := a.Entries[a.Covered:]
	for i := range a.Results {
		r := &a.Results[i]
		if entries[i].GetType() == raftpb.EntryNormal || entries[i].GetIndex() <= c.restored {
			continue
		}
		if r.ConfChange == nil {
			panic(fmt.Sprintf("consensus: the machine answered the conf change at index %d without a change", r.Index))
		}
		c.confMoving = true
		cs := c.rn.ApplyConfChange(r.ConfChange)
		c.confMoving = false
		c.conf(cs)
		c.confInApply = false
		if id := r.ConfChange.GetNodeId(); id != raft.None {
			if r.ConfChange.GetType() == raftpb.ConfChangeRemoveNode && id == c.leader && id != c.opt.ID {
				c.leaderGone = true
				c.campaign = c.sole // nobody else is there to vote
			}
			out.Events = append(out.Events, MembersChanged{Index: entries[i].GetIndex(), ConfState: cs})
		}
	}
	// Before raft hears of it: what it sends then may be a snapshot, which is of what is applied, members included.
	if n := len(entries); n > 0 && entries[n-1].GetIndex() > c.applied {
		c.applied, c.appliedTerm = entries[n-1].GetIndex(), entries[n-1].GetTerm()
	}
	c.step(&raftpb.Message{
		Type: raftpb.MsgStorageApplyResp.Enum(), To: new(c.opt.ID), From: new(raft.LocalApplyThread), Entries: a.Entries,
	})
	c.confStuck = false
	c.handOver(out)
	c.tell(a.Results, out)
	if !c.confirmed && c.firstOfTerm != 0 && c.applied >= c.firstOfTerm {
		c.confirmed = true
		out.Events = append(out.Events, LeadershipConfirmed{Term: c.term, Index: c.firstOfTerm})
	}
}

// tell gives each result to whoever waits for it, and those with a reply that nobody waits for to Discard.
func (c *Core) tell(results []Result, out *Output) {
	for i := range results {
		r := &results[i]
		if r.ID != 0 && c.waiters.has(r.ID) {
			c.complete(r.ID, *r, nil, out)
		} else if r.Reply != nil && c.opt.Discard != nil {
			c.opt.Discard(*r)
		}
	}
}

// conf notes who the members are.
func (c *Core) conf(cs *raftpb.ConfState) {
	c.confState = cs
	c.voters = slices.Clone(cs.GetVoters())
	c.sole = len(cs.GetVoters()) == 1 && cs.GetVoters()[0] == c.opt.ID && len(cs.GetVotersOutgoing()) == 0
	c.learner = slices.Contains(cs.GetLearners(), c.opt.ID)
}

// alone reports whether there is no other member, voter or learner, to hear from this one.
func (c *Core) alone() bool {
	return c.sole && len(c.confState.GetLearners()) == 0 && len(c.confState.GetLearnersNext()) == 0
}

// standForElection lets a lone voter become leader at once, as soon as it has applied what it knew to be committed when it
// started: before that raft would refuse, for a conf change may be among it.
func (c *Core) standForElection() {
	if !c.campaign || c.applied < c.commit {
		return
	}
	c.campaign = false
	if c.sole && (c.leader == raft.None || c.leaderGone) {
		if err := c.rn.Campaign(); err != nil {
			c.opt.Logger.Warn("standing for election failed", "error", err)
		}
	}
}

// complete ends a proposal if it still waits.
func (c *Core) complete(id uint64, r Result, err error, out *Output) {
	w, ok := c.waiters.take(id)
	if !ok {
		return
	}
	if err != nil {
		c.opt.Metrics.ProposalsFailed.Inc()
		r = Result{}
	}
	out.Completions = append(out.Completions, Completion{w.done, r, err, w.size})
}
