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
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/raftlog"
)

// wires connects the Nodes of one process.
type wires struct {
	mu    sync.Mutex
	nodes map[uint64]*Node
	began time.Time
}

func (w *wires) node(id uint64) *Node {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.nodes[id]
}

func (w *wires) Send(msgs []*raftpb.Message) {
	for _, m := range msgs {
		if n := w.node(m.GetTo()); n != nil {
			// A copy, as over a real wire.
			_ = n.Receive(proto.Clone(m).(*raftpb.Message))
		}
	}
}

func (w *wires) ActiveSince(id uint64) time.Time {
	if w.node(id) == nil {
		return time.Time{}
	}
	return w.began
}

// TestClusterOnRaftlog runs three Nodes on real logs with little cache. The third starts late, so that most of what it needs
// has to be read from the leader's disk.
func TestClusterOnRaftlog(t *testing.T) {
	w := &wires{nodes: map[uint64]*Node{}, began: time.Now()}
	machines := map[uint64]*listMachine{}
	led := make(chan uint64, 100)
	start := func(id uint64) {
		log, err := raftlog.Open(raftlog.Options{FS: vfs.NewMem(), Dir: "raft", Identity: raftlog.Identity{ClusterID: 1, MemberID: id},
			SegmentBytes: 64 << 10, CacheBytes: 8 << 10, PrefetchBytes: 16 << 10})
		if err != nil {
			t.Fatal(err)
		}
		if err := Bootstrap(log, []Founder{{ID: 1}, {ID: 2}, {ID: 3}}); err != nil {
			t.Fatal(err)
		}
		machines[id] = newListMachine()
		n, err := Open(Options{ID: id, Log: log, Machine: machines[id], IDs: NewIDs(id, time.Now()), Transport: w, Tick: 10 * time.Millisecond,
			MaxMessageBytes: 4 << 10, MaxInflightBytes: 16 << 10, RequestTimeout: time.Minute,
			Listener: func(e Event) {
				if _, ok := e.(LeadershipConfirmed); ok {
					led <- id
				}
			}})
		if err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		w.nodes[id] = n
		w.mu.Unlock()
		ran := make(chan error, 1)
		go func() { ran <- n.Run(context.Background()) }()
		t.Cleanup(func() {
			if err := n.Close(); err != nil {
				t.Error(err)
			}
			if err := <-ran; err != nil {
				t.Error(err)
			}
			if err := log.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	start(1)
	start(2)
	leader := w.node(<-led)
	other := w.node(3 - leader.opt.ID)

	const count = 2000
	answers := make(chan error, count)
	propose := func(n *Node, text string) {
		id := n.opt.IDs.Next()
		if err := n.Propose(Proposal{ID: id, Data: encode(id, text), Done: func(_ Result, err error) { answers <- err }}); err != nil {
			t.Fatal(err)
		}
	}
	pad := string(make([]byte, 100))
	for i := range count / 2 {
		propose(leader, fmt.Sprintf("l%d%s", i, pad))
		propose(other, fmt.Sprintf("f%d%s", i, pad))
	}
	for range count {
		if err := <-answers; err != nil {
			t.Fatal(err)
		}
	}

	start(3)
	third := w.node(3)
	read := make(chan error, 1)
	waitFor(t, func() bool { return third.Leader() != 0 })
	third.ReadIndex(time.Time{}, func(err error) { read <- err })
	if err := <-read; err != nil {
		t.Fatal(err)
	}
	if got := len(machines[3].texts()); got != count {
		t.Fatalf("a read at the late member sees %d of %d", got, count)
	}
	if a, b := machines[1].texts(), machines[3].texts(); !slices.Equal(a[:count], b[:count]) {
		t.Fatal("members applied different sequences")
	}
	waitFor(t, func() bool {
		list := w.node(leader.Leader()).Progress()
		return len(list) == 3 && list[2].ID == 3 && list[2].Replicating && list[2].Match >= uint64(count)
	})

	// What raft is told about a peer that was unreachable does no harm to one that is reachable again.
	leader.ReportUnreachable(3)
	// Leadership moves on request.
	waitFor(t, func() bool {
		if third.IsLeader() {
			return true
		}
		w.node(leader.opt.ID).TransferLeadership(3)
		return false
	})
	if third.MayReadNow() {
		t.Fatal("the leader of three may not read without asking")
	}
}
