package mvcc

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

var (
	// errAhead says that a checkpoint knows of more than the store holds.
	errAhead = errors.New("mvcc: index checkpoint is ahead of the store")
	// errStale says that records were deleted after a checkpoint, so that the
	// rest of the log does not lead on from it.
	errStale = errors.New("mvcc: index checkpoint is older than the last compaction")
)

// load fills the index, the usage table and the usage of the root: from the
// checkpoint and the records after it, or from all records.
func (s *Store) load(m meta) error {
	revision, err := s.loadCheckpoint(m)
	switch {
	case err == nil:
		err = s.loadTail(revision)
	case errors.Is(err, os.ErrNotExist), errors.Is(err, errCheckpoint), errors.Is(err, errAhead), errors.Is(err, errStale):
		if s.o.unusable != nil {
			s.o.unusable(err)
		} else if !errors.Is(err, os.ErrNotExist) {
			s.log.Warn("index checkpoint is of no use, reading all records", "error", err)
			if err := s.saver.remove(); err != nil {
				return err
			}
		}
		err = s.loadAll(m)
	}
	if err != nil {
		return err
	}
	// Compactions since the checkpoint, and records that the last one had
	// not deleted yet.
	if s.root.compacted >= 0 {
		s.root.usageBytes -= s.usage.compact(s.root.compacted)
		for from := []byte(nil); ; {
			if from = s.tree.Compact(s.root.compacted, from, 1<<16, nil); from == nil {
				break
			}
		}
	}
	s.root.index = s.tree.Root()
	return nil
}

// builder makes index and usage from records in key order.
type builder struct {
	index *index.Builder
	freed []usageMark
	bytes int64
}

func newBuilder() *builder { return &builder{index: index.NewBuilder()} }

func (b *builder) add(r *index.Record) error {
	for i := range r.Revs {
		rev := &r.Revs[i]
		b.bytes += int64(rev.Size)
		if rev.Tombstone {
			b.freed = append(b.freed, usageMark{rev.Main + 1, int64(rev.Size)})
		} else if i+1 < len(r.Revs) {
			b.freed = append(b.freed, usageMark{r.Revs[i+1].Main, int64(rev.Size)})
		}
	}
	return b.index.Add(r)
}

// install makes what was built the state of s as of revision.
func (b *builder) install(s *Store, revision int64) {
	s.tree = b.index.Tree()
	s.usage = rebuildUsage(b.freed, revision)
	s.root.usageBytes = b.bytes
}

// loadCheckpoint loads the checkpoint and says at which revision it was made.
func (s *Store) loadCheckpoint(m meta) (revision int64, err error) {
	if s.o.Dir == "" {
		return 0, os.ErrNotExist
	}
	f, err := s.o.FS.Open(s.saver.path(CheckpointFile))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	b := newBuilder()
	accept := func(rev int64, applied uint64) error {
		if rev > s.root.revision || applied > m.index {
			return fmt.Errorf("%w: it has revision %d at index %d, the store %d at %d", errAhead, rev, applied, s.root.revision, m.index)
		}
		if rev < m.finished {
			return fmt.Errorf("%w: it has revision %d, compacted at %d", errStale, rev, m.finished)
		}
		revision = rev
		return nil
	}
	if err := readCheckpoint(f, accept, b.add); err != nil {
		return 0, err
	}
	b.install(s, revision)
	s.saver.revision = revision
	return revision, nil
}

// loadTail adds the records after revision to the index.
func (s *Store) loadTail(revision int64) error {
	var main, superseded, tombstones int64
	end := func() {
		if main != 0 {
			s.usage.end(main, superseded, tombstones)
		}
		superseded, tombstones = 0, 0
	}
	err := s.readAhead(revision+1, func(r *scanned) {
		if r.rev.Main != main {
			end()
			main = r.rev.Main
		}
		var prev index.Item
		if r.rev.Tombstone {
			prev, _ = s.tree.Delete(r.key, r.rev.Revision, r.rev.Size)
			tombstones += int64(r.rev.Size)
		} else {
			prev, _ = s.tree.Put(r.key, r.rev.Revision, r.lease, r.rev.Size, 0)
		}
		superseded += int64(prev.Size)
		s.root.usageBytes += int64(r.rev.Size)
		s.saver.bytes += int64(r.rev.Size)
	})
	end()
	return err
}

