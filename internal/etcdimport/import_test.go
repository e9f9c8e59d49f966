package etcdimport

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/etcddir"
	"github.com/engram-kv/engram/internal/etcddir/waltest"
	"github.com/engram-kv/engram/internal/storage"
)

func TestImport(t *testing.T) {
	for _, c := range []struct {
		name              string
		applied, snapshot int
		first             uint64
	}{
		{"database in the middle", 30, 0, 1},
		{"nothing in the database", 0, 0, 1},
		{"all in the database", committed, 0, 1},
		{"database ahead of the commit index", committed + 2, 20, 21},
		{"after a snapshot", 45, 20, 21},
		{"at the snapshot", 20, 20, 21},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs := vfs.NewMem()
			files := etcd(t, c.applied, c.snapshot)
			files.write(t, fs, dir)
			var told bytes.Buffer
			o := options(fs)
			o.Logger = slog.New(slog.NewTextHandler(&told, nil))
			o.Name, o.PeerURLs = "other", []string{"http://10.9.9.9:2380"}

			if err := fs.MkdirAll("scratch", 0o700); err != nil {
				t.Fatal(err)
			}
			before := tree(t, fs, dir)
			dry, err := Check(t.Context(), o, "scratch")
			if err != nil {
				t.Fatal(err)
			}
			if err := sameFiles(before, tree(t, fs, dir)); err != nil {
				t.Errorf("the dry run changed: %v", err)
			}
			if left := tree(t, fs, "scratch"); len(left) > 0 {
				t.Errorf("the dry run left %v", fileNames(left))
			}

			r, err := Import(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			if err := checkLeft(t, o, files); err != nil {
				t.Error(err)
			}
			commit := max(committed, c.applied)
			if err := checkImported(t, o, c.first, commit); err != nil {
				t.Error(err)
			}
			if want := uint64(commit - c.applied); r.Replayed != want || r.Commit != uint64(commit) || r.Last != last || r.Snapshot != uint64(c.snapshot) {
				t.Errorf("%+v", r)
			}
			if r.Keys == 0 || r.Leases != 1 || r.Users != 1 || len(r.Members) != 3 || r.ClusterVersion != "3.6.0" || !r.Downgrade.Enabled {
				t.Errorf("%+v", r)
			}
			if dry.Keys != r.Keys || dry.Revision != r.Revision || dry.Replayed != r.Replayed || dry.MovedTo != "" {
				t.Errorf("the dry run said %+v, the import %+v", dry, r)
			}
			for _, text := range []string{"etcd's data was imported", "--name=other", "http://10.9.9.9:2380", "downgrade of the cluster to 3.5", r.MovedTo} {
				if !strings.Contains(told.String(), text) {
					t.Errorf("nothing says %q in\n%s", text, told.String())
				}
			}
			if r, err := Import(t.Context(), o); r != nil || err != nil {
				t.Errorf("a second start: %+v %v", r, err)
			}
		})
	}
}

func TestNothingToImport(t *testing.T) {
	fs := vfs.NewMem()
	if err := fs.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if r, err := Import(t.Context(), options(fs)); r != nil || err != nil {
		t.Errorf("%+v %v", r, err)
	}
	if _, err := Check(t.Context(), options(fs), "scratch"); !errors.Is(err, ErrRefused) {
		t.Errorf("dry run: %v", err)
	}
}

