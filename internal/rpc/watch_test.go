package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/internal/watch"
)

// watchMember is a member that only watches: a store that the test writes to
// directly, a hub, and the services over a real connection.
type watchMember struct {
	t      *testing.T
	disk   *storage.Store
	store  *mvcc.Store
	root   atomic.Pointer[mvcc.Root]
	hub    *watch.Hub
	server *Server
	edge   *grpcserver.Server
	conn   *grpc.ClientConn
	addr   string

	mu      sync.Mutex
	applied uint64

	leader  atomic.Uint64
	auth    atomic.Bool
	learner atomic.Bool
}

// The parts of the engine that watch streams need; the others are nil.
type (
	watchConsensus struct {
		Consensus
		*watchMember
	}
	watchViews struct{ *watchMember }
	watchView  struct {
		View
		kv *mvcc.View
	}
	watchAuth struct {
		Auth
		m *watchMember
	}
	watchCluster struct{ Cluster }
)

func (c watchConsensus) Leader() uint64 { return c.leader.Load() }
func (c watchConsensus) Learner() bool  { return c.learner.Load() }
func (c watchConsensus) Term() uint64   { return 5 }

func (v watchViews) View() View    { return watchView{kv: v.store.View(*v.root.Load())} }
func (v watchView) KV() *mvcc.View { return v.kv }
func (v watchView) Release()       { v.kv.Release() }
func (v watchView) MayRead(u Identity, key, end []byte) error {
	if u.User != "" && !strings.HasPrefix(string(key), u.User) {
		return rpctypes.ErrGRPCPermissionDenied
	}
	return nil
}

func (a watchAuth) Enabled() bool     { return a.m.auth.Load() }
func (a watchAuth) Revision() uint64  { return 1 }
func (a watchAuth) ClientCerts() bool { return false }
func (a watchAuth) Identify(token string) (Identity, error) {
	if user, ok := strings.CutPrefix(token, "token-of-"); ok {
		return Identity{User: user}, nil
	}
	return Identity{}, rpctypes.ErrGRPCInvalidAuthToken
}

func (watchCluster) Capable() bool { return true }

func startWatchMember(t *testing.T, o Options, ho watch.Options) *watchMember {
	m := &watchMember{t: t}
	m.leader.Store(1)
	var err error
	if m.disk, err = storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "db"}); err != nil {
		t.Fatal(err)
	}
	if m.store, err = mvcc.Open(mvcc.Options{Storage: m.disk}); err != nil {
		t.Fatal(err)
	}
	root := m.store.Root()
	m.root.Store(&root)
	ho.Source = watch.StoreSource{Store: m.store, Root: func() mvcc.Root { return *m.root.Load() }}
	ho.ClusterID, ho.MemberID = 10, 20
	ho.Term = func() uint64 { return 5 }
	ho.Metrics = watch.NewMetrics()
	m.hub = watch.New(ho)
	ctx, stop := context.WithCancel(context.Background())
	hubDone := make(chan error, 1)
	go func() { hubDone <- m.hub.Run(ctx) }()

	o.ClusterID, o.MemberID = 10, 20
	o.Consensus, o.Views, o.Auth, o.Cluster = watchConsensus{watchMember: m}, watchViews{m}, watchAuth{m: m}, watchCluster{}
	o.Watches, o.WatchMetrics, o.Metrics = m.hub, ho.Metrics, NewMetrics(false)
	m.server = New(o)
	g := grpcserver.New(m.server.ServerOptions(grpcserver.Options{}))
	m.server.Register(g)
	m.edge = g
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	if m.conn, err = grpc.NewClient(m.addr, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = m.conn.Close()
		g.Stop()
		<-served
		m.server.Close()
		stop()
		if err := errors.Join(<-hubDone, m.store.Close(), m.disk.Close()); err != nil {
			t.Error(err)
		}
		// All that streams held has been given back.
		if used := m.streamBytes(); used != 0 {
			t.Errorf("streams still hold %d bytes", used)
		}
	})
	return m
}

func (m *watchMember) write(fill func(w *mvcc.Writer)) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.disk.NewBatch()
	w := m.store.NewWriter(b)
	fill(w)
	m.applied++
	w.Seal(m.applied, 5)
	if err := m.disk.Commit(b); err != nil {
		panic(err)
	}
	w.Committed()
	root := m.store.Root()
	m.root.Store(&root)
	m.hub.Publish(root, w.Events())
	return root.Revision()
}

