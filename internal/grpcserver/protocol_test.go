package grpcserver

import (
	"bytes"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/clock"
)

// sized answers with as many bytes as the request says.
func bySize(_ *Call, raw []byte, reply func([]byte, error)) {
	var n int
	_, _ = fmt.Sscan(string(raw), &n)
	reply(bytes.Repeat([]byte("x"), n), nil)
}

// data reads DATA frames until n bytes came, or the stream ended, and returns how
// many came and of which streams, in order.
func (f *frames) data(n int) (total int, ids []uint32) {
	f.t.Helper()
	for total < n {
		fr, err := f.read()
		f.ok(err)
		if d, ok := fr.(*http2.DataFrame); ok {
			total += len(d.Data())
			ids = append(ids, d.StreamID)
		}
	}
	return total, ids
}

// nothing says that the server sends no more data: what it answers to a PING
// comes next.
func (f *frames) nothing() {
	f.t.Helper()
	f.ok(f.fr.WritePing(false, [8]byte{9}))
	for {
		fr, err := f.fr.ReadFrame()
		f.ok(err)
		switch fr := fr.(type) {
		case *http2.PingFrame:
			return
		case *http2.DataFrame:
			f.t.Fatalf("%d bytes of data beyond the window", fr.Length)
		}
	}
}

func flowRig() rig {
	return rig{Options: Options{KeepaliveMinTime: 1}, methods: []Method{{Name: "/s/n", Unary: bySize}, {Name: "/s/echo", Unary: echo}}}
}

func TestStreamWindow(t *testing.T) {
	s := start(t, flowRig())
	f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 10})
	id := f.call("/s/n", "100")
	f.data(10)
	f.nothing()
	f.ok(f.fr.WriteWindowUpdate(id, 5))
	f.data(5)
	f.nothing()
	// A lower initial window makes it negative; raising it again takes that off.
	f.ok(f.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}))
	f.ok(f.fr.WriteWindowUpdate(id, 8))
	f.nothing()
	f.ok(f.fr.WriteWindowUpdate(id, 3))
	f.data(1)
	f.nothing()
	f.ok(f.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1000}))
	got := f.await(id)
	if len(got.data) != 105-16 || got.last("grpc-status") != "0" {
		t.Error(got)
	}
	if got := f.await(f.call("/s/n", "990")); len(got.data) != 995 {
		t.Error(got)
	}
}

// The connection's window is shared by its streams in turn.
func TestConnectionWindow(t *testing.T) {
	s := start(t, flowRig())
	f := s.speak(t, http2.Setting{ID: http2.SettingInitialWindowSize, Val: maxWindow})
	a, b := f.call("/s/n", "200000"), f.call("/s/n", "200000")
	f.data(65535)
	f.nothing()
	small := f.call("/s/n", "1")
	f.nothing()
	f.ok(f.fr.WriteWindowUpdate(0, 100000))
	n, ids := f.data(100000)
	if n != 100000 {
		t.Fatalf("%d bytes", n)
	}
	count := map[uint32]int{}
	for _, id := range ids {
		count[id]++
	}
	if count[a] < 2 || count[b] < 2 || count[small] != 1 {
		t.Errorf("frames of streams %v", ids)
	}
	f.ok(f.fr.WriteWindowUpdate(0, 1<<20))
	f.data(2*200005 + 6 - 165535)
}

// A reset stream gives its place, and the bytes it had, to others.
func TestResetWhileQueued(t *testing.T) {
	var sent atomic.Int32
	s := start(t, rig{Options: Options{KeepaliveMinTime: 1}, methods: []Method{{Name: "/s/n", Unary: func(c *Call, raw []byte, reply func([]byte, error)) {
		c.OnSent(func() { sent.Add(1) })
		bySize(c, raw, reply)
	}}}})
	f := s.speak(t)
	a := f.call("/s/n", "1000000")
	f.data(65535)
	b := f.call("/s/n", "1000")
	f.ok(f.fr.WriteRSTStream(a, http2.ErrCodeCancel))
	f.ok(f.fr.WriteWindowUpdate(0, 100000))
	if got := f.await(b); len(got.data) != 1005 {
		t.Error(got)
	}
	eventually(t, "the release of both", func() bool { return sent.Load() == 2 })
}

