package server_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/server"
)

// clusterMember is a member of a test's cluster, in this process.
type clusterMember struct {
	t            *testing.T
	name         string
	client, peer string // URLs
	dir          string
	flags        []string
	seams        server.Seams
	log          *slog.Logger // nil is the test's own

	stop  context.CancelFunc
	ended chan error // why it ended, then closed
}

func freeURL(t *testing.T) string {
	t.Helper()
	return "http://" + server.ReserveAddr(t)
}

func newClusterMember(t *testing.T, name string) *clusterMember {
	return &clusterMember{t: t, name: name, client: freeURL(t), peer: freeURL(t), dir: filepath.Join(t.TempDir(), name)}
}

// start starts the member and calls back when it serves.
func (c *clusterMember) start(cluster []*clusterMember, state string, flags ...string) {
	c.t.Helper()
	var parts []string
	for _, m := range cluster {
		parts = append(parts, m.name+"="+m.peer)
	}
	if flags != nil {
		c.flags = flags
	}
	cfg, err := config.Parse("engram", append([]string{
		"--name=" + c.name, "--data-dir=" + c.dir, "--listen-client-urls=" + c.client, "--advertise-client-urls=" + c.client,
		"--listen-peer-urls=" + c.peer, "--initial-advertise-peer-urls=" + c.peer,
		"--initial-cluster=" + strings.Join(parts, ","), "--initial-cluster-state=" + state, "--memory-budget=64MiB",
	}, c.flags...), nil)
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	c.stop, c.ended = cancel, ended
	log := c.log
	if log == nil {
		log = slog.New(slog.NewTextHandler(testWriter{c.t, c.name}, nil))
	}
	seams := c.seams
	go func() {
		m, err := server.StartWith(ctx, cfg, log, seams)
		if err == nil {
			err = m.Wait(ctx)
		} else if ctx.Err() == nil {
			c.t.Errorf("%s does not start: %v", c.name, err)
		}
		ended <- err
		close(ended)
	}()
	c.t.Cleanup(c.close)
}

type testWriter struct {
	t    *testing.T
	name string
}

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s %s", w.name, b)
	return len(b), nil
}

// close ends the member and waits for it; it may have ended before.
func (c *clusterMember) close() {
	c.t.Helper()
	c.stop()
	select {
	case <-c.ended:
	case <-time.After(time.Minute): // or all tests would hang
		c.t.Errorf("%s does not stop", c.name)
	}
}

func dialMembers(t *testing.T, members ...*clusterMember) *clientv3.Client {
	t.Helper()
	var endpoints []string
	for _, m := range members {
		endpoints = append(endpoints, m.client)
	}
	cli, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cli.Close() })
	return cli
}

// waitServes waits until a linearizable read is answered: a member that has just been started, or a cluster that has just lost one, has no
// leader for a while, and the client repeats no put.
func waitServes(ctx context.Context, t *testing.T, cli *clientv3.Client) {
	t.Helper()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for {
		_, err := cli.Get(ctx, "k")
		if err == nil {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("no linearizable read is answered: %v", err)
		}
	}
}

