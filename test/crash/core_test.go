package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/test/internal/apart"
	"github.com/engram-kv/engram/test/internal/broken"
)

// world is what outlives the cores of one seed.
type world struct {
	seed   uint64
	rnd    *rand.Rand
	mutant mutant
	// exact has the store flush only when it is told to, by which a seed gives
	// the same run again. Otherwise tiny memtables have Pebble flush and compact
	// by itself, in its own goroutines.
	exact bool
	seen  map[string]int

	mu      sync.Mutex // covers what follows: Pebble's goroutines may take the power away
	history history
	mem     *vfs.MemFS
	clone   *vfs.MemFS // what the crash left, nil before it
	count   int        // file operations until the crash, 0 for none
	where   string     // the operation before which it came
	power   *rand.Rand
	twin    *twin
}

// history is the log as it has to be: entries by index, and those of them that
// somebody was told of.
type history struct {
	entries   []*raftpb.Entry
	told      uint64           // up to this index nothing may be lost any more
	revisions map[uint64]int64 // in answers, by index
}

func newWorld(seed uint64, m mutant, exact bool, seen map[string]int) *world {
	return &world{
		seed: seed, rnd: rand.New(rand.NewPCG(seed, 11)), power: rand.New(rand.NewPCG(seed, 12)), mutant: m, exact: exact, seen: seen,
		history: history{revisions: map[uint64]int64{}}, clone: vfs.NewCrashableMem(), twin: newTwin(),
	}
}

// run lives a number of lives, each on what the crash before it left. It returns
// an error if something that was acknowledged is gone or wrong.
func (w *world) run(lives int) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = broken.Errorf("panic: %v\n%s", p, debug.Stack())
		}
		err = errors.Join(err, w.twin.close())
	}()
	where := "that never was"
	for n := range lives {
		if err := w.life(); err != nil {
			return fmt.Errorf("life %d, after a crash %s: %w", n, where, err)
		}
		w.mu.Lock()
		where = w.where
		w.mu.Unlock()
		w.seen["crash"]++
	}
	return nil
}

// life opens a core on what is on disk, checks it, and works until the crash.
func (w *world) life() error {
	w.mu.Lock()
	w.mem, w.clone = crashable(w.clone), nil
	w.count = 1 + w.rnd.IntN(400)
	if w.rnd.IntN(4) == 0 {
		w.count = 1 + w.rnd.IntN(40) // while it starts
	}
	w.mu.Unlock()
	c, err := w.open()
	defer func() {
		if c != nil {
			c.abandon()
		}
	}()
	if w.crashed() { // while it was opened: whatever came of that is gone
		return nil
	}
	if err != nil {
		return err
	}
	for n := 0; !w.crashed(); n++ {
		if err := c.step(); err != nil {
			return err
		}
		if n == startSteps && !c.checked {
			applied, _ := c.machine.Applied()
			return fmt.Errorf("the member does not become leader: after %d steps it has applied index %d", n, applied)
		}
	}
	return nil
}

// startSteps is after how many steps a member that is alone must lead.
const startSteps = 1000

func (w *world) crashed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.clone != nil
}

// onOperation takes the power away before the chosen file operation.
func (w *world) onOperation(op errorfs.Op) error {
	if op.Kind.ReadOrWrite() != errorfs.OpIsWrite {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.count--; w.count != 0 || w.clone != nil {
		return nil
	}
	percent := []int{0, 20, 50, 80, 100}[w.power.IntN(5)]
	w.clone = w.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: w.power})
	w.where = fmt.Sprintf("before %v of %s, %d%% of the unsynced blocks kept", op.Kind, op.Path, percent)
	return nil
}

// crashable makes the result of a crash one that can crash again.
func crashable(from *vfs.MemFS) *vfs.MemFS {
	to := vfs.NewCrashableMem()
	if _, err := vfs.Clone(from, to, "", "", vfs.CloneSync); err != nil {
		panic(err)
	}
	return to
}

// note records what the machine is about to apply. What was told stays as it is.
func (w *world) note(entries []*raftpb.Entry) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.clone != nil {
		return nil
	}
	h := &w.history
	for _, e := range entries {
		i := e.GetIndex()
		switch have := uint64(len(h.entries)); {
		case i > have+1:
			return broken.Errorf("entry %d is applied, and none after %d ever was", i, have)
		case i <= have && string(h.entries[i-1].GetData()) == string(e.GetData()):
		case i <= h.told:
			return broken.Errorf("entry %d was acknowledged, and now another one is in its place", i)
		default:
			h.entries = append(h.entries[:i-1:i-1], e)
		}
	}
	return nil
}

// tell records an answer.
func (w *world) tell(index uint64, revision int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.clone == nil {
		w.history.told = max(w.history.told, index)
		w.history.revisions[index] = revision
	}
}

