package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/test/edge/member"
	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
)

const within = 30 * time.Second // until what shall come has come

// eventually waits until f is nil.
func eventually(t testing.TB, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s, after %v: %v", what, within, err)
		}
		time.Sleep(poll)
	}
}

// scaled is a number for the long version, and a tenth of it for the short one.
func scaled(n int) int {
	if member.Long() {
		return n
	}
	return n / 10
}

// both runs a test in cleartext, and over TLS with a certificate of the client.
func both(t *testing.T, m *member.Member, f func(t *testing.T, dial func(...func(*clientv3.Config)) *clientv3.Client)) {
	t.Run("cleartext", func(t *testing.T) {
		f(t, func(change ...func(*clientv3.Config)) *clientv3.Client { return m.Dial(t, change...) })
	})
	t.Run("TLS", func(t *testing.T) {
		f(t, func(change ...func(*clientv3.Config)) *clientv3.Client { return m.DialTLS(t, "somebody", change...) })
	})
}

// TestCancel gives calls up at any moment. Nothing of them stays, and their connection goes on.
func TestCancel(t *testing.T) {
	m := member.Start(t, 0)
	both(t, m, func(t *testing.T, dial func(...func(*clientv3.Config)) *clientv3.Client) {
		client := dial()
		for i := range 100 {
			_, err := client.Put(t.Context(), fmt.Sprintf("cancel/%d", i), strings.Repeat("v", 10<<10))
			check(t, err)
		}
		before := streams(t, m)
		var work sync.WaitGroup
		slots := make(chan struct{}, 100)
		for range scaled(5000) {
			slots <- struct{}{}
			work.Go(func() {
				defer func() { <-slots }()
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(3*time.Millisecond))
				defer cancel()
				var err error
				if rand.IntN(2) == 0 {
					_, err = client.Get(ctx, "cancel/", clientv3.WithPrefix())
				} else {
					_, err = client.Put(ctx, "cancel/put", "v")
				}
				if code := status.Code(err); err != nil && ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) && code != codes.DeadlineExceeded && code != codes.Canceled {
					t.Errorf("a call that was given up: %v", err)
				}
			})
		}
		for range scaled(500) {
			ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(t.Context(), "stream", fmt.Sprint(rand.Uint64()))) // of its own
			w := client.Watch(ctx, "cancel/", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
			<-w
			cancel()
			for range w {
			}
		}
		work.Wait()
		got, err := client.Get(t.Context(), "cancel/", clientv3.WithPrefix())
		check(t, err)
		if got.Count < 100 {
			t.Errorf("%d keys are there", got.Count)
		}
		if member.Engram() {
			eventually(t, "what was given up is forgotten", func() error {
				if now := streams(t, m); now > before {
					return fmt.Errorf("%v streams are open, there were %v", now, before)
				}
				return nil
			})
		}
	})
}

// streams are the open calls of a member.
func streams(t testing.TB, m *member.Member) float64 {
	all, err := m.Metrics(t.Context())
	check(t, err)
	return all["engram_grpc_streams"]
}

// TestLostQuorum has a member that cannot answer: what clients set as a limit holds, and what the server sets.
func TestLostQuorum(t *testing.T) {
	t.Parallel() // it waits more than it works
	c, endpoints := three(t)
	leader, err := c.Leader(t.Context())
	check(t, err)
	client, err := c.Dial(leader.ClientURL)
	check(t, err)
	defer client.Close()
	watch := client.Watch(clientv3.WithRequireLeader(t.Context()), "k", clientv3.WithCreatedNotify())
	<-watch
	for _, m := range c.Members() {
		if m != leader {
			check(t, m.Pause())
		}
	}
	if len(endpoints) != 3 {
		t.Fatalf("%d endpoints", len(endpoints))
	}
	const serverLimit = 7 * time.Second // what the client sets ends before
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err = client.Put(ctx, "k", "v")
	if took := time.Since(began); status.Code(err) != codes.DeadlineExceeded && !errors.Is(err, context.DeadlineExceeded) || took >= serverLimit {
		t.Errorf("a put with a deadline: %v after %v", err, took)
	}
	ctx, cancel = context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, cancel)
	began = time.Now()
	_, err = client.Put(ctx, "k", "v")
	if took := time.Since(began); status.Code(err) != codes.Canceled && !errors.Is(err, context.Canceled) || took >= serverLimit {
		t.Errorf("a put that is given up: %v after %v", err, took)
	}
	if member.Long() { // it waits for the server's own limit
		_, err = client.Put(t.Context(), "k", "v")
		if !errors.Is(err, rpctypes.ErrTimeout) && !errors.Is(err, rpctypes.ErrNoLeader) && !errors.Is(err, rpctypes.ErrTimeoutDueToConnectionLost) && !errors.Is(err, rpctypes.ErrTimeoutDueToLeaderFail) {
			t.Errorf("a put without a limit: %v", err)
		}
	}
	select {
	case r, ok := <-watch:
		if ok && !errors.Is(r.Err(), rpctypes.ErrNoLeader) {
			t.Errorf("a watch that requires a leader: %v", r.Err())
		}
	case <-time.After(within):
		t.Errorf("a watch that requires a leader has not ended")
	}
	for _, m := range c.Members() {
		if m != leader {
			check(t, m.Continue())
		}
	}
	eventually(t, "the cluster serves again", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := client.Put(ctx, "k", "v")
		return err
	})
}

