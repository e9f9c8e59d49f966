package mvcc

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// op is one entry of the caller's log: a transaction, or a compaction.
type op struct {
	writes  []write
	compact int64 // if there are no writes
}

type write struct {
	key, end, value []byte // a delete if value is nil
	lease           int64
}

func randomKey(rnd *rand.Rand) []byte {
	k := []byte{byte('a' + rnd.IntN(4))}
	for range rnd.IntN(3) {
		k = append(k, byte('a'+rnd.IntN(3)))
	}
	return k
}

func randomRange(rnd *rand.Rand) (key, end []byte) {
	key = randomKey(rnd)
	switch rnd.IntN(4) {
	case 0:
		end = randomKey(rnd)
	case 1:
		end = []byte{0}
	case 2:
		end = append(slices.Clone(key[:len(key)-1]), key[len(key)-1]+1)
	}
	return key, end
}

func randomOp(rnd *rand.Rand, revision, compacted int64) op {
	if rnd.IntN(12) == 0 {
		// Below, within and above what is allowed.
		return op{compact: compacted - 1 + rnd.Int64N(revision-compacted+4)}
	}
	var o op
	touched := map[string]bool{}
	for range 1 + rnd.IntN(4) {
		w := write{key: randomKey(rnd)}
		switch rnd.IntN(5) {
		case 0:
			w.key, w.end = randomRange(rnd)
		default:
			w.value = bytes.Repeat([]byte{byte('0' + rnd.IntN(10))}, rnd.IntN(200))
			w.lease = rnd.Int64N(3)
			if rnd.IntN(50) == 0 {
				w.value = bytes.Repeat(w.value, 20)
			}
		}
		// As the API has it: no key is put twice, or put and deleted, in one
		// transaction.
		if w.value != nil && touched[string(w.key)] {
			continue
		}
		overlaps := false
		for k := range touched {
			overlaps = overlaps || w.value == nil && inRange([]byte(k), w.key, w.end)
		}
		for _, d := range o.writes {
			overlaps = overlaps || d.value == nil && w.value != nil && inRange(w.key, d.key, d.end)
		}
		if overlaps {
			continue
		}
		if w.value != nil {
			touched[string(w.key)] = true
		}
		o.writes = append(o.writes, w)
	}
	return o
}

func (m *model) apply(o op) error {
	if len(o.writes) == 0 {
		return m.compact(o.compact)
	}
	var changes int64
	for _, w := range o.writes {
		if w.value == nil {
			changes += m.delete(m.revision+1, changes, w.key, w.end)
			continue
		}
		m.put(Revision{Main: m.revision + 1, Sub: changes}, w.key, w.value, w.lease)
		changes++
	}
	if changes > 0 {
		m.revision++
	}
	return nil
}

func (o op) applyTo(w *Writer) error {
	if len(o.writes) == 0 {
		return w.Compact(o.compact)
	}
	w.Begin()
	for _, x := range o.writes {
		if x.value == nil {
			w.DeleteRange(x.key, x.end, nil)
			continue
		}
		w.Put(x.key, x.value, x.lease)
	}
	w.End()
	return nil
}

// differential drives a store and models side by side.
type differential struct {
	*fixture
	rnd    *rand.Rand
	log    []op     // every op ever applied, by index - 1
	models []*model // models[i] is the state after i ops
	views  []pinnedView
	// compactions has what each would cache as its hash.
	compactions map[int64]HashResult
	seen        map[string]int
}

type pinnedView struct {
	*View
	model *model
}

func smallOptions(o *Options) {
	o.CompactionBatch = 3
	o.slabBytes = 1 << 10
	o.ValueBudgetBytes = 4 << 10
	o.CheckpointBytes = 2 << 10
	o.CheckpointInterval = time.Nanosecond
}

