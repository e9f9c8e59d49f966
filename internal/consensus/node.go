package consensus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/clock"
)

// Node drives a Core in a server: two goroutines take turns at it, one has the log, one the machine, one chores of the log, and two
// call back. Its methods may be called from any goroutine and do not block, Run and Close excepted.
type Node struct {
	opt     Options
	core    *Core
	writer  *LogWriter
	applier *Applier
	born    time.Time
	cell    cell

	in mailbox
	// toWrite is bounded by what raft allows to be unstable, uncommitted bytes on a leader, messages in flight on a follower,
	// and by maxUnstored. A nil message asks for a mark.
	toWrite *queue[*raftpb.Message]
	toApply *queue[*raftpb.Entry] // bounded by MaxApplyBytes
	chores  *queue[chore]         // bounded by maxChores
	done    *queue[Completion]    // bounded by MaxPending: counted until called back
	read    *queue[ReadCompletion]

	pending, pendingBytes, pendingReads atomic.Int64
	unstored                            atomic.Int64 // what the writer has to do, see answers

	turn turn // of the two goroutines that step core

	failed chan error // the first failure of writer or applier

	mu      sync.Mutex
	cancel  context.CancelFunc // of Run, once it runs
	closed  bool
	stopped chan struct{} // closed when Run has returned
}

// Open prepares a member: it reconciles log and machine and starts raft on them, or refuses a pair that does not fit together
// (ErrStoreAhead, ErrLogGap, ErrStoreMismatch). Log and machine remain the caller's to close, after Close.
func Open(opt Options) (*Node, error) {
	opt, err := opt.withDefaults()
	if err != nil {
		return nil, err
	}
	now := opt.Clock.Now()
	core, err := NewCore(opt, now)
	if err != nil {
		return nil, err
	}
	n := &Node{
		opt: opt, core: core, born: now,
		applier: NewApplier(opt.Machine),
		in:      mailbox{wake: make(chan struct{}, 1)},
		toWrite: newQueue[*raftpb.Message](), toApply: newQueue[*raftpb.Entry](), chores: newQueue[chore](),
		done: newQueue[Completion](), read: newQueue[ReadCompletion](),
		failed: make(chan error, 1), stopped: make(chan struct{}),
	}
	n.writer = NewLogWriter(opt.ID, opt.Log, n.applier)
	n.cell.publish(core)
	return n, nil
}

// Propose queues a proposal. If it returns an error (ErrTooManyRequests, ErrStopped), nothing was queued and Done will not be
// called; otherwise Done is called exactly once.
func (n *Node) Propose(p Proposal) error {
	if p.ID == 0 {
		return errors.New("consensus: proposal without an id: take one from IDs")
	}
	if err := n.reserve(len(p.Data)); err != nil {
		return err
	}
	if !n.in.open() {
		n.release(1, len(p.Data))
		return ErrStopped
	}
	n.in.in.Proposals = append(n.in.in.Proposals, p)
	n.in.shut()
	return nil
}

// ProposeConfChange queues a change of members; its own id identifies it, and the Result carries it as accepted, or with its
// node_id zeroed beside the reason. Members are changed one at a time: a change waits here, up to its deadline, for the one before it.
// Errors as for Propose.
func (n *Node) ProposeConfChange(p ConfProposal) error {
	if p.Change.GetId() == 0 {
		return errors.New("consensus: conf change without an id: take one from IDs")
	}
	size := confSize(p.Change)
	if err := n.reserve(size); err != nil {
		return err
	}
	if !n.in.open() {
		n.release(1, size)
		return ErrStopped
	}
	n.in.in.ConfChanges = append(n.in.in.ConfChanges, p)
	n.in.shut()
	return nil
}

// Cancel ends the wait of a proposal or conf change with ErrCanceled, unless it has ended before. It may still be applied.
func (n *Node) Cancel(id uint64) {
	if n.in.open() {
		// Whoever has something to cancel has a proposal: more than there can be of those are mistakes.
		if len(n.in.in.Cancels) < 2*n.opt.MaxPending {
			n.in.in.Cancels = append(n.in.in.Cancels, id)
		}
		n.in.shut()
	}
}

