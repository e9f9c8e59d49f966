package backup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/engram-kv/engram/internal/backup/backuptest"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

// keys are what the backup of these tests holds; its last revision is one more.
const keys = 300

func saved(t testing.TB) []byte { return backuptest.Content(t, keys) }

// write makes a file of bytes.
func write(t testing.TB, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "backup.db")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func open(t testing.TB, b []byte) *File {
	t.Helper()
	f, err := Open(write(t, b))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// pieces gives b as a server does, and then last.
func pieces(b []byte, last error) func() (Piece, error) {
	return func() (Piece, error) {
		if len(b) == 0 {
			return Piece{}, last
		}
		n := min(len(b), 3000)
		p := Piece{Bytes: b[:n]}
		b = b[n:]
		p.Remaining = max(0, int64(len(b)-sha256.Size))
		return p, nil
	}
}

// TestSave writes a whole backup over an old one, and of all others nothing.
func TestSave(t *testing.T) {
	whole := saved(t)
	flip := bytes.Clone(whole)
	flip[9000] ^= 4
	// Right by its checksum, and no database.
	junk := bytes.Repeat([]byte("junk"), 4096)
	sum := sha256.Sum256(junk)
	junk = append(junk, sum[:]...)
	gone := errors.New("connection is gone")
	for _, c := range []struct {
		name string
		next func() (Piece, error)
		want string // in the error; "" is success
	}{
		{"whole", pieces(whole, io.EOF), ""},
		{"flipped", pieces(flip, io.EOF), "expected sha256"},
		{"cut off", pieces(whole, gone), ""},
		{"ends early", pieces(whole[:20001], io.EOF), "sha256 checksum not found [bytes: 20001]"},
		{"ends at a page", pieces(whole[:4096*5], io.EOF), "sha256 checksum not found"},
		{"ends as if with a checksum", pieces(whole[:4096*5+32], io.EOF), "expected sha256"},
		{"nothing", pieces(nil, io.EOF), "sha256 checksum not found [bytes: 0]"},
		{"no database", pieces(junk, io.EOF), "no database file of etcd"},
		{"fails at once", pieces(nil, gone), "connection is gone"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "b.db")
			if err := os.WriteFile(path, []byte("old"), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path+".part", []byte("left over"), 0o600); err != nil {
				t.Fatal(err)
			}
			want := c.want
			if c.name == "cut off" {
				want = "connection is gone"
			}
			var done, of int64
			info, err := Save(context.Background(), path, c.next, func(d, o int64) { done, of = d, o })
			got, readErr := os.ReadFile(path)
			if readErr != nil {
				t.Fatal(readErr)
			}
			if want == "" {
				if err != nil || !bytes.Equal(got, whole) || info.Keys != keys || info.Revision != keys+1 {
					t.Errorf("%v, %d bytes, %+v", err, len(got), info)
				}
				if done != int64(len(whole)) || of != done {
					t.Errorf("progress ends at %d of %d, %d bytes are there", done, of, len(whole))
				}
				if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
					t.Errorf("mode %v, %v", st.Mode(), err)
				}
			} else if err == nil || !strings.Contains(err.Error(), want) || string(got) != "old" {
				t.Errorf("%v, want %q; the old file holds %.10q", err, want, got)
			}
			if names, err := os.ReadDir(dir); err != nil || len(names) != 1 {
				t.Errorf("left behind: %v, %v", names, err)
			}
		})
	}
}

// TestSaveEnds leaves nothing when it is interrupted, and refuses what it cannot write to.
func TestSaveEnds(t *testing.T) {
	whole := saved(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "b.db")
	ctx, cancel := context.WithCancel(context.Background())
	next := pieces(whole, io.EOF)
	n := 0
	_, err := Save(ctx, path, func() (Piece, error) {
		if n++; n == 3 {
			cancel()
		}
		return next()
	}, nil)
	if names, _ := os.ReadDir(dir); !errors.Is(err, context.Canceled) || len(names) > 0 {
		t.Errorf("interrupted: %v, left behind %v", err, names)
	}
	if _, err := Save(context.Background(), dir, pieces(whole, io.EOF), nil); err == nil || !strings.Contains(err.Error(), "file exists") {
		t.Errorf("into a directory: %v", err)
	}
	if _, err := Save(context.Background(), filepath.Join(dir, "none", "b.db"), pieces(whole, io.EOF), nil); err == nil || !strings.Contains(err.Error(), "could not open") {
		t.Errorf("into no directory: %v", err)
	}
	// Two at once would mix their bytes.
	next = pieces(whole, io.EOF)
	_, err = Save(context.Background(), path, func() (Piece, error) {
		if _, err := Save(context.Background(), path, pieces(whole, io.EOF), nil); err == nil || !strings.Contains(err.Error(), "another process writes to it") {
			t.Fatalf("two at once: %v", err)
		}
		return next()
	}, nil)
	if err != nil {
		t.Error(err)
	}
}

