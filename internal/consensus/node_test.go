package consensus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/raftlog"
)

// member is a Node under test with everything below it.
type member struct {
	*Node
	log     *memLog
	machine *listMachine
	clock   *clock.Fake
	events  chan Event
	ran     chan error
}

// startMember runs a member that is alone, on a fake clock, and waits until it leads.
func startMember(t *testing.T, change func(*Options)) *member {
	t.Helper()
	m := &member{log: newMemLog(), machine: newListMachine(), clock: clock.NewFake(time.Unix(1e9, 0)),
		events: make(chan Event, 1000), ran: make(chan error, 1)}
	if err := Bootstrap(m.log, []Founder{{ID: 1}}); err != nil {
		t.Fatal(err)
	}
	m.start(t, change)
	m.waitConfirmed()
	return m
}

func (m *member) start(t *testing.T, change func(*Options)) {
	t.Helper()
	opt := Options{ID: 1, Log: m.log, Machine: m.machine, IDs: NewIDs(1, m.clock.Now()), Clock: m.clock,
		Listener: func(e Event) { m.events <- e }}
	if change != nil {
		change(&opt)
	}
	n, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	m.Node = n
	go func() { m.ran <- n.Run(context.Background()) }()
	t.Cleanup(func() { n.Close() })
}

func (m *member) waitConfirmed() {
	for e := range m.events {
		if _, ok := e.(LeadershipConfirmed); ok {
			return
		}
	}
}

type answer struct {
	result Result
	err    error
}

// propose returns where the answer will come.
func (m *member) propose(t *testing.T, text string) <-chan answer {
	t.Helper()
	ch := make(chan answer, 2)
	id := m.opt.IDs.Next()
	if err := m.Propose(Proposal{ID: id, Data: encode(id, text), Done: func(r Result, err error) { ch <- answer{r, err} }}); err != nil {
		t.Fatal(err)
	}
	return ch
}

func TestNodeAnswersProposalsAndReads(t *testing.T) {
	m := startMember(t, nil)
	a := <-m.propose(t, "one")
	if a.err != nil || a.result.Err != nil || a.result.Reply != "one" {
		t.Fatalf("answer %+v, want the reply to be handed through", a)
	}
	if b := <-m.propose(t, "refuse"); b.err != nil || !errors.Is(b.result.Err, errRefused) || b.result.Index != a.result.Index+1 {
		t.Fatalf("answer %+v, want the machine's error as a result one index later", b)
	}
	read := make(chan error)
	m.ReadIndex(time.Time{}, func(err error) { read <- err })
	if err := <-read; err != nil {
		t.Fatal(err)
	}
	if !m.MayReadNow() {
		t.Fatal("a lone leader that has applied everything may read")
	}
	if st := m.Status(); st.Leader != 1 || st.Applied != a.result.Index+1 || st.Commit != st.Applied || st.Learner || st.LeaderChanges != 1 {
		t.Fatalf("status %+v", st)
	}
}

func TestNodeConcurrentProposalsAndReads(t *testing.T) {
	m := startMember(t, nil)
	const workers, each = 16, 200
	var wg sync.WaitGroup
	var failed atomic.Int64
	var highest atomic.Uint64
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				a := <-m.propose(t, fmt.Sprintf("%d/%d", w, i))
				if a.err != nil {
					failed.Add(1)
					continue
				}
				for h := highest.Load(); h < a.result.Index && !highest.CompareAndSwap(h, a.result.Index); h = highest.Load() {
				}
				before := highest.Load()
				ch := make(chan error, 1)
				m.ReadIndex(time.Time{}, func(err error) { ch <- err })
				if err := <-ch; err != nil || m.Applied() < before {
					failed.Add(1)
				}
				m.Status()
				m.Progress()
			}
		})
	}
	wg.Wait()
	if n := failed.Load(); n != 0 {
		t.Fatalf("%d failures", n)
	}
	next := map[int]int{}
	for _, text := range m.machine.texts() {
		var w, i int
		if _, err := fmt.Sscanf(text, "%d/%d", &w, &i); err != nil || next[w] != i {
			t.Fatalf("applied %q when worker %d was at %d", text, w, next[w])
		}
		next[w]++
	}
	if len(next) != workers || next[0] != each {
		t.Fatalf("applied %v", next)
	}
	waitFor(t, func() bool {
		return m.Status().Pending == 0 && m.pendingBytes.Load() == 0 && m.pendingReads.Load() == 0 && m.unstored.Load() == 0
	})
}

