package mvcc

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

// Range reads the keys of [key, end): one key if end is empty, all from key on
// if end is a single zero byte. The error is ErrFutureRevision, ErrCompacted,
// ErrTooBig, the context's, or the disk's.
func (v *View) Range(ctx context.Context, key, end []byte, o RangeOptions) (RangeResult, error) {
	res, err := v.read(ctx, key, end, &o)
	if err == nil && !o.NoCount {
		v.store.o.Metrics.Ranges.Inc()
	}
	return res, err
}

func (v *View) read(ctx context.Context, key, end []byte, o *RangeOptions) (RangeResult, error) {
	rev, err := v.revision(o.Revision)
	if err != nil {
		return RangeResult{}, err
	}
	if o.Limit > mostKeys {
		o.Limit = 0
	}
	if len(end) == 0 && !o.KeysOnly && !o.CountOnly && !o.filtered() {
		return v.one(ctx, key, v.at(rev), o)
	}
	r := reader{v: v, ctx: ctx, o: *o, index: v.root.index, at: v.at(rev), key: key, end: end}
	if r.at != 0 {
		if ix, ok := v.store.pages.find(rev); ok {
			r.index, r.at = ix, 0
		}
	}
	if o.MemoryOnly && !r.isQuick() {
		return RangeResult{}, ErrNotInMemory
	}
	res, err := r.run()
	if res.More && r.at == 0 && v.published {
		v.store.pages.keep(rev, r.index, v.store.o.Now())
	}
	return res, err
}

// mostKeys is more than any range has: a limit beyond it is none.
const mostKeys = 1 << 40

// one is Range for a single key, of which the whole is asked for.
func (v *View) one(ctx context.Context, key []byte, at int64, o *RangeOptions) (res RangeResult, err error) {
	if err := ctx.Err(); err != nil {
		return res, err
	}
	if o.MemoryOnly && at != 0 {
		return res, ErrNotInMemory
	}
	it, ok := v.root.index.Get(key, at)
	if !ok {
		return res, nil
	}
	if err := o.tooBig(int64(it.Size)); err != nil {
		return res, err
	}
	kv := v.store.values.get(it.Ref)
	if kv == nil {
		kv = v.shadowed[it.Mod]
	}
	switch {
	case kv != nil:
	case o.MemoryOnly:
		return res, ErrNotInMemory
	default:
		if kv, err = v.Value(it); err != nil {
			return res, err
		}
	}
	res.KVs, res.Bytes = [][]byte{kv}, int64(len(kv))
	if !o.NoCount {
		res.Count = 1
	}
	return res, nil
}

// reader runs one Range.
type reader struct {
	v        *View
	ctx      context.Context
	o        RangeOptions
	index    index.Root
	at       int64 // the revision in index, 0 if that is its present
	key, end []byte

	items []index.Item
	// kvs are the values of the first items: all of them in the end, but until
	// the cut only where the order depends on them.
	kvs     [][]byte
	ordered bool // the first items are no longer in key order

	last  *slab // that pinned has counted
	slabs map[*slab]struct{}
	pins  int64 // bytes of those
}

// quickKeys bounds the keys that a read of memory alone looks at.
const quickKeys = 1024

// isQuick says that the read looks at few keys and bytes of the present.
func (r *reader) isQuick() bool {
	if r.at != 0 {
		return false
	}
	if len(r.end) == 0 || r.o.CountOnly {
		return true
	}
	keys, size := r.index.Count(r.key, r.end)
	return keys <= quickKeys && (r.o.MaxBytes == 0 || size <= r.o.MaxBytes)
}

