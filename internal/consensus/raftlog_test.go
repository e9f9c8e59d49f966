package consensus

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/raftlog"
)

var _ Log = (*raftlog.Log)(nil)

// TestBootstrapTorn starts on a log whose first write a crash has cut between the entries and the commit index.
func TestBootstrapTorn(t *testing.T) {
	o := raftlog.Options{FS: vfs.NewMem(), Dir: "raft", Identity: raftlog.Identity{ClusterID: 1, MemberID: 1}}
	log, err := raftlog.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	torn := []*raftpb.Entry{{Type: raftpb.EntryConfChange.Enum(), Term: new(uint64(1)), Index: new(uint64(1))}}
	if _, err := log.Write([]raftlog.Append{{Entries: torn}}); err != nil {
		t.Fatal(err)
	}
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	if log, err = raftlog.Open(o); err != nil {
		t.Fatal(err)
	}
	if done, err := Founded(log); err != nil || done {
		t.Fatalf("a torn birth counts as whole: %v", err)
	}
	if err := Bootstrap(log, []Founder{{ID: 1}}); err != nil {
		t.Fatal(err)
	}
	if done, err := Founded(log); err != nil || !done {
		t.Fatalf("not founded after Bootstrap: %v", err)
	}
	if err := Bootstrap(log, []Founder{{ID: 1}}); err == nil {
		t.Fatal("a cluster was born twice")
	}
	if es, err := log.Entries(1, 2, 1<<20); err != nil || len(es[0].GetData()) == 0 {
		t.Fatalf("the torn entry is still there: %v %v", es, err)
	}
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestNodeOnRaftlog runs a Node on the real log, in a file system that can crash. Whoever got an answer before the crash must
// find the entry after it.
func TestNodeOnRaftlog(t *testing.T) {
	fs := vfs.NewCrashableMem()
	acked := map[string]bool{}
	for round := range 4 {
		log, err := raftlog.Open(raftlog.Options{FS: fs, Dir: "raft", Identity: raftlog.Identity{ClusterID: 1, MemberID: 1}, SegmentBytes: 64 << 10})
		if err != nil {
			t.Fatal(err)
		}
		if round == 0 {
			if err := Bootstrap(log, []Founder{{ID: 1}}); err != nil {
				t.Fatal(err)
			}
		}
		machine := newListMachine()
		led := make(chan struct{}, 10)
		n, err := Open(Options{ID: 1, Log: log, Machine: machine, IDs: NewIDs(1, time.Now()), Tick: 10 * time.Millisecond,
			DurableApplied: func() uint64 { return 0 },
			Listener: func(e Event) {
				if _, ok := e.(LeadershipConfirmed); ok {
					led <- struct{}{}
				}
			}})
		if err != nil {
			t.Fatal(err)
		}
		ran := make(chan error)
		go func() { ran <- n.Run(context.Background()) }()
		<-led
		got := machine.texts()
		for text := range acked {
			if !slices.Contains(got, text) {
				t.Fatalf("round %d: %q was acknowledged and is lost", round, text)
			}
		}

		var wg sync.WaitGroup
		var mu sync.Mutex
		crash, crashed := make(chan struct{}), false
		for w := range 8 {
			wg.Go(func() {
				for i := 0; ; i++ {
					text := fmt.Sprintf("%d.%d.%d", round, w, i)
					answered := make(chan error, 1)
					id := n.opt.IDs.Next()
					if err := n.Propose(Proposal{ID: id, Data: encode(id, text), Done: func(_ Result, err error) { answered <- err }}); err != nil {
						return
					}
					if err := <-answered; err != nil {
						return
					}
					mu.Lock()
					if crashed {
						mu.Unlock()
						continue // what is acknowledged after the crash need not be in it
					}
					acked[text] = true
					if len(acked) == 300*(round+1) {
						crashed = true
						fs = fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 0})
						close(crash)
					}
					mu.Unlock()
				}
			})
		}
		<-crash
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-ran; err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if err := log.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
