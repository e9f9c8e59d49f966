package consensus

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/raftlog"
)

// simMember is one member and what is between its parts.
type simMember struct {
	w       *world
	id      uint64
	core    *Core
	writer  *LogWriter
	applier *Applier
	log     *memLog
	machine *listMachine
	flushed *listMachine // the machine as it survives a crash
	disk    *listDisk    // snapshots received
	dir     string       // the one that flushed is of, "" for none
	out     Output
	in      Input // gathers what the next step hears
	toWrite []*raftpb.Message
	toApply []*raftpb.Entry
	down    time.Time // until when it is down, if it is
	stalled time.Time // until when it does nothing
	lazy    time.Time // until when it applies nothing
	life    int
	nextAt  time.Time // its next tick
	waiting map[uint64]bool
}

// Send puts messages on the way. Each member has its own Transport only in ActiveSince; the network is common.
func (sm *simMember) Send(msgs []*raftpb.Message) {
	w := sm.w
	for _, m := range msgs {
		if m.GetType() == raftpb.MsgSnap {
			sm.sendSnapshot(m)
			continue
		}
		if w.chance(w.drop) {
			w.cover["dropped"]++
			continue
		}
		copies := 1
		// A forwarded proposal that arrives twice is two proposals; no stream delivers twice.
		if !w.quiet && m.GetType() != raftpb.MsgProp && w.chance(0.02) {
			copies, w.cover["duplicated"] = 2, w.cover["duplicated"]+1
		}
		for range copies {
			delay := time.Duration(1+w.rng.IntN(30)) * time.Millisecond
			if !w.quiet && w.chance(0.02) {
				delay *= 20
			}
			// A copy, as over a wire: who sent it may be gone or changed when it arrives.
			m := proto.Clone(m).(*raftpb.Message)
			w.later(delay, func() { w.deliver(m) })
		}
	}
}

// sendSnapshot sends what the machine holds at this moment, which may be later than what raft had in mind. raft is told what
// became of it, before or after the receiver's own answer.
func (sm *simMember) sendSnapshot(m *raftpb.Message) {
	w, life := sm.w, sm.life
	state := sm.machine.clone()
	m = proto.Clone(m).(*raftpb.Message)
	report := func(ok bool) {
		w.cover[fmt.Sprintf("snapshot sent: %v", ok)]++
		w.later(time.Duration(1+w.rng.IntN(60))*time.Millisecond, func() {
			if sm.core != nil && sm.life == life {
				sm.in.Snapshots = append(sm.in.Snapshots, SnapshotReport{m.GetTo(), ok})
			}
		})
	}
	if w.chance(2 * w.drop) {
		report(false)
		return
	}
	w.later(time.Duration(20+w.rng.IntN(500))*time.Millisecond, func() {
		to := w.member(m.GetTo())
		if to == nil || to.core == nil || w.cut[sm.id] != w.cut[to.id] {
			report(false)
			return
		}
		m.Snapshot = to.disk.receive(state)
		w.deliver(m)
		report(true)
	})
}

// enter looks at what the log says the state is. It is the state on disk as well, for that was synced before.
func (sm *simMember) enter() {
	if s, ok := sm.log.Installed(); ok && s.Dir != sm.dir {
		sm.dir, sm.flushed = s.Dir, sm.disk.store(s.Dir).clone()
	}
}

// onInstall crashes the member before or after the machine is replaced.
func (sm *simMember) onInstall(done bool) error {
	w := sm.w
	if !w.quiet && w.chance(0.1) {
		w.cover[fmt.Sprintf("crashed in an install: %v", done)]++
		return errCrash
	}
	if done {
		sm.enter()
	}
	return nil
}

// ActiveSince implements Transport.
func (sm *simMember) ActiveSince(id uint64) time.Time {
	if sm.w.cut[sm.id] != sm.w.cut[id] {
		return time.Time{}
	}
	return sm.w.now.Add(-time.Hour)
}

func (sm *simMember) start() error {
	w := sm.w
	sm.life++
	sm.enter()
	sm.machine = sm.flushed.clone()
	sm.machine.onInstall = sm.onInstall
	sm.in, sm.toWrite, sm.toApply = Input{}, nil, nil
	opt := Options{
		ID: sm.id, Log: sm.log, Machine: sm.machine, IDs: NewIDs(sm.id, w.now), Transport: sm,
		DurableApplied: func() uint64 { i, _ := sm.flushed.Applied(); return i },
		StartFlush:     func() { sm.flush() },
		FlushLogBytes:  200 * memEntryBytes, MaxForwardBytes: 300, MaxBacklog: 100,
		CatchUpEntries: w.keep, CatchUpBytes: int64(2*w.keep) * memEntryBytes,
	}
	if w.size == 1 {
		opt.Transport = nil
	}
	sm.log.lies = w.mutant == noSync
	core, err := NewCore(opt, w.now)
	if err != nil {
		return fmt.Errorf("member %d, life %d: %w", sm.id, sm.life, err)
	}
	sm.core, sm.applier = core, NewApplier(sm.machine)
	sm.writer = NewLogWriter(sm.id, sm.log, sm.applier)
	sm.nextAt = w.now.Add(time.Duration(w.rng.Int64N(int64(simTick))))
	sm.down = time.Time{}
	return nil
}