func newDifferential(t *testing.T, seed uint64) *differential {
	d := &differential{rnd: rand.New(rand.NewPCG(seed, 7)), models: []*model{newModel()}, compactions: map[int64]HashResult{}, seen: map[string]int{}}
	d.fixture = newFixture(t, smallOptions)
	d.check(d.storage.Abandon())
	d.mem = 64 << 10
	d.fs = vfs.NewCrashableMem()
	d.open()
	return d
}

func (d *differential) model() *model { return d.models[d.index] }

// batch applies some new ops in one batch.
func (d *differential) batch() {
	n := 1 + d.rnd.IntN(5)
	var want []Event
	from := d.model().revision + 1
	compacts := false
	w := d.apply(func(w *Writer) {
		for range n {
			m := d.models[len(d.models)-1].clone()
			o := randomOp(d.rnd, m.revision, m.compacted)
			before := len(m.records)
			wantErr := m.apply(o)
			if gotErr := o.applyTo(w); !errors.Is(gotErr, wantErr) {
				d.t.Fatalf("op %+v: got error %v, want %v", o, gotErr, wantErr)
			}
			compacts = compacts || len(o.writes) == 0
			if len(o.writes) > 0 && len(m.records) > before {
				d.seen["changing txn"]++
			}
			if len(o.writes) == 0 && wantErr == nil {
				d.compactions[o.compact] = m.compaction
			}
			d.log, d.models = append(d.log, o), append(d.models, m)
			if d.rnd.IntN(4) == 0 {
				v := pinnedView{w.View(), m}
				d.compareRange(v)
				if d.rnd.IntN(2) == 0 {
					d.views = append(d.views, v)
				} else {
					v.Release()
				}
			}
		}
		d.index += uint64(n - 1)
	})
	if !compacts {
		want = d.model().events(from)
		d.compareEvents(w.Events(), want)
	}
}

func (d *differential) compareEvents(got, want []Event) {
	d.t.Helper()
	for i := range got {
		got[i].PrevRef = 0
	}
	if g, w := eventLines(got), eventLines(want); g != w {
		d.t.Fatalf("events differ, got\n%swant\n%s", g, w)
	}
}

func (d *differential) randomRangeOptions(m *model) RangeOptions {
	some := func(n int64) int64 {
		if d.rnd.IntN(3) > 0 {
			return 0
		}
		return d.rnd.Int64N(n)
	}
	o := RangeOptions{
		Limit:     some(8) - some(2),
		Order:     SortOrder(d.rnd.IntN(3)),
		Target:    SortTarget(d.rnd.IntN(5)),
		CountOnly: d.rnd.IntN(8) == 0,
		KeysOnly:  d.rnd.IntN(4) == 0,
	}
	if d.rnd.IntN(8) == 0 {
		o.Limit = math.MaxInt64 >> d.rnd.IntN(3) // as good as none
	}
	if d.rnd.IntN(2) == 0 {
		o.Revision = m.compacted - 1 + d.rnd.Int64N(m.revision-m.compacted+3)
	}
	if d.rnd.IntN(3) == 0 {
		o.MinMod, o.MaxMod = some(m.revision), some(m.revision+1)
		o.MinCreate, o.MaxCreate = some(m.revision), some(m.revision+1)
	}
	return o
}

