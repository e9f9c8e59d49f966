package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/lease"
	membership "github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/internal/watch"
	"github.com/engram-kv/engram/test/internal/apart"
)

// member is one server of the cluster below its edge, wired as in
// internal/server, and the disk that outlives it.
type member struct {
	w       *world
	id      uint64
	founder bool
	disk    disk
	offset  time.Duration // of its clock
	url     string        // its peers reach it here
	life    int
	up      bool
	gone    bool // removed from the cluster, and will not come back

	// What follows is of one life.
	born     time.Time
	paused   time.Time // until when it stands still
	diskFree time.Time // until when its disk holds writes back
	full     bool      // its disk has no room
	fs       vfs.FS
	log      *raftlog.Log
	gen      *generation
	olds     []*generation // replaced by snapshots, not closed yet
	sendings int           // snapshots that it began to send
	core     *consensus.Core
	writer   *consensus.LogWriter
	applier  *consensus.Applier
	ids      *consensus.IDs
	hub      *watch.Hub
	lessor   *lease.Lessor
	durable  uint64
	sure     uint64      // up to this index it will remember that entries are committed
	idle     int         // ticks since it last wrote to the log
	flushed  atomic.Bool // set by Pebble's goroutine
	leader   uint64      // as this member sees it
	leads    uint64      // term in which it leads and may act, or 0
	lastPass time.Time   // when it last looked at its leases
	revoking map[int64]bool

	in       consensus.Input
	out      consensus.Output
	toWrite  []*raftpb.Message
	toApply  []*raftpb.Entry
	awake    bool // a step is due
	writing  bool // a write of the log is due
	applying bool // an apply is due
	compacts bool // a step of a compaction is due
	delivers bool // a delivery to watchers is due
	open     []*op
}

// generation is the state out of one directory, as in internal/server.
type generation struct {
	dir     string
	store   *storage.Store
	machine *state.Machine
}

func (g *generation) source() watch.Source {
	return watch.StoreSource{Store: g.machine.Keys(), Root: g.machine.Root}
}

func (w *world) addMember(founder bool) *member {
	m := &member{
		w: w, id: uint64(len(w.members) + 1), founder: founder,
		offset: time.Duration(w.rng.Int64N(int64(time.Hour))),
	}
	m.url = fmt.Sprint("http://localhost:", 2000+m.id)
	for _, o := range w.members { // one that was wiped comes back in its old place, under a new ID
		if o.gone && w.chance(0.5) {
			m.url = o.url
		}
	}
	m.disk = newDisk(m)
	w.members = append(w.members, m)
	return m
}

func (w *world) member(id uint64) *member {
	if id == 0 || id > uint64(len(w.members)) {
		return nil
	}
	return w.members[id-1]
}

// clock is what a member's clock shows at a time.
func (m *member) clock(t time.Time) time.Time { return t.Add(m.offset) }
func (m *member) now() time.Time              { return m.clock(m.w.now) }

// after has the member do something later in this life; if it stands still
// then, when it goes on.
func (m *member) after(d time.Duration, do func()) {
	life := m.life
	m.w.after(d, func() { m.run(life, do) })
}

func (m *member) run(life int, do func()) {
	if m.life != life || !m.up {
		return
	}
	if m.w.now.Before(m.paused) {
		m.w.at(m.paused, func() { m.run(life, do) })
		return
	}
	do()
	if m.up && m.disk.dead() {
		m.crash()
	}
}

// start opens what is on the disk, and begins.
func (m *member) start() {
	w := m.w
	m.life++
	*m = member{
		w: w, id: m.id, founder: m.founder, disk: m.disk, offset: m.offset, url: m.url, life: m.life, up: true,
		born: w.now, revoking: map[int64]bool{},
	}
	m.disk.m = m
	w.note("%d starts life %d", m.id, m.life)
	if !w.quiet && w.chance(0.2) {
		m.disk.arm(1 + w.rng.IntN(60))
	}
	err := m.begin()
	if m.disk.dead() {
		w.cover["crash while starting"]++
		m.crash()
		return
	}
	if err != nil {
		w.fail("member %d does not start its life %d: %w", m.id, m.life, err)
		return
	}
	m.after(w.upTo(0, 100*time.Millisecond), m.tick)
	m.after(w.upTo(0, keeperPass), m.keep)
	m.after(w.about(w.plan.flush), m.flushNow)
	m.wake()
}

