package etcddir

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"
	"golang.org/x/sys/unix"

	"github.com/engram-kv/engram/internal/etcddir/waltest"
	"github.com/engram-kv/engram/internal/member"
)

func TestOpen(t *testing.T) {
	d := newDisk(t)
	d.log(small().Files())
	d.db(waltest.DB(t, 5, 3, "3.7.0", nil))
	dir := d.mustOpen()
	if dir.MemberID != self || dir.ClusterID != cluster {
		t.Errorf("member %x of cluster %x", dir.MemberID, dir.ClusterID)
	}
	if want := (HardState{3, self, 7}); dir.Hard != want || dir.Commit() != 7 || dir.Last != 9 || dir.LastTerm != 3 {
		t.Errorf("hard state %+v, commit %d, last %d of term %d", dir.Hard, dir.Commit(), dir.Last, dir.LastTerm)
	}
	if dir.Release() != "3.7" || dir.DB.Applied != 5 || dir.DB.Term != 3 || dir.V2 != nil || dir.Torn != nil || len(dir.Segments) != 2 {
		t.Errorf("%+v", dir)
	}
	got, err := entries(dir)
	want := []string{"2/2 ", "3/2 three", "4/3 ", "5/3 five, which is a longer one than the others are", "6/3 six", "7/3 seven", "8/3 eight", "9/3 nine"}
	if err != nil || !slices.Equal(got[1:], want) {
		t.Errorf("entries %q: %v", got, err)
	}
}

// The first records of a log that etcd 3.7.1 wrote (state-machine.md, section 11).
func TestBytesOfEtcd(t *testing.T) {
	head := []byte{0x04, 0, 0, 0, 0, 0, 0, 0x84, 0x08, 0x04, 0x10, 0, 0, 0, 0, 0,
		0x20, 0, 0, 0, 0, 0, 0, 0, 0x08, 0x01, 0x10, 0xfe, 0x8f, 0xbd, 0xbc, 0x06, 0x1a, 0x16,
		0x08, 0xb0, 0xa7, 0x86, 0xf6, 0xf0, 0xfd, 0xa5, 0xbe, 0xac, 0x01, 0x10, 0x95, 0xa2, 0xb4, 0x9b, 0x8b, 0xcf, 0xf6, 0xe4, 0x8c, 0x01,
		0x0e, 0, 0, 0, 0, 0, 0, 0x82, 0x08, 0x05, 0x10, 0xe7, 0xf0, 0x8d, 0xf4, 0x06, 0x1a, 0x04, 0x08, 0x00, 0x10, 0x00, 0, 0}
	if ours := waltest.New(self, cluster).Segments[0].Bytes; string(ours) != string(head) {
		t.Fatalf("the writer of these tests wrote\n%x, etcd\n%x", ours, head)
	}
	d := newDisk(t)
	d.log(map[string][]byte{"0000000000000000-0000000000000000.wal": append(head, make([]byte, 4096)...)})
	if dir := d.mustOpen(); dir.MemberID != self || dir.ClusterID != cluster || dir.Last != 0 {
		t.Errorf("%+v", dir)
	}
}

func TestLogBeginsAfterSnapshot(t *testing.T) {
	l := small()
	l.Snapshot(6, 3, self)
	l.Cut()
	l.Entries(waltest.Normal(10, 3, []byte("ten")))
	files := l.Files()
	delete(files, l.Segments[0].Name) // as etcd does after some snapshots
	d := newDisk(t)
	d.log(files)
	d.db(waltest.DB(t, 7, 3, "3.6.0", nil))
	dir := d.mustOpen()
	got, err := entries(dir)
	if want := []string{"7/3 seven", "8/3 eight", "9/3 nine", "10/3 ten"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("entries %q: %v", got, err)
	}
	if dir.Snapshot.Index != 6 || dir.Snapshot.Term != 3 || dir.Release() != "3.6" {
		t.Errorf("%+v", dir)
	}
}