func TestReceiveWindow(t *testing.T) {
	s := start(t, rig{methods: []Method{{Name: "/s/echo", Unary: echo}, streamMethod(t, make(chan *receiver, 1), func() *receiver {
		return &receiver{on: func(r *receiver, _ string) error { r.out.Hold(); return nil }}
	})}})
	// More than the window of a stream that holds.
	f := s.speak(t)
	id := f.headers(false, grpcFields("/s/stream")...)
	f.ok(f.fr.WriteData(id, false, prefixed("a")))
	for range recvWindow/maxFrame + 1 {
		f.ok(f.fr.WriteData(id, false, make([]byte, maxFrame)))
	}
	if got := f.await(id); got.reset == nil || *got.reset != http2.ErrCodeFlowControl {
		t.Error(got)
	}
	if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
		t.Error(got)
	}
}

func TestManyFramesOfOneMessage(t *testing.T) {
	s := start(t, rig{methods: []Method{{Name: "/s/echo", Unary: echo}}})
	f := s.speak(t)
	id := f.headers(false, grpcFields("/s/echo")...)
	m := prefixed(strings.Repeat("z", 5000))
	for i := 0; i < len(m); i += 7 {
		f.ok(f.fr.WriteDataPadded(id, i+7 >= len(m), m[i:min(i+7, len(m))], make([]byte, i%5)))
	}
	if got := f.await(id); !bytes.Equal(got.data, m) {
		t.Errorf("%d bytes came back of %d", len(got.data), len(m))
	}
}

// The client's frames may be as large as it is allowed to make them, and so may
// ours.
func TestPeerFrameSize(t *testing.T) {
	s := start(t, flowRig())
	f := s.speak(t, http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 20}, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
	f.ok(f.fr.WriteWindowUpdate(0, 1<<20))
	if got := f.await(f.call("/s/n", "500000")); len(got.data) != 500005 {
		t.Error(len(got.data))
	}
}

func TestTrailersOfClient(t *testing.T) {
	s := start(t, rig{methods: []Method{{Name: "/s/echo", Unary: echo}}})
	f := s.speak(t)
	id := f.headers(false, grpcFields("/s/echo")...)
	f.ok(f.fr.WriteData(id, false, prefixed("a")[:3]))
	f.ok(f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block("x", "y"), EndHeaders: true, EndStream: true}))
	if got := f.await(id); got.last("grpc-status") != "2" {
		t.Error(got)
	}
	id = f.headers(false, grpcFields("/s/echo")...)
	f.ok(f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block("x", "y"), EndHeaders: true}))
	if got := f.await(id); got.reset == nil || *got.reset != http2.ErrCodeProtocol {
		t.Error(got)
	}
}

// A client that answers before the request was complete has what follows ignored.
func TestAnswerBeforeEnd(t *testing.T) {
	s := start(t, rig{methods: []Method{{Name: "/s/echo", Unary: echo}}})
	f := s.speak(t)
	id := f.headers(false, grpcFields("/s/echo")...)
	f.ok(f.fr.WriteData(id, false, prefixed("a")))
	got := f.await(id)
	if got.message() != "a" || !got.ended {
		t.Error(got)
	}
	f.ok(f.fr.WriteData(id, true, []byte("more")))
	if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
		t.Error(got)
	}
}

