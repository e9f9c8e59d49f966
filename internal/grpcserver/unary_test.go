package grpcserver

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/clock"
)

func TestUnary(t *testing.T) {
	for name, r := range map[string]rig{"plain": {}, "tls": {tls: true}, "unix": {unix: true}} {
		t.Run(name, func(t *testing.T) {
			r.MaxReceiveBytes = 40 << 20
			r.methods = []Method{
				{Name: "/s/echo", Unary: echo},
				{Name: "/s/later", Unary: func(_ *Call, raw []byte, reply func([]byte, error)) { go reply(raw, nil) }},
				{Name: "/s/fail", Unary: func(_ *Call, raw []byte, reply func([]byte, error)) {
					reply(nil, status.Error(codes.NotFound, "nothing % at ü\n"))
				}},
			}
			s := start(t, r)
			conn := s.dial(t)
			for _, n := range []int{0, 1, 100, 2047, 2048, 2049, 16 << 10, 100 << 10, 1 << 20, 20 << 20} {
				in := bytes.Repeat([]byte("x"), n)
				for _, m := range []string{"/s/echo", "/s/later"} {
					out, err := invoke(t.Context(), conn, m, in, maxCall)
					if err != nil {
						t.Fatalf("%s of %d bytes: %v", m, n, err)
					}
					if !bytes.Equal(in, out) {
						t.Fatalf("%s of %d bytes: %d others came back", m, n, len(out))
					}
				}
			}
			_, err := invoke(t.Context(), conn, "/s/fail", nil)
			if st := status.Convert(err); st.Code() != codes.NotFound || st.Message() != "nothing % at ü\n" {
				t.Errorf("failed with %v", err)
			}
			if s.held.Load() != 0 {
				t.Errorf("%d bytes of requests are still held", s.held.Load())
			}
		})
	}
}

