package index

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
)

// benchKey returns a key of 50 bytes.
func benchKey(i int) []byte {
	return fmt.Appendf(nil, "/registry/pods/namespace-%04d/application-%011d", i%1000, i)[:50]
}

func benchTree(n int, random bool) (*Tree, [][]byte) {
	keys := make([][]byte, n)
	for i := range keys {
		keys[i] = benchKey(i)
	}
	order := rand.New(rand.NewPCG(1, 1)).Perm(n)
	t := New()
	for i := range n {
		k := i
		if random {
			k = order[i]
		}
		t.Put(keys[k], Revision{Main: int64(i) + 2}, 0, 1000, ValueRef(i))
		if i%64 == 0 {
			t.Root()
		}
	}
	return t, keys
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkMemory reports bytes a live key of 50 bytes costs when keys came in
// random order and when they were loaded, bytes a retained older revision, and
// the time of a full garbage collection.
func BenchmarkMemory(b *testing.B) {
	const n = 1_000_000
	for range b.N {
		keys := make([][]byte, n)
		for i := range keys {
			keys[i] = benchKey(i)
		}
		order := rand.New(rand.NewPCG(1, 1)).Perm(n)
		empty := heap()
		t := New()
		rev := int64(1)
		put := func(k int) {
			rev++
			t.Put(keys[k], Revision{Main: rev}, 0, 1000, ValueRef(k))
			if rev%64 == 0 {
				t.Root()
			}
		}
		for _, k := range order {
			put(k)
		}
		live := heap()
		b.ReportMetric(float64(live-empty)/n, "B/key-random")

		t2 := load(b, t.Root())
		b.ReportMetric(float64(heap()-live)/n, "B/key-loaded")
		runtime.KeepAlive(t2)
		t2 = nil
		start := time.Now()
		runtime.GC()
		b.ReportMetric(float64(time.Since(start).Microseconds())/1000, "ms/GC")

		live = heap()
		rng := rand.New(rand.NewPCG(2, 2))
		for range n {
			put(rng.IntN(n))
		}
		b.ReportMetric(float64(heap()-live)/n, "B/old-rev-1")
		for range 2 * n {
			put(rng.IntN(n))
		}
		b.ReportMetric(float64(heap()-live)/(3*n), "B/old-rev-3")
		runtime.KeepAlive(t)
		runtime.KeepAlive(keys)
	}
}

func load(b *testing.B, r Root) *Tree {
	var bld = NewBuilder()
	r.Walk(nil, func(rec *Record) bool {
		if err := bld.Add(rec); err != nil {
			b.Fatal(err)
		}
		return true
	})
	return bld.Tree()
}

// BenchmarkPutUpdate writes existing keys in random order with a Root taken
// every 64 puts.
func BenchmarkPutUpdate(b *testing.B) {
	for _, n := range []int{10_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			t, keys := benchTree(n, true)
			rng := rand.New(rand.NewPCG(3, 3))
			rev := int64(n) + 1
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				rev++
				t.Put(keys[rng.IntN(n)], Revision{Main: rev}, 0, 1000, 1)
				if i%64 == 0 {
					t.Root()
				}
			}
		})
	}
}

