package mvcc

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/storage"
)

// diskFixture is a store in a directory of its own, with Pebble's usual sizes.
func diskFixture(b *testing.B) *fixture {
	dir := b.TempDir()
	st, err := storage.Open(storage.Options{Dir: dir + "/db"})
	if err != nil {
		b.Fatal(err)
	}
	s, err := Open(Options{Storage: st, Dir: dir + "/index"})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.saver.wait(); st.Abandon() })
	return &fixture{t: b, storage: st, Store: s}
}

func benchKey(i int) []byte {
	return fmt.Appendf(nil, "/registry/pods/namespace-%03d/pod-%08d", i%100, i)
}

// fill puts n keys of size bytes.
func (f *fixture) fill(n, size int) {
	value := make([]byte, size)
	for i := 0; i < n; {
		f.apply(func(w *Writer) {
			for end := min(i+100, n); i < end; i++ {
				w.Begin()
				w.Put(benchKey(i), value, 0)
				w.End()
			}
		})
	}
}

// BenchmarkPut applies puts of 300 bytes on 100,000 keys, in batches of 50.
func BenchmarkPut(b *testing.B) {
	for _, keys := range []int{100_000} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			f := diskFixture(b)
			f.fill(keys, 300)
			rnd := rand.New(rand.NewPCG(1, 1))
			value := make([]byte, 300)
			order := make([][]byte, keys)
			for i := range order {
				order[i] = benchKey(rnd.IntN(keys))
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := 0; i < b.N; {
				f.apply(func(w *Writer) {
					for end := min(i+50, b.N); i < end; i++ {
						w.Begin()
						w.Put(order[i%keys], value, 0)
						w.End()
					}
				})
			}
		})
	}
}

func BenchmarkRange100(b *testing.B) {
	f := diskFixture(b)
	f.fill(100_000, 300)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		v := f.View(f.Root())
		res, err := v.Range(context.Background(), benchKey(i*37%100), []byte{0}, RangeOptions{Limit: 100})
		if err != nil || len(res.KVs) != 100 {
			b.Fatal(len(res.KVs), err)
		}
		v.Release()
	}
}

func BenchmarkGet(b *testing.B) {
	f := diskFixture(b)
	f.fill(100_000, 300)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		v := f.View(f.Root())
		if _, _, ok, err := v.Get(benchKey(i%100_000), 0); !ok || err != nil {
			b.Fatal(ok, err)
		}
		v.Release()
	}
}

// BenchmarkDeleteRange deletes 100,000 keys in one transaction.
func BenchmarkDeleteRange(b *testing.B) {
	for range b.N {
		b.StopTimer()
		f := diskFixture(b)
		f.fill(100_000, 30)
		b.StartTimer()
		f.apply(func(w *Writer) {
			w.Begin()
			if n := w.DeleteRange([]byte("/"), []byte{0}, nil); n != 100_000 {
				b.Fatal(n)
			}
			w.End()
		})
	}
}

// BenchmarkOpen opens 200,000 keys of 300 bytes with and without checkpoint.
func BenchmarkOpen(b *testing.B) {
	f := newFixture(b, nil)
	f.storage.Abandon()
	f.fs, f.mem = vfs.NewMem(), 64<<20
	f.open()
	f.fill(200_000, 300)
	f.reopen()
	b.Run("checkpoint", func(b *testing.B) {
		for range b.N {
			if _, err := Open(Options{Storage: f.storage, FS: f.fs, Dir: "index"}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("scan", func(b *testing.B) {
		for range b.N {
			if _, err := Open(Options{Storage: f.storage}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkCompact compacts away half of 200,000 revisions.
func BenchmarkCompact(b *testing.B) {
	for range b.N {
		b.StopTimer()
		f := diskFixture(b)
		f.fill(100_000, 300)
		f.fill(100_000, 300)
		f.compact(f.Root().Revision())
		b.StartTimer()
		steps := 0
		for {
			more, _, err := f.CompactStep()
			if err != nil {
				b.Fatal(err)
			}
			if steps++; !more {
				break
			}
			if len(f.jobs) > 0 && f.jobs[0].phase == phaseWait {
				f.saver.wait()
			}
		}
		b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*steps), "us/step")
	}
}