func TestConnectionErrors(t *testing.T) {
	for name, c := range map[string]struct {
		code  http2.ErrCode
		write func(f *frames) error
	}{
		"data on stream 0":      {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteData(0, true, nil) }},
		"data on idle stream":   {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteData(5, true, nil) }},
		"reset of idle stream":  {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteRSTStream(5, 0) }},
		"window of idle stream": {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteWindowUpdate(5, 1) }},
		"window of 0":           {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteWindowUpdate(0, 0) }},
		"window overflow":       {http2.ErrCodeFlowControl, func(f *frames) error { return f.fr.WriteWindowUpdate(0, maxWindow) }},
		"ping of 4":             {http2.ErrCodeFrameSize, func(f *frames) error { return f.fr.WriteRawFrame(http2.FramePing, 0, 0, make([]byte, 4)) }},
		"ping on a stream":      {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteRawFrame(http2.FramePing, 0, 1, make([]byte, 8)) }},
		"settings of 5":         {http2.ErrCodeFrameSize, func(f *frames) error { return f.fr.WriteRawFrame(http2.FrameSettings, 0, 0, make([]byte, 5)) }},
		"settings on a stream":  {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteRawFrame(http2.FrameSettings, 0, 1, nil) }},
		"ack with settings":     {http2.ErrCodeFrameSize, func(f *frames) error { return f.fr.WriteRawFrame(http2.FrameSettings, 1, 0, make([]byte, 6)) }},
		"push":                  {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteRawFrame(http2.FramePushPromise, 4, 1, make([]byte, 4)) }},
		"even stream":           {http2.ErrCodeProtocol, func(f *frames) error { f.next = 2; f.call("/s/echo", ""); return nil }},
		"lower stream": {http2.ErrCodeProtocol, func(f *frames) error {
			f.next = 9
			f.call("/s/echo", "")
			f.next = 3
			f.call("/s/echo", "")
			return nil
		}},
		"continuation alone":   {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteContinuation(1, true, nil) }},
		"data between headers": {http2.ErrCodeProtocol, func(f *frames) error { f.open(1); return f.fr.WriteData(1, true, nil) }},
		"other continuation":   {http2.ErrCodeProtocol, func(f *frames) error { f.open(1); return f.fr.WriteContinuation(3, true, nil) }},
		"too much padding":     {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteRawFrame(http2.FrameHeaders, 8|4, 1, []byte{9, 0x83}) }},
		"bad index":            {http2.ErrCodeCompression, func(f *frames) error { return f.fr.WriteRawFrame(http2.FrameHeaders, 4, 1, []byte{0xff, 0xff, 1}) }},
		"cut block":            {http2.ErrCodeCompression, func(f *frames) error { return f.fr.WriteRawFrame(http2.FrameHeaders, 4, 1, []byte{0x40, 5, 'a'}) }},
		"table too large": {http2.ErrCodeCompression, func(f *frames) error {
			return f.fr.WriteRawFrame(http2.FrameHeaders, 4, 1, []byte{0x3f, 0xff, 0xff, 3})
		}},
		"frame too large": {http2.ErrCodeFrameSize, func(f *frames) error { return f.fr.WriteRawFrame(0x55, 0, 0, make([]byte, maxFrame+1)) }},
		"frame size out of range": {http2.ErrCodeProtocol, func(f *frames) error {
			return f.fr.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1})
		}},
		"enable push 2": {http2.ErrCodeProtocol, func(f *frames) error { return f.fr.WriteSettings(http2.Setting{ID: http2.SettingEnablePush, Val: 2}) }},
		"initial window": {http2.ErrCodeFlowControl, func(f *frames) error {
			return f.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 31})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, rig{methods: []Method{{Name: "/s/echo", Unary: echo}}})
			f := s.speak(t)
			f.ok(c.write(f))
			if g := f.goneAway(); g == nil || g.ErrCode != c.code {
				t.Errorf("GOAWAY %v, not %v", g, c.code)
			}
			_ = f.nc.Close()
			eventually(t, "the end of the connection", func() bool { return s.metrics.open.Load() == 0 })
		})
	}
	t.Run("no settings", func(t *testing.T) {
		s := start(t, rig{})
		nc := s.raw(t)
		_, _ = nc.Write([]byte(preface))
		f := readerOf(t, nc)
		f.ok(f.fr.WritePing(false, [8]byte{}))
		if g := f.goneAway(); g == nil || g.ErrCode != http2.ErrCodeProtocol {
			t.Errorf("GOAWAY %v", g)
		}
	})
}

