package grpcgo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/rpc"
)

// side is one server and a client of it.
type side struct {
	name string
	e    *engine
	s    *rpc.Server
	conn *grpc.ClientConn
	reg  *prometheus.Registry
}

// server is what both servers have in common.
type server interface {
	rpc.Registrar
	Serve(net.Listener) error
	Stop()
}

func newSide(t *testing.T, name string, build func(grpcserver.Options) server) *side {
	t.Helper()
	d := &side{name: name, e: newEngine(t), reg: prometheus.NewRegistry()}
	metrics := rpc.NewMetrics(true)
	if err := metrics.Register(d.reg); err != nil {
		t.Fatal(err)
	}
	d.s = rpc.New(rpc.Options{
		ClusterID: 1, MemberID: 2, Consensus: d.e, Views: d.e, Auth: d.e, Quota: d.e, Leases: leases{d.e},
		Cluster: cluster{}, Maintenance: upkeep{}, Watches: d.e.hub, Metrics: metrics, ElectionTimeout: 50 * time.Millisecond,
	})
	g := build(d.s.ServerOptions(grpcserver.Options{
		KeepaliveMinTime: 5 * time.Second, KeepaliveTime: 2 * time.Hour, KeepaliveTimeout: 20 * time.Second,
	}))
	d.s.Register(g)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := serve(g, l)
	d.conn, err = grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(64<<20)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = d.conn.Close()
		g.Stop()
		<-served
		d.e.close(t)
		d.s.Close()
	})
	return d
}

func serve(g server, l net.Listener) chan error {
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	return served
}

// said is what a client gets to see of a call, in words.
type said struct {
	strings.Builder
	header, trailer metadata.MD
}

func (w *said) message(m proto.Message) {
	text, err := prototext.MarshalOptions{}.Marshal(m)
	if err != nil {
		panic(err)
	}
	fmt.Fprintf(w, "%s\n", strings.ReplaceAll(string(text), "  ", " ")) // one blank or two is up to the build
}

func (w *said) end(err error) {
	switch {
	case errors.Is(err, io.EOF):
		fmt.Fprintln(w, "EOF")
	case err != nil:
		st := status.Convert(err)
		if st.Code() == codes.DeadlineExceeded { // the client's own, or the server's: who is first
			fmt.Fprintln(w, st.Code())
			return
		}
		fmt.Fprintf(w, "%v %q %v\n", st.Code(), st.Message(), st.Details())
	}
	fmt.Fprintf(w, "header %v trailer %v\n", w.header, w.trailer)
}

// step is a call that both sides are asked for.
type step struct {
	name string
	do   func(ctx context.Context, d *side, w *said) error
}

// unaryStep calls a method once.
func unaryStep(name, method string, req, resp proto.Message, options ...grpc.CallOption) step {
	return step{name, func(ctx context.Context, d *side, w *said) error {
		out := proto.Clone(resp)
		proto.Reset(out)
		err := d.conn.Invoke(ctx, method, req, out, append(options, grpc.Header(&w.header), grpc.Trailer(&w.trailer))...)
		if err == nil {
			w.message(out)
		}
		return err
	}}
}

// with sends metadata along.
func (s step) with(pairs ...string) step {
	return step{fmt.Sprintf("%s with %q", s.name, pairs), func(ctx context.Context, d *side, w *said) error {
		return s.do(metadata.AppendToOutgoingContext(ctx, pairs...), d, w)
	}}
}

// reached is a limit that passes, and before which a call has reached its handler on a busy machine, too.
const reached = time.Second

// within gives a call some time.
func (s step) within(limit time.Duration) step {
	return step{s.name + " within " + limit.String(), func(ctx context.Context, d *side, w *said) error {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		return s.do(ctx, d, w)
	}}
}

// set turns a knob of both engines.
func set(name string, f func(e *engine)) step {
	return step{name, func(_ context.Context, d *side, _ *said) error { f(d.e); return nil }}
}