func (sm *simMember) flush() {
	sm.w.cover["flushed"]++
	sm.flushed = sm.machine.clone()
}

// crash loses what is in memory, and of what was written an end that was not synced.
func (sm *simMember) crash() {
	w := sm.w
	w.cover["crashed"]++
	if len(sm.log.pending) > 0 {
		w.cover["crashed with unsynced appends"]++
	}
	sm.log = sm.log.crash(w.rng.IntN(4))
	sm.core = nil
	sm.down = w.now.Add(time.Duration(w.rng.IntN(3000)) * time.Millisecond)
	for id := range sm.waiting {
		w.check.gone(id)
	}
	clear(sm.waiting)
	w.note("%d crash", sm.id)
}

var errCrash = errors.New("crash")

// write runs the log writer, or crashes between write and sync.
func (sm *simMember) write() error {
	w := sm.w
	snap := slices.ContainsFunc(sm.toWrite, func(m *raftpb.Message) bool { return m.GetSnapshot() != nil })
	if !w.quiet && (w.chance(0.003) || snap && w.chance(0.1)) {
		for _, m := range sm.toWrite {
			a := raftlog.Append{Entries: m.GetEntries()}
			if meta := m.GetSnapshot().GetMetadata(); meta != nil {
				w.cover["crashed with a snapshot unsynced"]++
				a.Snapshot = &raftlog.Snapshot{Index: meta.GetIndex(), Term: meta.GetTerm(), ConfState: meta.GetConfState(),
					Dir: storeName(meta.GetIndex(), meta.GetTerm())}
			}
			if m.Term != nil {
				a.HardState = &raftpb.HardState{Term: m.Term, Vote: m.Vote, Commit: m.Commit}
			}
			if _, err := sm.log.Write([]raftlog.Append{a}); err != nil {
				return err
			}
		}
		return errCrash
	}
	msgs := sm.toWrite
	sm.toWrite = nil
	stored, send, err := sm.writer.Step(msgs)
	if err != nil {
		return err
	}
	sm.in.Stored = append(sm.in.Stored, stored...)
	sm.Send(send)
	return nil
}

// apply runs the applier on some of what waits.
func (sm *simMember) apply() error {
	entries := sm.toApply
	sm.toApply = nil
	done, err := sm.applier.Step(entries)
	if err != nil {
		return err
	}
	sm.w.cover["entries covered by a snapshot"] += done.Covered
	for i, e := range entries[done.Covered:] {
		if err := sm.w.check.applied(sm.id, e, &done.Results[i]); err != nil {
			return err
		}
	}
	sm.in.Applied = append(sm.in.Applied, done)
	return nil
}

// step runs the core on what has gathered, and works off what it says.
func (sm *simMember) step(ticks int) error {
	w := sm.w
	if w.mutant == coveredRun {
		sm.applier.floor = 0
	}
	in := sm.in
	sm.in = Input{}
	in.Now, in.Ticks = w.now, ticks
	out := &sm.out
	sm.core.Step(&in, out)
	sm.Send(out.Send)
	sm.toWrite = append(sm.toWrite, out.Append...)
	for i, e := range out.Apply {
		if e.GetType() == raftpb.EntryConfChange && i != len(out.Apply)-1 {
			return fmt.Errorf("member %d: entry %d, a conf change, is not the last of its batch", sm.id, e.GetIndex())
		}
	}
	sm.toApply = append(sm.toApply, out.Apply...)
	if out.CutTo != 0 {
		w.cover["log cut"]++
		if durable, _ := sm.flushed.Applied(); out.CutTo > durable {
			return fmt.Errorf("member %d cuts its log to %d, durable is %d", sm.id, out.CutTo, durable)
		}
		if err := sm.log.Compact(out.CutTo); err != nil {
			return err
		}
	}
	if out.StartFlush {
		sm.flush()
	}
	// Between raft taking a snapshot and its installation Core does not follow what the machine still applies.
	if index, _ := sm.machine.Applied(); index == sm.core.applied && index >= sm.core.restored && len(out.Events) > 0 {
		if err := sm.core.confState.Equivalent(sm.machine.ConfState()); err != nil {
			return fmt.Errorf("member %d at index %d: %w", sm.id, index, err)
		}
	}
	for _, e := range out.Events {
		w.cover[fmt.Sprintf("%T", e)]++
		w.note("%d %T %v", sm.id, e, e)
	}
	for _, c := range out.Completions {
		c.Done(c.Result, c.Err)
	}
	for _, c := range out.Reads {
		c.Done(c.Err)
	}
	return nil
}

