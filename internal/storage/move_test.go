package storage

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// Records that come in order are written once: what a flush made is moved down
// the levels as it is, though it is larger than Pebble's usual tables, and
// though a small row changed beside it.
func TestSequentialRecordsAreMoved(t *testing.T) {
	s := mustOpen(t, Options{FS: vfs.NewMem(), Dir: "db", MemTableBytes: 16 << 20})
	rnd := rand.NewChaCha8([32]byte{1})
	kv := make([]byte, 4096)
	main := int64(0)
	var settled uint64
	for round := range 4 {
		set(t, s, "row", "1")
		for range 1500 {
			main++
			rnd.Read(kv) // it never fails, and is not to be compressed away
			b := s.NewBatch()
			b.SetRevision(main, 0, RevisionRecord{KV: kv})
			commit(t, s, b)
		}
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
		// Nothing tells of the end of a compaction, so the store is looked at until level 0 is empty.
		for began := time.Now(); s.Metrics().Levels[0].TablesCount > 0; time.Sleep(time.Millisecond) {
			if time.Since(began) > 20*time.Second {
				t.Fatalf("level 0 keeps its tables:\n%s", s.Metrics())
			}
		}
		total := s.Metrics().Total()
		if round == 0 { // while there is nothing below, Pebble merges the rows with the records
			settled = total.TableBytesCompacted
		} else if rewritten := total.TableBytesCompacted - settled; rewritten > 1<<20 {
			t.Fatalf("%d bytes were rewritten after flush %d:\n%s", rewritten, round+1, s.Metrics())
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
