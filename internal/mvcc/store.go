package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

// Store is all keys at all revisions that are not compacted.
type Store struct {
	o       Options
	log     *slog.Logger
	storage *storage.Store
	values  *valueMemory
	saver   *saver

	// The writer's: covered by the applier's lock.
	tree          *index.Tree
	usage         usageTable
	root          Root // after the last commit
	index, term   uint64
	scheduled     int64 // compact revision of the last job, 0 if none
	finished      int64 // compact revision up to which records are deleted, 0 if none
	jobs          []*compactJob
	epochs        []*epoch // ended by a compaction whose job may have to wait for them
	lastBatchSize int      // events of the last batch, a guess at those of the next

	// announced is the revision of the newest compaction whose job has begun,
	// deleting that of the newest one that may have deleted records.
	announced, deleting atomic.Int64
	holds               atomic.Int64 // calls of Checkpoint, while which no job begins to delete
	promotions          chan promotion
	warmed              int64    // bytes read by warm
	cacheBack           func()   // gives the block cache its room back; nil once warm has ended
	warmBelow           Revision // records below it were not offered to the value memory since Open; the writer's
	hashes              hashCache
	pages               pageCache
	finishedNow         atomic.Int64 // as finished, for anyone

	doneMu  sync.Mutex
	pending []pendingCompaction // as jobs
}

func (o Options) withDefaults() Options {
	if o.FS == nil {
		o.FS = storage.DefaultFS
	}
	if o.ValueBudgetBytes == 0 {
		o.ValueBudgetBytes = 256 << 20
	}
	if o.WarmBytes == 0 {
		o.WarmBytes = 256 << 20
	}
	if o.ViewAge == 0 {
		o.ViewAge = 10 * time.Second
	}
	if o.CompactionBatch <= 0 {
		o.CompactionBatch = 400
	}
	if o.CompactionPause == 0 {
		o.CompactionPause = time.Millisecond
	}
	if o.CheckpointBytes == 0 {
		o.CheckpointBytes = 128 << 20
	}
	if o.CheckpointInterval == 0 {
		o.CheckpointInterval = 5 * time.Second
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Go == nil {
		o.Go = func(job func()) { go job() }
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics()
	}
	if o.slabBytes == 0 {
		o.slabBytes = slabBytesFull
	}
	return o
}

// Open reads the store's state from o.Storage: from the index checkpoint and
// the records after it, or from all records. The caller keeps o.Storage and
// closes it after Close. A compaction that was not finished is queued again.
func Open(o Options) (*Store, error) {
	o = o.withDefaults()
	s := &Store{
		o:          o,
		log:        o.Logger,
		storage:    o.Storage,
		values:     newValueMemory(o.ValueBudgetBytes, o.slabBytes),
		promotions: make(chan promotion, promotionQueue),
	}
	s.saver = newSaver(s)
	if o.Dir != "" && o.unusable == nil {
		if err := o.FS.MkdirAll(o.Dir, 0o700); err != nil {
			return nil, fmt.Errorf("mvcc: open: %w", err)
		}
	}
	meta, err := readMeta(o.Storage)
	if err != nil {
		return nil, fmt.Errorf("mvcc: open: %w", err)
	}
	s.index, s.term = meta.index, meta.term
	s.finished, s.scheduled = meta.finished, meta.scheduled
	s.root = Root{
		revision:  max(meta.last, 1, meta.finished, meta.scheduled),
		compacted: max(meta.finished, meta.scheduled),
		epoch:     &epoch{},
	}
	if err := s.load(meta); err != nil {
		return nil, fmt.Errorf("mvcc: open: %w", err)
	}
	s.warmBelow, s.cacheBack = Revision{Main: s.root.revision + 1}, o.Storage.SpareCache()
	s.announced.Store(meta.finished)
	s.finishedNow.Store(meta.finished)
	s.deleting.Store(s.root.compacted) // the last run may have begun
	if meta.scheduled > meta.finished {
		s.jobs = append(s.jobs, s.newJob(meta.scheduled, meta.finished))
	}
	return s, nil
}

// meta is what the store's rows and the end of its log say.
type meta struct {
	index, term         uint64
	last                int64 // main of the last record, 0 if there is none
	finished, scheduled int64 // -1 if absent
}

func readMeta(r storage.Reader) (m meta, err error) {
	if m.finished, err = readRevisionRow(r, storage.MetaFinishedCompact); err != nil {
		return m, err
	}
	if m.scheduled, err = readRevisionRow(r, storage.MetaScheduledCompact); err != nil {
		return m, err
	}
	row, err := r.Get(storage.RowKey(storage.TableMeta, []byte(storage.MetaApplied)))
	if err == nil {
		m.index, m.term, err = storage.ParseApplied(row)
	} else if errors.Is(err, storage.ErrNotFound) {
		err = nil
	}
	if err != nil {
		return m, fmt.Errorf("row %s: %w", storage.MetaApplied, err)
	}
	return m, m.readLast(r)
}

// readLast reads the last record: no compaction ever deletes it.
func (m *meta) readLast(r storage.Reader) (err error) {
	lower, upper := storage.RevisionBounds(0, 0)
	iter, err := r.Iter(context.Background(), lower, upper)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, iter.Close()) }()
	if !iter.Last() {
		return iter.Error()
	}
	if m.last, _, err = storage.ParseRevisionKey(iter.Key()); err != nil {
		return err
	}
	value, err := iter.ValueAndErr()
	if err != nil {
		return err
	}
	record, err := storage.ParseRevisionValue(value)
	if err != nil {
		return fmt.Errorf("revision %d: %w", m.last, err)
	}
	if record.Applied > m.index {
		m.index, m.term = record.Applied, record.Term
	}
	return nil
}

