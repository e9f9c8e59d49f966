package grpcserver

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

// A method that is served from raw bytes stands for one of a generated service,
// whichever is registered first.
func TestRawBeforeGenerated(t *testing.T) {
	for _, first := range []bool{true, false} {
		s := New(Options{})
		defer s.Stop()
		raw := func() { s.Handle(Method{Name: unaryName, Unary: echo}) }
		if first {
			raw()
		}
		pb.RegisterTestServiceServer(s, &testService{})
		if !first {
			raw()
		}
		s.Handle(Method{Name: "/other/stream", Stream: func(*Call, StreamOut) StreamReceiver { return nil }})
		s.Handle(Method{Name: "/other/sender", Sender: func(*Call, []byte, Send) error { return nil }})
		if m, st := s.find(unaryName); st != nil || m.unary == nil {
			t.Errorf("the raw method is not the one: %v", st)
		}
		info := s.GetServiceInfo()
		generated := info["grpc.testing.TestService"]
		if len(generated.Methods) != len(pb.TestService_ServiceDesc.Methods)+len(pb.TestService_ServiceDesc.Streams) || generated.Metadata != pb.TestService_ServiceDesc.Metadata {
			t.Errorf("%+v", generated)
		}
		for _, m := range info["other"].Methods {
			if m.IsClientStream != (m.Name == "stream") || !m.IsServerStream {
				t.Errorf("%+v", m)
			}
		}
	}
}

// Method.Watch ends a sender's stream with its error, also from inside of Watch.
func TestSenderIsCut(t *testing.T) {
	for name, early := range map[string]bool{"from inside of Watch": true, "later": false} {
		t.Run(name, func(t *testing.T) {
			forgotten := make(chan struct{})
			ends := make(chan func(error), 1)
			s := start(t, rig{methods: []Method{{
				Name: "/s/m",
				Sender: func(call *Call, _ []byte, send Send) error {
					<-call.Context().Done()
					return send([]byte("x"), nil)
				},
				Watch: func(_ *Call, end func(error)) func() {
					if early {
						end(status.Error(codes.Unavailable, "no leader"))
						end(errors.New("another"))
					} else {
						ends <- end
					}
					return func() { close(forgotten) }
				},
			}}})
			stream, err := open(t.Context(), s.dial(t), "/s/m")
			if err != nil {
				t.Fatal(err)
			}
			send(t, stream, "")
			if !early {
				(<-ends)(status.Error(codes.Unavailable, "no leader"))
			}
			var b []byte
			if err := stream.RecvMsg(&b); status.Code(err) != codes.Unavailable {
				t.Error(err)
			}
			<-forgotten
		})
	}
}

func TestServeAfterStop(t *testing.T) {
	s := start(t, rig{})
	s.GracefulStop()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Serve(l); err != grpc.ErrServerStopped {
		t.Error(err)
	}
	if _, err := l.Accept(); err == nil {
		t.Error("the listener is open")
	}
	if err := s.ServeTLS(l); err == nil {
		t.Error("served TLS without a certificate")
	}
}

// A call that another transport made knows its end by the context it was given.
func TestNewCall(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	c := NewCall(ctx, "/s/m", map[string][]string{"k": {"v"}})
	if _, ok := c.Deadline(); !ok || c.Err() != nil || c.Metadata().First("k") != "v" || CallFrom(c.Context()) != c {
		t.Error("not as it was made")
	}
	if c.RemoteAddr() != nil || c.CommonName() != "" {
		t.Error("knows a client that there is not")
	}
	sent := 0
	c.OnSent(func() { sent++ })
	c.Sent()
	c.Sent()
	if sent != 1 {
		t.Errorf("told %d times", sent)
	}
	cancel()
	if !errors.Is(c.Err(), context.Canceled) {
		t.Error(c.Err())
	}
	if CallFrom(t.Context()) != nil {
		t.Error("a call from nowhere")
	}
}

// When Stop returns, everybody whose answer was with the server knows that it has
// left memory, whoever tells them.
func TestStopTellsSenders(t *testing.T) {
	var stopping atomic.Bool
	var given, told atomic.Int64
	sent := func() {
		if stopping.Load() {
			<-time.After(20 * time.Millisecond) // a head start for Stop
		}
		told.Add(1)
	}
	s := start(t, rig{methods: []Method{
		{Name: "/s/unary", Unary: func(call *Call, _ []byte, reply func([]byte, error)) {
			call.OnSent(sent)
			given.Add(1)
			go reply(make([]byte, 64<<10), nil)
		}},
		{Name: "/s/sender", Sender: func(_ *Call, _ []byte, send Send) error {
			for {
				given.Add(1)
				if err := send(make([]byte, streamAhead), sent); err != nil {
					return err
				}
			}
		}},
	}})
	var unread []*frames
	for range 2 {
		f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow})
		f.ok(f.fr.WriteWindowUpdate(0, maxWindow-defaultWindow))
		unread = append(unread, f)
	}
	count := func(of func(c *conn) bool) (n int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			c.mu.Lock()
			if of(c) {
				n++
			}
			c.mu.Unlock()
		}
		return n
	}
	unread[0].call("/s/sender", "")
	eventually(t, "a sender that waits for room", func() bool { return count(func(c *conn) bool { return c.blocked && c.telling > 0 }) == 1 })
	eventually(t, "a second full socket", func() bool {
		unread[1].call("/s/unary", "")
		return count(func(c *conn) bool { return c.blocked }) == 2
	})
	eventually(t, "all answers", func() bool { // but that of the sender, who waits
		waiting := int64(0)
		count(func(c *conn) bool { waiting += c.holding.Load(); return true })
		return s.metrics.started.Load()-1 == int64(unread[1].next)/2 && told.Load()+waiting == given.Load()-1
	})
	stopping.Store(true)
	s.Stop()
	if given, told := given.Load(), told.Load(); given != told {
		t.Errorf("Stop has returned, and of %d senders %d were told", given, told)
	}
}