// waitFor spins until ok; the test's own time-out ends it.
func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for !ok() {
		if t.Context().Err() != nil {
			t.Fatal("gave up")
		}
		time.Sleep(time.Millisecond)
	}
}

func TestNodeLimits(t *testing.T) {
	gate := make(chan struct{})
	m := startMember(t, func(o *Options) { o.MaxPending = 2; o.MaxReads = 1 })
	m.machine.mu.Lock() // hold the applier up
	first, second := m.propose(t, "1"), m.propose(t, "2")
	if err := m.Propose(Proposal{ID: 7, Done: func(Result, error) { t.Error("refused and called back") }}); !errors.Is(err, ErrTooManyRequests) {
		t.Fatalf("third proposal of two: %v", err)
	}
	waitFor(t, func() bool { return m.Committed() == 4 })
	m.ReadIndex(time.Time{}, func(err error) { gate <- struct{}{} })
	refused := make(chan error, 1)
	m.ReadIndex(time.Time{}, func(err error) { refused <- err })
	if err := <-refused; !errors.Is(err, ErrTooManyRequests) {
		t.Fatalf("second read of one: %v", err)
	}
	if m.MayReadNow() {
		t.Fatal("may read with entries committed and not applied")
	}
	m.machine.mu.Unlock()
	<-first
	<-second
	<-gate
}

func TestNodeTimeoutAndCancel(t *testing.T) {
	m := startMember(t, nil)
	m.machine.mu.Lock()
	slow := m.propose(t, "slow")
	waitFor(t, func() bool { return m.Committed() == 3 })
	cancelled := make(chan answer, 2)
	id := m.opt.IDs.Next()
	if err := m.Propose(Proposal{ID: id, Data: encode(id, "x"), Done: func(r Result, err error) { cancelled <- answer{r, err} }}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return m.Committed() == 4 })
	m.Cancel(id)
	if a := <-cancelled; !errors.Is(a.err, ErrCanceled) {
		t.Fatalf("cancelled: %v", a.err)
	}
	for range 71 {
		m.clock.Advance(100 * time.Millisecond)
		waitFor(t, func() bool { return m.SinceTick() == 0 })
	}
	if a := <-slow; !errors.Is(a.err, ErrTimeoutDueToLeaderFail) {
		t.Fatalf("a proposal made as the leader was elected ended with %v", a.err)
	}
	m.machine.mu.Unlock()
	if a := <-m.propose(t, "after"); a.err != nil {
		t.Fatal(a.err)
	}
	if got := m.machine.texts(); len(got) != 3 {
		t.Fatalf("applied %q: a proposal that timed out is still applied", got)
	}
	if len(slow)+len(cancelled) != 0 {
		t.Fatal("called back twice")
	}
}

func TestNodeStopAnswersAll(t *testing.T) {
	m := startMember(t, nil)
	m.machine.gate = make(chan struct{}, 1)
	a := m.propose(t, "applied at the last moment")
	waitFor(t, func() bool { return m.Committed() == 3 })
	closed := make(chan error)
	go func() { closed <- m.Close() }()
	waitFor(t, func() bool { m.Node.in.mu.Lock(); defer m.Node.in.mu.Unlock(); return m.Node.in.closed })
	m.machine.gate <- struct{}{}
	if r := <-a; r.err != nil || r.result.Reply == nil {
		t.Fatalf("answer %+v, want the result that was known", r)
	}
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	if err := <-m.ran; err != nil {
		t.Fatal(err)
	}
	if err := m.Propose(Proposal{ID: 1}); !errors.Is(err, ErrStopped) {
		t.Fatalf("Propose after Close: %v", err)
	}
	read := make(chan error, 1)
	m.ReadIndex(time.Time{}, func(err error) { read <- err })
	if err := <-read; !errors.Is(err, ErrStopped) {
		t.Fatalf("ReadIndex after Close: %v", err)
	}
	if err := m.Receive(&raftpb.Message{}); !errors.Is(err, ErrStopped) {
		t.Fatalf("Receive after Close: %v", err)
	}
	if err := m.Run(context.Background()); !errors.Is(err, ErrStopped) {
		t.Fatalf("second Run: %v", err)
	}
}

