package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/internal/watch"
)

// generation is the state of this member out of one directory: a store and the
// machine on it. A snapshot from the leader brings the next one; the machine of
// a generation is never re-seated. The store of an old generation is closed, and
// its directory deleted, when nobody reads it any more.
type generation struct {
	dir     string // below the data directory, "" for the one that a member begins with
	store   *storage.Store
	machine *state.Machine

	// refs is 1 for being the present one, and 1 for each reader. It never
	// leaves 0 again.
	refs    atomic.Int64
	unread  chan struct{} // capacity 1: refs has become 1
	retired func()        // called when refs has become 0; nil while it is the present one
}

// snapshotPrefix begins the names of directories that hold a received snapshot:
// snapshot-<index>-<term>, both as 16 hexadecimal digits.
const snapshotPrefix = datadir.SnapshotPrefix

func snapshotDirName(index, term uint64) string {
	return fmt.Sprintf("%s%016x-%016x", snapshotPrefix, index, term)
}

// openGeneration opens what lies in a directory.
func (m *Member) openGeneration(dir string) (_ *generation, err error) {
	g := &generation{dir: dir, unread: make(chan struct{}, 1)}
	g.refs.Store(1)
	if g.store, err = storage.Open(through(m.seams.Storage, m.storageOptions(m.join(dir, storeDir)))); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.store.Abandon())
		}
	}()
	g.machine, err = state.Open(through(m.seams.Machine, state.Options{
		Storage: g.store,
		MVCC: mvcc.Options{
			FS: m.seams.FS, Dir: m.join(dir, indexDir), ValueBudgetBytes: m.budgets().values,
			CompactionBatch: m.cfg.CompactionBatchLimit, CompactionPause: m.cfg.CompactionSleepInterval,
			OnWarm: func() { go debug.FreeOSMemory() }, // what reading the records left behind
			Room:   m.guard.Room, Metrics: m.timed.keys,
		},
		MinLeaseTTL: minLeaseTTL(m.cfg), MaxLearners: m.cfg.MaxLearners, Version: config.EtcdVersion, QuotaBytes: m.cfg.Quota(),
		Wanted:    func(id uint64) bool { return m.ids != nil && m.ids.Made(id) },
		Tokens:    m.tokens,
		Publisher: publisher{m}, Logger: m.log,
	}))
	return g, err
}

func (m *Member) storageOptions(dir string) storage.Options {
	return storage.Options{
		FS: m.seams.FS, Dir: dir, CacheBytes: m.budgets().blockCache, Logger: m.log,
		OnFlush: func() { notify(m.flushed) },
		Compacting: func() func(int) {
			work := m.pace.Join()
			return func(bytes int) { _ = work.Wait(context.Background(), bytes) } // it ends by itself
		},
		OnCorruption: m.fail,
		OnFatal: func(err error) {
			m.log.Error("the store cannot go on, the process ends", "error", err)
			os.Exit(1)
		},
	}
}

// join returns the path of a name in a generation's directory.
func (m *Member) join(dir, name string) string {
	if dir == "" {
		return m.dir.join(name)
	}
	return m.seams.FS.PathJoin(m.dir.join(dir), name)
}

// close ends a generation that is the last one, and writes what makes the next
// start fast.
func (g *generation) close() error { return errors.Join(g.machine.Close(), g.store.Close()) }

// machine is the present machine, for what it holds in memory. Whoever makes it
// read the disk holds its generation meanwhile.
func (m *Member) machine() *state.Machine { return m.gen.Load().machine }

// hold returns the present generation, whose store stays open until release.
func (m *Member) hold() *generation {
	for {
		if g := m.gen.Load(); g.hold() {
			return g
		}
	}
}

