// Package histogram counts durations in bounded memory.
package histogram

import (
	"math/bits"
	"time"
)

const (
	subBits = 6 // a bucket is at most a 64th part wide
	buckets = (64 - subBits) << subBits
)

// Histogram counts durations in buckets of at most 1.6 % width, and keeps the least, the greatest and the sum exactly. The zero
// value is empty. It is for one goroutine at a time.
type Histogram struct {
	counts   [buckets]uint64
	n        int64
	sum      time.Duration
	min, max time.Duration
}

// Add counts one duration; one below zero counts as zero.
func (h *Histogram) Add(d time.Duration) {
	d = max(d, 0)
	h.counts[bucketOf(uint64(d))]++
	if h.n == 0 || d < h.min {
		h.min = d
	}
	h.max = max(h.max, d)
	h.sum += d
	h.n++
}

// Merge adds what o has counted.
func (h *Histogram) Merge(o *Histogram) {
	if o.n == 0 {
		return
	}
	// Only the buckets between the extremes can hold something.
	for i := bucketOf(uint64(o.min)); i <= bucketOf(uint64(o.max)); i++ {
		h.counts[i] += o.counts[i]
	}
	if h.n == 0 || o.min < h.min {
		h.min = o.min
	}
	h.max = max(h.max, o.max)
	h.sum += o.sum
	h.n += o.n
}

// Reset empties it.
func (h *Histogram) Reset() {
	if h.n > 0 {
		clear(h.counts[bucketOf(uint64(h.min)) : bucketOf(uint64(h.max))+1])
	}
	h.n, h.sum, h.min, h.max = 0, 0, 0, 0
}

// Count is the number of durations added.
func (h *Histogram) Count() int64 { return h.n }

// Min, Max and Mean are 0 while nothing was added.
func (h *Histogram) Min() time.Duration { return h.min }

// Max is the greatest.
func (h *Histogram) Max() time.Duration { return h.max }

// Mean is the average.
func (h *Histogram) Mean() time.Duration { return h.sum / time.Duration(max(h.n, 1)) }

// Quantile is a duration that a share q of those added do not exceed, to within a bucket; 0 if there are none.
func (h *Histogram) Quantile(q float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	left := int64(q * float64(h.n))
	for i, c := range h.counts {
		if left -= int64(c); left < 0 {
			return min(max(time.Duration(upperBound(i)), h.min), h.max)
		}
	}
	return h.max
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
