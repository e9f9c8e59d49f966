package server

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/engram-kv/engram/ctl"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/storage"
)

// save runs "ctl snapshot save".
func save(t *testing.T, endpoint, path string) (code int, told string) {
	t.Helper()
	var out bytes.Buffer
	code = ctl.Run(t.Context(), "engram ctl", []string{"--endpoints", endpoint, "snapshot", "save", path},
		ctl.Streams{In: strings.NewReader(""), Out: &out, Err: &out})
	return code, out.String()
}

// fill puts so many KiB of values that do not compress.
func fill(t *testing.T, c *clientv3.Client, kib int) {
	t.Helper()
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range kib / 64 {
		value := make([]byte, 64<<10)
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		if _, err := c.Put(t.Context(), fmt.Sprintf("fill/%05d", i), string(value)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestBackupIsOneMoment saves backups while transactions keep two keys equal,
// delete and compact: each backup holds the store of one revision.
func TestBackupIsOneMoment(t *testing.T) {
	m := start(t, filepath.Join(t.TempDir(), "data"))
	defer stop(t, m)
	c := client(t, m)
	fill(t, c, 2<<10)
	ctx, end := context.WithCancel(t.Context())
	var writer sync.WaitGroup
	var writes atomic.Int64
	writer.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			v := strconv.Itoa(i)
			r, err := c.Txn(ctx).Then(clientv3.OpPut("left", v), clientv3.OpPut("right", v), clientv3.OpDelete("fill/0000"+strconv.Itoa(i%10))).Commit()
			if err == nil && i%50 == 49 {
				_, err = c.Compact(ctx, r.Header.Revision-10)
			}
			if err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
			writes.Add(1)
		}
	})
	seen := map[string]bool{}
	for i := range 8 {
		before := writes.Load()
		waitFor(t, "some writes", func() bool { return t.Failed() || writes.Load() >= before+10 })
		path := filepath.Join(t.TempDir(), "b.db")
		if code, told := save(t, m.ClientAddrs()[0], path); code != 0 {
			t.Fatalf("%d: %s", code, told)
		}
		left, right := read(t, path)
		if left != right || left == "" {
			t.Errorf("backup %d: left is %q, right %q", i, left, right)
		}
		seen[left] = true
	}
	end()
	writer.Wait()
	if len(seen) < 8 {
		t.Errorf("there were %d writes, and the backups saw %v", writes.Load(), seen)
	}
}

// read makes a store of a backup and returns two values.
func read(t *testing.T, path string) (left, right string) {
	t.Helper()
	s, err := storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "s"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if _, err := snapfile.ReadEtcd(t.Context(), path, s); err != nil {
		t.Fatal(err)
	}
	k, err := mvcc.Open(mvcc.Options{Storage: s})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Abandon()
	v := k.View(k.Root())
	defer v.Release()
	for key, to := range map[string]*string{"left": &left, "right": &right} {
		r, err := v.Range(t.Context(), []byte(key), nil, mvcc.RangeOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, kv := range r.KVs {
			*to = string(mvcc.ValueOf(kv))
		}
	}
	return left, right
}

// creationFS is a disk of which so much is free, and remembers what comes into being on it.
type creationFS struct {
	fullFS
	mu      sync.Mutex
	created []string
}

func (fs *creationFS) note(name string) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.created = append(fs.created, name)
}

// since returns what was created after the first n.
func (fs *creationFS) since(n int) []string {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return slices.Clone(fs.created[n:])
}

func (fs *creationFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	fs.note(name)
	return fs.FS.Create(name, c)
}

func (fs *creationFS) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	fs.note(name)
	return fs.FS.OpenReadWrite(name, c, opts...)
}

func (fs *creationFS) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	fs.note(name)
	return fs.FS.ReuseForWrite(old, name, c)
}

func (fs *creationFS) Link(old, name string) error {
	fs.note(name)
	return fs.FS.Link(old, name)
}

func (fs *creationFS) MkdirAll(dir string, perm os.FileMode) error {
	fs.note(dir)
	return fs.FS.MkdirAll(dir, perm)
}

