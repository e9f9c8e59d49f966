package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/bench/histogram"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/server"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// member is a running server and etcd's own client to it.
type member struct {
	endpoint string
	client   *clientv3.Client
	stop     func()
}

func startMember(t *testing.T) *member {
	t.Helper()
	cfg, err := config.Parse("engram", []string{
		"--name=one", "--data-dir=" + filepath.Join(t.TempDir(), "data"), "--listen-client-urls=http://127.0.0.1:0",
		"--advertise-client-urls=http://127.0.0.1:0", "--listen-peer-urls=http://127.0.0.1:0",
	}, nil)
	if err == nil {
		err = cfg.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	running, err := server.Start(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	m := &member{endpoint: running.ClientAddrs()[0]}
	m.stop = sync.OnceFunc(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := running.Wait(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(m.stop)
	if m.client, err = clientv3.New(clientv3.Config{Endpoints: []string{m.endpoint}, Logger: zap.NewNop()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.client.Close() })
	return m
}

// output is what a run wrote.
type output struct {
	code     int
	out, err string
}

func (m *member) run(args ...string) output { return m.runUntil(context.Background(), args...) }

func (m *member) runUntil(ctx context.Context, args ...string) output {
	var out, err bytes.Buffer
	code := run(ctx, append(args, "--endpoints="+m.endpoint), streams{out: &out, err: &err})
	return output{code, out.String(), err.String()}
}

// load is run with figures.
func (m *member) load(t *testing.T, args ...string) *Result {
	t.Helper()
	o := m.run(append(args, "--json")...)
	var r Result
	if err := json.Unmarshal([]byte(o.out), &r); err != nil || o.code != 0 {
		t.Fatalf("%q: exit %d, %v\n%s%s", args, o.code, err, o.out, o.err)
	}
	return &r
}

// next is what a watch tells next while a run goes on.
func next(t *testing.T, w clientv3.WatchChan, ended <-chan output) []*clientv3.Event {
	t.Helper()
	select {
	case r := <-w:
		if r.Err() != nil {
			t.Fatal(r.Err())
		}
		return r.Events
	case o := <-ended:
		t.Fatalf("it ended early: %+v", o)
		return nil
	}
}

func (m *member) get(t *testing.T, key string, opts ...clientv3.OpOption) *clientv3.GetResponse {
	t.Helper()
	r, err := m.client.Get(t.Context(), key, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestWorkloads runs each for a moment, or a longer one if the machine gives it nothing in that. It must do something, without errors, and leave
// nothing behind.
func TestWorkloads(t *testing.T) {
	m := startMember(t)
	for _, args := range [][]string{
		{"put"}, {"get"}, {"get", "--serializable"}, {"txn"}, {"txn", "--lease"}, {"list", "--keys=2000", "--value-size=100"}, {"list", "--keys=50", "--limit=0"},
		{"list-stream", "--keys=2000", "--limit=1500"}, {"watch", "--watchers=40"}, {"keep-alive", "--leases=30"}, {"kubernetes", "--nodes=5", "--speed=0"},
		{"put", "--rate=300", "--warmup=100ms"}, {"get", "--connections=1", "--streams=1", "--keys=10"}, {"put", "--value-size=200000", "--keys=3"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			r := new(Result)
			for moment := 300 * time.Millisecond; r.Operations == 0 && moment < 10*time.Second; moment *= 2 {
				r = m.load(t, append(slices.Clone(args), "--duration="+moment.String())...)
			}
			if r.Workload != args[0] || r.Operations == 0 || r.Throughput <= 0 || r.Latency == nil || r.Errors != 0 || r.Version == "" {
				t.Errorf("%+v", r)
			}
			if l := r.Latency; l != nil && (l.Min <= 0 || l.P50 < l.Min || l.P99 < l.P50 || l.Max < l.P999 || l.P999 < l.P99) {
				t.Errorf("latency %+v", l)
			}
			if r.Server == nil || !slices.Equal(r.Server.PIDs, []int{os.Getpid()}) || r.Server.CPUPerOperation <= 0 || r.Client.CPUPerOperation <= 0 || r.Server.ResidentBytes <= 0 {
				t.Errorf("server %+v, client %+v", r.Server, r.Client)
			}
			if r.BytesSent == 0 || r.BytesReceived == 0 {
				t.Errorf("bytes %d, %d", r.BytesSent, r.BytesReceived)
			}
			if left := m.get(t, "", clientv3.WithFromKey(), clientv3.WithCountOnly()); left.Count != 0 {
				t.Errorf("%d keys are left", left.Count)
			}
			if left, err := m.client.Leases(t.Context()); err != nil || len(left.Leases) != 0 {
				t.Errorf("%d leases are left, %v", len(left.Leases), err)
			}
		})
	}
}

// TestPutTotal counts by etcd's own client: a total of n makes n puts, each of which can be seen.
func TestPutTotal(t *testing.T) {
	m := startMember(t)
	const n = 700
	r := m.load(t, "put", fmt.Sprint("--total=", n), "--prefix=/mine/", "--keys=100", "--warmup=0", "--keep")
	if r.Operations != n || r.Kinds[0].Operations != n || r.Latency == nil {
		t.Errorf("told %+v", r)
	}
	all := m.get(t, "/mine/", clientv3.WithPrefix())
	var versions int64
	for _, kv := range all.Kvs {
		if !strings.HasSuffix(string(kv.Key), markerName) {
			versions += kv.Version
		}
	}
	if versions != n {
		t.Errorf("%d puts were told, %d are there", n, versions)
	}
	if all.Header.Revision != 1+1+n { // an empty store's, the marker, the puts
		t.Errorf("revision %d, want %d", all.Header.Revision, 2+n)
	}
	// The same prefix again, without --keep: all of it goes.
	m.load(t, "put", "--total=50", "--prefix=/mine/", "--keys=100")
	if left := m.get(t, "/mine/", clientv3.WithPrefix(), clientv3.WithCountOnly()); left.Count != 0 {
		t.Errorf("%d keys are left", left.Count)
	}
}

// TestWatchTotal: with n puts each watcher gets n events.
func TestWatchTotal(t *testing.T) {
	m := startMember(t)
	r := m.load(t, "watch", "--watchers=70", "--total=90", "--connections=3", "--writers=2", "--streams=3")
	if r.Operations != 90*70 || r.Kinds[eventKind].Operations != 90*70 || r.Kinds[putKind].Operations != 90 {
		t.Errorf("%d events of %d puts", r.Operations, r.Kinds[putKind].Operations)
	}
}

// TestOpenLoop: the rate is kept, and a server that stalls is seen by all that was due meanwhile.
func TestOpenLoop(t *testing.T) {
	m := startMember(t)
	r := m.load(t, "get", "--rate=500", "--total=400", "--keys=10", "--connections=2")
	if r.Operations != 400 || r.ElapsedSeconds < 0.75 || r.Settings.Rate != 500 {
		t.Errorf("%d operations at 500/s in %v s", r.Operations, r.ElapsedSeconds)
	}
}

// TestOpenLoopGoesOn: after all slots were busy for a while operations begin when they are due, not in bursts.
func TestOpenLoopGoesOn(t *testing.T) {
	m := startMember(t)
	const stall = 9 * lookAgain / 2 // ends between two looks of the pacer
	m.endpoint = standingStill(t, strings.TrimPrefix(m.endpoint, "http://"), 10, stall)
	const operations, due = 100, 10 * time.Millisecond
	r := m.load(t, "get", "--rate=100", fmt.Sprint("--total=", operations), "--keys=10", "--connections=1", "--streams=1")
	if l := r.Latency; l.Max < micros(stall/2) || l.P50 >= micros(due) {
		t.Errorf("half of the operations, one in %v, took %v us or more, and the longest, when the server stood still for %v, %v", due, l.P50, stall, l.Max)
	}
}

// standingStill passes on what comes for an address, and stands still once with what that sends.
func standingStill(t *testing.T, to string, after int, stall time.Duration) (address string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var open sync.WaitGroup
	t.Cleanup(func() { l.Close(); open.Wait() })
	pass := func(dst, src net.Conn, pieces int) {
		defer dst.Close()
		buf := make([]byte, 32<<10)
		for ; ; pieces++ {
			n, err := src.Read(buf)
			if err != nil {
				return
			}
			if pieces == after {
				time.Sleep(stall)
			}
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
	}
	open.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				client.Close()
				continue
			}
			open.Go(func() { pass(server, client, after+1) })
			open.Go(func() { pass(client, server, 0) })
		}
	})
	return "http://" + l.Addr().String()
}

// TestReuse: what was filled and kept is used again, and only if it fits.
func TestReuse(t *testing.T) {
	m := startMember(t)
	fill := []string{"--prefix=/f/", "--keys=350", "--value-size=50"}
	if o := m.run(append([]string{"fill"}, fill...)...); o.code != 0 {
		t.Fatal(o)
	}
	if n := m.get(t, "/f/", clientv3.WithPrefix(), clientv3.WithCountOnly()).Count; n != 351 { // and the marker
		t.Errorf("filled with %d keys", n)
	}
	before := m.get(t, "/f/").Header.Revision
	for _, w := range []string{"get", "list", "list-stream"} {
		m.load(t, append([]string{w, "--keep", "--total=20"}, fill...)...)
	}
	if after := m.get(t, "/f/").Header.Revision; after != before {
		t.Errorf("reading went from revision %d to %d", before, after)
	}
	m.load(t, append([]string{"txn", "--keep", "--total=200"}, fill...)...) // conflicts would be errors
	if after := m.get(t, "/f/").Header.Revision; after != before+200 {
		t.Errorf("200 updates went from revision %d to %d", before, after)
	}
	m.load(t, "get", "--prefix=/f/", "--keys=20", "--value-size=60", "--total=50") // would fail on values of 50 bytes
	if left := m.get(t, "/f/", clientv3.WithPrefix(), clientv3.WithCountOnly()).Count; left != 0 {
		t.Errorf("%d keys are left", left)
	}
}

// TestForeign: keys of others are not touched.
func TestForeign(t *testing.T) {
	m := startMember(t)
	for _, key := range []string{"/theirs/key", "/theirs", "/theirs0", "/engram-bench"} {
		if _, err := m.client.Put(t.Context(), key, "v"); err != nil {
			t.Fatal(err)
		}
	}
	for _, w := range []string{"put", "list", "fill", "kubernetes"} {
		if o := m.run(w, "--prefix=/theirs/", "--duration=10ms"); o.code != 1 || !strings.Contains(o.err, "holds 1 keys that engram bench did not write") {
			t.Errorf("%s: %+v", w, o)
		}
	}
	m.load(t, "put", "--total=10", "--prefix=/theirs/mine/")
	for _, key := range []string{"/theirs/key", "/theirs", "/theirs0", "/engram-bench"} {
		if r := m.get(t, key); len(r.Kvs) != 1 || r.Kvs[0].Version != 1 {
			t.Errorf("%s is now %v", key, r.Kvs)
		}
	}
}

// TestConflict: another's write to a key of ours is told, not passed over.
func TestConflict(t *testing.T) {
	m := startMember(t)
	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan output, 1)
	events := m.client.Watch(t.Context(), "/c/000000000")
	go func() {
		ended <- m.runUntil(ctx, "txn", "--prefix=/c/", "--keys=1", "--connections=1", "--streams=1", "--duration=10m", "--json")
	}()
	for updates := 0; updates < 2; { // the first event is of the filling
		updates += len(next(t, events, ended))
	}
	theirs, err := m.client.Put(t.Context(), "/c/000000000", "theirs")
	if err != nil {
		t.Fatal(err)
	}
	for last := int64(0); last <= theirs.Header.Revision; { // until ours go on after it
		for _, e := range next(t, events, ended) {
			last = e.Kv.ModRevision
		}
	}
	interrupt()
	o := <-ended
	var r Result
	if err := json.Unmarshal([]byte(o.out), &r); err != nil || r.Errors != 1 || r.ErrorCodes[0].Code != "WrongAnswer" || !strings.Contains(r.ErrorCodes[0].First, fmt.Sprint("revision ", theirs.Header.Revision)) {
		t.Errorf("%v: %+v", err, o)
	}
}

func TestWrongEndpoint(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	l.Close()
	m := &member{endpoint: closed}
	if o := m.run("put"); o.code != 1 || !strings.Contains(o.err, closed) || !strings.Contains(o.err, "refused") || o.out != "" {
		t.Errorf("%+v", o)
	}
	running := startMember(t)
	m.endpoint = running.endpoint + "," + closed // the second of two, with one connection
	if o := m.run("put", "--connections=1"); o.code != 1 || !strings.Contains(o.err, closed) {
		t.Errorf("%+v", o)
	}
}

func TestFlags(t *testing.T) {
	m := &member{endpoint: "127.0.0.1:1"}
	for args, want := range map[string]string{
		"put --connections=0":                       "--connections=0",
		"put --streams=-1":                          "--streams=-1",
		"put --duration=0s":                         "--duration=0s",
		"put --rate=-1":                             "--rate=-1",
		"put --total=-1":                            "--total=-1",
		"put --warmup=-1s":                          "--warmup=-1s",
		"put --key-size=3":                          "--key-size=3",
		"put --prefix=/p/ --keys=1000 --key-size=5": "from 6 to",
		"put --user=root":                           "without a password",
		"put --password=x":                          "--password goes with",
		"put --endpoints=ftp://a":                   `scheme "ftp"`,
		"put --cert=/nowhere.pem":                   "come together",
		"watch --value-size=3":                      "--value-size=3",
		"watch --watchers=0":                        "--watchers=0",
		"list --limit=-1":                           "--limit=-1",
		"kubernetes --nodes=0":                      "--nodes=0",
		"kubernetes --speed=-1":                     "--speed=-1",
		"keep-alive --leases=0":                     "--leases=0",
		"sing":                                      "unknown command",
		"put one":                                   "unknown command",
	} {
		if o := m.run(strings.Fields(args)...); o.code != 1 || !strings.Contains(o.err, want) {
			t.Errorf("%s: %+v, want %q", args, o, want)
		}
	}
	if o := m.run("put", "--connections=0", "--keys=0"); !strings.Contains(o.err, "--connections=0") || !strings.Contains(o.err, "--keys=0") {
		t.Errorf("not all at once: %+v", o)
	}
}

func TestAuth(t *testing.T) {
	m := startMember(t)
	ctx := t.Context()
	_, err1 := m.client.UserAdd(ctx, "root", "secret")
	_, err2 := m.client.UserGrantRole(ctx, "root", "root")
	_, err3 := m.client.UserAdd(ctx, "guest", "secret")
	_, err4 := m.client.AuthEnable(ctx)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		t.Fatal(err)
	}
	if o := m.run("put", "--total=10"); o.code != 1 || !strings.Contains(o.err, "give --user") {
		t.Errorf("without a user: %+v", o)
	}
	if o := m.run("put", "--total=10", "--user=root:wrong"); o.code != 1 || !strings.Contains(o.err, "cannot log in") {
		t.Errorf("wrong password: %+v", o)
	}
	if o := m.run("put", "--total=10", "--user=guest:secret"); o.code != 1 || !strings.Contains(o.err, "permission on --prefix") {
		t.Errorf("a user who may not: %+v", o)
	}
	for _, args := range [][]string{{"put"}, {"watch"}, {"kubernetes", "--speed=0"}, {"keep-alive"}} {
		if r := m.load(t, append(args, "--total=10", "--user=root", "--password=secret")...); r.Errors != 0 {
			t.Errorf("%v: %+v", args, r)
		}
	}
}

