package consensus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"
)

var errDiskFull = errors.New("disk reserve used up")

// disk is one that is ever fuller: each level refuses more than the one before.
type disk struct{ level atomic.Int32 }

const (
	diskEmpty   int32 = iota
	diskTight         // "delete" and "compact" pass
	diskTighter       // "compact" passes
	diskFull          // nothing passes
)

func (d *disk) at(level int32) error {
	if d.level.Load() >= level {
		return errDiskFull
	}
	return nil
}

func (d *disk) gate(o *Options) {
	o.Gate = func() error { return d.at(diskTight) }
	o.LastGate = func() error { return d.at(diskFull) }
	o.Pass = func(data []byte) error {
		switch {
		case strings.Contains(string(data), "compact"):
			return d.at(diskFull)
		case strings.Contains(string(data), "delete"):
			return d.at(diskTighter)
		}
		return d.at(diskTight)
	}
}

// What frees space passes for as long as Pass lets it, and what is refused reaches no log.
func TestGateByWhatIsProposed(t *testing.T) {
	var d disk
	m := startMember(t, d.gate)
	for level, passing := range [...]string{"put delete compact", "delete compact", "compact", ""} {
		d.level.Store(int32(level))
		for _, what := range []string{"put", "delete", "compact"} {
			before, _ := m.log.LastIndex()
			a := <-m.propose(t, what)
			if passes := strings.Contains(passing, what); passes && a.err != nil || !passes && !errors.Is(a.err, errDiskFull) {
				t.Errorf("%s at level %d: %v", what, level, a.err)
			} else if after, _ := m.log.LastIndex(); !passes && after != before {
				t.Errorf("%s at level %d is refused, and the log has grown from %d to %d", what, level, before, after)
			}
		}
		if level == 0 {
			continue
		}
		// A conf change frees nothing.
		ch := make(chan error, 1)
		cc := &raftpb.ConfChange{Type: raftpb.ConfChangeAddLearnerNode.Enum(), NodeId: new(uint64(2)), Id: new(m.opt.IDs.Next())}
		if err := m.ProposeConfChange(ConfProposal{Change: cc, Done: func(_ Result, err error) { ch <- err }}); err != nil {
			t.Fatal(err)
		}
		if err := <-ch; !errors.Is(err, errDiskFull) {
			t.Errorf("a conf change at level %d: %v", level, err)
		}
	}
}

// Without Pass and LastGate the gate is all there is.
func TestGateAlone(t *testing.T) {
	var d disk
	m := startMember(t, func(o *Options) { o.Gate = func() error { return d.at(diskTight) } })
	d.level.Store(diskTight)
	if a := <-m.propose(t, "compact"); !errors.Is(a.err, errDiskFull) {
		t.Errorf("a gate that is shut: %v", a.err)
	}
}

// What a message brings is asked for by itself where it comes together with what is refused, but for a leader's append.
func TestGateByWhatIsReceived(t *testing.T) {
	var d disk
	opt := Options{}
	d.gate(&opt)
	c := &Core{opt: opt}
	entry := func(text string) *raftpb.Entry { return &raftpb.Entry{Data: []byte(text)} }
	change := &raftpb.Entry{Type: raftpb.EntryConfChange.Enum(), Data: []byte("compact")}
	all := []*raftpb.Entry{entry("put"), entry("compact"), change, entry("delete"), entry("put"), entry("compact")}
	for level, want := range map[int32]map[raftpb.MessageType]string{
		diskTight:   {raftpb.MsgProp: "compact delete compact", raftpb.MsgApp: "put compact compact delete put compact"},
		diskTighter: {raftpb.MsgProp: "compact compact", raftpb.MsgApp: "put compact compact delete put compact"},
		diskFull:    {raftpb.MsgProp: "", raftpb.MsgApp: ""},
	} {
		d.level.Store(level)
		for typ, want := range want {
			m := &raftpb.Message{Type: typ.Enum(), From: new(uint64(2)), To: new(uint64(1)), Entries: all}
			got := c.passing(m)
			var texts []string
			for _, e := range got.GetEntries() {
				texts = append(texts, string(e.GetData()))
			}
			if strings.Join(texts, " ") != want || (got == nil) != (want == "") {
				t.Errorf("%v at level %d: %q pass, want %q", typ, level, texts, want)
			}
			if got != nil && (got.GetType() != typ || got.GetFrom() != 2 || got.GetTo() != 1) {
				t.Errorf("%v at level %d has become %v", typ, level, got)
			}
			if len(m.GetEntries()) != len(all) {
				t.Errorf("%v at level %d was changed", typ, level)
			}
			empty := &raftpb.Message{Type: typ.Enum()}
			if c.passing(empty) != empty {
				t.Errorf("an empty %v at level %d is refused", typ, level)
			}
		}
		first := &raftpb.Message{Type: raftpb.MsgApp.Enum(), Entries: []*raftpb.Entry{entry("")}}
		if c.passing(first) != first {
			t.Errorf("the entry that begins a term is refused at level %d", level)
		}
	}
}