// serverStream reads all answers to one request.
func serverStream(name, method string, req proto.Message, resp func() proto.Message) step {
	return streamStep(name, method, []proto.Message{req}, resp, -1)
}

// streamStep sends requests, and reads so many answers, or all if that is negative;
// unless the method takes many requests it has closed its half then.
func streamStep(name, method string, reqs []proto.Message, resp func() proto.Message, answers int) step {
	return step{name, func(ctx context.Context, d *side, w *said) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		s, err := d.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
		if err != nil {
			return err
		}
		for _, r := range reqs {
			if err := s.SendMsg(r); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
		}
		if answers < 0 || method != watchMethod && method != lease+"LeaseKeepAlive" {
			if err := s.CloseSend(); err != nil {
				return err
			}
		}
		for i := 0; i != answers; i++ {
			m := resp()
			if err := s.RecvMsg(m); err != nil {
				w.trailer = s.Trailer()
				return err
			}
			w.message(m)
		}
		w.header, _ = s.Header()
		return nil
	}}
}

// raw is a codec of bytes as they are.
type raw struct{}

func (raw) Name() string { return "proto" }

func (raw) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// rawStep sends bytes that may be no message.
func rawStep(method string, body []byte) step {
	return step{fmt.Sprintf("%s of %.20x", method, body), func(ctx context.Context, d *side, w *said) error {
		var out []byte
		err := d.conn.Invoke(ctx, method, body, &out, grpc.ForceCodecV2(raw{}), grpc.Header(&w.header), grpc.Trailer(&w.trailer))
		fmt.Fprintf(w, "%x\n", out)
		return err
	}}
}

const (
	kv, lease, maintenance = "/etcdserverpb.KV/", "/etcdserverpb.Lease/", "/etcdserverpb.Maintenance/"
	watchMethod            = "/etcdserverpb.Watch/Watch"
)

func get(key, end string, change ...func(*pb.RangeRequest)) step {
	r := &pb.RangeRequest{Key: []byte(key), RangeEnd: []byte(end)}
	for _, f := range change {
		f(r)
	}
	return unaryStep(fmt.Sprintf("get %q %q", key, end), kv+"Range", r, &pb.RangeResponse{})
}

func put(key string, value []byte, options ...grpc.CallOption) step {
	return unaryStep(fmt.Sprintf("put %q of %d", key, len(value)), kv+"Put", &pb.PutRequest{Key: []byte(key), Value: value, PrevKv: true}, &pb.PutResponse{}, options...)
}

func keepAlive(ids ...int64) (out []proto.Message) {
	for _, id := range ids {
		out = append(out, &pb.LeaseKeepAliveRequest{ID: id})
	}
	return out
}

func create(c *pb.WatchCreateRequest) proto.Message {
	return &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: c}}
}

