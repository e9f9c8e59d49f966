package wire

import (
	"bytes"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
)

// headerWriter encodes request headers. Once a method was called, every field is an index into the server's table: the block is the
// same for each further call, and kept.
type headerWriter struct {
	fields []hpack.HeaderField
	enc    *hpack.Encoder
	out    bytes.Buffer
	blocks []methodBlock
}

type methodBlock struct {
	method string
	block  []byte
}

const pathField = 2

func newHeaderWriter(scheme, authority string) headerWriter {
	return headerWriter{fields: []hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: scheme}, {Name: ":path"}, {Name: ":authority", Value: authority},
		{Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"}, {Name: "user-agent", Value: "engram-bench"},
	}}
}

// set sets a metadata field.
func (w *headerWriter) set(name, value string) {
	w.blocks = w.blocks[:0]
	for i := range w.fields {
		if w.fields[i].Name == name {
			w.fields[i].Value = value
			return
		}
	}
	w.fields = append(w.fields, hpack.HeaderField{Name: name, Value: value})
}

// limitTable takes over the server's limit of its table.
func (w *headerWriter) limitTable(bytes uint32) {
	w.encoder().SetMaxDynamicTableSizeLimit(bytes)
	w.blocks = w.blocks[:0]
}

func (w *headerWriter) encoder() *hpack.Encoder {
	if w.enc == nil {
		w.enc = hpack.NewEncoder(&w.out)
	}
	return w.enc
}

// append appends the frames that open a stream.
func (w *headerWriter) append(b []byte, stream uint32, method string, frameMost int) []byte {
	for i := range w.blocks {
		if w.blocks[i].method == method {
			block := w.blocks[i].block
			b = appendFrameHeader(b, len(block), http2.FrameHeaders, http2.FlagHeadersEndHeaders, stream)
			return append(b, block...)
		}
	}
	enc := w.encoder()
	w.out.Reset()
	w.fields[pathField].Value = method
	for _, f := range w.fields {
		enc.WriteField(f) // to memory
	}
	block := w.out.Bytes()
	switch {
	case !leavesTable(block):
		w.blocks = w.blocks[:0] // what was an index names another field now
	case len(block) <= frameMax:
		w.blocks = append(w.blocks, methodBlock{method, bytes.Clone(block)})
	}
	t, flags := http2.FrameHeaders, http2.Flags(0)
	for {
		n := min(len(block), frameMost)
		if n == len(block) {
			flags = http2.FlagHeadersEndHeaders
		}
		b = appendFrameHeader(b, n, t, flags, stream)
		b = append(b, block[:n]...)
		if block = block[n:]; len(block) == 0 {
			return b
		}
		t = http2.FrameContinuation
	}
}

// leavesTable tells if decoding a header block changes nothing in the decoder's table: then the same bytes mean the same the
// next time. A block that is not well-formed is said to change it, which is the careful answer.
func leavesTable(b []byte) bool {
	for len(b) > 0 {
		switch first := b[0]; {
		case first&0x80 != 0: // indexed
			if b = skipInt(b, 7); b == nil {
				return false
			}
		case first&0x60 != 0: // literal that is added to the table, or a new size of it
			return false
		default: // literal that is not added
			name := first&0x0f == 0
			if b = skipInt(b, 4); b == nil {
				return false
			}
			if name {
				if b = skipString(b); b == nil {
					return false
				}
			}
			if b = skipString(b); b == nil {
				return false
			}
		}
	}
	return true
}

var nothing = []byte{}

// skipInt skips an integer whose first byte leaves it so many bits; nil if it does not end.
func skipInt(b []byte, bits uint) []byte {
	_, rest := takeInt(b, bits)
	return rest
}

