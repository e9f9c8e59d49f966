package server

import (
	"os"
	"runtime"
	"runtime/debug"
	"testing"
)

// TestCollectorPercent: the heap grows by what makes a collection worth its cost, whatever else is in it.
func TestCollectorPercent(t *testing.T) {
	for _, c := range []struct {
		live, scanned uint64
		want          int
	}{
		{0, 0, 100},
		{10 << 20, 10 << 20, 100},
		{256 << 20, 100 << 20, 100}, // Go's own is enough
		{1 << 30, 100 << 20, 50},    // leastGarbage
		{4 << 30, 512 << 20, 25},    // garbageFactor
		{4 << 30, 4 << 30, 100},     // never more than Go's own
		{1 << 40, 1 << 20, 1},       // 0 would be a collection after each allocation
	} {
		if got := collectorPercent(c.live, c.scanned); got != c.want {
			t.Errorf("%d bytes live, %d of them to be looked through: %d %%, want %d", c.live, c.scanned, got, c.want)
		}
	}
}

// TestCollectorIsSet: a member whose memory is full of values does not have it twice, and one that is not so full is not hampered by
// what was set before.
func TestCollectorIsSet(t *testing.T) {
	if os.Getenv("GOGC") != "" {
		t.Fatal("GOGC is set: run the tests without it")
	}
	before := debug.SetGCPercent(100)
	defer debug.SetGCPercent(before)
	percent := func() uint64 { _, _, percent := heap(); return percent }
	values := make([]byte, 4*leastGarbage) // of pages that are never touched
	runtime.GC()
	m := start(t, t.TempDir())
	waitFor(t, "a collector that runs before the values are there twice", func() bool { return percent() < 40 })
	stop(t, m)
	runtime.KeepAlive(values)
	runtime.GC()
	m = start(t, t.TempDir())
	defer stop(t, m)
	waitFor(t, "Go's own setting", func() bool { return percent() == 100 })
}