func (r *reader) run() (res RangeResult, err error) {
	if r.o.CountOnly {
		res.Count = r.count()
		return res, r.ctx.Err()
	}
	if err := r.gather(); err != nil {
		return res, err
	}
	switch all := !r.o.filtered() && (r.o.Limit <= 0 || len(r.end) == 0); {
	case r.o.NoCount:
	case all:
		res.Count = int64(len(r.items)) // each of them was gathered
	default:
		res.Count = r.count()
	}
	if err := r.order(); err != nil {
		return res, err
	}
	if limit := r.o.Limit; limit > 0 && int64(len(r.items)) > limit {
		res.More = true
		r.cut(limit)
	}
	if err := r.fill(); err != nil {
		return res, err
	}
	if r.o.KeysOnly && r.o.sortsValues() {
		for i, kv := range r.kvs {
			if r.kvs[i], err = withoutValue(kv); err != nil {
				return res, err
			}
		}
	}
	res.KVs = r.kvs
	for _, kv := range r.kvs {
		res.Bytes += int64(len(kv))
	}
	if !r.o.MemoryOnly {
		res.Pins = max(r.pins, res.Bytes)
	}
	return res, r.o.tooBig(res.Bytes)
}

func (r *reader) count() int64 {
	if r.at == 0 {
		keys, _ := r.index.Count(r.key, r.end)
		return keys
	}
	return r.index.CountAt(r.key, r.end, r.at)
}

// cutInKeyOrder says whether the limit cuts in key order, before any sort: so
// it is also for other targets if no order is asked for.
func (r *reader) cutInKeyOrder() bool {
	return r.o.Order == OrderNone || r.o.Target == TargetKey && r.o.Order == OrderAscend
}

func (o *RangeOptions) filtered() bool { return o.MinMod|o.MaxMod|o.MinCreate|o.MaxCreate != 0 }

func (r *reader) passes(it *index.Item) bool {
	o := &r.o
	return (o.MaxMod == 0 || it.Mod.Main <= o.MaxMod) && (o.MinMod == 0 || it.Mod.Main >= o.MinMod) &&
		(o.MaxCreate == 0 || it.Create <= o.MaxCreate) && (o.MinCreate == 0 || it.Create >= o.MinCreate)
}

const (
	// Beyond so many keys or bytes a sort that ends in a cut forgets on the
	// way what the cut will remove.
	sortKeys  = 4096
	sortBytes = 8 << 20
)

// sortsValues says that the order needs all values, also those of an answer
// without them.
func (o *RangeOptions) sortsValues() bool { return o.Target == TargetValue }

// weight is what MaxBytes bounds of an item: what the answer has of it, or what
// the order needs.
func (o *RangeOptions) weight(it *index.Item) int64 {
	if o.KeysOnly && !o.sortsValues() {
		kv := keyOnly(it)
		return int64(kv.size())
	}
	return int64(it.Size)
}

// gather collects the items that may be part of the answer. What it holds is
// bounded by MaxBytes or by the limit, not by the range; values that an order
// needs are bounded by MaxBytes and sortBytes.
func (r *reader) gather() error {
	var (
		filtered = r.o.filtered()
		limit    = max(r.o.Limit, 0)
		most     int64 // items to gather, 0 for all
		bytes    int64 // that the items weigh
		fresh    int64 // of those gathered since the last cut
		check    = walkCheck{ctx: r.ctx}
		err      error
	)
	if r.cutInKeyOrder() && !filtered && limit > 0 {
		most = limit + 1
	}
	r.items = make([]index.Item, 0, r.expected(most))
	r.index.Ascend(r.key, r.end, r.at, func(it index.Item) bool {
		if check.stop() {
			err = r.ctx.Err()
			return false
		}
		if filtered && !r.passes(&it) {
			return true
		}
		r.items = append(r.items, it)
		n := int64(len(r.items))
		if n == most {
			return false
		}
		weight := r.o.weight(&it)
		bytes, fresh = bytes+weight, fresh+weight
		heavy := r.o.sortsValues() && fresh > sortBytes
		switch {
		case limit == 0 || most > 0:
			err = r.o.tooBig(bytes) // nothing of this will be cut
		case n > 2*limit+sortKeys || heavy && n > limit:
			if err = r.order(); err != nil {
				break
			}
			r.cut(limit + 1)
			if bytes, fresh = 0, 0; r.o.sortsValues() {
				for i := range r.items[:limit] {
					bytes += r.o.weight(&r.items[i])
				}
				err = r.o.tooBig(bytes)
			}
		case heavy: // a sort would cut nothing yet
			fresh, err = 0, r.o.tooBig(bytes)
		}
		return err == nil
	})
	if err != nil {
		return err
	}
	return r.ctx.Err()
}

