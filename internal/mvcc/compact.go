package mvcc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

// compactJob deletes what the compaction at rev made superfluous, in steps:
//
//	begin   announce, so that a view pinned too late knows it
//	prune   take the revisions out of the index
//	wait    for an index checkpoint at rev or later, and for views older than
//	        the compaction, but for those only till the deadline
//	scan    go through the records up to rev in order: hash each, delete those
//	        that do not survive
//
// The checkpoint must come first, because a start-up that replays records upon
// an older one would not find the tombstones that are deleted here.
type compactJob struct {
	rev, previous int64
	hash          bool   // all before it was finished when it was scheduled: its hash is worth keeping
	older         *epoch // the epoch it ended; nil after a restart

	phase    compactPhase
	began    time.Time // its first step
	earliest time.Time // when deletion may begin
	deadline time.Time // when it no longer waits for views
	from     []byte    // where prune goes on
	next     Revision  // where scan goes on
	sum      recordHash
	keep     keepSet
	deleted  int64
	done     chan struct{}
}

type compactPhase uint8

const (
	phaseBegin compactPhase = iota
	phasePrune
	phaseWait
	phaseScan
)

const (
	// waitPause is how long CompactStep asks to be left alone when it waits
	// for views, a checkpoint of the index or one of the store.
	waitPause = 20 * time.Millisecond
	// pinGrace is how long after the announcement deletion begins at the
	// earliest: time for a reader that holds an older Root to pin its View.
	pinGrace = 50 * time.Millisecond
	// scanBytes bounds the records that one step reads, beside their number.
	scanBytes = 256 << 10
)

// newJob makes the job of a compaction, and lets others wait for it.
func (s *Store) newJob(rev, previous int64) *compactJob {
	j := &compactJob{rev: rev, previous: previous, done: make(chan struct{})}
	s.scheduled = rev
	s.doneMu.Lock()
	s.pending = append(s.pending, pendingCompaction{rev, j.done})
	s.doneMu.Unlock()
	return j
}

// pendingCompaction lets anyone wait for a job.
type pendingCompaction struct {
	rev  int64
	done chan struct{}
}

// CompactionDone returns a channel that is closed once the records that the
// compaction at rev frees are deleted: at once if they are already. It may be
// called as soon as Writer.Compact returned. Compact with physical=true waits
// on it, also when it is refused with ErrCompacted. Close closes it too.
func (s *Store) CompactionDone(rev int64) <-chan struct{} {
	s.doneMu.Lock()
	defer s.doneMu.Unlock()
	for _, p := range s.pending {
		if p.rev >= rev {
			return p.done
		}
	}
	closed := make(chan struct{})
	close(closed)
	return closed
}

// CompactStep does a bounded piece of background work: that of the oldest
// queued compaction or, if there is none, reading values into memory after a
// start. The caller holds the applier's lock, has no Writer open, and publishes
// Root afterwards. more is false when there is nothing to do; call it again
// after Open and after each batch with a Compact. Otherwise the caller should
// wait for pause first. An error is the disk's: the member stops.
func (s *Store) CompactStep() (more bool, pause time.Duration, err error) {
	if len(s.jobs) == 0 {
		more, err = s.warm()
		return more, s.o.CompactionPause, err
	}
	j := s.jobs[0]
	switch j.phase {
	case phaseBegin:
		s.announced.Store(j.rev)
		now := s.o.Now()
		j.began = now
		j.earliest, j.deadline = now.Add(min(s.o.ViewAge, pinGrace)), now.Add(s.o.ViewAge)
		j.phase = phasePrune
		return true, 0, nil
	case phasePrune:
		s.prune(j)
		return true, s.o.CompactionPause, nil
	case phaseWait:
		ready, err := s.saver.ensure(j.rev)
		if err != nil {
			return false, 0, fmt.Errorf("mvcc: compaction at %d: %w", j.rev, err)
		}
		now := s.o.Now()
		if !ready || s.holds.Load() > 0 || now.Before(j.earliest) || s.olderViews(j) && now.Before(j.deadline) {
			return true, waitPause, nil
		}
		s.deleting.Store(j.rev)
		j.phase = phaseScan
		return true, 0, nil
	}
	if err := s.scan(j); err != nil {
		return false, 0, fmt.Errorf("mvcc: compaction at %d: %w", j.rev, err)
	}
	return len(s.jobs) > 0 || s.warmBelow != (Revision{}), s.o.CompactionPause, nil
}

