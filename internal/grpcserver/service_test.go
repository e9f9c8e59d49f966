package grpcserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding/gzip"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// testService is the service of gRPC's interop tests, as far as these tests need
// it.
type testService struct {
	pb.UnimplementedTestServiceServer
	held chan struct{} // FullDuplexCall waits for it, if set
}

func payload(n int32) *pb.Payload { return &pb.Payload{Body: []byte(strings.Repeat("p", int(n)))} }

func (s *testService) UnaryCall(ctx context.Context, r *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	if v := md["x-echo"]; len(v) > 0 {
		_ = grpc.SetHeader(ctx, metadata.Pairs("x-echo", v[0]))
		_ = grpc.SetTrailer(ctx, metadata.Pairs("x-echo-bin", "\x00"+v[0]))
	}
	if st := r.ResponseStatus; st != nil {
		return nil, status.Error(codes.Code(st.Code), st.Message)
	}
	if m, ok := grpc.Method(ctx); !ok || m != "/grpc.testing.TestService/UnaryCall" {
		return nil, status.Errorf(codes.Internal, "method %q", m)
	}
	user := ""
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.VerifiedChains) > 0 {
			user = info.State.VerifiedChains[0][0].Subject.CommonName
		}
		if p.Addr == nil {
			return nil, errors.New("no address")
		}
	}
	if c := CallFrom(ctx); c == nil || c.CommonName() != user {
		return nil, errors.New("no call, or another user")
	}
	return &pb.SimpleResponse{Payload: payload(r.ResponseSize), Username: user}, nil
}

func (s *testService) StreamingOutputCall(r *pb.StreamingOutputCallRequest, out pb.TestService_StreamingOutputCallServer) error {
	for _, p := range r.ResponseParameters {
		if err := out.Send(&pb.StreamingOutputCallResponse{Payload: payload(p.Size)}); err != nil {
			return err
		}
	}
	return nil
}

func (s *testService) StreamingInputCall(in pb.TestService_StreamingInputCallServer) error {
	total := 0
	for {
		r, err := in.Recv()
		if err == io.EOF {
			return in.SendAndClose(&pb.StreamingInputCallResponse{AggregatedPayloadSize: int32(total)})
		}
		if err != nil {
			return err
		}
		total += len(r.Payload.Body)
	}
}

func (s *testService) FullDuplexCall(stream pb.TestService_FullDuplexCallServer) error {
	if s.held != nil {
		<-s.held
	}
	if md, _ := metadata.FromIncomingContext(stream.Context()); len(md["x-early"]) > 0 {
		if err := stream.SetHeader(metadata.Pairs("a", "1")); err != nil {
			return err
		}
		if err := stream.SendHeader(metadata.Pairs("b", "2")); err != nil {
			return err
		}
		if err := stream.SendHeader(nil); status.Code(err) != codes.Internal {
			return fmt.Errorf("a second header was taken: %v", err)
		}
		if err := stream.SetHeader(metadata.Pairs("bad", "\x01")); status.Code(err) != codes.Internal {
			return fmt.Errorf("a bad header was taken: %v", err)
		}
		stream.SetTrailer(metadata.Pairs("c", "3"))
		stream.SetTrailer(metadata.Pairs("c", "4"))
	}
	for {
		r, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, p := range r.ResponseParameters {
			if err := stream.Send(&pb.StreamingOutputCallResponse{Payload: payload(p.Size)}); err != nil {
				return err
			}
		}
	}
}

func testServiceRig(s *testService, r rig) rig {
	r.register = func(g grpc.ServiceRegistrar) { pb.RegisterTestServiceServer(g, s) }
	return r
}

