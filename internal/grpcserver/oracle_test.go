package grpcserver

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"testing"

	"google.golang.org/grpc"
	_ "google.golang.org/grpc/encoding/gzip" // as etcd's server has it
	pb "google.golang.org/grpc/interop/grpc_testing"
)

// outcome is what a client can see of an answer.
func outcome(s *seen) string {
	reset := ""
	if s.reset != nil && !s.ended {
		reset = s.reset.String()
	}
	var http string
	if len(s.headers) > 0 {
		http = s.headers[0][":status"]
	}
	return fmt.Sprintf("http %q grpc %q %q encoding %q data %q reset %q", http, s.last("grpc-status"), s.last("grpc-message"), s.last("grpc-encoding"), s.data, reset)
}

func zip(m string) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = w.Write([]byte(m))
	_ = w.Close()
	return b.Bytes()
}

func message(flag byte, b []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{flag}, uint32(len(b))), b...)
}

const unaryName = "/grpc.testing.TestService/UnaryCall"

// cases are requests that a client may get wrong in some way. Grpc-go's server
// and this one must answer alike.
var cases = map[string]func(f *frames) uint32{
	"good":             func(f *frames) uint32 { return f.call(unaryName, "") },
	"no message":       func(f *frames) uint32 { return f.headers(true, grpcFields(unaryName)...) },
	"half a prefix":    func(f *frames) uint32 { return f.body(unaryName, []byte{0, 0}) },
	"half a message":   func(f *frames) uint32 { return f.body(unaryName, []byte{0, 0, 0, 0, 9, 1}) },
	"two messages":     func(f *frames) uint32 { return f.body(unaryName, append(prefixed(""), prefixed("")...)) },
	"not protobuf":     func(f *frames) uint32 { return f.body(unaryName, prefixed("\xff\xff\xff")) },
	"too large":        func(f *frames) uint32 { return f.body(unaryName, []byte{0, 0, 0x40, 0, 1}) },
	"unknown flag":     func(f *frames) uint32 { return f.body(unaryName, message(2, nil)) },
	"compressed flag":  func(f *frames) uint32 { return f.body(unaryName, message(1, nil)) },
	"unknown encoding": func(f *frames) uint32 { return f.body(unaryName, message(1, nil), "grpc-encoding", "br") },
	"identity":         func(f *frames) uint32 { return f.body(unaryName, message(0, nil), "grpc-encoding", "identity") },
	"gzip":             func(f *frames) uint32 { return f.body(unaryName, message(1, zip("")), "grpc-encoding", "gzip") },
	"gzip not used":    func(f *frames) uint32 { return f.body(unaryName, message(0, nil), "grpc-encoding", "gzip") },
	"gzip bomb": func(f *frames) uint32 {
		return f.body(unaryName, message(1, zip(string(make([]byte, 5<<20)))), "grpc-encoding", "gzip")
	},
	"broken gzip":        func(f *frames) uint32 { return f.body(unaryName, message(1, zip("abc")[:12]), "grpc-encoding", "gzip") },
	"unknown service":    func(f *frames) uint32 { return f.call("/x/y", "") },
	"unknown method":     func(f *frames) uint32 { return f.call("/grpc.testing.TestService/y", "") },
	"malformed method":   func(f *frames) uint32 { return f.call("nothing", "") },
	"no slash":           func(f *frames) uint32 { return f.call("/nothing", "") },
	"timeout 0":          func(f *frames) uint32 { return f.call(unaryName, "", "grpc-timeout", "0n") },
	"timeout malformed":  func(f *frames) uint32 { return f.call(unaryName, "", "grpc-timeout", "12") },
	"timeout no number":  func(f *frames) uint32 { return f.call(unaryName, "", "grpc-timeout", "1x2m") },
	"timeout too short":  func(f *frames) uint32 { return f.call(unaryName, "", "grpc-timeout", "m") },
	"timeout too long":   func(f *frames) uint32 { return f.call(unaryName, "", "grpc-timeout", "123456789m") },
	"timeout huge":       func(f *frames) uint32 { return f.call(unaryName, "", "grpc-timeout", "99999999H") },
	"binary malformed":   func(f *frames) uint32 { return f.call(unaryName, "", "x-bin", "*") },
	"subtype":            func(f *frames) uint32 { return f.replaced("content-type", "application/grpc+proto") },
	"subtype in old way": func(f *frames) uint32 { return f.replaced("content-type", "application/grpc;proto") },
	"no grpc":            func(f *frames) uint32 { return f.replaced("content-type", "application/json") },
	"almost grpc":        func(f *frames) uint32 { return f.replaced("content-type", "application/grpcx") },
	"get":                func(f *frames) uint32 { return f.replaced(":method", "GET") },
	"connection":         func(f *frames) uint32 { return f.call(unaryName, "", "connection", "close") },
	"two hosts":          func(f *frames) uint32 { return f.call(unaryName, "", "host", "a", "host", "b") },
	"host and authority": func(f *frames) uint32 { return f.call(unaryName, "", "host", "a") },
	"upper case":         func(f *frames) uint32 { return f.call(unaryName, "", "X", "y") },
	"status asked for": func(f *frames) uint32 {
		m := []byte{0x3a, 8, 0x08, 5, 0x12, 4, 'g', '%', 0xc3, 0xa4}
		return f.call(unaryName, string(m))
	},
	"stream without message": func(f *frames) uint32 {
		return f.headers(true, grpcFields("/grpc.testing.TestService/StreamingOutputCall")...)
	},
	"stream with two messages": func(f *frames) uint32 {
		return f.body("/grpc.testing.TestService/StreamingOutputCall", append(prefixed(""), prefixed("")...))
	},
	"input without message": func(f *frames) uint32 {
		return f.headers(true, grpcFields("/grpc.testing.TestService/StreamingInputCall")...)
	},
	"input cut short": func(f *frames) uint32 {
		return f.body("/grpc.testing.TestService/StreamingInputCall", []byte{0, 0, 0, 0, 9, 1})
	},
	"input cut in its prefix": func(f *frames) uint32 {
		return f.body("/grpc.testing.TestService/StreamingInputCall", []byte{0, 0})
	},
	"input too large": func(f *frames) uint32 {
		return f.body("/grpc.testing.TestService/StreamingInputCall", []byte{0, 0, 0x40, 0, 1})
	},
	"input not protobuf": func(f *frames) uint32 {
		return f.body("/grpc.testing.TestService/StreamingInputCall", prefixed("\xff"))
	},
	"duplex of gzip": func(f *frames) uint32 {
		return f.body("/grpc.testing.TestService/FullDuplexCall", message(1, zip("")), "grpc-encoding", "gzip")
	},
}

