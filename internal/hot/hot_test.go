package hot

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"
)

var began = time.Unix(1_000_000, 0)

// near says that got is within a part of want.
func near(got, want, part float64) bool { return math.Abs(got-want) <= part*want+1e-9 }

func TestExactWhenFew(t *testing.T) {
	s := New(Options{}, began)
	now := began
	alice := Client{Addr: netip.MustParseAddr("::ffff:10.0.0.7"), Name: "alice"}
	for range 400 { // 100 s: all of the window
		for i := range 20 {
			if s.Pick() {
				s.Add(Read, fmt.Appendf(nil, "/registry/pods/ns/%d", i%10), 1000, alice)
			}
		}
		for range 5 {
			if s.Pick() {
				s.Add(Write, []byte("/registry/leases/a"), 200, Client{})
			}
		}
		if s.Pick() {
			s.Add(Event, []byte("plain"), 50, alice)
		}
		now = now.Add(Interval)
		s.Tick(now)
	}
	r := s.Top(now, 2, 10)
	if r.Sampling != 1 || !near(r.Window.Seconds(), window.Seconds(), 0.02) {
		t.Errorf("%+v", r)
	}
	if !near(r.Total.Reads, 80, 0.01) || !near(r.Total.Writes, 20, 0.01) || !near(r.Total.Events, 4, 0.01) || !near(r.Total.Bytes, 80*1000+20*200+4*50, 0.01) {
		t.Errorf("total %+v", r.Total)
	}
	var names []string
	for _, row := range r.Prefixes {
		names = append(names, row.Name)
	}
	if want := []string{"/registry/pods/", "/registry/leases/", "plain"}; !slices.Equal(names, want) {
		t.Errorf("prefixes %q", names)
	}
	if p := r.Prefixes[0]; !near(p.Reads, 80, 0.01) || p.Writes != 0 || p.Doubt != 0 {
		t.Errorf("%+v", p)
	}
	if len(r.Keys) != 10 || r.Keys[0].Name != "/registry/leases/a" || !near(r.Keys[1].Reads, 8, 0.01) {
		t.Errorf("keys %+v", r.Keys)
	}
	if len(r.Clients) != 2 || r.Clients[0].Name != "alice@10.0.0.7" || r.Clients[1].Name != "unknown" || !near(r.Clients[0].Events, 4, 0.01) {
		t.Errorf("clients %+v", r.Clients)
	}
	if r := s.Top(now, 3, 1); r.Prefixes[0].Name != "/registry/pods/ns/" || len(r.Prefixes) != 1 || len(r.Keys) != 1 {
		t.Errorf("depth 3: %+v", r)
	}

	now = now.Add(20 * window)
	if r := s.Top(now, 2, 10); r.Total.Reads > 1e-6 || len(r.Prefixes) != 0 || len(s.keys.byName) != 0 {
		t.Errorf("long after: %+v", r)
	}
}

// TestManyAgainstExact has far more requests than are looked at, and more names
// than there are places for, and compares with exact counts.
func TestManyAgainstExact(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 1))
	zipf := rand.NewZipf(rnd, 1.3, 1, 100_000)
	s := New(Options{}, began)
	now := began
	exact := map[string]float64{}
	const ticks, each = 80, 20_000 // 20 s at 80000 a second
	for range ticks {
		f := math.Exp(-Interval.Seconds() / window.Seconds())
		for k := range exact {
			exact[k] *= f
		}
		for range each {
			key := fmt.Appendf(nil, "/k/%d", zipf.Uint64())
			exact[string(key)]++
			if s.Pick() {
				s.Add(Write, key, 100, Client{Name: "c"})
			}
		}
		now = now.Add(Interval)
		s.Tick(now)
	}
	r := s.Top(now, 1, 10)
	if r.Sampling < 8 || !near(r.Total.Writes, each/Interval.Seconds(), 0.15) {
		t.Errorf("sampling %d, total %+v", r.Sampling, r.Total)
	}
	type ranked struct {
		name string
		sum  float64
	}
	var order []ranked
	for k, n := range exact {
		order = append(order, ranked{k, n})
	}
	slices.SortFunc(order, func(a, b ranked) int { return int(math.Copysign(1, b.sum-a.sum)) })
	for i, want := range order[:5] {
		at := slices.IndexFunc(r.Keys, func(row Row) bool { return row.Name == want.name })
		if at < 0 {
			t.Errorf("%s, the %dth, is not among %+v", want.name, i, r.Keys)
			continue
		}
		rate := want.sum / r.Window.Seconds()
		if row := r.Keys[at]; !near(row.Writes, rate, 0.2) {
			t.Errorf("%s: %.0f writes a second, exactly it were %.0f", want.name, row.Writes, rate)
		}
	}
	if len(s.keys.byName) > 256 || len(s.keys.heap) != len(s.keys.byName) {
		t.Errorf("%d names, %d in the heap", len(s.keys.byName), len(s.keys.heap))
	}
	for i, e := range s.keys.heap {
		if e.at != i || i > 0 && s.keys.heap[(i-1)/2].weight > e.weight {
			t.Fatalf("entry %d of the heap is out of place", i)
		}
	}
	for range 60 { // quiet again: all is counted again
		now = now.Add(Interval)
		s.Tick(now)
	}
	if r := s.Top(now, 1, 10); r.Sampling != 1 {
		t.Errorf("sampling 1 of %d after a quiet time", r.Sampling)
	}
}

func TestLongKeys(t *testing.T) {
	s := New(Options{Names: 2, Buffer: 8}, began)
	long := slices.Repeat([]byte("x"), 1000)
	for i := range 20 {
		s.Add(Read, append(fmt.Append(nil, i), long...), math.MaxInt, Client{})
	}
	r := s.Top(began.Add(time.Second), 1, 10)
	if len(r.Keys) != 2 || len(r.Keys[0].Name) != keyBytes || !near(r.Total.Reads, 20, 1e-9) || r.Keys[0].Doubt <= 0 {
		t.Errorf("%+v", r)
	}
}

func TestTogether(t *testing.T) {
	s := New(Options{Buffer: 64}, began)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 2000 {
				if s.Pick() {
					s.Add(Read, []byte("/a/b"), 1, Client{})
				}
			}
		})
	}
	for i := range 100 {
		s.Top(began.Add(time.Duration(i)*time.Millisecond), 2, 3)
	}
	all.Wait()
	var none *Sampler
	if none.Pick() {
		t.Error("no sampler picks")
	}
}

// BenchmarkRequest is what a request pays, with a tick as often as a member at
// this speed has one.
func BenchmarkRequest(b *testing.B) {
	for _, rate := range []int{2000, 100_000, 1_000_000} {
		b.Run(fmt.Sprintf("rate=%d", rate), func(b *testing.B) {
			s := New(Options{}, began)
			key, c := []byte("/registry/pods/namespace/name-of-a-pod"), Client{Addr: netip.MustParseAddr("10.0.0.1"), Name: "system:apiserver"}
			now, each := began, int(float64(rate)*Interval.Seconds())
			n := 0
			var counting time.Duration
			for b.Loop() {
				if s.Pick() {
					s.Add(Read, key, 1000, c)
				}
				if n++; n%each == 0 {
					now = now.Add(Interval)
					from := time.Now()
					s.Tick(now)
					counting += time.Since(from)
				}
			}
			total := float64(b.Elapsed().Nanoseconds())
			b.ReportMetric((total-float64(counting.Nanoseconds()))/float64(b.N), "ns/hot-path")
			b.ReportMetric(float64(counting.Nanoseconds())/float64(b.N), "ns/counting")
		})
	}
}