func TestGeneratedService(t *testing.T) {
	for name, r := range map[string]rig{"plain": {}, "tls": {tls: true}, "unix": {unix: true}} {
		for _, zip := range []bool{false, true} {
			t.Run(name+map[bool]string{true: "/gzip", false: ""}[zip], func(t *testing.T) {
				var received, sent atomic.Int64
				r.Bytes = func(in, out int) {
					received.Add(int64(in))
					sent.Add(int64(out))
				}
				var intercepted atomic.Value
				r.UnaryInterceptor = func(ctx context.Context, req any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
					intercepted.Store(info.FullMethod)
					return h(ctx, req)
				}
				s := start(t, testServiceRig(&testService{}, r))
				var o []grpc.CallOption
				if zip {
					o = append(o, grpc.UseCompressor(gzip.Name))
				}
				o = append(o, maxCall)
				c := pb.NewTestServiceClient(s.dial(t))
				ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "x-echo", "v"), 20*time.Second)
				defer cancel()

				var header, trailer metadata.MD
				got, err := c.UnaryCall(ctx, &pb.SimpleRequest{ResponseSize: 300 << 10, Payload: payload(200 << 10)}, append(o, grpc.Header(&header), grpc.Trailer(&trailer))...)
				if err != nil {
					t.Fatal(err)
				}
				if len(got.Payload.Body) != 300<<10 || header["x-echo"][0] != "v" || trailer["x-echo-bin"][0] != "\x00v" {
					t.Errorf("%d bytes, header %v, trailer %v", len(got.Payload.Body), header, trailer)
				}
				if want := map[bool]string{true: "somebody"}[r.tls]; got.Username != want {
					t.Errorf("user %q, not %q", got.Username, want)
				}
				if got := intercepted.Load(); got != "/grpc.testing.TestService/UnaryCall" {
					t.Errorf("intercepted %q", got)
				}
				_, err = c.UnaryCall(ctx, &pb.SimpleRequest{ResponseStatus: &pb.EchoStatus{Code: 7, Message: "no"}}, append(o, grpc.Header(&header), grpc.Trailer(&trailer))...)
				if status.Code(err) != codes.PermissionDenied || trailer["x-echo-bin"][0] != "\x00v" || header["x-echo"][0] != "v" {
					t.Errorf("%v, header %v, trailer %v", err, header, trailer)
				}

				out, err := c.StreamingOutputCall(ctx, &pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 10}, {Size: 100 << 10}, {Size: 2 << 20}, {Size: 0}}}, o...)
				if err != nil {
					t.Fatal(err)
				}
				total := 0
				for {
					m, err := out.Recv()
					if err == io.EOF {
						break
					}
					if err != nil {
						t.Fatal(err)
					}
					total += len(m.Payload.Body)
				}
				if total != 10+100<<10+2<<20 {
					t.Errorf("%d bytes", total)
				}

				in, err := c.StreamingInputCall(ctx, o...)
				if err != nil {
					t.Fatal(err)
				}
				for _, n := range []int32{1, 50 << 10, 3 << 20, 0} {
					if err := in.Send(&pb.StreamingInputCallRequest{Payload: payload(n)}); err != nil {
						t.Fatal(err)
					}
				}
				sum, err := in.CloseAndRecv()
				if err != nil || sum.AggregatedPayloadSize != 1+50<<10+3<<20 {
					t.Errorf("%v, %v", sum, err)
				}

				both, err := c.FullDuplexCall(ctx, o...)
				if err != nil {
					t.Fatal(err)
				}
				for _, n := range []int32{1, 1 << 20, 5} {
					if err := both.Send(&pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: n}}}); err != nil {
						t.Fatal(err)
					}
					m, err := both.Recv()
					if err != nil || len(m.Payload.Body) != int(n) {
						t.Fatalf("%d bytes, %v", len(m.GetPayload().GetBody()), err)
					}
				}
				if err := both.CloseSend(); err != nil {
					t.Fatal(err)
				}
				if _, err := both.Recv(); err != io.EOF {
					t.Errorf("after half-close: %v", err)
				}

				_, err = c.EmptyCall(ctx, &pb.Empty{}, o...)
				if st := status.Convert(err); st.Code() != codes.Unimplemented || st.Message() != "method EmptyCall not implemented" {
					t.Errorf("unimplemented: %v", err)
				}
				for method, want := range map[string]string{
					"/grpc.testing.TestService/Nope": "unknown method Nope for service grpc.testing.TestService",
					"/nobody/Nope":                   "unknown service nobody",
				} {
					_, err := invoke(ctx, s.dial(t), method, nil)
					if st := status.Convert(err); st.Code() != codes.Unimplemented || st.Message() != want {
						t.Errorf("%s: %v", method, err)
					}
				}
				eventually(t, "the end of all handlers", func() bool { return s.goroutines.Load() == 0 })
				if received.Load() == 0 || sent.Load() < 2<<20 {
					t.Errorf("counted %d and %d bytes", received.Load(), sent.Load())
				}
				if n := s.held.Load(); n != 0 {
					t.Errorf("%d bytes of requests are still held", n)
				}
			})
		}
	}
}

