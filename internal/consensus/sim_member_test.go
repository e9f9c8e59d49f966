package consensus

import (
	"container/heap"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
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
	out     Output
	in      Input // gathers what the next step hears
	toWrite []*raftpb.Message
	toApply []*raftpb.Entry
	down    time.Time // until when it is down, if it is
	stalled time.Time // until when it does nothing
	life    int
	nextAt  time.Time // its next tick
	waiting map[uint64]bool
}

// Send puts messages on the way. Each member has its own Transport only in ActiveSince; the network is common.
func (sm *simMember) Send(msgs []*raftpb.Message) {
	w := sm.w
	for _, m := range msgs {
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
			w.seq++
			// A copy, as over a wire: who sent it may be gone or changed when it arrives.
			heap.Push(&w.net, packet{w.now.Add(delay), w.seq, proto.Clone(m).(*raftpb.Message)})
		}
	}
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
	sm.machine = sm.flushed.clone()
	sm.in, sm.toWrite, sm.toApply = Input{}, nil, nil
	opt := Options{
		ID: sm.id, Log: sm.log, Machine: sm.machine, IDs: NewIDs(sm.id, w.now), Transport: sm,
		DurableApplied: func() uint64 { i, _ := sm.flushed.Applied(); return i },
		StartFlush:     func() { sm.flush() },
		FlushLogBytes:  200 * memEntryBytes, MaxForwardBytes: 300, MaxBacklog: 100,
	}
	if w.size == 1 {
		opt.CatchUpEntries, opt.CatchUpBytes, opt.Transport = 20, 50*memEntryBytes, nil
	} else {
		opt.CatchUpEntries, opt.CatchUpBytes = 1<<30, 1<<40 // nobody could send a snapshot
	}
	sm.log.lies = w.mutant == noSync
	core, err := NewCore(opt, w.now)
	if err != nil {
		return fmt.Errorf("member %d, life %d: %w", sm.id, sm.life, err)
	}
	sm.core, sm.writer, sm.applier = core, NewLogWriter(sm.id, sm.log), NewApplier(sm.machine)
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
	if !w.quiet && w.chance(0.003) {
		for _, m := range sm.toWrite {
			if _, _, err := sm.writer.Step([]*raftpb.Message{{Entries: m.Entries, Term: m.Term, Vote: m.Vote, Commit: m.Commit}}); err != nil {
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
	for i, e := range entries {
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

// changeMembers leads the extra member through its life, one change after the other.
func (sm *simMember) changeMembers() {
	w := sm.w
	cc := &raftpb.ConfChange{Id: new(sm.core.opt.IDs.Next()), NodeId: new(uint64(simExtra)), Type: raftpb.ConfChangeAddLearnerNode.Enum()}
	stage := w.extra
	switch stage {
	case 1:
		cc.Type = raftpb.ConfChangeAddNode.Enum()
	case 2:
		cc.Type = raftpb.ConfChangeRemoveNode.Enum()
	case 3:
		cc.Context, cc.NodeId = []byte("refuse"), new(uint64(77))
	}
	w.check.proposed(cc.GetId())
	sm.waiting[cc.GetId()] = true
	sm.in.ConfChanges = append(sm.in.ConfChanges, ConfProposal{Change: cc, Done: func(r Result, err error) {
		delete(sm.waiting, cc.GetId())
		w.cover[outcome("conf change", err)]++
		w.note("%d conf %d %d %v %v", sm.id, stage, r.Index, r.Err, err)
		w.check.done(cc.GetId(), "", r, err)
		if err == nil && stage < 3 {
			w.extra = max(w.extra, stage+1)
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
	if len(sm.toApply) > 0 && w.chance(0.5) {
		if err := sm.apply(); err != nil {
			return err
		}
	}
	if w.chance(0.1) && sm.id != simExtra || w.chance(0.02) {
		for range 1 + w.rng.IntN(4) {
			sm.propose()
		}
	}
	if w.chance(0.05) {
		sm.read()
	}
	if len(w.members) > 1 && w.chance(0.002) {
		sm.changeMembers()
	}
	ticks := 0
	for !sm.nextAt.After(w.now) {
		sm.nextAt = sm.nextAt.Add(simTick)
		ticks = 1 // a ticker drops what was missed
	}
	return sm.step(ticks)
}
