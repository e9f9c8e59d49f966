package grpcserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// receiver is a StreamReceiver that checks what the transport owes it.
type receiver struct {
	t    testing.TB
	call *Call
	out  StreamOut
	on   func(r *receiver, raw string) error // Message
	half func(r *receiver) bool              // HalfClose
	more func(r *receiver)                   // Ready

	reading, writing atomic.Int32
	sent, messages   atomic.Int32
	closed           atomic.Bool
	done             chan struct{}
}

func (r *receiver) enter(n *atomic.Int32) func() {
	if n.Add(1) != 1 {
		r.t.Error("two calls of one kind at a time")
	}
	if r.closed.Load() {
		r.t.Error("a call after Close")
	}
	return func() { n.Add(-1) }
}

func (r *receiver) Message(raw []byte) error {
	defer r.enter(&r.reading)()
	r.messages.Add(1)
	return r.on(r, string(raw))
}

func (r *receiver) HalfClose() bool {
	defer r.enter(&r.reading)()
	if r.half == nil {
		r.out.End(nil)
		return false
	}
	return r.half(r)
}

func (r *receiver) Ready() {
	defer r.enter(&r.writing)()
	if r.more != nil {
		r.more(r)
	}
}

func (r *receiver) Sent(m Message, took time.Duration) {
	defer r.enter(&r.writing)()
	r.sent.Add(1)
	if took < 0 || m.Kind != 7 {
		r.t.Errorf("sent kind %d after %v", m.Kind, took)
	}
}

func (r *receiver) Close() {
	if r.closed.Swap(true) {
		r.t.Error("closed twice")
	}
	if r.reading.Load()+r.writing.Load() != 0 {
		r.t.Error("closed during a call")
	}
	close(r.done)
}

func (r *receiver) say(m ...string) bool {
	var ms []Message
	for _, m := range m {
		ms = append(ms, Message{Head: []byte(m[:len(m)/2]), Rest: [][]byte{[]byte(m[len(m)/2:])}, Kind: 7})
	}
	return r.out.Send(ms)
}

// streamMethod makes a method of a receiver's behaviour. All receivers go into
// made.
func streamMethod(t testing.TB, made chan *receiver, r func() *receiver) Method {
	return Method{Name: "/s/stream", Stream: func(call *Call, out StreamOut) StreamReceiver {
		x := r()
		x.t, x.call, x.out, x.done = t, call, out, make(chan struct{})
		made <- x
		return x
	}}
}

func echoes() *receiver {
	return &receiver{on: func(r *receiver, raw string) error {
		switch {
		case raw == "fail":
			return status.Error(codes.Aborted, "as asked")
		case raw == "end":
			r.say("last")
			r.out.End(status.Error(codes.OutOfRange, "the end"))
		case strings.HasPrefix(raw, "later "):
			r.out.Hold()
			go func() {
				r.say(raw)
				r.out.Resume()
			}()
		case !r.say(raw):
			return errors.New("no room")
		}
		return nil
	}}
}

