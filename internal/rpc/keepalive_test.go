package rpc

import (
	"context"
	"errors"
	"io"
	"runtime"
	"strings"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// lateLeases hand each renewal to the test, which says what becomes of it.
type lateLeases struct {
	Leases
	renewals chan lateRenewal
}

type lateRenewal struct {
	ctx  context.Context
	who  Identity
	id   int64
	done func(int64, error)
}

func (l lateLeases) Renew(ctx context.Context, u Identity, id int64, done func(int64, error)) {
	l.renewals <- lateRenewal{ctx, u, id, done}
}

func startLate(t *testing.T, change func(*Options)) (*served, lateLeases) {
	t.Helper()
	late := lateLeases{renewals: make(chan lateRenewal, 16)}
	m := start(t, func(o *Options) {
		o.Leases = late
		if change != nil {
			change(o)
		}
	})
	return m, late
}

func (m *served) keepAlive(ctx context.Context, t *testing.T, ids ...int64) pb.Lease_LeaseKeepAliveClient {
	t.Helper()
	stream := must[pb.Lease_LeaseKeepAliveClient](t)(pb.NewLeaseClient(m.conn).LeaseKeepAlive(ctx))
	for _, id := range ids {
		if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: id}); err != nil {
			t.Fatal(err)
		}
	}
	return stream
}

// TestKeepAliveLate has renewals that take their time: one is in hand, answers
// keep the order, and the header is that of the beginning.
func TestKeepAliveLate(t *testing.T) {
	m, late := startLate(t, nil)
	m.put(t, "a", "1")
	stream := m.keepAlive(t.Context(), t, 5, 6, -7)
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	for i, id := range []int64{5, 6, -7} {
		r := <-late.renewals
		if r.id != id {
			t.Fatalf("renewal of %d, want %d", r.id, id)
		}
		m.put(t, "a", "2") // takes a while, in which no other renewal may begin
		if n := len(late.renewals); n != 0 {
			t.Fatalf("%d more renewals are in hand", n)
		}
		go r.done(10*id, nil)
		got := must[*pb.LeaseKeepAliveResponse](t)(stream.Recv())
		want := &pb.LeaseKeepAliveResponse{Header: headerAt(int64(i + 2)), ID: id, TTL: 10 * id}
		// The next renewal begins only now, so its header has the put before it.
		if got.ID != id || got.TTL != want.TTL || !proto.Equal(got.Header, want.Header) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last answer: %v", err)
	}
}

// TestKeepAliveFails ends the stream with an error, after the answers before it.
func TestKeepAliveFails(t *testing.T) {
	m, late := startLate(t, nil)
	for _, want := range []error{rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCTimeout} {
		stream := m.keepAlive(t.Context(), t, 1, 2, 3)
		r := <-late.renewals
		r.done(60, nil)
		r = <-late.renewals
		go r.done(0, want)
		if got := must[*pb.LeaseKeepAliveResponse](t)(stream.Recv()); got.ID != 1 || got.TTL != 60 {
			t.Errorf("got %v", got)
		}
		_, err := stream.Recv()
		wantError(t, err, want)
	}
	if n := len(late.renewals); n != 0 {
		t.Errorf("%d renewals began after a failure", n)
	}
}

// TestKeepAliveCut has streams that end while a renewal is in hand. Its callback
// comes afterwards and does no harm.
func TestKeepAliveCut(t *testing.T) {
	m, late := startLate(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	stream := m.keepAlive(ctx, t, 1)
	r := <-late.renewals
	cancel()
	<-r.ctx.Done()
	if _, err := stream.Recv(); status.Code(err) != codes.Canceled {
		t.Errorf("cut by the client: %v", err)
	}
	r.done(60, nil)

	stream = m.keepAlive(t.Context(), t, 2, 3)
	r = <-late.renewals
	m.s.EndStreams()
	_, err := stream.Recv()
	wantError(t, err, rpctypes.ErrGRPCStopped)
	<-r.ctx.Done()
	r.done(0, errors.New("too late to tell anybody"))
	if n := len(late.renewals); n != 0 {
		t.Errorf("%d renewals began after the end", n)
	}
}

// TestKeepAliveUnread has a client that asks and reads no answers: it is no
// longer read from, nothing grows, and no answer is lost.
func TestKeepAliveUnread(t *testing.T) {
	const requests = 12_000
	m := start(t, func(o *Options) { o.StreamMessages = 16 })
	must[*pb.LeaseGrantResponse](t)(pb.NewLeaseClient(m.conn).LeaseGrant(t.Context(), &pb.LeaseGrantRequest{ID: 9, TTL: 60}))
	conn := m.dialNarrow(t)
	defer conn.Close()
	stream := must[pb.Lease_LeaseKeepAliveClient](t)(pb.NewLeaseClient(conn).LeaseKeepAlive(t.Context()))
	sent := make(chan error, 1)
	go func() {
		for i := range requests {
			if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(i%2 + 8)}); err != nil {
				sent <- err
				return
			}
		}
		sent <- stream.CloseSend()
	}()
	counted := func(name string) float64 {
		for _, f := range must[[]*metricFamily](t)(gather(m.reg)) {
			if f.name == name {
				return f.values["grpc_method=LeaseKeepAlive grpc_service=etcdserverpb.Lease grpc_type=bidi_stream"]
			}
		}
		return 0
	}
	queued := func() bool {
		used := m.edge.StreamBytes()
		if used > 16*64 {
			t.Fatalf("%d bytes are queued", used)
		}
		return used > 0
	}
	// The windows of the connection fill up, and then an answer stays queued. What
	// was read is answered, queued, or the one in hand.
	for looks := 0; looks < 100; runtime.Gosched() {
		if !queued() {
			continue
		}
		looks++
		read := counted("grpc_server_msg_received_total")
		if written := counted("grpc_server_msg_sent_total"); read > written+16+2 {
			t.Fatalf("%v requests were read, %v answers written", read, written)
		}
	}
	for i := range requests {
		got := must[*pb.LeaseKeepAliveResponse](t)(stream.Recv())
		if want := int64(i%2) * 60; got.ID != int64(i%2+8) || got.TTL != want {
			t.Fatalf("answer %d: %v", i, got)
		}
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last answer: %v", err)
	}
}

