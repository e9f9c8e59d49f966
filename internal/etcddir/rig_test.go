package etcddir

import (
	"context"
	"fmt"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/etcddir/waltest"
)

const (
	self    = 0xac7c97ef0ec193b0
	cluster = 0x8cc9da78b36d1115
	data    = "data"
)

// disk is a data directory in memory.
type disk struct {
	t  testing.TB
	fs *vfs.MemFS
}

func newDisk(t testing.TB) disk { return disk{t, vfs.NewMem()} }

func (d disk) write(path string, content []byte) {
	d.t.Helper()
	if err := d.fs.MkdirAll(d.fs.PathDir(path), 0o700); err != nil {
		d.t.Fatal(err)
	}
	f, err := d.fs.Create(path, "")
	if err != nil {
		d.t.Fatal(err)
	}
	if _, err := f.Write(append([]byte(nil), content...)); err != nil {
		d.t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		d.t.Fatal(err)
	}
}

func (d disk) log(files map[string][]byte) {
	d.t.Helper()
	for name, b := range files {
		d.write(data+"/member/wal/"+name, b)
	}
}

func (d disk) db(b []byte) { d.t.Helper(); d.write(data+"/member/snap/db", b) }

func (d disk) open() (*Dir, error) {
	return Open(context.Background(), Options{FS: d.fs, Dir: data})
}

func (d disk) mustOpen() *Dir {
	d.t.Helper()
	dir, err := d.open()
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { _ = dir.Close() })
	return dir
}

// entries returns the entries that a reader ends up with, as text.
func entries(dir *Dir) (out []string, err error) {
	first := dir.Snapshot.Index + 1
	err = dir.Entries(context.Background(), func(e *raftpb.Entry) error {
		if e.GetIndex() < first || e.GetIndex() > first+uint64(len(out)) {
			return fmt.Errorf("entry %d after %d entries from %d on", e.GetIndex(), len(out), first)
		}
		out = append(out[:e.GetIndex()-first], fmt.Sprintf("%d/%d %s", e.GetIndex(), e.GetTerm(), e.GetData()))
		return nil
	})
	return out, err
}

// add makes the membership change that founds a cluster.
func add(index uint64, id uint64) *raftpb.Entry {
	return waltest.Change(index, 1, &raftpb.ConfChange{
		Type: raftpb.ConfChangeAddNode.Enum(), NodeId: &id,
		Context: fmt.Appendf(nil, `{"id":%d,"peerURLs":["http://10.0.0.1:2380"],"name":"n"}`, id),
	})
}

// small is a log of a few records and two segments: entries 1 to 9, the last two
// of them not known to be committed, and one that took another's place.
func small() *waltest.Log {
	l := waltest.New(self, cluster)
	l.Entries(add(1, self))
	l.State(1, 0, 1)
	l.Entries(waltest.Normal(2, 2, nil), waltest.Normal(3, 2, []byte("three")), waltest.Normal(4, 2, []byte("old four")))
	l.State(2, self, 3)
	l.Entries(waltest.Normal(4, 3, nil), waltest.Normal(5, 3, []byte("five, which is a longer one than the others are")))
	l.State(3, self, 5)
	l.Cut()
	l.Entries(waltest.Normal(6, 3, []byte("six")))
	l.State(3, self, 6)
	l.Entries(waltest.Normal(7, 3, []byte("seven")))
	l.State(3, self, 7)
	l.Entries(waltest.Normal(8, 3, []byte("eight")), waltest.Normal(9, 3, []byte("nine")))
	return l
}
