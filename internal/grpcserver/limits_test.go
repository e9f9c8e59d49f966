package grpcserver

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/clock"
)

// inUse is what memory is in use.
func inUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// expectCalm has a hostile client write until it is cut off, and looks for the
// reason and for good clients that are served all the while.
func expectCalm(t *testing.T, s *served, limit string, write func(f *frames, i int) error) {
	t.Helper()
	before := s.metrics.Limited(limit)
	f := s.speak(t)
	var stopped atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		defer stopped.Store(true)
		for i := 0; ; i++ {
			f.mu.Lock()
			err := write(f, i)
			f.mu.Unlock()
			if err != nil {
				return
			}
			if i > 10_000_000 {
				t.Error("is never cut off")
				_ = f.nc.Close()
				return
			}
		}
	})
	conn := s.dial(t)
	for !stopped.Load() {
		if _, err := invoke(t.Context(), conn, "/s/echo", []byte("x")); err != nil {
			t.Errorf("a good client: %v", err)
			break
		}
	}
	wg.Wait()
	eventually(t, "the limit "+limit, func() bool { return s.metrics.Limited(limit) == before+1 })
	if g := f.lastGoAway(); g != nil && g.ErrCode != http2.ErrCodeEnhanceYourCalm {
		t.Errorf("GOAWAY %v", g.ErrCode)
	}
	if n := s.held.Load(); n != 0 {
		t.Errorf("%d bytes of requests are still held", n)
	}
}

// lastGoAway reads what came before the connection broke.
func (f *frames) lastGoAway() (last *http2.GoAwayFrame) {
	for {
		fr, err := f.fr.ReadFrame()
		if err != nil {
			return last
		}
		if g, ok := fr.(*http2.GoAwayFrame); ok {
			c := *g
			last = &c
		}
	}
}

func hostileRig() rig {
	return rig{methods: []Method{{Name: "/s/echo", Unary: echo}, {Name: "/s/never", Unary: func(call *Call, _ []byte, reply func([]byte, error)) {
		go func() { <-call.Context().Done(); reply(nil, call.Err()) }()
	}}, {Name: "/s/stuck", Unary: func(*Call, []byte, func([]byte, error)) {}}}}
}

func TestFloods(t *testing.T) {
	for name, c := range map[string]struct {
		limit string
		write func(f *frames, i int) error
	}{
		"settings":      {limitFlood, func(f *frames, _ int) error { return f.fr.WriteSettings() }},
		"pings":         {limitPings, func(f *frames, _ int) error { return f.fr.WritePing(false, [8]byte{}) }},
		"ping answers":  {limitFlood, func(f *frames, _ int) error { return f.fr.WritePing(true, [8]byte{}) }},
		"priorities":    {limitFlood, func(f *frames, _ int) error { return f.fr.WritePriority(1, http2.PriorityParam{StreamDep: 3}) }},
		"unknown types": {limitFlood, func(f *frames, _ int) error { return f.fr.WriteRawFrame(0x77, 0, 0, nil) }},
		"windows":       {limitFlood, func(f *frames, _ int) error { return f.fr.WriteWindowUpdate(0, 1) }},
		"empty data": {limitFlood, func(f *frames, i int) error {
			if i == 0 {
				f.headers(false, grpcFields("/s/echo")...)
			}
			return f.fr.WriteData(1, false, nil)
		}},
		"data of closed streams": {limitFlood, func(f *frames, i int) error {
			if i == 0 {
				f.call("/s/echo", "")
			}
			return f.fr.WriteData(1, false, nil)
		}},
		"resets of closed streams": {limitFlood, func(f *frames, i int) error {
			if i == 0 {
				f.call("/s/echo", "")
			}
			return f.fr.WriteRSTStream(1, http2.ErrCodeCancel)
		}},
		"trailers that end nothing": {limitFlood, func(f *frames, i int) error {
			if i == 0 {
				f.headers(false, grpcFields("/s/never")...)
			}
			return f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.block("a", "b"), EndHeaders: true})
		}},
		"rapid reset": {limitResets, func(f *frames, _ int) error {
			id := f.next
			f.next += 2
			if err := f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block(grpcFields("/s/never")...), EndHeaders: true}); err != nil {
				return err
			}
			return f.fr.WriteRSTStream(id, http2.ErrCodeCancel)
		}},
		"continuations": {limitContinued, func(f *frames, i int) error {
			if i == 0 {
				return f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.block(grpcFields("/s/echo")...)})
			}
			return f.fr.WriteContinuation(1, false, nil)
		}},
		"long continuations": {limitContinued, func(f *frames, i int) error {
			if i == 0 {
				return f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.block(grpcFields("/s/echo")...)})
			}
			return f.fr.WriteContinuation(1, false, bytes.Repeat(f.block("a", strings.Repeat("b", 1000)), 10))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := hostileRig()
			r.Clock = clock.NewFake(time.Unix(1e6, 0)) // nothing is forgiven by time, however slow the machine is
			expectCalm(t, start(t, r), c.limit, c.write)
		})
	}
}

