// Package storage is Pebble behind a small surface.
//
// It knows how keys are laid out on disk (layout.go) and nothing of what they
// mean. Store is the main type. Invariants:
//
//	S1: a batch is visible and survives whole or not at all.
//	S2: what survives a crash is an exact prefix of the committed batches.
//	    Nothing is durable before a flush: the raft log is the write-ahead log.
//	S3: DurableReader sees exactly what would survive a crash now.
//	S4: no code of another package names a Pebble key byte.
package storage

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// FS is the file system that the store lives on, so that packages above can
// put their files beside it and tests can inject errors and crashes.
type FS = vfs.FS

// DefaultFS is the operating system's.
var DefaultFS FS = vfs.Default

// Iterator walks disk keys in order. Key and Value are valid until the next
// move.
type Iterator = pebble.Iterator

// ErrNotFound says that a key is absent.
var ErrNotFound = pebble.ErrNotFound

// ErrDamaged says that the store's files are not what was written.
var ErrDamaged = errors.New("storage: damaged")

// ErrFormat says that the store was written in another format.
var ErrFormat = errors.New("storage: unknown format version")

// Options configure a Store. The zero value of each field but Dir is usable.
type Options struct {
	FS         vfs.FS // nil means the operating system's
	Dir        string
	CacheBytes int64 // block cache; default 32 MiB
	// MemTableBytes is the size at which a memtable is flushed. The memory of small
	// ones is used again soon, and that of large ones is as good as new to the
	// machine each time. Default 16 MiB.
	MemTableBytes uint64
	// Manual turns automatic compactions off and lets only the caller flush,
	// so that a simulation decides when the disk is touched; what fails is tried
	// again at once, then: its time is not that of the machine.
	Manual bool
	// ReadOnly opens a store that is there and leaves its files as they are, but
	// for the LOCK file.
	ReadOnly bool
	Logger   *slog.Logger
	// OnFlush is called after each flush was installed, without locks held by
	// Store. It must not block.
	OnFlush func()
	// OnFatal is called when Pebble cannot go on (it lost its MANIFEST, say).
	// It must not return; nil means panic.
	OnFatal func(error)
	// OnCorruption is called when a block on disk is not what was written. It
	// must not block. The member should stop: what else is lost nobody knows.
	OnCorruption func(error)
	// Compacting is called for each table that a compaction writes, not a flush, and what it returns after each piece written:
	// it may hold the compaction back.
	Compacting func() (wrote func(bytes int))
	// CommitVia stands in for the commit of a batch. A test uses it to show
	// that a store which committed a batch in parts would be found out; nil
	// commits it as it is.
	CommitVia func(db *pebble.DB, b *pebble.Batch) error
}

// Reader reads a moment of the store. Implementations may be used concurrently.
type Reader interface {
	// Get returns a copy of the value, or ErrNotFound.
	Get(key []byte) ([]byte, error)
	// Iter returns an iterator over [lower, upper). The caller closes it.
	Iter(ctx context.Context, lower, upper []byte) (*pebble.Iterator, error)
}

// Store is one Pebble database with its write-ahead log turned off.
type Store struct {
	db       *pebble.DB
	cache    *pebble.Cache
	commit   func(db *pebble.DB, b *pebble.Batch) error
	readOnly bool
	closed   sync.Once
	usage    diskUsage

	background *background
}