// TestThreeMembers founds a cluster of three, writes at each, loses one and gets it back.
func TestThreeMembers(t *testing.T) {
	var members []*clusterMember
	for i := range 3 {
		members = append(members, newClusterMember(t, fmt.Sprintf("m%d", i)))
	}
	for _, m := range members {
		m.start(members, "new")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	for i, m := range members {
		cli := dialMembers(t, m)
		waitServes(ctx, t, cli)
		key := fmt.Sprintf("k%d", i)
		if _, err := cli.Put(ctx, key, "v"); err != nil {
			t.Fatalf("put at %s: %v", m.name, err)
		}
		got, err := cli.Get(ctx, "k", clientv3.WithPrefix())
		if err != nil || len(got.Kvs) != i+1 {
			t.Fatalf("get at %s: %v, %v", m.name, got, err)
		}
	}

	// One may be lost, two not: then only reads that ask nobody are answered.
	cli := dialMembers(t, members[0])
	members[2].close()
	waitServes(ctx, t, cli) // it may have led
	if _, err := cli.Put(ctx, "one-lost", "v"); err != nil {
		t.Fatalf("put with one of three lost: %v", err)
	}
	members[1].close()
	for what, call := range map[string]func(context.Context) error{
		"a put":              func(ctx context.Context) error { _, err := cli.Put(ctx, "two-lost", "v"); return err },
		"a linearizable get": func(ctx context.Context) error { _, err := cli.Get(ctx, "k0"); return err },
	} {
		hasty, cancel := context.WithTimeout(ctx, 2*time.Second)
		if err := call(hasty); err == nil {
			t.Fatalf("%s with two of three lost was answered", what)
		}
		cancel()
	}
	got, err := cli.Get(ctx, "one-lost", clientv3.WithSerializable())
	if err != nil || len(got.Kvs) != 1 {
		t.Fatalf("serializable get with two of three lost: %v, %v", got, err)
	}
	members[1].start(members, "new")
	waitServes(ctx, t, cli)
	if _, err := cli.Put(ctx, "back", "v"); err != nil {
		t.Fatalf("put after one came back: %v", err)
	}
	members[2].start(members, "new")
	back := dialMembers(t, members[2])
	if got, err := back.Get(ctx, "back"); err != nil || len(got.Kvs) != 1 {
		t.Fatalf("get at the member that came back last: %v, %v", got, err)
	}
}

// TestTokenAtOtherMembers uses a token, the moment it is issued, at the members that may not have applied its entry yet: it is
// good at the first try.
func TestTokenAtOtherMembers(t *testing.T) {
	var members []*clusterMember
	for i := range 3 {
		members = append(members, newClusterMember(t, fmt.Sprintf("m%d", i)))
	}
	for _, m := range members {
		m.start(members, "new", "--bcrypt-cost=4")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	var clients []*clientv3.Client
	for _, m := range members {
		cli := dialMembers(t, m)
		waitServes(ctx, t, cli)
		clients = append(clients, cli)
	}
	for _, f := range []func() error{
		func() error { _, err := clients[0].UserAdd(ctx, "root", "secret"); return err },
		func() error { _, err := clients[1].UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := clients[2].AuthEnable(ctx); return err },
	} {
		if err := f(); err != nil {
			t.Fatal(err)
		}
	}
	for turn := range 30 {
		token, err := clients[turn%3].Authenticate(ctx, "root", "secret")
		if err != nil {
			t.Fatal(err)
		}
		with := metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, token.Token)
		for i := range 3 {
			kv := etcdserverpb.NewKVClient(clients[(turn+i)%3].ActiveConnection())
			if _, err := kv.Range(with, &etcdserverpb.RangeRequest{Key: []byte("a"), Serializable: true}); err != nil {
				t.Fatalf("turn %d: token of %s at %s: %v", turn, members[turn%3].name, members[(turn+i)%3].name, err)
			}
		}
	}
}

// TestSnapshotToNewMember adds a member to a cluster whose log was cut long ago, promotes it, and removes another.
func TestSnapshotToNewMember(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	first := newClusterMember(t, "m0")
	first.start([]*clusterMember{first}, "new", "--snapshot-catchup-entries=10")
	cli := dialMembers(t, first)
	value := strings.Repeat("v", 100_000)
	for i := range 200 {
		if _, err := cli.Put(ctx, fmt.Sprintf("k%03d", i), value); err != nil {
			t.Fatal(err)
		}
	}
	first.close() // flushes, so that the log can be cut
	first.start([]*clusterMember{first}, "new")
	waitServes(ctx, t, cli)
	for i := range 50 {
		if _, err := cli.Put(ctx, fmt.Sprintf("l%03d", i), "v"); err != nil {
			t.Fatal(err)
		}
	}
	second := newClusterMember(t, "m1")
	earlier := &earlierSnapshot{FS: vfs.Default}
	second.seams.FS = earlier
	added, err := cli.MemberAddAsLearner(ctx, []string{second.peer})
	if err != nil {
		t.Fatal(err)
	}
	second.start([]*clusterMember{first, second}, "existing")
	watcher := dialMembers(t, second)
	got, err := watcher.Get(ctx, "k", clientv3.WithPrefix(), clientv3.WithSerializable(), clientv3.WithCountOnly())
	if err != nil || got.Count != 200 {
		t.Fatalf("at the learner: %v, %v", got, err)
	}
	path := earlier.path.Load()
	if path == nil {
		t.Fatal("no snapshot came")
	}
	for look := time.NewTicker(time.Millisecond); ; { // its deletion tells nobody
		if _, err := os.Stat(*path); errors.Is(err, fs.ErrNotExist) {
			look.Stop()
			break
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			t.Fatalf("%s is still there", *path)
		}
	}
	for {
		_, err := cli.MemberPromote(ctx, added.Member.ID)
		if err == nil {
			break
		}
		if !strings.Contains(err.Error(), "in sync with leader") {
			t.Fatal(err)
		}
	}
	for { // it is a learner until it has applied that it is not
		_, err := watcher.Put(ctx, "at-second", "v")
		if err == nil {
			break
		}
		if !strings.Contains(err.Error(), "not supported for learner") {
			t.Fatal(err)
		}
	}
	leader, err := cli.Status(ctx, first.client)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watcher.MemberRemove(ctx, leader.Header.MemberId); err != nil {
		t.Fatal(err)
	}
	if err := <-first.ended; err == nil || !strings.Contains(err.Error(), "permanently removed") {
		t.Errorf("the removed member ended with %v", err)
	}
	if _, err := watcher.Put(ctx, "alone", "v"); err != nil {
		t.Fatal(err)
	}
}

// earlierSnapshot puts a snapshot that raft did not take beside the one that comes in.
type earlierSnapshot struct {
	vfs.FS
	path atomic.Pointer[string]
}

func (e *earlierSnapshot) Rename(from, to string) error {
	if strings.HasPrefix(filepath.Base(to), "snapshot-") {
		path := filepath.Join(filepath.Dir(to), fmt.Sprintf("snapshot-%016x-%016x", 1, 1))
		if err := e.FS.MkdirAll(filepath.Join(path, "store"), 0o700); err != nil {
			return err
		}
		e.path.Store(&path)
	}
	return e.FS.Rename(from, to)
}

// TestForceNewCluster makes one survivor of three a cluster of its own, which then grows again.
func TestForceNewCluster(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	var members []*clusterMember
	for i := range 3 {
		members = append(members, newClusterMember(t, fmt.Sprintf("m%d", i)))
	}
	for _, m := range members {
		m.start(members, "new")
	}
	cli := dialMembers(t, members[0])
	waitServes(ctx, t, cli)
	if _, err := cli.Put(ctx, "kept", "v"); err != nil {
		t.Fatal(err)
	}
	for _, m := range members {
		m.close()
	}
	survivor := members[0]
	survivor.start(members, "new", "--force-new-cluster")
	waitServes(ctx, t, cli)
	if _, err := cli.Put(ctx, "alone", "v"); err != nil {
		t.Fatal(err)
	}
	list, err := cli.MemberList(ctx)
	if err != nil || len(list.Members) != 1 || list.Members[0].Name != "m0" {
		t.Fatalf("members: %v, %v", list, err)
	}
	survivor.close()
	survivor.flags = nil
	survivor.start(members, "new")
	fourth := newClusterMember(t, "m3")
	if _, err := cli.MemberAdd(ctx, []string{fourth.peer}); err != nil {
		t.Fatal(err)
	}
	fourth.start([]*clusterMember{survivor, fourth}, "existing")
	got, err := dialMembers(t, fourth).Get(ctx, "", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil || len(got.Kvs) != 2 {
		t.Fatalf("at the new member: %v, %v", got, err)
	}
}