// TestKeepAliveMany renews ten thousand leases over one stream.
func TestKeepAliveMany(t *testing.T) {
	const n = 10_000
	m := start(t, nil)
	leases := pb.NewLeaseClient(m.conn)
	var grants sync.WaitGroup
	for g := range 20 {
		grants.Go(func() {
			for id := g + 1; id <= n; id += 20 {
				if _, err := leases.LeaseGrant(t.Context(), &pb.LeaseGrantRequest{ID: int64(id), TTL: int64(id + 10)}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	grants.Wait()
	stream := m.keepAlive(t.Context(), t)
	go func() {
		for id := range n + 1 { // 0 is no lease
			if stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(id)}) != nil {
				return
			}
		}
		_ = stream.CloseSend()
	}()
	for id := range int64(n + 1) {
		ttl := id + 10
		if id == 0 {
			ttl = 0
		}
		if got := must[*pb.LeaseKeepAliveResponse](t)(stream.Recv()); got.ID != id || got.TTL != ttl || !proto.Equal(got.Header, headerAt(1)) {
			t.Fatalf("lease %d of TTL %d: %v", id, ttl, got)
		}
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last answer: %v", err)
	}
}

// noTokens is an Auth to whom no token is good.
type noTokens struct{ Auth }

func (noTokens) Enabled() bool { return true }
func (noTokens) Identify(string) (Identity, error) {
	return Identity{}, rpctypes.ErrGRPCInvalidAuthToken
}

func TestKeepAliveAuth(t *testing.T) {
	m, late := startLate(t, nil)
	m.authOn.Store(true)
	m.keepAlive(metadata.AppendToOutgoingContext(t.Context(), "token", "ann"), t, 1)
	if r := <-late.renewals; r.who.User != "ann" {
		t.Errorf("renewal by %+v", r.who)
	} else {
		r.done(1, nil)
	}
	m, late = startLate(t, func(o *Options) { o.Auth = noTokens{} })
	stream := m.keepAlive(metadata.AppendToOutgoingContext(t.Context(), "token", "ann"), t, 1)
	_, err := stream.Recv()
	wantError(t, err, rpctypes.ErrGRPCInvalidAuthToken)
	if n := len(late.renewals); n != 0 {
		t.Errorf("%d renewals", n)
	}
}

// TestKeepAliveBytes compares the fast decoder and the encoder with the
// generated types.
func TestKeepAliveBytes(t *testing.T) {
	field := func(n protowire.Number, v uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, n, protowire.VarintType), v)
	}
	for _, raw := range [][]byte{
		nil, field(1, 5), field(1, 1<<63|7), field(1, 0), append(field(1, 1), field(1, 2)...), append(field(1, 3), field(9, 1)...),
		append(field(9, 1), field(1, 4)...), {8, 0x85, 0}, {8}, {8, 0xff}, {10, 1, 'x'}, {0}, {7}, append(field(1, 6), 0x0a, 5),
	} {
		var want pb.LeaseKeepAliveRequest
		wantErr := proto.Unmarshal(raw, &want)
		id, err := parseKeepAlive(raw)
		if (err != nil) != (wantErr != nil) || err == nil && id != want.ID {
			t.Errorf("%x: %d, %v; want %d, %v", raw, id, err, want.ID, wantErr)
		}
		if err != nil && (status.Code(err) != codes.Internal || !strings.HasPrefix(status.Convert(err).Message(), "grpc: failed to unmarshal the received message: ")) {
			t.Errorf("%x: %v", raw, err)
		}
	}
	for _, m := range []*pb.LeaseKeepAliveResponse{
		{Header: &pb.ResponseHeader{}},
		{Header: &pb.ResponseHeader{ClusterId: 1 << 63, MemberId: 7, Revision: 1 << 40, RaftTerm: 3}, ID: -5, TTL: 9_000_000_000},
	} {
		h := m.Header
		raw := encodeKeepAlive(header{h.ClusterId, h.MemberId, h.Revision, h.RaftTerm}, m.ID, m.TTL)
		if want := must[[]byte](t)(proto.Marshal(m)); string(raw) != string(want) {
			t.Errorf("got %x, want %x", raw, want)
		}
	}
}