// TestKilled: a server that goes away in the midst is told as what happened, with the figures until then.
func TestKilled(t *testing.T) {
	for _, w := range []string{"put", "watch"} {
		t.Run(w, func(t *testing.T) {
			m := startMember(t)
			ended := make(chan output, 1)
			go func() { ended <- m.run(w, "--duration=10m", "--timeout=3s", "--prefix=/k/", "--json") }()
			for seen, w := 0, m.client.Watch(t.Context(), "/k/0", clientv3.WithPrefix()); seen < 500; {
				seen += len(next(t, w, ended))
			}
			m.stop()
			o := <-ended
			var r Result
			if err := json.Unmarshal([]byte(o.out), &r); err != nil || r.Operations == 0 {
				t.Errorf("%v: %+v", err, o)
			}
			if o.code != 1 || !strings.Contains(o.err, "lost the connection") && !strings.Contains(o.err, "a watch stream ended") || !strings.Contains(o.err, `ctl del --prefix "/k/"`) {
				t.Errorf("%+v", o)
			}
		})
	}
}

// TestInterrupt: the figures until then are told, and nothing is left.
func TestInterrupt(t *testing.T) {
	m := startMember(t)
	for w, first := range map[string]string{"put": "/i/0", "watch": "/i/0", "keep-alive": "/i/", "kubernetes": "/i/pods/", "fill": "/i/0"} {
		t.Run(w, func(t *testing.T) {
			ctx, interrupt := context.WithCancel(t.Context())
			ended := make(chan output, 1)
			go func() {
				ended <- m.runUntil(ctx, w, "--duration=10m", "--prefix=/i/", "--json", "--keep=false", "--keys=1000000")
			}()
			for w := m.client.Watch(t.Context(), first, clientv3.WithPrefix()); len(next(t, w, ended)) == 0; {
			}
			interrupt()
			o := <-ended
			if o.code != 1 || !strings.Contains(o.err, "interrupted") && !strings.Contains(o.err, "canceled") {
				t.Errorf("%+v", o)
			}
			if left := m.get(t, "", clientv3.WithFromKey(), clientv3.WithCountOnly()); left.Count != 0 {
				t.Errorf("%d keys are left", left.Count)
			}
			if left, err := m.client.Leases(t.Context()); err != nil || len(left.Leases) != 0 {
				t.Errorf("%d leases are left, %v", len(left.Leases), err)
			}
		})
	}
}