func (m *watchMember) put(key, value string) int64 {
	return m.write(func(w *mvcc.Writer) {
		w.Begin()
		w.Put([]byte(key), []byte(value), 0)
		w.End()
	})
}

func (m *watchMember) compact(rev int64) {
	m.write(func(w *mvcc.Writer) {
		if err := w.Compact(rev); err != nil {
			panic(err)
		}
	})
}

// streamBytes is what all streams have queued.
func (m *watchMember) streamBytes() int {
	return m.edge.StreamBytes()
}

// watchCall is a client's side of one stream.
type watchCall struct {
	t *testing.T
	pb.Watch_WatchClient
	cancel context.CancelFunc
}

func (m *watchMember) open(md ...string) *watchCall {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(m.t.Context(), md...), 20*time.Second)
	stream, err := pb.NewWatchClient(m.conn).Watch(ctx)
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(cancel)
	return &watchCall{m.t, stream, cancel}
}

func (c *watchCall) create(r *pb.WatchCreateRequest) {
	c.t.Helper()
	c.request(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: r}})
}

func (c *watchCall) cancelWatch(id int64) {
	c.t.Helper()
	c.request(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: id}}})
}

func (c *watchCall) progress() {
	c.t.Helper()
	c.request(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}})
}

func (c *watchCall) request(r *pb.WatchRequest) {
	c.t.Helper()
	if err := c.Send(r); err != nil {
		c.t.Fatal(err)
	}
}

func (c *watchCall) next() *pb.WatchResponse {
	c.t.Helper()
	r, err := c.Recv()
	if err != nil {
		c.t.Fatal(err)
	}
	return r
}

// expect reads one response and compares it, in words.
func (c *watchCall) expect(want string) {
	c.t.Helper()
	r := c.next()
	if r.Header.ClusterId != 10 || r.Header.MemberId != 20 || r.Header.RaftTerm != 5 {
		c.t.Fatalf("header %v", r.Header)
	}
	got := fmt.Sprintf("%d at %d", r.WatchId, r.Header.Revision)
	for _, flag := range []struct {
		set  bool
		name string
	}{{r.Created, " created"}, {r.Canceled, " canceled"}, {r.Fragment, " fragment"}} {
		if flag.set {
			got += flag.name
		}
	}
	if r.CompactRevision != 0 {
		got += fmt.Sprintf(" compacted %d", r.CompactRevision)
	}
	if r.CancelReason != "" {
		got += ": " + r.CancelReason
	}
	for _, e := range r.Events {
		v := e.Kv.Value
		if len(v) > 8 {
			v = v[:8]
		}
		got += fmt.Sprintf(" %s %s=%s", e.Type, e.Kv.Key, v)
		if e.PrevKv != nil {
			got += fmt.Sprintf("(%s)", e.PrevKv.Value)
		}
	}
	if got != want {
		c.t.Fatalf("got  %s\nwant %s", got, want)
	}
}