// filesBelow are the paths of all that is in a directory.
func filesBelow(t *testing.T, dir string) (paths []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		paths = append(paths, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

// TestBackupOnAFullDisk saves a backup, to another disk, from a member that refuses writes since its own has less room than is kept, and less than
// the backup takes. It creates no file, and the backup restores.
func TestBackupOnAFullDisk(t *testing.T) {
	const free = 1 << 20
	dir := filepath.Join(t.TempDir(), "data")
	fs := &creationFS{fullFS: fullFS{FS: vfs.Default}}
	fs.free.Store(1 << 40)
	m, err := tryStartWith(t, dir, slog.New(slog.DiscardHandler), Seams{FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, m)
	c := client(t, m)
	fill(t, c, 8<<10)
	if len(fs.since(0)) == 0 {
		t.Fatal("what the member creates is not seen")
	}
	fs.free.Store(free)
	waitFor(t, "the guard to look", func() bool { return m.guards.LastGate() != nil })
	if _, err := c.Put(t.Context(), "new", "1"); err == nil {
		t.Fatal("the disk counts as full, and a put passes")
	}
	before, n := filesBelow(t, dir), len(fs.since(0))
	path, restored := filepath.Join(t.TempDir(), "b.db"), filepath.Join(t.TempDir(), "restored")
	if code, told := save(t, m.ClientAddrs()[0], path); code != 0 {
		t.Fatalf("%d: %s", code, told)
	}
	if created := fs.since(n); len(created) > 0 {
		t.Errorf("the backup created %v", created)
	}
	if after := filesBelow(t, dir); !slices.Equal(before, after) {
		t.Errorf("before the backup there was %v, now there is %v", before, after)
	}
	if info, err := os.Stat(path); err != nil || info.Size() <= free {
		t.Fatalf("the backup does not take more than is free: %v, %v", info, err)
	}
	var told bytes.Buffer
	if code := ctl.Run(t.Context(), "engram ctl", []string{"snapshot", "restore", path, "--data-dir", restored},
		ctl.Streams{In: strings.NewReader(""), Out: &told, Err: &told}); code != 0 {
		t.Fatalf("restore: %d, %s", code, &told)
	}
	again := start(t, restored)
	defer stop(t, again)
	want, err := c.Get(t.Context(), "", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	got, err := client(t, again).Get(t.Context(), "", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Kvs) != 128 || !slices.EqualFunc(got.Kvs, want.Kvs, func(a, b *mvccpb.KeyValue) bool {
		return bytes.Equal(a.Key, b.Key) && bytes.Equal(a.Value, b.Value)
	}) {
		t.Errorf("%d keys were restored, %d are there", len(got.Kvs), len(want.Kvs))
	}
}

// cutter passes a connection on until so many bytes have come back, and cuts it.
type cutter struct {
	net.Listener
	to    string
	after int64
}

func (c *cutter) serve(t *testing.T) {
	for {
		in, err := c.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = in.Close() }()
			out, err := net.Dial("tcp", c.to)
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = out.Close() }()
			go func() { _, _ = io.Copy(out, in) }() // ends with either
			_, _ = io.CopyN(in, out, c.after)
		}()
	}
}

// TestBackupCut cuts the connection at random points: nothing is left at the
// client, and the member holds nothing for it any more.
func TestBackupCut(t *testing.T) {
	m := start(t, filepath.Join(t.TempDir(), "data"))
	defer stop(t, m)
	fill(t, client(t, m), 4<<10)
	rng := rand.New(rand.NewPCG(3, 4))
	for range 12 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		c := &cutter{Listener: l, to: strings.TrimPrefix(m.ClientAddrs()[0], "http://"), after: rng.Int64N(4 << 20)}
		go c.serve(t)
		dir := t.TempDir()
		code, told := save(t, l.Addr().String(), filepath.Join(dir, "b.db"))
		if code != 5 || !strings.Contains(told, "Error: ") {
			t.Errorf("cut after %d bytes: %d, %s", c.after, code, told)
		}
		if names, err := os.ReadDir(dir); err != nil || len(names) > 0 {
			t.Errorf("cut after %d bytes: left behind %v, %v", c.after, names, err)
		}
		_ = l.Close()
	}
	waitFor(t, "the member to let go of what was cut off", func() bool { return m.gen.Load().refs.Load() == 1 })
	if code, told := save(t, m.ClientAddrs()[0], filepath.Join(t.TempDir(), "b.db")); code != 0 {
		t.Errorf("afterwards: %d, %s", code, told)
	}
}

// waitFor polls: what it waits for is on another goroutine's way out.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited too long for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestStopEndsBackups stops a member whose backups nobody reads.
func TestStopEndsBackups(t *testing.T) {
	m := start(t, filepath.Join(t.TempDir(), "data"))
	fill(t, client(t, m), 4<<10)
	// Windows that do not grow: grpc-go's own may let in all of a backup.
	conn, err := grpc.NewClient(strings.TrimPrefix(m.ClientAddrs()[0], "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(1<<16), grpc.WithInitialConnWindowSize(1<<17))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	streams := make([]pb.Maintenance_SnapshotClient, 2)
	for i := range streams {
		if streams[i], err = pb.NewMaintenanceClient(conn).Snapshot(t.Context(), &pb.SnapshotRequest{}); err != nil {
			t.Fatal(err)
		}
		if _, err := streams[i].Recv(); err != nil {
			t.Fatal(err)
		}
	}
	stop(t, m) // and closes the store, which Pebble lets nobody do who still reads it
	for _, s := range streams {
		for {
			if _, err := s.Recv(); err == io.EOF {
				t.Error("a stream that was cut ended as if it were whole")
				break
			} else if err != nil {
				break
			}
		}
	}
}
