package snapfile

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	bolt "go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

// fileSystems has the file system of each store that newStore or readNative
// made. There it lies in dir.
var fileSystems sync.Map // *storage.Store to *vfs.MemFS

const dir = "member"

// newStore opens an empty store in memory.
func newStore(t testing.TB) *storage.Store {
	t.Helper()
	return openStore(t, vfs.NewMem())
}

func openStore(t testing.TB, fs *vfs.MemFS) *storage.Store {
	t.Helper()
	s, err := storage.Open(storage.Options{FS: fs, Dir: dir + "/" + StoreDir, MemTableBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	fileSystems.Store(s, fs)
	t.Cleanup(func() { fileSystems.Delete(s); _ = s.Abandon() })
	return s
}

func fsOf(s *storage.Store) *vfs.MemFS {
	fs, _ := fileSystems.Load(s)
	return fs.(*vfs.MemFS)
}

// filesOf makes files of a store as it is now, without an index.
func filesOf(t testing.TB, s *storage.Store) *Files {
	t.Helper()
	fs := fsOf(s)
	sending := "sending"
	if err := errors.Join(fs.RemoveAll(sending), s.Checkpoint(fs.PathJoin(sending, StoreDir))); err != nil {
		t.Fatal(err)
	}
	f, err := OpenFiles(fs, sending)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func stream(t testing.TB, f *Files) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := f.WriteNative(context.Background(), &b, nil); err != nil {
		t.Fatal(err)
	}
	if int64(b.Len()) != f.Size() {
		t.Fatalf("wrote %d bytes, said %d", b.Len(), f.Size())
	}
	return b.Bytes()
}

// native writes a store in Engram's own form, without an index.
func native(t testing.TB, s *storage.Store) []byte { t.Helper(); return stream(t, filesOf(t, s)) }

// emptyDirs makes what ReadNative reads into.
func emptyDirs(t testing.TB) *vfs.MemFS {
	t.Helper()
	fs := vfs.NewMem()
	for _, sub := range []string{StoreDir, IndexDir} {
		if err := fs.MkdirAll(fs.PathJoin(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return fs
}

// readNative reads Engram's own form and opens the store that comes of it.
func readNative(t testing.TB, b []byte) (*storage.Store, Meta) {
	t.Helper()
	fs := emptyDirs(t)
	m, err := ReadNative(context.Background(), bytes.NewReader(b), fs, dir)
	if err != nil {
		t.Fatal(err)
	}
	return openStore(t, fs), m
}

// rig fills a store by applying entries, as a member does.
type rig struct {
	t     testing.TB
	store *storage.Store
	m     *state.Machine
	index uint64
}

func openRig(t testing.TB, s *storage.Store) *rig {
	t.Helper()
	m, err := state.Open(state.Options{
		Storage: s, MinLeaseTTL: 2, Version: "3.7.3", MVCC: mvcc.Options{FS: fsOf(s), Dir: dir + "/" + IndexDir, Logger: logger(t)},
	})
	if err != nil {
		t.Fatal(err)
	}
	index, _ := m.Applied()
	return &rig{t: t, store: s, m: m, index: index}
}

// logger fails the test when an index checkpoint is of no use, or anything else
// is worth a warning.
func logger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(failing{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

type failing struct{ t testing.TB }

func (f failing) Write(b []byte) (int, error) { f.t.Errorf("%s", b); return len(b), nil }

func (r *rig) apply(entries ...*raftpb.Entry) {
	r.t.Helper()
	for len(entries) > 0 {
		results, err := r.m.Apply(entries)
		if err != nil {
			r.t.Fatal(err)
		}
		for _, res := range results {
			if res.Err != nil {
				r.t.Fatal(res.Err)
			}
			res.Reply.Release()
		}
		entries = entries[len(results):]
	}
}

// entry wraps a request into the next entry.
func (r *rig) entry(q *pb.InternalRaftRequest) *raftpb.Entry {
	r.t.Helper()
	r.index++
	q.Header = &pb.RequestHeader{ID: r.index<<8 | 1}
	data, err := proto.Marshal(q)
	if err != nil {
		r.t.Fatal(err)
	}
	return &raftpb.Entry{Index: proto.Uint64(r.index), Term: proto.Uint64(3), Data: data}
}

func (r *rig) run(q *pb.InternalRaftRequest) { r.t.Helper(); r.apply(r.entry(q)) }

func (r *rig) conf(kind raftpb.ConfChangeType, m member.Member) {
	r.t.Helper()
	text, err := json.Marshal(m)
	if err != nil {
		r.t.Fatal(err)
	}
	data, err := proto.Marshal(&raftpb.ConfChange{Type: &kind, NodeId: &m.ID, Context: text})
	if err != nil {
		r.t.Fatal(err)
	}
	r.index++
	r.apply(&raftpb.Entry{Index: proto.Uint64(r.index), Term: proto.Uint64(3), Type: raftpb.EntryConfChange.Enum(), Data: data})
}

func (r *rig) put(key string, value []byte, lease int64) {
	r.t.Helper()
	r.run(&pb.InternalRaftRequest{Put: &pb.PutRequest{Key: []byte(key), Value: value, Lease: lease}})
}

// compact runs all steps of compactions that wait.
func (r *rig) compact() {
	r.t.Helper()
	for more := true; more; {
		var err error
		if more, _, err = r.m.CompactStep(); err != nil {
			r.t.Fatal(err)
		}
	}
}

// cluster gives the store members, users, leases and alarms.
func (r *rig) cluster() {
	r.t.Helper()
	r.conf(raftpb.ConfChangeAddNode, member.Member{ID: 0xa, PeerURLs: []string{"http://127.0.0.1:1"}})
	r.conf(raftpb.ConfChangeAddNode, member.Member{ID: 0xfffffffffffffff1, PeerURLs: []string{"http://127.0.0.1:2"}})
	r.conf(raftpb.ConfChangeAddLearnerNode, member.Member{ID: 0xc, PeerURLs: []string{"http://127.0.0.1:3"}, IsLearner: true})
	r.conf(raftpb.ConfChangeAddNode, member.Member{ID: 0xd, PeerURLs: []string{"http://127.0.0.1:4"}})
	r.conf(raftpb.ConfChangeRemoveNode, member.Member{ID: 0xd})
	for _, q := range []*pb.InternalRaftRequest{
		{ClusterMemberAttrSet: &membershippb.ClusterMemberAttrSetRequest{
			Member_ID: 0xa, MemberAttributes: &membershippb.Attributes{Name: "a<b>", ClientUrls: []string{"http://127.0.0.1:5"}},
		}},
		{ClusterVersionSet: &membershippb.ClusterVersionSetRequest{Ver: "3.7.0"}},
		{DowngradeInfoSet: &membershippb.DowngradeInfoSetRequest{Enabled: true, Ver: "3.6.0"}},
		{LeaseGrant: &pb.LeaseGrantRequest{ID: 7, TTL: 100}},
		{LeaseGrant: &pb.LeaseGrantRequest{ID: -8, TTL: 1000}},
		{LeaseCheckpoint: &pb.LeaseCheckpointRequest{Checkpoints: []*pb.LeaseCheckpoint{{ID: 7, Remaining_TTL: 44}}}},
		{Alarm: &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 0xc, Alarm: pb.AlarmType_NOSPACE}},
		{Alarm: &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 0xc, Alarm: pb.AlarmType_NOSPACE}},
		{AuthRoleAdd: &pb.AuthRoleAddRequest{Name: "root"}},
		{AuthRoleAdd: &pb.AuthRoleAddRequest{Name: "reader"}},
		{AuthRoleGrantPermission: &pb.AuthRoleGrantPermissionRequest{Name: "reader", Perm: &authpb.Permission{Key: []byte("a"), RangeEnd: []byte("b")}}},
		{AuthUserAdd: &pb.AuthUserAddRequest{Name: "root", HashedPassword: "aGFzaA==", Options: &authpb.UserAddOptions{}}},
		{AuthUserAdd: &pb.AuthUserAddRequest{Name: strings.Repeat("long", 900), Options: &authpb.UserAddOptions{NoPassword: true}}},
		{AuthUserGrantRole: &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"}},
	} {
		r.run(q)
	}
}

// history puts and deletes keys at random, n entries, and compacts now and then.
func (r *rig) history(rng *rand.Rand, n, keys, valueSize int, leases ...int64) {
	r.t.Helper()
	var batch []*raftpb.Entry
	live := map[string]bool{}
	for i := range n {
		key := fmt.Sprintf("key/%06d", rng.IntN(keys))
		switch rng.IntN(10) {
		case 0:
			if live[key] {
				batch = append(batch, r.entry(&pb.InternalRaftRequest{DeleteRange: &pb.DeleteRangeRequest{Key: []byte(key)}}))
				delete(live, key)
			}
		case 1:
			txn := &pb.TxnRequest{}
			for j := range 1 + rng.IntN(4) {
				txn.Success = append(txn.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{
					Key: fmt.Appendf(nil, "txn/%d/%d", rng.IntN(keys), j), Value: random(rng, rng.IntN(valueSize+1)),
				}}})
			}
			batch = append(batch, r.entry(&pb.InternalRaftRequest{Txn: txn}))
		default:
			lease := int64(0)
			if len(leases) > 0 && rng.IntN(4) == 0 {
				lease = leases[rng.IntN(len(leases))]
			}
			live[key] = true
			batch = append(batch, r.entry(&pb.InternalRaftRequest{Put: &pb.PutRequest{
				Key: []byte(key), Value: random(rng, rng.IntN(valueSize+1)), Lease: lease,
			}}))
		}
		if len(batch) >= 256 || i == n-1 {
			r.apply(batch...)
			batch = nil
		}
	}
}

func random(rng *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// contents is what tells two stores apart: every row but the applied mark,
// which may stand in one of two places, and the mark itself.
func contents(t testing.TB, s *storage.Store) []string {
	t.Helper()
	index, term, err := mvcc.AppliedOf(s)
	if err != nil {
		t.Fatal(err)
	}
	out := []string{fmt.Sprintf("applied %d of term %d", index, term)}
	it, err := s.Iter(context.Background(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for ok := it.First(); ok; ok = it.Next() {
		value := it.Value()
		if bytes.Equal(it.Key(), storage.RowKey(storage.TableMeta, []byte(storage.MetaApplied))) {
			continue
		}
		if _, _, err := storage.ParseRevisionKey(it.Key()); err == nil {
			rec, err := storage.ParseRevisionValue(value)
			if err != nil {
				t.Fatal(err)
			}
			value = storage.AppendRevisionValue(nil, storage.RevisionRecord{KV: rec.KV, Tombstone: rec.Tombstone})
		}
		out = append(out, fmt.Sprintf("%x = %x", it.Key(), value))
	}
	if err := it.Close(); err != nil {
		t.Fatal(err)
	}
	return out
}

// raw is every row as it is.
func raw(t testing.TB, r storage.Reader) (out []string) {
	t.Helper()
	it, err := r.Iter(context.Background(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for ok := it.First(); ok; ok = it.Next() {
		out = append(out, fmt.Sprintf("%x = %x", it.Key(), it.Value()))
	}
	if err := it.Close(); err != nil {
		t.Fatal(err)
	}
	return out
}

func equalRows(t testing.TB, want, got []string) {
	t.Helper()
	for i := range min(len(want), len(got)) {
		if want[i] != got[i] {
			t.Fatalf("row %d:\nwant %.300s\ngot  %.300s", i, want[i], got[i])
		}
	}
	if len(want) != len(got) {
		t.Fatalf("want %d rows, got %d", len(want), len(got))
	}
}

// hashKV is the hash of all records at revision rev.
func (r *rig) hashKV(rev int64) mvcc.HashResult {
	r.t.Helper()
	h, err := r.m.Keys().HashKV(context.Background(), r.m.Root(), rev)
	if err != nil {
		r.t.Fatal(err)
	}
	return h
}

// writeEtcd writes the store as etcd's file, twice, and returns its path.
func writeEtcd(t testing.TB, s *storage.Store) string {
	t.Helper()
	snap := s.Snapshot()
	defer func() { _ = snap.Close() }()
	plan, err := PlanEtcd(context.Background(), Source{Reader: snap})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "db")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	n, err := plan.WriteTo(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || n != plan.Size() || info.Size() != n {
		t.Fatalf("planned %d bytes, wrote %d, the file is %v (%v)", plan.Size(), n, info.Size(), err)
	}
	again := crc32.NewIEEE()
	if _, err := plan.WriteTo(again); err != nil {
		t.Fatal(err)
	}
	if first := sumFile(t, path); first != again.Sum32() {
		t.Fatal("written twice, and not the same")
	}
	return path
}

func sumFile(t testing.TB, path string) uint32 {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return crc32.ChecksumIEEE(b)
}

// checkBolt lets bbolt check a file, and check it again after it has changed
// every bucket and taken that back. It works on a copy.
func checkBolt(t testing.TB, path string) {
	t.Helper()
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "copy")
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{NoFreelistSync: true, FreelistType: bolt.FreelistMapType, NoSync: true, NoGrowSync: true})
	if err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		if err := db.View(func(tx *bolt.Tx) error {
			for err := range tx.Check() {
				t.Error(err)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	check()
	before := hashBolt(t, db)
	each := func(fn func(b *bolt.Bucket) error) {
		t.Helper()
		if err := db.Update(func(tx *bolt.Tx) error {
			return tx.ForEach(func(_ []byte, b *bolt.Bucket) error { return fn(b) })
		}); err != nil {
			t.Fatal(err)
		}
	}
	odd := []byte("\x7fodd")
	for range 3 {
		each(func(b *bolt.Bucket) error {
			for i := range 200 {
				if err := b.Put(fmt.Appendf(nil, "%s%d", odd, i), make([]byte, 300)); err != nil {
					return err
				}
			}
			return nil
		})
		check()
		each(func(b *bolt.Bucket) error {
			for i := range 200 {
				if err := b.Delete(fmt.Appendf(nil, "%s%d", odd, i)); err != nil {
					return err
				}
			}
			return nil
		})
		check()
	}
	if after := hashBolt(t, db); after != before {
		t.Error("bbolt changed more than it was told to")
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	// And as one that keeps the freelist does.
	if db, err = bolt.Open(path, 0o600, &bolt.Options{NoSync: true, NoGrowSync: true}); err != nil {
		t.Fatal(err)
	}
	check()
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// hashBolt is etcd's Hash over a file: state-machine.md, section 4.2.
func hashBolt(t testing.TB, db *bolt.DB) uint32 {
	t.Helper()
	h := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	if err := db.View(func(tx *bolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bolt.Bucket) error {
			_, _ = h.Write(name)
			return hashBucket(h, name, b)
		})
	}); err != nil {
		t.Fatal(err)
	}
	return h.Sum32()
}

func hashBucket(h hash.Hash32, name []byte, b *bolt.Bucket) error {
	ignored := []string{metaConsistentIndex, metaTerm, metaStorageVersion}
	return b.ForEach(func(k, v []byte) error {
		if string(name) == bucketMeta && slices.Contains(ignored, string(k)) {
			return nil
		}
		_, _ = h.Write(k)
		_, _ = h.Write(v)
		return nil
	})
}