func TestBidi(t *testing.T) {
	for name, r := range map[string]rig{"plain": {}, "tls": {tls: true}} {
		for _, zip := range []bool{false, true} {
			t.Run(fmt.Sprint(name, zip), func(t *testing.T) {
				made := make(chan *receiver, 10)
				r.methods = []Method{streamMethod(t, made, echoes)}
				s := start(t, r)
				conn := s.dial(t)
				o := []grpc.CallOption{maxCall}
				if zip {
					o = append(o, zipped)
				}
				stream, err := open(t.Context(), conn, "/s/stream", o...)
				if err != nil {
					t.Fatal(err)
				}
				for i, m := range []string{"a", strings.Repeat("b", 3000), strings.Repeat("c", 3<<20), "", "later on"} {
					send(t, stream, m)
					if got := receive(t, stream); got != m {
						t.Fatalf("message %d: %d bytes came back of %d", i, len(got), len(m))
					}
				}
				for i := range 200 {
					send(t, stream, fmt.Sprint("later ", i))
				}
				for i := range 200 {
					if got := receive(t, stream); got != fmt.Sprint("later ", i) {
						t.Fatalf("got %q in place %d", got, i)
					}
				}
				if err := stream.CloseSend(); err != nil {
					t.Fatal(err)
				}
				var b []byte
				if err := stream.RecvMsg(&b); err != io.EOF {
					t.Errorf("after half-close: %v", err)
				}
				x := <-made
				<-x.done
				if n := x.sent.Load(); n != 205 {
					t.Errorf("%d messages were sent, not 205", n)
				}

				for message, want := range map[string]string{
					"fail": "rpc error: code = Aborted desc = as asked",
					"end":  "rpc error: code = OutOfRange desc = the end",
				} {
					stream, err := open(t.Context(), conn, "/s/stream")
					if err != nil {
						t.Fatal(err)
					}
					send(t, stream, message)
					if message == "end" {
						if got := receive(t, stream); got != "last" {
							t.Error(got)
						}
					}
					if err := stream.RecvMsg(&b); err.Error() != want {
						t.Errorf("ended with %v", err)
					}
					x := <-made
					<-x.done
					if x.call.Err() == nil {
						t.Error("the call is not over")
					}
				}
				if s.StreamBytes() != 0 || s.held.Load() != 0 {
					t.Errorf("%d and %d bytes are held", s.StreamBytes(), s.held.Load())
				}
			})
		}
	}
}

var zipped = gzipOption()

// A client that does not read has no more of its requests read, and holds no more
// than its outbox; others are served.
func TestBidiNotRead(t *testing.T) {
	made := make(chan *receiver, 10)
	s := start(t, rig{
		Options: Options{StreamMessages: 4, StreamBytes: 1 << 20},
		methods: []Method{{Name: "/s/echo", Unary: echo}, streamMethod(t, made, func() *receiver {
			var mu sync.Mutex
			var waiting []string
			flush := func(r *receiver) {
				mu.Lock()
				defer mu.Unlock()
				for len(waiting) > 0 && r.say(waiting[0]) {
					waiting = waiting[1:]
				}
			}
			return &receiver{
				on: func(r *receiver, raw string) error {
					mu.Lock()
					waiting = append(waiting, raw)
					mu.Unlock()
					flush(r)
					return nil
				},
				more: flush,
			}
		})},
	})
	f := s.speak(t)
	id := f.headers(false, grpcFields("/s/stream")...)
	big := strings.Repeat("x", 10<<10)
	for range 100 {
		for rest := prefixed(big); len(rest) > 0; rest = rest[min(len(rest), 16<<10):] {
			f.ok(f.fr.WriteData(id, false, rest[:min(len(rest), 16<<10)]))
		}
		// A window of 256 KiB is all that may be sent ahead.
		if f.sent += len(big) + 5; f.sent > recvWindow-2*len(big) {
			break
		}
	}
	x := <-made
	eventually(t, "a refused Send", func() bool { return x.sent.Load() == 6 && s.StreamBytes() >= 3*len(big) })
	conn := s.dial(t)
	if _, err := invoke(t.Context(), conn, "/s/echo", nil); err != nil {
		t.Fatal(err)
	}
	// 64 KiB of window, and the outbox; no request is taken beyond that.
	if n := x.messages.Load(); n > 14 {
		t.Errorf("%d messages were taken of a client that reads nothing", n)
	}
	f.ok(f.fr.WriteWindowUpdate(0, 1<<30))
	f.ok(f.fr.WriteWindowUpdate(id, 1<<30))
	f.ok(f.fr.WriteData(id, true, nil))
	got := f.await(id)
	if want := f.sent; len(got.data) != want || got.last("grpc-status") != "0" {
		t.Errorf("%d bytes, not %d; status %q", len(got.data), want, got.last("grpc-status"))
	}
	<-x.done
}