// The log of both lies outside of the data directory.
func TestWALDirApart(t *testing.T) {
	fs := vfs.NewMem()
	files := etcd(t, 30, 20)
	apart(t, fs, files)
	o := options(fs)
	o.WALDir = walDir
	r, err := Import(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(checkImported(t, o, 21, committed), checkLeft(t, o, files.only("member/snap")), checkWALLeft(t, o, files)); err != nil {
		t.Error(err)
	}
	if !strings.HasPrefix(r.WALMovedTo, walDir+"/"+movedWAL) {
		t.Errorf("moved to %q", r.WALMovedTo)
	}
}

// apart writes the data of a member with its log in walDir.
func apart(t testing.TB, fs storage.FS, files etcdData) {
	t.Helper()
	for name, b := range files.below("member/wal") {
		etcdData{name: b}.write(t, fs, walDir)
	}
	for name, b := range files.below("member/snap") {
		etcdData{"member/snap/" + name: b}.write(t, fs, dir)
	}
}

// checkWALLeft checks that etcd's log lies below walDir as it was, and nothing
// else but Engram's.
func checkWALLeft(t testing.TB, o Options, files etcdData) error {
	t.Helper()
	names, err := o.FS.List(o.WALDir)
	if err != nil {
		return err
	}
	moved := 0
	for _, name := range names {
		if strings.HasPrefix(name, movedWAL) {
			moved++
			err = errors.Join(err, sameFiles(files.below("member/wal"), tree(t, o.FS, o.FS.PathJoin(o.WALDir, name))))
		} else if !strings.HasSuffix(name, ".log") {
			err = errors.Join(err, fmt.Errorf("%s is left in %s", name, o.WALDir))
		}
	}
	if moved != 1 {
		err = errors.Join(err, fmt.Errorf("etcd's log is in %d places: %v", moved, names))
	}
	return err
}

// only is the part below a directory, with full names.
func (f etcdData) only(dir string) etcdData {
	out := etcdData{}
	for name, b := range f.below(dir) {
		out[dir+"/"+name] = b
	}
	return out
}

// The log's directory may be a link to another disk, also one that begins where
// the link is.
func TestLinkedLog(t *testing.T) {
	for _, target := range []string{"../../wal", ""} {
		base := t.TempDir()
		root, real := filepath.Join(base, "data"), filepath.Join(base, "wal")
		if target == "" {
			target = real
		}
		files := etcd(t, 30, 0)
		files.only("member/snap").write(t, vfs.Default, root)
		files.below("member/wal").write(t, vfs.Default, real)
		if err := os.Symlink(target, filepath.Join(root, "member", "wal")); err != nil {
			t.Fatal(err)
		}
		o := options(vfs.Default)
		o.Dir = root
		if _, err := Import(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(checkImported(t, o, 1, committed), checkLeft(t, o, files)); err != nil {
			t.Errorf("link to %s: %v", target, err)
		}
		if err := sameFiles(files.below("member/wal"), tree(t, vfs.Default, real)); err != nil {
			t.Errorf("link to %s: %v", target, err)
		}
	}
}

// --wal-dir may name the directory that member/wal is a link to, and must not lie
// in what gets another name.
func TestWALDirOfLink(t *testing.T) {
	base := t.TempDir()
	root, wal := filepath.Join(base, "data"), filepath.Join(base, "wal")
	files := etcd(t, 30, 20)
	files.only("member/snap").write(t, vfs.Default, root)
	files.below("member/wal").write(t, vfs.Default, wal)
	if err := os.Symlink(wal, filepath.Join(root, "member", "wal")); err != nil {
		t.Fatal(err)
	}
	o := options(vfs.Default)
	o.Dir, o.WALDir = root, filepath.Join(root, "member", "wal")
	if _, err := Import(t.Context(), o); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "--wal-dir") {
		t.Errorf("a log in etcd's directory: %v", err)
	}
	if _, err := Check(t.Context(), o, t.TempDir()); !errors.Is(err, ErrRefused) {
		t.Errorf("a log in etcd's directory: %v", err)
	}
	o.WALDir = wal
	if _, err := Import(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(checkImported(t, o, 21, committed), checkWALLeft(t, o, files)); err != nil {
		t.Error(err)
	}
}

// On the operating system's files the exchange of two names is one step.
func TestOnDisk(t *testing.T) {
	root := filepath.Join(t.TempDir(), "data")
	files := etcd(t, 30, 0)
	files.write(t, vfs.Default, root)
	o := options(vfs.Default)
	o.Dir = root
	if _, err := Import(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if err := checkImported(t, o, 1, committed); err != nil {
		t.Error(err)
	}
	if err := checkLeft(t, o, files); err != nil {
		t.Error(err)
	}
	// An etcd makes its directories first.
	if err := os.MkdirAll(filepath.Join(root, "member", "snap"), 0o700); err == nil {
		t.Error("etcd could make its directory")
	}
	// The way back.
	moved, err := filepath.Glob(filepath.Join(root, movedDir+"*"))
	if err != nil || len(moved) != 1 {
		t.Fatalf("%v %v", moved, err)
	}
	for _, name := range []string{"member", "store", "index", "log", "IDENTITY"} {
		if err := os.RemoveAll(filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Import(t.Context(), o); !errors.Is(err, ErrMoved) {
		t.Errorf("an empty member beside what was moved: %v", err)
	}
	if err := os.Rename(moved[0], filepath.Join(root, "member")); err != nil {
		t.Fatal(err)
	}
	if err := sameFiles(files, tree(t, vfs.Default, root)); err != nil {
		t.Error(err)
	}
	if _, err := Import(t.Context(), o); err != nil {
		t.Errorf("once more: %v", err)
	}
}

// Power is lost at each step that changes a file. What is left is imported to
// the same end, and as long as etcd could start there, its files are as before.
func TestCrashAtEveryStep(t *testing.T) {
	files := etcd(t, 30, 20)
	for _, where := range []string{"", walDir} {
		t.Run("wal="+where, func(t *testing.T) {
			mem := vfs.NewCrashableMem()
			if where == "" {
				files.write(t, mem, dir)
			} else {
				apart(t, mem, files)
			}
			var clones []*vfs.MemFS
			var ops []string
			fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
				if op.Kind.ReadOrWrite() == errorfs.OpIsWrite && op.Kind != errorfs.OpFileClose {
					clones = append(clones, mem.CrashClone(vfs.CrashCloneCfg{}))
					ops = append(ops, fmt.Sprintf("%v of %s", op.Kind, op.Path))
				}
				return nil
			}))
			o := options(fs)
			o.WALDir = where
			if _, err := Import(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			clones, ops = append(clones, mem.CrashClone(vfs.CrashCloneCfg{})), append(ops, "the end")
			before, decided := 0, 0
			for i, clone := range clones {
				o := options(clone)
				o.WALDir = where
				if err := knownNames(o); err != nil {
					t.Errorf("step %d, %s: %v", i, ops[i], err)
				}
				if kind, err := kindOf(clone, dir+"/member"); err != nil {
					t.Fatal(err)
				} else if kind == aDirectory {
					before++
					left := tree(t, clone, dir)
					if where != "" {
						for name, b := range tree(t, clone, walDir) {
							left["member/wal/"+name] = b
						}
					}
					if err := sameFiles(files, left.withoutImport()); err != nil {
						t.Errorf("step %d, %s: etcd's files: %v", i, ops[i], err)
					}
				} else {
					decided++
				}
				if _, err := Import(t.Context(), o); err != nil {
					t.Errorf("step %d, before %s: %v", i, ops[i], err)
					continue
				}
				if err := checkImported(t, o, 21, committed); err != nil {
					t.Errorf("step %d, before %s: %v", i, ops[i], err)
				}
				was := files
				if where != "" {
					was = files.only("member/snap")
				}
				if err := checkLeft(t, o, was); err != nil {
					t.Errorf("step %d, before %s: %v", i, ops[i], err)
				}
				if where != "" {
					if err := checkWALLeft(t, o, files); err != nil {
						t.Errorf("step %d, before %s: %v", i, ops[i], err)
					}
				}
			}
			t.Logf("%d steps: %d before it is decided, %d after", len(clones), before, decided)
			if before < 20 || decided < 4 {
				t.Error("those are too few")
			}
		})
	}
}

// withoutImport leaves out what an import makes.
func (f etcdData) withoutImport() etcdData {
	out := etcdData{}
	for name, b := range f {
		if strings.HasPrefix(name, "member/") && !strings.HasPrefix(name, "member/wal/"+tempDir) {
			out[name] = b
		}
	}
	return out
}

// Each step that changes a file fails once. The import says so, and the next one
// succeeds.
func TestFailureAtEveryStep(t *testing.T) {
	files := etcd(t, 30, 20)
	failure := errors.New("the disk says no")
	failed := 0
	for n := 0; ; n++ {
		mem := vfs.NewMem()
		files.write(t, mem, dir)
		left, what := n, ""
		fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
			// Deleting files and closing them is harmless. If Pebble cannot write its
			// MANIFEST the process ends, which TestCrashAtEveryStep is about.
			switch op.Kind {
			case errorfs.OpMkdirAll, errorfs.OpRename, errorfs.OpFileSync, errorfs.OpCreate, errorfs.OpFileWrite, errorfs.OpFilePreallocate:
			default:
				return nil
			}
			if strings.Contains(op.Path, "MANIFEST") || strings.Contains(op.Path, "marker.") || strings.HasSuffix(op.Path, "/store") {
				return nil
			}
			if left--; left != -1 {
				return nil
			}
			what = fmt.Sprintf("%v of %s", op.Kind, op.Path)
			return failure
		}))
		_, err := Import(t.Context(), options(fs))
		if what == "" {
			break
		}
		if err != nil {
			failed++
			if !errors.Is(err, failure) {
				t.Errorf("%s fails: %v", what, err)
			}
		}
		if _, err := Import(t.Context(), options(mem)); err != nil {
			t.Errorf("after %s failed: %v", what, err)
			continue
		}
		if err := errors.Join(checkImported(t, options(mem), 21, committed), checkLeft(t, options(mem), files)); err != nil {
			t.Errorf("after %s failed: %v", what, err)
		}
	}
	t.Logf("%d failures", failed)
	if failed < 20 {
		t.Error("those are too few")
	}
}