// A snapshot that was received and whose hard state a crash kept back is not
// where the log begins; one that was committed brings its own database.
func TestReceivedSnapshot(t *testing.T) {
	l := waltest.New(self, cluster)
	l.Entries(add(1, self))
	l.State(1, 0, 1)
	l.Snapshot(40, 4, self)
	d := newDisk(t)
	d.log(l.Files())
	d.db(waltest.DB(t, 1, 1, "3.7.0", nil))
	if dir := d.mustOpen(); dir.Snapshot.Index != 0 || dir.Last != 1 {
		t.Errorf("%+v", dir)
	}

	l.State(4, 0, 40)
	l.Entries(waltest.Normal(41, 4, []byte("after")))
	d = newDisk(t)
	d.log(l.Files())
	d.db(waltest.DB(t, 1, 1, "3.7.0", nil))
	if _, err := d.open(); !errors.Is(err, ErrIncomplete) || !strings.Contains(err.Error(), "0000000000000028.snap.db") {
		t.Errorf("without the database that was received: %v", err)
	}
	d.write(data+"/member/snap/0000000000000028.snap.db", waltest.DB(t, 40, 4, "3.7.0", nil))
	dir := d.mustOpen()
	if got, err := entries(dir); err != nil || !slices.Equal(got, []string{"41/4 after"}) || dir.DB.Applied != 40 || !dir.DB.Received {
		t.Errorf("%q %v %+v", got, err, dir.DB)
	}
}

func TestRefused(t *testing.T) {
	db := func(index, term uint64, version string) func(disk) {
		return func(d disk) { d.db(waltest.DB(d.t, index, term, version, nil)) }
	}
	of := func(l *waltest.Log, more ...func(disk)) func(disk) {
		return func(d disk) {
			d.log(l.Files())
			for _, f := range more {
				f(d)
			}
		}
	}
	log := func(change func(l *waltest.Log)) *waltest.Log {
		l := small()
		change(l)
		return l
	}
	gap := small()
	gap.Cut()
	for _, c := range []struct {
		name string
		make func(disk)
		want error
		text string
	}{
		{"no log", db(5, 3, "3.7.0"), ErrIncomplete, "no log of etcd"},
		{"database older than the log", of(log(func(l *waltest.Log) { l.Snapshot(6, 3, self) }), db(5, 3, "3.7.0")), ErrIncomplete, "snapshot of index 6"},
		{"database newer than the log", of(small(), db(10, 3, "3.7.0")), ErrIncomplete, "ends at index 9"},
		{"database of another time", of(small(), db(5, 2, "3.7.0")), ErrIncomplete, "index 5 has term 2"},
		{"etcd 3.4", of(small(), db(5, 0, "")), ErrVersion, "upgrade to etcd 3.5 first"},
		{"etcd 3.8", of(small(), db(5, 3, "3.8.0")), nil, "downgrade etcd first"},
		{"a segment is missing", func(d disk) {
			files := gap.Files()
			delete(files, gap.Segments[1].Name)
			d.log(files)
			d.db(waltest.DB(d.t, 5, 3, "3.7.0", nil))
		}, ErrIncomplete, "between are others missing"},
		{"the first segment is missing", func(d disk) {
			l := small()
			files := l.Files()
			delete(files, l.Segments[0].Name)
			d.log(files)
			d.db(waltest.DB(d.t, 5, 3, "3.7.0", nil))
		}, ErrIncomplete, ""},
		{"another segment's end", func(d disk) {
			files := small().Files()
			first := small().Segments[0]
			files[first.Name] = first.Bytes[:first.Ends[len(first.Ends)-2]]
			d.log(files)
			d.db(waltest.DB(d.t, 5, 3, "3.7.0", nil))
		}, ErrDamaged, "records between are missing"},
		{"odd name", func(d disk) { of(small(), db(5, 3, "3.7.0"))(d); d.write(data+"/member/wal/x.wal", nil) }, ErrIncomplete, "x.wal"},
		{"two logs, one gone", of(log(func(l *waltest.Log) { l.Record(waltest.Metadata, []byte{8, 1, 16, 2}) }), db(5, 3, "3.7.0")), ErrDamaged, "another member"},
		{"gap", of(log(func(l *waltest.Log) { l.Entries(waltest.Normal(11, 3, nil)) }), db(5, 3, "3.7.0")), ErrDamaged, "entry 11 follows entry 9"},
		{"committed entry replaced", of(log(func(l *waltest.Log) { l.Entries(waltest.Normal(6, 4, nil)) }), db(5, 3, "3.7.0")), ErrDamaged, "which was committed"},
		{"commit beyond the end", of(log(func(l *waltest.Log) { l.State(3, self, 12) }), db(5, 3, "3.7.0")), ErrIncomplete, "index 12 is committed"},
		{"terms fall", of(log(func(l *waltest.Log) { l.Entries(waltest.Normal(10, 2, nil)) }), db(5, 3, "3.7.0")), ErrDamaged, "follows one of term 3"},
		{"hard state falls", of(log(func(l *waltest.Log) { l.State(2, self, 7) }), db(5, 3, "3.7.0")), ErrDamaged, "follows one of 3"},
		{"unknown kind", of(log(func(l *waltest.Log) { l.Record(6, []byte{1}) }), db(5, 3, "3.7.0")), ErrDamaged, "type 6"},
		{"joint change", of(log(func(l *waltest.Log) {
			e := waltest.Normal(10, 3, []byte{1})
			e.Type = raftpb.EntryConfChangeV2.Enum()
			l.Entries(e)
		}), db(5, 3, "3.7.0")), ErrDamaged, "etcd never writes"},
		{"damaged database", of(small(), func(d disk) { d.db(make([]byte, 16<<10)) }), nil, "another member's data"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDisk(t)
			c.make(d)
			dir, err := d.open()
			if err == nil {
				t.Fatalf("taken: %+v", dir)
			}
			if c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v", err)
			}
		})
	}
}

