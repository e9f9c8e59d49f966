package crash

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// refusedStart starts a process that must not come up, and returns its log.
func refusedStart(t *testing.T, dir string, flags ...string) string {
	t.Helper()
	p, ready := spawn(t, dir, flags...)
	select {
	case <-ready:
		t.Fatal("it started")
	case <-p.exited:
		if p.err == nil {
			t.Error("it ended with success")
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it neither starts nor ends")
	}
	return p.output.String()
}

func wantParts(t *testing.T, log string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(log, part) {
			t.Errorf("the refusal does not name %q:\n%s", part, log)
		}
	}
}

func TestTwoProcessesOneDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	p, err := startProcess(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	wantParts(t, refusedStart(t, dir), "--data-dir="+dir, "in use", "by another process")
	if _, err := dial(t, p.addr).Put(t.Context(), "still", "serving"); err != nil {
		t.Error(err)
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}

func TestTwoProcessesOneLog(t *testing.T) {
	tmp := t.TempDir()
	wal := filepath.Join(tmp, "wal")
	p, err := startProcess(t, filepath.Join(tmp, "one"), "--wal-dir="+wal)
	if err != nil {
		t.Fatal(err)
	}
	wantParts(t, refusedStart(t, filepath.Join(tmp, "two"), "--wal-dir="+wal), "--wal-dir="+wal, "in use", "by another process")
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}

// A directory of etcd that cannot be imported is left as it is; nothing but the
// lock that keeps others out stands beside it.
func TestDirectoryOfEtcd(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	if err := os.MkdirAll(filepath.Join(dir, "member", "wal"), 0o700); err != nil {
		t.Fatal(err)
	}
	wantParts(t, refusedStart(t, dir), filepath.Join(dir, "member", "wal"), "etcd")
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if n.Name() != "member" && n.Name() != "LOCK" {
			t.Errorf("%s was made beside etcd's data", n.Name())
		}
	}
	if inside, err := os.ReadDir(filepath.Join(dir, "member", "wal")); err != nil || len(inside) != 0 {
		t.Errorf("etcd's directory was changed: %v %v", inside, err)
	}
}

// grow puts some keys with a process of its own that ends gracefully.
func grow(t *testing.T, dir, value string) {
	t.Helper()
	p, err := startProcess(t, dir, "--snapshot-catchup-entries=1", "--heartbeat-interval=5", "--election-timeout=50")
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, p.addr)
	for range 50 {
		if _, err := c.Put(t.Context(), "k", value); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.stop(); err != nil {
		t.Fatal(err)
	}
}

func copyDir(t *testing.T, from, to string) {
	t.Helper()
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}

// TestPartsPutBack puts an older copy of one half of a data directory back.
func TestPartsPutBack(t *testing.T) {
	tmp := t.TempDir()
	dir, old := filepath.Join(tmp, "data"), filepath.Join(tmp, "old")
	grow(t, dir, "1")
	copyDir(t, dir, old)
	grow(t, dir, "2")
	store, log := filepath.Join(dir, "store"), filepath.Join(dir, "log")
	newLog := filepath.Join(tmp, "new log")
	copyDir(t, log, newLog)

	t.Run("older log", func(t *testing.T) {
		copyDir(t, filepath.Join(old, "log"), log)
		wantParts(t, refusedStart(t, dir), store, log, "has applied index", "the log ends at")
	})
	t.Run("no log", func(t *testing.T) {
		if err := os.RemoveAll(log); err != nil {
			t.Fatal(err)
		}
		wantParts(t, refusedStart(t, dir), dir, log, "holds no raft log")
	})
	t.Run("older store", func(t *testing.T) {
		copyDir(t, newLog, log)
		newStore := filepath.Join(tmp, "new store")
		copyDir(t, store, newStore)
		copyDir(t, filepath.Join(old, "store"), store)
		copyDir(t, filepath.Join(old, "index"), filepath.Join(dir, "index"))
		// Either the log still has all that the store lacks, and is replayed, or
		// it begins too late.
		p, err := startProcess(t, dir)
		if err != nil {
			wantParts(t, err.Error(), store, log, "the log begins at")
			return
		}
		r, err := dial(t, p.addr).Get(t.Context(), "k")
		if err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != "2" || r.Kvs[0].Version != 100 {
			t.Errorf("an older store with the whole log: %v %v", r, err)
		}
		if err := p.stop(); err != nil {
			t.Error(err)
		}
	})
	t.Run("store older than the log", func(t *testing.T) {
		grow(t, dir, "3")
		grow(t, dir, "4") // cuts the log below what was durable when it began
		copyDir(t, filepath.Join(old, "store"), store)
		if err := os.RemoveAll(filepath.Join(dir, "index")); err != nil {
			t.Fatal(err)
		}
		wantParts(t, refusedStart(t, dir), store, log, "the log begins at")
	})
}