// TestOtherEndpoint: with another endpoint at hand the run goes on there.
func TestOtherEndpoint(t *testing.T) {
	first, second := startMember(t), startMember(t) // two stores: what counts is that calls go on
	m := &member{endpoint: first.endpoint + "," + second.endpoint}
	ended := make(chan output, 1)
	go func() {
		ended <- m.run("put", "--duration=2s", "--timeout=3s", "--prefix=/k/", "--connections=2", "--json", "--keep")
	}()
	for w := first.client.Watch(t.Context(), "/k/0", clientv3.WithPrefix()); len(next(t, w, ended)) == 0; {
	}
	first.stop()
	o := <-ended
	var r Result
	if err := json.Unmarshal([]byte(o.out), &r); err != nil || r.ElapsedSeconds < 1.5 || r.Operations == 0 {
		t.Errorf("%v: %+v", err, o)
	}
	for _, e := range r.ErrorCodes {
		if e.Code != codes.Unavailable.String() {
			t.Errorf("%+v", e)
		}
	}
	if strings.Contains(o.err, "lost the connection") {
		t.Errorf("%+v", o)
	}
}

// stalled is a server that never answers a Put.
type stalled struct{ pb.UnimplementedKVServer }

func (stalled) Range(context.Context, *pb.RangeRequest) (*pb.RangeResponse, error) {
	return &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 1}}, nil
}