// An etcd that was stopped before it wrote anything to its database left all of
// it in the log.
func TestNoDatabase(t *testing.T) {
	d := newDisk(t)
	d.log(small().Files())
	if err := d.fs.MkdirAll(data+"/member/snap", 0o700); err != nil {
		t.Fatal(err)
	}
	if dir := d.mustOpen(); dir.Database() != nil || dir.Commit() != 7 {
		t.Errorf("%+v", dir)
	}
	d.db(nil)
	if dir := d.mustOpen(); dir.Database() != nil {
		t.Errorf("%+v", dir)
	}
}

func TestWALDirApart(t *testing.T) {
	d := newDisk(t)
	d.db(waltest.DB(t, 5, 3, "3.7.0", nil))
	for name, b := range small().Files() {
		d.write("wal/"+name, b)
	}
	o := Options{FS: d.fs, Dir: data, WALDir: "wal"}
	dir, err := Open(t.Context(), o)
	if err != nil || dir.Last != 9 || dir.WALPath() != "wal" {
		t.Fatalf("%+v %v", dir, err)
	}
	d.log(small().Files())
	if _, err := Open(t.Context(), o); !errors.Is(err, ErrIncomplete) || !strings.Contains(err.Error(), "both") {
		t.Errorf("two logs: %v", err)
	}
	if err := d.fs.RemoveAll(data); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), o); !errors.Is(err, ErrIncomplete) || !strings.Contains(err.Error(), "--data-dir") {
		t.Errorf("a log and no data directory: %v", err)
	}
}

