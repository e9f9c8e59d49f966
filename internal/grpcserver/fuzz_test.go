package grpcserver

import (
	"bytes"
	"encoding/binary"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// memConn is a connection whose client has said all that it will say.
type memConn struct {
	in  *bytes.Reader
	mu  sync.Mutex
	out bytes.Buffer
}

func (c *memConn) Read(p []byte) (int, error) { return c.in.Read(p) }
func (c *memConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out.Len() > 1<<20 {
		c.out.Reset()
	}
	return c.out.Write(p)
}
func (c *memConn) Close() error                     { return nil }
func (c *memConn) LocalAddr() net.Addr              { return handedAddr{} }
func (c *memConn) RemoteAddr() net.Addr             { return handedAddr{} }
func (c *memConn) SetDeadline(time.Time) error      { return nil }
func (c *memConn) SetReadDeadline(time.Time) error  { return nil }
func (c *memConn) SetWriteDeadline(time.Time) error { return nil }

// fuzzed is what a fuzzed connection talks to.
type fuzzed struct {
	*Server
	mu       sync.Mutex
	messages []string
}

func newFuzzed(f *testing.F) *fuzzed {
	out := &fuzzed{Server: New(Options{MaxReceiveBytes: 1 << 16})}
	f.Cleanup(out.Stop)
	out.Handle(Method{Name: "/s/echo", Unary: echo})
	out.Handle(Method{Name: "/s/later", Unary: func(_ *Call, raw []byte, reply func([]byte, error)) { go reply(raw, nil) }})
	out.Handle(Method{Name: "/s/many", Sender: func(_ *Call, raw []byte, send Send) error {
		for range 3 {
			if err := send(raw, func() {}); err != nil {
				return err
			}
		}
		return nil
	}})
	out.Handle(Method{Name: "/s/stream", Stream: func(_ *Call, o StreamOut) StreamReceiver { return &fuzzReceiver{out, o} }})
	return out
}

type fuzzReceiver struct {
	f   *fuzzed
	out StreamOut
}

func (r *fuzzReceiver) Message(raw []byte) error {
	r.f.mu.Lock()
	r.f.messages = append(r.f.messages, string(raw))
	r.f.mu.Unlock()
	r.out.Send([]Message{{Head: raw}})
	return nil
}
func (r *fuzzReceiver) HalfClose() bool             { return true }
func (r *fuzzReceiver) Ready()                      {}
func (r *fuzzReceiver) Sent(Message, time.Duration) {}
func (r *fuzzReceiver) Close()                      {}

// serve serves the bytes and returns what was answered.
func (f *fuzzed) serve(t *testing.T, b []byte) []byte {
	c := &memConn{in: bytes.NewReader(b)}
	f.Server.mu.Lock()
	f.raw[c] = struct{}{}
	f.Server.mu.Unlock()
	f.handle(c, false)
	eventually(t, "the end of all calls", func() bool {
		return f.goroutines.Load() == 0 && f.metrics.open.Load() == 0
	})
	if a, b, d := f.metrics.streams.Load(), f.held.Load(), f.calls.Load(); a != 0 || b != 0 || d != 0 || f.StreamBytes() != 0 {
		t.Fatalf("%d streams, %d bytes of requests, %d calls and %d bytes of answers are left", a, b, d, f.StreamBytes())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Clone(c.out.Bytes())
}

// script returns what a client sends.
func script(t testing.TB, write func(f *frames)) []byte {
	var b bytes.Buffer
	f := &frames{t: t, fr: http2.NewFramer(&b, nil), next: 1}
	f.fr.AllowIllegalWrites = true
	f.enc = hpack.NewEncoder(&f.buf)
	_ = f.fr.WriteSettings()
	write(f)
	return b.Bytes()
}

// FuzzFrames has a connection's bytes served. Nothing may panic, hang or leak, and
// what is answered must be frames.
func FuzzFrames(f *testing.F) {
	s := newFuzzed(f)
	for _, write := range []func(*frames){
		func(*frames) {},
		func(f *frames) {
			id := f.next
			_ = f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block(grpcFields("/s/echo", "grpc-timeout", "1m")...), EndHeaders: true})
			_ = f.fr.WriteData(id, true, prefixed("hello"))
		},
		func(f *frames) {
			for i, m := range []string{"/s/later", "/s/many", "/s/stream", "/s/none"} {
				id := uint32(2*i + 1)
				_ = f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.block(grpcFields(m)...), EndHeaders: true})
				_ = f.fr.WriteData(id, false, prefixed("hello"))
				_ = f.fr.WriteDataPadded(id, i%2 == 0, prefixed("more"), make([]byte, i))
				_ = f.fr.WriteWindowUpdate(id, 100)
			}
			_ = f.fr.WriteRSTStream(5, http2.ErrCodeCancel)
			_ = f.fr.WritePing(false, [8]byte{})
			_ = f.fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1})
		},
		func(f *frames) {
			b := f.block(grpcFields("/s/echo")...)
			_ = f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b[:10], Priority: http2.PriorityParam{StreamDep: 3}})
			_ = f.fr.WriteContinuation(1, true, b[10:])
			_ = f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.block("a", "b"), EndHeaders: true, EndStream: true})
			_ = f.fr.WriteGoAway(1, 0, nil)
		},
	} {
		f.Add(script(f, write))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		out := s.serve(t, append([]byte(preface), b...))
		for len(out) >= frameHeaderLen {
			h := parseFrameHeader(out)
			if h.typ > frameContinuation || frameHeaderLen+h.length > len(out) {
				t.Fatalf("answered % x", out[:min(len(out), 40)])
			}
			out = out[frameHeaderLen+h.length:]
		}
		if len(out) > 0 {
			t.Fatal("answered half a frame header")
		}
	})
}