// ReadIndex calls done once what this member has applied includes everything committed when ReadIndex was called, or with
// ErrLeaderChanged, ErrTimeout or ErrStopped. A read that is refused at once (ErrTooManyRequests, ErrStopped) has done called
// before ReadIndex returns; otherwise a completion worker calls it. deadline may be zero.
func (n *Node) ReadIndex(deadline time.Time, done func(error)) {
	if n.pendingReads.Add(1) > int64(n.opt.MaxReads) {
		n.pendingReads.Add(-1)
		done(fmt.Errorf("%d reads wait for their index: %w", n.opt.MaxReads, ErrTooManyRequests))
		return
	}
	if !n.in.open() {
		n.pendingReads.Add(-1)
		done(ErrStopped)
		return
	}
	n.in.in.Reads = append(n.in.in.Reads, Read{Done: done, Deadline: deadline})
	n.in.shut()
}

// maxUnstored is how much the writer may have to do before no more is taken of a leader. While a disk hangs each heartbeat that is
// answered brings another append, empty as it may be, which can be answered only after all before it are stored.
const maxUnstored = 4096

// answers counts appends, and the answers that wait for them.
func answers(appends []*raftpb.Message) int64 {
	n := len(appends)
	for _, m := range appends {
		n += len(m.GetResponses())
	}
	return int64(n)
}

// Receive takes a message of a peer. It may be dropped, which the error says; raft copes. The message is immutable from now on.
func (n *Node) Receive(m *raftpb.Message) error {
	size := int64(0)
	for _, e := range m.GetEntries() {
		size += int64(len(e.GetData())) + entryOverhead
	}
	if m.GetType() == raftpb.MsgApp && n.unstored.Load() > maxUnstored {
		return fmt.Errorf("appends come faster than they are stored: %w", ErrTooManyRequests)
	}
	if !n.in.open() {
		return ErrStopped
	}
	if len(n.in.in.Received) >= n.opt.MaxReceived || n.in.received > 0 && n.in.received+size > n.opt.MaxReceivedBytes {
		n.in.mu.Unlock()
		return fmt.Errorf("messages of peers come faster than they are handled: %w", ErrTooManyRequests)
	}
	n.in.received += size
	n.in.in.Received = append(n.in.in.Received, m)
	n.in.shut()
	return nil
}

// ReportUnreachable tells raft that messages to a member were lost.
func (n *Node) ReportUnreachable(member uint64) {
	if n.in.open() {
		// Once is enough until raft hears of it: of a queue that is lost each message is reported.
		if !slices.Contains(n.in.in.Unreachable, member) && len(n.in.in.Unreachable) < n.opt.MaxReceived {
			n.in.in.Unreachable = append(n.in.in.Unreachable, member)
		}
		n.in.shut()
	}
}

// ReportSnapshot tells raft whether a member has received the snapshot sent to it. Without either answer raft sends that member
// nothing more.
func (n *Node) ReportSnapshot(member uint64, ok bool) {
	if n.in.open() {
		// The last word counts, so there is at most one for each member.
		list := slices.DeleteFunc(n.in.in.Snapshots, func(r SnapshotReport) bool { return r.Member == member })
		n.in.in.Snapshots = append(list, SnapshotReport{member, ok})
		n.in.shut()
	}
}

// TransferLeadership asks the leader to hand over to a member. Whether it did shows in Leader, within an election time-out.
func (n *Node) TransferLeadership(to uint64) {
	if n.in.open() {
		n.in.in.TransferTo = to
		n.in.shut()
	}
}