// Calls that are given up while their handlers are at work may be many, but no more
// than a client may have at work: then it is not read until some have noticed.
func TestAbandonedCalls(t *testing.T) {
	replies := make(chan func([]byte, error), 2*maxWorking)
	s := start(t, rig{methods: []Method{{Name: "/s/stuck", Unary: func(_ *Call, _ []byte, reply func([]byte, error)) { replies <- reply }}}})
	f := s.speak(t)
	give := func(n int) (err error) {
		for range n {
			f.mu.Lock()
			id := f.call("/s/stuck", "")
			err = f.fr.WriteRSTStream(id, http2.ErrCodeCancel)
			f.mu.Unlock()
		}
		return err
	}
	const more = 1000
	f.ok(give(maxWorking + more))
	eventually(t, "the reader's wait", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			return c.waiting.Load()
		}
		return false
	})
	if got := len(replies); got < maxWorking || got == maxWorking+more {
		t.Errorf("%d calls are with their handlers", got)
	}
	go func() {
		for reply := range replies {
			reply([]byte("x"), nil)
		}
	}()
	defer func() { s.Stop(); close(replies) }()
	if got := f.await(f.call("/s/stuck", "")); got.message() != "x" {
		t.Error(got)
	}
}

func TestLargeHeaders(t *testing.T) {
	s := start(t, hostileRig())
	f := s.speak(t)
	ok := f.next
	f.next += 2
	block := f.block(grpcFields("/s/echo", "k", strings.Repeat("v", 50<<10))...)
	f.ok(f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: ok, BlockFragment: block[:maxFrame]}))
	for block = block[maxFrame:]; len(block) > 0; block = block[min(len(block), maxFrame):] {
		f.ok(f.fr.WriteContinuation(ok, len(block) <= maxFrame, block[:min(len(block), maxFrame)]))
	}
	f.ok(f.fr.WriteData(ok, true, prefixed("x")))
	if got := f.await(ok); got.message() != "x" {
		t.Error(got)
	}
	// Each field takes two bytes on the wire and a kilobyte decoded.
	value := strings.Repeat("v", 1<<10)
	fields := grpcFields("/s/echo")
	for range 100 {
		fields = append(fields, "k", value)
	}
	before := inUse()
	for range 200 {
		id := f.next
		f.next += 2
		f.ok(f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block(fields...), EndHeaders: true, EndStream: true}))
		got := f.await(id)
		if got.headers[0][":status"] != "431" || got.last("grpc-status") != "8" || !strings.Contains(got.last("grpc-message"), "headers larger than max (") {
			t.Fatal(got)
		}
	}
	if grown := inUse() - before; grown > 4<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
	if n := s.metrics.Limited(limitHeaders); n != 200 {
		t.Errorf("counted %d", n)
	}
	if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
		t.Error(got)
	}
}

// A client that asks for much and reads nothing is cut off; one that reads slowly
// is not.
func TestNeverReading(t *testing.T) {
	const answer = 100 << 10
	var sent, made atomic.Int64
	replies := make(chan func([]byte, error), 1000)
	s := start(t, rig{Options: Options{OutputBytes: 4 << 20}, methods: []Method{
		{Name: "/s/echo", Unary: echo},
		{Name: "/s/big", Unary: func(_ *Call, _ []byte, reply func([]byte, error)) { replies <- reply }},
		{Name: "/s/counted", Unary: func(call *Call, _ []byte, reply func([]byte, error)) {
			call.OnSent(func() { sent.Add(1) })
			made.Add(1)
			reply(make([]byte, answer), nil)
		}},
	}})
	before := inUse()
	f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow})
	f.ok(f.fr.WriteWindowUpdate(0, maxWindow-defaultWindow))
	for range 1000 {
		f.call("/s/big", "")
	}
	eventually(t, "all calls", func() bool { return len(replies) == 1000 })
	for range 1000 {
		(<-replies)(make([]byte, answer), nil)
	}
	eventually(t, "the limit", func() bool { return s.metrics.Limited(limitOutput) >= 1 })
	if grown := inUse() - before; grown > 64<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
	eventually(t, "the end of the connection", func() bool { return s.metrics.open.Load() == 0 })

	// What the sender counts is the sender's business, till CloseStalled is called.
	f = s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow})
	f.ok(f.fr.WriteWindowUpdate(0, maxWindow-defaultWindow))
	for range 200 {
		f.call("/s/counted", "")
	}
	eventually(t, "answers that are not read", func() bool { return made.Load() == 200 })
	s.CloseStalled(time.Hour)
	if s.metrics.open.Load() != 1 {
		t.Fatal("closed too early")
	}
	eventually(t, "the end of the connection", func() bool {
		s.CloseStalled(50 * time.Millisecond)
		return s.metrics.open.Load() == 0
	})
	if s.metrics.Limited(limitStalled) == 0 {
		t.Error("was not counted")
	}
	eventually(t, "the release of all answers", func() bool { return sent.Load() == 200 })
}

