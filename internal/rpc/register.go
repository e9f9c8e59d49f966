package rpc

import (
	"math"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/inspectpb"
)

// receiveSlack is what a message may have beyond the largest proposal.
const receiveSlack = 512 << 10

// Registrar is a gRPC server before it serves; *grpcserver.Server is one.
type Registrar interface {
	grpc.ServiceRegistrar
	// Handle adds a method that is served from raw bytes.
	Handle(grpcserver.Method)
	GetServiceInfo() map[string]grpc.ServiceInfo
	// CloseStalled ends the calls that hold answers of which nothing was let in for
	// that long, and connections that took nothing.
	CloseStalled(than time.Duration)
}

// ServerOptions adds to the options of a server what the services need of it.
func (s *Server) ServerOptions(o grpcserver.Options) grpcserver.Options {
	o.MaxReceiveBytes, o.MaxSendBytes = s.o.MaxRequestBytes+receiveSlack, math.MaxInt32
	o.StreamMessages, o.StreamBytes = s.o.StreamMessages, s.o.StreamBytes
	o.StreamsBytes, o.StreamStall = s.o.StreamsBytes, s.o.StreamStall
	o.UnaryInterceptor, o.StreamInterceptor = s.interceptUnary, s.interceptStream
	o.Bytes = func(received, sent int) {
		s.metrics.receivedBytes.Add(float64(received))
		s.metrics.sentBytes.Add(float64(sent))
	}
	o.Clock, o.Logger = s.o.Clock, s.o.Logger
	return o
}

// Register has all services served by g, which was made with ServerOptions.
func (s *Server) Register(g Registrar) {
	s.room.scarce = func() { g.CloseStalled(s.o.StreamStall) }
	for name, h := range s.handlers() {
		g.Handle(grpcserver.Method{Name: name, Unary: h, Stats: s.statsOf(typeUnary, name)})
	}
	for name, h := range s.senders() {
		g.Handle(grpcserver.Method{Name: name, Sender: h, Watch: s.watchLeader(false), Stats: s.statsOf(typeServerStream, name)})
	}
	for name, h := range s.streams() {
		g.Handle(grpcserver.Method{Name: name, Stream: h, Watch: s.watchLeader(true), Stats: s.statsOf(typeBidiStream, name)})
	}
	lease := etcdserverpb.Lease_ServiceDesc
	lease.Streams = nil // its one stream is served from raw bytes
	g.RegisterService(&lease, &leaseService{s: s})
	etcdserverpb.RegisterClusterServer(g, &clusterService{s: s})
	etcdserverpb.RegisterMaintenanceServer(g, &maintenanceService{s: s})
	etcdserverpb.RegisterAuthServer(g, &authService{s: s})
	inspectpb.RegisterInspectServer(g, newInspectService(s))
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

// handlers returns the unary methods that are served from raw bytes, by full
// method name.
func (s *Server) handlers() map[string]grpcserver.Handler {
	return map[string]grpcserver.Handler{
		"/etcdserverpb.KV/Range":       s.rangeKeys,
		"/etcdserverpb.KV/Put":         s.put,
		"/etcdserverpb.KV/DeleteRange": s.deleteRange,
		"/etcdserverpb.KV/Txn":         s.txn,
		"/etcdserverpb.KV/Compact":     s.compact,
	}
}

// senders returns the methods that answer with a stream of raw messages.
func (s *Server) senders() map[string]grpcserver.SenderHandler {
	return map[string]grpcserver.SenderHandler{"/etcdserverpb.KV/RangeStream": s.rangeStream}
}

// streams returns the streams that are served message by message.
func (s *Server) streams() map[string]grpcserver.StreamHandler {
	return map[string]grpcserver.StreamHandler{
		"/etcdserverpb.Watch/Watch":          s.admitted(s.openWatch),
		"/etcdserverpb.Lease/LeaseKeepAlive": s.admitted(s.openKeepAlive),
	}
}

// admitted makes the checks of admit before a stream begins.
func (s *Server) admitted(open grpcserver.StreamHandler) grpcserver.StreamHandler {
	return func(call *grpcserver.Call, out grpcserver.StreamOut) grpcserver.StreamReceiver {
		if err := s.admit(call, kindStream, false); err != nil {
			out.End(WireError(err))
			return refusedStream{}
		}
		return open(call, out)
	}
}

// refusedStream is a stream that ends before anything was asked.
type refusedStream struct{}

func (refusedStream) Message([]byte) error                   { return nil }
func (refusedStream) HalfClose() (over bool)                 { return true }
func (refusedStream) Ready()                                 {}
func (refusedStream) Sent(grpcserver.Message, time.Duration) {}
func (refusedStream) Close()                                 {}

// watchLeader ends streams that must end before their clients do, see
// leaderWatch.
func (s *Server) watchLeader(endless bool) func(*grpcserver.Call, func(error)) (forget func()) {
	return func(call *grpcserver.Call, end func(error)) func() {
		return s.leader.watch(factsOf(call).requiresLeader, endless, end)
	}
}

// splitMethod cuts a full method name in two.
func splitMethod(full string) (service, method string) {
	service, method, _ = strings.Cut(strings.TrimPrefix(full, "/"), "/")
	return service, method
}
