package state

import (
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
)

// What a batch had done before it failed is in memory, and never goes on from
// there: not to readers, not to files, not to the next start.
func TestFailedApply(t *testing.T) {
	for _, work := range []struct {
		name string
		make func(r *rig)
	}{
		{"warm", func(r *rig) { r.reopen() }}, // the values are to be read into memory
		{"compaction", func(r *rig) { r.run(command.Header{}, command.KindCompaction, &pb.CompactionRequest{Revision: 3}) }},
	} {
		t.Run(work.name, func(t *testing.T) {
			r, whole := newRig(t, Options{}), newRig(t, Options{})
			for _, key := range []string{"b", "b", "c"} {
				r.run(command.Header{}, command.KindPut, &pb.PutRequest{Key: []byte(key), Value: []byte("1")})
			}
			work.make(r)
			applied, want := uint64(len(r.entries)), r.dump()
			r.propose(command.Header{}, command.KindPut, &pb.PutRequest{Key: []byte("a"), Value: []byte("1")})
			r.propose(command.Header{}, command.KindDeleteRange, &pb.DeleteRangeRequest{Key: []byte("b")})
			n := len(r.entries)
			bad := &raftpb.Entry{Index: proto.Uint64(uint64(n + 1)), Term: proto.Uint64(2), Data: []byte{0xff}}
			failing := append(r.entries[applied:n:n], bad)
			if _, err := r.m.Apply(failing); err == nil {
				t.Fatal("an entry that cannot be decoded was applied")
			}
			for range 2 {
				if _, _, err := r.m.CompactStep(); err == nil {
					t.Error("a step of compaction on half a batch")
				}
			}
			if _, err := r.m.Apply(failing); err == nil {
				t.Error("a batch after half a batch")
			}
			if err := r.m.Checkpoint("copy", "copy-index"); err == nil {
				t.Error("a copy of half a batch")
			}
			s := r.m.Snapshot()
			if s.Applied != applied {
				t.Errorf("the snapshot is said to be of index %d, it is of %d", s.Applied, applied)
			}
			if err := s.Store.Close(); err != nil {
				t.Fatal(err)
			}
			if got := r.dump(); got != want {
				t.Errorf("half a batch is visible: %s", firstDifference(want, got))
			}
			r.reopen()
			if got := r.dump(); got != want {
				t.Errorf("half a batch is there after a restart: %s", firstDifference(want, got))
			}
			whole.entries = r.entries
			whole.apply(n, n)
			r.apply(n, n)
			r.settle()
			whole.settle()
			r.reopen()
			whole.reopen()
			if x, y := whole.dump(), r.dump(); x != y {
				t.Errorf("states differ: %s", firstDifference(x, y))
			}
			r.close()
			whole.close()
		})
	}
}