// BenchmarkPutCreate makes new keys, in random order and in key order.
func BenchmarkPutCreate(b *testing.B) {
	for _, random := range []bool{true, false} {
		b.Run(fmt.Sprintf("random=%v", random), func(b *testing.B) {
			const n = 500_000
			keys := make([][]byte, n)
			for i := range keys {
				keys[i] = benchKey(i)
				if !random {
					keys[i] = fmt.Appendf(nil, "/registry/events/namespace/application-%011d", i)
				}
			}
			if random {
				rand.New(rand.NewPCG(1, 1)).Shuffle(n, func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
			}
			t := New()
			for i := 0; b.Loop(); i++ {
				if i%n == 0 {
					t = New()
				}
				t.Put(keys[i%n], Revision{Main: int64(i) + 2}, 0, 1000, 1)
				if i%64 == 0 {
					t.Root()
				}
			}
		})
	}
}

func BenchmarkGet(b *testing.B) {
	const n = 1_000_000
	t, keys := benchTree(n, true)
	r := t.Root()
	rng := rand.New(rand.NewPCG(4, 4))
	for b.Loop() {
		if _, ok := r.Get(keys[rng.IntN(n)], 0); !ok {
			b.Fatal("absent")
		}
	}
}

// BenchmarkCount counts 120,000 of 1,000,000 keys.
func BenchmarkCount(b *testing.B) {
	t, _ := benchTree(1_000_000, true)
	r := t.Root()
	for b.Loop() {
		if n, _ := r.Count([]byte("/registry/pods/namespace-0300/"), []byte("/registry/pods/namespace-0420/")); n != 120_000 {
			b.Fatal(n)
		}
	}
}

func BenchmarkAscend(b *testing.B) {
	const n = 1_000_000
	t, _ := benchTree(n, true)
	r := t.Root()
	b.ReportAllocs()
	for b.Loop() {
		var size int64
		r.Ascend(nil, []byte{0}, 0, func(it Item) bool {
			size += int64(it.Size) + int64(len(it.Key))
			return true
		})
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/item")
}

// BenchmarkHotKey reads the past of a key with a million revisions.
func BenchmarkHotKey(b *testing.B) {
	const n = 1_000_000
	t := New()
	key := []byte("hot")
	for i := range int64(n) {
		t.Put(key, Revision{Main: i + 2}, 0, 100, 0)
		if i%64 == 0 {
			t.Root()
		}
	}
	r := t.Root()
	rng := rand.New(rand.NewPCG(5, 5))
	for b.Loop() {
		at := 2 + rng.Int64N(n)
		if it, _ := r.Get(key, at); it.Mod.Main != at {
			b.Fatal(it)
		}
	}
}

// BenchmarkCompact prunes 1 of 2 revisions of each of 200,000 keys in steps of
// 1000 keys, and then again with nothing to prune.
func BenchmarkCompact(b *testing.B) {
	const n = 200_000
	for b.Loop() {
		b.StopTimer()
		t, keys := benchTree(n, true)
		for i, k := range keys {
			t.Put(k, Revision{Main: int64(n + i + 2)}, 0, 1000, 1)
		}
		before := t.Root().History()
		b.StartTimer()
		var longest time.Duration
		for from := []byte(nil); ; {
			start := time.Now()
			from = t.Compact(2*n+2, from, 1000, nil)
			longest = max(longest, time.Since(start))
			if from == nil {
				break
			}
		}
		if dropped := before - t.Root().History(); dropped != n {
			b.Fatal(dropped)
		}
		b.ReportMetric(float64(longest.Microseconds()), "us/longest-step")
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/key")
}

// BenchmarkLoad decodes and builds 1,000,000 keys, as at a start.
func BenchmarkLoad(b *testing.B) {
	const n = 1_000_000
	t, _ := benchTree(n, true)
	var enc Encoder
	var blocks [][]byte
	var block []byte
	total := 0
	start := time.Now()
	t.Root().Walk(nil, func(r *Record) bool {
		block = enc.Append(block, r)
		if len(block) > 1<<16 {
			total += len(block)
			blocks, block = append(blocks, block), nil
			enc.Reset()
		}
		return true
	})
	blocks = append(blocks, block)
	b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/encode")
	b.ReportMetric(float64(total)/n, "B/key")
	for b.Loop() {
		bld := NewBuilder()
		var r Record
		for _, block := range blocks {
			d := NewDecoder(block)
			for d.Next(&r) == nil {
				if err := bld.Add(&r); err != nil {
					b.Fatal(err)
				}
			}
		}
		if got := bld.Tree().Root().Len(); got != n {
			b.Fatal(got)
		}
	}
}