// TestUnaryConcurrent has many calls answered by many goroutines.
func TestUnaryConcurrent(t *testing.T) {
	replies := make(chan func(), 1000)
	for range 4 {
		go func() {
			for f := range replies {
				f()
			}
		}()
	}
	defer close(replies)
	s := start(t, rig{methods: []Method{{Name: "/s/m", Unary: func(_ *Call, raw []byte, reply func([]byte, error)) {
		replies <- func() { reply(raw, nil) }
	}}}})
	var wg sync.WaitGroup
	for range 4 {
		conn := s.dial(t)
		for i := range 20 {
			wg.Go(func() {
				in := []byte(strings.Repeat(string(rune('a'+i)), 10+97*i*i))
				for range 50 {
					ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
					out, err := invoke(ctx, conn, "/s/m", in)
					cancel()
					if err != nil || !bytes.Equal(in, out) {
						t.Errorf("%d bytes: %d came back, %v", len(in), len(out), err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	if n := s.metrics.streams.Load(); n != 0 {
		t.Errorf("%d streams are still open", n)
	}
	if n := s.calls.Load(); n != 0 {
		t.Errorf("%d calls are still counted", n)
	}
}

func TestCancelAndDeadline(t *testing.T) {
	began := make(chan *Call, 1)
	replies := make(chan func([]byte, error), 1)
	clk := clock.NewFake(time.Now())
	s := start(t, rig{Options: Options{Clock: clk}, methods: []Method{{Name: "/s/never", Unary: func(call *Call, _ []byte, reply func([]byte, error)) {
		began <- call
		replies <- reply
	}}}})
	conn := s.dial(t)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error, 1)
	go func() { _, err := invoke(ctx, conn, "/s/never", nil); got <- err }()
	call := <-began
	if call.Err() != nil {
		t.Fatal("over before it began")
	}
	derived, stop := context.WithCancel(call.Context())
	defer stop()
	cancel()
	<-call.Context().Done()
	<-derived.Done()
	if !errors.Is(call.Err(), context.Canceled) {
		t.Errorf("ended by %v", call.Err())
	}
	if err := <-got; status.Code(err) != codes.Canceled {
		t.Error(err)
	}
	sent := 0
	call.OnSent(func() { sent++ })
	reply := <-replies
	reply([]byte("late"), nil)
	if sent != 1 {
		t.Errorf("OnSent of a late answer was called %d times", sent)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("a second reply was taken")
			}
		}()
		reply(nil, nil)
	}()

	// The server's own clock ends a call whose client does not.
	f := s.speak(t)
	id := f.call("/s/never", "", "grpc-timeout", "20m")
	call = <-began
	if d, ok := call.Deadline(); !ok || d.Sub(clk.Now()) != 20*time.Millisecond {
		t.Errorf("deadline %v %v", d, ok)
	}
	eventually(t, "the deadline", func() bool {
		clk.Advance(20 * time.Millisecond)
		return call.Err() != nil
	})
	answer := f.await(id)
	if answer.last("grpc-status") != "4" || answer.last("grpc-message") != "context deadline exceeded" {
		t.Error(answer)
	}
	if !errors.Is(call.Err(), context.DeadlineExceeded) {
		t.Errorf("ended by %v", call.Err())
	}
	(<-replies)(nil, errors.New("late"))
}

func TestMetadata(t *testing.T) {
	calls := make(chan *Call, 1)
	s := start(t, rig{methods: []Method{{Name: "/s/m", Unary: func(call *Call, raw []byte, reply func([]byte, error)) {
		calls <- call
		reply(raw, nil)
	}}}})
	conn := s.dial(t)
	made := 0
	for i := range 50 { // each adds its time-out to the client's header table, which is full after some seventy and begins anew
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute-time.Duration(i))
		ctx = metadata.AppendToOutgoingContext(ctx, "k", "v1", "k", "v2", "blob-bin", "\x00\xff", "token", strings.Repeat("t", 300))
		if _, err := invoke(ctx, conn, "/s/m", nil); err != nil {
			t.Fatal(err)
		}
		cancel()
		call := <-calls
		md := call.Metadata()
		if md.First("k") != "v1" || len(md.Values("k")) != 2 || md.First("blob-bin") != "\x00\xff" || md.First("none") != "" {
			t.Fatalf("%v", md.values)
		}
		if _, ok := call.Deadline(); !ok {
			t.Fatal("no deadline")
		}
		md.Cache(func() any { made++; return made })
	}
	if made > 2 {
		t.Errorf("what is cached with a header block was made %d times", made)
	}
}

// letters is a body of the alphabet over and over.
type letters struct {
	at, size int
	piece    atomic.Int64 // the longest that was asked for
}

func (l *letters) Size() int { return l.size }

func (l *letters) Fill(p []byte) {
	l.piece.Store(max(l.piece.Load(), int64(len(p))))
	for i := range p {
		p[i] = 'a' + byte(l.at%26)
		l.at++
	}
}

// An answer may go on with what is made as it is sent, as slowly as the client
// reads.
func TestBody(t *testing.T) {
	for name, r := range map[string]rig{"plain": {}, "tls": {tls: true}} {
		t.Run(name, func(t *testing.T) {
			var told, piece atomic.Int64
			r.MaxSendBytes = 4 << 20
			r.methods = []Method{{Name: "/s/m", Unary: func(call *Call, raw []byte, reply func([]byte, error)) {
				size, _ := strconv.Atoi(string(raw))
				body := &letters{size: size}
				call.OnSent(func() {
					piece.Store(body.piece.Load())
					told.Add(1)
				})
				call.Follow(body)
				reply(raw, nil)
			}}}
			s := start(t, r)
			conn := s.dial(t)
			asked := int64(0)
			for _, size := range []int{0, 1, 100, 2 << 10, 16<<10 - 5 - 5, 16 << 10, 100_000, 3 << 20} {
				for _, option := range [][]grpc.CallOption{{maxCall}, {maxCall, gzipOption()}} {
					head := strconv.Itoa(size)
					want := append([]byte(head), make([]byte, size)...)
					(&letters{size: size}).Fill(want[len(head):])
					asked++
					got, err := invoke(t.Context(), conn, "/s/m", []byte(head), option...)
					if err != nil || !bytes.Equal(got, want) {
						t.Fatalf("%d bytes behind %q: %d came, %v", size, head, len(got), err)
					}
					eventually(t, "word that it was sent", func() bool { return told.Load() == asked })
					if n := piece.Load(); n > 1<<20 {
						t.Errorf("%d bytes of %d were made at once", n, size)
					}
				}
			}
			asked++
			if _, err := invoke(t.Context(), conn, "/s/m", []byte("4194304")); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("more than may be sent: %v", err)
			}
			f := s.speakTo(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 10_000})
			id := f.call("/s/m", "50000")
			asked++
			for n := 0; n < 10_000; {
				fr, err := f.read()
				f.ok(err)
				if fr, ok := fr.(*http2.DataFrame); ok {
					n += len(fr.Data())
				}
			}
			f.ok(f.fr.WriteRSTStream(id, http2.ErrCodeCancel))
			eventually(t, "the end of all answers", func() bool { return told.Load() == asked })
		})
	}
}

// speakTo is speak on whatever the server speaks beneath.
func (s *served) speakTo(t testing.TB, settings ...http2.Setting) *frames {
	t.Helper()
	nc := s.raw(t)
	if s.roots != nil {
		nc = tls.Client(nc, &tls.Config{RootCAs: s.roots, ServerName: "localhost", NextProtos: []string{"h2"}})
	}
	return speakOn(t, nc, settings...)
}
