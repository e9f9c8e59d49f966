package etcdimport

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	bolt "go.etcd.io/bbolt"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/etcddir/waltest"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

const (
	self    = 0xac7c97ef0ec193b0
	second  = 0x11
	learner = 0x22
	cluster = 0x8cc9da78b36d1115

	dir    = "data"
	walDir = "wal"

	committed = 60 // of the entries of history
	last      = 64
)

// history is what a cluster did: entries 1 to last, one of each kind that leaves
// something behind.
func history() (entries []*raftpb.Entry) {
	next := func() uint64 { return uint64(len(entries)) + 1 }
	change := func(typ raftpb.ConfChangeType, m member.Member, promote bool) {
		text, err := json.Marshal(member.Context{Member: m, IsPromote: promote})
		if err != nil {
			panic(err)
		}
		entries = append(entries, waltest.Change(next(), 1+next()/20, &raftpb.ConfChange{Type: &typ, NodeId: &m.ID, Context: text}))
	}
	run := func(q *pb.InternalRaftRequest) {
		q.Header = &pb.RequestHeader{ID: next()<<8 | 1}
		data, err := proto.Marshal(q)
		if err != nil {
			panic(err)
		}
		entries = append(entries, waltest.Normal(next(), 1+next()/20, data))
	}
	change(raftpb.ConfChangeAddNode, member.Member{ID: second, Name: "two", PeerURLs: []string{"http://10.0.0.2:2380"}}, false)
	change(raftpb.ConfChangeAddNode, member.Member{ID: self, Name: "one", PeerURLs: []string{"http://10.0.0.1:2380"}}, false)
	entries = append(entries, waltest.Normal(next(), 1, nil))
	run(&pb.InternalRaftRequest{ClusterMemberAttrSet: &membershippb.ClusterMemberAttrSetRequest{
		Member_ID: self, MemberAttributes: &membershippb.Attributes{Name: "one", ClientUrls: []string{"http://10.0.0.1:2379"}}}})
	run(&pb.InternalRaftRequest{ClusterVersionSet: &membershippb.ClusterVersionSetRequest{Ver: "3.6.0"}})
	run(&pb.InternalRaftRequest{LeaseGrant: &pb.LeaseGrantRequest{ID: 77, TTL: 600}})
	run(&pb.InternalRaftRequest{AuthRoleAdd: &pb.AuthRoleAddRequest{Name: "root"}})
	hash := base64.StdEncoding.EncodeToString([]byte("$2a$04$0123456789012345678901u123456789012345678901234567890"))
	run(&pb.InternalRaftRequest{AuthUserAdd: &pb.AuthUserAddRequest{Name: "root", HashedPassword: hash, Options: &authpb.UserAddOptions{}}})
	run(&pb.InternalRaftRequest{AuthUserGrantRole: &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"}})
	run(&pb.InternalRaftRequest{DowngradeInfoSet: &membershippb.DowngradeInfoSetRequest{Enabled: true, Ver: "3.5.0"}})
	run(&pb.InternalRaftRequest{Alarm: &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: second, Alarm: pb.AlarmType_NOSPACE}})
	run(&pb.InternalRaftRequest{Alarm: &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: second, Alarm: pb.AlarmType_NOSPACE}})
	change(raftpb.ConfChangeAddLearnerNode, member.Member{ID: learner, PeerURLs: []string{"http://10.0.0.3:2380"}, IsLearner: true}, false)
	for len(entries) < last {
		n := len(entries)
		switch {
		case n%9 == 0:
			run(&pb.InternalRaftRequest{DeleteRange: &pb.DeleteRangeRequest{Key: fmt.Appendf(nil, "key-%d", n%7)}})
		case n == 40:
			run(&pb.InternalRaftRequest{Compaction: &pb.CompactionRequest{Revision: 12}})
		case n == 58:
			change(raftpb.ConfChangeAddNode, member.Member{ID: learner}, true)
		default:
			run(&pb.InternalRaftRequest{Put: &pb.PutRequest{Key: fmt.Appendf(nil, "key-%d", n%7), Value: bytes.Repeat([]byte{byte(n)}, 300), Lease: int64(n % 2 * 77)}})
		}
	}
	return entries
}

func stateOptions(fs storage.FS, s *storage.Store, index string) state.Options {
	return state.Options{Storage: s, MinLeaseTTL: 2, MaxLearners: 1, Version: "3.7.3", MVCC: mvcc.Options{FS: fs, Dir: index, ViewAge: -1}}
}

// machine is a state machine that ran entries, in memory.
func machine(t testing.TB, entries []*raftpb.Entry) (*state.Machine, *storage.Store) {
	t.Helper()
	fs := vfs.NewMem()
	s, err := storage.Open(storage.Options{FS: fs, Dir: "store"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Abandon() })
	m, err := state.Open(stateOptions(fs, s, "index"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Abandon)
	apply(t, m, entries)
	return m, s
}

func apply(t testing.TB, m *state.Machine, entries []*raftpb.Entry) {
	t.Helper()
	for len(entries) > 0 {
		results, err := m.Apply(entries)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			r.Reply.Release()
		}
		entries = entries[len(results):]
	}
}