func TestBidiEnds(t *testing.T) {
	for name, end := range map[string]func(s *served, f *frames, id uint32, cancel func(error)){
		"reset": func(_ *served, f *frames, id uint32, _ func(error)) {
			f.ok(f.fr.WriteRSTStream(id, http2.ErrCodeCancel))
		},
		"disconnect": func(_ *served, f *frames, _ uint32, _ func(error)) { _ = f.nc.Close() },
		"watch":      func(_ *served, _ *frames, _ uint32, cancel func(error)) { cancel(errors.New("cut")); cancel(nil) },
		"stop":       func(s *served, _ *frames, _ uint32, _ func(error)) { s.Stop() },
		"deadline":   func(*served, *frames, uint32, func(error)) {},
	} {
		t.Run(name, func(t *testing.T) {
			made := make(chan *receiver, 10)
			m := streamMethod(t, made, echoes)
			cuts := make(chan func(error), 1)
			forgotten := make(chan struct{})
			m.Watch = func(call *Call, end func(error)) func() {
				cuts <- end
				return func() { close(forgotten) }
			}
			s := start(t, rig{methods: []Method{m}})
			f := s.speak(t)
			fields := grpcFields("/s/stream")
			if name == "deadline" {
				fields = append(fields, "grpc-timeout", "10m")
			}
			id := f.headers(false, fields...)
			f.ok(f.fr.WriteData(id, false, prefixed("a")))
			x := <-made
			if name != "deadline" {
				eventually(t, "the answer", func() bool { return x.sent.Load() == 1 })
			}
			end(s, f, id, <-cuts)
			<-x.done
			<-forgotten
			<-x.call.Context().Done()
			if x.out.Send([]Message{{Head: []byte("x")}}) {
				t.Error("took a message after the end")
			}
			x.out.Resume()
			x.out.End(nil)
			want := map[string]string{"watch": "2 cut", "deadline": "4 context deadline exceeded"}[name]
			if want != "" {
				got := f.await(id)
				if s := got.last("grpc-status") + " " + got.last("grpc-message"); s != want {
					t.Errorf("ended with %q, not %q", s, want)
				}
			}
			if name == "deadline" && !errors.Is(x.call.Err(), context.DeadlineExceeded) {
				t.Error(x.call.Err())
			}
		})
	}
}

// TestBidiFanOut has one goroutine send to many streams of few connections, as
// the watch hub does.
func TestBidiFanOut(t *testing.T) {
	const streams, messages = 200, 100
	made := make(chan *receiver, streams)
	s := start(t, rig{methods: []Method{streamMethod(t, made, func() *receiver { return &receiver{on: func(*receiver, string) error { return nil }} })}})
	var wg sync.WaitGroup
	for range streams {
		conn := s.dial(t)
		stream, err := open(t.Context(), conn, "/s/stream")
		if err != nil {
			t.Fatal(err)
		}
		send(t, stream, "begin")
		wg.Go(func() {
			for n := range messages {
				var b []byte
				if err := stream.RecvMsg(&b); err != nil {
					t.Error(err)
					return
				}
				if want := fmt.Sprintf("event %3d", n); string(b) != want {
					t.Errorf("got %q, not %q", b, want)
					return
				}
			}
		})
	}
	var all []*receiver
	for range streams {
		all = append(all, <-made)
	}
	for n := range messages {
		for _, r := range all {
			eventually(t, "room", func() bool { return r.say(fmt.Sprintf("event %3d", n)) })
		}
	}
	wg.Wait()
}