const (
	dataDir   = "data"
	storeDir  = "store"
	indexDir  = "index"
	clusterID = 77
)

func (m *member) join(dir, name string) string {
	if dir == "" {
		return m.fs.PathJoin(dataDir, name)
	}
	return m.fs.PathJoin(dataDir, dir, name)
}

func (m *member) begin() (err error) {
	w := m.w
	m.fs = errorfs.Wrap(m.disk.mem, errorfs.InjectorFunc(m.disk.onOperation))
	logDir := m.fs.PathJoin(dataDir, "log")
	exists, err := raftlog.Exists(m.fs, logDir)
	if err != nil {
		return err
	}
	if !exists { // as the server, which looks for a store without a log first
		if err := m.openPresent(""); err != nil {
			return err
		}
		if applied, _ := m.machine().Applied(); applied > 0 {
			return fmt.Errorf("the store has applied index %d and there is no log", applied)
		}
	}
	m.log, err = raftlog.Open(raftlog.Options{
		FS: m.fs, Dir: logDir, SegmentBytes: 16 << 10, CacheBytes: 8 << 10, Rand: w.rng.Uint64,
		Identity: raftlog.Identity{ClusterID: clusterID, MemberID: m.id},
	})
	if err != nil {
		return err
	}
	if exists {
		installed, _ := m.log.Installed()
		if err := m.openPresent(installed.Dir); err != nil {
			return err
		}
	}
	applied, _ := m.machine().Applied()
	if founded, err := consensus.Founded(m.log); err != nil {
		return err
	} else if m.founder && !founded && applied == 0 {
		if err := consensus.Bootstrap(m.log, w.founders()); err != nil {
			return err
		}
	}
	m.durable, m.sure = applied, applied // what was read at start is on disk
	m.ids = consensus.NewIDs(m.id, m.now())
	m.lessor = lease.NewLessor(m.machine().Leases(), lease.LessorOptions{Now: m.now, Retry: leaseRetry})
	m.hub = watch.New(watch.Options{
		Source: m.gen.source(), ClusterID: clusterID, MemberID: m.id, RecentBytes: 4 << 10, ChunkBytes: 2 << 10, BatchRevisions: 5,
		ProgressInterval: time.Second, Clock: stoppedClock{m}, Rand: w.newRand(),
	})
	var log consensus.Log = m.log
	if l := w.mutant.log(m); l != nil {
		log = l
	}
	m.core, err = consensus.NewCore(consensus.Options{
		ID: m.id, IDs: m.ids, Log: log, Machine: m, Transport: m,
		RequestTimeout: requestTimeout, Discard: discard, NoPreVote: w.plan.rude,
		Gate: m.gate,
		DurableApplied: func() uint64 {
			if w.mutant == cutEarly {
				applied, _ := m.machine().Applied()
				return applied
			}
			return m.durable
		},
		FlushLogBytes: 8 << 10, FlushAge: 5 * time.Second, CatchUpEntries: w.plan.catchUp, CatchUpBytes: 16 << 10,
		MaxForwardBytes: 2 << 10, MaxApplyBytes: 4 << 10, MaxMessageBytes: 2 << 10, MaxInflight: 16, MaxBacklog: 100,
	}, m.now())
	if err != nil {
		return err
	}
	m.applier = consensus.NewApplier(m)
	m.writer = consensus.NewLogWriter(m.id, log, m.applier)
	m.compactSoon() // a crash may have left some
	return nil
}

const (
	requestTimeout  = 2 * time.Second
	electionTimeout = time.Second
	tick            = 100 * time.Millisecond
)

var errFull = errors.New("the disk is full")

// gate refuses writes for want of space.
func (m *member) gate() error {
	if m.full {
		return errFull
	}
	return nil
}

func (w *world) founders() []consensus.Founder {
	var list []consensus.Founder
	for _, m := range w.members {
		if m.founder {
			list = append(list, consensus.Founder{ID: m.id, Context: membership.Context{Member: m.table()}.Encode()})
		}
	}
	return list
}

// table is how the table of members has this one.
func (m *member) table() membership.Member {
	return membership.Member{ID: m.id, PeerURLs: []string{m.url}, Name: fmt.Sprint("m", m.id)}
}

// openPresent opens the generation in a directory and deletes all others.
func (m *member) openPresent(dir string) (err error) {
	if err := m.removeLeftovers(dir); err != nil {
		return err
	}
	m.gen, err = m.openGeneration(dir)
	return err
}