const (
	tailPart   = 1 << 14 // revisions that one goroutine reads, or more
	tailParts  = 1 << 12 // most parts
	tailChunk  = 1 << 11 // records that it hands over at once
	tailKeys   = 1 << 18 // or those whose keys have so many bytes
	tailChunks = 4       // and how many chunks it may be ahead
)

// readAhead gives the records from revision from on to fn, in order. To read them
// takes longer than what fn does with them, so several goroutines do: each takes
// the next part of the revisions, and waits when it is a few chunks ahead.
func (s *Store) readAhead(from int64, fn func(*scanned)) error {
	span := max(0, s.root.revision-from+1)
	size := max(tailPart, span/tailParts+1)
	parts := make([]chan []scanned, max(1, (span+size-1)/size))
	errs := make([]error, len(parts))
	for i := range parts {
		parts[i] = make(chan []scanned, tailChunks)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var (
		next atomic.Int64
		wg   sync.WaitGroup
	)
	defer wg.Wait()
	defer cancel()
	for range min(runtime.GOMAXPROCS(0), maxScanners, len(parts)) {
		wg.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(parts)) && ctx.Err() == nil; i = next.Add(1) - 1 {
				begin, end := from+i*size, from+(i+1)*size
				if i == int64(len(parts))-1 {
					end = 0 // the rest
				}
				errs[i] = s.readPart(ctx, begin, end, parts[i])
				close(parts[i])
			}
		})
	}
	for i, part := range parts {
		for chunk := range part {
			for k := range chunk {
				fn(&chunk[k])
			}
		}
		if errs[i] != nil {
			return errs[i]
		}
	}
	return nil
}

// readPart sends the records with from <= main < to, all from from on if to is 0,
// till ctx ends.
func (s *Store) readPart(ctx context.Context, from, to int64, out chan<- []scanned) error {
	var (
		chunk    []scanned
		keys     keyArena
		keyBytes int // of the chunk
		failed   error
	)
	send := func() bool {
		select {
		case out <- chunk:
			chunk, keyBytes = nil, 0
		case <-ctx.Done():
		}
		failed = ctx.Err() // also where both were ready
		return failed == nil
	}
	lower, upper := storage.RevisionBounds(from, to)
	err := s.eachRecord(ctx, lower, upper, nil, func(r *logRecord) bool {
		rec, err := keys.scanned(r)
		if err != nil {
			failed = err
			return false
		}
		if chunk == nil {
			chunk = make([]scanned, 0, tailChunk)
		}
		chunk = append(chunk, rec)
		keyBytes += len(rec.key)
		return len(chunk) < tailChunk && keyBytes < tailKeys || send()
	})
	if err == nil && failed == nil && len(chunk) > 0 {
		send()
	}
	return errors.Join(err, failed)
}

// scanned is one record as a scan keeps it.
type scanned struct {
	key   []byte
	rev   index.Rev
	lease int64
}

// keyArena holds the keys of records that a scan keeps.
type keyArena []byte

func (a *keyArena) scanned(r *logRecord) (scanned, error) {
	kv, err := decodeKeyValue(r.KV)
	if err != nil {
		return scanned{}, fmt.Errorf("revision %v: %w", r.rev, err)
	}
	keys := *a
	if cap(keys)-len(keys) < len(kv.key) {
		keys = make([]byte, 0, max(len(kv.key), 64<<10))
	}
	start := len(keys)
	keys = append(keys, kv.key...)
	*a = keys
	return scanned{
		key:   keys[start:len(keys):len(keys)],
		rev:   index.Rev{Revision: r.rev, Create: kv.create, Version: kv.version, Size: uint32(len(r.KV)), Tombstone: r.Tombstone},
		lease: kv.lease,
	}, nil
}