// open begins a header block.
func (f *frames) open(id uint32) {
	f.ok(f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block(grpcFields("/s/echo")...)}))
}

func TestServerKeepalive(t *testing.T) {
	clk := clock.NewFake(time.Unix(1e6, 0))
	s := start(t, rig{Options: Options{Clock: clk, KeepaliveTime: time.Minute, KeepaliveTimeout: 10 * time.Second}, methods: []Method{{Name: "/s/echo", Unary: echo}}})
	f := s.speak(t)
	if got := f.await(f.call("/s/echo", "x")); got.message() != "x" {
		t.Fatal(got)
	}
	ping := func() *http2.PingFrame {
		for {
			fr, err := f.fr.ReadFrame()
			f.ok(err)
			if p, ok := fr.(*http2.PingFrame); ok && !p.IsAck() {
				return p
			}
		}
	}
	for range 3 {
		clk.WaitAlarms(1)
		clk.Advance(time.Minute)
		p := ping()
		f.ok(f.fr.WritePing(true, p.Data))
		got := f.await(f.call("/s/echo", "x")) // the answer was read
		if got.message() != "x" {
			t.Fatal(got)
		}
		clk.WaitAlarms(1)
		clk.Advance(10 * time.Second)
		eventually(t, "the end of the wait for the ping's answer", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			for c := range s.conns {
				c.mu.Lock()
				defer c.mu.Unlock()
				return !c.pinged
			}
			return false
		})
	}
	clk.WaitAlarms(1)
	clk.Advance(time.Minute)
	ping()
	eventually(t, "the end of a silent connection", func() bool {
		clk.Advance(time.Second)
		return s.metrics.open.Load() == 0
	})
	if s.metrics.Limited(limitKeepalive) != 1 {
		t.Error("was not counted")
	}
}

func TestTooManyPings(t *testing.T) {
	clk := clock.NewFake(time.Unix(1e6, 0))
	s := start(t, rig{Options: Options{Clock: clk}, methods: hostileRig().methods})
	f := s.speak(t)
	ping := func(after time.Duration) {
		clk.Advance(after)
		f.ok(f.fr.WritePing(false, [8]byte{1}))
		for {
			fr, err := f.fr.ReadFrame()
			f.ok(err)
			if p, ok := fr.(*http2.PingFrame); ok && p.IsAck() {
				return
			}
		}
	}
	f.call("/s/stuck", "")
	for range 10 {
		ping(5 * time.Second)
	}
	// Answers in between make up for it.
	for range 10 {
		ping(time.Second)
		f.await(f.call("/s/echo", ""))
	}
	ping(0) // right after an answer
	ping(time.Second)
	ping(time.Second)
	f.ok(f.fr.WritePing(false, [8]byte{1}))
	g := f.goneAway()
	if g == nil || g.ErrCode != http2.ErrCodeEnhanceYourCalm {
		t.Errorf("GOAWAY %v", g)
	}
	if s.metrics.Limited(limitPings) != 1 {
		t.Error("was not counted")
	}
}

// stats counts what a method tells.
type stats struct {
	started, received, sent, finished atomic.Int32
	codes                             [20]atomic.Int32
}

func (s *stats) Started()     { s.started.Add(1) }
func (s *stats) Received(int) { s.received.Add(1) }
func (s *stats) Sent(int)     { s.sent.Add(1) }
func (s *stats) Finished(c *Call, code codes.Code, _ time.Duration) {
	if c.Err() == nil {
		panic("finished and not over")
	}
	s.finished.Add(1)
	s.codes[code].Add(1)
}

