package consensus

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/raftlog"
)

func TestReportSnapshotKeepsTheLastWord(t *testing.T) {
	log := newMemLog()
	if err := Bootstrap(log, []Founder{{ID: 1}}); err != nil {
		t.Fatal(err)
	}
	n, err := Open(Options{ID: 1, Log: log, Machine: newListMachine(), IDs: NewIDs(1, time.Now())})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		n.ReportSnapshot(2, i%2 == 0)
		n.ReportSnapshot(3, i%2 == 1)
	}
	want := []SnapshotReport{{2, false}, {3, true}}
	if got := n.in.take(Input{}).Snapshots; !slices.Equal(got, want) {
		t.Fatalf("reports %v, want %v", got, want)
	}
	// Nobody leads yet, and a member without others has nothing to hand over.
	if err := n.HandOver(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	n.ReportSnapshot(2, true)
}

// TestNodeStopsWhenAnInstallFails has a lone learner-to-be receive a snapshot that its machine cannot install.
func TestNodeStopsWhenAnInstallFails(t *testing.T) {
	broken := errors.New("broken")
	machine := newListMachine()
	machine.onInstall = func(bool) error { return broken }
	n, err := Open(Options{ID: 1, Log: newMemLog(), Machine: machine, IDs: NewIDs(1, time.Now()), Transport: &wires{}})
	if err != nil {
		t.Fatal(err)
	}
	from := newListMachine()
	from.index, from.term, from.conf = 9, 3, &raftpb.ConfState{Voters: []uint64{2}, Learners: []uint64{1}}
	if err := n.Receive(&raftpb.Message{Type: raftpb.MsgSnap.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(3)),
		Snapshot: machine.disk.receive(from)}); err != nil {
		t.Fatal(err)
	}
	if err := n.Run(context.Background()); !errors.Is(err, broken) {
		t.Fatalf("Run ended with %v", err)
	}
	if n.Applied() != 0 {
		t.Fatalf("applied index %d after a failed install", n.Applied())
	}
}

func TestReconcileWithAnInstalledSnapshot(t *testing.T) {
	for _, tc := range []struct {
		name        string
		index, term uint64
		voters      []uint64
		want        error
	}{
		{name: "the very state", index: 9, term: 3, voters: []uint64{2, 1}},
		{name: "before it", index: 8, term: 3, voters: []uint64{1, 2}, want: ErrLogGap},
		{name: "another term", index: 9, term: 2, voters: []uint64{1, 2}, want: ErrStoreMismatch},
		{name: "other members", index: 9, term: 3, voters: []uint64{1}, want: ErrStoreMismatch},
	} {
		l := installedLog(t)
		m := newListMachine()
		m.index, m.term, m.conf = tc.index, tc.term, &raftpb.ConfState{Voters: tc.voters}
		if _, err := reconcile(l, m); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
}

// installedLog is a log that begins after the snapshot of index 9 and term 3.
func installedLog(t *testing.T) *memLog {
	t.Helper()
	l := newMemLog()
	s := &raftlog.Snapshot{Index: 9, Term: 3, Dir: "snapshot", ConfState: &raftpb.ConfState{Voters: []uint64{1, 2}}}
	if _, err := l.Write([]raftlog.Append{{Snapshot: s, HardState: &raftpb.HardState{Term: new(uint64(3)), Commit: new(uint64(9))}}}); err != nil {
		t.Fatal(err)
	}
	return l
}
