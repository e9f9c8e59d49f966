package edge

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/edge/member"
)

// What one frame may cost a member, the cost of new connections included, and one call.
const (
	perFrame = 10 * time.Microsecond
	perCall  = 60 * time.Microsecond
	perBlock = 3 * time.Millisecond // of headers, as large as may be
)

// What counts single calls, and those that come to nothing.
const (
	callsMetric     = "engram_grpc_streams_total"
	refusedMetric   = "engram_grpc_streams_refused_total"
	failedPutMetric = `grpc_server_handled_total{grpc_code="Unknown",grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"}`
)

const (
	rangeMethod = "/etcdserverpb.KV/Range"
	putMethod   = "/etcdserverpb.KV/Put"
	watchMethod = "/etcdserverpb.Watch/Watch"
)

// flood is an attack that sends frames as fast as it can and reads what comes: prepare begins, frame sends the i-th. In the
// end it waits until the member has seen all of them.
func flood(a attack, prepare func(r *rough) error, frame func(r *rough, i int) error) attack {
	a.once = func(dial func() (*rough, error), spend func() bool, _ func(string)) error {
		r, err := dial()
		if err != nil {
			return err
		}
		defer r.Close()
		r.SetDeadline(time.Now().Add(attackWithin))
		seen := make(chan error, 1)
		go func() { seen <- r.Until(lastPing) }()
		if prepare != nil {
			if err := prepare(r); err != nil {
				return err
			}
		}
		for i := 0; spend(); i++ {
			if err := frame(r, i); err != nil {
				return err
			}
		}
		if err := r.WritePing(false, lastPing); err != nil {
			return err
		}
		if err := r.Flush(); err != nil {
			return err
		}
		return <-seen
	}
	return a
}

// TestFloods sends what a server cannot tell from use by looking at one frame: each costs little, and there is no end.
func TestFloods(t *testing.T) {
	var flags []string
	if member.Engram() {
		flags = append(flags, "--memory-budget=1GiB") // of which a share is for what clients make it hold
	}
	b := begin(t, flags...)
	client := b.Dial(t)
	for i := range 200 { // so that a read of everything takes a while
		_, err := client.Put(t.Context(), fmt.Sprintf("flood/%03d", i), strings.Repeat("v", 10<<10))
		check(t, err)
	}
	for _, a := range floods() {
		t.Run(a.name, func(t *testing.T) { b.bear(t, a) })
	}
}