func TestStats(t *testing.T) {
	var unary, sender, stream stats
	clk := clock.NewFake(time.Unix(1e6, 0))
	waiting := make(chan struct{}, 2)
	made := make(chan *receiver, 1)
	bidi := streamMethod(t, made, echoes)
	bidi.Stats = &stream
	s := start(t, rig{Options: Options{Clock: clk}, methods: []Method{
		{Name: "/s/unary", Stats: &unary, Unary: func(call *Call, raw []byte, reply func([]byte, error)) {
			switch string(raw) {
			case "fail":
				reply(nil, status.Error(codes.DataLoss, "x"))
			case "wait":
				waiting <- struct{}{}
				go func() { <-call.Context().Done(); reply(raw, nil) }()
			default:
				reply(raw, nil)
			}
		}},
		{Name: "/s/sender", Stats: &sender, Sender: func(_ *Call, raw []byte, send Send) error { return send(raw, nil) }},
		bidi,
	}})
	f := s.speak(t)
	f.await(f.call("/s/unary", "ok"))
	f.await(f.call("/s/unary", "fail"))
	id := f.call("/s/unary", "wait", "grpc-timeout", "300m")
	<-waiting // its message has come
	eventually(t, "the deadline", func() bool {
		clk.Advance(300 * time.Millisecond)
		return unary.codes[codes.DeadlineExceeded].Load() == 1
	})
	f.await(id)
	f.await(f.headers(true, grpcFields("/s/unary")...))
	id = f.call("/s/unary", "wait")
	f.ok(f.fr.WriteRSTStream(id, http2.ErrCodeCancel))
	f.await(f.call("/s/sender", "x"))
	f.await(f.call("/s/stream", "a"))
	for _, c := range []struct {
		name                              string
		s                                 *stats
		started, received, sent, finished int32
	}{{"unary", &unary, 5, 4, 1, 5}, {"sender", &sender, 1, 1, 1, 1}, {"stream", &stream, 1, 1, 1, 1}} {
		eventually(t, c.name+" to be finished", func() bool { return c.s.finished.Load() == c.finished })
		if a, b, d := c.s.started.Load(), c.s.received.Load(), c.s.sent.Load(); a != c.started || b != c.received || d != c.sent {
			t.Errorf("%s: started %d, received %d, sent %d", c.name, a, b, d)
		}
	}
	for code, want := range map[codes.Code]int32{codes.OK: 1, codes.DataLoss: 1, codes.DeadlineExceeded: 1, codes.Unknown: 1, codes.Canceled: 1} {
		if n := unary.codes[code].Load(); n != want {
			t.Errorf("%v: %d calls", code, n)
		}
	}
}

// A client that makes its table of header fields smaller is told in the next header
// block that we use none (RFC 9113, section 4.3.1).
func TestSmallerTableOfHeaders(t *testing.T) {
	s := start(t, rig{methods: []Method{{Name: "/s/echo", Unary: echo}}})
	f := s.speak(t)
	first := func(id uint32) byte {
		for {
			fr, err := f.read()
			f.ok(err)
			if h, ok := fr.(*http2.HeadersFrame); ok && h.StreamID == id {
				b := h.HeaderBlockFragment()[0]
				f.fields(h)
				if !h.StreamEnded() { // its trailer
					fr, err = f.read()
					f.ok(err)
					if _, ok := fr.(*http2.DataFrame); ok {
						fr, err = f.read()
						f.ok(err)
					}
					if b := fr.(*http2.HeadersFrame).HeaderBlockFragment()[0]; b == tableOfNone {
						t.Error("the trailer has an update, too")
					}
				}
				return b
			}
		}
	}
	for _, c := range []struct {
		sizes  []uint32 // that are announced
		method string
		want   bool
	}{
		{nil, "/s/echo", false},
		{[]uint32{4096, 1 << 16}, "/s/echo", false},
		{[]uint32{4096}, "/s/echo", true},
		{nil, "/s/echo", false},
		{[]uint32{0, 1 << 16}, "/s/none", true},
		{nil, "/s/none", false},
		{[]uint32{0}, "/s/echo", true},
		{[]uint32{0}, "/s/echo", false},
	} {
		for _, size := range c.sizes {
			f.ok(f.fr.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: size}))
		}
		if got := first(f.call(c.method, "x")) == tableOfNone; got != c.want {
			t.Errorf("%s after sizes %v: an update is %v", c.method, c.sizes, got)
		}
	}
}