// HandOver has another voter lead before this member stops, the one connected for the longest time that has all that is committed. It
// blocks until another leads (nil), ctx ends (its error), or no other voter is connected (ErrNoSuccessor). A member that does
// not lead, or that has no other voter beside it, has nothing to hand over.
func (n *Node) HandOver(ctx context.Context) error {
	for asked := false; ; asked = true {
		changed := n.cell.leaderChanges()
		switch leader := n.Leader(); {
		case leader == n.opt.ID:
			others, connected := n.otherVoters()
			if others == 0 {
				return nil
			}
			if connected == 0 {
				return ErrNoSuccessor
			}
			if n.in.open() {
				n.in.in.HandOver = true
				n.in.shut()
			}
		case !asked:
			return nil
		case leader != raft.None:
			return n.passOn(ctx)
		}
		// Asked again and again: raft gives up after an election time-out, for the other may have been too slow.
		again := n.opt.Clock.NewTimer(n.opt.Tick)
		select {
		case <-changed:
		case <-again.C():
		case <-n.stopped:
			return ErrStopped
		case <-ctx.Done():
			again.Stop()
			return ctx.Err()
		}
		again.Stop()
	}
}

// passOn waits for a tick, in which what the others still propose to this member, not having heard who leads now, goes on to that one.
func (n *Node) passOn(ctx context.Context) error {
	t := n.opt.Clock.NewTimer(n.opt.Tick)
	defer t.Stop()
	select {
	case <-t.C():
	case <-n.stopped:
		return ErrStopped
	case <-ctx.Done(): // it was handed over all the same
	}
	return nil
}

// otherVoters counts the voters besides this member, and those of them that are connected.
func (n *Node) otherVoters() (others, connected int) {
	for _, id := range *n.cell.voters.Load() {
		if id == n.opt.ID {
			continue
		}
		others++
		if n.opt.Transport != nil && !n.opt.Transport.ActiveSince(id).IsZero() {
			connected++
		}
	}
	return others, connected
}

// reserve counts a proposal against the limits.
func (n *Node) reserve(size int) error {
	count, bytes := n.pending.Add(1), n.pendingBytes.Add(int64(size))
	if count > int64(n.opt.MaxPending) || bytes > n.opt.MaxPendingBytes && count > 1 {
		n.release(1, size)
		return fmt.Errorf("%d proposals of %d bytes wait: %w", count-1, bytes-int64(size), ErrTooManyRequests)
	}
	return nil
}

func (n *Node) release(count, size int) {
	n.pending.Add(-int64(count))
	n.pendingBytes.Add(-int64(size))
}

// Run works until ctx ends or Close is called, and then returns nil, or until the log or the machine fails, and then returns
// why. When it returns, every proposal and read has been called back. It may be called once.
func (n *Node) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	n.mu.Lock()
	if n.closed || n.cancel != nil {
		n.mu.Unlock()
		return ErrStopped
	}
	n.cancel = cancel
	n.mu.Unlock()
	defer close(n.stopped)

	var workers, callbacks sync.WaitGroup
	workers.Go(func() { n.write(ctx) })
	workers.Go(n.apply)
	workers.Go(n.doChores)
	callbacks.Go(n.callBack)
	callbacks.Go(n.callBackReads)

	context.AfterFunc(ctx, n.in.close) // not when the work under way is done: what comes until then would wait for it
	err := n.loop(ctx)
	cancel()
	n.in.close()
	n.toWrite.close()
	n.toApply.close()
	n.chores.close()
	workers.Wait()
	n.finish()
	callbacks.Wait()
	if err == nil {
		select {
		case err = <-n.failed: // while the rest was being written
		default:
		}
	}
	return err
}

// Close stops Run and waits for it. It may be called once; a Node that never ran is closed as well.
func (n *Node) Close() error {
	n.mu.Lock()
	running := n.cancel
	n.closed = true
	n.mu.Unlock()
	if running != nil {
		running()
		<-n.stopped
		return nil
	}
	n.in.close()
	var callbacks sync.WaitGroup
	callbacks.Go(n.callBack)
	callbacks.Go(n.callBackReads)
	n.finish()
	callbacks.Wait()
	return nil
}