func (stalled) Txn(context.Context, *pb.TxnRequest) (*pb.TxnResponse, error) {
	return &pb.TxnResponse{Header: &pb.ResponseHeader{Revision: 1}, Succeeded: true}, nil
}

func (stalled) Put(ctx context.Context, _ *pb.PutRequest) (*pb.PutResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// TestStalled: calls that are not answered end, and so does the run.
func TestStalled(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	pb.RegisterKVServer(g, stalled{})
	go g.Serve(l)
	defer g.Stop()
	m := &member{endpoint: l.Addr().String()}
	for _, how := range []string{"--rate=0", "--rate=1000"} {
		o := m.run("put", "--total=6", "--connections=2", "--streams=2", "--timeout=1s", "--json", how)
		var r Result
		if err := json.Unmarshal([]byte(o.out), &r); err != nil || r.Operations != 0 || r.Errors != 6 || len(r.ErrorCodes) != 1 ||
			r.ErrorCodes[0].Code != codes.DeadlineExceeded.String() || !strings.Contains(r.ErrorCodes[0].First, "no answer within 1s") {
			t.Errorf("%s: %v: %+v", how, err, o)
		}
		if o.code != 1 || !strings.Contains(o.err, "calls failed: 6 of 6") {
			t.Errorf("%s: %+v", how, o)
		}
	}
}

func TestEndpoints(t *testing.T) {
	for in, want := range map[string]endpoint{
		"a:1":           {network: "tcp", address: "a:1"},
		"a":             {network: "tcp", address: "a:2379"},
		"http://a:1":    {network: "tcp", address: "a:1"},
		"https://[::1]": {network: "tcp", address: "[::1]:2379", secure: true},
		"unix:///s/ock": {network: "unix", address: "/s/ock"},
	} {
		want.name = in
		if got, err := parseEndpoint(in, false); err != nil || got != want {
			t.Errorf("%s: %+v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "http://", "ftp://a:1", "http://a:1/path", "unix://"} {
		if got, err := parseEndpoint(in, false); err == nil {
			t.Errorf("%q is taken for %+v", in, got)
		}
	}
}

func TestKeys(t *testing.T) {
	o := &options{prefix: "/p/", keys: 1001}
	if err := o.checkKeys(); err != nil {
		t.Fatal(err)
	}
	if got := string(o.appendKey(nil, 1000)); got != "/p/000001000" {
		t.Errorf("got %q", got)
	}
	o = &options{prefix: "/p/", keys: 1001, keySize: 7}
	if err := o.checkKeys(); err != nil {
		t.Fatal(err)
	}
	if got := string(o.appendKey([]byte("x"), 999)); got != "x/p/0999" {
		t.Errorf("got %q", got)
	}
}

// TestShares: whatever the number of nodes, operations come in the shares of the rates.
func TestShares(t *testing.T) {
	for _, nodes := range []int{1, 100, 1000} {
		rates := kubeRates(nodes)
		var sum float64
		for _, v := range rates {
			sum += v
		}
		k := newKube(&runner{o: &options{nodes: nodes, prefix: "/"}}, 1)
		s := &slot{rng: rand.New(rand.NewPCG(1, 2))}
		pages := (nodes*podsPerNode + kubePage - 1) / kubePage
		var made [kubeWatch]int
		const n = 1_000_000
		for i, page := 0, 0; i < n; i++ {
			o, ok := k.next(s)
			if !ok {
				t.Fatal("no operation")
			}
			made[o.kind-1]++
			if o.kind-1 == kubeList { // the answer says whether there are more pages
				page = (page + 1) % pages
				k.all[0].listing = page > 0
			}
			k.over(s)
		}
		for kind, rate := range rates {
			want := rate / sum * n
			if off := math.Abs(float64(made[kind]) - want); off > 0.1*want+100 {
				t.Errorf("%d nodes: %d of %d operations are %q, want %.0f", nodes, made[kind], n, kubeKinds[1+kind], want)
			}
		}
	}
}

func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", file)
	if *rewrite {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s: got\n%s\nwant\n%s", path, got, want)
	}
}

// TestOutput holds the names of the JSON form, and the table.
func TestOutput(t *testing.T) {
	all := newStats(2)
	var h histogram.Histogram
	for i := range 1000 {
		h.Add(time.Duration(i+1) * time.Millisecond)
	}
	all.kinds[0].latency, all.kinds[1].events = h, 7
	all.kinds[0].failures.add(codes.Unavailable, 3, "gone")
	all.kinds[0].failures.add(codes.Unavailable, 1, "not the first")
	all.kinds[1].failures.add(codeWrong, 1, "odd")
	r := &Result{
		Workload: "put", Endpoints: []string{"a:1", "b:2"}, Version: "3.7.3", Prefix: "/p/",
		Settings: Settings{Connections: 2, Streams: 3, DurationSeconds: 10, WarmupSeconds: 1, Rate: 100, Keys: 4, KeySize: 12, ValueSize: 5, Limit: 6,
			Serializable: true, Watchers: 7, Leases: 8, Nodes: 9, Total: 10, Seed: 1},
		BytesSent: 1 << 20, BytesReceived: 5, LateP99: 12, Interrupted: true,
		Server: &Usage{PIDs: []int{1, 2}, CPUSeconds: 5, CPUPerOperation: 5000, ResidentBytes: 1 << 30}, Client: Usage{CPUSeconds: 1, CPUPerOperation: 1.5, ResidentBytes: 2},
	}
	r.add([]string{"put", "event"}, all, 10*time.Second)
	for file, asJSON := range map[string]bool{"result.json": true, "result.txt": false} {
		var out bytes.Buffer
		if err := r.write(&out, asJSON); err != nil {
			t.Fatal(err)
		}
		golden(t, file, out.Bytes())
	}
}

// TestProgress: on a terminal the line says what is going on, and goes.
func TestProgress(t *testing.T) {
	var out bytes.Buffer
	p := &progress{out: &out, live: true}
	all, recent := newStats(1), newStats(1)
	recent.kinds[0].latency.Add(2 * time.Millisecond)
	all.kinds[0].failures.add(codes.Unavailable, 3, "gone")
	p.show(&putting{}, recent, all, time.Second/2, 3*time.Second, extent{duration: 10 * time.Second})
	p.clear()
	p.clear()
	if want := clearLine + "  3 of 10 s  put: 2.00/s  p50 2.00ms  p99 2.00ms  errors 3" + clearLine; out.String() != want {
		t.Errorf("got %q, want %q", &out, want)
	}
}
