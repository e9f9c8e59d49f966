package consensus

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/raftlog"
)

// gatedLog is a log whose syncs may be held up, or fail.
type gatedLog struct {
	*memLog
	mu      sync.Mutex
	entered chan struct{} // told of each sync that is held up
	gate    chan error    // nil: open
	written int           // entries, since the gate was set

	syncedBy string
}

func (l *gatedLog) hold() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entered, l.gate, l.written = make(chan struct{}, 100), make(chan error), 0
}

func (l *gatedLog) open() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.gate)
	l.gate = nil
}

func (l *gatedLog) Write(appends []raftlog.Append) (bool, error) {
	l.mu.Lock()
	for _, a := range appends {
		l.written += len(a.Entries)
	}
	l.mu.Unlock()
	return l.memLog.Write(appends)
}

func (l *gatedLog) Sync() error {
	l.mu.Lock()
	gate, entered := l.gate, l.entered
	l.syncedBy = worker()
	l.mu.Unlock()
	if gate != nil {
		entered <- struct{}{}
		if err := <-gate; err != nil {
			return err
		}
	}
	return l.memLog.Sync()
}

func startGated(t *testing.T) (*member, *gatedLog) {
	t.Helper()
	var l *gatedLog
	m := startMember(t, func(o *Options) {
		l = &gatedLog{memLog: o.Log.(*memLog)}
		o.Log = l
	})
	waitFor(t, m.MayReadNow)
	waitFor(t, m.atRest)
	return m, l
}

// startHanging has the sync of a first proposal hang, with a second one behind it that the writer's goroutine has been given.
func startHanging(t *testing.T) (m *member, l *gatedLog, first, second <-chan answer) {
	t.Helper()
	m, l = startGated(t)
	l.hold()
	first = m.propose(t, "first")
	<-l.entered
	second = m.propose(t, "second")
	waitFor(t, func() bool {
		m.toWrite.mu.Lock()
		defer m.toWrite.mu.Unlock()
		return len(m.toWrite.items) > 0 || !m.toWrite.parked
	})
	return m, l, first, second
}

// atRest tells whether nobody has anything to do.
func (m *member) atRest() bool {
	m.turn.Lock()
	defer m.turn.Unlock()
	return !m.turn.busy && m.toWrite.free() && m.toApply.free() && m.done.free()
}

// free tells whether the queue could be claimed now.
func (q *queue[T]) free() bool {
	if !q.claim() {
		return false
	}
	q.work.Unlock()
	return true
}

// TestLoopWritesItself: a lone member with one client hands nothing on: sync and answer come from one goroutine.
func TestLoopWritesItself(t *testing.T) {
	m, l := startGated(t)
	for i := range 20 {
		waitFor(t, m.atRest)
		by := make(chan string, 1)
		id := m.opt.IDs.Next()
		if err := m.Propose(Proposal{ID: id, Data: encode(id, "x"), Done: func(Result, error) { by <- worker() }}); err != nil {
			t.Fatal(err)
		}
		if got := <-by; got != "loop" {
			t.Fatalf("proposal %d was answered by the goroutine of %s", i, got)
		}
		l.mu.Lock()
		syncedBy := l.syncedBy
		l.mu.Unlock()
		if syncedBy != "loop" {
			t.Fatalf("proposal %d was synced by the goroutine of %s", i, syncedBy)
		}
	}
}

// worker names the goroutine that runs it.
func worker() string {
	stack := string(debug.Stack())
	for name, f := range map[string]string{"loop": "consensus.(*Node).rounds(", "write": "consensus.(*Node).write(", "callBack": "consensus.(*Node).callBack("} {
		if strings.Contains(stack, f) {
			return name
		}
	}
	return stack
}

