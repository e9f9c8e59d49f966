package rpc

import (
	"context"
	"maps"
	"math"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// This file and streamadapter.go let grpc-go serve the handlers of this package.
// They are the only ones that know grpc-go's server.

// receiveSlack is what a message may have beyond the largest proposal.
const receiveSlack = 512 << 10

// Keepalive of HTTP/2, as etcd has it.
const (
	minClientPing     = 5 * time.Second
	serverPing        = 2 * time.Hour
	serverPingTimeout = 20 * time.Second
)

// NewGRPC returns a grpc-go server with all services registered. Options are
// added to this package's own, for credentials and stream limits, say.
func (s *Server) NewGRPC(options ...grpc.ServerOption) *grpc.Server {
	own := []grpc.ServerOption{
		grpc.ForceServerCodecV2(frameCodec{encoding.GetCodecV2(proto.Name), s.metrics, s.unread}),
		grpc.MaxRecvMsgSize(s.o.MaxRequestBytes + receiveSlack),
		grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.MaxConcurrentStreams(math.MaxUint32),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minClientPing}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: serverPing, Timeout: serverPingTimeout}),
		grpc.UnaryInterceptor(s.interceptUnary),
		grpc.StreamInterceptor(s.interceptStream),
	}
	g := grpc.NewServer(append(own, options...)...)
	s.register(g)
	return g
}

// register registers all services, the raw ones beside the generated ones.
func (s *Server) register(g *grpc.Server) {
	g.RegisterService(s.rawService(&etcdserverpb.KV_ServiceDesc), s)
	g.RegisterService(s.rawService(&etcdserverpb.Watch_ServiceDesc), s)
	lease := etcdserverpb.Lease_ServiceDesc
	lease.Streams = s.rawService(&lease).Streams
	g.RegisterService(&lease, &leaseService{s: s})
	etcdserverpb.RegisterClusterServer(g, &clusterService{s: s})
	etcdserverpb.RegisterMaintenanceServer(g, &maintenanceService{s: s})
	etcdserverpb.RegisterAuthServer(g, &authService{s: s})
	h := health.NewServer()
	h.SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(g, h)

	for service, info := range g.GetServiceInfo() {
		for _, m := range info.Methods {
			kind := typeUnary
			switch {
			case m.IsClientStream:
				kind = typeBidiStream
			case m.IsServerStream:
				kind = typeServerStream
			}
			s.metrics.method(kind, service, m.Name)
		}
	}
}

// rawService returns the description of a service whose methods are served from
// raw bytes.
func (s *Server) rawService(generated *grpc.ServiceDesc) *grpc.ServiceDesc {
	desc := &grpc.ServiceDesc{ServiceName: generated.ServiceName, HandlerType: (*any)(nil), Metadata: generated.Metadata}
	prefix := "/" + generated.ServiceName + "/"
	for method, h := range ofService(s.Handlers(), prefix) {
		desc.Methods = append(desc.Methods, grpc.MethodDesc{MethodName: method, Handler: s.unary(prefix+method, h, s.metrics.method(typeUnary, generated.ServiceName, method))})
	}
	for method, h := range ofService(s.Senders(), prefix) {
		desc.Streams = append(desc.Streams, grpc.StreamDesc{StreamName: method, Handler: sender(h), ServerStreams: true})
	}
	for method, h := range ofService(s.Bidirectional(), prefix) {
		desc.Streams = append(desc.Streams, grpc.StreamDesc{
			StreamName: method, Handler: s.bidirectional(streamAPIs[prefix+method], h), ServerStreams: true, ClientStreams: true,
		})
	}
	return desc
}

// ofService returns the entries of m with that prefix, without it.
func ofService[V any](m map[string]V, prefix string) map[string]V {
	out := maps.Clone(m)
	clear(out)
	for name, v := range m {
		if method, ok := strings.CutPrefix(name, prefix); ok {
			out[method] = v
		}
	}
	return out
}

// frame is a message that grpc-go is to leave alone.
type frame struct {
	data []byte
	sent func()  // called once, when data has left memory; may be nil
	conn *unsent // of the connection that it is sent on; may be nil
	room bool    // sent gives back room that other answers may wait for
}