func (m *member) openStore(dir string) (*storage.Store, error) {
	o := storage.Options{
		FS: m.fs, Dir: m.join(dir, storeDir), Manual: true, MemTableBytes: 4 << 20, CacheBytes: 1 << 20,
		OnFlush: func() { m.flushed.Store(true) },
	}
	if m.w.mutant == markApart {
		o.CommitVia = func(db *pebble.DB, b *pebble.Batch) error {
			return apart.Commit(db, b, func() bool { return m.w.chance(0.1) })
		}
	}
	return storage.Open(o)
}

func (m *member) openGeneration(dir string) (*generation, error) {
	store, err := m.openStore(dir)
	if err != nil {
		return nil, err
	}
	g := &generation{dir: dir, store: store}
	g.machine, err = state.Open(state.Options{
		Storage: store, MinLeaseTTL: 2, Publisher: publisher{m}, Version: "3.7.0",
		Wanted: func(id uint64) bool { return m.ids != nil && m.ids.Made(id) },
		MVCC: mvcc.Options{
			FS: m.fs, Dir: m.join(dir, indexDir), ValueBudgetBytes: -1, CompactionBatch: 20,
			CheckpointBytes: 10 << 10, CheckpointInterval: 2 * time.Second,
			Now: m.now, Go: func(job func()) { job() },
		},
	})
	if err != nil {
		return nil, errors.Join(err, store.Abandon())
	}
	return g, nil
}

// abandon closes what a member whose power is gone has open.
func (m *member) abandon() {
	m.disk.disarm()
	if m.log != nil {
		_ = m.log.Abandon()
		m.log = nil
	}
	if m.gen != nil {
		m.olds = append(m.olds, m.gen)
		m.gen = nil
	}
	for _, g := range m.olds { // replaced, not yet retired
		g.machine.Abandon()
		_ = g.store.Abandon()
	}
	m.olds = nil
}

// crash takes the power away, if it is not gone yet.
func (m *member) crash() {
	w := m.w
	m.disk.cut()
	w.note("%d dies: %s", m.id, m.disk.where)
	w.cover["crash"]++
	if len(m.toWrite) > 0 {
		w.cover["crash with entries to write"]++
	}
	m.abandon()
	m.disk.restore()
	m.ends()
}

// ends is what others see of the end of a life.
func (m *member) ends() {
	w := m.w
	m.up = false
	for _, o := range m.open {
		o.lost()
	}
	for _, c := range w.watches {
		c.gone(m)
	}
	down := time.Second
	if w.chance(0.3) {
		down = 4 * time.Second
	}
	m.restartAfter(w.about(down))
}

// stop ends a life in order, as a server does.
func (m *member) stop() {
	m.core.Stop(&m.in, &m.out)
	for _, c := range m.out.Completions {
		c.Done(c.Result, c.Err)
	}
	for _, c := range m.out.Reads {
		c.Done(c.Err)
	}
	err := errors.Join(m.gen.machine.Close(), m.gen.store.Close(), m.log.Close())
	if m.disk.dead() {
		m.crash()
		return
	}
	m.must(err)
	m.gen, m.log = nil, nil
	m.abandon()
	m.ends()
}

func (m *member) restartAfter(d time.Duration) {
	life := m.life
	m.w.after(d, func() {
		if !m.up && !m.gone && m.life == life {
			m.start()
		}
	})
}

// heal ends all that is wrong with a member.
func (m *member) heal() {
	m.paused, m.diskFree, m.full = time.Time{}, time.Time{}, false
	m.disk.disarm()
	if !m.up {
		m.restartAfter(time.Millisecond)
	}
}

// leave stops a member that was removed.
func (m *member) leave() {
	if m.gone {
		return
	}
	m.gone = true
	m.w.note("%d is gone", m.id)
	if m.up {
		m.crash()
	}
}

func (m *member) machine() *state.Machine { return m.gen.machine }

// wake has the loop go round soon.
func (m *member) wake() {
	if m.awake || !m.up {
		return
	}
	m.awake = true
	m.after(m.w.upTo(5*time.Microsecond, 300*time.Microsecond), func() { m.step(0) })
}

