package server

import (
	"context"
	"math"
	"os"
	"runtime/debug"
	gometrics "runtime/metrics"
	"time"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/storage"
)

const (
	// collectorEvery is the time between two settings of the garbage collector.
	collectorEvery = 5 * time.Second
	// bytesPerKey is what the index takes for a key with some history, generously.
	bytesPerKey = 256
	// Between two collections the heap may grow by garbageFactor times what a
	// collection has to look through, and by leastGarbage in any case.
	garbageFactor = 2
	leastGarbage  = 512 << 20
)

// limitMemory keeps the garbage collector within --memory-budget, what comes on
// top of it (index and memtables), and in any case nine tenths of what the
// process may use, unless the operator said otherwise by GOMEMLIMIT. And it has
// the collector run as often as that is cheap, unless the operator said how
// often, by GOGC.
func (m *Member) limitMemory(ctx context.Context) {
	byLimit, byGarbage := os.Getenv("GOMEMLIMIT") == "", os.Getenv("GOGC") == ""
	most := config.MemoryLimit()
	t := m.clock.NewTicker(collectorEvery)
	defer t.Stop()
	for {
		if byLimit {
			debug.SetMemoryLimit(min(most/10*9, m.cfg.MemoryBudget.Of(most)+storage.UnflushedBytes+bytesPerKey*m.machine().Root().Keys()))
		}
		live, scanned, is := heap()
		if want := collectorPercent(live, scanned); byGarbage && math.Abs(float64(want)-float64(is)) > float64(is)/10 { // each setting stops everybody for a moment
			debug.SetGCPercent(want)
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C():
		}
	}
}

// heap returns what was live at the end of the last collection, in bytes, how
// much of that may hold pointers, and what GOGC is.
func heap() (live, scanned, percent uint64) {
	samples := []gometrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/heap:bytes"}, {Name: "/gc/gogc:percent"}}
	gometrics.Read(samples)
	return samples[0].Value.Uint64(), samples[1].Value.Uint64(), samples[2].Value.Uint64()
}

// collectorPercent is the collector's GOGC. What a collection costs is looking
// through what may hold pointers. Values, most of a large heap, hold none; Go's
// own 100 percent would have memory for all of them twice.
func collectorPercent(live, scanned uint64) int {
	garbage := max(garbageFactor*scanned, leastGarbage)
	return int(min(100, max(1, garbage*100/max(live, 1))))
}
