package server

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/raft/v3/raftpb"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/etcddir"
	"github.com/engram-kv/engram/internal/etcddir/waltest"
	"github.com/engram-kv/engram/internal/etcdimport"
)

const importedID = 0xac7c97ef0ec193b0

// etcdMember writes the data of an etcd member of a cluster: key a in the
// database, b in the log alone, c not known to be committed.
func etcdMember(t *testing.T, dir, walDir string, others ...uint64) {
	t.Helper()
	l := waltest.New(importedID, 7)
	index := uint64(0)
	next := func() uint64 { index++; return index }
	rows := map[string][]byte{}
	for i, id := range append([]uint64{importedID}, others...) {
		text := fmt.Appendf(nil, `{"id":%d,"peerURLs":["http://127.0.0.1:%d"],"name":"etcd-%d"}`, id, 1+i, i)
		rows[fmt.Sprintf("%x", id)] = text
		l.Entries(waltest.Change(next(), 1, &raftpb.ConfChange{Type: raftpb.ConfChangeAddNode.Enum(), NodeId: &id, Context: text}))
	}
	run := func(q *pb.InternalRaftRequest) {
		q.Header = &pb.RequestHeader{ID: index + 1}
		b, err := proto.Marshal(q)
		if err != nil {
			t.Fatal(err)
		}
		l.Entries(waltest.Normal(next(), 2, b))
	}
	put := func(key string) {
		run(&pb.InternalRaftRequest{Put: &pb.PutRequest{Key: []byte(key), Value: []byte("v")}})
	}
	run(&pb.InternalRaftRequest{ClusterVersionSet: &membershippb.ClusterVersionSetRequest{Ver: "3.6.0"}})
	put("a")
	applied := index
	put("b")
	l.State(2, importedID, index)
	put("c")
	db := waltest.DB(t, applied, 2, "3.6.0", func(set func(bucket, key string, value []byte)) {
		for id, text := range rows {
			set("members", id, text)
		}
		set("cluster", "clusterVersion", []byte("3.6.0"))
		set("key", "\x00\x00\x00\x00\x00\x00\x00\x02_\x00\x00\x00\x00\x00\x00\x00\x00", []byte("\x0a\x01a\x10\x02\x18\x02\x20\x01\x2a\x01v"))
	})
	if walDir == "" {
		walDir = filepath.Join(dir, "member", "wal")
	}
	files := map[string][]byte{filepath.Join(dir, "member", "snap", "db"): db}
	for name, b := range l.Files() {
		files[filepath.Join(walDir, name)] = b
	}
	for path, b := range files {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, b, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
}

// keysOf are the keys that a member has.
func keysOf(t *testing.T, m *Member) string {
	t.Helper()
	r, err := client(t, m).Get(t.Context(), "\x00", clientv3.WithFromKey())
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, kv := range r.Kvs {
		keys = append(keys, string(kv.Key))
	}
	return strings.Join(keys, " ")
}

func TestStartOnEtcdData(t *testing.T) {
	for _, apart := range []bool{false, true} {
		t.Run(fmt.Sprintf("wal-dir %t", apart), func(t *testing.T) {
			root := t.TempDir()
			dir, wal := filepath.Join(root, "data"), ""
			var flags []string
			if apart {
				wal = filepath.Join(root, "wal")
				flags = append(flags, "--wal-dir="+wal)
			}
			etcdMember(t, dir, wal)
			m := start(t, dir, append(flags, "--name=other")...)
			if keys := keysOf(t, m); keys != "a b c" { // the only voter commits what it has
				t.Errorf("keys %s", keys)
			}
			list, err := client(t, m).MemberList(t.Context())
			if err != nil || len(list.Members) != 1 || list.Members[0].ID != importedID || list.Header.ClusterId != 7 || list.Members[0].Name != "other" {
				t.Errorf("%v %v", list, err)
			}
			if _, err := client(t, m).Put(t.Context(), "d", "after"); err != nil {
				t.Fatal(err)
			}
			stop(t, m)
			m = start(t, dir, flags...)
			if keys := keysOf(t, m); keys != "a b c d" {
				t.Errorf("keys %s", keys)
			}
			stop(t, m)
			if err := os.MkdirAll(filepath.Join(dir, "member", "snap"), 0o700); err == nil {
				t.Error("an etcd could make its directory")
			}
			moved, err := filepath.Glob(filepath.Join(dir, "member.etcd-*", "snap", "db"))
			if err != nil || len(moved) != 1 {
				t.Errorf("etcd's database is at %v: %v", moved, err)
			}
		})
	}
}

func TestForceNewClusterOnEtcdData(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	etcdMember(t, dir, "", 0x11, 0x22)
	m := start(t, dir, "--force-new-cluster")
	defer stop(t, m)
	if keys := keysOf(t, m); keys != "a b" { // c was never known to be committed
		t.Errorf("keys %s", keys)
	}
	list, err := client(t, m).MemberList(t.Context())
	if err != nil || len(list.Members) != 1 || list.Members[0].ID != importedID {
		t.Errorf("%v %v", list, err)
	}
}

func TestEtcdDataRefused(t *testing.T) {
	t.Run("etcd runs", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "data")
		etcdMember(t, dir, "")
		db, err := os.OpenFile(filepath.Join(dir, "member", "snap", "db"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if err := unix.Flock(int(db.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		if _, err := tryStart(t, dir); !errors.Is(err, etcddir.ErrInUse) || !strings.Contains(err.Error(), "stop etcd") {
			t.Errorf("%v", err)
		}
		if _, err := os.Stat(filepath.Join(dir, "member", "wal")); err != nil {
			t.Errorf("%v", err)
		}
	})
	t.Run("beside Engram's", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "data")
		stop(t, start(t, dir))
		etcdMember(t, dir, "")
		if _, err := tryStart(t, dir); !errors.Is(err, etcdimport.ErrBoth) {
			t.Errorf("%v", err)
		}
	})
	t.Run("a log of etcd in --wal-dir", func(t *testing.T) {
		root := t.TempDir()
		dir, wal := filepath.Join(root, "data"), filepath.Join(root, "wal")
		etcdMember(t, filepath.Join(root, "other"), wal)
		if _, err := tryStart(t, dir, "--wal-dir="+wal); !errors.Is(err, etcddir.ErrIncomplete) || !strings.Contains(err.Error(), "--data-dir") {
			t.Errorf("%v", err)
		}
	})
	t.Run("imported before, and gone", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "data")
		etcdMember(t, dir, "")
		stop(t, start(t, dir))
		for _, name := range []string{"store", "index", "log", "IDENTITY"} {
			if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := tryStart(t, dir); !errors.Is(err, etcdimport.ErrMoved) {
			t.Errorf("%v", err)
		}
	})
}