func TestSender(t *testing.T) {
	var given, released atomic.Int32
	s := start(t, rig{methods: []Method{{Name: "/s/many", Sender: func(call *Call, raw []byte, send Send) error {
		for i := range 50 {
			given.Add(1)
			if err := send(make([]byte, 100<<10), func() { released.Add(1) }); err != nil {
				if call.Err() == nil {
					t.Errorf("failed with %v in place %d", err, i)
				}
				return err
			}
		}
		return status.Error(codes.DataLoss, "at last")
	}}}})
	conn := s.dial(t)
	stream, err := open(t.Context(), conn, "/s/many")
	if err != nil {
		t.Fatal(err)
	}
	send(t, stream, "")
	for range 50 {
		if got := receive(t, stream); len(got) != 100<<10 {
			t.Fatal(len(got))
		}
	}
	var b []byte
	if err := stream.RecvMsg(&b); status.Code(err) != codes.DataLoss {
		t.Error(err)
	}
	eventually(t, "the last release", func() bool { return released.Load() == 50 })

	// A client that leaves has what waits for it released.
	for _, how := range []string{"cancel", "close", "stop"} {
		given.Store(0)
		released.Store(0)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		// Windows of a size, or the client's grow until all has been sent.
		conn := s.dial(t, grpc.WithInitialWindowSize(1<<16), grpc.WithInitialConnWindowSize(1<<17))
		stream, err := open(ctx, conn, "/s/many")
		if err != nil {
			t.Fatal(err)
		}
		send(t, stream, "")
		_ = receive(t, stream)
		switch how {
		case "cancel":
			cancel()
		case "close":
			_ = conn.Close()
		case "stop":
			s.Stop()
		}
		eventually(t, "the handler's end", func() bool { return s.goroutines.Load() == 0 })
		if n := given.Load(); n < 2 || n == 50 {
			t.Errorf("%s: %d were sent", how, n)
		}
		eventually(t, "the release of all", func() bool { return released.Load() == given.Load() })
	}
}

// A stream that is ended while a message is half sent sends the other half first.
func TestBidiEndsBehindItsMessage(t *testing.T) {
	made := make(chan *receiver, 1)
	s := start(t, rig{methods: []Method{streamMethod(t, made, echoes)}})
	f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 100})
	id := f.headers(false, grpcFields("/s/stream")...)
	f.ok(f.fr.WriteData(id, false, append(prefixed(strings.Repeat("m", 1000)), prefixed("dropped")...)))
	f.data(100)
	f.ok(f.fr.WriteData(id, false, prefixed("fail")))
	x := <-made
	<-x.done
	f.ok(f.fr.WriteWindowUpdate(id, 10000))
	got := f.await(id)
	if len(got.data) != 905 || got.last("grpc-status") != "10" {
		t.Error(got)
	}
	eventually(t, "the end of the stream", func() bool { return s.metrics.streams.Load() == 0 })
	s.mu.Lock()
	for c := range s.conns {
		c.mu.Lock()
		if n := c.queued.Load(); n != 0 {
			t.Errorf("%d bytes are still counted", n)
		}
		c.mu.Unlock()
	}
	s.mu.Unlock()
}

// Deadlines that pass at any moment of a stream's beginning end it all the same.
func TestBidiShortDeadlines(t *testing.T) {
	made := make(chan *receiver, 1000)
	s := start(t, testServiceRig(&testService{}, rig{methods: []Method{streamMethod(t, made, echoes), {Name: "/s/echo", Unary: echo}}}))
	f := s.speak(t)
	for i := range 300 {
		timeout := fmt.Sprint(1+i*i/3, "u")
		for _, m := range []string{"/s/stream", "/grpc.testing.TestService/FullDuplexCall", "/s/echo"} {
			id := f.headers(false, grpcFields(m, "grpc-timeout", timeout)...)
			if m == "/s/echo" {
				f.ok(f.fr.WriteData(id, true, prefixed("x")))
			}
			got := f.await(id)
			if code := got.last("grpc-status"); code != "4" && (m != "/s/echo" || code != "0") {
				t.Fatalf("%s after %s: %v", m, timeout, got)
			}
		}
	}
	eventually(t, "the end of all", func() bool { return s.goroutines.Load() == 0 && s.metrics.streams.Load() == 0 })
	for range len(made) {
		<-(<-made).done
	}
}
