package edge

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/edge/member"
)

// TestMessages sends calls whose messages are not what their lengths say. Each gets an answer of its own, as grpc-go's server
// gives it, and the connection goes on.
func TestMessages(t *testing.T) {
	m := member.Start(t, 0)
	put := must(proto.Marshal(&etcdserverpb.PutRequest{Key: []byte("k"), Value: []byte("v")}))
	length := func(n uint32, rest ...byte) []byte {
		return append(binary.BigEndian.AppendUint32([]byte{0}, n), rest...)
	}
	for _, c := range []struct {
		name   string
		method string
		data   []byte
		end    bool
		code   codes.Code // as grpc-go's server has it
	}{
		{"whole", putMethod, framed(put), true, codes.OK},
		{"without a message", putMethod, nil, true, codes.Unknown},
		{"without the end of its length", putMethod, []byte{0, 0, 0}, true, codes.Unknown},
		{"without the end of its message", putMethod, length(100, put...), true, codes.Unknown},
		{"longer than may be", putMethod, length(100 << 20), false, codes.ResourceExhausted},
		{"as long as can be", putMethod, length(1<<32 - 1), false, codes.ResourceExhausted},
		{"with bytes that are no request", putMethod, framed([]byte{0xff, 0xff, 0xff}), true, codes.Internal},
		{"compressed by nobody", putMethod, append([]byte{1, 0, 0, 0, byte(len(put))}, put...), true, codes.Internal},
		{"longer than may be in a stream", watchMethod, length(100 << 20), false, codes.ResourceExhausted},
		{"without an end in a stream", watchMethod, length(100, put...), true, codes.Internal},
		{"for another service", "/etcdserverpb.Cluster/MemberList", []byte{0, 0, 0, 0, 9, 1}, true, codes.Unknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := connect(t, m.Clear)
			stream, err := r.Open(c.method)
			check(t, err)
			check(t, r.WriteData(stream, c.end, c.data))
			e, err := r.Answer(stream)
			check(t, err)
			if e.status != fmt.Sprint(int(c.code)) || e.http != "200" {
				t.Errorf("%v, want grpc-status %d (%v)", e, c.code, c.code)
			}
			if stream, err = r.Call(putMethod, put); err != nil {
				t.Fatal(err)
			}
			if e, err = r.Answer(stream); err != nil || e.status != "0" {
				t.Errorf("the next call on the connection: %v, %v", e, err)
			}
		})
	}
	t.Run("in padded frames of one byte", func(t *testing.T) {
		r := connect(t, m.Clear)
		stream, err := r.Open(putMethod)
		check(t, err)
		data := framed(put)
		for i, b := range data {
			check(t, r.WriteDataPadded(stream, i == len(data)-1, []byte{b}, make([]byte, 3)))
		}
		if e, err := r.Answer(stream); err != nil || e.status != "0" {
			t.Errorf("%v, %v", e, err)
		}
	})
	t.Run("with a header block in frames of one byte", func(t *testing.T) {
		r := connect(t, m.Clear)
		block := r.Block(putMethod, hpack.HeaderField{Name: "x", Value: "y"})
		check(t, r.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:1]}))
		for i := range block[1:] {
			check(t, r.WriteContinuation(1, i == len(block)-2, block[i+1:i+2]))
		}
		check(t, r.WriteData(1, true, framed(put)))
		if e, err := r.Answer(1); err != nil || e.status != "0" {
			t.Errorf("%v, %v", e, err)
		}
	})
	if !member.Engram() {
		return
	}
	all, err := m.Metrics(t.Context())
	check(t, err)
	if n := all[`engram_grpc_limits_total{reason="message_size"}`]; n != 3 {
		t.Errorf("message_size counts %v, want 3: so many messages were longer than may be", n)
	}
}

// What one frame of a long message may cost, which is copied and kept.
const (
	partBytes = 16 << 10
	perPart   = 50 * time.Microsecond
)

// fullWithin is until when the member has been sent all that it may hold, by clients that share its machine.
const fullWithin = 2 * time.Minute

// TestMessagesOfMany sends many long messages that never become whole: what a member holds of them is bounded.
func TestMessagesOfMany(t *testing.T) {
	t.Parallel() // it waits more than it works
	var flags []string
	if member.Engram() {
		flags = append(flags, "--memory-budget=1GiB")
	}
	b := begin(t, flags...)
	b.worstShare = max(b.worstShare, time.Second) // a gigabyte is read meanwhile
	hold := time.Second
	if member.Long() {
		hold = 5 * time.Second
	}
	const connections, streams, each = 20, 50, 1 << 20 // 1 GiB, were all of it taken
	w := b.watch(t)
	ctx, cancel := context.WithTimeout(t.Context(), fullWithin)
	defer cancel()
	sent := make(chan int64, connections)
	for range connections {
		go func() {
			var n int64
			defer func() { sent <- n }()
			r, err := roughly(ctx, b.Clear, nil, greedy...)
			if err != nil {
				return
			}
			defer r.Close()
			defer context.AfterFunc(ctx, func() { r.Close() })() // it writes until the member takes no more, and does not heed flow control
			go r.Deaf()
			part := make([]byte, partBytes)
			for range streams {
				stream, err := r.Open(putMethod)
				if err != nil || r.WriteData(stream, false, binary.BigEndian.AppendUint32([]byte{0}, each+1)) != nil {
					return
				}
				for range each / len(part) {
					if r.WriteData(stream, false, part) != nil {
						return
					}
					n += int64(len(part))
				}
			}
			r.Flush()
			<-ctx.Done() // and holds what it has
		}()
	}
	<-time.After(hold) // the measure is what they hold meanwhile
	w.met(ctx, t, "requests_held")
	cancel()
	var total int64
	for range connections {
		total += <-sent
	}
	t.Logf("sent %d MiB on %d connections", total>>20, connections)
	w.judge(t, 128<<20, "requests_held", perThing(t, total/partBytes, perPart))
}

// connect connects in cleartext until the test ends.
func connect(t testing.TB, address string, settings ...http2.Setting) *rough {
	t.Helper()
	r, err := roughly(t.Context(), address, nil, settings...)
	check(t, err)
	t.Cleanup(func() { r.Close() })
	r.SetDeadline(time.Now().Add(30 * time.Second))
	return r
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