func steps() []step {
	kept := func() proto.Message { return &pb.LeaseKeepAliveResponse{} }
	watched := func() proto.Message { return &pb.WatchResponse{} }
	chunk := func() proto.Message { return &pb.RangeStreamResponse{} }
	list := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}
	return []step{
		put("k/1", []byte("one")), put("k/1", []byte("two")), put("", nil), put("k/big", make([]byte, 300<<10)),
		put("k/zip", bytes.Repeat([]byte("ab"), 4000), grpc.UseCompressor(gzip.Name)),
		put("k/too", make([]byte, 1600<<10)), put("k/far-too", make([]byte, 3<<20)), put("k/far-too", make([]byte, 3<<20), grpc.UseCompressor(gzip.Name)),
		unaryStep("put with a lease", kv+"Put", &pb.PutRequest{Key: []byte("k"), Lease: 5}, &pb.PutResponse{}),
		get("k/1", ""), get("", ""), get("k", "l"), get("nothing", ""),
		get("k/1", "", func(r *pb.RangeRequest) { r.Revision = 99 }),
		get("k", "l", func(r *pb.RangeRequest) { r.CountOnly = true }), get("k", "l", func(r *pb.RangeRequest) { r.Limit = 1 }),
		unaryStep("zipped get", kv+"Range", list, &pb.RangeResponse{}, grpc.UseCompressor(gzip.Name)),
		unaryStep("txn", kv+"Txn", &pb.TxnRequest{
			Compare: []*pb.Compare{{Key: []byte("k/1"), Target: pb.Compare_VERSION, TargetUnion: &pb.Compare_Version{Version: 2}}},
			Success: []*pb.RequestOp{
				{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k/2"), Value: []byte("t")}}},
				{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k/1")}}},
			},
		}, &pb.TxnResponse{}),
		unaryStep("delete", kv+"DeleteRange", &pb.DeleteRangeRequest{Key: []byte("k/2"), PrevKv: true}, &pb.DeleteRangeResponse{}),
		unaryStep("compact", kv+"Compact", &pb.CompactionRequest{Revision: 3}, &pb.CompactionResponse{}),
		unaryStep("compact again", kv+"Compact", &pb.CompactionRequest{Revision: 2}, &pb.CompactionResponse{}),
		get("k/1", "", func(r *pb.RangeRequest) { r.Revision = 2 }),

		serverStream("range stream", kv+"RangeStream", list, chunk),
		serverStream("range stream of nothing", kv+"RangeStream", &pb.RangeRequest{Key: []byte("zzz")}, chunk),
		serverStream("range stream, sorted", kv+"RangeStream", &pb.RangeRequest{Key: []byte("k"), SortOrder: pb.RangeRequest_DESCEND}, chunk),
		serverStream("range stream without key", kv+"RangeStream", &pb.RangeRequest{}, chunk),

		unaryStep("grant", lease+"LeaseGrant", &pb.LeaseGrantRequest{ID: 5, TTL: 60}, &pb.LeaseGrantResponse{}),
		unaryStep("grant again", lease+"LeaseGrant", &pb.LeaseGrantRequest{ID: 5, TTL: 60}, &pb.LeaseGrantResponse{}),
		unaryStep("time to live", lease+"LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: 6}, &pb.LeaseTimeToLiveResponse{}),
		streamStep("keep alive", lease+"LeaseKeepAlive", keepAlive(5, 6, 5), kept, -1),
		streamStep("keep alive fails", lease+"LeaseKeepAlive", keepAlive(5, 14, 5), kept, -1),
		streamStep("keep alive of nothing", lease+"LeaseKeepAlive", nil, kept, -1),
		streamStep("keep alive, given up", lease+"LeaseKeepAlive", keepAlive(5, 6), kept, 2),
		unaryStep("revoke", lease+"LeaseRevoke", &pb.LeaseRevokeRequest{ID: 5}, &pb.LeaseRevokeResponse{}),

		streamStep("watch", watchMethod, []proto.Message{
			create(&pb.WatchCreateRequest{Key: []byte("k"), RangeEnd: []byte("l"), StartRevision: 4}),
		}, watched, 2),
		streamStep("watch the past", watchMethod, []proto.Message{create(&pb.WatchCreateRequest{Key: []byte("k"), StartRevision: 1})}, watched, 2),
		streamStep("watch an empty range", watchMethod, []proto.Message{create(&pb.WatchCreateRequest{Key: []byte("k"), RangeEnd: []byte("a")})}, watched, 1),
		streamStep("watch and cancel", watchMethod, []proto.Message{
			create(&pb.WatchCreateRequest{Key: []byte("zz"), WatchId: 7}),
			&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: 7}}},
		}, watched, 2),
		streamStep("watch nonsense", watchMethod, []proto.Message{&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: nil}}}, watched, 1),

		unaryStep("members", "/etcdserverpb.Cluster/MemberList", &pb.MemberListRequest{}, &pb.MemberListResponse{}),
		unaryStep("status", maintenance+"Status", &pb.StatusRequest{}, &pb.StatusResponse{}),
		unaryStep("defragment", maintenance+"Defragment", &pb.DefragmentRequest{}, &pb.DefragmentResponse{}),
		unaryStep("health", "/grpc.health.v1.Health/Check", &healthpb.HealthCheckRequest{}, &healthpb.HealthCheckResponse{}),
		unaryStep("health of another", "/grpc.health.v1.Health/Check", &healthpb.HealthCheckRequest{Service: "x"}, &healthpb.HealthCheckResponse{}),
		streamStep("health watch", "/grpc.health.v1.Health/Watch", []proto.Message{&healthpb.HealthCheckRequest{}}, func() proto.Message { return &healthpb.HealthCheckResponse{} }, 1),

		unaryStep("no such method", kv+"Swap", list, &pb.RangeResponse{}),
		unaryStep("no such method of Lease", lease+"Borrow", list, &pb.RangeResponse{}),
		unaryStep("no such service", "/a.b/C", list, &pb.RangeResponse{}),
		unaryStep("no method", "/a.b", list, &pb.RangeResponse{}),
		unaryStep("a stream's name", watchMethod, list, &pb.RangeResponse{}),
		rawStep(kv+"Put", []byte{0x0a, 200}), rawStep(kv+"Range", []byte{0xff}), rawStep(kv+"Txn", []byte{0x0a, 1, 0xff}), rawStep(kv+"Put", nil),
		rawStep(kv+"RangeStream", []byte{0x0a, 200}), rawStep(lease+"LeaseKeepAlive", []byte{8}),
		rawStep(watchMethod, []byte{0x0a, 200}), rawStep(kv+"Put", []byte{0x0a, 1, 'r', 0x12, 1, 'v', 0xf8, 0x3f, 1}),

		get("k/1", "").with("hasleader", "true"), get("k/1", "").with("client-api-version", "3.7", "client-api-version", "3.6"),
		get("k/1", "").with("some-bin", "\x00\xff", "X-Upper", "1", "empty", ""), get("k/1", "").with("long", strings.Repeat("x", 8000)),
		set("no leader", func(e *engine) { e.leaderless.Store(true) }),
		get("k/1", "").with("hasleader", "true"), get("k/1", "").with("hasleader", "yes"),
		unaryStep("status without leader", maintenance+"Status", &pb.StatusRequest{}, &pb.StatusResponse{}).with("hasleader", "true"),
		streamStep("watch without leader", watchMethod, []proto.Message{create(&pb.WatchCreateRequest{Key: []byte("k")})}, watched, -1).with("hasleader", "true"),
		streamStep("keep alive without leader", lease+"LeaseKeepAlive", keepAlive(13), kept, 1).with("hasleader", "true"),
		set("a leader", func(e *engine) { e.leaderless.Store(false) }),
		set("a learner", func(e *engine) { e.learner.Store(true) }),
		get("k/1", ""), get("k/1", "", func(r *pb.RangeRequest) { r.Serializable = true }), put("k/1", nil),
		streamStep("watch on a learner", watchMethod, []proto.Message{create(&pb.WatchCreateRequest{Key: []byte("k")})}, watched, 1),
		unaryStep("members of a learner", "/etcdserverpb.Cluster/MemberList", &pb.MemberListRequest{}, &pb.MemberListResponse{}),
		set("a voter", func(e *engine) { e.learner.Store(false) }),
		set("auth", func(e *engine) { e.authOn.Store(true) }),
		get("k/1", ""), get("k/1", "").with("token", "k"), get("k/1", "").with("token", "other"), get("k/1", "").with("authorization", "Bearer k"),
		get("k/1", "").with("token", "bad"), serverStream("range stream", kv+"RangeStream", list, chunk).with("token", "x"),
		streamStep("watch", watchMethod, []proto.Message{create(&pb.WatchCreateRequest{Key: []byte("k")})}, watched, 1).with("token", "bad"),
		streamStep("keep alive", lease+"LeaseKeepAlive", keepAlive(5), kept, 1).with("token", "bad"),
		unaryStep("status", maintenance+"Status", &pb.StatusRequest{}, &pb.StatusResponse{}),
		set("no auth", func(e *engine) { e.authOn.Store(false) }),

		set("held reads", func(e *engine) { e.held.Store(true) }),
		get("k/1", "").within(reached), serverStream("range stream", kv+"RangeStream", list, chunk).within(reached),
		unaryStep("members", "/etcdserverpb.Cluster/MemberList", &pb.MemberListRequest{Linearizable: true}, &pb.MemberListResponse{}).within(reached),
		streamStep("watch", watchMethod, []proto.Message{create(&pb.WatchCreateRequest{Key: []byte("zz")})}, watched, -1).within(reached),
		get("k/1", "").within(0),
		{"keep alive, cut while in hand", func(ctx context.Context, d *side, w *said) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			s, err := pb.NewLeaseClient(d.conn).LeaseKeepAlive(ctx)
			if err != nil {
				return err
			}
			if err := s.Send(&pb.LeaseKeepAliveRequest{ID: 13}); err != nil {
				return err
			}
			renewal := <-d.e.calls
			cancel()
			<-renewal.Done()
			fmt.Fprintln(w, renewal.Err())
			return nil
		}},
	}
}