// prune takes superfluous revisions of some keys out of the index.
func (s *Store) prune(j *compactJob) {
	began := s.o.Now()
	j.from = s.tree.Compact(j.rev, j.from, s.o.CompactionBatch, nil)
	s.root.index = s.tree.Root()
	s.o.Metrics.IndexPause.Observe(milliseconds(s.o.Now().Sub(began)))
	if j.from == nil {
		j.phase = phaseWait
	}
}

// olderViews says whether views are open that were pinned before j.
func (s *Store) olderViews(j *compactJob) bool {
	if j.older == nil {
		return false
	}
	for _, e := range s.epochs {
		if e.views.Load() > 0 {
			return true
		}
		if e == j.older {
			break
		}
	}
	return false
}

// scan hashes and deletes some records.
func (s *Store) scan(j *compactJob) error {
	began, deleted := s.o.Now(), j.deleted
	b := s.storage.NewBatch()
	end, err := s.scanInto(b, j)
	if err != nil {
		b.Discard()
		return err
	}
	if end {
		setRevisionRow(b, storage.MetaFinishedCompact, j.rev)
	}
	if b.Empty() {
		b.Discard()
	} else if err := s.storage.Commit(b); err != nil {
		return err
	}
	now := s.o.Now()
	s.o.Metrics.CompactedKeys.Add(float64(j.deleted - deleted))
	s.o.Metrics.DeletePause.Observe(milliseconds(now.Sub(began)))
	if end {
		s.o.Metrics.LastCompaction.Set(float64(now.Unix()))
		s.o.Metrics.CompactionTotal.Observe(milliseconds(now.Sub(j.began)))
		s.finish(j)
	}
	return nil
}

func (s *Store) scanInto(b *storage.Batch, j *compactJob) (end bool, err error) {
	_, upper := storage.RevisionBounds(0, j.rev+1)
	iter, err := s.storage.Iter(context.Background(), storage.AppendRevisionKey(nil, j.next.Main, j.next.Sub), upper)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, iter.Close()) }()
	records, bytes := 0, 0
	for ok := iter.First(); ok; ok = iter.Next() {
		if records == s.o.CompactionBatch || bytes > scanBytes {
			return false, nil
		}
		rec, size, err := readRecord(iter)
		if err != nil {
			return false, err
		}
		records, bytes = records+1, bytes+size
		j.next = Revision{Main: rec.rev.Main, Sub: rec.rev.Sub + 1}
		survives := rec.survives(s.root.index, j.rev)
		if j.hash {
			s.hashScanned(j, &rec, survives)
		}
		if !survives {
			b.DeleteRevision(rec.rev.Main, rec.rev.Sub, size)
			j.deleted++
		}
	}
	return true, iter.Error()
}

// survives says whether a compaction at compacted keeps the record. ix is the
// index at any moment since that compaction was applied.
func (r *logRecord) survives(ix index.Root, compacted int64) bool {
	if r.Tombstone {
		return r.rev.Main == compacted
	}
	it, ok := ix.Get(r.key(), compacted)
	return ok && it.Mod == r.rev
}

// finish ends the oldest job.
func (s *Store) finish(j *compactJob) {
	s.finished = j.rev
	s.jobs = s.jobs[1:]
	if j.hash {
		s.hashes.add(cachedHash{hash: j.sum.value(), compacted: j.previous, revision: j.rev})
	}
	for i, e := range s.epochs {
		if e == j.older {
			s.epochs = append([]*epoch(nil), s.epochs[i+1:]...)
			break
		}
	}
	s.finishedNow.Store(j.rev)
	s.doneMu.Lock()
	s.pending = s.pending[1:]
	s.doneMu.Unlock()
	close(j.done)
	s.log.Info("compaction done", "revision", j.rev, "deleted", j.deleted)
}
