package mvcc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/engram-kv/engram/internal/mvcc/index"
)

// A sort with a limit that forgets on the way answers as one that does not.
func TestLongSortWithLimit(t *testing.T) {
	f := newFixture(t, nil)
	rnd := rand.New(rand.NewPCG(3, 4))
	const keys = 2*sortKeys + 777
	for _, round := range []int{keys, keys / 3} {
		f.apply(func(w *Writer) {
			for range round {
				w.Begin()
				w.Put(fmt.Appendf(nil, "k%05d", rnd.IntN(keys)), fmt.Appendf(nil, "%d", rnd.IntN(500)), 0)
				w.End()
			}
		})
	}
	f.reopen() // most values are on disk now
	v := f.View(f.Root())
	defer v.Release()
	for target := TargetKey; target <= TargetValue; target++ {
		for order := OrderAscend; order <= OrderDescend; order++ {
			for _, keysOnly := range []bool{false, true}[:1+order%2] {
				o := RangeOptions{Target: target, Order: order, KeysOnly: keysOnly, MinMod: 100}
				all, err := v.Range(context.Background(), []byte("k"), []byte("l"), o)
				f.check(err)
				o.Limit = 50
				got, err := v.Range(context.Background(), []byte("k"), []byte("l"), o)
				f.check(err)
				// A filter turns the cut in key order off.
				if !got.More || got.Count != all.Count || !slices.EqualFunc(got.KVs, all.KVs[:50], bytes.Equal) {
					t.Errorf("target %d order %d keys only %v: other answer with a limit", target, order, keysOnly)
				}
			}
		}
	}
	// A limit beyond all keys cuts nothing, however large it is.
	for _, o := range []RangeOptions{
		{},
		{KeysOnly: true},
		{MinMod: 100},
		{Order: OrderDescend},
		{Target: TargetMod, Order: OrderAscend},
		{Target: TargetVersion, Order: OrderDescend, Revision: keys},
		{Target: TargetValue, Order: OrderAscend},
	} {
		all, err := v.Range(context.Background(), []byte("k"), []byte("l"), o)
		f.check(err)
		for _, o.Limit = range []int64{keys, 1 << 62, math.MaxInt64} {
			got, err := v.Range(context.Background(), []byte("k"), []byte("l"), o)
			f.check(err)
			if got.More || got.Count != all.Count || !slices.EqualFunc(got.KVs, all.KVs, bytes.Equal) {
				t.Errorf("%+v: %d keys of %d, more %v; without a limit %d of %d", o, len(got.KVs), got.Count, got.More, len(all.KVs), all.Count)
			}
		}
	}
}

// A read that will be too big stops early, whatever its options.
func TestTooBig(t *testing.T) {
	f := newFixture(t, nil)
	for i := range 3000 {
		f.put(fmt.Sprintf("k%04d", i), "0123456789")
	}
	v := f.View(f.Root())
	defer v.Release()
	for _, o := range []RangeOptions{
		{},
		{KeysOnly: true},
		{Limit: 1000},
		{MinMod: 2},
		{Order: OrderDescend},
		{Order: OrderDescend, Limit: 1000},
		{Order: OrderAscend, Target: TargetValue},
		{Order: OrderAscend, Target: TargetValue, KeysOnly: true},
		{Revision: 2900},
	} {
		o.MaxBytes = 9000
		if res, err := v.Range(context.Background(), []byte("k"), []byte("l"), o); !errors.Is(err, ErrTooBig) {
			t.Errorf("%+v: %d bytes, %v", o, res.Bytes, err)
		}
		whole := o
		whole.MaxBytes = 0
		if o.Target == TargetValue {
			whole.KeysOnly = false // the sort takes the values
		}
		res, err := v.Range(context.Background(), []byte("k"), []byte("l"), whole)
		f.check(err)
		o.MaxBytes = res.Bytes
		if again, err := v.Range(context.Background(), []byte("k"), []byte("l"), o); err != nil || len(again.KVs) != len(res.KVs) {
			t.Errorf("%+v: exactly %d bytes are allowed, %v", o, res.Bytes, err)
		}
	}
}

