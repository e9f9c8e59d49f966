package grpcserver

import (
	"encoding/base64"
	"strconv"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Blocks that are sent again and again. They use no dynamic table.
var (
	statusOK200 = byte(0x80 | 8) // ":status: 200" of the static table
	plainHead   = responseHead("application/grpc", false, true)
	okTrailer   = appendField(nil, "grpc-status", "0")
	detailsName = "grpc-status-details-bin"
)

// responseHead is the header block that begins an answer.
func responseHead(contentType string, gzip, grpc bool) []byte {
	if !grpc {
		contentType = "application/grpc"
	}
	b := []byte{statusOK200}
	b = appendIndexedName(b, 31, contentType) // "content-type" of the static table
	if gzip {
		b = appendField(b, "grpc-encoding", "gzip")
	}
	return b
}

// appendIndexedName adds a literal field whose name is in the static table.
func appendIndexedName(dst []byte, i int, value string) []byte {
	return appendString(appendInt(dst, 0, 4, i), value)
}

// appendStatus adds an HTTP status other than 200.
func appendStatus(dst []byte, code int) []byte {
	return appendIndexedName(dst, 8, strconv.Itoa(code))
}

// appendTrailer adds the trailer of a status and of what the handler gave.
func appendTrailer(dst []byte, st *status.Status, md metadata.MD) []byte {
	if st == nil && md == nil {
		return append(dst, okTrailer...)
	}
	dst = appendField(dst, "grpc-status", strconv.Itoa(int(st.Code())))
	if m := st.Message(); m != "" {
		dst = appendField(dst, "grpc-message", escapeMessage(m))
	}
	detailed := false
	if st != nil && len(st.Proto().GetDetails()) > 0 {
		if b, err := proto.Marshal(st.Proto()); err == nil {
			dst = appendField(dst, detailsName, base64.RawStdEncoding.EncodeToString(b))
			detailed = true
		}
	}
	return appendMetadata(dst, md, detailed)
}

// appendMetadata adds what a handler wants sent, but nothing of the protocol's.
func appendMetadata(dst []byte, md metadata.MD, detailed bool) []byte {
	for name, values := range md {
		switch kind := kinds[name]; {
		case kind == kindReserved, kind == kindInvalid, kind == kindTimeout, kind == kindContentType, kind == kindEncoding, kind == kindTE,
			name == "user-agent", strings.HasPrefix(name, ":"), detailed && name == detailsName:
			continue
		}
		for _, v := range values {
			if strings.HasSuffix(name, "-bin") {
				v = base64.RawStdEncoding.EncodeToString([]byte(v))
			}
			dst = appendField(dst, name, v)
		}
	}
	return dst
}

// escapeMessage makes a status message fit for a header: what is not printable
// ASCII is percent-encoded, and bytes that are no UTF-8 become U+FFFD.
func escapeMessage(m string) string {
	plain := func(c byte) bool { return ' ' <= c && c <= '~' && c != '%' }
	i := 0
	for i < len(m) && plain(m[i]) {
		i++
	}
	if i == len(m) {
		return m
	}
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for _, r := range m {
		if r < utf8.RuneSelf && plain(byte(r)) {
			b.WriteByte(byte(r))
			continue
		}
		var enc [utf8.UTFMax]byte
		for _, c := range enc[:utf8.EncodeRune(enc[:], r)] {
			b.WriteByte('%')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&15])
		}
	}
	return b.String()
}

// statusOf makes a status of what a handler returned; nil for none.
func statusOf(err error) *status.Status {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		st = status.FromContextError(err)
	}
	return st
}
