package etcdimport

import (
	"errors"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/etcddir/waltest"
)

// Etcd 3.5 writes no storage version, publishes members and the cluster version
// through its store of version 2, and goes by that store for its members.
func TestEtcd35(t *testing.T) {
	entries := history()[:2]
	entries = append(entries,
		waltest.Normal(3, 1, nil),
		legacy(4, 1, "/0/members/ac7c97ef0ec193b0/attributes", `{"name":"one","clientURLs":["http://10.0.0.1:2379"]}`),
		legacy(5, 1, "/0/members/11/attributes", `{"name":"two","clientURLs":["http://10.0.0.2:2379"]}`),
		legacy(6, 1, "/0/version", "3.5.0"),
	)
	for _, e := range history()[19:committed] {
		if e.GetType() == raftpb.EntryNormal { // what 3.5 knows of it
			entries = append(entries, waltest.Normal(uint64(len(entries)+1), 3, e.GetData()))
		}
	}
	end := uint64(len(entries))
	const at = 10
	l := waltest.New(self, cluster)
	l.Entries(entries...)
	l.State(3, self, end)
	l.Snapshot(at, 3, self, second)
	store := func(members string) []byte {
		return []byte(`{"Root":{"Path":"/","Children":{"0":{"Children":{"members":{"Children":{` + members + `}}}},"1":{"Children":{}}}}}`)
	}
	const one, two = `"ac7c97ef0ec193b0":{"Children":{"raftAttributes":{"Value":"{\"peerURLs\":[\"http://10.0.0.1:2380\"]}"}}}`,
		`"11":{"Children":{"raftAttributes":{"Value":"{\"peerURLs\":[\"http://10.0.0.2:2380\"]}"}}}`
	files := etcdData{
		"member/snap/db":                       asOf35(t, database(t, entries[:20])),
		"member/wal/" + l.Segments[0].Name:     l.Segments[0].Bytes,
		"member/snap/0000000000000000.snap.db": nil,
	}
	name, content := waltest.SnapFile(at, 3, store(one+","+two))
	files["member/snap/"+name] = content
	fs := vfs.NewMem()
	files.write(t, fs, dir)
	r, err := Import(t.Context(), options(fs))
	if err != nil {
		t.Fatal(err)
	}
	if r.Release != "3.5" || r.ClusterVersion != "3.5.0" || len(r.Members) != 2 || r.Members[1].Name != "one" || r.Members[1].ClientURLs[0] != "http://10.0.0.1:2379" {
		t.Errorf("%+v", r)
	}
	if !strings.Contains(strings.Join(r.Warnings, "\n"), "proven beside etcd 3.6 and 3.7") {
		t.Errorf("warnings %q", r.Warnings)
	}
	m, _ := machine(t, entries)
	if want := m.Root(); r.Revision != want.Revision() || r.Keys != want.Keys() || r.Keys == 0 {
		t.Errorf("revision %d, %d keys, want %d and %d", r.Revision, r.Keys, want.Revision(), want.Keys())
	}

	// A database whose members were not kept up to date is not believed.
	_, content = waltest.SnapFile(at, 3, store(one))
	files["member/snap/"+name] = content
	fs = vfs.NewMem()
	files.write(t, fs, dir)
	if _, err := Import(t.Context(), options(fs)); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "member 11 is in the database alone") {
		t.Errorf("%v", err)
	}
}