// FuzzHeaders compares the decoder of header blocks with package hpack's. A block
// that is taken means the same to both, also for the table.
func FuzzHeaders(f *testing.F) {
	var buf bytes.Buffer
	enc := hpack.NewEncoder(&buf)
	fields := grpcFields("/s/m", "grpc-timeout", "5S", "token", "abc")
	for i := 0; i < len(fields); i += 2 {
		_ = enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1], Sensitive: i == 2})
	}
	first := bytes.Clone(buf.Bytes())
	buf.Reset()
	for i := 0; i < len(fields); i += 2 {
		_ = enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	f.Add(first, buf.Bytes())
	f.Add([]byte{0x20}, []byte{0x3f, 0xe1, 0x1f, 0x40, 1, 'a', 1, 'b', 0xbe})
	f.Add([]byte{0x82, 0x86, 0x84, 0x41, 0x8c, 0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff}, []byte{0xbe})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		u, d := newUnpacker(1<<20), hpack.NewDecoder(tableBytes, nil)
		for _, block := range [][]byte{first, second} {
			if u.decode(block) != nil {
				return // hpack is more generous about large integers
			}
			want, err := d.DecodeFull(block)
			if err != nil {
				t.Fatalf("took % x, which hpack does not: %v", block, err)
			}
			var size uint32
			i := 0
			for _, hf := range want {
				size += hf.Size()
				if hf.Name == timeoutName {
					if string(u.timeout) != hf.Value[:min(len(hf.Value), mostTimeout)] && !laterTimeout(want, hf) {
						t.Fatalf("timeout %q, not %q", u.timeout, hf.Value)
					}
					continue
				}
				if i >= len(u.fields) || u.fields[i].name != hf.Name || u.fields[i].value != hf.Value {
					t.Fatalf("field %d of % x is not %v", i, block, hf)
				}
				i++
			}
			if i != len(u.fields) || size != u.size {
				t.Fatalf("%d fields of %d bytes, not %d of %d", len(u.fields), u.size, i, size)
			}
			_ = (&Server{}).parseRequest(u.fields, false) // must not panic
		}
	})
}

// laterTimeout says that hf is not the last grpc-timeout.
func laterTimeout(fields []hpack.HeaderField, hf hpack.HeaderField) bool {
	last := ""
	for _, f := range fields {
		if f.Name == timeoutName {
			last = f.Value
		}
	}
	return last != hf.Value
}

// FuzzMessage cuts a stream's body into frames anywhere. The receiver must get the
// messages that are in it, whatever the frames.
func FuzzMessage(f *testing.F) {
	s := newFuzzed(f)
	f.Add(append(prefixed("hello"), prefixed("")...), []byte{3, 1, 100})
	f.Add(prefixed(string(make([]byte, 40000))), []byte{255})
	f.Add([]byte{1, 0, 0, 0, 1, 2}, []byte{1})
	f.Fuzz(func(t *testing.T, body, cuts []byte) {
		var want []string
		for rest := body; len(rest) >= messagePrefix && rest[0] == 0; {
			n := binary.BigEndian.Uint32(rest[1:])
			if n > 1<<16 || int(n) > len(rest)-messagePrefix {
				break
			}
			want = append(want, string(rest[messagePrefix:messagePrefix+n]))
			rest = rest[messagePrefix+n:]
		}
		if len(want) > 64 || len(body) > 200<<10 || len(cuts) > 1000 {
			return // beyond what is taken before answers are read
		}
		s.mu.Lock()
		s.messages = nil
		s.mu.Unlock()
		s.serve(t, append([]byte(preface), script(t, func(f *frames) {
			_ = f.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: f.block(grpcFields("/s/stream")...), EndHeaders: true})
			rest := body
			for i := 0; len(rest) > 0; i++ {
				n := min(len(rest), maxFrame)
				if i < len(cuts) {
					n = min(n, int(cuts[i]))
				}
				_ = f.fr.WriteData(1, false, rest[:n])
				rest = rest[n:]
			}
			_ = f.fr.WriteData(1, true, nil)
		})...))
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.messages) != len(want) {
			t.Fatalf("%d messages, not %d", len(s.messages), len(want))
		}
		for i, m := range want {
			if s.messages[i] != m {
				t.Fatalf("message %d is another", i)
			}
		}
	})
}
