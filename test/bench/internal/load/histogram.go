package load

import (
	"math/bits"
	"time"
)

const (
	subBits = 5 // a bucket is at most a 32nd part wide
	buckets = (64 - subBits) << subBits
)

// Histogram counts durations in buckets of about 3 % width. The zero value is empty. It is for one goroutine at a time.
type Histogram struct {
	counts [buckets]uint32
	n      int64
}

// Add counts one duration.
func (h *Histogram) Add(d time.Duration) {
	h.counts[bucketOf(uint64(max(d, 0)))]++
	h.n++
}

// Merge adds what o has counted.
func (h *Histogram) Merge(o *Histogram) {
	for i, c := range o.counts {
		h.counts[i] += c
	}
	h.n += o.n
}

// Count is the number of durations added.
func (h *Histogram) Count() int64 { return h.n }

// Quantile is the duration that a share q of those added do not exceed, to within a bucket; 0 if there are none.
func (h *Histogram) Quantile(q float64) time.Duration {
	left := int64(q * float64(h.n))
	for i, c := range h.counts {
		if left -= int64(c); left < 0 {
			return time.Duration(upperBound(i))
		}
	}
	for i := buckets - 1; i >= 0; i-- {
		if h.counts[i] > 0 {
			return time.Duration(upperBound(i))
		}
	}
	return 0
}

// bucketOf keeps the highest bit and the subBits after it.
func bucketOf(v uint64) int {
	if v < 1<<subBits {
		return int(v)
	}
	shift := bits.Len64(v) - subBits - 1
	return (shift+1)<<subBits + int(v>>shift) - 1<<subBits
}

func upperBound(i int) uint64 {
	if i < 1<<subBits {
		return uint64(i)
	}
	shift := i>>subBits - 1
	return (uint64(i&(1<<subBits-1))+1<<subBits+1)<<shift - 1
}