// finish answers whatever still waits. What the machine has applied meanwhile is told as it is.
func (n *Node) finish() {
	in := n.in.take(Input{})
	var out Output
	n.core.Stop(&in, &out)
	n.done.put(out.Completions...)
	n.read.put(out.Reads...)
	n.done.close()
	n.read.close()
}

// loop steps the core whenever something has happened. Two goroutines do, so that one is there while the other does work of its
// own, see mine.
func (n *Node) loop(ctx context.Context) error {
	ticker := n.opt.Clock.NewTicker(n.opt.Tick)
	defer ticker.Stop()
	if err := n.rounds(ctx, 0); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var beside sync.WaitGroup
	defer beside.Wait()
	defer cancel()
	beside.Go(func() {
		if err := n.goRound(ctx, ticker); err != nil {
			n.fail(err)
		}
	})
	return n.goRound(ctx, ticker)
}

func (n *Node) goRound(ctx context.Context, ticker clock.Ticker) error {
	for {
		ticks := 0
		select {
		case <-ctx.Done():
			return nil
		case err := <-n.failed:
			return err
		case <-ticker.C():
			ticks = 1
		case <-n.in.wake:
		}
		if err := n.rounds(ctx, ticks); err != nil {
			return err
		}
	}
}

// turn is what a round works with.
type turn struct {
	sync.Mutex
	in    Input
	out   Output
	idle  int               // see onTick
	busy  bool              // a goroutine of the loop has work of its own: not more than one, so that the other is there
	later []*raftpb.Message // what it is to write after that; the writer's queue is claimed for it
	err   error
}

// rounds steps the core with everything that waits, and again after each work of its own, which nobody else is woken for.
func (n *Node) rounds(ctx context.Context, ticks int) error {
	own, err := n.round(ticks, false)
	for err == nil && own.any() {
		if err = n.do(ctx, own); err != nil {
			n.turn.Lock()
			n.turn.err = err
			n.turn.Unlock()
		}
		own, err = n.round(0, true)
	}
	return err
}

// round is one step. Done says that the work that the caller had from the round before is done.
func (n *Node) round(ticks int, done bool) (own mine, err error) {
	t := &n.turn
	t.Lock()
	defer t.Unlock()
	if done {
		t.busy = false
	}
	if t.err != nil {
		n.queueLater()
		return own, t.err
	}
	t.in = n.in.take(t.in)
	t.in.Now, t.in.Ticks = n.opt.Clock.Now(), ticks
	if ticks > 0 {
		n.cell.ticked.Store(int64(t.in.Now.Sub(n.born)))
	}
	n.core.Step(&t.in, &t.out)
	t.err = n.core.Err()
	own = n.dispatch(&t.out)
	if t.err == nil && ticks > 0 {
		t.idle = n.onTick(&t.out, t.idle)
	}
	return own, t.err
}

// fewItems is up to how many entries or callbacks the loop of a lone member takes upon itself, and fewBytes how many bytes of
// entries: what a handful of clients have in flight, each waiting for its answer.
const (
	fewItems = 8
	fewBytes = 64 << 10
)

// mine is work of the applier's or of the writer's that a goroutine of the loop does itself: one of the two, whose queue is claimed.
type mine struct {
	apply  []*raftpb.Entry
	append []*raftpb.Message
}

func (m *mine) any() bool { return len(m.apply) > 0 || len(m.append) > 0 }