// Who is sent answers that it does not let in gets no more of them made: its calls
// are held back till it lets them in, and then answered.
func TestAnswersNotLetIn(t *testing.T) {
	s := start(t, rig{Options: Options{OutputBytes: 8 << 20}, methods: []Method{{Name: "/s/echo", Unary: echo}}})
	before := inUse()
	f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	for range 5000 {
		f.call("/s/echo", "x")
	}
	eventually(t, "calls that are held back", func() bool { return s.metrics.started.Load() == 5000 && s.metrics.heldBack.Load() > 2000 })
	if grown := inUse() - before; grown > 8<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
	// Some have a deadline, others are given up: neither costs anything any more.
	last := f.next - 2
	if got := f.await(f.call("/s/echo", "x", "grpc-timeout", "50m")); got.last("grpc-status") != "4" {
		t.Error(got)
	}
	for id := last; id > last-1998; id -= 2 {
		f.ok(f.fr.WriteRSTStream(id, http2.ErrCodeCancel))
	}
	f.ok(f.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1000}))
	answers := 0
	for answers < 4001 {
		fr, err := f.read()
		f.ok(err)
		switch fr := fr.(type) {
		case *http2.DataFrame:
			answers++
			if string(fr.Data()) != string(prefixed("x")) {
				t.Fatalf("answer %q", fr.Data())
			}
		case *http2.HeadersFrame:
		default:
			t.Fatal(fr)
		}
	}
	eventually(t, "room", func() bool { return s.queued.Load() == 0 && s.held.Load() == 0 && s.metrics.heldBack.Load() == 0 })
	if n := s.metrics.refused.Load(); n != 0 {
		t.Errorf("%d calls were refused", n)
	}
}

// Calls that are held back have their bound as well; then calls are refused, and
// who goes on for long is cut off.
func TestMostCallsHeldBack(t *testing.T) {
	still := clock.NewFake(time.Unix(1e6, 0)) // nothing is forgiven by time, however slow the machine is
	s := start(t, rig{Options: Options{HeldBytes: 4 << 20, MaxReceiveBytes: 1 << 20, OutputBytes: 1 << 20, Clock: still}, methods: []Method{{Name: "/s/echo", Unary: echo}}})
	before := inUse()
	f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	for range 6000 {
		f.call("/s/echo", "x")
	}
	eventually(t, "refusals", func() bool { return s.metrics.Limited(limitOutput) > 1000 })
	if grown := inUse() - before; grown > 6<<20 {
		t.Errorf("memory grew by %d bytes", grown)
	}
	f.ok(f.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1000}))
	if got := f.await(f.next - 2); got.reset == nil || *got.reset != http2.ErrCodeRefusedStream {
		t.Error(got)
	}
	eventually(t, "room", func() bool { return s.queued.Load() == 0 && s.held.Load() == 0 })
	if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
		t.Error(got)
	}
	f.ok(f.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
	var err error
	for i := 0; err == nil && i < 1_000_000; i++ {
		id := f.next
		f.next += 2
		if err = f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block(grpcFields("/s/echo")...), EndHeaders: true}); err == nil {
			err = f.fr.WriteData(id, true, prefixed("x"))
		}
	}
	eventually(t, "the end of the connection", func() bool { return s.metrics.Limited(limitFlood) == 1 && s.metrics.open.Load() == 0 })
	if n := s.held.Load(); n != 0 || s.metrics.heldBack.Load() != 0 {
		t.Errorf("%d bytes and %d calls are still held", n, s.metrics.heldBack.Load())
	}
}

