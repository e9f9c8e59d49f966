package pace

import (
	"math/bits"
	"time"
)

// histogram counts durations, the newest for the most: whenever it is full, all counts are halved. Buckets are an eighth of a
// power of two wide.
type histogram struct {
	counts [64 * perPower]uint32
	total  uint32
}

const (
	perPower = 8
	// fullAt is some seconds of a busy log. leastSamples is how many tell something.
	fullAt       = 8192
	leastSamples = 200
)

func bucketOf(d time.Duration) int {
	n := uint64(max(d, perPower))
	power := bits.Len64(n) - 1
	return power*perPower + int(n>>(power-3)&(perPower-1))
}

// upper is what the durations in a bucket lie below.
func upper(bucket int) time.Duration {
	power, part := bucket/perPower, bucket%perPower
	return time.Duration(uint64(perPower+part+1) << (power - 3))
}

func (h *histogram) add(d time.Duration) {
	if h.total >= fullAt {
		h.total = 0
		for i := range h.counts {
			h.counts[i] /= 2
			h.total += h.counts[i]
		}
	}
	h.counts[bucketOf(d)]++
	h.total++
}

// quantile is the duration that so large a share lies below; false if there are too few to tell.
func (h *histogram) quantile(share float64) (time.Duration, bool) {
	if h.total < leastSamples {
		return 0, false
	}
	rank, below := share*float64(h.total), 0.0
	for i, n := range h.counts {
		if below += float64(n); below >= rank && n > 0 {
			return upper(i), true
		}
	}
	return upper(len(h.counts) - 1), true
}
