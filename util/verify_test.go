package util

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/storage"
)

// restoredDir is a sound data directory.
func restoredDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "d")
	if code, _, told := run(t, "engram util", "snapshot", "restore", backupFile(t), "--data-dir", dir); code != 0 {
		t.Fatal(told)
	}
	return dir
}

// TestVerifyLock: what keeps a directory from being locked is told as it is. Only for another process that has it is there a wait.
func TestVerifyLock(t *testing.T) {
	dir := restoredDir(t)
	if code, _, told := run(t, "engram util", "verify", "--wal-dir=/none", dir); code != exitFailed || !strings.Contains(told, "open /none/LOG-LOCK: no such file or directory") || strings.Contains(told, "in use") {
		t.Errorf("no directory of the log: %d, %s", code, told)
	}
	lock, err := storage.DefaultFS.Lock(filepath.Join(dir, datadir.Lock))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Close() }()
	for _, command := range [][]string{{"verify", dir}, {"defrag", "--data-dir", dir}} {
		if code, _, told := run(t, "engram util", append(command, "--timeout=1ms")...); code != exitFailed || !strings.Contains(told, "is in use by another process (lock held by current process): stop the member first") {
			t.Errorf("%s while somebody has it: %d, %s", command[0], code, told)
		}
	}
}

// TestIsHeld tells a lock that somebody has from one that cannot be had.
func TestIsHeld(t *testing.T) {
	for err, want := range map[error]bool{
		unix.EAGAIN: true, errors.New("lock held by current process"): true, unix.ENOLCK: false, &fs.PathError{Op: "open", Path: "x", Err: unix.EACCES}: false,
	} {
		if isHeld(err) != want {
			t.Errorf("%v: %v", err, !want)
		}
	}
}

// readOnly is a file system that is mounted without the right to write.
type readOnly struct{ storage.FS }

func (readOnly) Lock(path string) (io.Closer, error) {
	return nil, &fs.PathError{Op: "open", Path: path, Err: unix.EROFS}
}

// TestVerifyUnwritable goes on without locks where none can be made, and says so once.
func TestVerifyUnwritable(t *testing.T) {
	dir := restoredDir(t)
	var told []string
	u := &unwritable{FS: readOnly{storage.DefaultFS}, told: func(dir string) { told = append(told, dir) }}
	release, err := (&tool{}).lockDataDir(t.Context(), u, dir, "")
	if err != nil {
		t.Fatal(err)
	}
	r, err := datadir.Verify{FS: u, Dir: dir}.Run(t.Context())
	if err != nil || len(r.Problems) > 0 || r.Store.Keys == 0 {
		t.Errorf("%v, %+v", err, r)
	}
	if err := release(); err != nil || len(told) != 1 || told[0] != dir {
		t.Errorf("%v, told %q", err, told)
	}
}

// endsAt is a context that ends when it is asked for the nth time.
type endsAt struct {
	context.Context
	left atomic.Int64
}

func (c *endsAt) Err() error {
	if c.left.Add(-1) < 0 {
		return context.Canceled
	}
	return nil
}

// TestRestoreInterrupted: whenever an interrupt comes, what is said of the directory is so.
func TestRestoreInterrupted(t *testing.T) {
	path := backupFile(t)
	restore := func(asked int64) (dir string, code int, told string, left int64) {
		dir = filepath.Join(t.TempDir(), "d")
		ctx := &endsAt{Context: context.Background()}
		ctx.left.Store(asked)
		var out strings.Builder
		code = Run(ctx, "engram util", []string{"snapshot", "restore", path, "--data-dir", dir}, Streams{Out: io.Discard, Err: &out})
		return dir, code, out.String(), ctx.left.Load()
	}
	const many = 1 << 40
	_, code, told, left := restore(many)
	if code != 0 {
		t.Fatal(told)
	}
	interrupted := 0
	for asked := many - left; asked > max(0, many-left-5); asked-- {
		dir, code, told, _ := restore(asked - 1)
		_, err := os.Stat(dir)
		if (code == 0) != (err == nil) || (code == 0) == strings.Contains(told, "nothing was restored") {
			t.Errorf("asked %d times: exit code %d, %v, %s", asked, code, err, told)
		}
		if code != 0 {
			interrupted++
		}
	}
	if interrupted == 0 {
		t.Error("it was never interrupted")
	}
}
