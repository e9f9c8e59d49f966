// Package fault puts a proxy before a server that spoils answers on purpose, to show that the comparison sees it.
//
// It forwards every call as bytes and knows only the messages it is told to spoil. Proxy is the main type. Invariants:
//
//	F1: what no Spoiler is named for passes unchanged, trailers and codes included.
package fault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// Spoiler changes the answers of one method.
type Spoiler struct {
	Method string               // full name, /etcdserverpb.KV/Range
	Answer func() proto.Message // a message of the answer's type

	// Spoil may change the message; false holds it back. It is called for every answer, by one goroutine per stream.
	Spoil func(proto.Message) bool
}

// Proxy forwards calls to a server.
type Proxy struct {
	spoiler Spoiler
	to      *grpc.ClientConn
	server  *grpc.Server
	address string
}

// raw is a message nobody looks into.
type raw struct{ data []byte }

type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(*raw)
	if !ok {
		return nil, fmt.Errorf("cannot forward a %T", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(m.data)}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(*raw)
	if !ok {
		return fmt.Errorf("cannot forward a %T", v)
	}
	m.data = data.Materialize()
	return nil
}

var _ encoding.CodecV2 = rawCodec{}

// Start listens on a loopback port and forwards to the server at the given address.
func Start(to string, spoiler Spoiler) (*Proxy, error) {
	conn, err := grpc.NewClient(to, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{}), grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		conn.Close()
		return nil, err
	}
	p := &Proxy{spoiler: spoiler, to: conn, address: listener.Addr().String()}
	p.server = grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}), grpc.UnknownServiceHandler(p.forward), grpc.MaxRecvMsgSize(64<<20))
	go p.server.Serve(listener) // ends with Close
	return p, nil
}

// Address is where the proxy listens.
func (p *Proxy) Address() string { return p.address }

// Close ends all calls.
func (p *Proxy) Close() {
	p.server.Stop()
	p.to.Close()
}

func (p *Proxy) forward(_ any, down grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(down)
	md, _ := metadata.FromIncomingContext(down.Context())
	ctx, cancel := context.WithCancel(metadata.NewOutgoingContext(down.Context(), md))
	defer cancel()
	up, err := p.to.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	go func() { // ends with the call, which ends both streams
		for {
			var m raw
			if err := down.RecvMsg(&m); err != nil {
				if errors.Is(err, io.EOF) {
					up.CloseSend()
				}
				return
			}
			if up.SendMsg(&m) != nil {
				return
			}
		}
	}()
	for {
		var m raw
		if err := up.RecvMsg(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		pass, err := p.spoil(method, &m)
		if err != nil {
			return err
		}
		if !pass {
			continue
		}
		if err := down.SendMsg(&m); err != nil {
			return err
		}
	}
}

func (p *Proxy) spoil(method string, m *raw) (pass bool, err error) {
	if method != p.spoiler.Method {
		return true, nil
	}
	answer := p.spoiler.Answer()
	if err := proto.Unmarshal(m.data, answer); err != nil {
		return false, err
	}
	if !p.spoiler.Spoil(answer) {
		return false, nil
	}
	m.data, err = proto.Marshal(answer)
	return true, err
}