// AppliedOf reads the applied mark that r holds: with
// storage.Store.DurableReader, the index up to which nothing can be lost.
func AppliedOf(r storage.Reader) (index, term uint64, err error) {
	m, err := readMeta(r)
	return m.index, m.term, err
}

func readRevisionRow(r storage.Reader, row string) (int64, error) {
	v, err := r.Get(storage.RowKey(storage.TableMeta, []byte(row)))
	if errors.Is(err, storage.ErrNotFound) {
		return -1, nil
	}
	if err == nil && len(v) != 8 {
		err = fmt.Errorf("%d bytes, want 8", len(v))
	}
	if err != nil {
		return 0, fmt.Errorf("row %s: %w", row, err)
	}
	return int64(binary.BigEndian.Uint64(v)), nil
}

func setRevisionRow(b *storage.Batch, row string, rev int64) {
	b.Set(storage.RowKey(storage.TableMeta, []byte(row)), binary.BigEndian.AppendUint64(nil, uint64(rev)))
}

// Close writes an index checkpoint, waits for background jobs and wakes who
// waits for a compaction. It leaves the storage open.
func (s *Store) Close() error {
	s.Abandon()
	switch err := s.saver.save(s.root, s.index); {
	case errors.Is(err, errNoCheckpoint):
		s.log.Warn("cannot write the index checkpoint, the next start will be slower", "error", err)
	case err != nil:
		return fmt.Errorf("mvcc: close: %w", err)
	}
	return nil
}

// Abandon waits for background jobs and wakes who waits for a compaction, as
// Close does, but writes nothing: the storage is about to be deleted.
func (s *Store) Abandon() {
	s.saver.wait()
	s.doneMu.Lock()
	defer s.doneMu.Unlock()
	for _, p := range s.pending {
		close(p.done)
	}
	s.pending = nil
}

// PrepareCheckpoint sees to it that the index checkpoint is a new one when
// Checkpoint wants it. The caller holds the applier's lock, and should not while
// it calls Checkpoint next.
func (s *Store) PrepareCheckpoint() { s.saver.renew() }

// Checkpoint makes a store and an index directory out of the files of this one,
// in directories that do not exist, on the same file system. What is in them is
// a moment between call and return: Open finds it. Anyone may call it.
func (s *Store) Checkpoint(storeDir, indexDir string) error {
	s.saver.wait()
	// The index comes first, so it is not ahead of the store. What would be missing
	// between the two are records that a compaction deletes, so none begins: those
	// that have begun waited for an index beyond them.
	s.holds.Add(1)
	defer s.holds.Add(-1)
	if err := s.saver.link(indexDir); err != nil {
		return err
	}
	return s.storage.Checkpoint(storeDir)
}

// Applied is the raft index and term of the last entry whose effects are in
// the store.
func (s *Store) Applied() (index, term uint64) { return s.index, s.term }

// Root is the moment after the last commit. It also carries what CompactStep
// and promotions have changed since, so the applier should publish it after
// each CompactStep. Its answers are equal before and after.
func (s *Store) Root() Root { return s.root }

// Leases calls yield for each live key that is attached to a lease.
func (s *Store) Leases(yield func(lease int64, key []byte)) {
	s.root.index.Ascend([]byte{0}, []byte{0}, 0, func(it index.Item) bool {
		if it.Lease != 0 {
			yield(it.Lease, it.Key)
		}
		return true
	})
}
