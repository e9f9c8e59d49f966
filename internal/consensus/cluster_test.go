package consensus

import (
	"context"
	"errors"
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
	mu       sync.Mutex
	nodes    map[uint64]*Node
	machines map[uint64]*listMachine
	began    time.Time
}

func (w *wires) node(id uint64) *Node {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.nodes[id]
}

func (w *wires) Send(msgs []*raftpb.Message) {
	for _, m := range msgs {
		n := w.node(m.GetTo())
		if n == nil {
			continue
		}
		// A copy, as over a real wire.
		m := proto.Clone(m).(*raftpb.Message)
		if m.GetType() != raftpb.MsgSnap {
			_ = n.Receive(m)
			continue
		}
		// The state goes another way, and takes its time.
		w.mu.Lock()
		from, to := w.machines[m.GetFrom()], w.machines[m.GetTo()]
		w.mu.Unlock()
		go func() {
			m.Snapshot = to.disk.receive(from)
			err := n.Receive(m)
			w.node(m.GetFrom()).ReportSnapshot(m.GetTo(), err == nil)
		}()
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
	machines := map[uint64]*listMachine{}
	w := &wires{nodes: map[uint64]*Node{}, machines: machines, began: time.Now()}
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
		w.mu.Lock()
		machines[id] = newListMachine()
		w.mu.Unlock()
		n, err := Open(Options{ID: id, Log: log, Machine: machines[id], IDs: NewIDs(id, time.Now()), Transport: w,
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
		now := w.node(leader.Leader())
		if now == nil { // nobody leads for the moment
			return false
		}
		list := now.Progress()
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

// TestSnapshotOnRaftlog has a member join a cluster whose logs have forgotten how it began. It is sent a snapshot, stops, starts
// again from what its log names, and leads in the end.
func TestSnapshotOnRaftlog(t *testing.T) {
	w := &wires{nodes: map[uint64]*Node{}, machines: map[uint64]*listMachine{}, began: time.Now()}
	installed := make(chan SnapshotInstalled, 10)
	led := make(chan uint64, 100)
	fs := map[uint64]*vfs.MemFS{}
	// start runs a member until stop is called.
	start := func(id uint64) (stop func()) {
		if fs[id] == nil {
			fs[id] = vfs.NewCrashableMem()
		}
		log, err := raftlog.Open(raftlog.Options{FS: fs[id], Dir: "raft", Identity: raftlog.Identity{ClusterID: 1, MemberID: id}, SegmentBytes: 16 << 10})
		if err != nil {
			t.Fatal(err)
		}
		founded, err := Founded(log)
		if err != nil {
			t.Fatal(err)
		}
		machine := newListMachine()
		if s, ok := log.Installed(); ok {
			// What survives is the state that the log names.
			disk := w.machines[id].disk
			machine = disk.store(s.Dir).clone()
			machine.disk = disk
		} else if !founded && id < 3 {
			if err := Bootstrap(log, []Founder{{ID: 1}, {ID: 2}}); err != nil {
				t.Fatal(err)
			}
		}
		n, err := Open(Options{ID: id, Log: log, Machine: machine, IDs: NewIDs(id, time.Now()), Transport: w,
			CatchUpEntries: 10, CatchUpBytes: 2 << 10, RequestTimeout: time.Minute,
			Listener: func(e Event) {
				switch e := e.(type) {
				case LeadershipConfirmed:
					led <- id
				case SnapshotInstalled:
					installed <- e
				}
			}})
		if err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		w.nodes[id], w.machines[id] = n, machine
		w.mu.Unlock()
		ran := make(chan error, 1)
		go func() { ran <- n.Run(context.Background()) }()
		return sync.OnceFunc(func() {
			w.mu.Lock()
			delete(w.nodes, id)
			w.mu.Unlock()
			if err := n.Close(); err != nil {
				t.Error(err)
			}
			if err := <-ran; err != nil {
				t.Error(err)
			}
			// The power fails: nothing that was not synced before is kept.
			fs[id] = fs[id].CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 0})
			if err := log.Abandon(); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(start(1))
	t.Cleanup(start(2))
	leader := w.node(<-led)
	answers := make(chan error, 1000)
	propose := func(n *Node, text string) {
		id := n.opt.IDs.Next()
		if err := n.Propose(Proposal{ID: id, Data: encode(id, text), Done: func(_ Result, err error) { answers <- err }}); err != nil {
			t.Fatal(err)
		}
	}
	wait := func(count int) {
		t.Helper()
		for range count {
			if err := <-answers; err != nil {
				t.Fatal(err)
			}
		}
	}
	const count = 300
	for i := range count {
		propose(leader, fmt.Sprintf("a%d", i))
	}
	wait(count)
	waitFor(t, func() bool {
		first, err := leader.opt.Log.FirstIndex()
		return err == nil && first > count/2
	})

	stop := start(3)
	join := func(typ raftpb.ConfChangeType) {
		t.Helper()
		cc := &raftpb.ConfChange{Id: new(leader.opt.IDs.Next()), NodeId: new(uint64(3)), Type: typ.Enum()}
		if err := leader.ProposeConfChange(ConfProposal{Change: cc, Done: func(_ Result, err error) { answers <- err }}); err != nil {
			t.Fatal(err)
		}
		wait(1)
	}
	join(raftpb.ConfChangeAddLearnerNode)
	if s := <-installed; s.Index <= count/2 {
		t.Fatalf("installed %+v", s)
	}
	waitFor(t, func() bool { return w.node(3).Applied() >= leader.Applied() })
	join(raftpb.ConfChangeAddNode)
	stop()
	for i := range count / 2 {
		propose(leader, fmt.Sprintf("b%d", i))
	}
	wait(count / 2)
	t.Cleanup(start(3))
	third := w.node(3)
	waitFor(t, func() bool { return third.Applied() >= leader.Applied() })
	if a, b := w.machines[leader.opt.ID].texts(), w.machines[3].texts(); !slices.Equal(a, b) {
		t.Fatalf("the leader holds %d, the member that joined %d", len(a), len(b))
	}

	// Whoever leads hands over to another, and says so when that one leads.
	handOver(t, w, leader)
	waitFor(t, func() bool { return w.node(leader.opt.ID).Leader() != 0 && !leader.IsLeader() })
	waitFor(t, func() bool { return third.Leader() != 0 })
	if !third.IsLeader() {
		// A member that does not lead has nothing to hand over.
		if err := third.HandOver(context.Background()); err != nil {
			t.Fatal(err)
		}
		waitFor(t, func() bool {
			if third.IsLeader() {
				return true
			}
			if now := w.node(third.Leader()); now != nil {
				now.TransferLeadership(3)
			}
			return false
		})
	}
	propose(third, "last")
	wait(1)
}

func handOver(t *testing.T, w *wires, leader *Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	// Nobody is connected, it seems.
	w.mu.Lock()
	nodes := w.nodes
	w.nodes = map[uint64]*Node{}
	w.mu.Unlock()
	err := leader.HandOver(ctx)
	w.mu.Lock()
	w.nodes = nodes
	w.mu.Unlock()
	if !errors.Is(err, ErrNoSuccessor) {
		t.Fatalf("handing over to nobody: %v", err)
	}
	waitFor(t, func() bool { return leader.IsLeader() || leader.Leader() != 0 })
	if err := leader.HandOver(ctx); err != nil {
		t.Fatal(err)
	}
	if leader.IsLeader() {
		t.Fatal("it still leads")
	}
	// Alone, or at an end.
	done, end := context.WithCancel(ctx)
	end()
	if err := leader.HandOver(done); err != nil {
		t.Fatalf("a member that does not lead: %v", err)
	}
}
