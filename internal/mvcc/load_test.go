package mvcc

import (
	"fmt"
	"math"
	"runtime"
	"testing"

	"github.com/engram-kv/engram/internal/storage"
)

// A full scan cuts the log among several scanners, and each record is in one
// part, however large its revision.
func TestScanOfLargeRevisions(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(maxScanners))
	for _, last := range []int64{1, 1023, 1024, 5000, 1<<62 - 1, 1 << 62, math.MaxInt64 - 100} {
		f := newFixture(t, nil)
		f.check(f.Store.Close())
		revs := []int64{}
		for _, rev := range []int64{2, last / 3, last / 2, last - last/maxScanners, last - 1, last} {
			if rev > 1 && (len(revs) == 0 || rev > revs[len(revs)-1]) {
				revs = append(revs, rev)
			}
		}
		b := f.storage.NewBatch()
		for _, rev := range revs {
			kv := keyValue{key: fmt.Appendf(nil, "k%d", rev), create: rev, mod: rev, version: 1}
			b.SetRevision(rev, 0, storage.RevisionRecord{KV: kv.append(nil)})
		}
		f.check(f.storage.Commit(b))
		f.check(f.saver.remove())
		f.check(f.storage.Close())
		f.open()
		if got := f.Root().Keys(); got != int64(len(revs)) {
			t.Errorf("%d keys of the revisions %d", got, revs)
		}
		f.reopen() // and from the index checkpoint
		if got := f.Root().Keys(); got != int64(len(revs)) {
			t.Errorf("after a restart %d keys of the revisions %d", got, revs)
		}
	}
}