// three starts three members.
func three(t *testing.T) (*cluster.Cluster, []string) {
	t.Helper()
	p, err := cluster.Build(cluster.Chosen())
	check(t, err)
	c := cluster.New(t.TempDir())
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.Logs())
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	check(t, c.Start(t.Context(), p, p, p))
	return c, c.Endpoints()
}

// TestOneMemberDies has a client of three members lose one: once to kill -9, and once to a stop that says goodbye first.
func TestOneMemberDies(t *testing.T) {
	t.Parallel() // it waits more than it works
	c, endpoints := three(t)
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 2 * time.Second, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 20 * time.Second, Logger: zap.NewNop()})
	check(t, err)
	defer client.Close()
	follower := func() *cluster.Member {
		leader, err := c.Leader(t.Context())
		check(t, err)
		for _, m := range c.Members() {
			if m != leader {
				return m
			}
		}
		return nil
	}
	for _, f := range []struct {
		name string
		end  func(*cluster.Member) error
		lost bool // puts may be lost, which the client must not repeat by itself
	}{{"SIGKILL", (*cluster.Member).Kill, true}, {"SIGTERM", (*cluster.Member).Stop, false}} {
		t.Run(f.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			var work sync.WaitGroup
			var mu sync.Mutex
			var reads, writes, lost int
			for i := range 8 {
				work.Go(func() {
					for ctx.Err() == nil {
						call, stop := context.WithTimeout(t.Context(), within)
						_, perr := client.Put(call, fmt.Sprintf("k%d", i), "v")
						_, gerr := client.Get(call, fmt.Sprintf("k%d", i))
						stop()
						mu.Lock()
						reads++
						writes++
						if perr != nil {
							lost++
							if code := status.Code(perr); !f.lost || code != codes.Unavailable {
								t.Errorf("put: %v", perr)
							}
						}
						if gerr != nil {
							t.Errorf("get, which the client may repeat: %v", gerr)
						}
						mu.Unlock()
					}
				})
			}
			calls := func(n int) {
				mu.Lock()
				from := writes
				mu.Unlock()
				eventually(t, "calls go on", func() error {
					mu.Lock()
					defer mu.Unlock()
					if writes < from+n {
						return fmt.Errorf("%d of %d", writes-from, n)
					}
					return nil
				})
			}
			calls(100)
			m := follower()
			check(t, f.end(m))
			calls(200)
			check(t, m.Restart(t.Context()))
			calls(200)
			cancel()
			work.Wait()
			t.Logf("%d reads, %d writes, of which %d were lost", reads, writes, lost)
			if lost > 3*8 {
				t.Errorf("%d writes were lost, by 8 callers of one member that died", lost)
			}
		})
	}
}