func TestNodeClosedBeforeRun(t *testing.T) {
	m := &member{log: newMemLog(), machine: newListMachine()}
	if err := Bootstrap(m.log, []Founder{{ID: 1}}); err != nil {
		t.Fatal(err)
	}
	n, err := Open(Options{ID: 1, Log: m.log, Machine: m.machine, IDs: NewIDs(1, time.Now())})
	if err != nil {
		t.Fatal(err)
	}
	m.Node = n
	a := m.propose(t, "never")
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if r := <-a; !errors.Is(r.err, ErrStopped) {
		t.Fatalf("answer %+v", r)
	}
}

func TestNodeStopsOnFailure(t *testing.T) {
	broken := errors.New("broken disk")
	for name, breakIt := range map[string]func(*member){
		"log":     func(m *member) { m.log.mu.Lock(); m.log.failNext = broken; m.log.mu.Unlock() },
		"reading": func(m *member) { m.log.mu.Lock(); m.log.failRead = broken; m.log.mu.Unlock() },
		"machine": func(m *member) { m.machine.mu.Lock(); m.machine.fail = broken; m.machine.mu.Unlock() },
	} {
		t.Run(name, func(t *testing.T) {
			m := startMember(t, nil)
			breakIt(m)
			if a := <-m.propose(t, "x"); !errors.Is(a.err, ErrStopped) {
				t.Fatalf("answer %+v", a)
			}
			if err := <-m.ran; !errors.Is(err, broken) {
				t.Fatalf("Run returned %v", err)
			}
		})
	}
}

func TestNodeWaitsForSpace(t *testing.T) {
	m := startMember(t, nil)
	m.log.mu.Lock()
	m.log.failNext = fmt.Errorf("no room: %w", raftlog.ErrNoSpace)
	m.log.mu.Unlock()
	a := m.propose(t, "patient")
	m.clock.WaitAlarms(2) // the ticker, and the writer's timer
	m.clock.Advance(noSpaceRetry)
	if r := <-a; r.err != nil {
		t.Fatal(r.err)
	}
}

func TestNodeGate(t *testing.T) {
	full := errors.New("disk reserve used up")
	var shut atomic.Bool
	m := startMember(t, func(o *Options) {
		o.Gate = func() error {
			if shut.Load() {
				return full
			}
			return nil
		}
	})
	shut.Store(true)
	if a := <-m.propose(t, "x"); !errors.Is(a.err, full) {
		t.Fatalf("answer %+v", a)
	}
	if last, _ := m.log.LastIndex(); last != 2 {
		t.Fatalf("the log ends at %d, a refused proposal reached it", last)
	}
	shut.Store(false)
	if a := <-m.propose(t, "y"); a.err != nil {
		t.Fatal(a.err)
	}
}

func TestNodeConfChange(t *testing.T) {
	m := startMember(t, nil)
	change := func(cc *raftpb.ConfChange) <-chan answer {
		ch := make(chan answer, 2)
		cc.Id = new(m.opt.IDs.Next())
		if err := m.ProposeConfChange(ConfProposal{Change: cc, Done: func(r Result, err error) { ch <- answer{r, err} }}); err != nil {
			t.Fatal(err)
		}
		return ch
	}
	first := change(&raftpb.ConfChange{Type: raftpb.ConfChangeAddLearnerNode.Enum(), NodeId: new(uint64(2))})
	second := change(&raftpb.ConfChange{Type: raftpb.ConfChangeAddNode.Enum(), NodeId: new(uint64(3)), Context: []byte("refuse")})
	if a := <-first; a.err != nil || a.result.ConfChange.GetNodeId() != 2 {
		t.Fatalf("answer %+v", a)
	}
	if a := <-second; a.err != nil || !errors.Is(a.result.Err, errRefused) || a.result.ConfChange.GetNodeId() != 0 {
		t.Fatalf("answer %+v", a)
	}
	for e := range m.events {
		if c, ok := e.(MembersChanged); ok && len(c.ConfState.GetLearners()) == 1 {
			break
		}
	}
	if !m.MayReadNow() || m.Learner() {
		t.Fatal("with a learner beside it a lone voter still answers for itself")
	}
	if err := m.ProposeConfChange(ConfProposal{Change: &raftpb.ConfChange{}}); err == nil {
		t.Fatal("a change without an id was taken")
	}
	if st := m.Status(); st.Term != m.Term() || st.AppliedTerm != m.AppliedTerm() || st.Term != 2 {
		t.Fatalf("status %+v", st)
	}
}

