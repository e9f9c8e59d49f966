package mvcc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestConcurrentReaders reads, hashes and scans history from several
// goroutines while one applies, compacts and gives memory up. In each
// transaction all keys get the same value, so any answer with two different
// values mixes moments.
func TestConcurrentReaders(t *testing.T) {
	const keys = 20
	f := newFixture(t, func(o *Options) {
		smallOptions(o)
		o.CompactionBatch = 50
		o.Now = time.Now
		o.Go = nil
		o.ViewAge = time.Minute
	})
	var published atomic.Pointer[Root]
	publish := func(r Root) { published.Store(&r) }
	write := func(n int) {
		w := f.apply(func(w *Writer) {
			w.Begin()
			for k := range keys {
				w.Put(fmt.Appendf(nil, "key-%02d", k), fmt.Appendf(nil, "%0*d", 10+n%100, n), 0)
			}
			w.End()
		})
		publish(w.Root())
	}
	write(1)
	pin := func() *View {
		for {
			v := f.View(*published.Load())
			if !v.Stale() {
				return v
			}
			v.Release()
		}
	}
	var (
		done  = make(chan struct{})
		wg    sync.WaitGroup
		reads atomic.Int64
	)
	reader := func(seed uint64) error {
		rnd := rand.New(rand.NewPCG(seed, 1))
		for {
			select {
			case <-done:
				return nil
			default:
			}
			v := pin()
			err := readOneMoment(f.Store, v, keys, rnd)
			v.Release()
			if err != nil {
				return err
			}
			reads.Add(1)
		}
	}
	errs := make([]error, 4)
	for i := range errs {
		wg.Go(func() { errs[i] = reader(uint64(i)) })
	}
	for n := 2; n < 400 || reads.Load() < 200; n++ {
		write(n)
		if rev := f.Root().Revision(); n%20 == 0 {
			f.compact(rev - 5)
			publish(f.Root())
		}
		if _, _, err := f.CompactStep(); err != nil {
			t.Fatal(err)
		}
		publish(f.Root())
	}
	close(done)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	f.saver.wait()
}

// readOneMoment checks that all that v answers is of one transaction each.
func readOneMoment(s *Store, v *View, keys int, rnd *rand.Rand) error {
	ctx := context.Background()
	rev := int64(0)
	if rnd.IntN(2) == 0 {
		rev = max(2, v.Revision()-rnd.Int64N(5))
	}
	if rev < v.CompactRevision() {
		rev = 0
	}
	res, err := v.Range(ctx, []byte("key-"), []byte("key."), RangeOptions{Revision: rev})
	if err != nil {
		return fmt.Errorf("range at %d of %d: %w", rev, v.Revision(), err)
	}
	if len(res.KVs) != keys {
		return fmt.Errorf("range at %d of %d has %d keys", rev, v.Revision(), len(res.KVs))
	}
	for _, kv := range res.KVs {
		if !bytes.Equal(ValueOf(kv), ValueOf(res.KVs[0])) {
			return fmt.Errorf("range at %d of %d mixes moments: %s %s", rev, v.Revision(), kvLine(kv), kvLine(res.KVs[0]))
		}
	}
	v.InMemory([]byte("key-"), []byte("key."), 1<<20)
	if rnd.IntN(10) > 0 {
		return nil
	}
	want := max(v.Revision()-3, 2)
	next, err := s.History(ctx, v.Root(), want, 1<<20, func(e Event) bool {
		if e.Rev.Sub == 0 && e.Rev.Main != want {
			err = fmt.Errorf("history has %v, want %d", e.Rev, want)
		}
		if e.Rev.Sub == int64(keys)-1 {
			want++
		}
		return true
	})
	if err != nil && !errors.Is(err, ErrCompacted) || err == nil && next != v.Revision()+1 {
		return fmt.Errorf("history to %d ended at %d: %w", v.Revision(), next, err)
	}
	if _, err := s.HashKV(ctx, v.Root(), 0); err != nil {
		return err
	}
	return nil
}

// Two members that compact at different pace answer the same hash.
func TestHashIgnoresProgress(t *testing.T) {
	apply := func(f *fixture) {
		for i := range 30 {
			f.put(fmt.Sprint("k", i%7), fmt.Sprint(i), fmt.Sprint("j", i%3), "x")
			if i%10 == 9 {
				f.del(fmt.Sprint("k", i%7))
			}
		}
		f.compact(40)
	}
	slow, fast := newFixture(t, nil), newFixture(t, nil)
	apply(slow)
	apply(fast)
	fast.work()
	for rev := int64(41); rev <= slow.Root().Revision(); rev++ {
		if a, b := slow.hash(rev), fast.hash(rev); a != b {
			t.Errorf("at %d: %+v before deletion, %+v after", rev, a, b)
		}
	}
	if a, b := slow.Root().UsageBytes(), fast.Root().UsageBytes(); a != b {
		t.Errorf("usage %d before deletion, %d after", a, b)
	}
}

// With an empty keep set the answer depends on what was deleted, so it waits.
func TestHashWaitsForDeletion(t *testing.T) {
	f := newFixture(t, nil)
	f.put("a", "1", "a", "2")
	f.del("a")
	f.compact(3)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := f.HashKV(ctx, f.Root(), 4); !errors.Is(err, context.Canceled) {
		t.Fatalf("no wait: %v", err)
	}
	got := make(chan HashResult)
	root := f.Root()
	go func() {
		h, err := f.HashKV(context.Background(), root, 4)
		if err != nil {
			t.Error(err)
		}
		got <- h
	}()
	f.work()
	if h := <-got; h != f.hash(4) {
		t.Errorf("got %+v, afterwards %+v", h, f.hash(4))
	}
	select {
	case <-f.CompactionDone(3):
	default:
		t.Error("the compaction is finished but not done")
	}
}
