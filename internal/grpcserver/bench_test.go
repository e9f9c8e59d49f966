package grpcserver

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
)

// maxCall lets the client take large answers.
var maxCall = grpc.MaxCallRecvMsgSize(64 << 20)

// cheapClient makes unary calls for next to nothing: it sends blocks that were
// encoded once and looks only for ends of streams.
type cheapClient struct {
	nc     net.Conn
	out    *bufio.Writer
	block  []byte
	data   []byte
	nextID uint32
}

func newCheapClient(tb testing.TB, addr net.Addr, path string, size int) *cheapClient {
	c := newNarrowClient(tb, addr, path, size)
	b := appendFrameHeader(nil, 6, frameSettings, 0, 0)
	b = appendSetting(b, settingInitialWindowSize, maxWindow)
	b = appendWindowUpdate(b, 0, maxWindow-defaultWindow)
	if _, err := c.nc.Write(b); err != nil {
		tb.Fatal(err)
	}
	return c
}

// newNarrowClient leaves the windows for answers as they are at first.
func newNarrowClient(tb testing.TB, addr net.Addr, path string, size int) *cheapClient {
	nc, err := net.Dial(addr.Network(), addr.String())
	if err != nil {
		tb.Fatal(err)
	}
	c := &cheapClient{nc: nc, out: bufio.NewWriterSize(nc, 64<<10), nextID: 1}
	if _, err := nc.Write(appendFrameHeader([]byte(preface), 0, frameSettings, 0, 0)); err != nil {
		tb.Fatal(err)
	}
	// The first block fills the table, the others are all indexed, as of a real
	// client.
	add := func(name, value string) {
		c.block = append(c.block, 0x40)
		c.block = appendString(c.block, name)
		c.block = appendString(c.block, value)
	}
	c.block = append(c.block, 0x83, 0x86) // POST, http
	add(":path", path)
	add(":authority", "localhost:2379")
	add("content-type", "application/grpc")
	add("te", "trailers")
	add("user-agent", "grpc-go/1.83.2")
	c.data = make([]byte, 5+size)
	binary.BigEndian.PutUint32(c.data[1:], uint32(size))
	return c
}

func (c *cheapClient) send() {
	var b [64]byte
	c.out.Write(appendFrameHeader(b[:0], len(c.block), frameHeaders, flagEndHeaders, c.nextID))
	c.out.Write(c.block)
	c.out.Write(appendFrameHeader(b[:0], len(c.data), frameData, flagEndStream, c.nextID))
	c.out.Write(c.data)
	if c.nextID == 1 {
		c.block = []byte{0x83, 0x86, 0x80 | 66, 0x80 | 65, 0x80 | 64, 0x80 | 63, 0x80 | 62}
	}
	c.nextID += 2
}

// run keeps inFlight calls open until n were answered.
func (c *cheapClient) run(n, inFlight int) error {
	for range min(n, inFlight) {
		c.send()
	}
	sent := min(n, inFlight)
	if err := c.out.Flush(); err != nil {
		return err
	}
	in := bufio.NewReaderSize(c.nc, 64<<10)
	granted := 0
	for done := 0; done < n; {
		b, err := in.Peek(frameHeaderLen)
		if err != nil {
			return err
		}
		h := parseFrameHeader(b)
		whole, err := in.Peek(frameHeaderLen + h.length)
		if err != nil {
			return err
		}
		if h.typ == frameGoAway || h.typ == frameRSTStream {
			return fmt.Errorf("the server sent a frame of type %d: %q", h.typ, whole[frameHeaderLen:])
		}
		if _, err := in.Discard(len(whole)); err != nil {
			return err
		}
		if h.typ == frameData {
			granted += h.length
		}
		if granted > 1<<20 {
			c.out.Write(appendWindowUpdate(nil, 0, uint32(granted)))
			granted = 0
		}
		switch h.typ {
		case frameHeaders:
			if h.flags&flagEndStream != 0 {
				done++
				if sent < n {
					c.send()
					sent++
				}
			}
		case frameSettings:
			if h.flags&flagAck == 0 {
				c.out.Write(appendFrameHeader(nil, 0, frameSettings, flagAck, 0))
			}
		case framePing:
			if h.flags&flagAck == 0 {
				c.out.Write(appendFrameHeader(nil, 8, framePing, flagAck, 0))
				c.out.Write(make([]byte, 8))
			}
		}
		if in.Buffered() < frameHeaderLen {
			if err := c.out.Flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkUnary reports what a call costs in CPU, client included; the client is
// the same in all, so the difference is the server's.
func BenchmarkUnary(b *testing.B) {
	const size = 300
	pool := make(chan func(), 10000)
	var workers sync.WaitGroup
	for range 1 {
		workers.Go(func() {
			for f := range pool {
				f()
			}
		})
	}
	defer workers.Wait()
	defer close(pool)
	later := func(_ *Call, raw []byte, reply func([]byte, error)) { pool <- func() { reply(raw, nil) } }
	for _, load := range []struct{ conns, streams int }{{50, 20}, {1, 1}} {
		for _, server := range []string{"none", "inline", "later", "grpc-go"} {
			b.Run(fmt.Sprintf("%dx%d/%s", load.conns, load.streams, server), func(b *testing.B) {
				var addr net.Addr
				switch server {
				case "none":
					addr = cannedServer(b, size)
				case "grpc-go":
					addr = grpcGoServer(b)
				default:
					h := map[string]Handler{"inline": echo, "later": later}[server]
					addr = start(b, rig{methods: []Method{{Name: "/s/m", Unary: h}}}).addr
				}
				var clients []*cheapClient
				for range load.conns {
					c := newCheapClient(b, addr, "/s/m", size)
					defer c.nc.Close()
					if err := c.run(1, 1); err != nil {
						b.Fatal(err)
					}
					clients = append(clients, c)
				}
				var mem0, mem1 runtime.MemStats
				runtime.ReadMemStats(&mem0)
				b.ResetTimer()
				before, began := cpu(), time.Now()
				var wg sync.WaitGroup
				var failed atomic.Value
				for i, c := range clients {
					n := b.N / load.conns
					if i < b.N%load.conns {
						n++
					}
					wg.Go(func() {
						if err := c.run(n, load.streams); err != nil {
							failed.Store(err)
						}
					})
				}
				wg.Wait()
				b.StopTimer()
				if err := failed.Load(); err != nil {
					b.Fatal(err)
				}
				runtime.ReadMemStats(&mem1)
				b.ReportMetric(float64(cpu()-before)/float64(b.N), "cpu-ns/op")
				b.ReportMetric(float64(time.Since(began))/float64(b.N), "ns/op")
				b.ReportMetric(float64(mem1.Mallocs-mem0.Mallocs)/float64(b.N), "allocs/op")
				b.ReportMetric(float64(mem1.TotalAlloc-mem0.TotalAlloc)/float64(b.N), "B/op")
			})
		}
	}
}

// cannedServer answers every DATA frame with the same bytes: what client and
// kernel cost.
func cannedServer(b testing.TB, size int) net.Addr {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer nc.Close()
				in := bufio.NewReaderSize(nc, 64<<10)
				if _, err := in.Discard(len(preface)); err != nil {
					return
				}
				var out []byte
				payload := make([]byte, 5+size)
				binary.BigEndian.PutUint32(payload[1:], uint32(size))
				for {
					h, err := in.Peek(frameHeaderLen)
					if err != nil {
						return
					}
					f := parseFrameHeader(h)
					if _, err := in.Discard(frameHeaderLen + f.length); err != nil {
						return
					}
					if f.typ == frameData {
						out = appendFrameHeader(out, len(plainHead), frameHeaders, flagEndHeaders, f.stream)
						out = append(out, plainHead...)
						out = appendFrameHeader(out, len(payload), frameData, 0, f.stream)
						out = append(out, payload...)
						out = appendFrameHeader(out, len(okTrailer), frameHeaders, flagEndHeaders|flagEndStream, f.stream)
						out = append(out, okTrailer...)
					}
					if in.Buffered() < frameHeaderLen && len(out) > 0 {
						if _, err := nc.Write(out); err != nil {
							return
						}
						out = out[:0]
					}
				}
			}()
		}
	}()
	return l.Addr()
}

