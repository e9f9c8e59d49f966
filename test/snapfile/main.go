// Command snapfile makes stores from etcd's database files and the other way
// round, so that tests can give ours to real etcd and real etcd's to us.
//
//	snapfile fill STORE VERSION  fill a new store with a fixed history, of a cluster of that version
//	snapfile export STORE FILE   write it as etcd's database file
//	snapfile import FILE STORE   read such a file into a new store
//	snapfile hashkv STORE        print the answer to HashKV, as JSON
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return errors.New("want fill, export, import or hashkv")
	}
	switch command := args[0]; {
	case command == "fill" && len(args) == 3:
		return with(args[1], func(s *storage.Store) error { return fill(s, args[2]) })
	case command == "export" && len(args) == 3:
		return with(args[1], func(s *storage.Store) error { return export(s, args[2]) })
	case command == "import" && len(args) == 3:
		return with(args[2], func(s *storage.Store) error {
			_, err := snapfile.ReadEtcd(context.Background(), args[1], s)
			return err
		})
	case command == "hashkv" && len(args) == 2:
		return with(args[1], hashKV)
	}
	return fmt.Errorf("%q: no such command, or not its arguments", args)
}

func with(dir string, fn func(*storage.Store) error) error {
	s, err := storage.Open(storage.Options{Dir: filepath.Join(dir, "store")})
	if err != nil {
		return err
	}
	return errors.Join(fn(s), s.Close())
}

func export(s *storage.Store, path string) (err error) {
	snap := s.Snapshot()
	defer func() { err = errors.Join(err, snap.Close()) }()
	plan, err := snapfile.PlanEtcd(context.Background(), snapfile.Source{Reader: snap})
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = plan.WriteTo(f)
	return errors.Join(err, f.Close())
}

func open(s *storage.Store) (*state.Machine, error) {
	return state.Open(state.Options{Storage: s, MinLeaseTTL: 2, Version: "3.7.3"})
}

// hashKV finishes compactions that wait, as a member would, and hashes.
func hashKV(s *storage.Store) error {
	m, err := open(s)
	if err != nil {
		return err
	}
	for more := true; more; {
		if more, _, err = m.CompactStep(); err != nil {
			return err
		}
	}
	h, err := m.Keys().HashKV(context.Background(), m.Root(), m.Root().Revision())
	if err != nil {
		return err
	}
	index, term := m.Applied()
	leases := 0
	for _, l := range m.Leases().All() {
		leases += m.Leases().KeyCount(l.ID)
	}
	return errors.Join(m.Close(), json.NewEncoder(os.Stdout).Encode(struct {
		Hash                             uint32
		Revision, Compact                int64
		Applied, Term                    uint64
		Leases, Attached, Users, Members int
	}{h.Hash, h.Revision, h.CompactRevision, index, term, m.Leases().Len(), leases, users(m), len(m.ConfState().Voters)}))
}

func users(m *state.Machine) int {
	auth, _, _ := m.Tables()
	return len(auth.UserNames())
}

// filler applies requests in order.
type filler struct {
	m     *state.Machine
	index uint64
	err   error
}

func (f *filler) run(q *pb.InternalRaftRequest) {
	f.index++
	q.Header = &pb.RequestHeader{ID: f.index}
	data, err := proto.Marshal(q)
	f.err = errors.Join(f.err, err)
	f.apply(&raftpb.Entry{Index: proto.Uint64(f.index), Term: proto.Uint64(2), Data: data})
}

func (f *filler) apply(e *raftpb.Entry) {
	results, err := f.m.Apply([]*raftpb.Entry{e})
	f.err = errors.Join(f.err, err)
	for _, r := range results {
		f.err = errors.Join(f.err, r.Err)
		r.Reply.Release()
	}
}

func fill(s *storage.Store, version string) error {
	m, err := open(s)
	if err != nil {
		return err
	}
	f := &filler{m: m}
	f.index++
	id, kind := uint64(0xabc), raftpb.ConfChangeAddNode
	cc, err := proto.Marshal(&raftpb.ConfChange{Type: &kind, NodeId: &id, Context: []byte(`{"id":2748,"peerURLs":["http://127.0.0.1:1"],"name":"m"}`)})
	if err != nil {
		return err
	}
	f.apply(&raftpb.Entry{Index: proto.Uint64(f.index), Term: proto.Uint64(2), Type: raftpb.EntryConfChange.Enum(), Data: cc})
	f.run(&pb.InternalRaftRequest{ClusterVersionSet: &membershippb.ClusterVersionSetRequest{Ver: version}})
	for lease := range int64(3) {
		f.run(&pb.InternalRaftRequest{LeaseGrant: &pb.LeaseGrantRequest{ID: 100 + lease, TTL: 10_000}})
	}
	f.run(&pb.InternalRaftRequest{AuthRoleAdd: &pb.AuthRoleAddRequest{Name: "reader"}})
	f.run(&pb.InternalRaftRequest{AuthRoleGrantPermission: &pb.AuthRoleGrantPermissionRequest{Name: "reader", Perm: &authpb.Permission{Key: []byte("k"), RangeEnd: []byte("l")}}})
	f.run(&pb.InternalRaftRequest{AuthUserAdd: &pb.AuthUserAddRequest{Name: "u", Options: &authpb.UserAddOptions{NoPassword: true}}})
	f.run(&pb.InternalRaftRequest{AuthUserGrantRole: &pb.AuthUserGrantRoleRequest{User: "u", Role: "reader"}})
	for i := range 6000 {
		key := fmt.Appendf(nil, "k%04d", i*7%2500)
		switch {
		case i%11 == 3:
			f.run(&pb.InternalRaftRequest{DeleteRange: &pb.DeleteRangeRequest{Key: key, RangeEnd: append(key, 'z')}})
		case i%13 == 4:
			f.run(&pb.InternalRaftRequest{Txn: &pb.TxnRequest{Success: []*pb.RequestOp{
				{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key, Value: key}}},
				{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: append(key, 't'), Value: key}}},
			}}})
		default:
			f.run(&pb.InternalRaftRequest{Put: &pb.PutRequest{Key: key, Value: make([]byte, i%300), Lease: []int64{0, 0, 100, 101}[i%4]}})
		}
	}
	f.run(&pb.InternalRaftRequest{Put: &pb.PutRequest{Key: []byte("big"), Value: make([]byte, 1<<20)}})
	f.run(&pb.InternalRaftRequest{Compaction: &pb.CompactionRequest{Revision: m.Root().Revision() - 1500}})
	for more := true; more && f.err == nil; {
		if more, _, err = m.CompactStep(); err != nil {
			return err
		}
	}
	return errors.Join(f.err, m.Close())
}