func (a *scanned) compare(b *scanned) int {
	if c := bytes.Compare(a.key, b.key); c != 0 {
		return c
	}
	return a.rev.Revision.Compare(b.rev.Revision)
}

// maxScanners bounds the goroutines of a full scan, which are busy with
// decompression more than with waiting.
const maxScanners = 8

// loadAll makes the index from all records: several goroutines read a part of
// the log each and sort it, then the parts are merged.
func (s *Store) loadAll(m meta) error {
	n := min(runtime.GOMAXPROCS(0), maxScanners, int(m.last/1024)+1)
	parts := make([][]scanned, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	part := m.last / int64(n)
	for i := range n {
		from, to := int64(i)*part, int64(i+1)*part
		if i == n-1 {
			to = 0 // the rest
		}
		wg.Go(func() { parts[i], errs[i] = s.scanPart(from, to) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	b := newBuilder()
	if err := merge(parts, b.add); err != nil {
		return err
	}
	b.install(s, s.root.revision)
	return nil
}

// scanPart reads the records with from <= main < to, all from from on if to is 0,
// and sorts them.
func (s *Store) scanPart(from, to int64) (out []scanned, err error) {
	lower, upper := storage.RevisionBounds(from, to)
	var (
		keys   keyArena
		failed error
	)
	err = s.eachRecord(context.Background(), lower, upper, nil, func(r *logRecord) bool {
		rec, err := keys.scanned(r)
		if err != nil {
			failed = err
			return false
		}
		out = append(out, rec)
		return true
	})
	slices.SortFunc(out, func(a, b scanned) int { return a.compare(&b) })
	return out, errors.Join(err, failed)
}

// merge gives the records of all parts to add, one call per key.
func merge(parts [][]scanned, add func(*index.Record) error) error {
	var rec index.Record
	for {
		parts = slices.DeleteFunc(parts, func(p []scanned) bool { return len(p) == 0 })
		if len(parts) == 0 {
			break
		}
		least := 0
		for i := 1; i < len(parts); i++ {
			if parts[i][0].compare(&parts[least][0]) < 0 {
				least = i
			}
		}
		next := &parts[least][0]
		if len(rec.Revs) > 0 && !bytes.Equal(rec.Key, next.key) {
			if err := add(&rec); err != nil {
				return err
			}
			rec.Revs = rec.Revs[:0]
		}
		rec.Key = next.key
		rec.Lease = next.lease
		rec.Revs = append(rec.Revs, next.repaired(rec.Revs))
		parts[least] = parts[least][1:]
	}
	if len(rec.Revs) > 0 {
		return add(&rec)
	}
	return nil
}

// repaired returns the revision as the index can hold it. The record with
// which a restore from backup raises the revision has an empty value: it is
// the key "" with neither create nor version.
func (a *scanned) repaired(before []index.Rev) index.Rev {
	rev := a.rev
	if rev.Tombstone {
		rev.Create, rev.Version = 0, 0
		return rev
	}
	if len(a.key) > 0 || rev.Create != 0 {
		return rev
	}
	rev.Create, rev.Version = rev.Main, 1
	if n := len(before); n > 0 && !before[n-1].Tombstone {
		rev.Create, rev.Version = before[n-1].Create, before[n-1].Version+1
	}
	return rev
}

// rebuildUsage makes the table as of revision from what compactions at each
// revision would free, given in any order.
func rebuildUsage(freed []usageMark, revision int64) usageTable {
	slices.SortFunc(freed, func(a, b usageMark) int { return cmp.Compare(a.main, b.main) })
	var u usageTable
	for _, f := range freed {
		if f.main > revision {
			u.carry += f.bytes // tombstones of the last revision
			continue
		}
		u.add(f.main, f.bytes)
	}
	return u
}
