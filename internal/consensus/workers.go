package consensus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/raftlog"
)

// write is the log writer's goroutine.
func (n *Node) write(ctx context.Context) {
	var msgs []*raftpb.Message
	for ok := true; ; {
		if msgs, ok = n.toWrite.take(msgs); !ok {
			return
		}
		mark := false
		appends := msgs[:0]
		for _, m := range msgs {
			if m == nil {
				mark = true
				continue
			}
			appends = append(appends, m)
		}
		n.toWrite.work.Lock()
		err := n.writeAll(ctx, appends, n.in.shut)
		if err == nil && mark && len(appends) == 0 {
			if err = n.opt.Log.Mark(); err != nil {
				err = fmt.Errorf("consensus: marking the log: %w", err)
			}
		}
		n.toWrite.work.Unlock()
		if err != nil {
			n.fail(err)
			return
		}
	}
}

// noSpaceRetry is after what time a write that found no room is tried again.
const noSpaceRetry = time.Second

// writeAll writes, waiting for as long as the disk has no room: nothing was promised yet, and others are told to stop by
// Options.Gate. It gives up silently when the member stops.
func (n *Node) writeAll(ctx context.Context, appends []*raftpb.Message, shut func()) error {
	if len(appends) == 0 {
		return nil
	}
	for tries := 0; ; tries++ {
		err := n.writeOnce(appends, shut)
		if !errors.Is(err, raftlog.ErrNoSpace) {
			return err
		}
		if tries == 0 {
			n.opt.Logger.Error("the disk is full: the raft log waits for space", "error", err)
		}
		timer := n.opt.Clock.NewTimer(noSpaceRetry)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
	}
}

// writeOnce has the log writer do a step and passes its answers on. Shut closes the mailbox.
func (n *Node) writeOnce(appends []*raftpb.Message, shut func()) error {
	stored, send, err := n.writer.Step(appends)
	if err != nil {
		return err
	}
	n.unstored.Add(-answers(appends))
	if len(send) > 0 {
		n.send(send)
	}
	if len(stored) > 0 && n.in.open() {
		n.in.in.Stored = append(n.in.in.Stored, stored...)
		shut()
	}
	return nil
}

// apply is the applier's goroutine.
func (n *Node) apply() {
	for {
		// No spare: the entries go on to the core with the results.
		entries, ok := n.toApply.take(nil)
		if !ok {
			return
		}
		n.toApply.work.Lock()
		err := n.applyAll(entries, n.in.shut)
		n.toApply.work.Unlock()
		if err != nil {
			n.fail(err)
			return
		}
	}
}

// applyAll has the applier do a step, which keeps entries, and passes its report on. Shut closes the mailbox.
func (n *Node) applyAll(entries []*raftpb.Entry, shut func()) error {
	applied, err := n.applier.Step(entries)
	if err != nil {
		return err
	}
	// Unlike all else this is also taken from a mailbox that is closed: finish looks for it.
	n.in.mu.Lock()
	n.in.in.Applied = append(n.in.in.Applied, applied)
	shut()
	return nil
}

// chore is work on the log that is not on the way of a write. The zero chore only prepares the next segment.
type chore struct {
	cutTo    uint64
	prefetch Span
}

// maxChores is how many chores may wait before those that can be left out are.
const maxChores = 4

// doChores is the goroutine that looks after the log's files. Its failures are not the member's: if the log is broken the
// writer learns of it.
func (n *Node) doChores() {
	log, failing := n.opt.Log, false
	var chores []chore
	for ok := true; ; {
		if chores, ok = n.chores.take(chores); !ok {
			return
		}
		for _, c := range chores {
			var errs []error
			if c.prefetch.Hi != 0 {
				errs = append(errs, log.Prefetch(c.prefetch.Lo, c.prefetch.Hi, n.opt.MaxInflightBytes))
				if n.in.open() {
					n.in.in.Prefetched = true
					n.in.shut()
				}
			}
			if c.cutTo != 0 {
				errs = append(errs, log.Compact(c.cutTo))
			}
			if n.opt.Gate() == nil { // a disk that is nearly full has no room for what may not be needed
				errs = append(errs, log.Prepare())
			}
			err := errors.Join(errs...)
			if err != nil && !failing && !errors.Is(err, raft.ErrCompacted) {
				n.opt.Logger.Warn("looking after the raft log failed, trying again", "error", err)
			}
			failing = err != nil
		}
	}
}

// callBack calls proposals back, in the order in which they were completed.
func (n *Node) callBack() {
	var list []Completion
	for ok := true; ; {
		if list, ok = n.done.take(list); !ok {
			return
		}
		n.done.work.Lock()
		n.complete(list)
		n.done.work.Unlock()
	}
}

func (n *Node) complete(list []Completion) {
	size := 0
	for i := range list {
		size += list[i].Size
		list[i].Done(list[i].Result, list[i].Err)
	}
	n.release(len(list), size)
}

// callBackReads calls reads back. It is a goroutine of its own because reads may be answered in the callback, and writes
// should not wait for that.
func (n *Node) callBackReads() {
	var list []ReadCompletion
	for ok := true; ; {
		if list, ok = n.read.take(list); !ok {
			return
		}
		for i := range list {
			list[i].Done(list[i].Err)
		}
		n.pendingReads.Add(-int64(len(list)))
	}
}