// TestLargeValues writes and reads what is as large as may be, and larger.
func TestLargeValues(t *testing.T) {
	m := member.Start(t, 0)
	const limit = 1536 << 10 // --max-request-bytes
	both(t, m, func(t *testing.T, dial func(...func(*clientv3.Config)) *clientv3.Client) {
		client := dial(func(c *clientv3.Config) { c.MaxCallSendMsgSize, c.MaxCallRecvMsgSize = 64<<20, 256<<20 })
		put := func(n int) error {
			_, err := client.Put(t.Context(), fmt.Sprintf("large/%d", n), strings.Repeat("v", n))
			return err
		}
		for _, n := range []int{1, 16<<10 - 40, 16 << 10, 64 << 10, 1 << 20, limit - 4096} {
			check(t, put(n))
			got, err := client.Get(t.Context(), fmt.Sprintf("large/%d", n))
			check(t, err)
			if len(got.Kvs) != 1 || string(got.Kvs[0].Value) != strings.Repeat("v", n) {
				t.Error(broken.Errorf("a value of %d bytes did not come back", n))
			}
		}
		if err := put(limit + 1); !errors.Is(err, rpctypes.ErrRequestTooLarge) {
			t.Errorf("a value of %d bytes: %v, want %v", limit+1, err, rpctypes.ErrRequestTooLarge)
		}
		for _, n := range []int{limit + 600<<10, 30 << 20} {
			if err := put(n); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "received message larger than max") {
				t.Errorf("a value of %d bytes: %v, want ResourceExhausted by the server", n, err)
			}
		}
		for i := range scaled(100) {
			_, err := client.Put(t.Context(), fmt.Sprintf("list/%03d", i), strings.Repeat("v", 1<<20))
			check(t, err)
		}
		got, err := client.Get(t.Context(), "list/", clientv3.WithPrefix())
		check(t, err)
		if len(got.Kvs) != scaled(100) {
			t.Errorf("a list of %d MiB came with %d keys", scaled(100), len(got.Kvs))
		}
		small := dial(func(c *clientv3.Config) { c.MaxCallRecvMsgSize = 1 << 20 })
		if _, err := small.Get(t.Context(), "list/", clientv3.WithPrefix()); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("a list longer than the client takes: %v", err)
		}
		if _, err := small.Get(t.Context(), "large/1"); err != nil {
			t.Errorf("after that: %v", err)
		}
	})
}