func TestNodeReceiveIsBounded(t *testing.T) {
	log := newMemLog()
	if err := Bootstrap(log, []Founder{{ID: 1}, {ID: 2}}); err != nil {
		t.Fatal(err)
	}
	n, err := Open(Options{ID: 1, Log: log, Machine: newListMachine(), IDs: NewIDs(1, time.Now()), MaxReceived: 3, MaxReceivedBytes: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	// Nothing is taken from the mailbox: it does not run.
	large := &raftpb.Message{Entries: []*raftpb.Entry{{Data: make([]byte, 80)}}}
	for i, step := range []struct {
		m  *raftpb.Message
		ok bool
	}{
		{large, true}, {large, false}, {&raftpb.Message{}, true}, {&raftpb.Message{}, true}, {&raftpb.Message{}, false},
	} {
		if err := n.Receive(step.m); step.ok && err != nil || !step.ok && !errors.Is(err, ErrTooManyRequests) {
			t.Fatalf("message %d: %v", i, err)
		}
	}
}

func TestNodeRestart(t *testing.T) {
	m := startMember(t, nil)
	for i := range 10 {
		<-m.propose(t, fmt.Sprint(i))
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	old := m.machine
	// The machine comes back as it was at an earlier time, the log with what was synced.
	m.log, m.machine = m.log.crash(0), newListMachine()
	m.start(t, nil)
	m.waitConfirmed()
	if a := <-m.propose(t, "10"); a.err != nil {
		t.Fatal(a.err)
	}
	got := m.machine.texts()
	if len(got) != 11 || len(old.texts()) != 10 {
		t.Fatalf("applied %q", got)
	}
	for i, text := range got {
		if text != fmt.Sprint(i) {
			t.Fatalf("applied %q", got)
		}
	}
}

// sends is a Transport to members that are not there.
type sends func(*raftpb.Message)

func (s sends) Send(msgs []*raftpb.Message) {
	for _, m := range msgs {
		s(m)
	}
}

func (s sends) ActiveSince(uint64) time.Time { return time.Time{} }

// TestNodeReceivesWhileDiskHangs: of what a leader goes on sending only so much waits for the disk, while its heartbeats are answered.
func TestNodeReceivesWhileDiskHangs(t *testing.T) {
	log := &gatedLog{memLog: newMemLog()}
	if err := Bootstrap(log, []Founder{{ID: 1}, {ID: 2}, {ID: 3}}); err != nil {
		t.Fatal(err)
	}
	var acknowledged atomic.Uint64
	heard := make(chan struct{}, 1)
	n, err := Open(Options{ID: 1, Log: log, Machine: newListMachine(), IDs: NewIDs(1, time.Now()), Clock: clock.NewFake(time.Unix(1e9, 0)),
		Transport: sends(func(m *raftpb.Message) {
			switch m.GetType() {
			case raftpb.MsgAppResp:
				acknowledged.Store(m.GetIndex())
			case raftpb.MsgHeartbeatResp:
				heard <- struct{}{}
			}
		})})
	if err != nil {
		t.Fatal(err)
	}
	go n.Run(context.Background())
	t.Cleanup(func() { n.Close() })
	appendAfter := func(index, term uint64, entries ...*raftpb.Entry) error {
		return n.Receive(&raftpb.Message{Type: raftpb.MsgApp.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(2)),
			Index: new(index), LogTerm: new(term), Commit: new(uint64(3)), Entries: entries})
	}
	entry := func(index uint64) *raftpb.Entry {
		return &raftpb.Entry{Index: new(index), Term: new(uint64(2)), Data: encode(index, "x")}
	}
	log.hold()
	if err := appendAfter(3, 1, entry(4)); err != nil {
		t.Fatal(err)
	}
	<-log.entered
	const batch = 100
	refused := 0
	for range 10_000 / batch {
		for range batch {
			if err := appendAfter(4, 2); errors.Is(err, ErrTooManyRequests) {
				refused++
			} else if err != nil {
				t.Fatal(err)
			}
		}
		// A heartbeat is answered in the step that it comes in, so what came before it is with the writer.
		if err := n.Receive(&raftpb.Message{Type: raftpb.MsgHeartbeat.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(2)), Commit: new(uint64(3))}); err != nil {
			t.Fatal(err)
		}
		<-heard
	}
	n.toWrite.mu.Lock()
	waiting := answers(n.toWrite.items)
	n.toWrite.mu.Unlock()
	if waiting > maxUnstored+2*batch || waiting < maxUnstored/2 || refused == 0 {
		t.Errorf("%d wait for the disk, want some %d; %d were refused", waiting, maxUnstored, refused)
	}
	log.open()
	waitFor(t, func() bool { return n.unstored.Load() == 0 })
	if err := appendAfter(4, 2, entry(5)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return acknowledged.Load() == 5 })
}