// TestSameAsGRPCGo asks both servers the same, one call after the other.
func TestSameAsGRPCGo(t *testing.T) {
	sides := []*side{
		newSide(t, "grpc-go", func(o grpcserver.Options) server { return New(o) }),
		newSide(t, "grpcserver", func(o grpcserver.Options) server { return grpcserver.New(o) }),
	}
	for _, s := range steps() {
		var said [2]said
		for i, d := range sides {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			said[i].end(s.do(ctx, d, &said[i]))
			if ctx.Err() != nil {
				t.Errorf("%s: %s gives no answer:\n%s", s.name, d.name, &said[i])
			}
			cancel()
			drain(d.e)
		}
		if a, b := said[0].String(), said[1].String(); a != b {
			t.Errorf("%s:\n%.2000s\nfrom %s, and from %s:\n%.2000s", s.name, a, sides[0].name, sides[1].name, b)
		}
	}
	compareMetrics(t, sides)
}

// drain forgets renewals that a step left.
func drain(e *engine) {
	for {
		select {
		case <-e.calls:
		default:
			return
		}
	}
}

// uncompared are metrics of times, and of what an early end leaves to chance.
var uncompared = []string{"grpc_server_handling_seconds", "etcd_server_request_duration_seconds", "etcd_server_range_duration_seconds"}