func (m *member) tick() {
	m.after(tick, m.tick)
	m.step(1)
	m.deliverSoon() // progress notices
	if len(m.toWrite) > 0 {
		m.idle = 0
	} else if m.idle++; m.idle == 2 { // as consensus.Node
		m.must(m.log.Mark())
		m.sure = m.appliedIndex()
	}
	if m.w.chance(0.2) {
		m.must(m.log.Prepare())
	}
}

// must takes an error that no disk gave.
func (m *member) must(err error) {
	if err != nil && !m.disk.dead() {
		m.w.fail("member %d, life %d: %w", m.id, m.life, err)
	}
}

// step runs the core on what has gathered, and works off what it says.
func (m *member) step(ticks int) {
	if m.flushed.Swap(false) {
		index, _, err := mvcc.AppliedOf(m.gen.store.DurableReader())
		m.must(err)
		m.durable = max(m.durable, index)
	}
	if ticks == 0 {
		m.awake = false
	}
	in := m.in
	m.in = consensus.Input{Now: m.now(), Ticks: ticks}
	in.Now, in.Ticks = m.now(), ticks
	m.core.Step(&in, &m.out)
	out := &m.out
	if err := m.core.Err(); err != nil {
		m.must(err)
		return
	}
	m.Send(out.Send)
	if len(out.Append) > 0 {
		m.toWrite = append(m.toWrite, out.Append...)
		m.writeSoon()
	}
	if len(out.Apply) > 0 {
		m.toApply = append(m.toApply, out.Apply...)
		m.applySoon()
	}
	if to := out.CutTo; to != 0 {
		m.w.cover["log cut"]++
		m.after(m.w.upTo(0, 20*time.Millisecond), func() { m.must(m.log.Compact(to)) })
	}
	if p := out.Prefetch; p.Hi != 0 {
		m.w.cover["prefetch"]++
		m.after(m.w.upTo(0, 10*time.Millisecond), func() {
			// What it finds, raft asks for again; that it is cut meanwhile is no harm.
			_ = m.log.Prefetch(p.Lo, p.Hi, 4<<10)
			m.in.Prefetched = true
			m.wake()
		})
	}
	if out.StartFlush {
		m.after(m.w.upTo(0, 50*time.Millisecond), m.flush)
	}
	for _, e := range out.Events {
		m.onEvent(e)
	}
	for _, c := range out.Completions {
		c.Done(c.Result, c.Err)
	}
	for _, c := range out.Reads {
		c.Done(c.Err)
	}
}

func (m *member) onEvent(e consensus.Event) {
	w := m.w
	w.cover[fmt.Sprintf("%T", e)]++
	w.note("%d %T %v", m.id, e, e)
	switch e := e.(type) {
	case consensus.LeaderChanged:
		m.leader = e.New
		if e.New != m.id {
			m.follow()
		}
	case consensus.LeadershipConfirmed:
		m.lead(e.Term)
	}
}

// writeSoon has the log writer write what waits, when the disk lets it.
func (m *member) writeSoon() {
	if m.writing {
		return
	}
	m.writing = true
	m.after(m.diskDelay(), func() {
		m.writing = false
		if m.w.now.Before(m.diskFree) { // it has become slow meanwhile
			m.writeSoon()
			return
		}
		m.write()
	})
}

func (m *member) diskDelay() time.Duration {
	return m.w.upTo(20*time.Microsecond, 3*time.Millisecond) + max(0, m.diskFree.Sub(m.w.now))
}

func (m *member) write() {
	msgs := m.toWrite
	m.toWrite = nil
	doing := "writing the log"
	if slices.ContainsFunc(msgs, func(msg *raftpb.Message) bool { return msg.Snapshot != nil }) {
		doing = "installing a snapshot"
		if !m.w.quiet && m.w.chance(0.6) {
			// It takes 19 operations: record, sync, and the opening of the store. Before
			// the first and after the last few order matters most.
			n := 1 + m.w.rng.IntN(22)
			if m.w.chance(0.6) {
				n = []int{1, 2, 3, 18, 19, 20, 21}[m.w.rng.IntN(7)]
			}
			m.disk.arm(n)
		}
	}
	m.idle = 0
	stored, send, err := m.writer.Step(msgs)
	if m.disk.dead() { // nobody hears of it
		m.w.cover["crash while "+doing]++
		return
	}
	if err != nil {
		m.must(err)
		return
	}
	m.in.Stored = append(m.in.Stored, stored...)
	m.Send(send)
	m.wake()
}