// expected guesses how many items gather will find, so that the slice seldom
// grows. It never asks for more than the range has.
func (r *reader) expected(most int64) int64 {
	switch {
	case len(r.end) == 0:
		return 1
	case most > 0 && most <= 128:
		return most
	}
	keys, _ := r.index.Count(r.key, r.end)
	if most > 0 {
		return min(most, keys)
	}
	return min(keys, 2*sortKeys)
}

func (o *RangeOptions) tooBig(bytes int64) error {
	if o.MaxBytes > 0 && bytes > o.MaxBytes {
		return fmt.Errorf("range of at least %d bytes, the most is %d; ask for fewer keys with a limit: %w", bytes, o.MaxBytes, ErrTooBig)
	}
	return nil
}

// cut keeps the first n items.
func (r *reader) cut(n int64) {
	n = min(n, int64(len(r.items)))
	clear(r.items[n:])
	r.items = r.items[:n]
	if int64(len(r.kvs)) > n {
		clear(r.kvs[n:])
		r.kvs = r.kvs[:n]
	}
}

// order sorts what was gathered so far. Ties keep key order.
func (r *reader) order() error {
	descend := r.o.Order == OrderDescend
	var by func(a, b *index.Item) int
	switch r.o.Target {
	case TargetVersion:
		by = func(a, b *index.Item) int { return cmp.Compare(a.Version, b.Version) }
	case TargetCreate:
		by = func(a, b *index.Item) int { return cmp.Compare(a.Create, b.Create) }
	case TargetMod:
		by = func(a, b *index.Item) int { return cmp.Compare(a.Mod.Main, b.Mod.Main) }
	case TargetValue:
		return r.orderByValue(descend)
	default:
		if !descend {
			// Filters without an order: only the cut matters.
			return nil
		}
		if !r.ordered {
			r.ordered = true
			slices.Reverse(r.items)
			return nil
		}
		by = func(a, b *index.Item) int { return bytes.Compare(a.Key, b.Key) }
	}
	r.ordered = true
	slices.SortStableFunc(r.items, func(a, b index.Item) int {
		if descend {
			return by(&b, &a)
		}
		return by(&a, &b)
	})
	return nil
}

func (r *reader) orderByValue(descend bool) error {
	if err := r.fill(); err != nil {
		return err
	}
	type row struct {
		value, kv []byte
		item      index.Item
	}
	rows := make([]row, len(r.kvs))
	for i, encoded := range r.kvs {
		kv, err := decodeKeyValue(encoded)
		if err != nil {
			return err
		}
		rows[i] = row{kv.value, encoded, r.items[i]}
	}
	slices.SortStableFunc(rows, func(a, b row) int {
		if descend {
			a, b = b, a
		}
		return bytes.Compare(a.value, b.value)
	})
	for i := range rows {
		r.kvs[i], r.items[i] = rows[i].kv, rows[i].item
	}
	return nil
}

// fill reads the values of those items that have none yet.
func (r *reader) fill() error {
	kvs, err := r.values(r.items[len(r.kvs):])
	if r.kvs == nil {
		r.kvs = kvs
	} else {
		r.kvs = append(r.kvs, kvs...)
	}
	return err
}