// A real file system: a running etcd holds the locks that it takes.
func TestInUse(t *testing.T) {
	root := t.TempDir()
	write := func(path string, b []byte) string {
		path = filepath.Join(root, "member", path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, b, 0o600)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	db := write("snap/db", waltest.DB(t, 5, 3, "3.7.0", nil))
	var segment string
	for _, s := range small().Segments {
		segment = write("wal/"+s.Name, s.Bytes)
	}
	o := Options{FS: vfs.Default, Dir: root}
	take := func(path string, lock func(fd int) error) func() {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err == nil {
			err = lock(int(f.Fd()))
		}
		if err != nil {
			t.Fatal(err)
		}
		return func() { _ = f.Close() }
	}
	flock := func(fd int) error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) }
	ofd := func(fd int) error {
		return unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	}
	for path, lock := range map[string]func(int) error{db: flock, segment: ofd} {
		release := take(path, lock)
		if _, err := Open(t.Context(), o); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s is locked: %v", path, err)
		}
		release()
	}
	dir, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for path, lock := range map[string]func(int) error{db: flock, segment: ofd} {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := lock(int(f.Fd())); err == nil {
			t.Errorf("%s can be locked while it is read", path)
		}
		_ = f.Close()
	}
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}
	take(db, flock)()
}

// Etcd 3.5 goes by its store of version 2: snapshot file and log.
func TestMembersOfVersion2(t *testing.T) {
	const other, learner = 0x11, 0x22
	store := `{"Root":{"Path":"/","Children":{"0":{"Children":{"members":{"Children":{
		"ac7c97ef0ec193b0":{"Children":{"raftAttributes":{"Value":"{\"peerURLs\":[\"http://a\"]}","Children":null},"attributes":{"Value":"{}","Children":null}}},
		"22":{"Children":{"raftAttributes":{"Value":"{\"peerURLs\":[\"http://b\"],\"isLearner\":true}","Children":null}}}}}}},"1":{"Children":{}}}}}`
	change := func(index uint64, typ raftpb.ConfChangeType, id uint64, context string) *raftpb.Entry {
		return waltest.Change(index, 3, &raftpb.ConfChange{Type: &typ, NodeId: &id, Context: []byte(context)})
	}
	l := small()
	l.Snapshot(6, 3, self)
	l.Entries(
		change(10, raftpb.ConfChangeAddNode, learner, `{"id":34,"peerURLs":null,"isPromote":true}`),
		change(11, raftpb.ConfChangeAddLearnerNode, other, `{"id":17,"peerURLs":["http://c"],"isLearner":true}`),
		change(12, raftpb.ConfChangeAddNode, 0x33, `{"id":51,"peerURLs":["http://d"]}`),
		change(13, raftpb.ConfChangeRemoveNode, 0x33, ""),
		change(14, raftpb.ConfChangeRemoveNode, self, ""),
	)
	l.State(3, self, 13)
	d := newDisk(t)
	d.log(l.Files())
	d.db(waltest.DB(t, 13, 3, "", nil))
	if _, err := d.open(); !errors.Is(err, ErrIncomplete) || !strings.Contains(err.Error(), ".snap") {
		t.Errorf("without the snapshot file: %v", err)
	}
	name, content := waltest.SnapFile(6, 3, []byte(store))
	d.write(data+"/member/snap/"+name, content)
	dir := d.mustOpen()
	if dir.Release() != "3.5" || dir.V2 == nil {
		t.Fatalf("%+v", dir)
	}
	same := []*member.Member{{ID: self}, {ID: learner}, {ID: other, IsLearner: true}}
	if why := dir.V2.Differs(same); why != "" {
		t.Errorf("differs: %s", why)
	}
	for _, c := range []struct {
		members []*member.Member
		want    string
	}{
		{same[1:], "member ac7c97ef0ec193b0 is not in"},
		{append([]*member.Member{{ID: 0x44}}, same...), "member 44 is in the database alone"},
		{[]*member.Member{{ID: self}, {ID: learner, IsLearner: true}, {ID: other, IsLearner: true}}, "member 22 is a voter"},
		{[]*member.Member{{ID: self}, {ID: learner}, {ID: other}}, "member 11 is a learner"},
	} {
		if why := dir.V2.Differs(c.members); !strings.Contains(why, c.want) {
			t.Errorf("%q, want %q", why, c.want)
		}
	}
	for i := range content {
		bad := slices.Clone(content)
		bad[i] ^= 1
		d.write(data+"/member/snap/"+name, bad)
		if _, err := d.open(); err == nil {
			t.Fatalf("byte %d of the snapshot file was flipped and nobody noticed", i)
		}
	}
}
