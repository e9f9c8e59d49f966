package consensus

import (
	"testing"
	"time"
)

func TestIDsKnowTheirOwn(t *testing.T) {
	start := time.UnixMilli(1_700_000_000_123)
	before, g := NewIDs(0xabcd1234, start.Add(-time.Millisecond)), NewIDs(0xabcd1234, start)
	old, mine := before.Next(), g.Next()
	if !g.Made(mine) || g.Made(old) || g.Made(mine+1) || g.Made(mine^1<<60) {
		t.Fatalf("Made: %t %t %t %t", g.Made(mine), g.Made(old), g.Made(mine+1), g.Made(mine^1<<60))
	}
	for range 1000 {
		if id := g.Next(); !g.Made(id) {
			t.Fatalf("%x is not known", id)
		}
	}
	if l := g.NextLease(); l <= 0 {
		t.Fatalf("lease %d", l)
	}
}