// dispatch gives everyone their share, and returns what is left to the goroutine itself. What this member shows of itself comes
// first, see cell.
//
// A member that is alone does the work of a goroutine that is idle itself if it is little: with few clients a write would otherwise
// be handed on five times, and waking a goroutine costs more than most of what they do. Nobody is kept waiting for it: there are no
// peers to send messages to, and the loop's other goroutine sees to what happens meanwhile. What was applied is answered before
// more is written.
func (n *Node) dispatch(out *Output) (own mine) {
	t := &n.turn
	n.cell.publish(n.core)
	if len(out.Send) > 0 {
		n.send(out.Send)
	}
	alone := n.core.alone()
	if alone && len(out.Completions) > 0 && len(out.Completions) <= fewItems && n.done.claim() {
		n.complete(out.Completions)
		n.done.work.Unlock()
	} else {
		n.done.put(out.Completions...)
	}
	n.read.put(out.Reads...)
	free := alone && !t.busy && t.err == nil
	if free && len(out.Apply) > 0 && few(out.Apply) && n.toApply.claim() {
		own.apply = slices.Clone(out.Apply)
	} else {
		n.toApply.put(out.Apply...)
	}
	n.unstored.Add(answers(out.Append))
	if free && len(out.Append) > 0 && fewAppends(out.Append) && (len(t.later) > 0 || n.toWrite.claim()) {
		t.later = append(t.later, out.Append...)
	} else if len(out.Append) > 0 {
		n.queueLater()
		n.toWrite.put(out.Append...)
	}
	if t.err != nil || !alone {
		n.queueLater()
	} else if free && len(own.apply) == 0 {
		own.append, t.later = t.later, nil
	}
	t.busy = t.busy || own.any()
	if out.CutTo != 0 || out.Prefetch.Hi != 0 {
		n.chores.put(chore{out.CutTo, out.Prefetch})
	}
	for _, e := range out.Events {
		if _, ok := e.(LeaderChanged); ok {
			n.cell.wakeLeaderWaiters()
		}
		n.opt.Listener(e)
	}
	if out.StartFlush {
		n.opt.StartFlush()
	}
	return own
}

// queueLater leaves to the writer what was to be written by the loop.
func (n *Node) queueLater() {
	if t := &n.turn; len(t.later) > 0 {
		n.toWrite.put(t.later...)
		t.later = nil
		n.toWrite.work.Unlock()
	}
}

// do does the work of one's own.
func (n *Node) do(ctx context.Context, own mine) error {
	if len(own.apply) > 0 {
		defer n.toApply.work.Unlock()
		return n.applyAll(own.apply, n.in.mu.Unlock)
	}
	defer n.toWrite.work.Unlock()
	return n.writeAll(ctx, own.append, n.in.mu.Unlock)
}

func few(entries []*raftpb.Entry) bool {
	size := 0
	for _, e := range entries {
		size += len(e.GetData())
	}
	return len(entries) <= fewItems && size <= fewBytes
}

func fewAppends(appends []*raftpb.Message) bool {
	for _, m := range appends {
		if !few(m.GetEntries()) || m.GetSnapshot() != nil {
			return false
		}
	}
	return len(appends) <= fewItems
}

func (n *Node) send(msgs []*raftpb.Message) {
	if n.opt.Transport != nil {
		n.opt.Transport.Send(msgs)
	}
}

// idleTicks is after how many ticks without a write the log is marked as synced.
const idleTicks = 2

// onTick updates what is looked at now and then, and returns for how many ticks the log has been idle.
func (n *Node) onTick(out *Output, idle int) int {
	members := n.core.members
	n.cell.members.Store(&members)
	m, c := n.opt.Metrics, n.core
	persist := c.persist.estimate(c.now)
	n.cell.persist.Store(int64(persist))
	m.observe(persist, c.opt.ID, members)
	m.HasLeader.Set(number(c.leader != raft.None))
	m.IsLeader.Set(number(c.role == raft.StateLeader))
	m.IsLearner.Set(number(c.learner))
	m.ProposalsCommitted.Set(float64(c.commit))
	m.ProposalsApplied.Set(float64(c.applied))
	m.ProposalsPending.Set(float64(n.pending.Load()))
	if len(out.Append) > 0 || n.toWrite.len() > 0 {
		return 0
	}
	if idle++; idle == idleTicks {
		n.toWrite.put(nil)
	}
	if n.chores.len() < maxChores {
		n.chores.put(chore{})
	}
	return idle
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// fail has Run return err.
func (n *Node) fail(err error) {
	select {
	case n.failed <- err:
	default:
	}
}