// A sort by value holds values, also of keys that its answer will not have or
// will have alone: these count.
func TestTooBigToSort(t *testing.T) {
	f := newFixture(t, nil)
	const (
		keys, value = 40, 1 << 20
		most        = 16 * value
	)
	for i := range keys {
		f.put(fmt.Sprintf("k%02d", i), fmt.Sprintf("%02d", i*37%keys)+strings.Repeat("v", value))
	}
	v := f.view()
	for _, o := range []RangeOptions{
		{KeysOnly: true},
		{KeysOnly: true, Limit: keys - 1},
		{KeysOnly: true, Limit: keys / 2},
		{Limit: keys - 1},
		{Limit: 10},
		{Limit: 10, KeysOnly: true},
	} {
		o.Target, o.Order, o.MaxBytes = TargetValue, OrderDescend, most
		r := reader{v: v, ctx: t.Context(), o: o, index: v.root.index, key: []byte("k"), end: []byte("l")}
		err := r.gather()
		if big := o.Limit != 10; errors.Is(err, ErrTooBig) != big {
			t.Errorf("%+v: gathered with error %v", o, err)
		}
		var held int64
		for _, kv := range r.kvs {
			held += int64(len(kv))
		}
		if held > most+sortBytes+2*value {
			t.Errorf("%+v: %d bytes of values are held", o, held)
		}
		res, err := v.Range(t.Context(), []byte("k"), []byte("l"), o)
		if o.Limit != 10 {
			if !errors.Is(err, ErrTooBig) {
				t.Errorf("%+v: %d keys, %v", o, len(res.KVs), err)
			}
			continue
		}
		f.check(err)
		for i, kv := range res.KVs {
			if got, want := string(keyOf(kv)), fmt.Sprintf("k%02d", (keys-1-i)*13%keys); got != want {
				t.Errorf("%+v: key %d is %s, not %s", o, i, got, want) // 13 undoes 37
			}
		}
	}
}