func takeInt(b []byte, bits uint) (v uint64, rest []byte) {
	if len(b) == 0 {
		return 0, nil
	}
	mask := byte(1<<bits - 1)
	if v = uint64(b[0] & mask); v < uint64(mask) {
		return v, after(b, 1)
	}
	for i, shift := 1, uint(0); i < len(b) && shift < 35; i, shift = i+1, shift+7 {
		v += uint64(b[i]&0x7f) << shift
		if b[i]&0x80 == 0 {
			return v, after(b, i+1)
		}
	}
	return 0, nil
}

func skipString(b []byte) []byte {
	n, rest := takeInt(b, 7)
	if rest == nil || n > uint64(len(rest)) {
		return nil
	}
	return after(rest, int(n))
}

// after is b[n:], never nil.
func after(b []byte, n int) []byte {
	if n == len(b) {
		return nothing
	}
	return b[n:]
}

// response is what a header block of a response says.
type response struct {
	http, contentType string
	code              int // grpc-status; -1: none
	message           string
}

// headerReader decodes header blocks of responses, and remembers those that leave the table as it is.
type headerReader struct {
	dec   *hpack.Decoder
	now   response
	known []knownBlock
}

type knownBlock struct {
	block []byte
	response
}

const (
	maxKnown      = 8
	maxKnownBlock = 256
	maxBlock      = 256 << 10 // of a response's headers
)

func newHeaderReader() *headerReader {
	h := &headerReader{}
	h.dec = hpack.NewDecoder(4096, h.field)
	h.dec.SetMaxStringLength(maxBlock)
	return h
}

func (h *headerReader) field(f hpack.HeaderField) {
	switch f.Name {
	case ":status":
		h.now.http = f.Value
	case "content-type":
		h.now.contentType = f.Value
	case "grpc-status":
		if n, err := strconv.ParseUint(f.Value, 10, 31); err == nil {
			h.now.code = int(n)
		} else {
			h.now.code = int(codes.Unknown)
			h.now.message = "grpc-status " + strconv.Quote(f.Value)
		}
	case "grpc-message":
		if text, err := url.PathUnescape(f.Value); err == nil {
			h.now.message = text
		} else {
			h.now.message = f.Value
		}
	}
}

func (h *headerReader) read(block []byte) (*response, error) {
	for i := range h.known {
		if bytes.Equal(h.known[i].block, block) {
			return &h.known[i].response, nil
		}
	}
	h.now = response{code: -1}
	if _, err := h.dec.Write(block); err != nil {
		return nil, err
	}
	if err := h.dec.Close(); err != nil {
		return nil, err
	}
	switch {
	case !leavesTable(block):
		h.known = h.known[:0]
	case len(block) <= maxKnownBlock:
		if len(h.known) == maxKnown {
			h.known = h.known[:0]
		}
		h.known = append(h.known, knownBlock{bytes.Clone(block), h.now})
	}
	return &h.now, nil
}

// wrong tells what is wrong with the headers that begin a response; nil: nothing.
func (r *response) wrong() *Error {
	if r.http != "200" {
		status, _ := strconv.Atoi(r.http)
		code := codes.Unknown
		switch status { // as gRPC's table has it
		case http.StatusBadRequest:
			code = codes.Internal
		case http.StatusUnauthorized:
			code = codes.Unauthenticated
		case http.StatusForbidden:
			code = codes.PermissionDenied
		case http.StatusNotFound:
			code = codes.Unimplemented
		case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
			code = codes.Unavailable
		}
		return &Error{Code: code, Message: "the server answers with HTTP status " + strconv.Quote(r.http) + ", not as gRPC does"}
	}
	if r.code < 0 && !strings.HasPrefix(r.contentType, "application/grpc") {
		return &Error{Code: codes.Unknown, Message: "the server answers with content type " + strconv.Quote(r.contentType) + ", not with gRPC's"}
	}
	return nil
}

// status is the end that trailers tell.
func (r *response) status() *Error {
	switch {
	case r.code < 0:
		return &Error{Code: codes.Internal, Message: "the response ends without a grpc-status"}
	case r.code == 0:
		return nil
	default:
		return &Error{Code: codes.Code(r.code), Message: r.message}
	}
}
