package crash

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/test/internal/broken"
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
	l.wait(t, p.exited)
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
	until(t, "a refusal after the restart", func() error {
		fill(t, disk, 4<<20) // again if the start has made room, as by dropping what it has replayed of the log
		return refused()
	})
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
	l.wait(t, p.exited)
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

// TestFullDiskLetsDeletesThrough: below the reserve deletes still pass until half
// of it is gone, and compactions until three quarters are.
func TestFullDiskLetsDeletesThrough(t *testing.T) {
	disk := smallDisk(t, 256)
	p, err := startProcess(t, filepath.Join(disk, "data"), "--disk-reserve-bytes=32MiB")
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, p.addr)
	ctx := t.Context()
	for i := range 3 {
		if _, err := c.Put(ctx, fmt.Sprint("key", i), "value"); err != nil {
			t.Fatal(err)
		}
	}
	refused := func() error { // a write that is more than a small overwrite
		if _, err := c.Put(ctx, "more", strings.Repeat("x", 1000)); err == nil {
			return errors.New("a full disk takes writes")
		} else {
			return checkRefusal(err)
		}
	}
	aboveHalf := func() error {
		fill(t, disk, 24<<20) // again if the member has just made room for its log
		if err := refused(); err != nil {
			return err
		}
		if free := freeBytes(t, disk); free < 18<<20 {
			return fmt.Errorf("%d bytes are free", free)
		}
		return nil
	}
	until(t, "the first refusal, above half of the reserve", aboveHalf)
	// Each is repeated, since the last look at the disk may have been in the midst of filling it.
	var d *clientv3.DeleteResponse
	until(t, "a delete below the reserve", func() (err error) {
		d, err = c.Delete(ctx, "key0")
		return err
	})
	if d.Deleted != 1 {
		t.Fatalf("a delete below the reserve: %v", d)
	}
	until(t, "a transaction that deletes, below the reserve", func() error {
		_, err := c.Txn(ctx).Then(clientv3.OpDelete("key1"), clientv3.OpGet("key2")).Commit()
		return err
	})
	var r *clientv3.TxnResponse
	until(t, "a small overwrite below the reserve", func() (err error) { // Kubernetes' compactor writes before it compacts
		r, err = c.Txn(ctx).If(clientv3.Compare(clientv3.Version("key2"), "=", 1)).Then(clientv3.OpPut("key2", "4711")).Else(clientv3.OpGet("key2")).Commit()
		return err
	})
	if !r.Succeeded {
		t.Fatalf("a small overwrite below the reserve: %v", r)
	}
	until(t, "a compaction below the reserve", func() error {
		_, err := c.Compact(ctx, d.Header.Revision, clientv3.WithCompactPhysical())
		return err
	})
	until(t, "a refusal after the compaction, above half of the reserve", aboveHalf)
	filler := fill(t, disk, 12<<20) // the same file, larger
	until(t, "a delete is refused below half of the reserve", func() error {
		if _, err := c.Delete(ctx, "nothing"); err == nil {
			return errors.New("it passes")
		} else {
			return checkRefusal(err)
		}
	})
	until(t, "a small overwrite is refused below half of the reserve", func() error {
		_, err := c.Put(ctx, "key2", "4712")
		return checkRefusal(err)
	})
	until(t, "a compaction below half of the reserve", func() error {
		_, err := c.Compact(ctx, d.Header.Revision+1)
		return err
	})
	fill(t, disk, 6<<20)
	until(t, "a compaction is refused below a quarter of the reserve", func() error {
		if _, err := c.Compact(ctx, 1); err == nil || errors.Is(err, rpctypes.ErrCompacted) {
			return errors.New("it passes")
		} else {
			return checkRefusal(err)
		}
	})
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	until(t, "the first write with space again", func() error {
		_, err := c.Put(ctx, "again", "y")
		return err
	})
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
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Kvs) != 1 || r.Kvs[0].ModRevision != revision || string(r.Kvs[0].Value) != value {
			t.Fatal(broken.Errorf("%s was acknowledged at revision %d: %v", key, revision, r))
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

// TestFullDiskHugeDelete deletes very many keys by one request on a disk that is just above half of the reserve. What the delete writes takes some of the
// half that is kept, so that no further delete passes; the compaction does, its space comes back, and writes are accepted again, though nobody does
// anything but compact.
func TestFullDiskHugeDelete(t *testing.T) {
	const keys, batch, reserve = 150_000, 1000, 128 << 20
	disk := smallDisk(t, 768)
	// A small memtable, so that deletes are on the disk soon.
	p, err := startProcess(t, filepath.Join(disk, "data"), "--max-txn-ops=1000", "--memory-budget=64MiB", "--disk-reserve-bytes=128MiB")
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, p.addr)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if _, err := c.Put(ctx, "known", "value"); err != nil {
		t.Fatal(err)
	}
	// Names and values that do not get smaller: what is deleted must take space, and give more back.
	noise := rand.New(rand.NewPCG(1, 2))
	text := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"[noise.IntN(64)]
		}
		return string(b)
	}
	for range keys / batch {
		var ops []clientv3.Op
		for range batch {
			ops = append(ops, clientv3.OpPut("some/"+text(75), text(900)))
		}
		if _, err := c.Txn(ctx).Then(ops...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	more := text(1000) // a write that is more than a small overwrite
	until(t, "the first refusal, above half of the reserve", func() error {
		fill(t, disk, 72<<20) // again if the member has just made room for its log
		_, err := c.Put(ctx, "more", more)
		if err == nil {
			return errors.New("a full disk takes writes")
		}
		return checkRefusal(err)
	})
	before := freeBytes(t, disk)
	var d *clientv3.DeleteResponse
	until(t, "the delete", func() (err error) { // the last look at the disk may have been in the midst of filling it, or the answer may come too late
		d, err = c.Delete(ctx, "some/", clientv3.WithPrefix())
		return err
	})
	until(t, "a delete is refused", func() error {
		if free := freeBytes(t, disk); free >= reserve/2 {
			return fmt.Errorf("%d bytes are free", free)
		}
		if _, err := c.Delete(ctx, "nothing"); err == nil {
			return errors.New("it passes below half of the reserve")
		} else {
			return checkRefusal(err)
		}
	})
	after := freeBytes(t, disk)
	t.Logf("deleting %d keys took %d bytes of the disk, %d are free", keys, before-after, after)
	checkReadable(t, c, p.addr, "known", "value")

	if _, err := c.Compact(ctx, d.Header.Revision); err != nil {
		t.Fatalf("the compaction after a huge delete: %v", err)
	}
	began := time.Now()
	for { // a minute is what docs/operations.md says, and this machine may be busy
		_, err := c.Put(ctx, "more", more)
		if err == nil {
			break
		}
		if err := checkRefusal(err); err != nil {
			t.Fatal(err)
		}
		if time.Since(began) > 2*time.Minute {
			t.Fatalf("writes are still refused, %d bytes are free: %v\n%s", freeBytes(t, disk), err, p.output)
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Logf("%d bytes were free before the delete, %d are after it and %d now, %v after the compaction", before, after, freeBytes(t, disk), time.Since(began))
	if s, err := c.Status(ctx, p.addr); err != nil || s.DbSize > keys*400 {
		t.Errorf("writes are accepted again, but not for what the store gave back: %+v, %v", s, err)
	}
	checkReadable(t, c, p.addr, "known", "value")
	p.kill()

	if p, err = startProcess(t, filepath.Join(disk, "data"), "--disk-reserve-bytes=128MiB"); err != nil {
		t.Fatal(err)
	}
	c = dial(t, p.addr)
	if r, err := c.Get(ctx, "some/", clientv3.WithPrefix(), clientv3.WithCountOnly()); err != nil {
		t.Error(err)
	} else if r.Count != 0 {
		t.Error(broken.Errorf("the delete was acknowledged, and there are %v", r))
	}
	for key, value := range map[string]string{"known": "value", "more": more} {
		checkReadable(t, c, p.addr, key, value)
	}
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}
