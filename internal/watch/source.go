package watch

import (
	"context"

	"github.com/engram-kv/engram/internal/mvcc"
)

// Source is what the hub needs of the store. Its methods may be called
// concurrently; History and Previous may read the disk.
type Source interface {
	// Revision returns the newest readable revision and the compact revision,
	// which is negative if there was no compaction.
	Revision() (revision, compacted int64)
	// History calls fn for the events of revisions from to to, in order, till
	// about maxBytes are read, and returns the revision to go on from: the
	// events of a revision are never split. It returns mvcc.ErrCompacted if
	// from is below the compact revision, which it looks at only after all it
	// returns has become safe from compaction.
	History(ctx context.Context, from, to int64, maxBytes int, fn func(mvcc.Event)) (next int64, err error)
	// Previous looks up what each event's key held before it and calls found
	// with the encoded KeyValue, which may be kept. It leaves out the events
	// for which that is compacted. Events have a Prev.
	Previous(events []mvcc.Event, found func(i int, kv []byte)) error
}

// StoreSource is an mvcc.Store as a Source.
type StoreSource struct {
	Store *mvcc.Store
	// Root returns the newest published root. It must be cheap.
	Root func() mvcc.Root
}

// Revision implements Source.
func (s StoreSource) Revision() (revision, compacted int64) {
	r := s.Root()
	return r.Revision(), r.CompactRevision()
}

// History implements Source.
func (s StoreSource) History(ctx context.Context, from, to int64, maxBytes int, fn func(mvcc.Event)) (int64, error) {
	next, err := s.Store.History(ctx, s.Root(), from, maxBytes, func(e mvcc.Event) bool {
		if e.Rev.Main > to {
			return false
		}
		fn(e)
		return true
	})
	return min(next, to+1), err
}

// Previous implements Source.
func (s StoreSource) Previous(events []mvcc.Event, found func(i int, kv []byte)) error {
	v := s.Store.View(s.Root())
	defer v.Release()
	for i, e := range events {
		kv, ok, err := v.ValueAt(e.Prev, e.PrevRef)
		if err != nil {
			return err
		}
		if ok {
			found(i, kv)
		}
	}
	return nil
}