// A client that has the window for few answers and widens it as it reads, but only
// behind all the calls that it has to make, has them all answered. It is asked to
// make no more meanwhile.
func TestCallsAheadOfTheWindow(t *testing.T) {
	for name, answer := range map[string]func(func()){"at once": func(f func()) { f() }, "later": func(f func()) { go f() }} {
		t.Run(name, func(t *testing.T) {
			s := start(t, rig{methods: []Method{{Name: "/s/m", Unary: func(_ *Call, _ []byte, reply func([]byte, error)) {
				answer(func() { reply(make([]byte, 1000), nil) })
			}}}})
			const n = 50_000
			c := newNarrowClient(t, s.addr, "/s/m", 10)
			defer c.nc.Close()
			read, limits := make(chan int, n), []uint32{}
			done := make(chan error, 1)
			go func() {
				defer close(read)
				in := bufio.NewReaderSize(c.nc, 64<<10)
				for answered := 0; answered < n; {
					b, err := in.Peek(frameHeaderLen)
					if err != nil {
						done <- err
						return
					}
					h := parseFrameHeader(b)
					b, _ = in.Peek(frameHeaderLen + h.length)
					switch {
					case h.typ == frameRSTStream || h.typ == frameGoAway:
						done <- fmt.Errorf("frame %v after %d answers", h, answered)
						return
					case h.typ == frameHeaders && h.flags&flagEndStream != 0:
						answered++
					case h.typ == frameData:
						read <- h.length
					case h.typ == frameSettings && h.length == 6 && b[frameHeaderLen+1] == settingMaxConcurrentStreams:
						limits = append(limits, binary.BigEndian.Uint32(b[frameHeaderLen+2:]))
					}
					_, _ = in.Discard(frameHeaderLen + h.length)
				}
				done <- nil
			}()
			for range n {
				c.send()
			}
			ok := c.out.Flush()
			for length := range read { // what was read in the meantime, and what is read from now on
				if ok == nil {
					ok = writeAll(c.nc, appendWindowUpdate(nil, 0, uint32(length)))
				}
			}
			if err := <-done; err != nil || ok != nil {
				t.Fatal(err, ok)
			}
			if len(limits) < 2 || limits[0] > n || limits[len(limits)-1] != ^uint32(0) {
				t.Errorf("was told of limits %v", limits)
			}
			for _, reason := range limitReasons {
				if n := s.metrics.Limited(reason); n != 0 {
					t.Errorf("met the limit %s %d times", reason, n)
				}
			}
		})
	}
}

func writeAll(w io.Writer, b []byte) error { _, err := w.Write(b); return err }

// A client that reads, but sends very many calls at once, has them all answered.
func TestManyCallsAtOnce(t *testing.T) {
	s := start(t, rig{methods: []Method{{Name: "/s/m", Unary: func(_ *Call, _ []byte, reply func([]byte, error)) { go reply(make([]byte, 1000), nil) }}}})
	const n = 50_000
	c := newCheapClient(t, s.addr, "/s/m", 10)
	defer c.nc.Close()
	done := make(chan error, 1)
	// It reads as well while it writes, as a real client does.
	go func() {
		in := bufio.NewReaderSize(c.nc, 64<<10)
		for answered := 0; answered < n; {
			b, err := in.Peek(frameHeaderLen)
			if err != nil {
				done <- err
				return
			}
			h := parseFrameHeader(b)
			if h.typ == frameRSTStream || h.typ == frameGoAway {
				done <- fmt.Errorf("frame %v after %d answers", h, answered)
				return
			}
			if h.typ == frameHeaders && h.flags&flagEndStream != 0 {
				answered++
			}
			_, _ = in.Discard(frameHeaderLen + h.length)
		}
		done <- nil
	}()
	for range n {
		c.send()
	}
	if err := c.out.Flush(); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, reason := range limitReasons {
		if n := s.metrics.Limited(reason); n != 0 {
			t.Errorf("met the limit %s %d times", reason, n)
		}
	}
}

// Who makes calls faster than they are answered is not read for a while.
func TestMoreCallsThanAnswers(t *testing.T) {
	var mu sync.Mutex
	var waiting []func()
	release := false
	s := start(t, rig{methods: []Method{{Name: "/s/wait", Unary: func(_ *Call, raw []byte, reply func([]byte, error)) {
		mu.Lock()
		defer mu.Unlock()
		if release {
			go reply(raw, nil)
			return
		}
		waiting = append(waiting, func() { reply(raw, nil) })
	}}}})
	const n = 3 * maxWorking
	done := make(chan error, 1)
	c := newCheapClient(t, s.addr, "/s/wait", 300)
	defer c.nc.Close()
	go func() { done <- c.run(n, n) }()
	count := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(waiting)
	}
	eventually(t, "the reader's wait", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			return c.waiting.Load()
		}
		return false
	})
	if got := count(); got > maxWorking+readBytes/300 {
		t.Errorf("%d calls are with their handlers", got)
	}
	mu.Lock()
	release = true
	mu.Unlock()
	for _, reply := range waiting {
		reply()
	}
	if err := <-done; err != nil {
		t.Error(err)
	}

	// One that goes away while it is not read is noticed when it is read again, or
	// when the server stops.
	mu.Lock()
	release, waiting = false, nil
	mu.Unlock()
	c = newCheapClient(t, s.addr, "/s/wait", 300)
	defer c.nc.Close()
	go func() { done <- c.run(n, n) }()
	eventually(t, "the bound", func() bool { return count() >= maxWorking })
	s.Stop()
	<-done
}