// core is a member without its edge: log, consensus, machine and store, wired as
// in internal/server and driven by one goroutine.
type core struct {
	w       *world
	store   *storage.Store
	machine *state.Machine
	log     *raftlog.Log
	node    *consensus.Core
	writer  *consensus.LogWriter
	applier *consensus.Applier
	ids     *consensus.IDs
	durable atomic.Uint64
	flushed atomic.Bool

	now     time.Time
	in      consensus.Input
	out     consensus.Output
	toWrite []*raftpb.Message
	toApply []*raftpb.Entry
	events  []mvcc.Event
	checked bool // the audit after the start is done
	lease   int64
	failure error // from callbacks
}

const coreMember = 7

func (w *world) open() (*core, error) {
	c := &core{w: w, now: time.Unix(1e9, 0), lease: int64(w.rnd.IntN(1 << 30))}
	fs := errorfs.Wrap(w.mem, errorfs.InjectorFunc(w.onOperation))
	so := storage.Options{FS: fs, Dir: "store", MemTableBytes: 24 << 10, OnFlush: func() { c.flushed.Store(true) }}
	if w.exact {
		so.Manual, so.MemTableBytes = true, 8<<20
	}
	if w.mutant.apart {
		so.CommitVia = func(db *pebble.DB, b *pebble.Batch) error {
			return apart.Commit(db, b, func() bool { return w.rnd.IntN(4) == 0 })
		}
	}
	var err error
	if c.store, err = storage.Open(so); err != nil {
		return c, err
	}
	c.machine, err = state.Open(state.Options{
		Storage: c.store, MinLeaseTTL: 2, Publisher: c,
		MVCC: mvcc.Options{
			FS: fs, Dir: "index", ValueBudgetBytes: 64 << 10, ViewAge: -1, CompactionBatch: 20,
			CheckpointBytes: 20 << 10, CheckpointInterval: time.Nanosecond,
			Now: func() time.Time { return c.now }, Go: func(job func()) { job() },
		},
	})
	if err != nil {
		return c, err
	}
	var logFS vfs.FS = fs
	if w.mutant.noSync {
		logFS = forgetful{fs}
	}
	exists, err := raftlog.Exists(logFS, "log")
	if err != nil {
		return c, err
	}
	applied, _ := c.machine.Applied()
	if !exists && applied > 0 {
		return c, broken.Errorf("the store has applied index %d and there is no log", applied)
	}
	c.log, err = raftlog.Open(raftlog.Options{
		FS: logFS, Dir: "log", SegmentBytes: 16 << 10, CacheBytes: 8 << 10, Rand: w.rnd.Uint64,
		Identity: raftlog.Identity{ClusterID: 1, MemberID: coreMember},
	})
	if err != nil {
		return c, err
	}
	birth := member.Context{Member: member.Member{ID: coreMember, PeerURLs: []string{"http://localhost:2380"}, Name: "a"}}
	if founded, err := consensus.Founded(c.log); err != nil {
		return c, err
	} else if !founded && applied == 0 {
		if err := consensus.Bootstrap(c.log, []consensus.Founder{{ID: coreMember, Context: birth.Encode()}}); err != nil {
			return c, err
		}
	}
	c.durable.Store(applied)
	c.ids = consensus.NewIDs(coreMember, time.UnixMilli(int64(w.rnd.Uint32())))
	o := consensus.Options{
		ID: coreMember, IDs: c.ids, Log: c.log, Machine: c,
		CatchUpEntries: 20, CatchUpBytes: 16 << 10, FlushLogBytes: 20 << 10, FlushAge: 3 * time.Second,
		MaxApplyBytes: 16 << 10, DurableApplied: c.durable.Load, Listener: c.onEvent,
	}
	if w.mutant.cutEarly {
		o.DurableApplied = func() uint64 { i, _ := c.machine.Applied(); return i }
	}
	if c.node, err = consensus.NewCore(o, c.now); err != nil {
		return c, err
	}
	c.applier = consensus.NewApplier(c)
	c.writer = consensus.NewLogWriter(coreMember, c.log, c.applier)
	return c, nil
}

// abandon gives up a core whose power is gone.
func (c *core) abandon() {
	if c.log != nil {
		_ = c.log.Abandon()
	}
	if c.store != nil {
		_ = c.store.Abandon()
	}
}

// Publish implements state.Publisher.
func (c *core) Publish(_ mvcc.Root, events []mvcc.Event) {
	if !c.checked {
		c.events = append(c.events, events...)
	}
}

// Applied implements consensus.Machine.
func (c *core) Applied() (index, term uint64) { return c.machine.Applied() }

// ConfState implements consensus.Machine.
func (c *core) ConfState() *raftpb.ConfState { return c.machine.ConfState() }

// Received implements consensus.Machine: a lone member is sent no snapshots.
func (c *core) Received(index, term uint64) (dir string, ok bool) { return "", false }

// Install implements consensus.Machine.
func (c *core) Install(s raftlog.Snapshot) error {
	return fmt.Errorf("a lone member was to install the snapshot of index %d", s.Index)
}

