package server

import (
	"context"
	"time"

	"github.com/engram-kv/engram/internal/storage"
)

// compactStep is what a step of a compaction counts as, whose records are read and looked up in the index.
const compactStep = 128 << 10

// compact does the physical work of compactions, a step at a time.
func (m *Member) compact(ctx context.Context) error {
	for {
		g := m.hold()
		more, pause, err := g.machine.CompactStep()
		g.release()
		if err == nil && more {
			err = m.compactOn(ctx, pause)
		}
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-m.compacted:
		}
	}
}

// compactOn does all steps after the first.
func (m *Member) compactOn(ctx context.Context, pause time.Duration) error {
	work := m.pace.Begin()
	defer work.End()
	for more := true; more; {
		if work.Wait(ctx, compactStep) != nil || sleep(ctx, pause) != nil {
			return nil // the member stops
		}
		g := m.hold()
		var err error
		more, pause, err = g.machine.CompactStep()
		g.release()
		if err != nil {
			return err
		}
	}
	notify(m.cleared)
	return nil
}

const (
	// reclaimAfter is how long Pebble is left to give back by itself what a
	// compaction has deleted, which it does at once if whole tables can go.
	reclaimAfter = 10 * time.Second
	// What the files may hold beyond what is in use: a share of it, and something
	// for a small store.
	garbagePercent = 25
	garbageBytes   = 64 << 20
	// reclaimSlice is how much of the store is rewritten at one go, and has its
	// space twice meanwhile.
	reclaimSlice = 512 << 20
	// On a disk that is nearly full less is worth while: such a part of the garbage
	// above. And a slice takes no more than such a part of what is free, as far as
	// tables are that small.
	tightGarbage    = 16
	tightSlice      = 4
	tightSliceBytes = 4 << 20
)

// reclaimSpace gives the space of deleted revisions back to the disk: after each
// compaction as far as it is worth while, and all of it when asked, once more if a
// compaction was deleting meanwhile.
func (m *Member) reclaimSpace(ctx context.Context) error {
	asked, early := false, false
	for {
		if !asked {
			select {
			case <-ctx.Done():
				return nil
			case <-m.reclaim:
				asked = true
			case <-m.cleared:
				asked = early || m.settle(ctx)
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		early = asked && m.deleting()
		if asked || m.garbage() {
			m.rewrite(ctx)
		}
		asked = false
	}
}

// deleting says whether a compaction has not yet deleted all that it frees.
func (m *Member) deleting() bool {
	select {
	case <-m.CompactionDone(m.machine().Root().CompactRevision()):
		return false
	default:
		return true
	}
}

// settle lets Pebble know what was deleted, and waits for what it makes of it. It
// returns early, with true, if somebody asks meanwhile.
func (m *Member) settle(ctx context.Context) (asked bool) {
	// Tombstones that are not flushed free nothing, and a store that is quiet
	// after a clean-up would not flush for long.
	defer m.pace.Begin().End() // what Pebble compacts meanwhile is part of it
	g := m.hold()
	err := g.store.Flush()
	g.release()
	if err != nil {
		m.log.Warn("flush after a compaction failed", "error", err)
	}
	t := m.clock.NewTimer(reclaimAfter)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-m.reclaim:
		return true
	case <-t.C():
	}
	return false
}

// garbage says whether so much of the files is dead that it is worth rewriting them.
func (m *Member) garbage() bool {
	g := m.hold()
	defer g.release()
	usage := g.machine.Root().UsageBytes()
	garbage := usage/100*garbagePercent + garbageBytes
	if m.guard.Gate() != nil {
		garbage /= tightGarbage
	}
	return int64(g.store.DiskBytes()) > usage+garbage
}

// sliceBytes is how much is rewritten at one go.
func (m *Member) sliceBytes() uint64 {
	if m.guard.Gate() == nil {
		return reclaimSlice
	}
	return max(tightSliceBytes, min(reclaimSlice, uint64(m.guard.Room())/tightSlice))
}

// rewrite has the tables rewritten without what was deleted, at the pace of all
// long work, a slice at a time.
func (m *Member) rewrite(ctx context.Context) {
	g := m.hold()
	defer g.release()
	began, before := time.Now(), g.store.DiskBytes()
	defer m.pace.Begin().End()
	m.timed.defragging.Set(1)
	defer m.timed.defragging.Set(0)
	err := g.store.Flush()
	if err == nil {
		err = m.rewriteSlices(ctx, g.store, g.machine.Root().Revision())
	}
	m.timed.defrag.Observe(time.Since(began).Seconds())
	switch {
	case ctx.Err() != nil:
	case err != nil:
		m.log.Warn("reclaiming space failed, it is tried again after the next compaction", "error", err)
	default:
		m.log.Info("space reclaimed", "before-bytes", before, "after-bytes", g.store.DiskBytes(), "took", time.Since(began))
	}
}

func (m *Member) rewriteSlices(ctx context.Context, store *storage.Store, revision int64) error {
	slices, err := store.RevisionSlices(revision, m.sliceBytes())
	if err != nil {
		return err
	}
	for _, s := range slices {
		if err := store.Reclaim(ctx, s.Lower, s.Upper); err != nil {
			return err
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