func TestWatchStream(t *testing.T) {
	m := startWatchMember(t, Options{}, watch.Options{FragmentBytes: 2000})
	m.put("a", "1")
	c := m.open()
	c.create(&pb.WatchCreateRequest{Key: []byte("a"), PrevKv: true})
	c.expect("0 at 2 created")
	m.put("a", "2")
	c.expect("0 at 3 PUT a=2(1)")
	c.create(&pb.WatchCreateRequest{Key: []byte("a"), WatchId: 7, StartRevision: 2, Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NODELETE}})
	c.expect("7 at 3 created")
	c.expect("7 at 3 PUT a=1 PUT a=2")
	c.create(&pb.WatchCreateRequest{Key: []byte("a"), WatchId: 7})
	c.expect("-1 at 3 created canceled: mvcc: duplicate watch ID provided on the WatchStream")
	c.create(&pb.WatchCreateRequest{Key: []byte("b"), RangeEnd: []byte("a")})
	c.expect("-1 at 3 created canceled: mvcc: watcher range is empty")
	c.progress()
	c.expect("-1 at 3")
	c.cancelWatch(0)
	c.expect("0 at 3 canceled")
	c.cancelWatch(0) // no answer
	m.write(func(w *mvcc.Writer) {
		w.Begin()
		w.DeleteRange([]byte("a"), nil, nil)
		w.End()
	})
	m.put("a", "4")
	c.expect("7 at 5 PUT a=4")
	m.compact(4)
	c.create(&pb.WatchCreateRequest{Key: []byte("a"), StartRevision: 3})
	c.expect("1 at 5 created")
	c.expect("1 at 0 canceled compacted 4")
	c.create(&pb.WatchCreateRequest{Key: []byte("x"), RangeEnd: []byte{0}, Fragment: true, Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}})
	c.expect("2 at 5 created")
	c.create(&pb.WatchCreateRequest{Key: []byte("x"), RangeEnd: []byte{0}, Fragment: true})
	c.expect("3 at 5 created")
	m.write(func(w *mvcc.Writer) {
		w.Begin()
		for _, k := range []string{"x", "y", "z"} {
			w.Put([]byte(k), []byte(strings.Repeat("v", 900)), 0)
		}
		w.End()
	})
	c.expect("3 at 6 fragment PUT x=vvvvvvvv PUT y=vvvvvvvv")
	c.expect("3 at 6 PUT z=vvvvvvvv")
	// A request of a later version is ignored, and the stream goes on when the
	// client has nothing more to ask, as it does behind the JSON gateway.
	c.request(&pb.WatchRequest{})
	if err := c.CloseSend(); err != nil {
		t.Fatal(err)
	}
	m.put("x", "1")
	c.expect("3 at 7 PUT x=1")
	c.cancel()
	if _, err := c.Recv(); status.Code(err) != codes.Canceled {
		t.Fatalf("after the client left: %v", err)
	}
}

// A large message that the client does not take stays counted till it is gone:
// each stream may hold one.
func TestUnreadEventStaysCounted(t *testing.T) {
	m := startWatchMember(t, Options{}, watch.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := pb.NewWatchClient(m.conn).Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	create := &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("x")}}
	if err := stream.Send(&pb.WatchRequest{RequestUnion: create}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	m.put("x", strings.Repeat("v", 1<<20))
	for tries := 0; m.streamBytes() < 1<<20; tries++ {
		if tries == 5000 {
			t.Fatal("the event was never counted, or no longer is")
		}
		time.Sleep(time.Millisecond)
	}
	for range 100 { // what the connection has taken is not gone
		time.Sleep(time.Millisecond)
		if used := m.streamBytes(); used < 1<<20 {
			t.Fatalf("%d bytes are counted while the client reads nothing", used)
		}
	}
	cancel()
	for m.streamBytes() > 0 {
		time.Sleep(time.Millisecond)
	}
}

// rawCodec sends and receives bytes as they are.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// What cannot be decoded is refused in the words of grpc-go and protobuf, which
// differ between unary calls and streams.
func TestMalformed(t *testing.T) {
	m := startWatchMember(t, Options{}, watch.Options{})
	desc := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	for method, words := range map[string]string{
		pb.KV_Range_FullMethodName:             "grpc: error unmarshalling request: ",
		pb.KV_Put_FullMethodName:               "grpc: error unmarshalling request: ",
		pb.KV_DeleteRange_FullMethodName:       "grpc: error unmarshalling request: ",
		pb.KV_Txn_FullMethodName:               "grpc: error unmarshalling request: ",
		pb.KV_Compact_FullMethodName:           "grpc: error unmarshalling request: ",
		pb.KV_RangeStream_FullMethodName:       "grpc: failed to unmarshal the received message: ",
		pb.Watch_Watch_FullMethodName:          "grpc: failed to unmarshal the received message: ",
		pb.Lease_LeaseKeepAlive_FullMethodName: "grpc: failed to unmarshal the received message: ",
	} {
		stream, err := m.conn.NewStream(t.Context(), desc, method, grpc.ForceCodecV2(rawCodec{}))
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.SendMsg([]byte{0x0a, 200}); err != nil {
			t.Fatal(err)
		}
		err = stream.RecvMsg(new([]byte))
		// Protobuf puts one space or another after its name, lest anybody compare.
		got := strings.ReplaceAll(status.Convert(err).Message(), "\u00a0", " ")
		if want := words + "proto: cannot parse invalid wire-format data"; status.Code(err) != codes.Internal || got != want {
			t.Errorf("%s: %v, want %q", method, err, want)
		}
	}
}