// A client that asks for answers to control frames and does not read them.
func TestUnreadControlFrames(t *testing.T) {
	s := start(t, rig{Options: Options{StreamStall: 300 * time.Millisecond}, methods: []Method{{Name: "/s/big", Unary: func(call *Call, _ []byte, reply func([]byte, error)) {
		call.OnSent(func() {})
		reply(make([]byte, 64<<20), nil)
	}}}})
	f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow})
	f.ok(f.fr.WriteWindowUpdate(0, maxWindow-defaultWindow))
	f.call("/s/big", "") // fills the socket
	eventually(t, "a full socket", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			c.mu.Lock()
			blocked := c.blocked
			c.mu.Unlock()
			return blocked && c.holding.Load() == 1 && time.Since(time.Unix(0, c.moved.Load())) > 200*time.Millisecond
		}
		return false
	})
	for range maxReplies/frameHeaderLen + 100 {
		if f.fr.WriteSettings() != nil {
			break
		}
	}
	eventually(t, "the limit", func() bool { return s.metrics.Limited(limitReplies) == 1 })
	eventually(t, "the end of the connection", func() bool { return s.metrics.open.Load() == 0 })
}

// One byte at a time costs no more than a read each.
func TestOneByteAtATime(t *testing.T) {
	s := start(t, hostileRig())
	var b bytes.Buffer
	f := &frames{t: t, fr: http2.NewFramer(&b, nil)}
	f.enc = newEncoder(&f.buf)
	b.WriteString(preface)
	f.ok(f.fr.WriteSettings())
	f.next = 1
	f.call("/s/echo", strings.Repeat("x", 2000))
	nc := s.raw(t)
	_ = nc.(patient).Conn.(*net.TCPConn).SetNoDelay(true)
	for _, c := range b.Bytes() {
		if _, err := nc.Write([]byte{c}); err != nil {
			t.Fatal(err)
		}
	}
	got := readerOf(t, nc).await(1)
	if len(got.message()) != 2000 {
		t.Error(got)
	}
}

// Requests that never become whole are bounded for a connection, and a message's
// memory comes as it is sent.
func TestIncompleteMessages(t *testing.T) {
	s := start(t, rig{Options: Options{MaxReceiveBytes: 16 << 20}, methods: hostileRig().methods})
	before := inUse()
	f := s.speak(t)
	for range 1000 {
		id := f.headers(false, grpcFields("/s/echo")...)
		f.ok(f.fr.WriteData(id, false, binary.BigEndian.AppendUint32([]byte{0}, 15<<20)))
	}
	if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
		t.Error(got)
	}
	if grown := inUse() - before; grown > 16<<20 {
		t.Errorf("%d bytes for 1000 messages that did not come", grown)
	}
	// What does come is held up to a bound.
	chunk := make([]byte, 16<<10)
	refused := 0
	for id := uint32(1); id < 1000 && refused == 0; id += 2 {
		for n := 0; n < 100 && refused == 0; n++ {
			f.ok(f.fr.WriteData(id, false, chunk))
			if n%50 == 0 && s.metrics.Limited(limitHeld) > 0 {
				refused++
			}
		}
	}
	eventually(t, "the limit", func() bool { return s.metrics.Limited(limitHeld) > 0 })
	if n := s.held.Load(); n > heldBytes+4<<20 {
		t.Errorf("%d bytes are held", n)
	}
	_ = f.nc.Close()
	eventually(t, "the release", func() bool { return s.held.Load() == 0 })
}

func TestMessageLimits(t *testing.T) {
	s := start(t, rig{Options: Options{MaxReceiveBytes: 1000, MaxSendBytes: 500}, methods: hostileRig().methods})
	conn := s.dial(t)
	for n, want := range map[int]string{
		1001: "grpc: received message larger than max (1001 vs. 1000)",
		501:  "grpc: trying to send message larger than max (501 vs. 500)",
		500:  "",
	} {
		_, err := invoke(t.Context(), conn, "/s/echo", make([]byte, n))
		if st := status.Convert(err); want != st.Message() || want != "" && st.Code() != codes.ResourceExhausted {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestMaxStreams(t *testing.T) {
	s := start(t, rig{Options: Options{MaxStreams: 2}, methods: hostileRig().methods})
	f := s.speak(t)
	a := f.call("/s/stuck", "")
	f.call("/s/stuck", "")
	c := f.call("/s/stuck", "")
	if got := f.await(c); got.reset == nil || *got.reset != http2.ErrCodeRefusedStream {
		t.Error(got)
	}
	f.ok(f.fr.WriteRSTStream(a, http2.ErrCodeCancel))
	if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
		t.Error(got)
	}
	if s.metrics.Limited(limitStreams) != 1 {
		t.Error("was not counted")
	}
}

// Thousands of connections that say nothing cost little, keep nobody out and are
// closed in time.
func TestIdleHandshakes(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "tls": true} {
		t.Run(name, func(t *testing.T) {
			const n = 400
			open := func(s *served) (idle []net.Conn) {
				for i := range n {
					nc := s.raw(t)
					if i%2 == 0 { // some say a little
						_, _ = nc.Write([]byte(map[bool]string{false: "PRI", true: "\x16\x03"}[secure]))
					}
					idle = append(idle, nc)
				}
				return idle
			}
			s := start(t, rig{tls: secure, Options: Options{HandshakeTimeout: time.Hour}, methods: hostileRig().methods})
			before := inUse()
			open(s)
			eventually(t, "all of them", func() bool { return s.handshakes.Load() == n })
			if each := (inUse() - before) / n; each > 48<<10 {
				t.Errorf("%d bytes for each connection that says nothing", each)
			}
			if _, err := invoke(t.Context(), s.dial(t), "/s/echo", nil); err != nil {
				t.Error(err)
			}

			s = start(t, rig{tls: secure, Options: Options{HandshakeTimeout: 100 * time.Millisecond}, methods: hostileRig().methods})
			for _, nc := range open(s) {
				_, _ = io.Copy(io.Discard, nc)
			}
			eventually(t, "their count", func() bool { return s.metrics.Limited(limitHandshake) == n })
		})
	}
}

func TestNotTLS(t *testing.T) {
	s := start(t, rig{tls: true, methods: hostileRig().methods})
	nc := s.raw(t)
	_, _ = nc.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	if _, err := io.Copy(io.Discard, nc); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Error(err)
	}
	c := tls.Client(s.raw(t), &tls.Config{RootCAs: s.roots, ServerName: "localhost", NextProtos: []string{"h2"}})
	_, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	if _, err := io.Copy(io.Discard, c); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Error(err)
	}
}