// hold takes a reference unless the generation is gone.
func (g *generation) hold() bool {
	for {
		n := g.refs.Load()
		if n == 0 {
			return false
		}
		if g.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// keep takes one reference more: the caller has one.
func (g *generation) keep() { g.refs.Add(1) }

func (g *generation) release() {
	switch g.refs.Add(-1) {
	case 1:
		notify(g.unread)
	case 0:
		g.retired()
	}
}

// awaitReaders returns when nobody reads the present generation, which is at its
// end, and whether that came within so long: calls that were cut off learn it at
// their next look.
func (g *generation) awaitReaders(within time.Duration) bool {
	late := time.NewTimer(within)
	defer late.Stop()
	for g.refs.Load() > 1 {
		select {
		case <-g.unread:
		case <-late.C:
			return false
		}
	}
	return true
}

// Received implements consensus.Machine: whether the store of a snapshot has
// come in whole.
func (a machine) Received(index, term uint64) (dir string, ok bool) {
	dir = snapshotDirName(index, term)
	_, err := a.m.seams.FS.Stat(a.m.join(dir, storeDir))
	return dir, err == nil
}

// Install implements consensus.Machine: the present generation becomes the one
// of a snapshot. The log says so already, durably.
func (a machine) Install(s raftlog.Snapshot) error {
	m := a.m
	next, err := m.openGeneration(s.Dir)
	if err != nil {
		return fmt.Errorf("the snapshot of index %d in %s: %w", s.Index, m.dir.join(s.Dir), err)
	}
	if applied, term := next.machine.Applied(); applied != s.Index || term != s.Term {
		err := fmt.Errorf("%s holds index %d of term %d, the snapshot was announced as index %d of term %d: rebuild this member with `engram ctl rebuild`",
			m.dir.join(s.Dir), applied, term, s.Index, s.Term)
		return errors.Join(err, next.store.Abandon())
	}
	last := m.gen.Load()
	m.durable.Store(s.Index) // it was received, synced, before anything
	m.lessor.Reset(next.machine.Leases())
	m.held.Store(last.dir, true)
	m.gen.Store(next)
	m.tokens.VoidAll() // what voided some may be in the snapshot
	m.hub.Reset(next.source())
	m.log.Info("snapshot installed", "index", s.Index, "term", s.Term, "revision", next.machine.Root().Revision(), "keys", next.machine.Root().Keys())
	last.retired = func() { m.retiring.Go(func() { m.retire(last) }) }
	last.release()
	m.retiring.Go(m.dropStale)
	notify(m.compacted) // a compaction may be half done in what was received
	return nil
}

// retire closes a generation that nobody reads any more and deletes it.
func (m *Member) retire(g *generation) {
	g.machine.Abandon()
	err := g.store.Abandon()
	if err == nil {
		err = m.removeGeneration(g.dir)
	}
	m.held.Delete(g.dir)
	if err != nil {
		m.log.Warn("what a snapshot replaced could not be deleted, the next start tries again", "directory", m.join(g.dir, storeDir), "error", err)
	}
}

// removeGeneration deletes the files of one generation.
func (m *Member) removeGeneration(dir string) error {
	if dir != "" {
		return m.seams.FS.RemoveAll(m.dir.join(dir))
	}
	return errors.Join(m.seams.FS.RemoveAll(m.dir.join(storeDir)), m.seams.FS.RemoveAll(m.dir.join(indexDir)))
}

// removeLeftovers deletes the generations that the log does not name: those that
// it named before, snapshots that never became this member's state, and files
// that were being sent.
func (m *Member) removeLeftovers(present string) error {
	names, err := m.seams.FS.List(m.dir.path)
	if err != nil {
		return err
	}
	if present != "" {
		if err := m.removeGeneration(""); err != nil {
			return err
		}
	}
	for _, name := range names {
		if strings.HasPrefix(name, snapshotPrefix) && name != present || strings.HasPrefix(name, sendingPrefix) {
			if err := m.seams.FS.RemoveAll(m.dir.join(name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// source is the history of this generation, as the hub reads it.
func (g *generation) source() watch.Source {
	return generationSource{g, watch.StoreSource{Store: g.machine.Keys(), Root: g.machine.Root}}
}

// generationSource keeps the store open while it is read. Once a generation is
// gone there is nothing to read; the hub drops what it does for an old source.
type generationSource struct {
	g *generation
	watch.StoreSource
}

// History implements watch.Source.
func (s generationSource) History(ctx context.Context, from, to int64, maxBytes int, fn func(mvcc.Event)) (int64, error) {
	if !s.g.hold() {
		return 0, fmt.Errorf("a snapshot took the place of this history: %w", mvcc.ErrCompacted)
	}
	defer s.g.release()
	return s.StoreSource.History(ctx, from, to, maxBytes, fn)
}

// Previous implements watch.Source.
func (s generationSource) Previous(events []mvcc.Event, found func(i int, kv []byte)) error {
	if !s.g.hold() {
		return nil
	}
	defer s.g.release()
	return s.StoreSource.Previous(events, found)
}
