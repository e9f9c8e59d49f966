package mvcc

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/engram-kv/engram/internal/mvcc/index"
)

// segmentKey returns a key of a few segments, empty ones and others that begin
// alike among them.
func segmentKey(rnd *rand.Rand) string {
	var b strings.Builder
	for range 1 + rnd.IntN(5) {
		b.WriteString([]string{"/", "/a", "a", "ab/", "b//", "\xff", "\xff/", "c.", "\x00"}[rnd.IntN(9)])
	}
	return b.String()
}

// bruteSegments cuts a list of keys, all that the store knows, in the plainest way.
func bruteSegments(rows map[string]index.Measure, o SegmentOptions) (out []Segment) {
	paths := map[string]*Segment{}
	for key, m := range rows {
		rest, ok := strings.CutPrefix(key, string(o.Prefix))
		if !ok {
			continue
		}
		path, group := key, false
		if d := string(o.Delimiter); d != "" {
			begin := string(o.Prefix)
			if strings.HasPrefix(rest, d) {
				begin, rest = begin+d, rest[len(d):]
			}
			if parts := strings.SplitAfterN(rest, d, o.Depth+1); len(parts) > o.Depth {
				path, group = begin+strings.Join(parts[:o.Depth], ""), true
			}
		}
		name := fmt.Sprint(group, path)
		if paths[name] == nil {
			paths[name] = &Segment{Path: []byte(path), Group: group}
		}
		paths[name].Add(m)
	}
	for _, s := range paths {
		out = append(out, *s)
	}
	slices.SortFunc(out, func(a, b Segment) int { return bytes.Compare(a.Path, b.Path) })
	return out
}

func sameSegment(a, b Segment) bool {
	return bytes.Equal(a.Path, b.Path) && a.Group == b.Group && a.Measure == b.Measure
}

func TestSegmentsAgainstBruteForce(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 1))
	f := newFixture(t, nil)
	for range 400 {
		if rnd.IntN(4) == 0 {
			f.del(segmentKey(rnd))
		} else {
			f.put(segmentKey(rnd), strings.Repeat("v", rnd.IntN(50)))
		}
	}
	v := f.view()
	defer v.Release()
	rows := map[string]index.Measure{}
	v.root.index.Walk(nil, func(r *index.Record) bool {
		rows[string(r.Key)] = v.root.index.Measure(r.Key, nil)
		return true
	})
	coverage := map[string]int{}
	for range 2000 {
		o := SegmentOptions{
			Prefix: []byte(segmentKey(rnd)), Delimiter: []byte([]string{"/", "//", "", "a"}[rnd.IntN(4)]), Depth: 1 + rnd.IntN(3),
			Order: SegmentOrder(rnd.IntN(5)), Limit: 1 + rnd.IntN(6), Most: 1 << 20,
		}
		if rnd.IntN(3) == 0 {
			o.Prefix = o.Prefix[:rnd.IntN(2)]
		}
		want := bruteSegments(rows, o)
		var total index.Measure
		for _, s := range want {
			total.Add(s.Measure)
		}
		got, err := v.Segments(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if got.Total != total {
			t.Fatalf("%q: total %+v, want %+v", o.Prefix, got.Total, total)
		}
		if o.Order == SegmentsByPath {
			all := slices.Clone(got.Rows)
			for pages := 0; got.Next != nil; pages++ {
				coverage["page"]++
				o.From = got.Next
				if got, err = v.Segments(t.Context(), o); err != nil {
					t.Fatal(err)
				}
				all = append(all, got.Rows...)
			}
			if !slices.EqualFunc(all, want, sameSegment) {
				t.Fatalf("%+v:\n%+v\nwant\n%+v", o, all, want)
			}
			coverage[fmt.Sprintf("by path some=%v", len(all) > 0)]++
			continue
		}
		r := ranking{order: o.Order}
		slices.SortStableFunc(want, r.compare)
		kept := want[:min(o.Limit, len(want))]
		if !slices.EqualFunc(got.Rows, kept, sameSegment) || got.OthersCount != len(want)-len(kept) || got.Next != nil {
			t.Fatalf("%+v:\n%+v\nwant\n%+v", o, got, want)
		}
		var others index.Measure
		for _, s := range want[len(kept):] {
			others.Add(s.Measure)
		}
		if got.Others != others {
			t.Fatalf("%+v: others %+v, want %+v", o, got.Others, others)
		}
		coverage[fmt.Sprintf("by size others=%v", got.OthersCount > 0)]++
	}
	for _, c := range []string{"page", "by path some=true", "by path some=false", "by size others=true", "by size others=false"} {
		if coverage[c] < 20 {
			t.Errorf("%s: %d times only", c, coverage[c])
		}
	}
}

func TestSegmentsLooksAtSoMany(t *testing.T) {
	f := newFixture(t, nil)
	for i := range 10 {
		f.put(fmt.Sprintf("/%d/k", i), strings.Repeat("v", i))
	}
	v := f.view()
	defer v.Release()
	got, err := v.Segments(t.Context(), SegmentOptions{Delimiter: []byte("/"), Depth: 1, Order: SegmentsByTotal, Limit: 2, Most: 4})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Rows) != 2 || string(got.Rows[0].Path) != "/3/" || got.OthersCount != 2 || string(got.Next) != "/4/" || got.Total.Keys != 10 {
		t.Errorf("%+v", got)
	}
}

func BenchmarkSegments(b *testing.B) {
	f := newFixture(b, nil)
	for i := range 200 {
		var pairs []string
		for j := range 500 {
			pairs = append(pairs, fmt.Sprintf("/registry/kind%03d/ns/%d", i, j), "v")
		}
		f.put(pairs...)
	}
	v := f.view()
	defer v.Release()
	for b.Loop() {
		got, err := v.Segments(b.Context(), SegmentOptions{Prefix: []byte("/registry/"), Delimiter: []byte("/"), Depth: 1, Limit: 1000, Most: 1000})
		if err != nil || len(got.Rows) != 200 {
			b.Fatal(len(got.Rows), err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/200, "ns/row")
}
