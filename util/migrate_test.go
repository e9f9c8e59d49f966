package util

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/etcddir/waltest"
)

// etcdDir makes the data directory of a small member of etcd 3.6: one key in the
// database and one in the log alone.
func etcdDir(t *testing.T) string {
	t.Helper()
	id := uint64(0xac7c97ef0ec193b0)
	put := func(index uint64, key string) *raftpb.Entry {
		b, err := proto.Marshal(&pb.InternalRaftRequest{Header: &pb.RequestHeader{ID: index}, Put: &pb.PutRequest{Key: []byte(key), Value: []byte("v")}})
		if err != nil {
			t.Fatal(err)
		}
		return waltest.Normal(index, 2, b)
	}
	self := fmt.Appendf(nil, `{"id":%d,"peerURLs":["http://10.0.0.1:2380"],"name":"one"}`, id)
	l := waltest.New(id, 7)
	l.Entries(waltest.Change(1, 1, &raftpb.ConfChange{Type: raftpb.ConfChangeAddNode.Enum(), NodeId: &id, Context: self}))
	l.Entries(waltest.Normal(2, 2, nil), put(3, "a"), put(4, "b"))
	l.State(2, id, 4)
	l.Entries(put(5, "c"))
	dir := filepath.Join(t.TempDir(), "one.etcd")
	files := map[string][]byte{"snap/db": waltest.DB(t, 3, 2, "3.6.0", func(set func(bucket, key string, value []byte)) {
		set("members", "ac7c97ef0ec193b0", self)
		set("key", "\x00\x00\x00\x00\x00\x00\x00\x02_\x00\x00\x00\x00\x00\x00\x00\x00", []byte("\x0a\x01a\x10\x02\x18\x02\x20\x01\x2a\x01v"))
	})}
	for name, b := range l.Files() {
		files["wal/"+name] = b
	}
	for name, b := range files {
		path := filepath.Join(dir, "member", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func runMigrate(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	var o, e bytes.Buffer
	code = Run(t.Context(), "engram util", append([]string{"migrate"}, args...), Streams{Out: &o, Err: &e})
	return code, o.String(), e.String()
}

func TestMigrateCheck(t *testing.T) {
	dir, scratch := etcdDir(t), t.TempDir()
	code, out, errs := runMigrate(t, "--check", dir, "--scratch-dir", scratch)
	if code != 0 {
		t.Fatalf("%d %s", code, errs)
	}
	for _, text := range []string{
		"is of etcd 3.6: member ac7c97ef0ec193b0 of cluster 7", "ac7c97ef0ec193b0 one (http://10.0.0.1:2380)",
		"term 2, vote ac7c97ef0ec193b0, committed index 4, last index 5 (1 not known to be committed)", "1 segments", "holds index 3 and revision 2",
		"2 keys at revision 3", "0 leases, 0 users", "run the 1 entries that it lacks", "Nothing would be refused",
	} {
		if !strings.Contains(out, text) {
			t.Errorf("nothing says %q in\n%s", text, out)
		}
	}
	if left, err := os.ReadDir(scratch); err != nil || len(left) > 0 {
		t.Errorf("%v is left in the scratch directory: %v", left, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("%v in the data directory: %v", left, err)
	}
	_, out, _ = runMigrate(t, "--check", dir, "-w", "json")
	var r struct {
		MemberID, Commit uint64
		Keys, Revision   int64
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil || r.MemberID != 0xac7c97ef0ec193b0 || r.Commit != 4 || r.Keys != 2 || r.Revision != 3 {
		t.Errorf("%+v %v from %s", r, err, out)
	}
}

// What was found is told with all that would be refused.
func TestMigrateTellsAllRefusals(t *testing.T) {
	dir := etcdDir(t)
	if err := os.MkdirAll(filepath.Join(dir, "store"), 0o700); err != nil {
		t.Fatal(err)
	}
	code, out, errs := runMigrate(t, "--check", dir, "--wal-dir", filepath.Join(dir, "member", "wal"))
	if code != 1 || !strings.Contains(out, "2 keys at revision 3") || !strings.Contains(out, "would refuse it") || strings.Contains(out, "Nothing would be refused") {
		t.Errorf("%d %s", code, out)
	}
	for _, text := range []string{"has member of etcd's and store of Engram's", "gets another name"} {
		if !strings.Contains(errs, text) {
			t.Errorf("nothing says %q in %s", text, errs)
		}
	}
}

func TestMigrateRefusals(t *testing.T) {
	dir := etcdDir(t)
	if err := os.Truncate(filepath.Join(dir, "member", "wal", "0000000000000000-0000000000000000.wal"), 200); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"--check", dir}, 1, "would be refused"},
		{[]string{"--check", t.TempDir()}, 1, "has no directory member"},
		{[]string{"--check", filepath.Join(dir, "none")}, 1, "no such file"},
		{[]string{dir}, 1, "give --check"},
		{nil, 128, "exactly one argument"},
		{[]string{"--data-dir", dir, "--target-version", "3.6"}, 1, "use etcdutl migrate"},
		{[]string{"--data-dir", dir, "--target-version", "3.4"}, 128, `Minimal "3.5"`},
	} {
		if code, out, errs := runMigrate(t, c.args...); code != c.code || !strings.Contains(errs, c.text) || out != "" {
			t.Errorf("%q: %d, %q, %q", c.args, code, out, errs)
		}
	}
}
