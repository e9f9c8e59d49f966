package grpcgo

import (
	"context"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/grpcserver"
)

// Handle adds a method that is served from raw bytes.
func (s *Server) Handle(m grpcserver.Method) {
	service, method, _ := strings.Cut(strings.TrimPrefix(m.Name, "/"), "/")
	v := s.service(service)
	s.raw[m.Name] = true
	switch {
	case m.Unary != nil:
		v.desc.Methods = append(v.desc.Methods, grpc.MethodDesc{MethodName: method, Handler: unary(&m)})
	case m.Sender != nil:
		v.desc.Streams = append(v.desc.Streams, grpc.StreamDesc{StreamName: method, Handler: sender(&m), ServerStreams: true})
	default:
		v.desc.Streams = append(v.desc.Streams, grpc.StreamDesc{StreamName: method, Handler: s.bidirectional(&m), ServerStreams: true, ClientStreams: true})
	}
}

// outcome is what a handler replied with.
type outcome struct {
	raw []byte
	err error
}

// unary parks the goroutine that grpc-go gives a call until the reply is there
// or the client has gone.
func unary(m *grpcserver.Method) grpc.MethodHandler {
	return func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		began, call := time.Now(), callOf(ctx, m.Name)
		if m.Stats != nil {
			m.Stats.Started()
		}
		out, err := park(ctx, m, call, decode)
		finished(m, call, began, err)
		if err != nil {
			return nil, err
		}
		return out, nil
	}
}

func park(ctx context.Context, m *grpcserver.Method, call *grpcserver.Call, decode func(any) error) (*frame, error) {
	in := frame{stats: m.Stats}
	if err := decode(&in); err != nil {
		return nil, err
	}
	reply := make(chan outcome, 1)
	var over atomic.Bool // set by whoever comes first, the reply or the call's end
	m.Unary(call, in.data, func(raw []byte, err error) {
		if over.CompareAndSwap(false, true) {
			reply <- outcome{raw, err}
		} else if err == nil {
			call.Sent()
		}
	})
	var o outcome
	select {
	case o = <-reply:
	case <-ctx.Done():
		if over.CompareAndSwap(false, true) {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		o = <-reply // it came at the same moment
	}
	if o.err == nil {
		return &frame{data: call.Whole(o.raw), stats: m.Stats, sent: call.Sent}, nil
	}
	if err := ctx.Err(); err != nil { // why the request failed, most likely
		return nil, status.FromContextError(err).Err()
	}
	return nil, o.err
}

// watched returns a call that also ends when the method's Watch says so.
func watched(m *grpcserver.Method, stream grpc.ServerStream) (ctx context.Context, call *grpcserver.Call, forget func()) {
	ctx, cancel := context.WithCancelCause(stream.Context())
	call = callOf(ctx, m.Name)
	if m.Watch == nil {
		return ctx, call, func() { cancel(nil) }
	}
	done := m.Watch(call, cancel)
	return ctx, call, func() { done(); cancel(nil) }
}

// whyOver returns the error that ended a stream: that of Watch, or err.
func whyOver(ctx context.Context, stream grpc.ServerStream, err error) error {
	if cause := context.Cause(ctx); err != nil && cause != nil && stream.Context().Err() == nil {
		return cause
	}
	return err
}

// sender serves a method that answers with a stream.
func sender(m *grpcserver.Method) grpc.StreamHandler {
	return func(_ any, stream grpc.ServerStream) (err error) {
		ctx, call, forget := watched(m, stream)
		defer forget()
		began := time.Now()
		if m.Stats != nil {
			m.Stats.Started()
		}
		defer func() { finished(m, call, began, err) }()
		in := frame{stats: m.Stats}
		if err := stream.RecvMsg(&in); err != nil {
			return err
		}
		err = m.Sender(call, in.data, func(raw []byte, sent func()) error {
			if err := ctx.Err(); err != nil {
				if sent != nil {
					sent()
				}
				return err
			}
			return stream.SendMsg(&frame{data: raw, stats: m.Stats, sent: sent})
		})
		return whyOver(ctx, stream, err)
	}
}