func TestRangeStopsWithContext(t *testing.T) {
	f := newFixture(t, nil)
	for i := range 2 * checkEvery {
		f.put(fmt.Sprintf("k%04d", i), "v")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	v := f.View(f.Root())
	defer v.Release()
	for _, o := range []RangeOptions{{}, {CountOnly: true}, {Limit: 1}} {
		if _, err := v.Range(ctx, []byte("k"), []byte("l"), o); !errors.Is(err, context.Canceled) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if _, err := f.HashKV(ctx, f.Root(), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("hash: %v", err)
	}
	if _, err := f.History(ctx, f.Root(), 1, 1<<20, func(Event) bool { return true }); !errors.Is(err, context.Canceled) {
		t.Errorf("history: %v", err)
	}
}

// Chunks of a stream, read from one view while writes go on, are together what
// one range answers.
func TestChunks(t *testing.T) {
	f := newFixture(t, nil)
	for i := range 500 {
		f.put(fmt.Sprintf("k%04d", i), fmt.Sprint(i))
	}
	v := f.View(f.Root())
	defer v.Release()
	want, err := v.Range(context.Background(), []byte("k"), []byte{0}, RangeOptions{})
	f.check(err)
	var got [][]byte
	from := []byte("k")
	for chunk := 0; ; chunk++ {
		f.put(fmt.Sprintf("k%04d", 499-chunk), "changed", fmt.Sprintf("k%04da", chunk*7), "new")
		f.del(fmt.Sprintf("k%04d", 250+chunk))
		res, err := v.Range(context.Background(), from, []byte{0}, RangeOptions{Limit: int64(10 << chunk), NoCount: chunk > 0})
		f.check(err)
		if wantCount := int64(500); chunk == 0 && res.Count != wantCount || chunk > 0 && res.Count != 0 {
			t.Errorf("chunk %d has count %d", chunk, res.Count)
		}
		got = append(got, res.KVs...)
		if !res.More {
			break
		}
		from = append(bytes.Clone(keyOf(got[len(got)-1])), 0)
	}
	if !slices.EqualFunc(got, want.KVs, bytes.Equal) {
		t.Errorf("chunks have %d keys, the range %d", len(got), len(want.KVs))
	}
}

// A write that was made in a batch and superseded in it is found by reads from
// inside the batch and, from the same view, afterwards.
func TestShadowedWrites(t *testing.T) {
	f := newFixture(t, smallOptions)
	var views []*View
	w := f.apply(func(w *Writer) {
		for i := range 20 {
			w.Begin()
			w.Put([]byte("a"), fmt.Appendf(nil, "%d", i), 0)
			if i%5 == 4 {
				w.DeleteRange([]byte("a"), nil, nil)
			}
			w.End()
			views = append(views, w.View())
		}
	})
	check := func(when string) {
		t.Helper()
		for i, v := range views {
			for rev := int64(2); rev <= v.Revision(); rev++ {
				kv, _, ok, err := v.Get([]byte("a"), rev)
				f.check(err)
				n := rev - 2
				if deleted := n%5 == 4; ok == deleted || ok && string(ValueOf(kv)) != fmt.Sprint(n) {
					t.Fatalf("%s: view %d at %d: %q", when, i, rev, ValueOf(kv))
				}
			}
		}
	}
	check("after the commit")
	for _, e := range w.Events() {
		if kv, ok, err := views[0].ValueAt(e.Prev, e.PrevRef); e.Prev.Main != 0 && (!ok || err != nil || len(kv) == 0) {
			t.Errorf("%v: what was before is gone: %v %v", e.Rev, ok, err)
		}
	}
	for range 50 {
		f.put("b", "a value that pushes others out of memory")
	}
	check("after memory was trimmed")
	for _, v := range views {
		v.Release()
	}
}

// One transaction that deletes very many keys.
func TestDeleteManyKeys(t *testing.T) {
	f := newFixture(t, nil)
	const keys = 50_000
	f.apply(func(w *Writer) {
		w.Begin()
		for i := range keys {
			w.Put(fmt.Appendf(nil, "k%06d", i), []byte("v"), 0)
		}
		w.End()
	})
	w := f.apply(func(w *Writer) {
		w.Begin()
		before := 0
		n := w.DeleteRange([]byte("k"), []byte{0}, func(index.Item) { before++ })
		if n != keys || before != keys {
			t.Errorf("deleted %d, told of %d", n, before)
		}
		w.End()
	})
	if r := w.Root(); r.Keys() != 0 || r.Revision() != 3 || len(w.Events()) != keys {
		t.Errorf("%d keys left at revision %d, %d events", r.Keys(), r.Revision(), len(w.Events()))
	}
	f.reopen()
	if r := f.Root(); r.Keys() != 0 || r.Revision() != 3 {
		t.Errorf("after a restart %d keys at revision %d", r.Keys(), r.Revision())
	}
}

// TestRangePins: an answer tells what memory its values keep from being freed,
// which is whole slabs, each counted once.
func TestRangePins(t *testing.T) {
	const slabBytes, value = 4096, 400
	f := newFixture(t, func(o *Options) { o.slabBytes = slabBytes })
	for i := range 100 { // neighbours in the order of keys are not in that of slabs
		f.put(fmt.Sprintf("k%02d", i*37%100), strings.Repeat("v", value))
	}
	v := f.view()
	defer v.Release()
	slabs := int64(len(f.values.slabs))
	for _, c := range []struct {
		options    RangeOptions
		least, pin int64
	}{
		{RangeOptions{}, 10 * slabBytes, slabs * slabBytes},
		{RangeOptions{Limit: 2}, slabBytes, 2 * slabBytes},
		{RangeOptions{MemoryOnly: true}, 0, 0},
	} {
		res, err := v.Range(t.Context(), []byte("k"), []byte("l"), c.options)
		if err != nil {
			t.Fatal(err)
		}
		if res.Pins < c.least || res.Pins > c.pin || res.Pins > 0 && res.Pins < res.Bytes {
			t.Errorf("%+v: %d bytes of values pin %d, not %d to %d", c.options, res.Bytes, res.Pins, c.least, c.pin)
		}
	}
}