// Connections that have done their work and wait hold little.
func TestIdleConnections(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "tls": true} {
		t.Run(name, func(t *testing.T) {
			const n = 60
			s := start(t, rig{tls: secure, methods: []Method{{Name: "/s/n", Unary: bySize}}})
			var all []net.Conn
			for range n {
				nc := s.raw(t)
				if secure {
					nc = tls.Client(nc, &tls.Config{RootCAs: s.roots, ServerName: "localhost", NextProtos: []string{"h2"}})
				}
				all = append(all, nc)
			}
			use := func(nc net.Conn) {
				f := speakOn(t, nc, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
				f.ok(f.fr.WriteWindowUpdate(0, 1<<20))
				if got := f.await(f.call("/s/n", "500000")); len(got.data) != 500005 {
					t.Fatal(got)
				}
			}
			use(all[0])
			before := inUse()
			for _, nc := range all[1:] {
				use(nc) // whose own memory is garbage afterwards, but for crypto/tls'
			}
			limit := map[bool]int64{false: 32 << 10, true: 128 << 10}[secure]
			if each := (inUse() - before) / n; each > limit {
				t.Errorf("%d bytes for each connection", each)
			} else {
				t.Log(each)
			}
		})
	}
}

// However many calls are with their handlers, a client is read on while it has not
// let answers in: the handlers may wait for just that.
func TestHandlersThatWaitForWindows(t *testing.T) {
	room := make(chan struct{})
	s := start(t, rig{methods: []Method{
		{Name: "/s/large", Unary: func(call *Call, _ []byte, reply func([]byte, error)) {
			call.OnSent(func() { close(room) })
			reply(make([]byte, 100_000), nil)
		}},
		{Name: "/s/waits", Unary: func(_ *Call, raw []byte, reply func([]byte, error)) {
			go func() { <-room; reply(raw, nil) }()
		}},
	}})
	f := s.speak(t)
	f.call("/s/large", "")
	for range maxWorking + 1000 {
		f.call("/s/waits", "x")
	}
	eventually(t, "calls that are held back", func() bool { return s.metrics.heldBack.Load() == 1000 })
	f.ok(f.fr.WriteWindowUpdate(0, 1<<20))
	f.ok(f.fr.WriteWindowUpdate(1, 1<<20))
	for ended := 0; ended < maxWorking+1001; {
		fr, err := f.read()
		f.ok(err)
		if fr.Header().Type == http2.FrameRSTStream {
			t.Fatal(fr)
		}
		if h, ok := fr.(*http2.HeadersFrame); ok && h.StreamEnded() {
			ended++
		}
	}
}

// Streams that are open and do nothing cost something as well. Beyond what a client
// may have they are refused, and it can go on with those that it has; others are
// served all the while.
func TestManyOpenStreams(t *testing.T) {
	large := strings.Repeat("v", 3<<10)
	for name, c := range map[string]struct {
		n      int
		fields func(i int) []string
	}{
		"streams":             {3000, func(int) []string { return grpcFields("/s/stream") }},
		"calls of no message": {6000, func(int) []string { return grpcFields("/s/echo") }},
		"large header fields": {2000, func(i int) []string { return grpcFields("/s/echo", "k", fmt.Sprint(i, large)) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, rig{Options: Options{HeldBytes: 4 << 20, MaxReceiveBytes: 1 << 20}, methods: []Method{
				{Name: "/s/echo", Unary: echo},
				{Name: "/s/stream", Stream: func(*Call, StreamOut) StreamReceiver { return quiet{} }},
			}})
			before := inUse()
			f := s.speak(t)
			for i := range c.n {
				f.headers(false, c.fields(i)...)
			}
			eventually(t, "refusals", func() bool { return s.metrics.started.Load()+s.metrics.refused.Load() == int64(c.n) })
			if refused := s.metrics.Limited(limitStreams); refused < 1000 || refused != s.metrics.refused.Load() {
				t.Errorf("%d streams were refused because of the limit, %d in all", refused, s.metrics.refused.Load())
			}
			if grown := inUse() - before; grown > 5<<20 {
				t.Errorf("memory grew by %d bytes", grown)
			}
			if got := f.await(uint32(2*c.n - 1)); got.reset == nil || *got.reset != http2.ErrCodeRefusedStream {
				t.Error(got)
			}
			if _, err := invoke(t.Context(), s.dial(t), "/s/echo", []byte("x")); err != nil {
				t.Errorf("a good client: %v", err)
			}
			for id := uint32(1); id < 20; id += 2 { // one large one needs some room
				f.ok(f.fr.WriteRSTStream(id, http2.ErrCodeCancel))
			}
			if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
				t.Error(got)
			}
			_ = f.nc.Close()
			eventually(t, "the release", func() bool { return s.held.Load() == 0 })
		})
	}
}