// Where the disks of all members are as full, as they are after a huge delete, what frees them still finds a majority that takes it; and one that is quite
// full takes it when it has room again.
func TestGateOfAllMembers(t *testing.T) {
	w := &wires{nodes: map[uint64]*Node{}, machines: map[uint64]*listMachine{}, began: time.Now()}
	disks := map[uint64]*disk{}
	for id := uint64(1); id <= 3; id++ {
		log := newMemLog()
		if err := Bootstrap(log, []Founder{{ID: 1}, {ID: 2}, {ID: 3}}); err != nil {
			t.Fatal(err)
		}
		machine := newListMachine()
		opt := Options{ID: id, Log: log, Machine: machine, IDs: NewIDs(id, time.Now()), Transport: w, Tick: 10 * time.Millisecond, RequestTimeout: 2 * time.Second}
		disks[id] = &disk{}
		disks[id].gate(&opt)
		n, err := Open(opt)
		if err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		w.nodes[id], w.machines[id] = n, machine
		w.mu.Unlock()
	}
	for id := uint64(1); id <= 3; id++ {
		n, ran := w.node(id), make(chan error, 1)
		go func() { ran <- n.Run(context.Background()) }()
		t.Cleanup(func() {
			if err := errors.Join(n.Close(), <-ran); err != nil {
				t.Error(err)
			}
		})
	}
	propose := func(n *Node, text string) error {
		answer := make(chan error, 1)
		id := n.opt.IDs.Next()
		if err := n.Propose(Proposal{ID: id, Data: encode(id, text), Done: func(_ Result, err error) { answer <- err }}); err != nil {
			return err
		}
		return <-answer
	}
	// A leader with a full disk hands over, and what it is asked meanwhile is dropped.
	taken := func(n *Node, text string) {
		t.Helper()
		waitFor(t, func() bool {
			err := propose(n, text)
			if errors.Is(err, errDiskFull) {
				t.Fatalf("%s: %v", text, err)
			}
			return err == nil
		})
	}
	has := func(id uint64, text string) bool {
		return slices.ContainsFunc(w.machines[id].texts(), func(s string) bool { return strings.HasSuffix(s, text) })
	}
	taken(w.node(1), "put")
	for _, d := range disks {
		d.level.Store(diskTighter)
	}
	for id := uint64(1); id <= 3; id++ {
		for _, what := range []string{"put", "delete"} {
			if err := propose(w.node(id), what); !errors.Is(err, errDiskFull) {
				t.Errorf("%s at member %d: %v", what, id, err)
			}
		}
		text := fmt.Sprint("compact by ", id)
		taken(w.node(id), text)
		for member := range disks {
			waitFor(t, func() bool { return has(member, text) })
		}
	}
	disks[3].level.Store(diskFull)
	taken(w.node(1), "compact without 3")
	waitFor(t, func() bool { return has(1, "compact without 3") && has(2, "compact without 3") })
	if has(3, "compact without 3") {
		t.Error("a disk without room has taken it")
	}
	if err := propose(w.node(3), "compact by 3 again"); !errors.Is(err, errDiskFull) {
		t.Errorf("a compaction at a member without room: %v", err)
	}
	disks[3].level.Store(diskTighter)
	waitFor(t, func() bool { return has(3, "compact without 3") })

	// Where nothing passes, whoever comes to lead still begins its term, without which no read could be answered.
	for _, d := range disks {
		d.level.Store(diskFull)
	}
	old := w.node(1).Leader()
	waitFor(t, func() bool {
		w.node(1).TransferLeadership(1 + old%3)
		leader := w.node(1).Leader()
		return leader != 0 && leader != old
	})
	for id := uint64(1); id <= 3; id++ {
		waitFor(t, func() bool {
			answer := make(chan error, 1)
			w.node(id).ReadIndex(time.Time{}, func(err error) { answer <- err })
			return <-answer == nil // the leader may hand over again
		})
	}
}