// Apply implements consensus.Machine.
func (c *core) Apply(entries []*raftpb.Entry) ([]consensus.Result, error) {
	if err := c.w.note(entries); err != nil {
		return nil, err
	}
	results, err := c.machine.Apply(entries)
	if err != nil {
		return nil, err
	}
	out := make([]consensus.Result, len(results))
	for i, r := range results {
		out[i] = consensus.Result{Index: r.Index, Term: r.Term, ID: r.ID, Err: r.Err, ConfChange: r.ConfChange, Empty: r.Empty}
		if r.Reply != nil {
			out[i].Reply = r.Reply.Revision
			r.Reply.Release()
		}
	}
	return out, nil
}

// onEvent learns that everything in the log is applied, and audits.
func (c *core) onEvent(e consensus.Event) {
	switch e.(type) {
	case consensus.LogCut:
		c.w.seen["cut"]++
	case consensus.FlushAsked:
		c.w.seen["flush asked"]++
	}
}

// step does one of the things that a member's goroutines do.
func (c *core) step() error {
	w := c.w
	if c.flushed.Swap(false) {
		index, _, err := mvcc.AppliedOf(c.store.DurableReader())
		if err != nil {
			return err
		}
		c.durable.Store(index)
		w.seen["flush"]++
	}
	switch n := w.rnd.IntN(20); {
	case n < 6:
		return c.think(0)
	case n < 8:
		c.now = c.now.Add(100 * time.Millisecond)
		return c.think(1)
	case n < 12:
		return c.writeLog()
	case n < 15:
		return c.applyAll()
	case n < 18:
		if !c.checked {
			return nil
		}
		for range 1 + w.rnd.IntN(4) {
			if err := c.propose(); err != nil {
				return err
			}
		}
		return nil
	case n == 18:
		_, _, err := c.machine.CompactStep()
		return err
	default:
		switch w.rnd.IntN(6) {
		case 0:
			return c.flush()
		case 1:
			if len(c.toWrite) == 0 {
				return c.log.Mark()
			}
		case 2:
			return c.log.Prepare()
		}
		return nil
	}
}

// think steps consensus and hands out what follows.
func (c *core) think(ticks int) error {
	c.in.Now, c.in.Ticks = c.now, ticks
	c.node.Step(&c.in, &c.out)
	c.in = consensus.Input{}
	if err := errors.Join(c.node.Err(), c.failure); err != nil {
		return err
	}
	c.toWrite = append(c.toWrite, c.out.Append...)
	c.toApply = append(c.toApply, c.out.Apply...)
	for _, d := range c.out.Completions {
		d.Done(d.Result, d.Err)
	}
	if c.out.Prefetch.Hi != 0 {
		if err := c.log.Prefetch(c.out.Prefetch.Lo, c.out.Prefetch.Hi, 1<<20); err != nil {
			return err
		}
		c.in.Prefetched = true
	}
	if c.out.StartFlush {
		if err := c.flush(); err != nil {
			return err
		}
	}
	if c.out.CutTo != 0 {
		if err := c.log.Compact(c.out.CutTo); err != nil {
			return err
		}
	}
	for _, e := range c.out.Events {
		c.onEvent(e)
		if _, ok := e.(consensus.LeadershipConfirmed); ok && !c.checked {
			if err := c.audit(); err != nil {
				return err
			}
			c.checked = true
		}
	}
	return nil
}

func (c *core) writeLog() error {
	if len(c.toWrite) == 0 {
		return nil
	}
	stored, _, err := c.writer.Step(c.toWrite)
	if err != nil {
		return err
	}
	c.toWrite = nil
	c.in.Stored = append(c.in.Stored, slices.Clone(stored)...)
	return nil
}

func (c *core) applyAll() error {
	if len(c.toApply) == 0 {
		return nil
	}
	done, err := c.applier.Step(c.toApply)
	if err != nil {
		return err
	}
	c.toApply = nil
	c.in.Applied = append(c.in.Applied, done)
	return nil
}

// flush makes the store durable: at once, or as a server does, in the background.
func (c *core) flush() error {
	if !c.w.exact {
		return c.store.StartFlush()
	}
	if c.w.rnd.IntN(4) == 0 {
		lower, upper := storage.RevisionBounds(0, 0)
		if err := c.store.Reclaim(context.Background(), lower, upper); err != nil {
			return err
		}
	}
	return c.store.Flush()
}

// propose asks for a random command.
func (c *core) propose() error {
	kind, msg := c.command()
	h := command.Header{ID: c.ids.Next()}
	data, err := command.AppendMessage(nil, kind, h, msg)
	if err != nil {
		return err
	}
	c.in.Proposals = append(c.in.Proposals, consensus.Proposal{ID: h.ID, Data: data, Done: func(r consensus.Result, err error) {
		if err != nil {
			c.w.seen["failed"]++
			return
		}
		revision, _ := r.Reply.(int64)
		c.w.tell(r.Index, revision)
		c.w.seen[kind.String()]++
		if r.Err != nil {
			c.w.seen["refused"]++
		}
	}})
	return nil
}