// TestGzip compresses what is sent and asks for compressed answers.
func TestGzip(t *testing.T) {
	m := member.Start(t, 0)
	both(t, m, func(t *testing.T, dial func(...func(*clientv3.Config)) *clientv3.Client) {
		client := dial(member.Option(grpc.WithDefaultCallOptions(grpc.UseCompressor(gzip.Name))))
		watch := client.Watch(t.Context(), "zip/", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
		<-watch
		value := strings.Repeat("compress me ", 50_000)
		for i := range 10 {
			_, err := client.Put(t.Context(), fmt.Sprintf("zip/%d", i), value)
			check(t, err)
		}
		got, err := client.Get(t.Context(), "zip/", clientv3.WithPrefix())
		check(t, err)
		for _, kv := range got.Kvs {
			if string(kv.Value) != value {
				t.Errorf("%s came back with %d bytes", kv.Key, len(kv.Value))
			}
		}
		for events := 0; events < 10; {
			r := <-watch
			check(t, r.Err())
			events += len(r.Events)
		}
		if len(got.Kvs) != 10 {
			t.Errorf("%d keys came back", len(got.Kvs))
		}
	})
}

// TestWatchers has thousands of watchers, on one stream and on many.
func TestWatchers(t *testing.T) {
	m := member.Start(t, 0)
	watchers, own := scaled(5000), scaled(1000)
	both(t, m, func(t *testing.T, dial func(...func(*clientv3.Config)) *clientv3.Client) {
		client := dial()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var all []clientv3.WatchChan
		for i := range watchers {
			c := ctx
			if i < own { // a stream of its own
				c = metadata.AppendToOutgoingContext(ctx, "stream", fmt.Sprint(i))
			}
			all = append(all, client.Watch(c, fmt.Sprintf("watch/%d", i%10), clientv3.WithCreatedNotify()))
		}
		for _, w := range all {
			if r := <-w; r.Err() != nil || !r.Created {
				t.Fatalf("a watcher was not created: %v", r.Err())
			}
		}
		began := time.Now()
		const rounds = 5
		for range rounds {
			for i := range 10 {
				_, err := client.Put(t.Context(), fmt.Sprintf("watch/%d", i), "v")
				check(t, err)
			}
		}
		for i, w := range all {
			for seen := 0; seen < rounds; {
				select {
				case r, ok := <-w:
					if !ok || r.Err() != nil {
						t.Fatalf("watcher %d ended: %v", i, r.Err())
					}
					seen += len(r.Events)
				case <-time.After(within):
					t.Fatalf("watcher %d saw %d of %d events", i, seen, rounds)
				}
			}
		}
		t.Logf("%d watchers on %d streams saw %d events each within %v", watchers, own+1, rounds, time.Since(began).Round(time.Millisecond))
	})
}

// TestLeases keeps leases alive for many times their length, on one stream, and then no more.
func TestLeases(t *testing.T) {
	t.Parallel() // it waits more than it works
	m := member.Start(t, 0)
	client := m.Dial(t)
	const ttl = 5 // the client sends after a third of it, and has the rest on a busy machine
	ctx, cancel := context.WithCancel(t.Context())
	leases := scaled(1000)
	var kept sync.WaitGroup
	for i := range leases {
		lease, err := client.Grant(t.Context(), ttl)
		check(t, err)
		_, err = client.Put(t.Context(), fmt.Sprintf("lease/%d", i), "v", clientv3.WithLease(lease.ID))
		check(t, err)
		alive, err := client.KeepAlive(ctx, lease.ID)
		check(t, err)
		kept.Go(func() {
			for r := range alive {
				if r.TTL != ttl {
					t.Errorf("lease %x has %d s left", r.ID, r.TTL)
				}
			}
			if ctx.Err() == nil {
				t.Errorf("lease %x was lost", lease.ID)
			}
		})
	}
	lengths := 2
	if member.Long() {
		lengths = 4
	}
	<-time.After(time.Duration(lengths) * ttl * time.Second) // it is this time that they shall outlive
	got, err := client.Get(t.Context(), "lease/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	check(t, err)
	if got.Count != int64(leases) {
		t.Errorf("%d of %d leases are left after %d times their length", got.Count, leases, lengths)
	}
	cancel()
	kept.Wait()
	eventually(t, "leases that nobody keeps expire", func() error {
		got, err := client.Get(t.Context(), "lease/", clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err == nil && got.Count > 0 {
			err = fmt.Errorf("%d are left", got.Count)
		}
		return err
	})
}

// TestKeepAlive has the official client ping as often as it can, for longer than it takes to be sent away: it is not.
func TestKeepAlive(t *testing.T) {
	if !member.Long() {
		t.Skip("the official client pings each ten seconds at most; ENGRAM_CI=1 waits for it")
	}
	t.Parallel() // it waits more than it works
	m := member.Start(t, 0)
	client := m.Dial(t, func(c *clientv3.Config) {
		c.DialKeepAliveTime, c.DialKeepAliveTimeout = 10*time.Second, 20*time.Second
	})
	quiet := m.Dial(t, func(c *clientv3.Config) { // without a call
		c.DialKeepAliveTime, c.DialKeepAliveTimeout = 10*time.Second, 20*time.Second
	})
	_, err := quiet.Get(t.Context(), "k")
	check(t, err)
	watch := client.Watch(t.Context(), "k", clientv3.WithCreatedNotify())
	<-watch
	connections := func() float64 {
		all, err := m.Metrics(t.Context())
		check(t, err)
		return all["engram_grpc_connections_total"]
	}
	before := connections()
	<-time.After(45 * time.Second) // four pings
	_, err = client.Put(t.Context(), "k", "v")
	check(t, err)
	if r := <-watch; r.Err() != nil || len(r.Events) != 1 {
		t.Errorf("the watch: %v", r)
	}
	_, err = quiet.Get(t.Context(), "k")
	check(t, err)
	// The scrapes may be on connections of their own, and only these.
	if opened := connections() - before; opened > 1 {
		t.Errorf("%v connections were opened meanwhile, the clients have theirs", opened)
	}
}

//lint:ignore SA1019 programs of before still ask for it
var block = grpc.WithBlock()

// TestDial connects as programs do that want to know at once.
func TestDial(t *testing.T) {
	m := member.Start(t, 0)
	both(t, m, func(t *testing.T, dial func(...func(*clientv3.Config)) *clientv3.Client) {
		client := dial(member.Option(block), func(c *clientv3.Config) { c.DialTimeout = 10 * time.Second })
		_, err := client.Put(t.Context(), "k", "v")
		check(t, err)
	})
	port, err := cluster.FreePort()
	check(t, err)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"127.0.0.1:" + port, m.Clear}, DialTimeout: 10 * time.Second, Logger: zap.NewNop(), DialOptions: []grpc.DialOption{block}})
	check(t, err)
	defer client.Close()
	if _, err := client.Put(t.Context(), "k", "v"); err != nil {
		t.Errorf("one endpoint of two is nobody's: %v", err)
	}
}