// The header comes before any message, and trailers add up.
func TestHeaderAndTrailer(t *testing.T) {
	s := start(t, testServiceRig(&testService{}, rig{}))
	c := pb.NewTestServiceClient(s.dial(t))
	stream, err := c.FullDuplexCall(metadata.AppendToOutgoingContext(t.Context(), "x-early", "1"))
	if err != nil {
		t.Fatal(err)
	}
	h, err := stream.Header()
	if err != nil || len(h["a"]) != 1 || len(h["b"]) != 1 {
		t.Errorf("%v, %v", h, err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Error(err)
	}
	if got := stream.Trailer()["c"]; len(got) != 2 || got[0] != "3" || got[1] != "4" {
		t.Errorf("trailer %v", stream.Trailer())
	}
}

func TestStreamCancel(t *testing.T) {
	s := start(t, testServiceRig(&testService{}, rig{}))
	// Windows of a size, or the client's grow until it takes all that it does not read.
	c := pb.NewTestServiceClient(s.dial(t, grpc.WithInitialWindowSize(1<<16), grpc.WithInitialConnWindowSize(1<<17)))
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.FullDuplexCall(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 1}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	cancel()
	eventually(t, "the handler's end", func() bool { return s.goroutines.Load() == 0 })

	// A handler that sends to a client that does not read ends with the call.
	ctx, cancel = context.WithCancel(t.Context())
	out, err := c.StreamingOutputCall(ctx, &pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 1 << 20}, {Size: 1 << 20}, {Size: 1 << 20}}})
	if err != nil {
		t.Fatal(err)
	}
	_ = out
	eventually(t, "the handler", func() bool { return s.goroutines.Load() == 1 })
	cancel()
	eventually(t, "the handler's end", func() bool { return s.goroutines.Load() == 0 })
}

func TestGracefulStop(t *testing.T) {
	held := make(chan struct{})
	var replies = make(chan func([]byte, error), 1)
	r := testServiceRig(&testService{held: held}, rig{methods: []Method{{Name: "/s/wait", Unary: func(_ *Call, _ []byte, reply func([]byte, error)) { replies <- reply }}}})
	s := start(t, r)
	conn := s.dial(t)
	stream, err := pb.NewTestServiceClient(conn).FullDuplexCall(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() { _, err := invoke(t.Context(), conn, "/s/wait", nil); got <- err }()
	reply := <-replies
	stopped := make(chan struct{})
	go func() { s.GracefulStop(); close(stopped) }()
	eventually(t, "the final GOAWAY", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			c.mu.Lock()
			drained := c.drained
			c.mu.Unlock()
			if drained {
				return true
			}
		}
		return false
	})
	select {
	case <-stopped:
		t.Fatal("stopped with calls open")
	default:
	}
	reply([]byte("x"), nil)
	if err := <-got; err != nil {
		t.Error(err)
	}
	close(held)
	if err := stream.CloseSend(); err != nil {
		t.Error(err)
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Error(err)
	}
	select {
	case <-stopped:
	case <-time.After(10 * time.Second):
		t.Fatal("does not stop")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := invoke(ctx, conn, "/s/wait", nil); status.Code(err) != codes.Unavailable {
		t.Errorf("after the stop: %v", err)
	}
}

func TestStopEndsHandlers(t *testing.T) {
	ended := make(chan error, 1)
	var reply func([]byte, error)
	began := make(chan struct{})
	s := start(t, rig{methods: []Method{{Name: "/s/wait", Unary: func(call *Call, _ []byte, r func([]byte, error)) {
		reply = r
		go func() { <-call.Context().Done(); ended <- call.Err() }()
		close(began)
	}}}})
	conn := s.dial(t)
	go func() { _, _ = invoke(t.Context(), conn, "/s/wait", nil) }()
	<-began
	s.Stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
	reply([]byte("late"), nil)
}