// unseen are the calls of steps that grpc-go ends before it calls a handler, so
// that nobody counts them: those whose message is too large.
var unseen = map[string]int{
	"grpc_server_started_total grpc_method=Put grpc_service=etcdserverpb.KV grpc_type=unary":                             2,
	"grpc_server_handled_total grpc_code=ResourceExhausted grpc_method=Put grpc_service=etcdserverpb.KV grpc_type=unary": 2,
}

// compareMetrics waits until both servers have counted the same.
func compareMetrics(t *testing.T, sides []*side) {
	t.Helper()
	var counted [2]map[string]float64
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // calls that clients gave up end a little later
		for i, d := range sides {
			counted[i] = counts(t, d.reg)
		}
		for name, n := range unseen {
			counted[0][name] += float64(n)
		}
		if maps.Equal(counted[0], counted[1]) || time.Now().After(end) {
			break
		}
	}
	for _, name := range slices.Sorted(maps.Keys(counted[0])) {
		if a, b := counted[0][name], counted[1][name]; a != b {
			t.Errorf("%s is %v with %s, %v with %s", name, a, sides[0].name, b, sides[1].name)
		}
	}
	for name := range counted[1] {
		if _, ok := counted[0][name]; !ok {
			t.Errorf("%s has %s alone", sides[1].name, name)
		}
	}
}

func counts(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		if slices.Contains(uncompared, f.GetName()) {
			continue
		}
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				value := l.GetValue()
				if value == codes.DeadlineExceeded.String() { // or the client's cancel is first
					value = codes.Canceled.String()
				}
				name += " " + l.GetName() + "=" + value
			}
			out[name] += m.GetCounter().GetValue()
		}
	}
	return out
}
