package mvcc

import (
	"fmt"
	"slices"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

// Writer makes the changes of one apply batch. Use it in this order:
//
//	w := s.NewWriter(batch)
//	w.Begin(); w.Put...; w.DeleteRange...; w.End()    // any number of times
//	w.Compact(rev)                                    // any number of times, not between Begin and End
//	w.Seal(index, term)
//	storage.Commit(batch)
//	w.Committed(); publish w.Root(); deliver w.Events()
//
// What it writes is in the store's index at once, so a Writer cannot be given
// up: if it does not come to Committed, the store's owner stops, with Abandon and
// without CompactStep or Close.
type Writer struct {
	s *Store
	b *storage.Batch

	first               int64 // revision before the batch
	revision, compacted int64
	usageBytes          int64
	epoch               *epoch
	jobs                []*compactJob
	events              []Event
	lazy                []*View // read the open batch without having frozen the index
	// shadowed has the records of this batch that it superseded itself: until
	// the commit they are neither on disk nor named by a ref of the index.
	shadowed    map[Revision][]byte
	sealed      bool
	index, term uint64
	root        Root // after Seal

	// The open transaction.
	open                   bool
	main, changes          int64
	superseded, tombstones int64 // bytes

	// held is the newest record. It goes into the batch when the next one
	// comes, or in Seal with the applied mark.
	held    heldRecord
	records int
	bytes   int64
	arena   []byte // for encodings of deletes
}

type heldRecord struct {
	rev    Revision
	record storage.RevisionRecord
}

// NewWriter begins a batch whose changes go into b.
func (s *Store) NewWriter(b *storage.Batch) *Writer {
	return &Writer{
		s: s, b: b,
		first: s.root.revision, revision: s.root.revision, compacted: s.root.compacted, usageBytes: s.root.usageBytes, epoch: s.root.epoch,
		events: make([]Event, 0, s.lastBatchSize),
	}
}

// Revision is the newest revision, that of the open transaction included once
// it has changed something.
func (w *Writer) Revision() int64 {
	if w.changes > 0 {
		return w.main
	}
	return w.revision
}

// CompactRevision is the compact revision, -1 for none.
func (w *Writer) CompactRevision() int64 { return w.compacted }

// UsageBytes is what Root.UsageBytes would be now.
func (w *Writer) UsageBytes() int64 { return w.usageBytes }

// Begin opens a transaction: all changes till End have the next main revision.
func (w *Writer) Begin() {
	if w.open || w.sealed {
		broken("transaction begun in an open one or after Seal, at revision %d", w.revision)
	}
	w.open = true
	w.main = w.revision + 1
}

// Changes is the number of changes in the open transaction.
func (w *Writer) Changes() int64 { return w.changes }

// End closes the transaction and returns the revision, which is a new one iff
// the transaction changed something.
func (w *Writer) End() int64 {
	if w.changes > 0 {
		w.revision = w.main
		w.s.usage.end(w.main, w.superseded, w.tombstones)
	}
	w.open, w.changes, w.superseded, w.tombstones = false, 0, 0, 0
	return w.revision
}

// Put writes key and returns what it replaced. Key and value are copied.
func (w *Writer) Put(key, value []byte, lease int64) (prev index.Item, existed bool) {
	rev := w.change()
	place, prev, existed := w.s.tree.Find(key)
	kv := keyValue{key: key, value: value, create: rev.Main, mod: rev.Main, version: 1, lease: lease}
	if existed {
		kv.create, kv.version = prev.Create, prev.Version+1
	}
	n := kv.size()
	buf, ref := w.s.values.add(n)
	encoded := kv.append(buf[:0])
	w.s.tree.PutAt(place, key, rev, lease, uint32(n), ref)
	if existed {
		w.supersede(&prev)
	}
	w.hold(rev, encoded, false)
	w.usageBytes += int64(n)
	e := Event{Rev: rev, Key: keyOf(encoded), KV: encoded, Create: !existed}
	if existed {
		w.setPrev(&e, &prev)
	}
	w.events = append(w.events, e)
	return prev, existed
}

// change counts a change and says at which revision it happens.
func (w *Writer) change() Revision {
	if !w.open {
		broken("change outside of a transaction at revision %d", w.revision)
	}
	w.freeze()
	rev := Revision{Main: w.main, Sub: w.changes}
	w.changes++
	return rev
}

// supersede accounts for a record that is no longer live.
func (w *Writer) supersede(prev *index.Item) {
	w.superseded += int64(prev.Size)
	if prev.Mod.Main > w.first {
		if w.shadowed == nil {
			w.shadowed = map[Revision][]byte{}
		}
		w.shadowed[prev.Mod] = w.s.values.get(prev.Ref)
	}
	w.s.values.dead(prev.Ref, prev.Size)
}

// setPrev fills in what e replaced, from before its transaction.
func (w *Writer) setPrev(e *Event, prev *index.Item) {
	if prev.Mod.Main == e.Rev.Main {
		before, ok := w.s.tree.Now().Get(e.Key, e.Rev.Main-1)
		if !ok {
			return
		}
		prev = &before
	}
	if e.Rev.Main-1 >= w.compacted {
		e.Prev, e.PrevRef = prev.Mod, prev.Ref
	}
}

// DeleteRange deletes the live keys of [key, end), a range as in View.Range,
// in ascending order, calls each (if not nil) for what they were, and returns
// how many there were.
func (w *Writer) DeleteRange(key, end []byte, each func(prev index.Item)) (deleted int64) {
	if len(end) == 0 {
		prev, ok := w.s.tree.Now().Get(key, 0)
		if !ok {
			return 0
		}
		w.delete(&prev)
		if each != nil {
			each(prev)
		}
		return 1
	}
	keys, _ := w.s.tree.Now().Count(key, end)
	if keys == 0 {
		return 0
	}
	w.freeze()
	w.events = slices.Grow(w.events, int(keys))
	// The walk needs a tree that does not change under it.
	w.s.tree.Root().Ascend(key, end, 0, func(prev index.Item) bool {
		w.delete(&prev)
		if each != nil {
			each(prev)
		}
		deleted++
		return true
	})
	return deleted
}

// delete writes the tombstone of a live key.
func (w *Writer) delete(prev *index.Item) {
	rev := w.change()
	// The event is key and mod_revision, the record the key alone: its head.
	recordSize := bytesFieldSize(len(prev.Key))
	n := recordSize + intFieldSize(rev.Main)
	if cap(w.arena)-len(w.arena) < n {
		w.arena = make([]byte, 0, max(n, min(64<<10, 2*cap(w.arena)+512)))
	}
	start := len(w.arena)
	w.arena = appendBytesField(w.arena, tagKey, prev.Key)
	w.arena = appendIntField(w.arena, tagMod, rev.Main)
	encoded := w.arena[start:len(w.arena):len(w.arena)]
	w.s.tree.Delete(prev.Key, rev, uint32(recordSize))
	w.supersede(prev)
	w.tombstones += int64(recordSize)
	w.usageBytes += int64(recordSize)
	w.hold(rev, encoded[:recordSize], true)
	e := Event{Rev: rev, Key: keyOf(encoded), KV: encoded, Delete: true}
	w.setPrev(&e, prev)
	w.events = append(w.events, e)
}

// hold makes kv the newest record and sends the one before into the batch.
func (w *Writer) hold(rev Revision, kv []byte, tombstone bool) {
	w.flushHeld()
	w.held = heldRecord{rev, storage.RevisionRecord{KV: kv, Tombstone: tombstone}}
	w.records++
	w.bytes += int64(len(kv))
}

func (w *Writer) flushHeld() {
	if w.held.rev.Main != 0 {
		w.b.SetRevision(w.held.rev.Main, w.held.rev.Sub, w.held.record)
	}
}

// Compact makes rev the compact revision. Reads below it fail from then on;
// records are deleted by CompactStep. The error is ErrCompacted or
// ErrFutureRevision.
func (w *Writer) Compact(rev int64) error {
	if w.open {
		broken("compaction at %d inside of a transaction", rev)
	}
	if rev <= w.compacted {
		return fmt.Errorf("compact at revision %d, compacted at %d: %w", rev, w.compacted, ErrCompacted)
	}
	if rev > w.revision {
		return fmt.Errorf("compact at revision %d, the store is at %d: %w", rev, w.revision, ErrFutureRevision)
	}
	w.freeze()
	s := w.s
	hash := s.scheduled == s.finished
	job := s.newJob(rev, w.compacted)
	job.hash, job.older = hash, w.epoch
	w.jobs = append(w.jobs, job)
	w.compacted, w.epoch = rev, &epoch{}
	w.usageBytes -= s.usage.compact(rev)
	setRevisionRow(w.b, storage.MetaScheduledCompact, rev)
	return nil
}

// Item looks a live key up, as of now.
func (w *Writer) Item(key []byte) (index.Item, bool) { return w.s.tree.Now().Get(key, 0) }

// Items visits the live keys of a range in order, as of now, until fn returns
// false. fn must not write.
func (w *Writer) Items(key, end []byte, fn func(index.Item) bool) {
	w.s.tree.Now().Ascend(key, end, 0, fn)
}

// Value returns the encoded KeyValue of a live item.
func (w *Writer) Value(it index.Item) ([]byte, error) {
	v := View{store: w.s, root: w.rootNow(w.s.tree.Now()), shadowed: w.shadowed}
	return v.Value(it)
}

// Values is View.Values of live items.
func (w *Writer) Values(items []index.Item) ([][]byte, error) {
	v := View{store: w.s, root: w.rootNow(w.s.tree.Now()), shadowed: w.shadowed}
	return v.Values(items)
}

// View reads the store as it is now, inside the batch and even inside a
// transaction. Until the next change it costs nothing; if it is still held
// then, it keeps its moment. Only the applier may use it before the batch is
// committed and its Root published; after that, anyone.
func (w *Writer) View() *View {
	w.epoch.views.Add(1)
	v := &View{store: w.s, root: w.rootNow(w.s.tree.Now()), shadowed: w.shadowed}
	if !w.sealed {
		v.writer = w
		w.lazy = append(w.lazy, v)
	}
	return v
}

func (w *Writer) rootNow(ix index.Root) Root {
	return Root{index: ix, revision: w.Revision(), compacted: w.compacted, usageBytes: w.usageBytes, epoch: w.epoch}
}

// freeze gives the views of this moment an index of their own, before a change.
func (w *Writer) freeze() {
	if len(w.lazy) == 0 {
		return
	}
	ix := w.s.tree.Root()
	for i, v := range w.lazy {
		v.root.index, v.writer = ix, nil
		w.lazy[i] = nil
	}
	w.lazy = w.lazy[:0]
}

// forget drops a view that is released before the next change.
func (w *Writer) forget(v *View) {
	if i := slices.Index(w.lazy, v); i >= 0 {
		w.lazy = slices.Delete(w.lazy, i, i+1)
	}
	v.writer = nil
}

// Seal ends the batch: it puts the applied mark of the last entry into it.
//
// The mark travels in the last record, since a second row far away would cost
// as much as the record. It goes to a row of its own if there is no record, or
// if a compaction in the batch may delete the record.
func (w *Writer) Seal(applied, term uint64) {
	if w.open || w.sealed {
		broken("seal at index %d in an open transaction or for the second time", applied)
	}
	w.freeze()
	w.sealed = true
	w.index, w.term = applied, term
	w.held.record.Applied, w.held.record.Term = applied, term
	w.flushHeld()
	w.root = w.rootNow(w.s.tree.Root())
	if w.records == 0 || len(w.jobs) > 0 {
		w.b.Set(storage.RowKey(storage.TableMeta, []byte(storage.MetaApplied)), storage.AppendApplied(nil, applied, term))
	}
}

// Events returns the changes of the batch in revision order, after Seal.
func (w *Writer) Events() []Event { return w.events }

// Root is the moment after the batch, after Seal. It must be published only
// after Committed, and is best taken then.
func (w *Writer) Root() Root { return w.root }

// Committed tells the store that the batch is in Pebble. It must be called
// once, after Seal and before anything of the batch is published.
func (w *Writer) Committed() {
	s := w.s
	s.index, s.term = w.index, w.term
	s.lastBatchSize = min(len(w.events), 4096)
	for _, job := range w.jobs {
		s.epochs = append(s.epochs, job.older)
		s.jobs = append(s.jobs, job)
	}
	// Values of the batch are on disk now, so slabs may be given up. The work
	// is bounded by what the batch wrote.
	moves := 32 + 2*w.records
	s.takePromotions(moves)
	s.trim(moves)
	w.root = w.rootNow(s.tree.Root())
	s.root = w.root
	s.pages.expire(s.o.Now())
	s.saver.wrote(w.bytes)
}