func TestWatchAuth(t *testing.T) {
	m := startWatchMember(t, Options{}, watch.Options{})
	m.auth.Store(true)
	c := m.open("token", "token-of-alice")
	c.create(&pb.WatchCreateRequest{Key: []byte("bob")})
	c.expect("-1 at 1 created canceled: rpc error: code = PermissionDenied desc = etcdserver: permission denied")
	c.create(&pb.WatchCreateRequest{Key: []byte("alice")})
	c.expect("0 at 1 created")
	c = m.open("token", "stale")
	c.create(&pb.WatchCreateRequest{Key: []byte("bob")})
	c.expect("-1 at 1 created canceled: rpc error: code = Unauthenticated desc = etcdserver: invalid auth token")
}

func TestWatchOnLearner(t *testing.T) {
	m := startWatchMember(t, Options{}, watch.Options{})
	m.learner.Store(true)
	if _, err := m.open().Recv(); status.Convert(err).Message() != "etcdserver: rpc not supported for learner" {
		t.Fatalf("got %v", err)
	}
}

func TestWatchWithoutLeader(t *testing.T) {
	fake := clock.NewFake(time.Unix(0, 0))
	m := startWatchMember(t, Options{Clock: fake, ElectionTimeout: time.Second}, watch.Options{})
	asks, other, stalled := m.open("hasleader", "true"), m.open(), m.open("hasleader", "true")
	for _, c := range []*watchCall{asks, other, stalled} {
		c.create(&pb.WatchCreateRequest{Key: []byte("a")})
		c.expect("0 at 1 created")
	}
	m.put("a", strings.Repeat("x", 1<<20)) // more than flow control lets through to one that does not read
	asks.expect("0 at 2 PUT a=xxxxxxxx")
	other.expect("0 at 2 PUT a=xxxxxxxx")
	m.leader.Store(0)
	// The fake clock drops rings that nobody has taken yet, so turn it till it is noticed.
	ended := make(chan error, 1)
	go func() {
		_, err := asks.Recv()
		ended <- err
	}()
	var err error
	for err == nil {
		fake.Advance(time.Second)
		select {
		case err = <-ended:
		case <-time.After(time.Millisecond):
		}
	}
	if status.Code(err) != codes.Unavailable || status.Convert(err).Message() != "etcdserver: no leader" {
		t.Fatalf("got %v", err)
	}
	for err = nil; err == nil; {
		_, err = stalled.Recv()
	}
	if status.Convert(err).Message() != "etcdserver: no leader" {
		t.Fatalf("the stream that was not read ended with %v", err)
	}
	m.leader.Store(1)
	m.put("a", "1")
	other.expect("0 at 3 PUT a=1")
	again := m.open("hasleader", "true")
	again.create(&pb.WatchCreateRequest{Key: []byte("a")})
	again.expect("0 at 3 created")
}

// TestWatchSlowClient has one client that does not read for long.
func TestWatchSlowClient(t *testing.T) {
	m := startWatchMember(t, Options{StreamBytes: 64 << 10, StreamsBytes: 256 << 10}, watch.Options{RecentBytes: 100 << 10, ChunkBytes: 32 << 10, BatchBytes: 16 << 10})
	slow, fast := m.open(), m.open()
	for _, c := range []*watchCall{slow, fast} {
		c.create(&pb.WatchCreateRequest{Key: []byte("k"), RangeEnd: []byte("l"), PrevKv: true})
		c.expect("0 at 1 created")
	}
	const puts = 1500
	value := strings.Repeat("v", 1000)
	read := func(c *watchCall) {
		t.Helper()
		for want := int64(2); want < puts+2; {
			for _, e := range c.next().Events {
				if e.Kv.ModRevision != want {
					t.Fatalf("got revision %d, want %d", e.Kv.ModRevision, want)
				}
				if (e.PrevKv == nil) != (e.Kv.Version == 1) {
					t.Fatalf("revision %d of version %d has the previous value %v", want, e.Kv.Version, e.PrevKv)
				}
				want++
			}
		}
	}
	for i := range puts {
		m.put(fmt.Sprintf("k%d", i%7), value)
	}
	read(fast)
	// What was read is no longer counted a moment later.
	for tries := 0; m.streamBytes() > 64<<10; tries++ {
		if tries == 5000 {
			t.Fatalf("streams hold %d bytes", m.streamBytes())
		}
		time.Sleep(time.Millisecond)
	}
	read(slow)
	slow.progress()
	slow.expect(fmt.Sprintf("-1 at %d", puts+1))
}

