package mvcc

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

// epoch is the time between two compactions. Physical deletion for the
// compaction that ended it waits for its views.
type epoch struct{ views atomic.Int64 }

// View reads the store at a pinned moment. Any number of goroutines may use
// it. Release ends it, and must be called.
type View struct {
	store *Store
	root  Root
	// writer is set while the view reads the open batch without having frozen
	// its index: only the applier can hold such a view.
	writer *Writer
	// published says that the moment is one that Root gave, between batches.
	published bool
	// shadowed is the batch's, if the view was made inside of it. Once anyone
	// but the applier can have the view it does not change.
	shadowed map[Revision][]byte
}

// View pins r. If Stale then says true and there is a newer Root, the caller
// should release the view and pin that one instead.
func (s *Store) View(r Root) *View {
	r.epoch.views.Add(1)
	return &View{store: s, root: r, published: true}
}

// Stale says that a compaction newer than the view may have begun to delete
// before the view was pinned, so that it may answer ErrCompacted.
func (v *View) Stale() bool { return v.root.compacted < v.store.announced.Load() }

// Release ends the view.
func (v *View) Release() {
	if v.writer != nil {
		v.writer.forget(v)
	}
	v.root.epoch.views.Add(-1)
}

// Revision is the newest revision that the view sees.
func (v *View) Revision() int64 { return v.root.revision }

// CompactRevision is the compact revision at the view's moment, -1 for none.
func (v *View) CompactRevision() int64 { return v.root.compacted }

// Root is the moment that the view pins.
func (v *View) Root() Root { return v.root }

// revision resolves the revision of a request: the one to read at.
func (v *View) revision(asked int64) (int64, error) {
	switch {
	case asked <= 0:
		return v.root.revision, nil
	case asked > v.root.revision:
		return 0, fmt.Errorf("read at revision %d, the store is at %d: %w", asked, v.root.revision, ErrFutureRevision)
	case asked < v.root.compacted:
		return 0, fmt.Errorf("read at revision %d, compacted at %d: %w", asked, v.root.compacted, ErrCompacted)
	}
	return asked, nil
}

// at turns a resolved revision into what the index wants: 0 for the present.
func (v *View) at(rev int64) int64 {
	if rev == v.root.revision {
		return 0
	}
	return rev
}

// Get reads one key at a revision (<= 0: the view's). kv is its encoded
// KeyValue. ok is false if the key was not live then.
func (v *View) Get(key []byte, rev int64) (kv []byte, item index.Item, ok bool, err error) {
	rev, err = v.revision(rev)
	if err != nil {
		return nil, index.Item{}, false, err
	}
	item, ok = v.root.index.Get(key, v.at(rev))
	if !ok {
		return nil, index.Item{}, false, nil
	}
	kv, err = v.Value(item)
	return kv, item, err == nil, err
}

// Item looks a live key up in the index alone.
func (v *View) Item(key []byte) (index.Item, bool) { return v.root.index.Get(key, 0) }

// Items visits the live keys of a range in order, in the index alone, until fn
// returns false.
func (v *View) Items(key, end []byte, fn func(index.Item) bool) {
	v.root.index.Ascend(key, end, 0, fn)
}

// Count returns how many live keys a range has, and the bytes of their encoded
// KeyValues. It is O(log n).
func (v *View) Count(key, end []byte) (keys, bytes int64) {
	return v.root.index.Count(key, end)
}

// Value returns the encoded KeyValue of an item of this view.
func (v *View) Value(it index.Item) ([]byte, error) {
	if kv := v.store.values.get(it.Ref); kv != nil {
		return kv, nil
	}
	if kv, ok := v.shadowed[it.Mod]; ok {
		return kv, nil
	}
	kv, err := v.fromDisk(it.Mod)
	if errors.Is(err, storage.ErrNotFound) {
		err = v.store.missing(it.Mod, v.root)
	}
	if err != nil {
		return nil, err
	}
	v.store.promote(it, kv)
	return kv, nil
}

// Values is Value of each item, read as a Range reads them: many that are on disk
// in the order of the log, a few side by side.
func (v *View) Values(items []index.Item) ([][]byte, error) {
	r := reader{v: v, ctx: context.Background()}
	return r.values(items)
}

// ValueAt returns the encoded KeyValue written at rev, from memory if ref still
// leads there. ok is false if rev is zero or the record was compacted away,
// which is no error here: watchers then go without prev_kv.
func (v *View) ValueAt(rev Revision, ref index.ValueRef) (kv []byte, ok bool, err error) {
	if rev.Main == 0 {
		return nil, false, nil
	}
	if kv := v.store.values.get(ref); kv != nil {
		return kv, true, nil
	}
	if kv, ok := v.shadowed[rev]; ok {
		return kv, true, nil
	}
	kv, err = v.fromDisk(rev)
	if errors.Is(err, storage.ErrNotFound) {
		if deleted := v.store.deleting.Load(); rev.Main > deleted {
			broken("record %v is missing, deletion reached %d", rev, deleted)
		}
		return nil, false, nil
	}
	return kv, err == nil, err
}

func (v *View) fromDisk(rev Revision) ([]byte, error) {
	value, err := v.store.storage.Get(storage.AppendRevisionKey(make([]byte, 0, 32), rev.Main, rev.Sub))
	if err != nil {
		return nil, fmt.Errorf("mvcc: read revision %v: %w", rev, err)
	}
	return recordOf(rev, value)
}

func recordOf(rev Revision, value []byte) ([]byte, error) {
	r, err := storage.ParseRevisionValue(value)
	if err != nil {
		return nil, fmt.Errorf("mvcc: read revision %v: %w", rev, err)
	}
	return r.KV, nil
}

// missing tells what it means that the record of rev, which the index of r
// names, is not on disk.
func (s *Store) missing(rev Revision, r Root) error {
	deleted := s.deleting.Load()
	if rev.Main > deleted || r.compacted >= deleted {
		broken("record %v is missing, deletion reached %d, the view was compacted at %d and is at %d",
			rev, deleted, r.compacted, r.revision)
	}
	return fmt.Errorf("record %v was deleted by the compaction at %d, after this read began: %w", rev, deleted, ErrCompacted)
}

// InMemory says whether a Range over the present could be answered from memory
// with at most maxBytes of KeyValues, so that it may be answered inline.
func (v *View) InMemory(key, end []byte, maxBytes int64) bool {
	const maxKeys = 1024
	if len(end) > 0 {
		if keys, bytes := v.root.index.Count(key, end); keys > maxKeys || bytes > maxBytes {
			return false
		}
	}
	in := true
	v.root.index.Ascend(key, end, 0, func(it index.Item) bool {
		maxBytes -= int64(it.Size)
		in = maxBytes >= 0 && v.store.values.has(it.Ref)
		return in
	})
	return in
}

// checkEvery is after how many keys a long walk looks at its context.
const checkEvery = 1024

// walkCheck counts the steps of a walk and says when its context is done.
type walkCheck struct {
	ctx   context.Context
	steps int
}

func (w *walkCheck) stop() bool {
	w.steps++
	return w.steps%checkEvery == 0 && w.ctx.Err() != nil
}