func TestNodeMarksIdleLog(t *testing.T) {
	m := startMember(t, nil)
	for m.marksOf() == 0 {
		m.clock.Advance(100 * time.Millisecond)
		waitFor(t, func() bool { return m.SinceTick() == 0 })
	}
}

func (m *member) marksOf() int {
	m.log.mu.Lock()
	defer m.log.mu.Unlock()
	return m.log.marks
}

func BenchmarkPropose(b *testing.B) {
	log, machine := newMemLog(), &countMachine{}
	if err := Bootstrap(log, []Founder{{ID: 1}}); err != nil {
		b.Fatal(err)
	}
	ids := NewIDs(1, time.Now())
	led := make(chan struct{}, 1)
	n, err := Open(Options{ID: 1, Log: log, Machine: machine, IDs: ids, CatchUpEntries: 5000, Listener: func(e Event) {
		if _, ok := e.(LeadershipConfirmed); ok {
			led <- struct{}{}
		}
	}})
	if err != nil {
		b.Fatal(err)
	}
	go n.Run(context.Background())
	<-led
	outstanding := make(chan struct{}, 1000)
	data := make([]byte, 308)
	done := func(_ Result, err error) {
		if err != nil {
			b.Error(err)
		}
		<-outstanding
	}
	b.ReportAllocs()
	for b.Loop() {
		outstanding <- struct{}{}
		id := ids.Next()
		p := Proposal{ID: id, Data: append(encode(id, ""), data...), Done: done}
		if err := n.Propose(p); err != nil {
			b.Fatal(err)
		}
	}
	for range cap(outstanding) {
		outstanding <- struct{}{}
	}
	b.StopTimer()
	if err := n.Close(); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(b.N)/float64(log.syncs), "entries/sync")
}

// countMachine applies as fast as can be.
type countMachine struct{ listMachine }

func (m *countMachine) ConfState() *raftpb.ConfState { return &raftpb.ConfState{} }

func (m *countMachine) Apply(entries []*raftpb.Entry) ([]Result, error) {
	if entries[0].GetType() == raftpb.EntryConfChange {
		m.listMachine.conf = &raftpb.ConfState{}
		return m.listMachine.Apply(entries[:1])
	}
	out := make([]Result, 0, len(entries))
	for _, e := range entries {
		if e.GetType() == raftpb.EntryConfChange {
			break
		}
		m.index, m.term = e.GetIndex(), e.GetTerm()
		r := Result{Index: m.index, Term: m.term, Empty: len(e.GetData()) == 0}
		if !r.Empty {
			r.ID = uint64(0)
			for _, b := range e.GetData()[:8] {
				r.ID = r.ID<<8 | uint64(b)
			}
		}
		out = append(out, r)
	}
	return out, nil
}

// TestUnreachableOnce: however many messages to a member are lost, raft hears of it once a round.
func TestUnreachableOnce(t *testing.T) {
	n := &Node{opt: Options{MaxReceived: 2}, in: mailbox{wake: make(chan struct{}, 1)}}
	var used Input
	for range 2 {
		for _, id := range []uint64{2, 3, 2, 2, 3, 4} { // the last is beyond MaxReceived
			n.ReportUnreachable(id)
		}
		used = n.in.take(used)
		if !slices.Equal(used.Unreachable, []uint64{2, 3}) {
			t.Fatalf("reported %v", used.Unreachable)
		}
	}
}