// values returns what the answer holds of each item.
func (r *reader) values(items []index.Item) ([][]byte, error) {
	if len(items) == 0 {
		return nil, nil
	}
	out := make([][]byte, len(items))
	if r.o.KeysOnly && !r.o.sortsValues() {
		encodeKeys(out, items)
		return out, nil
	}
	var (
		bytes int64
		cold  []int
	)
	for i := range items {
		if bytes += int64(items[i].Size); r.o.MaxBytes > 0 && bytes > r.o.MaxBytes && !r.o.sortsValues() {
			return nil, r.o.tooBig(bytes)
		}
		var s *slab
		if out[i], s = r.v.store.values.find(items[i].Ref); s != nil && s != r.last && !r.o.MemoryOnly {
			r.pinned(s)
		}
		if out[i] == nil {
			out[i] = r.v.shadowed[items[i].Mod]
			r.pins += int64(items[i].Size)
		}
		if out[i] == nil {
			cold = append(cold, i)
		}
	}
	if r.o.MemoryOnly && len(cold) > 0 {
		return nil, ErrNotInMemory
	}
	return out, r.fetch(items, cold, out)
}

// pinned notes that the answer holds slices of s.
func (r *reader) pinned(s *slab) {
	r.last = s
	if _, known := r.slabs[s]; known {
		return
	}
	if r.slabs == nil {
		r.slabs = map[*slab]struct{}{}
	}
	r.slabs[s] = struct{}{}
	r.pins += int64(len(s.buf))
}

// encodeKeys makes the answer to keys_only: what the index knows, lease 0.
func encodeKeys(out [][]byte, items []index.Item) {
	size := 0
	for i := range items {
		kv := keyOnly(&items[i])
		size += kv.size()
	}
	buf := make([]byte, 0, size)
	for i := range items {
		kv := keyOnly(&items[i])
		start := len(buf)
		buf = kv.append(buf)
		out[i] = buf[start:len(buf):len(buf)]
	}
}

func keyOnly(it *index.Item) keyValue {
	return keyValue{key: it.Key, create: it.Create, mod: it.Mod.Main, version: it.Version}
}

const (
	fetchAlone   = 32 // cold values that one goroutine reads one by one
	fetchWorkers = 4
)

// fetch reads the cold items from disk: few by point reads, many by iterators
// that move forward through the revision log, a few side by side.
func (r *reader) fetch(items []index.Item, cold []int, out [][]byte) error {
	if len(cold) <= fetchAlone {
		for _, i := range cold {
			kv, err := r.v.Value(items[i])
			if err != nil {
				return err
			}
			out[i] = kv
		}
		return nil
	}
	slices.SortFunc(cold, func(a, b int) int { return items[a].Mod.Compare(items[b].Mod) })
	workers := min(fetchWorkers, len(cold)/fetchAlone)
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		part := cold[w*len(cold)/workers : (w+1)*len(cold)/workers]
		wg.Go(func() { errs[w] = r.fetchInOrder(items, part, out) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) fetchInOrder(items []index.Item, cold []int, out [][]byte) (err error) {
	first, last := items[cold[0]].Mod, items[cold[len(cold)-1]].Mod
	lower, upper := storage.RevisionBounds(first.Main, last.Main+1)
	iter, err := r.v.store.storage.Iter(r.ctx, lower, upper)
	if err != nil {
		return fmt.Errorf("mvcc: read revisions %v to %v: %w", first, last, err)
	}
	defer func() {
		if cerr := iter.Close(); err == nil && cerr != nil {
			err = fmt.Errorf("mvcc: read revisions %v to %v: %w", first, last, cerr)
		}
	}()
	check := walkCheck{ctx: r.ctx}
	var diskKey [32]byte
	for _, i := range cold {
		if check.stop() {
			return r.ctx.Err()
		}
		rev := items[i].Mod
		want := storage.AppendRevisionKey(diskKey[:0], rev.Main, rev.Sub)
		if !iter.SeekGE(want) || !bytes.Equal(iter.Key(), want) {
			if err := iter.Error(); err != nil {
				return fmt.Errorf("mvcc: read revision %v: %w", rev, err)
			}
			return r.v.store.missing(rev, r.v.root)
		}
		value, err := iter.ValueAndErr()
		if err != nil {
			return fmt.Errorf("mvcc: read revision %v: %w", rev, err)
		}
		if out[i], err = recordOf(rev, bytes.Clone(value)); err != nil {
			return err
		}
		r.v.store.promote(items[i], out[i])
	}
	return nil
}