// waiting is a service of one method whose calls wait for each other.
type waiting struct {
	begun, release chan struct{}
	bytes          int
}

func (w *waiting) register(r grpc.ServiceRegistrar) {
	r.RegisterService(&grpc.ServiceDesc{ServiceName: "w", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{
		MethodName: "m",
		Handler: func(any, context.Context, func(any) error, grpc.UnaryServerInterceptor) (any, error) {
			w.begun <- struct{}{}
			<-w.release
			return &pb.SimpleResponse{Payload: payload(int32(w.bytes))}, nil
		},
	}}}, nil)
}

// The answers of generated services are bounded as others are: a client that lets
// none in is cut off.
func TestAnswersOfServicesNotLetIn(t *testing.T) {
	const calls = 2000
	w := &waiting{begun: make(chan struct{}, calls), release: make(chan struct{}), bytes: 50 << 10}
	s := start(t, rig{Options: Options{OutputBytes: 4 << 20}, register: w.register})
	before := inUse()
	f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	for range calls {
		f.call("/w/m", "")
	}
	for range calls {
		<-w.begun
	}
	var most atomic.Int64
	close(w.release)
	eventually(t, "the end of the connection", func() bool {
		most.Store(max(most.Load(), s.queued.Load()))
		return s.metrics.Limited(limitOutput) == 1 && s.metrics.open.Load() == 0
	})
	if n := most.Load(); n > 5<<20 {
		t.Errorf("%d bytes waited", n)
	}
	eventually(t, "the end of all calls", func() bool { return s.goroutines.Load() == 0 && s.queued.Load() == 0 && s.held.Load() == 0 })
	if grown := inUse() - before; grown > 16<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
}

// Nor can many clients together have what one may not: those that let nothing in
// are cut off, and a good one beside them is served.
func TestAnswersOfServicesNotLetInByMany(t *testing.T) {
	const clients, calls, size = 30, 200, 50 << 10
	w := &waiting{begun: make(chan struct{}, clients*calls), release: make(chan struct{}), bytes: size}
	s := start(t, rig{Options: Options{HeldBytes: 16 << 20, MaxReceiveBytes: 1 << 20}, register: w.register})
	for range clients {
		f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		for range calls {
			f.call("/w/m", "")
		}
	}
	for range clients * calls {
		<-w.begun
	}
	var most atomic.Int64
	close(w.release)
	eventually(t, "the end of all calls", func() bool {
		most.Store(max(most.Load(), s.queued.Load()))
		return s.goroutines.Load() == 0
	})
	if s.metrics.Limited(limitOutput) == 0 {
		t.Error("nobody was cut off")
	}
	if n, bound := most.Load(), int64(2*16<<20+clients*(crowdedBytes+2*size)); n > bound {
		t.Errorf("%d bytes waited, %d are in order", n, bound)
	}
	c := newCheapClient(t, s.addr, "/w/m", 0)
	defer c.nc.Close()
	if err := c.run(1, 1); err != nil {
		t.Errorf("a good client beside them: %v", err)
	}
}

// Calls of generated services count among those that are at work.
func TestMoreCallsOfServicesThanAnswers(t *testing.T) {
	w := &waiting{begun: make(chan struct{}, 4*maxWorking), release: make(chan struct{})}
	s := start(t, rig{register: w.register})
	const n = 2 * maxWorking
	c := newCheapClient(t, s.addr, "/w/m", 0)
	defer c.nc.Close()
	done := make(chan error, 1)
	go func() { done <- c.run(n, n) }()
	for range maxWorking {
		<-w.begun
	}
	eventually(t, "the reader's wait", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			return c.waiting.Load()
		}
		return false
	})
	if got := s.goroutines.Load(); got > maxWorking {
		t.Errorf("%d calls are with their handlers", got)
	}
	close(w.release)
	if err := <-done; err != nil {
		t.Error(err)
	}
}