func (m *member) applySoon() {
	if m.applying {
		return
	}
	m.applying = true
	m.after(m.w.upTo(10*time.Microsecond, 2*time.Millisecond), func() {
		m.applying = false
		m.apply()
	})
}

// apply runs the applier on some of what waits.
func (m *member) apply() {
	n := len(m.toApply)
	if n > 1 && m.w.chance(0.3) {
		n = 1 + m.w.rng.IntN(n)
	}
	entries := m.toApply[:n:n]
	m.toApply = m.toApply[n:]
	done, err := m.applier.Step(entries)
	if m.disk.dead() {
		return
	}
	if err != nil {
		m.must(err)
		return
	}
	m.in.Applied = append(m.in.Applied, done)
	if len(m.toApply) > 0 {
		m.applySoon()
	}
	m.wake()
}

// Apply implements consensus.Machine.
func (m *member) Apply(entries []*raftpb.Entry) ([]consensus.Result, error) {
	results, err := m.machine().Apply(entries)
	if err != nil {
		return nil, err
	}
	out := make([]consensus.Result, len(results))
	for i := range results {
		r := &results[i]
		out[i] = consensus.Result{Index: r.Index, Term: r.Term, ID: r.ID, Err: r.Err, ConfChange: r.ConfChange, Empty: r.Empty}
		if r.Reply != nil {
			out[i].Reply = r.Reply
			if r.Reply.CompactionDone != nil {
				m.compactSoon()
			}
		}
		if !m.disk.dead() {
			m.w.check.applied(m, entries[i], r)
		}
	}
	return out, nil
}

// Applied implements consensus.Machine.
func (m *member) Applied() (index, term uint64) { return m.machine().Applied() }

// ConfState implements consensus.Machine.
func (m *member) ConfState() *raftpb.ConfState { return m.machine().ConfState() }

// discard gives up what a reply pins that nobody waits for.
func discard(r consensus.Result) {
	if reply, ok := r.Reply.(*state.Reply); ok {
		reply.Release()
	}
}

// publisher is state.Publisher of one member.
type publisher struct{ m *member }

// Publish implements state.Publisher.
func (p publisher) Publish(root mvcc.Root, events []mvcc.Event) {
	m := p.m
	if m.hub == nil || m.disk.dead() {
		return
	}
	m.w.check.published(m, events)
	if m.w.mutant == eventsLost && len(events) > 0 && m.w.chance(0.01) {
		return
	}
	m.hub.Publish(root, events)
	m.deliverSoon()
}

// deliverSoon has the hub give events to watchers.
func (m *member) deliverSoon() {
	if m.delivers {
		return
	}
	m.delivers = true
	m.after(m.w.upTo(10*time.Microsecond, 3*time.Millisecond), func() {
		m.delivers = false
		more, _, err := m.hub.Deliver(m.now())
		m.must(err)
		behind, err := m.hub.CatchUp(context.Background())
		m.must(err)
		for _, c := range m.w.watches {
			c.look(m)
		}
		if more || behind {
			m.deliverSoon()
		}
	})
}

// flush makes the store durable.
func (m *member) flush() {
	m.w.cover["flush"]++
	if m.w.chance(0.1) {
		lower, upper := storage.RevisionBounds(0, 0)
		m.must(m.gen.store.Reclaim(context.Background(), lower, upper))
	}
	m.must(m.gen.store.Flush())
}

// flushNow flushes though nobody asked, and again some time later.
func (m *member) flushNow() {
	m.after(m.w.about(m.w.plan.flush), m.flushNow)
	if m.w.now.Before(m.diskFree) {
		return
	}
	m.flush()
}

// compactSoon does a piece of the work that a compaction leaves.
func (m *member) compactSoon() {
	if m.compacts {
		return
	}
	m.compacts = true
	m.after(m.w.upTo(time.Millisecond, 200*time.Millisecond), func() {
		m.compacts = false
		more, _, err := m.machine().CompactStep()
		m.must(err)
		if more {
			m.compactSoon()
		}
	})
}

// compactionLeft says that what was compacted is not all deleted yet.
func (m *member) compactionLeft() bool {
	root := m.machine().Root()
	if root.CompactRevision() < 0 {
		return false
	}
	select {
	case <-m.machine().Keys().CompactionDone(root.CompactRevision()):
		return false
	default:
		return true
	}
}

// ended forgets an operation that has ended.
func (m *member) ended(o *op) {
	m.open = slices.DeleteFunc(m.open, func(x *op) bool { return x == o })
}