// compareRange asks a view and its model the same.
func (d *differential) compareRange(v pinnedView) {
	d.t.Helper()
	key, end := randomRange(d.rnd)
	o := d.randomRangeOptions(v.model)
	got, err := v.Range(context.Background(), key, end, o)
	want, wantErr := v.model.rangeOf(key, end, o)
	if errors.Is(err, ErrCompacted) && wantErr == nil && v.Stale() && v.model.compacted < d.deleting.Load() {
		d.seen["read of a deleted record"]++
		return // a view that was held for too long
	}
	if !errors.Is(err, wantErr) {
		d.t.Fatalf("range %q %q %+v: got error %v, want %v", key, end, o, err, wantErr)
	}
	if err != nil {
		d.seen["range: "+wantErr.Error()]++
		return
	}
	if !slices.EqualFunc(got.KVs, want.KVs, bytes.Equal) || got.Count != want.Count || got.More != want.More || got.Bytes != want.Bytes {
		d.t.Fatalf("range %q %q %+v at %d:\ngot  %s\nwant %s", key, end, o, v.model.revision, show(got), show(want))
	}
	o.MemoryOnly = true
	switch quick, err := v.Range(context.Background(), key, end, o); {
	case errors.Is(err, ErrNotInMemory):
		d.seen["range not in memory"]++
	case err != nil && !v.Stale():
		d.t.Fatalf("range %q %q %+v: %v", key, end, o, err)
	case err == nil && (!slices.EqualFunc(quick.KVs, got.KVs, bytes.Equal) || quick.Count != got.Count || quick.More != got.More || quick.Bytes != got.Bytes):
		d.t.Fatalf("range %q %q %+v of memory alone: %s, else %s", key, end, o, show(quick), show(got))
	default:
		d.seen["range in memory"]++
	}
	d.seen[fmt.Sprintf("range target %d order %d", o.Target, o.Order)]++
	if len(got.KVs) > 0 {
		d.seen["range with keys"]++
	}
}

func show(r RangeResult) string {
	s := fmt.Sprintf("count %d more %v bytes %d:", r.Count, r.More, r.Bytes)
	for _, kv := range r.KVs {
		s += " " + kvLine(kv)
	}
	return s
}

// compare checks all that a root says.
func (d *differential) compare() {
	d.t.Helper()
	m, r := d.model(), d.Root()
	if r.Revision() != m.revision || r.CompactRevision() != m.compacted {
		d.t.Fatalf("at index %d: revision %d compacted %d, want %d and %d", d.index, r.Revision(), r.CompactRevision(), m.revision, m.compacted)
	}
	if got, want := r.UsageBytes(), m.usage(); got != want {
		d.t.Fatalf("at index %d: usage %d, want %d", d.index, got, want)
	}
	if got, want := r.Keys(), int64(len(m.at(m.revision))); got != want {
		d.t.Fatalf("at index %d: %d keys, want %d", d.index, got, want)
	}
	v := pinnedView{d.View(r), m}
	for range 3 {
		d.compareRange(v)
	}
	v.Release()
	d.compareHistory(m, r)
	d.compareHash(m, r)
}

func (d *differential) compareHistory(m *model, r Root) {
	d.t.Helper()
	from := m.compacted - 1 + d.rnd.Int64N(m.revision-m.compacted+3)
	var got []Event
	next, err := from, error(nil)
	for next <= m.revision && err == nil {
		next, err = d.History(context.Background(), r, next, 1+d.rnd.IntN(400), func(e Event) bool {
			got = append(got, e)
			return true
		})
	}
	if from < m.compacted {
		if !errors.Is(err, ErrCompacted) {
			d.t.Fatalf("history from %d, compacted %d: error %v", from, m.compacted, err)
		}
		return
	}
	d.check(err)
	d.compareEvents(got, m.events(from))
	d.seen["history"]++
}

