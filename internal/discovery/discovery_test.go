package discovery_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/discovery"
	"github.com/engram-kv/engram/internal/server"
)

// registry starts a member that new clusters can meet at.
func registry(t *testing.T) *clientv3.Client {
	t.Helper()
	cfg, err := config.Parse("engram", []string{
		"--data-dir=" + filepath.Join(t.TempDir(), "data"), "--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:0",
		"--listen-peer-urls=http://127.0.0.1:0", "--memory-budget=64MiB",
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	m, err := server.Start(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := m.Wait(ctx); err != nil {
			t.Error(err)
		}
	})
	c, err := clientv3.New(clientv3.Config{Endpoints: m.ClientAddrs(), DialTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func put(t *testing.T, c *clientv3.Client, key, value string) {
	t.Helper()
	if _, err := c.Put(t.Context(), key, value); err != nil {
		t.Fatal(err)
	}
}

func TestJoin(t *testing.T) {
	c := registry(t)
	options := func(token string) discovery.Options {
		return discovery.Options{Token: token, Endpoints: c.Endpoints(), Insecure: true, RequestTimeout: 20 * time.Second}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	type answer struct {
		cluster string
		err     error
	}
	join := func(token string, id uint64, self string) chan answer {
		got := make(chan answer, 1)
		go func() {
			cluster, err := discovery.Join(ctx, options(token), id, self)
			got <- answer{cluster, err}
		}()
		return got
	}

	t.Run("three meet", func(t *testing.T) {
		put(t, c, "/_etcd/registry/three/_config/size", "3")
		waiting := []chan answer{
			join("three", 0xa, "a=http://h1:1,a=http://h1:2"), join("three", 0xb, "b=http://h2:1"), join("three", 0xc, "c=http://h3:1"),
		}
		var clusters []string
		for _, w := range waiting {
			a := <-w
			if a.err != nil {
				t.Fatal(a.err)
			}
			clusters = append(clusters, a.cluster)
		}
		got, err := c.Get(ctx, "/_etcd/registry/three/members/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
		if err != nil || len(got.Kvs) != 3 {
			t.Fatalf("%v %v", got, err)
		}
		var parts []string
		for _, kv := range got.Kvs {
			parts = append(parts, string(kv.Value))
		}
		want := strings.Join(parts, ",") // in the order in which they came
		for _, cluster := range clusters {
			if cluster != want {
				t.Errorf("one was told %s, want %s", cluster, want)
			}
		}
		if a, err := c.Get(ctx, "/_etcd/registry/three/members/a"); err != nil || len(a.Kvs) != 1 || string(a.Kvs[0].Value) != "a=http://h1:1,a=http://h1:2" {
			t.Errorf("member a is registered as %v %v", a, err)
		}
		// The fourth comes too late; one of the three may come again.
		if a := <-join("three", 0xd, "d=http://h4:1"); !errors.Is(a.err, discovery.ErrFullCluster) {
			t.Errorf("the fourth: %+v", a)
		}
		if late, err := c.Get(ctx, "/_etcd/registry/three/members/d"); err != nil || len(late.Kvs) != 0 {
			t.Errorf("the fourth is registered: %v %v", late, err)
		}
		if a := <-join("three", 0xb, "b=http://h2:1"); a.err != nil || a.cluster != want {
			t.Errorf("again: %+v", a)
		}
	})

	t.Run("more than the size race", func(t *testing.T) {
		put(t, c, "/_etcd/registry/race/_config/size", "2")
		var waiting []chan answer
		for i := range 5 {
			waiting = append(waiting, join("race", uint64(i+1), fmt.Sprintf("m%d=http://h%d:1", i, i)))
		}
		told := map[string]int{}
		for _, w := range waiting {
			a := <-w
			if a.err != nil && !errors.Is(a.err, discovery.ErrFullCluster) {
				t.Error(a.err)
			}
			told[a.cluster]++
		}
		delete(told, "")
		for cluster, n := range told {
			if n != 2 || len(told) != 1 || strings.Count(cluster, "=") != 2 {
				t.Errorf("%d were told %s", n, cluster)
			}
		}
		if len(told) == 0 {
			t.Error("nobody got in")
		}
	})

	t.Run("refusals", func(t *testing.T) {
		if a := <-join("none", 1, "a=http://h:1"); !errors.Is(a.err, discovery.ErrSizeNotFound) {
			t.Errorf("no size: %+v", a)
		}
		for i, bad := range []string{"", "0", "-1", "three", "99999999999"} {
			token := fmt.Sprintf("bad%d", i)
			put(t, c, "/_etcd/registry/"+token+"/_config/size", bad)
			if a := <-join(token, 1, "a=http://h:1"); !errors.Is(a.err, discovery.ErrBadSizeKey) {
				t.Errorf("size %q: %+v", bad, a)
			}
		}
		put(t, c, "/_etcd/registry/twins/_config/size", "2")
		first := join("twins", 1, "a=http://h1:1")
		second := join("twins", 2, "a=http://h2:1")
		for _, w := range []chan answer{first, second} {
			if a := <-w; !errors.Is(a.err, discovery.ErrSameName) {
				t.Errorf("one name for two: %+v", a)
			}
		}
	})
}

// TestJoinTriesAgain: a registry that cannot be reached is asked again, with
// longer and longer pauses, by the clock.
func TestJoinTriesAgain(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := l.Addr().String()
	_ = l.Close()
	clk := clock.NewFake(time.Unix(0, 0))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	var said strings.Builder // read once Join has ended
	go func() {
		_, err := discovery.Join(ctx, discovery.Options{
			Token: "t", Endpoints: []string{nobody}, Insecure: true, RequestTimeout: 10 * time.Millisecond, Clock: clk,
			Logger: slog.New(slog.NewTextHandler(&said, nil)),
		}, 1, "a=http://h:1")
		ended <- err
	}()
	for try := range 10 {
		wait := time.Duration(1<<min(try+1, 8)) * time.Second
		clk.WaitAlarms(1)
		clk.Advance(wait - 1)
		if clk.Alarms() != 1 {
			t.Fatalf("the pause after try %d is shorter than %v", try+1, wait)
		}
		clk.Advance(1)
	}
	clk.WaitAlarms(1)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "--discovery-endpoints="+nobody) {
		t.Errorf("called off: %v", err)
	}
	var pauses []string
	for line := range strings.Lines(said.String()) {
		_, pause, _ := strings.Cut(strings.TrimSpace(line), "pause=")
		pauses = append(pauses, pause)
	}
	if got, want := strings.Join(pauses, " "), "2s 4s 8s 16s 32s 1m4s 2m8s 4m16s 4m16s 4m16s 4m16s"; got != want {
		t.Errorf("pauses %s, want %s", got, want)
	}
}

func TestJoinRefusesBadFiles(t *testing.T) {
	_, err := discovery.Join(t.Context(), discovery.Options{Token: "t", Endpoints: []string{"h:1"}, CertFile: "/none.crt", KeyFile: "/none.key"}, 1, "a=http://h:1")
	if err == nil || !strings.Contains(err.Error(), "--discovery-cert=/none.crt") {
		t.Errorf("%v", err)
	}
}