// TestSaveKeepsOld has a directory whose names cannot be made durable: the backup that was there before stays.
func TestSaveKeepsOld(t *testing.T) {
	t.Chdir(t.TempDir())
	const path = "to/b.db"
	for _, err := range []error{os.Mkdir("to", 0o700), os.WriteFile(path, []byte("old"), 0o644), os.Chmod("to", 0o333)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _ = os.Chmod("to", 0o700) })
	asNobody(t)
	if _, err := Save(context.Background(), path, pieces(saved(t), io.EOF), nil); !errors.Is(err, os.ErrPermission) {
		t.Errorf("%v, want that it may not be opened", err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "old" {
		t.Errorf("the old backup is %.10q, %v", got, err)
	}
	if _, err := os.Stat(path + partSuffix); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
}

// asNobody takes the rights of root over files from this test.
func asNobody(t *testing.T) {
	runtime.LockOSThread()
	was, err := unix.SetfsuidRetUid(65534)
	t.Cleanup(func() {
		_ = unix.Setfsuid(was)
		runtime.UnlockOSThread()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestLockPart: a file that was given the name of a backup after it was opened is not written to.
func TestLockPart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "b.db.part")
	reopen := func() *os.File {
		t.Helper()
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	first := reopen()
	if ours, err := lockPart(first); !ours || err != nil {
		t.Errorf("its name is as it was: %v, %v", ours, err)
	}
	second := reopen()
	if _, err := lockPart(second); err == nil || !strings.Contains(err.Error(), "another process writes to it") {
		t.Errorf("two at once: %v", err)
	}
	if err := errors.Join(os.Rename(path, path+".named"), first.Close()); err != nil {
		t.Fatal(err)
	}
	if ours, err := lockPart(second); ours || err != nil {
		t.Errorf("it is a backup by now: %v, %v", ours, err)
	}
	third := reopen()
	if ours, err := lockPart(second); ours || err != nil {
		t.Errorf("another file has its name: %v, %v", ours, err)
	}
	if ours, err := lockPart(third); !ours || err != nil {
		t.Errorf("the one that has the name now: %v, %v", ours, err)
	}
}

// topology returns a restore of n members into "m0" and so on.
func topology(fs storage.FS, n int) Restore {
	r := Restore{FS: fs, State: state.Options{Version: "3.7.3"}}
	for i := range n {
		urls := []string{fmt.Sprintf("http://10.0.0.%d:2380", i+1)}
		id := member.FoundingID(urls, "token")
		r.Founders = append(r.Founders, member.Member{ID: id, PeerURLs: urls, Name: fmt.Sprintf("m%d", i)})
		r.Targets = append(r.Targets, Target{Member: id, DataDir: fmt.Sprintf("data/m%d", i)})
	}
	return r
}

// check opens what was restored as a member does.
func check(t testing.TB, fs storage.FS, r Restore, target Target, revision, compacted int64) {
	t.Helper()
	id, ok, err := datadir.ReadIdentity(fs, target.DataDir)
	if err != nil || !ok || id.Member != target.Member || id.Joined {
		t.Fatalf("identity %+v, %v, %v", id, ok, err)
	}
	logDir := target.LogDir
	if logDir == "" {
		logDir = fs.PathJoin(target.DataDir, datadir.Log)
	}
	log, err := raftlog.Open(raftlog.Options{FS: fs, Dir: logDir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	founded, err := consensus.Founded(log)
	last, lastErr := log.LastIndex()
	first, firstErr := log.FirstIndex()
	// Who is added to the cluster must not be given a log that does not lead to the store.
	if err != nil || lastErr != nil || firstErr != nil || !founded || last != uint64(len(r.Founders)) || first != last+1 || log.Identity() != (raftlog.Identity{ClusterID: id.Cluster, MemberID: id.Member}) {
		t.Fatalf("log: %v, %v, last index %d, %+v", err, founded, last, log.Identity())
	}
	s, err := storage.Open(storage.Options{FS: fs, Dir: fs.PathJoin(target.DataDir, datadir.Store)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	m, err := state.Open(state.Options{Storage: s, Version: "3.7.3", MVCC: mvcc.Options{FS: fs, Dir: fs.PathJoin(target.DataDir, datadir.Index)}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Abandon()
	applied, term := m.Applied()
	_, members, _ := m.Tables()
	root := m.Root()
	if applied != last || term != 1 || root.Revision() != revision || root.CompactRevision() != compacted || m.Leases().Len() != 1 {
		t.Fatalf("applied %d of term %d, revision %d, compacted %d, %d leases", applied, term, root.Revision(), root.CompactRevision(), m.Leases().Len())
	}
	if members.Version() != "3.7.0" || len(members.RemovedIDs()) != 0 || len(members.List()) != len(r.Founders) {
		t.Fatalf("version %q, removed %v, members %v", members.Version(), members.RemovedIDs(), members.List())
	}
	for _, want := range r.Founders {
		if got := members.Member(want.ID); got == nil || got.Name != want.Name || got.PeerURLs[0] != want.PeerURLs[0] {
			t.Fatalf("member %x is %+v, want %+v", want.ID, got, want)
		}
	}
}

// TestRestore makes directories of one and of three members, where there are none
// and in empty ones, with the log elsewhere, and with the revision raised.
func TestRestore(t *testing.T) {
	b := open(t, saved(t))
	for _, c := range []struct {
		name    string
		members int
		made    bool // the directories are there, empty
		logs    string
		bump    uint64
	}{
		{"one", 1, false, "", 0}, {"one in place", 1, true, "", 0}, {"three", 3, false, "", 0}, {"three in place, raised", 3, true, "", 1000},
		{"log elsewhere", 1, false, "logs/m%d", 7}, {"log elsewhere in place", 1, true, "logs/m%d", 0},
		{"log within", 3, false, "data/m%d/raft/wal", 0}, {"log within, in place", 1, true, "data/m%d/wal", 0}, {"log where it is without", 1, false, "data/m%d/log", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs := vfs.NewMem()
			r := topology(fs, c.members)
			r.BumpRevision = c.bump
			for i := range r.Targets {
				if c.made {
					if err := fs.MkdirAll(r.Targets[i].DataDir, 0o700); err != nil {
						t.Fatal(err)
					}
				}
				if c.logs != "" {
					r.Targets[i].LogDir = fmt.Sprintf(c.logs, i)
				}
			}
			got, err := b.Restore(context.Background(), r)
			if err != nil {
				t.Fatal(err)
			}
			revision, compacted := int64(keys+1), int64(-1)
			if c.bump > 0 {
				revision += int64(c.bump)
				compacted = revision
			}
			if got.Revision != revision || got.Saved != keys+1 || got.Keys != keys || got.Leases != 1 || got.Version != "3.7.0" {
				t.Errorf("%+v", got)
			}
			for _, target := range r.Targets {
				check(t, fs, r, target, revision, compacted)
			}
			for _, dir := range []string{"data", "logs"} {
				names, _ := fs.List(dir)
				for _, name := range names {
					if strings.HasSuffix(name, stagingSuffix) {
						t.Errorf("%s is left in %s", name, dir)
					}
				}
			}
			// A second restore into the same place is refused and changes nothing.
			if _, err := b.Restore(context.Background(), r); !errors.Is(err, ErrNotEmpty) || !strings.Contains(err.Error(), "not empty or could not be read") {
				t.Errorf("again: %v", err)
			}
			check(t, fs, r, r.Targets[0], revision, compacted)
		})
	}
}

// TestRestoreRefuses gives it what is no backup, or not what was saved.
func TestRestoreRefuses(t *testing.T) {
	whole := saved(t)
	flip := func(at int) []byte {
		b := bytes.Clone(whole)
		b[at] ^= 16
		return b
	}
	for _, c := range []struct {
		name    string
		content []byte
		skip    bool
		want    error
	}{
		{"flipped", flip(5000), false, ErrSum},
		{"checksum flipped", flip(len(whole) - 3), false, ErrSum},
		{"cut at a page", whole[:4096*4], false, ErrNoSum},
		{"cut at a page, unchecked", whole[:4096*4], true, snapfile.ErrDamaged},
		{"cut anywhere", whole[:10_001], false, ErrNoSum},
		{"cut anywhere, unchecked", whole[:10_001], true, snapfile.ErrDamaged},
		{"without checksum", whole[:len(whole)-32], false, ErrNoSum},
		{"text", []byte(strings.Repeat("no backup\n", 1000)), true, snapfile.ErrDamaged},
	} {
		t.Run(c.name, func(t *testing.T) {
			fs := vfs.NewMem()
			r := topology(fs, 1)
			r.SkipSum = c.skip
			if _, err := open(t, c.content).Restore(context.Background(), r); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if names, err := fs.List("data"); err == nil && len(names) > 0 {
				t.Errorf("left behind: %v", names)
			}
		})
	}
	if _, err := Open(write(t, nil)); !errors.Is(err, ErrEmpty) {
		t.Errorf("empty: %v", err)
	}
	if _, err := Open(t.TempDir()); err == nil || !strings.Contains(err.Error(), "is a directory") {
		t.Errorf("directory: %v", err)
	}
	fs := vfs.NewMem()
	r := topology(fs, 1)
	r.SkipSum = true
	if _, err := open(t, whole[:len(whole)-32]).Restore(context.Background(), r); err != nil {
		t.Errorf("without checksum, unchecked: %v", err)
	}
	check(t, fs, r, r.Targets[0], keys+1, -1)
}

// TestRestoreRefusesPlaces: a log and a data directory in each other's place are refused before anything is made.
func TestRestoreRefusesPlaces(t *testing.T) {
	b := open(t, saved(t))
	for _, place := range []struct{ dir, log string }{{"d", "d"}, {"d", "d/store"}, {"d", "./d/index/log"}, {"d", "d/LOCK"}, {"x/d", "x"}} {
		fs := vfs.NewMem()
		r := topology(fs, 1)
		r.Targets[0].DataDir, r.Targets[0].LogDir = place.dir, place.log
		if _, err := b.Restore(context.Background(), r); err == nil || !strings.Contains(err.Error(), "in each other's place") {
			t.Errorf("%v: %v", place, err)
		}
		if names, err := fs.List(""); err != nil || len(names) > 0 {
			t.Errorf("%v: left behind %v, %v", place, names, err)
		}
	}
}

// TestRestoreBumpTooSmall: a backup whose last records were compacted away is not restored with a revision that clients have seen.
func TestRestoreBumpTooSmall(t *testing.T) {
	b := open(t, backuptest.Compacted(t, keys, 1000))
	for bump, want := range map[uint64]int64{600: 0, 1000 - (keys + 1): 0, 1000 - keys: 1001, 2000: keys + 1 + 2000} {
		r := topology(vfs.NewMem(), 1)
		r.BumpRevision = bump
		got, err := b.Restore(context.Background(), r)
		if want == 0 && (err == nil || !strings.Contains(err.Error(), "is too little")) || want > 0 && (err != nil || got.Revision != want || got.Saved != 1000) {
			t.Errorf("raised by %d: %+v, %v", bump, got, err)
		}
	}
}

// TestRestoreEnds leaves nothing when it is interrupted.
func TestRestoreEnds(t *testing.T) {
	b := open(t, saved(t))
	for _, inside := range []bool{false, true} {
		fs := vfs.NewMem()
		r := topology(fs, 3)
		if inside {
			if err := fs.MkdirAll(r.Targets[1].DataDir, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(context.Background())
		r.Progress = func(target Target, _, _ int64) {
			if target == r.Targets[2] {
				cancel()
			}
		}
		_, err := b.Restore(ctx, r)
		names, _ := fs.List("data")
		if !errors.Is(err, context.Canceled) || inside && len(names) != 1 || !inside && len(names) != 0 {
			t.Errorf("%v, left behind %v", err, names)
		}
		if inside {
			if names, err := fs.List(r.Targets[1].DataDir); err != nil || len(names) > 0 {
				t.Errorf("left in the directory: %v, %v", names, err)
			}
		}
	}
}