// Open opens or creates the store in o.Dir.
func Open(o Options) (*Store, error) {
	if o.FS == nil {
		o.FS = vfs.Default
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = 32 << 20
	}
	if o.MemTableBytes == 0 {
		o.MemTableBytes = memTableBytes
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.CommitVia == nil {
		o.CommitVia = func(_ *pebble.DB, b *pebble.Batch) error { return b.Commit(pebble.NoSync) }
	}
	s := &Store{cache: pebble.NewCache(o.CacheBytes), commit: o.CommitVia, readOnly: o.ReadOnly, background: newBackground(o.Logger)}
	if err := checkMarker(o.FS, o.Dir); err != nil {
		s.cache.Unref()
		return nil, err
	}
	db, err := pebble.Open(o.Dir, s.pebbleOptions(o))
	if err != nil {
		s.cache.Unref()
		return nil, openError(o.FS, o.Dir, err)
	}
	s.db = db
	if err := s.checkFormat(o.Dir); err != nil {
		return nil, errors.Join(err, s.Abandon())
	}
	s.usage.last = s.DiskBytes()
	return s, nil
}

// spareCacheBytes is what the block cache keeps while it is spared.
const spareCacheBytes = 16 << 20

// SpareCache keeps the block cache small until done is called, once, for a reader
// that passes over much of the store and keeps what it wants elsewhere.
func (s *Store) SpareCache() (done func()) {
	spared := s.cache.MaxSize() - spareCacheBytes
	if spared <= 0 {
		return func() {}
	}
	return s.cache.Reserve(int(spared))
}

// checkMarker refuses a directory with tables and without the marker that names
// their MANIFEST: Pebble would take it for new and delete the tables.
func checkMarker(fs FS, dir string) error {
	names, err := fs.List(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("storage: open %s: %w", dir, err)
	}
	table := ""
	for _, name := range names {
		if strings.HasPrefix(name, "marker.manifest.") {
			return nil
		}
		if strings.HasSuffix(name, ".sst") {
			table = name
		}
	}
	if table == "" {
		return nil
	}
	return fmt.Errorf("%w: %s holds %s but no marker.manifest.* file: put it back, or restore a backup", ErrDamaged, dir, table)
}

func (s *Store) pebbleOptions(o Options) *pebble.Options {
	listener := pebble.EventListener{
		FlushEnd: func(i pebble.FlushInfo) {
			s.background.ended(flushes, i.Err)
			if i.Err == nil && o.OnFlush != nil {
				o.OnFlush()
			}
		},
		CompactionEnd:   func(i pebble.CompactionInfo) { s.background.ended(compactions, i.Err) },
		BackgroundError: s.background.tell,
		DataCorruption: func(i pebble.DataCorruptionInfo) {
			if o.OnCorruption != nil {
				o.OnCorruption(tableDamage(i))
			}
		},
	}
	po := &pebble.Options{
		FS:                          pacedFS{manifestFS{o.FS}, o.Compacting},
		Cache:                       s.cache,
		DisableWAL:                  true,
		ReadOnly:                    o.ReadOnly,
		FormatMajorVersion:          pebble.FormatNewest,
		MemTableSize:                o.MemTableBytes,
		MemTableStopWritesThreshold: unflushedMemTables,
		L0CompactionThreshold:       2,
		DisableAutomaticCompactions: o.Manual,
		Logger:                      pebbleLogger{o.Logger, o.OnFatal},
		EventListener:               &listener,
	}
	// A flush writes one table, or two if the disk is far behind. Pebble moves a
	// single table down as it is but rewrites several at once, so smaller ones
	// cost a second pass over every value.
	for level := range po.TargetFileSizes {
		po.TargetFileSizes[level] = max(minTableBytes, unflushedMemTables/2*int64(o.MemTableBytes))
	}
	if o.Manual {
		// Nobody compacts, so commits and flushes must not wait for it.
		po.L0StopWritesThreshold = math.MaxInt32
	} else {
		po.FS = heldBackFS{po.FS, s.background}
	}
	po.Experimental.SpanPolicyFunc = spanPolicy
	return po
}

const (
	memTableBytes = 16 << 20
	// unflushedMemTables is how many memtables there may be before commits wait for
	// a flush: what a slow disk may be behind.
	unflushedMemTables = 16
	// UnflushedBytes is what memtables of the default size may take, which is
	// outside any budget: all that may be unflushed, and one to begin with.
	UnflushedBytes = (unflushedMemTables + 1) * memTableBytes
)

// minTableBytes is Pebble's own target, for the small memtables of tests.
const minTableBytes = 2 << 20

// spanPolicy makes Pebble end an sstable between the small tables and the
// revision log, so that a move of the log never drags their rows along.
func spanPolicy(start []byte) (pebble.SpanPolicy, []byte, error) {
	if len(start) == 0 || start[0] < prefixRevision {
		return pebble.SpanPolicy{}, []byte{prefixRevision}, nil
	}
	return pebble.SpanPolicy{}, nil, nil
}

func (s *Store) checkFormat(dir string) error {
	key := RowKey(TableMeta, []byte(MetaFormat))
	v, err := s.Get(key)
	if errors.Is(err, ErrNotFound) && !s.readOnly {
		b := s.NewBatch()
		b.Set(key, binary.BigEndian.AppendUint32(nil, FormatVersion))
		return s.Commit(b)
	}
	if err != nil {
		return err
	}
	if len(v) != 4 || binary.BigEndian.Uint32(v) != FormatVersion {
		return fmt.Errorf("%s has format %x, this version reads %d: %w", dir, v, FormatVersion, ErrFormat)
	}
	return nil
}

// Close flushes all that was committed and closes the store. Iterators and
// snapshots must be closed before.
func (s *Store) Close() error {
	if s.readOnly {
		return s.Abandon()
	}
	return errors.Join(s.Flush(), s.Abandon())
}

// Abandon closes the store without flushing: what was not flushed is lost, as
// in a crash.
func (s *Store) Abandon() (err error) {
	s.closed.Do(func() {
		close(s.background.closing)
		err = s.background.wait(func() error {
			s.usage.asking.Wait()
			defer s.cache.Unref()
			return s.db.Close()
		})
	})
	return err
}

// Batch is a set of changes that Commit makes at once. One goroutine uses it.
// Keys and values are copied.
type Batch struct{ b *pebble.Batch }

// NewBatch returns an empty batch. It is spent by Commit or Discard.
func (s *Store) NewBatch() *Batch { return &Batch{s.db.NewBatch()} }

// Set stores value under key.
func (b *Batch) Set(key, value []byte) { must(b.b.Set(key, value, nil)) }

// SetRevision writes the record r at (main, sub) of the revision log. It builds
// key and value in place: this is the hot write of the store.
func (b *Batch) SetRevision(main, sub int64, r RevisionRecord) {
	op := b.b.SetDeferred(revisionKeySize, r.valueSize())
	AppendRevisionKey(op.Key[:0], main, sub)
	AppendRevisionValue(op.Value[:0], r)
	must(op.Finish())
}

// DeleteRevision removes the record at (main, sub), whose value has valueBytes
// on disk. The size tells Pebble what there is to win back.
func (b *Batch) DeleteRevision(main, sub int64, valueBytes int) {
	op := b.b.DeleteSizedDeferred(revisionKeySize, uint32(valueBytes))
	AppendRevisionKey(op.Key[:0], main, sub)
	must(op.Finish())
}

// Delete removes key.
func (b *Batch) Delete(key []byte) { must(b.b.Delete(key, nil)) }

// DeleteRange removes all keys in [start, end).
func (b *Batch) DeleteRange(start, end []byte) { must(b.b.DeleteRange(start, end, nil)) }

// Empty says whether the batch holds no change.
func (b *Batch) Empty() bool { return b.b.Empty() }

// Len is the batch's size in bytes.
func (b *Batch) Len() int { return b.b.Len() }

// Discard drops the batch.
func (b *Batch) Discard() { must(b.b.Close()) }

// must is for calls that fail only on misuse of an in-memory batch.
func must(err error) {
	if err != nil {
		panic(fmt.Sprintf("storage: batch: %v", err))
	}
}

// Commit makes the batch visible. It is durable once a later flush ended. It
// blocks while Pebble has too many unflushed memtables.
func (s *Store) Commit(b *Batch) error {
	if err := s.commit(s.db, b.b); err != nil {
		return fmt.Errorf("storage: commit: %w", err)
	}
	return b.b.Close()
}

// Get reads the present, including what is not yet durable.
func (s *Store) Get(key []byte) ([]byte, error) { return get(s.db, key) }

// Iter iterates over the present as of the call.
func (s *Store) Iter(ctx context.Context, lower, upper []byte) (*pebble.Iterator, error) {
	return s.db.NewIterWithContext(ctx, &pebble.IterOptions{LowerBound: lower, UpperBound: upper})
}

// Snapshot pins the present. The caller closes it; while it is open, deleted
// space does not come back.
func (s *Store) Snapshot() *Snapshot { return &Snapshot{s.db.NewSnapshot()} }

// Snapshot is a pinned moment.
type Snapshot struct{ s *pebble.Snapshot }

// Get implements Reader.
func (s *Snapshot) Get(key []byte) ([]byte, error) { return get(s.s, key) }

// Iter implements Reader.
func (s *Snapshot) Iter(ctx context.Context, lower, upper []byte) (*pebble.Iterator, error) {
	return s.s.NewIterWithContext(ctx, &pebble.IterOptions{LowerBound: lower, UpperBound: upper})
}

// Close releases the moment.
func (s *Snapshot) Close() error { return s.s.Close() }

func get(r pebble.Reader, key []byte) ([]byte, error) {
	v, closer, err := r.Get(key)
	if err != nil {
		return nil, err
	}
	out := append([]byte(nil), v...)
	return out, closer.Close()
}

// DurableReader reads only what would survive a crash now.
func (s *Store) DurableReader() Reader { return durable{s.db} }

type durable struct{ db *pebble.DB }

func (d durable) Get(key []byte) ([]byte, error) {
	it, err := d.Iter(context.Background(), key, append(append([]byte(nil), key...), 0))
	if err != nil {
		return nil, err
	}
	if !it.First() {
		return nil, errors.Join(cmpErr(it.Error(), ErrNotFound), it.Close())
	}
	return append([]byte(nil), it.Value()...), it.Close()
}

func cmpErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

func (d durable) Iter(ctx context.Context, lower, upper []byte) (*pebble.Iterator, error) {
	return d.db.NewIterWithContext(ctx, &pebble.IterOptions{
		LowerBound: lower, UpperBound: upper, OnlyReadGuaranteedDurable: true,
	})
}

// Flush makes all that was committed durable and returns when it is, or with an
// error when nothing that Pebble tries succeeds; it is tried on, then.
func (s *Store) Flush() error {
	if err := s.background.wait(s.db.Flush); err != nil {
		return fmt.Errorf("storage: flush: %w", err)
	}
	return nil
}

// StartFlush begins a flush and does not wait for it.
func (s *Store) StartFlush() error {
	if _, err := s.db.AsyncFlush(); err != nil {
		return fmt.Errorf("storage: flush: %w", err)
	}
	return nil
}

// Checkpoint makes a store in dir, which must not exist, out of the files of
// this one: hard links where the file system has them. It holds a prefix of the
// batches, with all that were committed before the call, and is durable. Others
// may commit meanwhile. Nobody must write to it while this store is open.
func (s *Store) Checkpoint(dir string) error {
	// Without a write-ahead log Pebble takes what was flushed and no more.
	if err := s.Flush(); err != nil {
		return err
	}
	if err := s.db.Checkpoint(dir); err != nil {
		return fmt.Errorf("storage: checkpoint: %w", err)
	}
	return nil
}

// Reclaim compacts [lower, upper) so that the space of deleted keys returns to
// the disk. It is long and runs beside reads and writes.
func (s *Store) Reclaim(ctx context.Context, lower, upper []byte) error {
	if err := s.db.Compact(ctx, lower, upper, false); err != nil {
		return fmt.Errorf("storage: compact: %w", err)
	}
	return nil
}

// Bounds is the interval of disk keys [Lower, Upper).
type Bounds struct{ Lower, Upper []byte }

// RevisionSlices cuts the revision log up to a main revision into intervals of
// about so many bytes on disk, the oldest first. A single revision is never cut.
func (s *Store) RevisionSlices(upTo int64, sliceBytes uint64) (out []Bounds, err error) {
	var cut func(from, to int64) error // [from, to)
	cut = func(from, to int64) error {
		b := Bounds{}
		b.Lower, b.Upper = RevisionBounds(from, to)
		size, err := s.db.EstimateDiskUsage(b.Lower, b.Upper)
		if err != nil {
			return fmt.Errorf("storage: size of revisions %d to %d: %w", from, to, err)
		}
		if size <= sliceBytes || to-from < 2 {
			out = append(out, b)
			return nil
		}
		return errors.Join(cut(from, from+(to-from)/2), cut(from+(to-from)/2, to))
	}
	return out, cut(0, upTo+1)
}

// Check reads all that is in the store, each block's checksum with it, and gives
// every row and record in order. It stops at the first that cannot be read.
func (s *Store) Check(ctx context.Context, each func(key, value []byte) error) (err error) {
	it, err := s.Iter(ctx, nil, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for ok := it.First(); ok; ok = it.Next() {
		value, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		if !known(it.Key()) {
			return fmt.Errorf("%w: key %.40x is of no table of format %d", ErrDamaged, it.Key(), FormatVersion)
		}
		if err := each(it.Key(), value); err != nil {
			return err
		}
	}
	if err := it.Error(); err != nil {
		return err
	}
	// What other keys hide is read by this alone.
	return s.db.CheckLevels(nil)
}

// Metrics returns Pebble's own figures.
func (s *Store) Metrics() *pebble.Metrics { return s.db.Metrics() }

type pebbleLogger struct {
	log     *slog.Logger
	onFatal func(error)
}

func (l pebbleLogger) Infof(format string, args ...any) {
	l.log.Debug("pebble", "event", fmt.Sprintf(format, args...))
}

func (l pebbleLogger) Errorf(format string, args ...any) {
	l.log.Error("pebble", "event", fmt.Sprintf(format, args...))
}

func (l pebbleLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf("storage: pebble cannot go on: "+format, args...)
	l.log.Error("pebble", "error", err)
	if l.onFatal != nil {
		l.onFatal(err)
	}
	panic(err)
}

var _ io.Closer = (*Store)(nil)