// floods are frames and calls without end.
func floods() []attack {
	small := must(proto.Marshal(&pb.RangeRequest{Key: []byte("good/001")}))
	everything := must(proto.Marshal(&pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}))
	all := []attack{
		flood(attack{name: "rapid reset", conns: 4, short: 400_000, long: 10_000_000, reason: "resets"}, nil, func(r *rough, _ int) error {
			stream, err := r.Open(rangeMethod)
			if err != nil {
				return err
			}
			return r.WriteRSTStream(stream, http2.ErrCodeCancel)
		}),
		flood(attack{name: "rapid reset over TLS", tls: true, conns: 4, short: 200_000, long: 2_000_000, reason: "resets"}, nil, func(r *rough, _ int) error {
			stream, err := r.Open(rangeMethod)
			if err != nil {
				return err
			}
			return r.WriteRSTStream(stream, http2.ErrCodeCancel)
		}),
		flood(attack{name: "rapid reset of whole calls", cpu: perCall, conns: 4, short: 200_000, long: 1_000_000, reason: "resets"}, (*rough).Widen, func(r *rough, _ int) error {
			stream, err := r.Call(rangeMethod, everything)
			if err != nil {
				return err
			}
			return r.WriteRSTStream(stream, http2.ErrCodeCancel)
		}),
		flood(attack{name: "CONTINUATION", conns: 4, short: 100_000, long: 10_000_000, reason: "continuation"}, func(r *rough) error {
			return r.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: r.Block(rangeMethod)})
		}, func(r *rough, i int) error {
			return r.WriteContinuation(1, false, nil)
		}),
		flood(attack{name: "SETTINGS", conns: 4, short: 100_000, long: 10_000_000, reason: "flood"}, nil, func(r *rough, i int) error {
			return r.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(i)})
		}),
		flood(attack{name: "PING", conns: 4, short: 100_000, long: 10_000_000, reason: "pings"}, nil, func(r *rough, i int) error {
			return r.WritePing(false, [8]byte{byte(i)})
		}),
		flood(attack{name: "answers to PING", conns: 4, short: 100_000, long: 10_000_000, reason: "flood"}, nil, func(r *rough, i int) error {
			return r.WritePing(true, [8]byte{byte(i)})
		}),
		flood(attack{name: "empty DATA", conns: 4, short: 100_000, long: 10_000_000, reason: "flood"}, func(r *rough) error {
			_, err := r.Open(watchMethod)
			return err
		}, func(r *rough, _ int) error {
			return r.WriteData(1, false, nil)
		}),
		flood(attack{name: "padded DATA", conns: 4, short: 20_000, long: 200_000, reason: "flood"}, func(r *rough) error {
			_, err := r.Open(watchMethod)
			return err
		}, func(r *rough, _ int) error {
			return r.WriteDataPadded(1, false, nil, make([]byte, 200))
		}),
		flood(attack{name: "WINDOW_UPDATE of a connection", conns: 4, short: 100_000, long: 10_000_000, reason: "flood"}, nil, func(r *rough, _ int) error {
			return r.WriteWindowUpdate(0, 1)
		}),
		flood(attack{name: "WINDOW_UPDATE of a stream", conns: 4, short: 100_000, long: 10_000_000, reason: "flood"}, func(r *rough) error {
			if err := r.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}); err != nil {
				return err
			}
			_, err := r.Open(watchMethod)
			return err
		}, func(r *rough, _ int) error {
			return r.WriteWindowUpdate(1, 1)
		}),
		flood(attack{name: "PRIORITY", conns: 4, short: 100_000, long: 10_000_000, reason: "flood"}, nil, func(r *rough, i int) error {
			return r.WritePriority(uint32(i)*2+1, http2.PriorityParam{Weight: 1})
		}),
		flood(attack{name: "frames of no known type", conns: 4, short: 100_000, long: 10_000_000, reason: "flood"}, nil, func(r *rough, i int) error {
			return r.WriteRawFrame(0xbe, 0, 0, []byte("what?"))
		}),
		flood(attack{name: "calls that are no gRPC", cpu: perCall, conns: 4, short: 50_000, long: 500_000, metric: refusedMetric}, (*rough).Widen, func(r *rough, _ int) error {
			r.next += 2
			return r.WriteHeaders(http2.HeadersFrameParam{StreamID: r.next, EndHeaders: true, EndStream: true, BlockFragment: r.Block("/health", hpack.HeaderField{Name: "content-type", Value: "text/plain"})})
		}),
		flood(attack{name: "methods that there are not", cpu: perCall, conns: 4, short: 50_000, long: 500_000, metric: refusedMetric}, (*rough).Widen, func(r *rough, i int) error {
			_, err := r.Call(fmt.Sprintf("/no.Such%d/Method%d", i, i), nil)
			return err
		}),
		flood(attack{name: "streams that stay open", cpu: perCall, conns: 4, short: 100_000, long: 100_000, reason: "streams"}, nil, func(r *rough, _ int) error {
			_, err := r.Open(rangeMethod)
			return err
		}),
		flood(attack{name: "messages longer than may be", cpu: perCall, conns: 4, short: 20_000, long: 200_000, reason: "message_size"}, (*rough).Widen, func(r *rough, _ int) error {
			stream, err := r.Open(putMethod)
			if err != nil {
				return err
			}
			return r.WriteData(stream, false, append([]byte{0, 0xff, 0xff, 0xff, 0xff}, small...))
		}),
		flood(attack{name: "messages without their end", cpu: perCall, conns: 4, short: 20_000, long: 200_000, metric: failedPutMetric}, (*rough).Widen, func(r *rough, _ int) error {
			stream, err := r.Open(putMethod)
			if err != nil {
				return err
			}
			return r.WriteData(stream, true, append([]byte{0, 0, 0, 0, 100}, small...))
		}),
		flood(attack{name: "a bomb of header fields", cpu: perBlock, conns: 4, short: 400, long: 4000, reason: "headers"}, nil, func(r *rough, i int) error {
			// One field is put into the table, and named again and again by one byte each.
			if i == 0 {
				if _, err := r.Open(rangeMethod, hpack.HeaderField{Name: "a", Value: strings.Repeat("x", 3000)}); err != nil {
					return err
				}
			}
			block := append(r.Block(rangeMethod), bytes.Repeat([]byte{0x80 | 62}, 15<<10)...)
			stream := r.next
			r.next += 2
			return r.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: block, EndHeaders: true, EndStream: true})
		}),
		flood(attack{name: "long header fields", cpu: perBlock, conns: 4, short: 40, long: 400, reason: "continuation"}, nil, func(r *rough, i int) error {
			var fields []hpack.HeaderField
			for j := range 64 {
				fields = append(fields, hpack.HeaderField{Name: fmt.Sprintf("h%d", j), Value: strings.Repeat("~", 16<<10), Sensitive: true})
			}
			block := r.Block(rangeMethod, fields...) // 1 MiB and more
			stream := r.next
			r.next += 2
			for first, rest := true, block; len(rest) > 0; first = false {
				part := rest[:min(len(rest), 16<<10)]
				rest = rest[len(part):]
				var err error
				if first {
					err = r.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: part, EndHeaders: len(rest) == 0, EndStream: true})
				} else {
					err = r.WriteContinuation(stream, len(rest) == 0, part)
				}
				if err != nil {
					return err
				}
			}
			return nil
		}),
		// 48 and 75 MiB more were seen; what of it is held and what is not collected yet was not told apart.
		flood(attack{name: "calls as fast as they can be sent", cpu: perCall, conns: 4, short: 20_000, long: 200_000, memory: 32 << 20, metric: callsMetric}, (*rough).Widen, func(r *rough, i int) error {
			_, err := r.Call(rangeMethod, small)
			return err
		}),
		flood(attack{name: "calls whose answers are not let in", cpu: perCall, conns: 16, short: 400_000, long: 1_000_000, memory: 256 << 20, reason: "output"}, nil, func(r *rough, i int) error {
			_, err := r.Call(rangeMethod, small)
			return err
		}),
	}
	for i := range all {
		if all[i].cpu == 0 {
			all[i].cpu = perFrame
		}
	}
	return all
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err) // of a message that this test has made
	}
	return v
}