// quiet is a receiver that does nothing.
type quiet struct{}

func (quiet) Message([]byte) error        { return nil }
func (quiet) HalfClose() bool             { return true }
func (quiet) Ready()                      {}
func (quiet) Sent(Message, time.Duration) {}
func (quiet) Close()                      {}

// However much some clients hold, there is something left for one that comes later.
func TestSharesOfWhatIsHeld(t *testing.T) {
	s := start(t, rig{Options: Options{HeldBytes: 16 << 20, MaxReceiveBytes: 1 << 20}, methods: hostileRig().methods})
	for range 20 {
		f := s.speak(t)
		chunk := make([]byte, 16<<10)
		for range 6 {
			id := f.headers(false, grpcFields("/s/echo")...)
			f.ok(f.fr.WriteData(id, false, binary.BigEndian.AppendUint32([]byte{0}, 1<<20-100)))
			for range 50 {
				f.ok(f.fr.WriteData(id, false, chunk))
			}
		}
		if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
			t.Fatal(got)
		}
	}
	if s.metrics.Limited(limitHeld) == 0 {
		t.Error("nobody met the limit")
	}
	if n := s.held.Load(); n > 16<<20 {
		t.Errorf("%d bytes are held", n)
	}
}

// A client gets no more than its share of the goroutines.
func TestShareOfGoroutines(t *testing.T) {
	const share = maxGoroutines / heldShare
	s := start(t, rig{methods: []Method{{Name: "/s/wait", Sender: func(call *Call, _ []byte, _ Send) error {
		<-call.Context().Done()
		return nil
	}}, {Name: "/s/none", Sender: func(*Call, []byte, Send) error { return nil }}}})
	f := s.speak(t)
	go func() {
		for range share + 10 {
			f.mu.Lock()
			f.call("/s/wait", "")
			f.mu.Unlock()
		}
	}()
	for range 10 {
		fr, err := f.read()
		f.ok(err)
		h, ok := fr.(*http2.HeadersFrame)
		if !ok {
			t.Fatal(fr)
		}
		if got := f.fields(h); got["grpc-status"] != "8" {
			t.Fatal(got)
		}
	}
	if n := s.metrics.Limited(limitGoroutines); n != 10 || s.goroutines.Load() != share {
		t.Errorf("%d calls were refused, %d have goroutines", n, s.goroutines.Load())
	}
	other := s.speak(t)
	if got := other.await(other.call("/s/none", "")); got.last("grpc-status") != "0" {
		t.Error(got)
	}
}

// An answer that its client does not let in is dropped when its room is wanted,
// whatever else the client lets in; what is waited for by nobody stays. Of a unary
// call it may be the answer to a write, which must not look refused.
func TestStalledStream(t *testing.T) {
	still := clock.NewFake(time.Unix(1e6, 0))
	sent := make(chan struct{}, 10)
	s := start(t, rig{Options: Options{Clock: still}, methods: []Method{{Name: "/s/counted", Unary: func(call *Call, raw []byte, reply func([]byte, error)) {
		call.OnSent(func() { sent <- struct{}{} })
		if string(raw) == "large" {
			raw = make([]byte, 2*defaultWindow)
		}
		reply(raw, nil)
	}}, {Name: "/s/part", Sender: func(call *Call, raw []byte, send Send) error {
		return send(raw, func() { sent <- struct{}{} })
	}}, {Name: "/s/echo", Unary: echo}}})
	f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 10})
	part := f.call("/s/part", "as much as is not let in")
	f.data(10)
	unread := f.call("/s/counted", "as much as is not let in")
	uncounted := f.call("/s/echo", "as much as is not let in")
	slow := f.call("/s/counted", "as much as is not let in")
	for range 4 {
		f.ok(f.fr.WriteWindowUpdate(slow, 1))
		if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
			t.Fatal(got)
		}
		s.CloseStalled(10 * time.Second)
		still.Advance(4 * time.Second)
	}
	f.resets(map[uint32]http2.ErrCode{part: http2.ErrCodeEnhanceYourCalm, unread: http2.ErrCodeInternal})
	<-sent
	<-sent
	if len(sent) > 0 || s.metrics.Limited(limitStalled) != 2 {
		t.Errorf("%d more answers were dropped, %d calls ended", len(sent), s.metrics.Limited(limitStalled))
	}
	for _, id := range []uint32{uncounted, slow} {
		f.ok(f.fr.WriteWindowUpdate(id, 100))
		if got := f.await(id); got.last("grpc-status") != "0" {
			t.Error(got)
		}
	}
	<-sent

	// The connection's window is its client's business as well.
	f.ok(f.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow}))
	large := f.call("/s/counted", "large")
	eventually(t, "an empty window", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for c := range s.conns {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.sendWindow == 0
		}
		return false
	})
	behind := f.call("/s/counted", "behind it")
	if got := f.await(f.headers(true, grpcFields("/s/nobody")...)); got.last("grpc-status") != "12" {
		t.Error(got)
	}
	still.Advance(11 * time.Second)
	s.CloseStalled(10 * time.Second)
	f.resets(map[uint32]http2.ErrCode{large: http2.ErrCodeInternal, behind: http2.ErrCodeInternal})
	<-sent
	<-sent
}