// frameCodec passes frames through and has the generated messages encoded by
// the standard codec. It counts the bytes of both.
type frameCodec struct {
	messages encoding.CodecV2
	metrics  *Metrics
	unread   *unread
}

func (c frameCodec) Name() string { return c.messages.Name() }

func (c frameCodec) Marshal(v any) (mem.BufferSlice, error) {
	f, ok := v.(*frame)
	if !ok {
		out, err := c.messages.Marshal(v)
		c.metrics.sentBytes.Add(float64(out.Len()))
		return out, err
	}
	c.metrics.sentBytes.Add(float64(len(f.data)))
	if f.sent == nil || f.conn == nil || mem.IsBelowBufferPoolingThreshold(cap(f.data)) {
		f.Put(nil) // nobody would tell
		return mem.BufferSlice{mem.SliceBuffer(f.data)}, nil
	}
	if f.room {
		f.sent = c.unread.hold(f.conn, f.sent)
	}
	f.sent = f.conn.hold(f.sent)
	return mem.BufferSlice{mem.NewBuffer(&f.data, f)}, nil
}

func (c frameCodec) Unmarshal(data mem.BufferSlice, v any) error {
	c.metrics.receivedBytes.Add(float64(data.Len()))
	f, ok := v.(*frame)
	if !ok {
		return c.messages.Unmarshal(data, v)
	}
	f.data = data.Materialize()
	return nil
}

// Get and Put make a frame the pool of its own bytes, so that grpc-go tells
// when it has no more need of them.
func (f *frame) Get(length int) *[]byte { b := make([]byte, length); return &b }

// Put is called once for each frame.
func (f *frame) Put(*[]byte) {
	if f.sent != nil {
		f.sent()
	}
}

// outcome is what a handler replied with.
type outcome struct {
	raw []byte
	err error
}

// parked is the goroutine of a unary call that waits for its reply.
type parked struct {
	reply chan outcome
	over  atomic.Bool // set by whoever comes first, the reply or the call's end
}

// unary parks the goroutine that grpc-go gives a call until the reply is there
// or the client has gone.
func (s *Server) unary(method string, h Handler, m *methodMetrics) grpc.MethodHandler {
	return func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		began := s.o.Clock.Now()
		m.started.Inc()
		out, err := s.park(ctx, method, decode, h, m)
		took := s.o.Clock.Now().Sub(began)
		m.finish(status.Code(err), took)
		s.finished(ctx, method, began, took, err)
		if err != nil {
			return nil, err
		}
		m.sent.Inc()
		return out, nil
	}
}