// TestLoopWhileDiskHangs: a sync that does not return keeps nobody from hearing that time is up, and what was proposed meanwhile
// comes after it, in order.
func TestLoopWhileDiskHangs(t *testing.T) {
	m, l, first, second := startHanging(t)
	for range 80 { // more than the time-out of a request
		m.clock.Advance(100 * time.Millisecond)
		waitFor(t, func() bool { return m.SinceTick() == 0 })
	}
	for _, c := range []<-chan answer{first, second} {
		if a := <-c; a.err == nil {
			t.Fatalf("answer %+v while the disk hangs", a)
		}
	}
	read := make(chan error, 1)
	m.ReadIndex(time.Time{}, func(err error) { read <- err })
	if err := <-read; err != nil {
		t.Fatalf("a read of what is applied: %v", err)
	}
	l.open()
	if a := <-m.propose(t, "third"); a.err != nil {
		t.Fatal(a.err)
	}
	if got := fmt.Sprint(m.machine.texts()); got != "[first second third]" {
		t.Fatalf("applied %s", got)
	}
}

// TestLoopAfterFailedSync: nothing is written after a sync that failed, whoever was doing it.
func TestLoopAfterFailedSync(t *testing.T) {
	m, l, first, second := startHanging(t)
	broken := errors.New("the disk is broken")
	l.gate <- broken
	if err := <-m.ran; !errors.Is(err, broken) {
		t.Fatalf("Run returned %v", err)
	}
	for _, c := range []<-chan answer{first, second} {
		if a := <-c; !errors.Is(a.err, ErrStopped) {
			t.Fatalf("answer %+v", a)
		}
	}
	if l.mu.Lock(); l.written != 1 {
		t.Errorf("%d entries written, want the one whose sync failed", l.written)
	}
	l.mu.Unlock()
	if got := m.machine.texts(); len(got) != 0 {
		t.Errorf("applied %q", got)
	}
}

// TestLoopStopsBeingAlone: what was to be written after the conf change that ends a member's being alone is written, by the
// writer's goroutine.
func TestLoopStopsBeingAlone(t *testing.T) {
	log, c := newMemLog(), clock.NewFake(time.Unix(1e9, 0))
	if err := Bootstrap(log, []Founder{{ID: 1}}); err != nil {
		t.Fatal(err)
	}
	n, err := Open(Options{ID: 1, Log: log, Machine: newListMachine(), IDs: NewIDs(1, c.Now()), Clock: c, Listener: func(Event) {}})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if err := n.rounds(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	founding, _ := n.toApply.take(nil) // before that the core does not know that it is alone
	if err := n.applyAll(founding, n.in.mu.Unlock); err != nil {
		t.Fatal(err)
	}
	// From now on the test is the loop, and the others are idle.
	n.toWrite.parked, n.toApply.parked, n.done.parked = true, true, true
	round := func(done bool) mine {
		t.Helper()
		own, err := n.round(0, done)
		if err != nil {
			t.Fatal(err)
		}
		return own
	}
	do := func(own mine) {
		t.Helper()
		if err := n.do(t.Context(), own); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.rounds(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	learner := &raftpb.ConfChange{Type: raftpb.ConfChangeAddLearnerNode.Enum(), NodeId: proto.Uint64(2), Id: proto.Uint64(n.opt.IDs.Next())}
	if err := n.ProposeConfChange(ConfProposal{Change: learner, Done: func(Result, error) {}}); err != nil {
		t.Fatal(err)
	}
	own := round(false)
	if len(own.append) != 1 {
		t.Fatalf("the change is not the loop's to write: %+v", own)
	}
	do(own)
	id := n.opt.IDs.Next()
	if err := n.Propose(Proposal{ID: id, Data: encode(id, "x"), Done: func(Result, error) {}}); err != nil {
		t.Fatal(err)
	}
	own = round(true)
	if len(own.apply) != 1 || len(n.turn.later) != 1 {
		t.Fatalf("work %+v, to be written later %v; want the change to be applied, and the proposal to wait for it", own, n.turn.later)
	}
	do(own)
	if own = round(true); own.any() || len(n.turn.later) > 0 || n.toWrite.len() != 1 {
		t.Fatalf("no longer alone: work %+v, to be written later %v, %d for the writer; want the proposal to be the writer's", own, n.turn.later, n.toWrite.len())
	}
	if !n.toWrite.work.TryLock() {
		t.Error("the writer cannot work")
	}
}