// propose has a client ask this member for a write.
func (sm *simMember) propose() {
	w := sm.w
	id := sm.core.opt.IDs.Next()
	text := fmt.Sprintf("%d.%d.%x", sm.id, sm.life, id)
	if w.chance(0.05) {
		text = "refuse"
	}
	w.check.proposed(id)
	sm.waiting[id] = true
	p := Proposal{ID: id, Data: encode(id, text), Done: func(r Result, err error) {
		delete(sm.waiting, id)
		w.cover[outcome("proposal", err)]++
		w.note("%d done %x %d %v", sm.id, id, r.Index, err)
		w.check.done(id, text, r, err)
	}}
	if w.chance(0.1) {
		p.Deadline = w.now.Add(time.Duration(w.rng.IntN(2000)) * time.Millisecond)
	}
	sm.in.Proposals = append(sm.in.Proposals, p)
	if w.chance(0.03) {
		sm.in.Cancels = append(sm.in.Cancels, id)
	}
}

func outcome(what string, err error) string {
	for err != nil && errors.Unwrap(err) != nil {
		err = errors.Unwrap(err)
	}
	return fmt.Sprintf("%s: %v", what, err)
}

// read has a client ask this member for a read.
func (sm *simMember) read() {
	w := sm.w
	token, floor := w.check.readBegun()
	life := sm.life
	done := func(err error) {
		w.cover[outcome("read", err)]++
		w.note("%d read %v", sm.id, err)
		index, _ := sm.machine.Applied()
		w.check.readDone(token, err, sm.id, life, floor, index)
	}
	if w.mutant == staleRead && sm.core.firstOfTerm != 0 {
		done(nil)
		return
	}
	sm.in.Reads = append(sm.in.Reads, Read{Done: done})
}

// changeMembers leads the extra members through their lives, one change after the other: each joins empty, as a learner, gets a
// vote, and is removed.
func (sm *simMember) changeMembers() {
	w := sm.w
	stage := w.extra
	cc := &raftpb.ConfChange{Id: new(sm.core.opt.IDs.Next()), NodeId: new(uint64(simExtra + stage/3)), Type: raftpb.ConfChangeAddLearnerNode.Enum()}
	switch {
	case stage == 3*simExtras || w.chance(0.2):
		cc.Context, cc.NodeId = []byte("refuse"), new(uint64(77))
		stage = 3 * simExtras
	case stage%3 == 1:
		cc.Type = raftpb.ConfChangeAddNode.Enum()
	case stage%3 == 2:
		cc.Type = raftpb.ConfChangeRemoveNode.Enum()
	}
	w.check.proposed(cc.GetId())
	sm.waiting[cc.GetId()] = true
	sm.in.ConfChanges = append(sm.in.ConfChanges, ConfProposal{Change: cc, Done: func(r Result, err error) {
		delete(sm.waiting, cc.GetId())
		w.cover[outcome("conf change", err)]++
		w.note("%d conf %d %d %v %v", sm.id, stage, r.Index, r.Err, err)
		w.check.done(cc.GetId(), "", r, err)
		if err == nil && stage == w.extra && stage < 3*simExtras {
			w.extra++
		}
	}})
}

// live is what one member does in one moment.
func (sm *simMember) live() error {
	w := sm.w
	if sm.core == nil {
		if w.now.Before(sm.down) && !w.quiet {
			return nil
		}
		w.cover["restarted"]++
		if err := sm.start(); err != nil {
			return err
		}
	}
	if w.now.Before(sm.stalled) && !w.quiet {
		return nil
	}
	if w.chance(0.005) {
		sm.flush()
	}
	if len(sm.toWrite) > 0 && w.chance(0.5) {
		if err := sm.write(); errors.Is(err, errCrash) {
			sm.crash()
			return nil
		} else if err != nil {
			return err
		}
	}
	if len(sm.toApply) > 0 && w.chance(0.5) && (!w.now.Before(sm.lazy) || w.quiet) {
		if err := sm.apply(); err != nil {
			return err
		}
	}
	if w.chance(0.1) && sm.id < simExtra || w.chance(0.02) {
		for range 1 + w.rng.IntN(4) {
			sm.propose()
		}
	}
	if w.chance(0.05) {
		sm.read()
	}
	if len(w.members) > 1 && w.chance(0.003) {
		sm.changeMembers()
	}
	ticks := 0
	for !sm.nextAt.After(w.now) {
		sm.nextAt = sm.nextAt.Add(simTick)
		ticks = 1 // a ticker drops what was missed
	}
	return sm.step(ticks)
}