func TestRefused(t *testing.T) {
	entry := func(index, term uint64, q *pb.InternalRaftRequest) *raftpb.Entry {
		q.Header = &pb.RequestHeader{ID: index}
		b, err := proto.Marshal(q)
		if err != nil {
			t.Fatal(err)
		}
		return waltest.Normal(index, term, b)
	}
	more := func(entries ...*raftpb.Entry) etcdData {
		all := append(history()[:committed], entries...)
		l := waltest.New(self, cluster)
		l.Entries(all...)
		l.State(9, 0, uint64(len(all)))
		return etcdData{"member/snap/db": database(t, all[:committed]), "member/wal/" + l.Segments[0].Name: l.Segments[0].Bytes}
	}
	remove := raftpb.ConfChangeRemoveNode
	for _, c := range []struct {
		name  string
		files etcdData
		set   func(fs *vfs.MemFS, o *Options)
		want  error
		text  string
	}{
		{"data of Engram beside it", etcd(t, 30, 0), func(fs *vfs.MemFS, _ *Options) { etcdData{"store/x": nil}.write(t, fs, dir) }, ErrBoth, "store"},
		{"an index of Engram beside it", etcd(t, 30, 0), func(fs *vfs.MemFS, _ *Options) { etcdData{"index/x": nil}.write(t, fs, dir) }, ErrBoth, "index"},
		{"a log of Engram", etcd(t, 30, 0), func(fs *vfs.MemFS, o *Options) {
			o.WALDir = walDir
			etcdData{"00000001-1.log": nil}.write(t, fs, walDir)
		}, ErrBoth, "00000001-1.log"},
		{"a removed member", more(waltest.Change(committed+1, 9, &raftpb.ConfChange{Type: &remove, NodeId: proto.Uint64(self)})), nil, ErrRefused, "was removed"},
		{"an entry of a future etcd", more(waltest.Normal(committed+1, 9, []byte{0xaa, 0x9c, 0x01, 0x00})), nil, ErrRefused, "entry 61"},
		{"data of the version 2 store", more(legacy(committed+1, 9, "/1/key", "value")), nil, ErrRefused, "/1/key"},
		{"a cluster of etcd 3.4", etcdData{"member/snap/x": nil, "member/wal/" + waltest.New(1, 1).Segments[0].Name: func() []byte {
			l := waltest.New(self, cluster)
			l.Entries(history()[0], history()[1], legacy(3, 1, "/0/version", "3.4.0"))
			l.State(1, 0, 3)
			return l.Segments[0].Bytes
		}()}, nil, etcddir.ErrVersion, "3.4.0"},
		{"nothing ever came", etcdData{"member/snap/x": nil, "member/wal/" + waltest.New(1, 1).Segments[0].Name: waltest.New(self, cluster).Segments[0].Bytes}, nil, ErrRefused, "delete the data directory"},
		{"a cluster of the future", more(entry(committed+1, 9, &pb.InternalRaftRequest{DowngradeVersionTest: &pb.DowngradeVersionTestRequest{Ver: "3.9"}}), entry(committed+2, 9, versionSet("3.8.0"))), nil, ErrRefused, "3.8"},
		{"no space", etcd(t, 30, 0), func(fs *vfs.MemFS, _ *Options) {
			fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 20, TotalBytes: 1 << 30})
		}, ErrNoSpace, "free space there"},
		{"space for one of store and log, which lie on one disk", etcd(t, 30, 0), func(fs *vfs.MemFS, o *Options) {
			o.WALDir = walDir
			etcdData{"x": nil}.write(t, fs, walDir)
			fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: slackBytes * 3 / 2, TotalBytes: 1 << 30})
			o.ReserveBytes = 0
		}, ErrNoSpace, "free space there"},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs := vfs.NewMem()
			c.files.write(t, fs, dir)
			o := options(fs)
			if c.set != nil {
				c.set(fs, &o)
			}
			before := tree(t, fs, dir)
			for _, run := range []func() (*Report, error){
				func() (*Report, error) { return Check(t.Context(), o, "scratch") },
				func() (*Report, error) { return Import(t.Context(), o) },
			} {
				_, err := run()
				if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
					t.Errorf("%v", err)
				}
				if err := sameFiles(before, tree(t, fs, dir)); err != nil {
					t.Errorf("something is left: %v", err)
				}
			}
		})
	}
}

// An etcd that was started after an import was interrupted is not forgotten: as
// long as its directory has its own name the import begins anew.
func TestEtcdRanSinceTheCrash(t *testing.T) {
	files := etcd(t, 30, 0)
	mem := vfs.NewCrashableMem()
	files.write(t, mem, dir)
	var clone *vfs.MemFS
	fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpRename && op.Path == dir+"/member" && clone == nil {
			clone = mem.CrashClone(vfs.CrashCloneCfg{})
		}
		return nil
	}))
	if _, err := Import(t.Context(), options(fs)); err != nil {
		t.Fatal(err)
	}
	if _, pending, err := readJournal(clone, dir); err != nil || !pending {
		t.Fatalf("the crash came too early: %v", err)
	}
	after := etcd(t, committed, 20) // etcd went on, and took a snapshot
	if err := clone.RemoveAll(dir + "/member"); err != nil {
		t.Fatal(err)
	}
	after.write(t, clone, dir)
	r, err := Import(t.Context(), options(clone))
	if err != nil || r == nil || r.Snapshot != 20 {
		t.Fatalf("%+v %v", r, err)
	}
	if err := checkImported(t, options(clone), 21, committed); err != nil {
		t.Error(err)
	}
}
