package mvcc

import (
	"context"
	"errors"
	"fmt"

	"github.com/engram-kv/engram/internal/storage"
)

// logRecord is a record as the revision log has it. Its slices are valid until
// the iterator moves.
type logRecord struct {
	rev Revision
	storage.RevisionRecord
}

func (r *logRecord) key() []byte { return keyOf(r.KV) }

// readRecord decodes the record that iter stands on and says how long its
// value is on disk.
func readRecord(iter *storage.Iterator) (r logRecord, size int, err error) {
	if r.rev.Main, r.rev.Sub, err = storage.ParseRevisionKey(iter.Key()); err != nil {
		return r, 0, err
	}
	value, err := iter.ValueAndErr()
	if err != nil {
		return r, 0, fmt.Errorf("revision %v: %w", r.rev, err)
	}
	if r.RevisionRecord, err = storage.ParseRevisionValue(value); err != nil {
		return r, 0, fmt.Errorf("revision %v: %w", r.rev, err)
	}
	return r, len(value), nil
}

// eachRecord visits the records in [lower, upper) until fn returns false.
// opened, if not nil, is called once the moment to be read is pinned; its error
// ends the visit.
func (s *Store) eachRecord(ctx context.Context, lower, upper []byte, opened func() error, fn func(*logRecord) bool) (err error) {
	iter, err := s.storage.Iter(ctx, lower, upper)
	if err != nil {
		return fmt.Errorf("mvcc: read records: %w", err)
	}
	defer func() { err = errors.Join(err, iter.Close()) }()
	if opened != nil {
		if err := opened(); err != nil {
			return err
		}
	}
	for ok := iter.First(); ok; ok = iter.Next() {
		rec, _, err := readRecord(iter)
		if err != nil {
			return fmt.Errorf("mvcc: read records: %w", err)
		}
		if !fn(&rec) {
			return nil
		}
	}
	return iter.Error()
}

// History gives fn the events from main revision from up to r, in order, and
// returns the main revision to go on from: r.Revision()+1 at the end. It stops
// between two main revisions after about maxBytes of KeyValues, or when fn
// returns false, which refuses the event and all of its main revision. The
// error is ErrCompacted, the context's, or the disk's.
func (s *Store) History(ctx context.Context, r Root, from int64, maxBytes int, fn func(Event) bool) (next int64, err error) {
	next = max(from, 1)
	if next > r.revision {
		return next, nil
	}
	lower, upper := storage.RevisionBounds(next, r.revision+1)
	pinned := func() error {
		if compacted := max(r.compacted, s.deleting.Load()); from < compacted {
			return fmt.Errorf("history from revision %d, compacted at %d: %w", from, compacted, ErrCompacted)
		}
		return nil
	}
	var (
		arena eventArena
		bytes int
		check = walkCheck{ctx: ctx}
		ended = true
	)
	err = s.eachRecord(ctx, lower, upper, pinned, func(rec *logRecord) bool {
		full := bytes >= maxBytes && rec.rev.Main > next
		next = rec.rev.Main
		if full || check.stop() {
			ended = false
			return false
		}
		e := arena.event(rec)
		bytes += len(e.KV)
		if e.Create = !e.Delete && arena.version == 1; !e.Create && rec.rev.Main-1 >= r.compacted {
			if prev, ok := r.index.Before(e.Key, Revision{Main: rec.rev.Main}); ok {
				e.Prev, e.PrevRef = prev.Mod, prev.Ref
			}
		}
		ended = arena.err == nil && fn(e)
		return ended
	})
	if err == nil {
		err = errors.Join(arena.err, ctx.Err())
	}
	if err == nil && ended {
		next = r.revision + 1
	}
	return next, err
}

// eventArena makes events from records, with memory of its own in large pieces.
type eventArena struct {
	buf     []byte
	version int64 // of the last event
	err     error
}

const arenaBytes = 32 << 10

func (a *eventArena) room(n int) {
	if cap(a.buf)-len(a.buf) < n {
		a.buf = make([]byte, 0, max(n, arenaBytes))
	}
}

func (a *eventArena) event(r *logRecord) Event {
	kv, err := decodeKeyValue(r.KV)
	if err != nil {
		a.err = fmt.Errorf("revision %v: %w", r.rev, err)
		return Event{Rev: r.rev}
	}
	a.version = kv.version
	e := Event{Rev: r.rev, Delete: r.Tombstone}
	var start int
	if r.Tombstone {
		kv = keyValue{key: kv.key, mod: r.rev.Main}
		a.room(kv.size())
		start = len(a.buf)
		a.buf = kv.append(a.buf)
	} else {
		a.room(len(r.KV))
		start = len(a.buf)
		a.buf = append(a.buf, r.KV...)
	}
	e.KV = a.buf[start:len(a.buf):len(a.buf)]
	e.Key = keyOf(e.KV)
	return e
}