// TestWatchUnreadStreamIsCut has a client that reads nothing while it holds all
// memory that streams may have.
func TestWatchUnreadStreamIsCut(t *testing.T) {
	fake := clock.NewFake(time.Unix(0, 0))
	m := startWatchMember(t, Options{Clock: fake, StreamsBytes: 64 << 10}, watch.Options{})
	unread, other := m.open(), m.open()
	unread.create(&pb.WatchCreateRequest{Key: []byte("a")})
	unread.expect("0 at 1 created")
	m.put("a", strings.Repeat("x", 1<<20))
	m.put("a", strings.Repeat("y", 1<<20))
	for m.streamBytes() < 1<<20 {
		runtime.Gosched()
	}
	// Nothing is left for the other stream, not even for its first answer.
	other.create(&pb.WatchCreateRequest{Key: []byte("b")})
	got := make(chan error, 1)
	go func() {
		_, err := other.Recv()
		got <- err
	}()
	for waiting := true; waiting; {
		fake.Advance(time.Second)
		select {
		case err := <-got:
			if err != nil {
				t.Fatal(err)
			}
			waiting = false
		case <-time.After(time.Millisecond):
		}
	}
	var err error
	for err == nil {
		_, err = unread.Recv()
	}
	if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "was not read for too long") {
		t.Fatalf("got %v", err)
	}
	m.put("b", "1")
	other.expect("0 at 4 PUT b=1")
}

// TestWatchAsksWithoutReading has a client that sends requests and reads no
// answers: it is no longer read from, and nothing grows.
func TestWatchAsksWithoutReading(t *testing.T) {
	m := startWatchMember(t, Options{StreamMessages: 16}, watch.Options{})
	c := m.open()
	sent := make(chan int, 1)
	const requests = 20000
	go func() {
		n := 0
		for ; n < requests; n++ {
			if c.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("a"), StartRevision: -1}}}) != nil {
				break
			}
		}
		sent <- n
	}()
	for range requests {
		c.expect("-1 at 1 created canceled: etcdserver: mvcc: required revision has been compacted")
	}
	if n := <-sent; n != requests {
		t.Fatalf("only %d requests were sent", n)
	}
}

// TestWatchClient runs etcd's own client.
func TestWatchClient(t *testing.T) {
	m := startWatchMember(t, Options{}, watch.Options{ProgressInterval: 100 * time.Millisecond})
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{m.addr}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(clientv3.WithRequireLeader(t.Context()), 20*time.Second)
	defer cancel()
	for i := range 50 {
		m.put(fmt.Sprintf("p/%02d", i%10), fmt.Sprint(i))
	}
	events := client.Watch(ctx, "p/", clientv3.WithPrefix(), clientv3.WithRev(2), clientv3.WithPrevKV(), clientv3.WithProgressNotify())
	for want := int64(2); want < 52; {
		r := <-events
		if r.Err() != nil {
			t.Fatal(r.Err())
		}
		for _, e := range r.Events {
			if e.Kv.ModRevision != want || e.Type != mvccpb.Event_PUT || e.IsModify() != (e.PrevKv != nil) {
				t.Fatalf("want revision %d, got %v", want, e)
			}
			want++
		}
	}
	for notices := 0; notices < 2; {
		r := <-events
		if r.Err() != nil {
			t.Fatal(r.Err())
		}
		if r.IsProgressNotify() && r.Header.Revision == 51 {
			notices++
		}
	}
	if err := client.RequestProgress(ctx); err != nil {
		t.Fatal(err)
	}
	for r := range events {
		if r.Err() != nil {
			t.Fatal(r.Err())
		}
		if r.IsProgressNotify() {
			break
		}
	}
	m.compact(20)
	for r := range client.Watch(ctx, "p/", clientv3.WithPrefix(), clientv3.WithRev(10)) {
		if err := r.Err(); err != nil {
			if !errors.Is(err, rpctypes.ErrCompacted) || r.CompactRevision != 20 {
				t.Fatalf("got %v, compact revision %d", err, r.CompactRevision)
			}
			return
		}
	}
	t.Fatal("a compacted watch ended without an error")
}
