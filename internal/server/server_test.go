package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/config"
)

// start starts a member on free loopback ports over dir.
func start(t *testing.T, dir string, flags ...string) *Member {
	t.Helper()
	m, err := tryStart(t, dir, flags...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func tryStart(t *testing.T, dir string, flags ...string) (*Member, error) {
	t.Helper()
	return tryStartWith(t, dir, slog.New(slog.DiscardHandler), Seams{}, flags...)
}

func tryStartWith(t *testing.T, dir string, log *slog.Logger, seams Seams, flags ...string) (*Member, error) {
	t.Helper()
	args := append([]string{
		"--data-dir=" + dir, "--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:0",
		"--listen-peer-urls=http://127.0.0.1:0", "--listen-metrics-urls=http://127.0.0.1:0",
	}, flags...)
	cfg, err := config.Parse("engram", args, nil)
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return StartWith(ctx, cfg, log, seams)
}

// stop ends a member gracefully.
func stop(t *testing.T, m *Member) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	ended := make(chan error, 1)
	go func() { ended <- m.Wait(ctx) }()
	select {
	case err := <-ended:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute): // or all tests would hang
		t.Fatal("it does not stop")
	}
}

func client(t *testing.T, m *Member) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: m.ClientAddrs(), DialTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestMemberKeepsDataOverRestarts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	ctx := t.Context()
	m := start(t, dir)
	c := client(t, m)
	for _, v := range []string{"1", "2", "3"} {
		if _, err := c.Put(ctx, "a", v); err != nil {
			t.Fatal(err)
		}
	}
	watch := c.Watch(ctx, "a", clientv3.WithRev(2))
	if w := <-watch; len(w.Events) != 3 || string(w.Events[2].Kv.Value) != "3" {
		t.Fatalf("watch from the start: %+v", w)
	}
	_ = c.Close()
	stop(t, m)

	m = start(t, dir)
	defer stop(t, m)
	c = client(t, m)
	got, err := c.Get(ctx, "a")
	if err != nil || got.Header.Revision != 4 || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "3" || got.Kvs[0].Version != 3 {
		t.Fatalf("after a restart: %v %v", got, err)
	}
	if _, err := c.Put(ctx, "b", "x"); err != nil {
		t.Fatal(err)
	}
	members, err := c.MemberList(ctx)
	if err != nil || len(members.Members) != 1 || members.Members[0].Name != "default" {
		t.Fatalf("members: %v %v", members, err)
	}
}

