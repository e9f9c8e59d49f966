package grpcserver

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
)

var (
	packers   = sync.Pool{New: func() any { return gzip.NewWriter(nil) }}
	unpackers sync.Pool
)

// maxPacked is the size, in bytes, of the largest message that is compressed. A
// larger one goes as it is, which its flag says (gRPC over HTTP/2, "Compressed-Flag"):
// to pack it takes its memory twice more, and all of it before the first byte is sent.
const maxPacked = 1 << 20

// packs says that a message of so many bytes is to be compressed.
func (s *stream) packs(size int) bool { return s.req.gzip && 0 < size && size <= maxPacked }

// pack compresses a message.
func pack(raw []byte) []byte {
	w := packers.Get().(*gzip.Writer)
	defer packers.Put(w)
	var out bytes.Buffer
	w.Reset(&out)
	_, _ = w.Write(raw) // to memory
	_ = w.Close()
	return out.Bytes()
}

// unpackMessage returns a message whose first byte was not 0 as its client meant
// it. However much it is packed, it takes no more memory than a message may.
func (s *Server) unpackMessage(flag byte, raw []byte, req *request) ([]byte, *status.Status) {
	switch {
	case flag != 1:
		return nil, status.Newf(codes.Internal, "grpc: received unexpected payload format %d", flag)
	case req.encoding == "":
		return nil, status.New(codes.Internal, "grpc: compressed flag set with identity or empty encoding")
	case !req.gzip:
		return nil, status.Newf(codes.Unimplemented, "grpc: Decompressor is not installed for grpc-encoding %q", req.encoding)
	}
	z, ok := unpackers.Get().(*gzip.Reader)
	var err error
	if ok {
		err = z.Reset(bytes.NewReader(raw))
	} else {
		z, err = gzip.NewReader(bytes.NewReader(raw))
	}
	if err != nil {
		return nil, status.Newf(codes.Internal, "grpc: failed to decompress the message: %v", err)
	}
	defer unpackers.Put(z)
	most := s.o.MaxReceiveBytes
	out, err := io.ReadAll(io.LimitReader(z, int64(most)+1))
	switch {
	case err != nil:
		return nil, status.Newf(codes.Internal, "grpc: failed to read decompressed data: %v", err)
	case len(out) > most:
		s.limited(limitMessage, "bytes", len(out))
		return nil, status.Newf(codes.ResourceExhausted, "grpc: received message after decompression larger than max %d", most)
	}
	return out, nil
}

// protoOf returns a generated message as package proto knows it, nil for
// anything else.
func protoOf(v any) proto.Message {
	switch v := v.(type) {
	case protoadapt.MessageV2:
		return v
	case protoadapt.MessageV1:
		return protoadapt.MessageV2Of(v)
	}
	return nil
}

func marshal(v any) ([]byte, error) {
	m := protoOf(v)
	if m == nil {
		return nil, status.Errorf(codes.Internal, "grpc: error while marshaling: proto: failed to marshal, message is %T, want proto.Message", v)
	}
	b, err := proto.Marshal(m)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "grpc: error while marshaling: %v", err)
	}
	return b, nil
}

func unmarshal(raw []byte, v any) error {
	m := protoOf(v)
	if m == nil {
		return fmt.Errorf("failed to unmarshal, message is %T, want proto.Message", v)
	}
	return proto.Unmarshal(raw, m)
}