// TestMetadata sends what calls carry beside their requests.
func TestMetadata(t *testing.T) {
	m := member.Start(t, 0)
	both(t, m, func(t *testing.T, dial func(...func(*clientv3.Config)) *clientv3.Client) {
		client := dial()
		ctx := metadata.AppendToOutgoingContext(clientv3.WithRequireLeader(t.Context()), "x-bin", string([]byte{0, 1, 2, 255}), "long", strings.Repeat("v", 8000), "twice", "a", "twice", "b")
		for range 3 {
			_, err := client.Put(ctx, "k", "v")
			check(t, err)
		}
		watch := client.Watch(ctx, "k", clientv3.WithRev(1))
		if r := <-watch; r.Err() != nil || len(r.Events) == 0 {
			t.Errorf("a watch with metadata: %v", r)
		}
	})
	all, err := m.Metrics(t.Context())
	check(t, err)
	counted := false
	for name, n := range all {
		counted = counted || strings.HasPrefix(name, `etcd_server_client_requests_total{client_api_version="3.7`) && n > 0
	}
	if !counted {
		t.Errorf("etcd_server_client_requests_total does not tell the version that clients say")
	}
}

// TestUsers has clients with a name: the token that they get travels with their calls, and a name that a certificate gives
// needs none.
func TestUsers(t *testing.T) {
	m := member.Start(t, 0, member.ClientCertAuth)
	root := m.DialTLS(t, "root")
	for _, err := range []error{
		second(root.RoleAdd(t.Context(), "reader")), second(root.RoleGrantPermission(t.Context(), "reader", "open/", clientv3.GetPrefixRangeEnd("open/"), clientv3.PermissionType(clientv3.PermRead))),
		second(root.UserAdd(t.Context(), "root", "secret")), second(root.UserGrantRole(t.Context(), "root", "root")),
		second(root.UserAdd(t.Context(), "somebody", "word")), second(root.UserGrantRole(t.Context(), "somebody", "reader")),
		second(root.AuthEnable(t.Context())),
	} {
		check(t, err)
	}
	_, err := root.Put(t.Context(), "open/k", "v")
	check(t, err)
	for name, client := range map[string]*clientv3.Client{
		"a certificate": m.DialTLS(t, "somebody"),
		"a password":    m.Dial(t, func(c *clientv3.Config) { c.Username, c.Password = "somebody", "word" }),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := client.Get(t.Context(), "open/k")
			check(t, err)
			if len(got.Kvs) != 1 {
				t.Errorf("%d keys", len(got.Kvs))
			}
			if _, err := client.Put(t.Context(), "open/k", "v"); !errors.Is(err, rpctypes.ErrPermissionDenied) {
				t.Errorf("a put: %v, want %v", err, rpctypes.ErrPermissionDenied)
			}
			if r := <-client.Watch(t.Context(), "open/k", clientv3.WithRev(1)); r.Err() != nil || len(r.Events) == 0 {
				t.Errorf("a watch: %v", r)
			}
		})
	}
	if _, err := clientv3.New(clientv3.Config{Endpoints: []string{m.ClientURL}, Username: "somebody", Password: "wrong", Logger: zap.NewNop()}); !errors.Is(err, rpctypes.ErrAuthFailed) {
		t.Errorf("a wrong password: %v, want %v", err, rpctypes.ErrAuthFailed)
	}
	nobody := m.DialTLS(t, "nobody")
	if _, err := nobody.Get(t.Context(), "open/k"); err == nil {
		t.Error("a certificate of nobody reads")
	}
}

func second[T any](_ T, err error) error { return err }

// TestSnapshotStream takes a long stream of messages, to its end and not.
func TestSnapshotStream(t *testing.T) {
	m := member.Start(t, 0)
	both(t, m, func(t *testing.T, dial func(...func(*clientv3.Config)) *clientv3.Client) {
		client := dial()
		for i := range scaled(200) {
			_, err := client.Put(t.Context(), fmt.Sprintf("snapshot/%d", i), strings.Repeat("v", 100<<10))
			check(t, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		part, err := client.Snapshot(ctx)
		check(t, err)
		_, err = io.ReadFull(part, make([]byte, 100<<10))
		check(t, err)
		cancel()
		part.Close()
		all, err := client.Snapshot(t.Context())
		check(t, err)
		n, err := io.Copy(io.Discard, all)
		check(t, err)
		all.Close()
		if least := int64(scaled(200)) * 100 << 10; n < least {
			t.Errorf("a snapshot of %d bytes, want %d and more", n, least)
		}
	})
}
