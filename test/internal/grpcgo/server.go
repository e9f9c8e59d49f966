// Package grpcgo serves the methods of a grpcserver.Server by grpc-go, as an
// oracle: what clients see of both must be the same. It takes the same methods
// and options, knows nothing of limits on memory, and is for tests alone.
package grpcgo

import (
	"context"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/grpcserver"
)

// Server is a grpc-go server with the surface of grpcserver.Server. All methods
// are registered before Serve.
type Server struct {
	o        grpcserver.Options
	services map[string]*service
	raw      map[string]bool // full names of methods that Handle was given
	g        *grpc.Server
}

// service gathers what grpc-go wants to be told at once.
type service struct {
	desc grpc.ServiceDesc
	impl any
}

// New returns a server that serves nothing yet. Of the options it honours
// messages' sizes, MaxStreams, keepalive, TLS, interceptors and the bounds of one
// stream.
func New(o grpcserver.Options) *Server {
	s := &Server{o: o, services: map[string]*service{}, raw: map[string]bool{}}
	options := []grpc.ServerOption{
		grpc.ForceServerCodecV2(frameCodec{encoding.GetCodecV2(proto.Name), o.Bytes}),
		grpc.MaxRecvMsgSize(o.MaxReceiveBytes), grpc.MaxSendMsgSize(o.MaxSendBytes),
		grpc.UnaryInterceptor(s.unaryInterceptor), grpc.StreamInterceptor(s.streamInterceptor),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: o.KeepaliveMinTime}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: o.KeepaliveTime, Timeout: o.KeepaliveTimeout}),
	}
	if o.MaxStreams != 0 {
		options = append(options, grpc.MaxConcurrentStreams(o.MaxStreams))
	}
	if o.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(o.TLS)))
	}
	s.g = grpc.NewServer(options...)
	return s
}

func (s *Server) service(name string) *service {
	v := s.services[name]
	if v == nil {
		v = &service{desc: grpc.ServiceDesc{ServiceName: name, HandlerType: (*any)(nil)}}
		s.services[name] = v
	}
	return v
}

// RegisterService implements grpc.ServiceRegistrar.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	v := s.service(desc.ServiceName)
	v.impl, v.desc.Metadata = impl, desc.Metadata
	v.desc.Methods = append(v.desc.Methods, desc.Methods...)
	v.desc.Streams = append(v.desc.Streams, desc.Streams...)
}

// GetServiceInfo lists what was registered.
func (s *Server) GetServiceInfo() map[string]grpc.ServiceInfo {
	out := map[string]grpc.ServiceInfo{}
	for name, v := range s.services {
		var info grpc.ServiceInfo
		for _, m := range v.desc.Methods {
			info.Methods = append(info.Methods, grpc.MethodInfo{Name: m.MethodName})
		}
		for _, m := range v.desc.Streams {
			info.Methods = append(info.Methods, grpc.MethodInfo{Name: m.StreamName, IsClientStream: m.ClientStreams, IsServerStream: m.ServerStreams})
		}
		out[name] = info
	}
	return out
}

// CloseStalled does nothing: grpc-go does not know who reads.
func (s *Server) CloseStalled(time.Duration) {}

// Serve serves a listener until Stop.
func (s *Server) Serve(l net.Listener) error {
	for _, v := range s.services {
		s.g.RegisterService(&v.desc, v.impl)
	}
	return s.g.Serve(l)
}

// Stop ends all.
func (s *Server) Stop() { s.g.Stop() }

// callOf returns the call that grpc-go's context describes.
func callOf(ctx context.Context, method string) *grpcserver.Call {
	md, _ := metadata.FromIncomingContext(ctx)
	return grpcserver.NewCall(ctx, method, md)
}

func (s *Server) unaryInterceptor(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	return s.o.UnaryInterceptor(grpcserver.WithCall(ctx, callOf(ctx, info.FullMethod)), req, info, handler)
}

func (s *Server) streamInterceptor(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if s.raw[info.FullMethod] {
		return handler(srv, stream)
	}
	ctx := stream.Context()
	ctx = grpcserver.WithCall(ctx, callOf(ctx, info.FullMethod))
	return s.o.StreamInterceptor(srv, withContext{stream, ctx}, info, handler)
}

// withContext is a stream with another context.
type withContext struct {
	grpc.ServerStream
	ctx context.Context
}

func (w withContext) Context() context.Context { return w.ctx }

// finished tells the method's stats of a call's end.
func finished(m *grpcserver.Method, call *grpcserver.Call, began time.Time, err error) {
	if m.Stats == nil {
		return
	}
	code := status.Code(err)
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		code = status.FromContextError(err).Code()
	}
	m.Stats.Finished(call, code, time.Since(began))
}
