package consensus

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/raftlog"
)

// TestForceNew makes one member's log a cluster's of its own, on the log that members use, and starts it.
func TestForceNew(t *testing.T) {
	conf := func(typ raftpb.ConfChangeType, id uint64) *raftpb.Entry {
		data, err := proto.Marshal(&raftpb.ConfChange{Type: typ.Enum(), NodeId: new(id), Context: []byte("c")})
		if err != nil {
			t.Fatal(err)
		}
		return &raftpb.Entry{Type: raftpb.EntryConfChange.Enum(), Data: data}
	}
	text := func(s string) *raftpb.Entry { return &raftpb.Entry{Data: encode(7, s)} }
	for _, tc := range []struct {
		name    string
		entries []*raftpb.Entry // after the three founders
		commit  uint64
		applied uint64
		self    uint64
		want    []string // entries after the commit index
		refused string
	}{
		{name: "others are removed", entries: []*raftpb.Entry{text("a")}, commit: 4, applied: 3, want: []string{"remove 2", "remove 3"}},
		{name: "what is not committed is dropped", entries: []*raftpb.Entry{text("a"), text("b"), text("c"), text("d")}, commit: 4, applied: 4,
			want: []string{"remove 2", "remove 3"}},
		{name: "what is applied is committed", entries: []*raftpb.Entry{text("a"), text("b")}, commit: 3, applied: 5,
			want: []string{"remove 2", "remove 3"}},
		{name: "the log's changes count", commit: 6, applied: 3,
			entries: []*raftpb.Entry{conf(raftpb.ConfChangeRemoveNode, 2), conf(raftpb.ConfChangeAddLearnerNode, 9), text("a"), conf(raftpb.ConfChangeAddNode, 8)},
			want:    []string{"remove 3", "remove 9"}},
		{name: "a removed member comes back", entries: []*raftpb.Entry{conf(raftpb.ConfChangeRemoveNode, 1)}, commit: 4, applied: 3,
			want: []string{"add 1 self", "remove 2", "remove 3"}},
		{name: "alone already, with a tail", commit: 5, applied: 3,
			entries: []*raftpb.Entry{conf(raftpb.ConfChangeRemoveNode, 2), conf(raftpb.ConfChangeRemoveNode, 3), text("a"), text("b")},
			want:    []string{"empty"}},
		{name: "alone already", commit: 5, applied: 5,
			entries: []*raftpb.Entry{conf(raftpb.ConfChangeRemoveNode, 2), conf(raftpb.ConfChangeRemoveNode, 3)}},
		{name: "a learner", entries: []*raftpb.Entry{conf(raftpb.ConfChangeAddLearnerNode, 1)}, commit: 4, applied: 3, refused: "1, is a learner"},
		{name: "ahead", commit: 3, applied: 9, refused: "the store has applied index 9, the log ends at 3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			fs := vfs.NewCrashableMem()
			options := func() raftlog.Options {
				return raftlog.Options{FS: fs, Dir: "raft", Identity: raftlog.Identity{ClusterID: 1, MemberID: 1}}
			}
			log, err := raftlog.Open(options())
			if err != nil {
				t.Fatal(err)
			}
			if err := Bootstrap(log, []Founder{{ID: 1}, {ID: 2}, {ID: 3}}); err != nil {
				t.Fatal(err)
			}
			for i, e := range tc.entries {
				e.Index, e.Term = new(4+uint64(i)), new(uint64(2))
			}
			hs := &raftpb.HardState{Term: new(uint64(5)), Vote: new(uint64(2)), Commit: new(tc.commit)}
			if _, err := log.Write([]raftlog.Append{{Entries: tc.entries, HardState: hs}}); err != nil {
				t.Fatal(err)
			}
			machine := newListMachine()
			if tc.applied <= 3+uint64(len(tc.entries)) {
				all, err := log.Entries(1, tc.applied+1, raftlog.NoLimit)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := NewApplier(machine).Step(all); err != nil {
					t.Fatal(err)
				}
			}
			machine.index = tc.applied
			cs := machine.ConfState()
			err = ForceNew(log, 1, tc.applied, cs, []byte("self"))
			if tc.refused != "" {
				if err == nil || !strings.Contains(err.Error(), tc.refused) {
					t.Fatalf("got %v, want it to say %q", err, tc.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := log.Abandon(); err != nil {
				t.Fatal(err)
			}
			fs = fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 0})
			if log, err = raftlog.Open(options()); err != nil {
				t.Fatal(err)
			}
			defer log.Close()

			commit := max(tc.commit, tc.applied)
			last, _ := log.LastIndex()
			var got []string
			if last > commit {
				entries, err := log.Entries(commit+1, last+1, raftlog.NoLimit)
				if err != nil {
					t.Fatal(err)
				}
				for _, e := range entries {
					got = append(got, forced(t, e))
				}
			}
			if fmt.Sprint(got) != fmt.Sprint(tc.want) {
				t.Fatalf("appended %v, want %v", got, tc.want)
			}
			if err := ForceNew(log, 1, tc.applied, cs, []byte("self")); err != nil {
				t.Fatal(err)
			}
			if again, _ := log.LastIndex(); again != last {
				t.Fatalf("a second time the log grew from %d to %d", last, again)
			}

			// It starts, applies all that, and leads alone.
			core, err := NewCore(Options{ID: 1, Log: log, Machine: machine, IDs: NewIDs(1, time.Unix(1e9, 0))}, time.Unix(1e9, 0))
			if err != nil {
				t.Fatal(err)
			}
			applier := NewApplier(machine)
			writer := NewLogWriter(1, log, applier)
			in, out := Input{Now: time.Unix(1e9, 0)}, Output{}
			for range 20 {
				core.Step(&in, &out)
				in = Input{Now: in.Now}
				if len(out.Apply) > 0 {
					done, err := applier.Step(out.Apply)
					if err != nil {
						t.Fatal(err)
					}
					in.Applied = []Applied{{Entries: append([]*raftpb.Entry(nil), done.Entries...), Results: done.Results}}
				}
				stored, _, err := writer.Step(out.Append)
				if err != nil {
					t.Fatal(err)
				}
				in.Stored = append(in.Stored, stored...)
			}
			if core.leader != 1 || !core.sole || !core.confirmed {
				t.Fatalf("leader %x, sole %v, confirmed %v, members %v", core.leader, core.sole, core.confirmed, core.confState)
			}
		})
	}
}

func forced(t *testing.T, e *raftpb.Entry) string {
	t.Helper()
	if e.GetTerm() != 5 {
		t.Fatalf("entry %d is of term %d, not of the present one", e.GetIndex(), e.GetTerm())
	}
	if e.GetType() == raftpb.EntryNormal {
		return "empty"
	}
	var cc raftpb.ConfChange
	if err := proto.Unmarshal(e.GetData(), &cc); err != nil {
		t.Fatal(err)
	}
	if cc.GetType() == raftpb.ConfChangeRemoveNode {
		return fmt.Sprintf("remove %d", cc.GetNodeId())
	}
	return fmt.Sprintf("add %d %s", cc.GetNodeId(), cc.GetContext())
}