// resets waits until streams are reset with these codes, in any order, and no others.
func (f *frames) resets(want map[uint32]http2.ErrCode) {
	f.t.Helper()
	for len(want) > 0 {
		fr, err := f.read()
		f.ok(err)
		if r, ok := fr.(*http2.RSTStreamFrame); ok {
			if code, ok := want[r.StreamID]; !ok || r.ErrCode != code {
				f.t.Errorf("%v, not with %v", r, code)
			}
			delete(want, r.StreamID)
		}
	}
}

// What a client sends to a call that is over, but for an answer that it has not let
// in, is counted till that has gone, and no longer.
func TestSentToCallsThatAreOver(t *testing.T) {
	made := make(chan *receiver, 1)
	some, err := proto.Marshal(&pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 100}}})
	if err != nil {
		t.Fatal(err)
	}
	handled := func(s *served) { eventually(t, "the handler's end", func() bool { return s.goroutines.Load() == 0 }) }
	for name, c := range map[string]struct {
		fields []string
		first  []byte // is answered
		last   []byte // ends the call
		over   func(s *served)
		status string
	}{
		"receiver":          {grpcFields("/s/stream"), prefixed("as much as is not let in"), prefixed("fail"), func(*served) { <-(<-made).done }, "10"},
		"generated service": {grpcFields("/grpc.testing.TestService/FullDuplexCall"), prefixed(string(some)), prefixed("\xff"), handled, "13"},
		"HTTP":              {[]string{":method", "POST", ":scheme", "https", ":path", "/nobody", ":authority", "localhost"}, nil, nil, handled, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, testServiceRig(&testService{}, rig{tls: true, Options: Options{HTTP: webHandler()}, methods: []Method{streamMethod(t, made, echoes)}}))
			nc := tls.Client(s.raw(t), &tls.Config{RootCAs: s.roots, ServerName: "localhost", NextProtos: []string{"h2"}})
			f := speakOn(t, nc, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 10})
			id := f.headers(false, c.fields...)
			f.ok(f.fr.WriteData(id, false, c.first))
			f.data(10)
			f.ok(f.fr.WriteData(id, false, c.last))
			c.over(s)
			const n = recvWindow / maxFrame / 2
			for range n {
				f.ok(f.fr.WriteData(id, false, make([]byte, maxFrame)))
			}
			eventually(t, "their count", func() bool { return s.held.Load() >= n*maxFrame })
			f.ok(f.fr.WriteWindowUpdate(id, 10_000))
			if got := f.await(id); got.last("grpc-status") != c.status {
				t.Error(got)
			}
			eventually(t, "their release", func() bool { return s.held.Load() == 0 })
			_ = f.nc.Close()
			eventually(t, "the end of the connection", func() bool { return s.metrics.open.Load() == 0 })
			if n := s.held.Load(); n != 0 {
				t.Errorf("%d bytes are held", n)
			}
		})
	}
}

// What was given back with all that a stream holds is not given back again by who
// was just taking some of it.
func TestGivenBackOnce(t *testing.T) {
	s := New(Options{})
	defer s.Stop()
	st := &stream{}
	st.conn = &conn{s: s}
	st.hold(100)
	st.letGo(30)
	st.release() // as the stream ends
	st.letGo(70)
	if own, all := st.conn.held.Load(), s.held.Load(); own != 0 || all != 0 {
		t.Errorf("%d bytes of the connection and %d of all are held", own, all)
	}
	st.hold(10)
	st.release()
	if n := s.held.Load(); n != 0 {
		t.Errorf("%d bytes are held", n)
	}
}
