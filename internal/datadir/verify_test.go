package datadir_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/backup"
	"github.com/engram-kv/engram/internal/backup/backuptest"
	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

const version = "3.7.3"

// restored makes a data directory with some hundred records and a log with a few
// entries beyond what the store holds.
func restored(t *testing.T) *vfs.MemFS {
	t.Helper()
	mem := vfs.NewMem()
	path := filepath.Join(t.TempDir(), "b.db")
	if err := os.WriteFile(path, backuptest.Content(t, 500), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := backup.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	urls := []string{"http://10.0.0.1:2380"}
	id := member.FoundingID(urls, "t")
	_, err = f.Restore(context.Background(), backup.Restore{
		FS: mem, Founders: []member.Member{{ID: id, PeerURLs: urls, Name: "m"}},
		Targets: []backup.Target{{Member: id, DataDir: "d"}}, State: state.Options{Version: version},
	})
	if err != nil {
		t.Fatal(err)
	}
	log, err := raftlog.Open(raftlog.Options{FS: mem, Dir: "d/log"})
	if err != nil {
		t.Fatal(err)
	}
	var entries []*raftpb.Entry
	for i := range uint64(20) {
		entries = append(entries, &raftpb.Entry{Term: proto.Uint64(2), Index: proto.Uint64(i + 2), Data: bytes.Repeat([]byte{byte(i)}, 500)})
	}
	if _, err := log.Write([]raftlog.Append{{Entries: entries, HardState: &raftpb.HardState{Term: proto.Uint64(2), Commit: proto.Uint64(21)}}}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(log.Sync(), log.Close()); err != nil {
		t.Fatal(err)
	}
	return mem
}

func verify(t *testing.T, fs vfs.FS) datadir.Report {
	t.Helper()
	r, err := datadir.Verify{FS: fs, Dir: "d", State: state.Options{Version: version}}.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestVerify(t *testing.T) {
	r := verify(t, restored(t))
	if len(r.Problems) > 0 || len(r.Notes) > 0 || r.Log.First != 2 || r.Log.Last != 21 || r.Store.Records != 500 || r.Store.Keys != 500 ||
		r.Store.Revision != 501 || r.Store.Applied != 1 || !r.Index.There || r.Index.Revision != 501 {
		t.Errorf("%+v", r)
	}
}

// files lists all files below a directory.
func files(t *testing.T, fs vfs.FS, dir string) (out []string) {
	t.Helper()
	names, err := fs.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		path := fs.PathJoin(dir, name)
		if info, err := fs.Stat(path); err != nil {
			t.Fatal(err)
		} else if info.IsDir() {
			out = append(out, files(t, fs, path)...)
		} else {
			out = append(out, path)
		}
	}
	return out
}

// TestVerifyBitFlips flips a bit anywhere in each kind of file: it is found and
// the file or its directory named, or what the directory gives is the same.
func TestVerifyBitFlips(t *testing.T) {
	mem := restored(t)
	want := hash(t, mem)
	rng := rand.New(rand.NewPCG(5, 6))
	found, harmless := map[string]int{}, map[string]int{}
	runs := 40
	if testing.Short() {
		runs = 5
	}
	for _, path := range files(t, mem, "d") {
		content := read(t, mem, path)
		if len(content) == 0 {
			continue
		}
		// Of a segment only the part that is written: what follows is nobody's.
		limit := len(bytes.TrimRight(content, "\x00"))
		kind := kindOf(mem, path)
		for range runs {
			clone := vfs.NewMem()
			if ok, err := vfs.Clone(mem, clone, "d", "d"); !ok || err != nil {
				t.Fatal(ok, err)
			}
			at, bit := rng.IntN(limit), byte(1)<<rng.IntN(8)
			flipped := bytes.Clone(content)
			flipped[at] ^= bit
			write(t, clone, path, flipped)
			r := verify(t, clone)
			if len(r.Problems) > 0 {
				p := r.Problems[0]
				if p.What == "" || p.Cure == "" || !strings.HasPrefix(path, p.Where) && !strings.Contains(p.What, mem.PathBase(path)) && !strings.HasPrefix(p.Where, "d/"+kind) && kind != datadir.IdentityFile {
					t.Errorf("%s, byte %d: the problem names neither it nor its directory: %+v", path, at, p)
				}
				found[kind]++
				continue
			}
			if got := hash(t, clone); got != want {
				t.Errorf("%s, byte %d: nothing is found and the content is another", path, at)
			}
			harmless[kind]++
		}
	}
	t.Logf("found: %v; without effect: %v", found, harmless)
	for _, kind := range []string{"sst", "log", "MANIFEST", datadir.IdentityFile} {
		if found[kind] == 0 {
			t.Errorf("no flip in %s was found", kind)
		}
	}
}

func kindOf(fs vfs.FS, path string) string {
	base := fs.PathBase(path)
	switch {
	case strings.HasSuffix(base, ".sst"):
		return "sst"
	case strings.HasSuffix(base, ".log"):
		return "log"
	}
	kind, _, _ := strings.Cut(base, "-")
	return kind
}

func read(t *testing.T, fs vfs.FS, path string) []byte {
	t.Helper()
	f, err := fs.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func write(t *testing.T, fs vfs.FS, path string, b []byte) {
	t.Helper()
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// hash is HashKV of the store as a member opens it.
func hash(t *testing.T, fs vfs.FS) uint32 {
	t.Helper()
	s, err := storage.Open(storage.Options{FS: fs, Dir: "d/store", ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Abandon() }()
	m, err := mvcc.Open(mvcc.Options{Storage: s, FS: fs, Dir: "d/index"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Abandon()
	h, err := m.HashKV(context.Background(), m.Root(), 0)
	if err != nil {
		t.Fatal(err)
	}
	return h.Hash
}

// TestVerifyInstalled damages the log of a member whose store came as a snapshot: that is all that is wrong, and nothing that lies there is
// called of no use, since only the log says which store is the present one.
func TestVerifyInstalled(t *testing.T) {
	fs := restored(t)
	const name = "snapshot-0000000000000016-0000000000000002"
	if err := fs.MkdirAll("d/"+name, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{datadir.Store, datadir.Index} {
		if err := fs.Rename("d/"+part, "d/"+name+"/"+part); err != nil {
			t.Fatal(err)
		}
	}
	log, err := raftlog.Open(raftlog.Options{FS: fs, Dir: "d/log"})
	if err != nil {
		t.Fatal(err)
	}
	_, err = log.Write([]raftlog.Append{{Snapshot: &raftlog.Snapshot{Index: 22, Term: 2, Dir: name, ConfState: &raftpb.ConfState{Voters: []uint64{log.Identity().MemberID}, AutoLeave: new(bool)}}}})
	if err := errors.Join(err, log.Sync(), log.Close()); err != nil {
		t.Fatal(err)
	}
	if r := verify(t, fs); r.Store.Dir != "d/"+name+"/store" || r.Store.Keys != 500 {
		t.Fatalf("the log does not lead to the store: %+v", r)
	}
	for _, path := range files(t, fs, "d/log") {
		b := read(t, fs, path)
		b[len(bytes.TrimRight(b, "\x00"))/3] ^= 1
		write(t, fs, path, b)
	}
	r := verify(t, fs)
	if len(r.Problems) != 1 || !strings.HasPrefix(r.Problems[0].Where, "d/log") || len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "none may be deleted") {
		t.Errorf("problems %+v, notes %q", r.Problems, r.Notes)
	}
}

// TestVerifyMixes puts together what does not belong together.
func TestVerifyMixes(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(fs *vfs.MemFS) error
		want  string // in what is wrong
	}{
		{"no log", func(fs *vfs.MemFS) error { return fs.RemoveAll("d/log") }, "there is no raft log"},
		{"no store", func(fs *vfs.MemFS) error { return fs.RemoveAll("d/store") }, "there is no store"},
		{"no tables' list", func(fs *vfs.MemFS) error {
			names, err := fs.List("d/store")
			for _, name := range names {
				if strings.HasPrefix(name, "marker.manifest.") {
					err = errors.Join(err, fs.Remove("d/store/"+name))
				}
			}
			return err
		}, "marker.manifest"},
		{"another's identity", func(fs *vfs.MemFS) error {
			return datadir.WriteIdentity(fs, "d", datadir.Identity{Cluster: 1, Member: 2})
		}, "belongs to member"},
		{"another's log", func(fs *vfs.MemFS) error {
			if err := fs.RemoveAll("d/log"); err != nil {
				return err
			}
			log, err := raftlog.Open(raftlog.Options{FS: fs, Dir: "d/log", Identity: raftlog.Identity{ClusterID: 1, MemberID: 2}})
			if err != nil {
				return err
			}
			return log.Close()
		}, "the log ends at index 0"},
		{"a store that went on", func(fs *vfs.MemFS) error {
			s, err := storage.Open(storage.Options{FS: fs, Dir: "d/store"})
			if err != nil {
				return err
			}
			b := s.NewBatch()
			b.Set(storage.RowKey(storage.TableMeta, []byte(storage.MetaApplied)), storage.AppendApplied(nil, 22, 2))
			return errors.Join(s.Commit(b), s.Close())
		}, "the log ends at index 21, the store has applied 22"},
		{"another history", func(fs *vfs.MemFS) error {
			s, err := storage.Open(storage.Options{FS: fs, Dir: "d/store"})
			if err != nil {
				return err
			}
			b := s.NewBatch()
			b.Set(storage.RowKey(storage.TableMeta, []byte(storage.MetaApplied)), storage.AppendApplied(nil, 5, 7))
			return errors.Join(s.Commit(b), s.Close())
		}, "not of one history"},
		{"an index that lies", func(fs *vfs.MemFS) error {
			// It was made at a revision whose records are others now.
			s, err := storage.Open(storage.Options{FS: fs, Dir: "d/store"})
			if err != nil {
				return err
			}
			kv, err := proto.Marshal(&mvccpb.KeyValue{Key: []byte("other"), Value: []byte("v"), CreateRevision: 10, ModRevision: 10, Version: 1})
			if err != nil {
				return err
			}
			b := s.NewBatch()
			b.SetRevision(10, 0, storage.RevisionRecord{KV: kv})
			return errors.Join(s.Commit(b), s.Close())
		}, "does not fit the records"},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs := restored(t)
			if err := c.spoil(fs); err != nil {
				t.Fatal(err)
			}
			r := verify(t, fs)
			var texts []string
			for _, p := range r.Problems {
				texts = append(texts, p.Where+": "+p.What)
			}
			if !strings.Contains(strings.Join(texts, "\n"), c.want) {
				t.Errorf("problems %q, want %q", texts, c.want)
			}
		})
	}
	if _, err := (datadir.Verify{FS: vfs.NewMem(), Dir: "none"}).Run(context.Background()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}
