package grpcgo

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"

	"github.com/engram-kv/engram/internal/grpcserver"
)

// frame is a message that grpc-go is to leave alone.
type frame struct {
	data  []byte
	stats grpcserver.MethodStats // may be nil
	sent  func()                 // called once when grpc-go has the bytes; may be nil
}

// frameCodec passes frames through and has the generated messages encoded by
// the standard codec.
type frameCodec struct {
	messages encoding.CodecV2
	bytes    func(received, sent int) // of generated messages; may be nil
}

func (c frameCodec) Name() string { return c.messages.Name() }

func (c frameCodec) Marshal(v any) (mem.BufferSlice, error) {
	f, ok := v.(*frame)
	if !ok {
		out, err := c.messages.Marshal(v)
		if c.bytes != nil {
			c.bytes(0, out.Len())
		}
		return out, err
	}
	if f.stats != nil {
		f.stats.Sent(len(f.data))
	}
	if f.sent != nil {
		f.sent()
	}
	return mem.BufferSlice{mem.SliceBuffer(f.data)}, nil
}

func (c frameCodec) Unmarshal(data mem.BufferSlice, v any) error {
	f, ok := v.(*frame)
	if !ok {
		if c.bytes != nil {
			c.bytes(data.Len(), 0)
		}
		return c.messages.Unmarshal(data, v)
	}
	if f.stats != nil {
		f.stats.Received(data.Len())
	}
	f.data = data.Materialize()
	return nil
}