// grpcGoServer serves /s/m with grpc-go.
func grpcGoServer(b testing.TB) net.Addr {
	g := grpc.NewServer(grpc.ForceServerCodecV2(encoding.CodecV2(rawCodec{})), grpc.NumStreamWorkers(256))
	g.RegisterService(&grpc.ServiceDesc{ServiceName: "s", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{
		MethodName: "m",
		Handler: func(_ any, _ context.Context, dec func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			var in []byte
			if err := dec(&in); err != nil {
				return nil, err
			}
			return &in, nil
		},
	}}}, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() { _ = g.Serve(l) }()
	b.Cleanup(g.Stop)
	return l.Addr()
}

// sink is a receiver that only counts.
type sink struct {
	out  StreamOut
	sent *atomic.Int64
	done chan struct{} // gets one for each thousand
}

func (s *sink) Message([]byte) error { return nil }
func (s *sink) HalfClose() bool      { return false }
func (s *sink) Ready()               {}
func (s *sink) Sent(Message, time.Duration) {
	if s.sent.Add(1)%1000 == 0 {
		s.done <- struct{}{}
	}
}
func (s *sink) Close() {}

// BenchmarkFanOut sends one message of 1 KiB to 1000 streams of 10 connections,
// as the watch hub does.
func BenchmarkFanOut(b *testing.B) {
	const conns, streams = 10, 100
	var sent atomic.Int64
	sinks, done := make(chan *sink, conns*streams), make(chan struct{}, 1)
	s := start(b, rig{methods: []Method{{Name: "/s/m", Stream: func(_ *Call, out StreamOut) StreamReceiver {
		x := &sink{out, &sent, done}
		sinks <- x
		return x
	}}}})
	for range conns {
		c := newCheapClient(b, s.addr, "/s/m", 1)
		defer c.nc.Close()
		for range streams {
			c.out.Write(appendFrameHeader(nil, len(c.block), frameHeaders, flagEndHeaders, c.nextID))
			c.out.Write(c.block)
			if c.nextID == 1 {
				c.block = []byte{0x83, 0x86, 0x80 | 66, 0x80 | 65, 0x80 | 64, 0x80 | 63, 0x80 | 62}
			}
			c.nextID += 2
		}
		if err := c.out.Flush(); err != nil {
			b.Fatal(err)
		}
		go func() {
			in := make([]byte, 256<<10)
			granted := 0
			for {
				n, err := c.nc.Read(in)
				if err != nil {
					return
				}
				if granted += n * 9 / 10; granted > 1<<20 { // frame headers do not count
					_, _ = c.nc.Write(appendWindowUpdate(nil, 0, uint32(granted)))
					granted = 0
				}
			}
		}()
	}
	var all []*sink
	for range conns * streams {
		all = append(all, <-sinks)
	}
	event := make([]byte, 1<<10)
	ms := []Message{{Head: []byte("head"), Rest: [][]byte{event}}}
	b.ResetTimer()
	before := cpu()
	for range b.N {
		for _, s := range all {
			if !s.out.Send(ms) {
				b.Fatal("no room")
			}
		}
		<-done
	}
	b.ReportMetric(float64(cpu()-before)/float64(b.N*len(all)), "cpu-ns/msg")
}
