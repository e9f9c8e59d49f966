package mvcc

import (
	"math/rand/v2"
	"testing"
)

// TestUsageTable compares the table with one list of all that was superseded,
// over several chunks and compactions at, between and beside their borders.
func TestUsageTable(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	var u usageTable
	type freed struct{ main, bytes int64 }
	var all []freed
	main, carry, compacted := int64(1), int64(0), int64(0)
	for range 12 {
		for range 1 + rng.IntN(2*usageChunk) {
			main++
			superseded, tombstones := int64(rng.IntN(3)), int64(rng.IntN(2))
			u.end(main, superseded, tombstones)
			all = append(all, freed{main, superseded + carry})
			carry = tombstones
		}
		for range 5 {
			at := compacted + rng.Int64N(main-compacted+2) // at times above all
			want, rest := int64(0), all[:0:0]
			for _, f := range all {
				if f.main <= at {
					want += f.bytes
				} else {
					rest = append(rest, f)
				}
			}
			all, compacted = rest, min(at, main)
			if got := u.compact(at); got != want {
				t.Fatalf("a compaction at %d of %d frees %d, want %d", at, main, got, want)
			}
			if got := u.compact(at); got != 0 {
				t.Fatalf("a second compaction at %d frees %d", at, got)
			}
		}
	}
}
