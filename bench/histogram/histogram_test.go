package histogram

import (
	"testing"
	"time"
)

func TestHistogram(t *testing.T) {
	var h, other Histogram
	if h.Quantile(0.5) != 0 || h.Mean() != 0 || h.Min() != 0 {
		t.Error("an empty histogram has figures")
	}
	for i := range 1000 {
		d := time.Duration(i+1) * time.Millisecond
		if i%2 == 0 {
			h.Add(d)
		} else {
			other.Add(d)
		}
	}
	h.Merge(&other)
	h.Merge(&Histogram{})
	if h.Count() != 1000 || h.Min() != time.Millisecond || h.Max() != time.Second || h.Mean() != 500500*time.Microsecond {
		t.Errorf("counted %d, min %v, max %v, mean %v", h.Count(), h.Min(), h.Max(), h.Mean())
	}
	for _, q := range []float64{0, 0.5, 0.99, 0.999, 1} {
		want := time.Duration(max(1, q*1000)) * time.Millisecond
		if got := h.Quantile(q); got < want || got > want+want/50+time.Millisecond {
			t.Errorf("quantile %v is %v, want about %v", q, got, want)
		}
	}
	for v := uint64(1); v < 1<<62; v = v*3/2 + 1 {
		if b := bucketOf(v); upperBound(b) < v || b > 0 && upperBound(b-1) >= v {
			t.Fatalf("%d falls into bucket %d, which ends at %d after one that ends at %d", v, b, upperBound(b), upperBound(b-1))
		}
	}
	h.Reset()
	if h != (Histogram{}) {
		t.Error("something is left after Reset")
	}
}