// database is etcd's database after some entries.
func database(t testing.TB, entries []*raftpb.Entry) []byte {
	t.Helper()
	_, s := machine(t, entries)
	snap := s.Snapshot()
	defer snap.Close()
	p, err := snapfile.PlanEtcd(t.Context(), snapfile.Source{Reader: snap})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := p.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// etcdData is what lies below an etcd data directory: paths and contents.
type etcdData map[string][]byte

// etcd makes the data of a member: a database after applied entries, and a log
// that begins after a snapshot, if there is one.
func etcd(t testing.TB, applied, snapshot int) etcdData {
	t.Helper()
	entries := history()
	l := waltest.New(self, cluster)
	for i, e := range entries {
		l.Entries(e)
		if index := i + 1; index <= committed {
			l.State(e.GetTerm(), second, uint64(index))
		}
		switch i + 1 {
		case snapshot - 4:
			l.Cut() // the segment with the snapshot's record begins below its index, and stays
		case snapshot:
			l.Snapshot(uint64(snapshot), e.GetTerm(), self, second)
			l.Cut()
		}
	}
	l.State(entries[last-1].GetTerm(), second, committed)
	files := etcdData{"member/snap/0000000000000002-0000000000000001.snap": []byte("not looked at")}
	for i, s := range l.Segments {
		if snapshot == 0 || i > 0 {
			files["member/wal/"+s.Name] = s.Bytes
		}
	}
	files["member/snap/db"] = database(t, entries[:applied])
	return files
}

// write puts the files on a disk, durably.
func (f etcdData) write(t testing.TB, fs storage.FS, root string) {
	t.Helper()
	for path, b := range f {
		path = fs.PathJoin(root, path)
		if err := fs.MkdirAll(fs.PathDir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := writeFile(fs, path, bytes.Clone(b)); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"", "member", "member/snap", "member/wal", "."} {
		path := fs.PathJoin(root, d)
		if d == "." {
			path = fs.PathDir(root)
		}
		if _, err := fs.Stat(path); err == nil {
			if err := datadir.Sync(fs, path); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func fileNames(files etcdData) []string {
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// tree reads all files below a directory.
func tree(t testing.TB, fs storage.FS, root string) etcdData {
	t.Helper()
	files := etcdData{}
	var walk func(at string)
	walk = func(at string) {
		names, err := fs.List(fs.PathJoin(root, at))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			path := name
			if at != "" {
				path = at + "/" + name
			}
			info, err := fs.Stat(fs.PathJoin(root, path))
			if err != nil {
				t.Fatal(err)
			}
			if info.IsDir() {
				walk(path)
				continue
			}
			b, err := readFile(fs, fs.PathJoin(root, path))
			if err != nil {
				t.Fatal(err)
			}
			files[path] = b
		}
	}
	walk("")
	return files
}

// below returns the files of a directory.
func (f etcdData) below(dir string) etcdData {
	out := etcdData{}
	for path, b := range f {
		if rest, ok := strings.CutPrefix(path, dir+"/"); ok {
			out[rest] = b
		}
	}
	return out
}

func sameFiles(a, b etcdData) error {
	if !slices.Equal(fileNames(a), fileNames(b)) {
		return fmt.Errorf("files %v and %v", fileNames(a), fileNames(b))
	}
	for name := range a {
		if !bytes.Equal(a[name], b[name]) {
			return fmt.Errorf("%s differs", name)
		}
	}
	return nil
}

func options(fs storage.FS) Options {
	return Options{
		FS: fs, Dir: dir,
		State:  state.Options{MinLeaseTTL: 2, MaxLearners: 1, Version: "3.7.3"},
		Logger: slog.New(slog.DiscardHandler),
	}
}

// checkImported opens what an import made, and holds it against machine and log
// as they should be.
func checkImported(t testing.TB, o Options, first uint64, commit int) error {
	t.Helper()
	entries := history()
	s, err := storage.Open(storage.Options{FS: o.FS, Dir: o.FS.PathJoin(o.Dir, datadir.Store)})
	if err != nil {
		return err
	}
	defer func() { _ = s.Abandon() }()
	m, err := state.Open(stateOptions(o.FS, s, o.FS.PathJoin(o.Dir, datadir.Index)))
	if err != nil {
		return err
	}
	defer m.Abandon()
	want, _ := machine(t, entries[:commit])
	a, _, err := m.Hash(t.Context())
	if err != nil {
		return err
	}
	b, _, err := want.Hash(t.Context())
	if err != nil {
		return err
	}
	applied, term := m.Applied()
	wantApplied, wantTerm := want.Applied()
	if a != b || applied != wantApplied || term != wantTerm || m.Leases().KeyCount(77) != want.Leases().KeyCount(77) || want.Leases().KeyCount(77) == 0 {
		return fmt.Errorf("hash %x at index %d of term %d, want %x at %d of %d", a, applied, term, b, wantApplied, wantTerm)
	}
	logDir := o.FS.PathJoin(o.Dir, datadir.Log)
	if o.WALDir != "" {
		logDir = o.WALDir
	}
	log, err := raftlog.Open(raftlog.Options{FS: o.FS, Dir: logDir})
	if err != nil {
		return err
	}
	defer func() { _ = log.Abandon() }()
	if id := log.Identity(); id.MemberID != self || id.ClusterID != cluster {
		return fmt.Errorf("log of member %x of %x", id.MemberID, id.ClusterID)
	}
	h, _, err := log.InitialState()
	if err != nil || h.GetTerm() != entries[last-1].GetTerm() || h.GetVote() != second || h.GetCommit() != uint64(commit) {
		return fmt.Errorf("hard state %v: %w", h, err)
	}
	from, _ := log.FirstIndex()
	if end, _ := log.LastIndex(); from != first || end != last {
		return fmt.Errorf("log from %d to %d", from, end)
	}
	err = log.Replay(from, last+1, func(e *raftpb.Entry) error {
		if w := entries[e.GetIndex()-1]; e.GetTerm() != w.GetTerm() || e.GetType() != w.GetType() || !bytes.Equal(e.GetData(), w.GetData()) {
			return fmt.Errorf("entry %d is another one", e.GetIndex())
		}
		return nil
	})
	if err != nil {
		return err
	}
	id, ok, err := datadir.ReadIdentity(o.FS, o.Dir)
	if want := (datadir.Identity{Cluster: cluster, Member: self, Joined: true}); err != nil || !ok || id != want {
		return fmt.Errorf("identity %+v: %w", id, err)
	}
	return nil
}

// checkLeft checks that an import left only what belongs there, and that etcd's files are as they were.
func checkLeft(t testing.TB, o Options, was etcdData) error {
	t.Helper()
	names, err := o.FS.List(o.Dir)
	if err != nil {
		return err
	}
	moved := ""
	for _, name := range names {
		switch {
		case strings.HasPrefix(name, movedDir) && moved == "":
			moved = name
		case !slices.Contains([]string{"member", "store", "index", "log", "IDENTITY"}, name):
			return fmt.Errorf("%s is left: %v", name, names)
		}
	}
	marker, err := readFile(o.FS, o.FS.PathJoin(o.Dir, "member"))
	if err != nil || !strings.Contains(string(marker), moved) || moved == "" {
		return fmt.Errorf("marker %q, etcd's data in %q: %w", marker, moved, err)
	}
	return sameFiles(tree(t, o.FS, o.FS.PathJoin(o.Dir, moved)), was.below("member"))
}

// knownNames is an error if a directory holds what verify would not know, etcd's own log apart.
func knownNames(o Options) error {
	unknown, err := datadir.Unknown(o.FS, o.Dir, o.WALDir)
	unknown = slices.DeleteFunc(unknown, func(path string) bool {
		return o.WALDir != "" && o.FS.PathDir(path) == o.WALDir && (strings.HasSuffix(path, ".wal") || strings.HasSuffix(path, "0.tmp"))
	})
	if err == nil && len(unknown) > 0 {
		err = fmt.Errorf("nobody knows %q", unknown)
	}
	return err
}

// asOf35 makes of a database what etcd 3.5 would have written.
func asOf35(t testing.TB, db []byte) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "db")
	if err := os.WriteFile(path, db, 0o600); err != nil {
		t.Fatal(err)
	}
	b, err := bolt.Open(path, 0o600, &bolt.Options{NoFreelistSync: true, Timeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	err = b.Update(func(tx *bolt.Tx) error { return tx.Bucket([]byte("meta")).Delete([]byte("storageVersion")) })
	if err = errors.Join(err, b.Close()); err != nil {
		t.Fatal(err)
	}
	out, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// legacy is a request of the store of version 2.
func legacy(index, term uint64, path, value string) *raftpb.Entry {
	var b []byte
	b = protowire.AppendTag(b, 1, protowire.VarintType)
	b = protowire.AppendVarint(b, index<<8|1)
	for num, text := range []string{2: "PUT", 3: path, 4: value} {
		if num >= 2 {
			b = protowire.AppendTag(b, protowire.Number(num), protowire.BytesType)
			b = protowire.AppendString(b, text)
		}
	}
	return waltest.Normal(index, term, b)
}

// versionSet agrees on a cluster version.
func versionSet(version string) *pb.InternalRaftRequest {
	return &pb.InternalRaftRequest{ClusterVersionSet: &membershippb.ClusterVersionSetRequest{Ver: version}}
}