// TestStopDoesNotWaitForWatchers: streams that clients hold open are ended, and
// a client that comes back resumes.
func TestStopDoesNotWaitForWatchers(t *testing.T) {
	dir, addr := filepath.Join(t.TempDir(), "data"), "http://"+ReserveAddr(t)
	flags := []string{"--listen-client-urls=" + addr, "--advertise-client-urls=" + addr}
	var log strings.Builder
	m, err := tryStartWith(t, dir, slog.New(slog.NewTextHandler(&log, nil)), Seams{}, flags...)
	if err != nil {
		t.Fatal(err)
	}
	c := client(t, m)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	lease, err := c.Grant(ctx, 60)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.KeepAlive(ctx, lease.ID); err != nil {
		t.Fatal(err)
	}
	events := c.Watch(ctx, "a", clientv3.WithCreatedNotify())
	if w := <-events; !w.Created {
		t.Fatalf("%+v", w)
	}
	// They are told so, rather than cut off when the grace is over.
	watch, err := pb.NewWatchClient(c.ActiveConnection()).Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	create := &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("a")}}}
	if err := watch.Send(create); err != nil {
		t.Fatal(err)
	}
	alive, err := pb.NewLeaseClient(c.ActiveConnection()).LeaseKeepAlive(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := alive.Send(&pb.LeaseKeepAliveRequest{ID: int64(lease.ID)}); err != nil {
		t.Fatal(err)
	}
	recv := map[string]func() error{
		"watch":      func() error { _, err := watch.Recv(); return err },
		"keep-alive": func() error { _, err := alive.Recv(); return err },
	}
	for name, recv := range recv {
		if err := recv(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	stop(t, m)
	if strings.Contains(log.String(), "closed under calls") {
		t.Errorf("somebody held on to the store:\n%s", &log)
	}
	for name, recv := range recv {
		if err := recv(); status.Convert(err).Message() != status.Convert(rpctypes.ErrGRPCStopped).Message() {
			t.Errorf("the %s stream ended with %v", name, err)
		}
	}
	m = start(t, dir, flags...)
	defer stop(t, m)
	if _, err := c.Put(ctx, "a", "1"); err != nil {
		t.Fatal(err)
	}
	if w := <-events; len(w.Events) != 1 || string(w.Events[0].Kv.Value) != "1" {
		t.Fatalf("after the restart: %+v", w)
	}
}

// TestStopWaitsForReaders: the store is not closed under a call that was cut off and has not noticed yet.
func TestStopWaitsForReaders(t *testing.T) {
	m := start(t, filepath.Join(t.TempDir(), "data"))
	c := client(t, m)
	if _, err := c.Put(t.Context(), "a", "1"); err != nil {
		t.Fatal(err)
	}
	g := m.hold()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ended := make(chan error, 1)
	go func() { ended <- m.Wait(ctx) }()
	m.workers.Wait() // the end is near
	notify(g.unread) // which the closer hears when it waits
	for more := 10; more > 0; {
		if len(g.unread) == 0 {
			more--
		}
		if _, _, err := g.machine.Hash(t.Context()); err != nil {
			t.Fatalf("the store was closed under a reader: %v", err)
		}
	}
	g.release()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

// TestStopWithoutDisk: a member whose store cannot be written any more says so when it is stopped, and ends. Another start has all that
// was acknowledged, from the raft log.
func TestStopWithoutDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	fs := &noTables{FS: vfs.Default}
	m, err := tryStartWith(t, dir, slog.New(slog.DiscardHandler), Seams{FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client(t, m).Put(t.Context(), "a", "1"); err != nil {
		t.Fatal(err)
	}
	fs.gone.Store(true)
	ended := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		ended <- m.Wait(ctx)
	}()
	select {
	case err := <-ended:
		if !errors.Is(err, errNoTables) {
			t.Fatalf("it ends with %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it does not end")
	}
	m = start(t, dir)
	defer stop(t, m)
	if r, err := client(t, m).Get(t.Context(), "a"); err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != "1" {
		t.Errorf("after another start %v, %v", r, err)
	}
}

// noTables is a file system where no table can be made once they are gone.
type noTables struct {
	vfs.FS
	gone atomic.Bool
}

var errNoTables = errors.New("input/output error")

func (fs *noTables) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if fs.gone.Load() && strings.HasSuffix(name, ".sst") {
		return nil, errNoTables
	}
	return fs.FS.Create(name, c)
}

func (fs *noTables) Unwrap() vfs.FS { return fs.FS }

// TestStartsWithoutDurations: 0 is a default, or never, for each option that takes a duration.
func TestStartsWithoutDurations(t *testing.T) {
	var flags []string
	for _, name := range []string{
		"grpc-keepalive-min-time", "grpc-keepalive-interval", "grpc-keepalive-timeout", "raft-read-timeout", "raft-write-timeout", "warning-apply-duration",
		"warning-unary-request-duration", "corrupt-check-time", "compaction-sleep-interval", "watch-progress-notify-interval", "downgrade-check-time",
	} {
		flags = append(flags, "--"+name+"=0s")
	}
	stop(t, start(t, filepath.Join(t.TempDir(), "data"), flags...))
}

// TestLostLogIsRefused: a directory that has served and lost its raft log, even
// one whose store never reached the disk, is not taken for new.
func TestLostLogIsRefused(t *testing.T) {
	for _, lost := range [][]string{{logDir}, {logDir, storeDir, indexDir}} {
		dir := filepath.Join(t.TempDir(), "data")
		stop(t, start(t, dir))
		for _, name := range lost {
			if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		_, err := tryStart(t, dir)
		if err == nil || !strings.Contains(err.Error(), filepath.Join(dir, logDir)) || !strings.Contains(err.Error(), "no raft log") {
			t.Fatalf("without %v: %v", lost, err)
		}
	}
}

// TestForeignLogIsRefused: store and log of two members do not mix.
func TestForeignLogIsRefused(t *testing.T) {
	one, other := filepath.Join(t.TempDir(), "one"), filepath.Join(t.TempDir(), "other")
	stop(t, start(t, one))
	stop(t, start(t, other, "--initial-cluster-token=another"))
	if err := os.RemoveAll(filepath.Join(one, logDir)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(other, logDir), filepath.Join(one, logDir)); err != nil {
		t.Fatal(err)
	}
	if _, err := tryStart(t, one); err == nil || !strings.Contains(err.Error(), "belongs to member") {
		t.Fatalf("foreign log: %v", err)
	}
}

// TestDamageStopsTheMember: a table that is not what was written ends the
// member with the file's name, and its data is not served.
func TestDamageStopsTheMember(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	m := start(t, dir)
	c := client(t, m)
	for i := range 200 {
		if _, err := c.Put(t.Context(), fmt.Sprint("k", i), strings.Repeat("v", 1000)); err != nil {
			t.Fatal(err)
		}
	}
	_ = c.Close()
	stop(t, m)
	tables, err := filepath.Glob(filepath.Join(dir, storeDir, "*.sst"))
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		b, err := os.ReadFile(table)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) < 10<<10 {
			continue // the small tables
		}
		b[len(b)/3] ^= 0xff
		if err := os.WriteFile(table, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, err = tryStart(t, dir)
	if err == nil {
		// The block may be read only when somebody asks for it.
		c := client(t, m)
		got, readErr := c.Get(t.Context(), "k", clientv3.WithPrefix())
		if readErr == nil && len(got.Kvs) == 200 {
			for _, kv := range got.Kvs {
				if string(kv.Value) != strings.Repeat("v", 1000) {
					t.Fatalf("wrong data for %s", kv.Key)
				}
			}
		}
		_ = c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		err = m.Wait(ctx)
	}
	if err == nil || !strings.Contains(err.Error(), ".sst") {
		t.Fatalf("a damaged table: %v", err)
	}
}

// TestAutoCompaction: with a second of history to keep, older history goes
// without being asked for, and what is live stays.
func TestAutoCompaction(t *testing.T) {
	m := start(t, filepath.Join(t.TempDir(), "data"), "--auto-compaction-mode=periodic", "--auto-compaction-retention=1s")
	defer stop(t, m)
	c := client(t, m)
	for i := range 10 {
		if _, err := c.Put(t.Context(), "a", fmt.Sprint(i)); err != nil {
			t.Fatal(err)
		}
	}
	// A watch from the first revision is told when that is gone.
	for began := time.Now(); ; {
		w := <-c.Watch(t.Context(), "a", clientv3.WithRev(2))
		if w.CompactRevision > 2 {
			break
		}
		if time.Since(began) > 20*time.Second {
			t.Fatal("nothing was compacted")
		}
		if _, err := c.Put(t.Context(), "b", "x"); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := c.Get(t.Context(), "a"); err != nil || len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "9" {
		t.Fatalf("%v %v", got, err)
	}
}
