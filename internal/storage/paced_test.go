package storage

import (
	"context"
	"crypto/rand"
	"sync/atomic"
	"testing"
)

// TestCompacting: what a compaction writes is told, what a flush writes is not.
func TestCompacting(t *testing.T) {
	var wrote, tables atomic.Int64
	s, err := Open(Options{Dir: t.TempDir(), Manual: true, Compacting: func() func(int) {
		tables.Add(1)
		return func(n int) { wrote.Add(int64(n)) }
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const records, size = 200, 10 << 10
	kv := make([]byte, size)
	for range 2 { // tables that overlap, or they would be moved
		for i := range int64(records) {
			rand.Read(kv)
			b := s.NewBatch()
			b.SetRevision(i+1, 0, RevisionRecord{KV: kv})
			if err := s.Commit(b); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	if n := wrote.Load() + tables.Load(); n != 0 {
		t.Fatalf("flushes were told of: %d", n)
	}
	lower, upper := RevisionBounds(0, 0)
	if err := s.Reclaim(context.Background(), lower, upper); err != nil {
		t.Fatal(err)
	}
	if n := wrote.Load(); n < records*size || tables.Load() == 0 {
		t.Errorf("a compaction of %d bytes told of %d in %d tables", records*size, n, tables.Load())
	}
}