func (s *Server) park(ctx context.Context, method string, decode func(any) error, h Handler, m *methodMetrics) (*frame, error) {
	var in frame
	if err := decode(&in); err != nil {
		return nil, err
	}
	m.received.Inc()
	call := callOf(ctx, method)
	p := parked{reply: make(chan outcome, 1)}
	h(call, in.data, func(raw []byte, err error) {
		if p.over.CompareAndSwap(false, true) {
			p.reply <- outcome{raw, err}
		} else if err == nil {
			call.Sent()
		}
	})
	select {
	case o := <-p.reply:
		return finishUnary(ctx, call, o)
	case <-ctx.Done():
	}
	if p.over.CompareAndSwap(false, true) {
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return finishUnary(ctx, call, <-p.reply) // it came at the same moment
}

func finishUnary(ctx context.Context, call *Call, o outcome) (*frame, error) {
	if o.err != nil {
		if err := ctx.Err(); err != nil { // why the request failed, most likely
			return nil, status.FromContextError(err).Err()
		}
		return nil, o.err
	}
	return &frame{data: o.raw, sent: call.Sent, conn: connOf(ctx), room: true}, nil
}

// sender serves a method that answers with a stream.
func sender(h SenderHandler) grpc.StreamHandler {
	return func(_ any, stream grpc.ServerStream) error {
		var in frame
		if err := stream.RecvMsg(&in); err != nil {
			return err
		}
		call, conn := callFrom(stream.Context()), connOf(stream.Context())
		return h(call, in.data, func(raw []byte, sent func()) error {
			return stream.SendMsg(&frame{data: raw, sent: sent, conn: conn, room: true})
		})
	}
}

// connOf returns what a call's connection has still to send, nil if unknown.
func connOf(ctx context.Context) *unsent {
	if p, ok := peer.FromContext(ctx); ok {
		if addr, ok := p.Addr.(tiedAddr); ok {
			return addr.unsent
		}
	}
	return nil
}

// callOf returns the call that grpc-go's context describes.
func callOf(ctx context.Context, method string) *Call {
	md, _ := metadata.FromIncomingContext(ctx)
	call := NewCall(ctx, method, Metadata(md))
	if p, ok := peer.FromContext(ctx); ok {
		if tls, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(tls.State.VerifiedChains) > 0 {
			call.CommonName = tls.State.VerifiedChains[0][0].Subject.CommonName
		}
	}
	return call
}

// learnerServes names the methods that a learner serves, beside a serializable
// Range.
var learnerServes = map[string]bool{
	"/etcdserverpb.Maintenance/Status":   true,
	"/etcdserverpb.Maintenance/Snapshot": true,
}

// isHealth says that a method is of the health service, which answers whatever
// the state of the cluster.
func isHealth(method string) bool { return strings.HasPrefix(method, "/grpc.health.v1.") }

// admitGenerated makes the checks for methods of generated services.
func (s *Server) admitGenerated(call *Call, kind string) error {
	if err := s.admit(call.Metadata, kind, learnerServes[call.Method]); err != nil {
		return err
	}
	service, method, _ := strings.Cut(strings.TrimPrefix(call.Method, "/"), "/")
	return refuseUnserved(service, method)
}

// interceptUnary makes, for the generated services, the checks that raw handlers
// make by themselves, and translates their errors.
func (s *Server) interceptUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	m := s.metrics.lookup(info.FullMethod)
	began := s.o.Clock.Now()
	m.started.Inc()
	m.received.Inc()
	defer func() {
		took := s.o.Clock.Now().Sub(began)
		m.finish(status.Code(err), took)
		s.finished(ctx, info.FullMethod, began, took, err)
		if err == nil {
			m.sent.Inc()
		}
	}()
	if isHealth(info.FullMethod) {
		return handler(ctx, req)
	}
	call := callOf(ctx, info.FullMethod)
	if err := s.admitGenerated(call, kindUnary); err != nil {
		return nil, WireError(err)
	}
	resp, err = handler(withCall(ctx, call), req)
	return resp, WireError(err)
}

// interceptStream does for streams what interceptUnary does for unary methods,
// and ends those that require a leader when there is none, or that the member's
// stop ends.
func (s *Server) interceptStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	m := s.metrics.lookup(info.FullMethod)
	began := s.o.Clock.Now()
	m.started.Inc()
	defer func() { m.finish(status.Code(err), s.o.Clock.Now().Sub(began)) }()
	counted := &countedStream{ServerStream: stream, ctx: stream.Context(), m: m}
	if isHealth(info.FullMethod) {
		return handler(srv, counted)
	}
	call := callOf(stream.Context(), info.FullMethod)
	raw := s.senders[info.FullMethod] != nil // these make the checks themselves
	if !raw {
		if err := s.admitGenerated(call, kindStream); err != nil {
			return WireError(err)
		}
	}
	ctx, forget := s.leader.watch(stream.Context(), call.Metadata.requiresLeader(), info.IsClientStream)
	defer forget()
	counted.ctx, call.ctx = ctx, ctx
	counted.ctx = withCall(counted.ctx, call)
	err = handler(srv, counted)
	if cause := context.Cause(counted.ctx); err != nil && cause != nil && stream.Context().Err() == nil {
		return WireError(cause)
	}
	return WireError(err)
}

// countedStream is a stream with a context of its own whose messages are
// counted. RecvMsg ends with grpc-go's context only.
type countedStream struct {
	grpc.ServerStream
	ctx context.Context
	m   *methodMetrics
}

func (c *countedStream) Context() context.Context { return c.ctx }

func (c *countedStream) SendMsg(v any) error {
	if err := c.ctx.Err(); err != nil {
		if f, ok := v.(*frame); ok {
			f.Put(nil)
		}
		return err
	}
	err := c.ServerStream.SendMsg(v)
	if err == nil {
		c.m.sent.Inc()
	}
	return err
}

func (c *countedStream) RecvMsg(v any) error {
	err := c.ServerStream.RecvMsg(v)
	if err == nil {
		c.m.received.Inc()
	}
	return err
}