func (d *differential) compareHash(m *model, r Root) {
	d.t.Helper()
	rev := m.compacted - 1 + d.rnd.Int64N(m.revision-m.compacted+3)
	if cached := d.CompactionHashes(); len(cached) > 0 && d.rnd.IntN(3) == 0 {
		rev = cached[d.rnd.IntN(len(cached))].HashRevision
	}
	if rev <= 0 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // nobody would finish the compaction that an empty keep set waits for
	if len(m.at(rev)) > 0 || len(d.jobs) == 0 {
		ctx = context.Background()
	}
	h, err := d.HashKV(ctx, r, rev)
	if _, cached := d.Store.hashes.find(rev); cached {
		d.seen["cached hash"]++
		want := d.compactions[rev]
		want.Revision = m.revision
		if err != nil || h != want {
			d.t.Fatalf("cached hash at %d: %+v, %v, want %+v", rev, h, err, want)
		}
		return
	}
	switch {
	case rev < m.compacted:
		if !errors.Is(err, ErrCompacted) {
			d.t.Fatalf("hash at %d, compacted %d: error %v", rev, m.compacted, err)
		}
	case rev > m.revision:
		if !errors.Is(err, ErrFutureRevision) {
			d.t.Fatalf("hash at %d, revision %d: error %v", rev, m.revision, err)
		}
	case errors.Is(err, context.Canceled):
		d.seen["hash waits"]++
	default:
		d.check(err)
		if want := m.hash(rev); h.Hash != want {
			d.t.Fatalf("hash at %d, compacted %d: %d, want %d", rev, m.compacted, h.Hash, want)
		}
		d.seen["hash"]++
	}
}

func (d *differential) releaseViews() {
	for _, v := range d.views {
		v.Release()
	}
	d.views = nil
}

// crash goes on with what a crash at this moment would leave.
func (d *differential) crash() {
	d.t.Helper()
	d.releaseViews()
	percent := d.rnd.IntN(101)
	clone := d.fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: d.rnd})
	d.check(d.storage.Abandon())
	was := d.index
	d.fs = clone
	d.open()
	if d.index > was {
		d.t.Fatalf("applied %d after the crash, %d before", d.index, was)
	}
	d.seen["crash"]++
	if d.index < was {
		d.seen["crash that lost batches"]++
	}
	d.compare()
	// The log applies again what was lost, in other batches.
	for d.index < was {
		n := min(uint64(1+d.rnd.IntN(7)), was-d.index)
		d.apply(func(w *Writer) {
			for _, o := range d.log[d.index : d.index+n] {
				_ = o.applyTo(w) // its error was compared the first time
			}
			d.index += n - 1
		})
		if d.rnd.IntN(3) == 0 {
			d.compare()
		}
	}
}

// step does one random thing.
func (d *differential) step() {
	d.t.Helper()
	switch n := d.rnd.IntN(100); {
	case n < 50:
		d.batch()
	case n < 75:
		_, pause, err := d.CompactStep()
		d.check(err)
		d.now = d.now.Add(pause)
	case n < 78:
		d.check(d.storage.Flush())
	case n < 80:
		d.releaseViews()
		d.reopen()
		d.seen["reopen"]++
	case n < 82:
		d.crash()
	case n < 83:
		d.releaseViews()
		d.check(d.saver.remove())
	case n < 84:
		d.work()
		for _, v := range d.views { // they may have outlived what they see
			for range 4 {
				d.compareRange(v)
			}
		}
	case n < 90:
		if len(d.views) > 0 {
			d.compareRange(d.views[d.rnd.IntN(len(d.views))])
		}
	default:
		d.compare()
	}
	if len(d.views) > 8 {
		d.releaseViews()
	}
}

var seeds = flag.Uint64("seeds", 6, "how many seeds TestModel runs")

// TestModel runs random ops, reads, restarts and crashes against the model.
func TestModel(t *testing.T) {
	seen := map[string]int{}
	for seed := range *seeds {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			d := newDifferential(t, seed)
			for range 500 {
				d.step()
			}
			d.releaseViews()
			d.work()
			d.compare()
			for k, n := range d.seen {
				seen[k] += n
			}
		})
	}
	for _, k := range []string{"changing txn", "history", "hash", "cached hash", "crash that lost batches", "reopen", "range with keys", "range in memory", "range not in memory",
		"range: " + ErrCompacted.Error(), "range: " + ErrFutureRevision.Error(), "read of a deleted record"} {
		if seen[k] == 0 {
			t.Errorf("the generator never made: %s", k)
		}
	}
	t.Log(seen)
}
