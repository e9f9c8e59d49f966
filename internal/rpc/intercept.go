package rpc

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/inspectpb"
)

// learnerServes names the methods that a learner serves, beside a serializable
// Range.
var learnerServes = map[string]bool{
	"/etcdserverpb.Maintenance/Status":     true,
	"/etcdserverpb.Maintenance/Snapshot":   true,
	inspectpb.Inspect_Usage_FullMethodName: true, // which looks itself
	inspectpb.Inspect_Top_FullMethodName:   true,
	inspectpb.Inspect_Clock_FullMethodName: true,
}

// isHealth says that a method is of the health service, which answers whatever
// the state of the cluster.
func isHealth(method string) bool { return strings.HasPrefix(method, "/grpc.health.v1.") }

// admitGenerated makes the checks for methods of generated services.
func (s *Server) admitGenerated(call *grpcserver.Call, kind callKind) error {
	return s.admit(call, kind, learnerServes[call.Method])
}

// interceptUnary makes, for the generated services, the checks that raw handlers
// make by themselves, and translates their errors.
func (s *Server) interceptUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	m, call := s.metrics.lookup(info.FullMethod), grpcserver.CallFrom(ctx)
	began := s.o.Clock.Now()
	m.started.Inc()
	m.received.Inc()
	defer func() {
		took, code := s.o.Clock.Now().Sub(began), status.Code(err)
		m.finish(code, took)
		s.finished(call, code, took)
		if err == nil {
			m.sent.Inc()
		}
	}()
	if isHealth(info.FullMethod) {
		return handler(ctx, req)
	}
	if err := s.admitGenerated(call, kindUnary); err != nil {
		return nil, WireError(err)
	}
	resp, err = handler(ctx, req)
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
	call := grpcserver.CallFrom(counted.ctx)
	if err := s.admitGenerated(call, kindStream); err != nil {
		return WireError(err)
	}
	ctx, cancel := context.WithCancelCause(counted.ctx)
	defer cancel(nil)
	defer s.leader.watch(factsOf(call).requiresLeader, info.IsClientStream, cancel)()
	counted.ctx = ctx
	err = handler(srv, counted)
	if cause := context.Cause(ctx); err != nil && cause != nil && stream.Context().Err() == nil {
		return WireError(cause)
	}
	return WireError(err)
}

// countedStream is a stream with a context of its own whose messages are
// counted. RecvMsg ends with the transport's context only.
type countedStream struct {
	grpc.ServerStream
	ctx context.Context
	m   *methodMetrics
}

func (c *countedStream) Context() context.Context { return c.ctx }

func (c *countedStream) SendMsg(v any) error {
	if err := c.ctx.Err(); err != nil {
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
