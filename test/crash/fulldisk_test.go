package crash

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// smallDisk mounts a file system of its own. Only root can.
func smallDisk(t *testing.T, megabytes int) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", megabytes)); err != nil {
		if long() {
			t.Fatalf("a small disk cannot be mounted: %v: run as root with CAP_SYS_ADMIN", err)
		}
		t.Skipf("NOT TESTED, a small disk cannot be mounted: %v: run as root with CAP_SYS_ADMIN", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill takes space from outside until only left bytes are free.
func fill(t *testing.T, dir string, left int64) (path string) {
	t.Helper()
	path = filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	until(t, "filling the disk", func() error { // the member takes and gives back space meanwhile
		size, err := f.Seek(0, io.SeekEnd)
		if n := freeBytes(t, dir) - left; err == nil && n > 0 {
			err = syscall.Fallocate(int(f.Fd()), 0, size, n)
		}
		return err
	})
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func freeBytes(t *testing.T, dir string) int64 {
	t.Helper()
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		t.Fatal(err)
	}
	return int64(s.Bavail) * s.Bsize
}

func dial(t *testing.T, addr string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// until calls f until it is content, and fails after some time.
func until(t *testing.T, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// checkRefusal is an error if a refusal does not say why and how much is free.
func checkRefusal(err error) error {
	if status.Code(err) != codes.ResourceExhausted {
		return fmt.Errorf("a write on a full disk is answered with %w", err)
	}
	for _, part := range []string{"database space exceeded", "free", "reserve", "iB"} {
		if !strings.Contains(err.Error(), part) {
			return fmt.Errorf("the refusal does not say %q: %w", part, err)
		}
	}
	return nil
}

// checkReadable looks at what must go on while writes are refused.
func checkReadable(t *testing.T, c *clientv3.Client, addr, key, value string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, o := range [][]clientv3.OpOption{nil, {clientv3.WithSerializable()}} {
		if r, err := c.Get(ctx, key, o...); err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != value {
			t.Errorf("a read on a full disk: %v %v", r, err)
		}
	}
	if _, err := c.Status(ctx, addr); err != nil {
		t.Errorf("status on a full disk: %v", err)
	}
	for _, path := range []string{"/health", "/livez", "/readyz", "/metrics", "/version"} {
		r, err := http.Get("http://" + addr + path)
		if err != nil {
			t.Errorf("%s on a full disk: %v", path, err)
			continue
		}
		body, err := io.ReadAll(r.Body)
		if err = errors.Join(err, r.Body.Close()); err != nil || r.StatusCode != http.StatusOK {
			t.Errorf("%s on a full disk: %s %v %.200s", path, r.Status, err, body)
		}
	}
}

// TestFullDiskFromOutside fills the disk beside a member, kills the member while
// it is full, starts it, and gives the space back.
func TestFullDiskFromOutside(t *testing.T) {
	disk := smallDisk(t, 256)
	dir := filepath.Join(disk, "data")
	flags := []string{"--disk-reserve-bytes=32MiB"}
	p, err := startProcess(t, dir, flags...)
	if err != nil {
		t.Fatal(err)
	}
	w := newLoad(3)
	w.mayRefuse = true
	l, err := w.begin(p.addr, 300)
	if err != nil {
		t.Fatal(err)
	}
	<-l.enough
	c := dial(t, p.addr)
	ctx := t.Context()
	put, err := c.Put(ctx, "known", "value")
	if err != nil {
		t.Fatal(err)
	}
	w.ledger.tell(put.Header.Revision, effect{key: "known", value: "value"})

	filler := fill(t, disk, 4<<20)
	refused := func() error {
		r, err := c.Put(ctx, "more", "x")
		if err == nil {
			w.ledger.tell(r.Header.Revision, effect{key: "more", value: "x"})
			return errors.New("a full disk takes writes")
		}
		return checkRefusal(err)
	}
	until(t, "the first refusal", refused)
	checkReadable(t, c, p.addr, "known", "value")
	p.kill()
	l.gone()

	if p, err = startProcess(t, dir, flags...); err != nil {
		t.Fatalf("a member does not start on a full disk: %v", err)
	}
	c = dial(t, p.addr)
	if err := refused(); err != nil {
		t.Fatal(err)
	}
	checkReadable(t, c, p.addr, "known", "value")

	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	until(t, "the first write with space again", func() error {
		r, err := c.Put(ctx, "again", "y")
		if err == nil {
			w.ledger.tell(r.Header.Revision, effect{key: "again", value: "y"})
		}
		return err
	})
	// And once more, with clients that are refused and go on.
	if l, err = w.begin(p.addr, 200); err != nil {
		t.Fatal(err)
	}
	<-l.enough
	filler = fill(t, disk, 4<<20)
	until(t, "the second refusal", refused)
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	w.ledger.mu.Lock()
	before := w.ledger.count
	w.ledger.mu.Unlock()
	until(t, "clients go on", func() error {
		w.ledger.mu.Lock()
		defer w.ledger.mu.Unlock()
		if w.ledger.count < before+100 {
			return fmt.Errorf("%d answers since there is space again", w.ledger.count-before)
		}
		return nil
	})
	p.kill()
	l.gone()
	if p, err = startProcess(t, dir, flags...); err != nil {
		t.Fatal(err)
	}
	w.finish(t, p.addr)
	if len(w.refusals) == 0 {
		t.Error("no client was refused")
	}
	for _, err := range w.refusals {
		if err := checkRefusal(err); err != nil {
			t.Error(err)
			break
		}
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}

// TestFullDiskFromInside writes until the disk is full. What was acknowledged
// survives kill -9 there, deletes and compaction are not needed to start, and
// more space is enough to go on.
func TestFullDiskFromInside(t *testing.T) {
	disk := smallDisk(t, 320)
	dir := filepath.Join(disk, "data")
	p, err := startProcess(t, dir, "--disk-reserve-bytes=80MiB") // a segment of the log is 64 MiB
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, p.addr)
	ctx := t.Context()
	told := map[string]int64{}
	value := strings.Repeat("0123456789abcdef", 48<<10/16)
	var refusal error
	for n := 0; refusal == nil; n++ {
		key := fmt.Sprintf("k%06d", n)
		r, err := c.Put(ctx, key, value)
		if err != nil {
			refusal = err
			break
		}
		told[key] = r.Header.Revision
		if n > 20000 {
			t.Fatal("the disk is not full after a gigabyte")
		}
	}
	if err := checkRefusal(refusal); err != nil {
		t.Error(err)
	}
	if free := freeBytes(t, disk); free < 8<<20 {
		t.Errorf("writes were refused when %d bytes were free, that is too late", free)
	}
	checkReadable(t, c, p.addr, "k000000", value)
	p.kill()
	if p, err = startProcess(t, dir, "--disk-reserve-bytes=80MiB"); err != nil {
		t.Fatalf("a member does not start on a disk that it has filled: %v", err)
	}
	c = dial(t, p.addr)
	for key, revision := range told {
		r, err := c.Get(ctx, key)
		if err != nil || len(r.Kvs) != 1 || r.Kvs[0].ModRevision != revision || string(r.Kvs[0].Value) != value {
			t.Fatalf("%s was acknowledged at revision %d: %v %v", key, revision, r.Header, err)
		}
	}
	checkReadable(t, c, p.addr, "k000000", value)
	if err := syscall.Mount("tmpfs", disk, "tmpfs", syscall.MS_REMOUNT, "size=512m"); err != nil {
		t.Fatal(err)
	}
	until(t, "the first write on a disk that has grown", func() error {
		_, err := c.Put(ctx, "more", "x")
		return err
	})
	t.Logf("%d writes of %d bytes fitted", len(told), len(value))
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}
