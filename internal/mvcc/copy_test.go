package mvcc

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/engram-kv/engram/internal/storage"
)

// TestCheckpointOfStore takes checkpoints of store and index beside puts, deletes
// and compactions: the index that comes of the file and what follows it is that
// of a full scan.
func TestCheckpointOfStore(t *testing.T) {
	f := newFixture(t, func(o *Options) {
		o.CompactionBatch, o.CheckpointBytes, o.CheckpointInterval, o.ValueBudgetBytes, o.ViewAge = 5, 1<<10, 1, -1, 1
	})
	var (
		mu       sync.Mutex // the applier's
		rnd      = rand.New(rand.NewPCG(1, 2))
		taken    = 0
		deleting = 0
		stop     = make(chan struct{})
		wait     sync.WaitGroup
	)
	wait.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			mu.Lock()
			f.now = f.now.Add(waitPause)
			switch rnd.IntN(12) {
			case 0, 1:
				f.del(fmt.Sprint("k", rnd.IntN(30)))
			case 2:
				if rev := f.root.revision - int64(rnd.IntN(3)); rev > f.root.compacted {
					f.compact(rev)
				}
			case 3, 4, 5, 6:
				_, _, err := f.CompactStep()
				if err != nil {
					t.Error(err)
				}
			default:
				f.put(fmt.Sprint("k", rnd.IntN(30)), strings.Repeat("x", rnd.IntN(40)))
			}
			mu.Unlock()
		}
	})
	for taken < 50 {
		dir := fmt.Sprint("sending-", taken)
		taken++
		if rnd := taken % 3; rnd > 0 {
			mu.Lock()
			f.PrepareCheckpoint()
			mu.Unlock()
		}
		f.check(f.Store.Checkpoint(dir+"/db", dir+"/index"))
		open := func(index string) *Store {
			st, err := storage.Open(storage.Options{FS: f.fs, Dir: dir + "/db", ReadOnly: true})
			f.check(err)
			s, err := Open(Options{Storage: st, FS: f.fs, Dir: index})
			f.check(err)
			s.Abandon()
			f.check(st.Close())
			return s
		}
		_, err := f.fs.Stat(dir + "/index/" + CheckpointFile)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		there := err == nil
		a, b := open(dir+"/index"), open("")
		if got, want := describe(a.root.index), describe(b.root.index); got != want || a.root.usageBytes != b.root.usageBytes || a.index != b.index {
			t.Fatalf("checkpoint %d, at revision %d, compacted at %d of %d: with its index\n%swithout\n%s", taken, b.root.revision, b.finished, b.scheduled, got, want)
		}
		if there && a.saver.revision < 0 {
			t.Errorf("checkpoint %d: its index was of no use", taken)
		}
		if b.scheduled > b.finished {
			deleting++
		}
		f.check(f.fs.RemoveAll(dir))
	}
	close(stop)
	wait.Wait()
	if deleting == 0 {
		t.Error("no checkpoint was taken while a compaction was under way: the test tries nothing")
	}
}

// TestCheckpointHoldsDeletion: while a checkpoint is taken no compaction begins
// to delete.
func TestCheckpointHoldsDeletion(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.ViewAge = 1 })
	f.put("a", "1", "a", "2", "b", "3")
	f.compact(3)
	f.holds.Add(1)
	for range 20 {
		f.now = f.now.Add(waitPause)
		more, pause, err := f.CompactStep()
		f.check(err)
		if !more || len(f.jobs) == 0 {
			t.Fatal("the compaction is done")
		}
		if f.jobs[0].phase == phaseWait && pause == 0 {
			t.Fatal("it waits without a pause")
		}
	}
	if f.deleting.Load() >= 3 || f.jobs[0].phase != phaseWait {
		t.Errorf("deletion has begun: %d, phase %d", f.deleting.Load(), f.jobs[0].phase)
	}
	f.holds.Add(-1)
	f.work()
	if f.finished != 3 {
		t.Errorf("compacted at %d", f.finished)
	}
}