// differs are cases in which this server answers otherwise than grpc-go's, and
// why.
var differs = map[string]string{
	"no message":              "grpc-go never answers a request that ends with its headers",
	"stream without message":  "the same",
	"input without message":   "the same",
	"input cut in its prefix": "grpc-go takes the bytes that are missing for a proper end",
}

// wants is what this server answers in those cases.
var wants = map[string]string{
	"no message":              `http "200" grpc "2" "EOF" encoding "" data "" reset ""`,
	"stream without message":  `http "200" grpc "13" "cardinality violation: received no request message from non-client-streaming RPC" encoding "" data "" reset ""`,
	"input without message":   `http "200" grpc "0" "" encoding "" data "\x00\x00\x00\x00\x00" reset ""`,
	"input cut in its prefix": `http "200" grpc "13" "unexpected EOF" encoding "" data "" reset ""`,
}

// body makes a call of which the bytes are the body.
func (f *frames) body(method string, b []byte, more ...string) uint32 {
	id := f.headers(false, grpcFields(method, more...)...)
	f.ok(f.fr.WriteData(id, true, b))
	return id
}

// replaced makes a call with another value of a header.
func (f *frames) replaced(name, value string) uint32 {
	fields := grpcFields(unaryName)
	for i := 0; i < len(fields); i += 2 {
		if fields[i] == name {
			fields[i+1] = value
		}
	}
	id := f.headers(false, fields...)
	f.ok(f.fr.WriteData(id, true, prefixed("")))
	return id
}

func TestLikeGRPCGo(t *testing.T) {
	service := &testService{}
	g := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
		return h(WithCall(ctx, &Call{ctx: ctx, md: newMetadata(nil)}), req)
	}))
	pb.RegisterTestServiceServer(g, service)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = g.Serve(l) }()
	t.Cleanup(g.Stop)
	s := start(t, testServiceRig(service, rig{}))
	for name, request := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got [2]string
			for i, addr := range []string{l.Addr().String(), s.addr.String()} {
				if i == 0 && differs[name] != "" {
					continue
				}
				nc, err := net.Dial("tcp", addr)
				if err != nil {
					t.Fatal(err)
				}
				defer nc.Close()
				f := speakOn(t, patient{nc})
				id := request(f)
				got[i] = outcome(f.await(id))
				// The connection goes on.
				if after := f.await(f.call(unaryName, "")); after.last("grpc-status") != "0" {
					t.Errorf("the next call: %v", after)
				}
			}
			if want := wants[name]; want != "" {
				got[0] = want
			}
			if got[0] != got[1] {
				t.Errorf("grpc-go answers\n%s\nand this server\n%s", got[0], got[1])
			}
		})
	}
}
