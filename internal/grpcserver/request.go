package grpcserver

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// fieldKind is what a header field means to the server.
type fieldKind uint8

const (
	kindMetadata fieldKind = iota // of the application
	kindBinary                    // the same, base64
	kindInvalid                   // makes a request malformed
	kindMethod
	kindScheme
	kindPath
	kindAuthority
	kindProtocol
	kindHost
	kindTimeout
	kindContentType
	kindContentLength
	kindEncoding
	kindTE
	kindReserved // of gRPC; not shown to the application
)

const timeoutName = "grpc-timeout"

// knownNames are the headers with a meaning, and those of etcd's clients so that
// their names are not allocated for each connection.
var knownNames = map[string]string{}

var kinds = map[string]fieldKind{
	":method": kindMethod, ":scheme": kindScheme, ":path": kindPath, ":authority": kindAuthority, ":protocol": kindProtocol,
	"host": kindHost, timeoutName: kindTimeout, "content-type": kindContentType, "content-length": kindContentLength,
	"grpc-encoding": kindEncoding, "te": kindTE,
	"grpc-message-type": kindReserved, "grpc-message": kindReserved, "grpc-status": kindReserved,
	"connection": kindInvalid, "proxy-connection": kindInvalid, "keep-alive": kindInvalid,
	"transfer-encoding": kindInvalid, "upgrade": kindInvalid,
	"user-agent": kindMetadata, "grpc-accept-encoding": kindMetadata, "hasleader": kindMetadata,
	"client-api-version": kindMetadata, "token": kindMetadata, "authorization": kindMetadata,
}

func init() {
	for name := range kinds {
		knownNames[name] = name
	}
}

// field is one header field. It does not change.
type field struct {
	name, value string
	size        uint32 // by RFC 7541, section 4.1
	kind        fieldKind
}

func fieldSize(name string, value int) uint32 { return uint32(len(name) + value + 32) }

func newField(name, value string) *field {
	return &field{name: name, value: value, size: fieldSize(name, len(value)), kind: kindOf(name, value)}
}

// kindOf classifies a field; RFC 9113, section 8.2, says which are malformed.
func kindOf(name, value string) fieldKind {
	kind, known := kinds[name]
	switch {
	case !httpguts.ValidHeaderFieldValue(value), value != strings.Trim(value, " \t"):
		return kindInvalid
	case kind == kindTE && value != "trailers":
		return kindInvalid
	case known:
		return kind
	case !validName(name):
		return kindInvalid
	case strings.HasSuffix(name, "-bin"):
		return kindBinary
	}
	return kindMetadata
}

// validName says that a name is a token without upper case. Names of unknown
// pseudo-headers are none.
func validName(name string) bool {
	for i := range len(name) {
		if c := name[i]; 'A' <= c && c <= 'Z' || !httpguts.IsTokenRune(rune(c)) {
			return false
		}
	}
	return name != ""
}

// request is what a header block says: all that calls with the same fields have
// in common. It does not change.
type request struct {
	fields []*field
	path   string
	method *method // nil if it is not served
	md     *Metadata
	// encoding is the grpc-encoding, "" for identity.
	encoding string
	gzip     bool
	length   int64 // content-length, -1 if not stated
	post     bool
	grpc     bool // by content-type
	te       bool
	// head is the header block of the answer, bare that of one without messages.
	head, bare []byte
	// reset, if not 0, is what the stream is reset with.
	reset http2.ErrCode
	// refuse, if not nil, is the answer, with an HTTP status.
	refuse     *status.Status
	httpStatus int
	// Of a request that is no gRPC.
	httpMethod, authority, scheme string
}

// parseRequest reads the fields of a block. Unless it is for HTTP, what no
// gRPC server serves is refused.
func (s *Server) parseRequest(fields []*field, overHTTP bool) *request {
	r := &request{fields: fields, length: -1, httpStatus: http.StatusOK}
	values := make(map[string][]string, len(fields))
	var pseudo [kindProtocol + 1]int
	regular := false
	contentType := ""
	hosts := 0
	var bad *status.Status
	for _, f := range fields {
		if strings.HasPrefix(f.name, ":") {
			if regular || f.kind == kindInvalid {
				r.reset = http2.ErrCodeProtocol
				return r
			}
			if pseudo[f.kind]++; pseudo[f.kind] > 1 && f.kind != kindAuthority {
				r.reset = http2.ErrCodeProtocol
				return r
			}
		} else {
			regular = true
		}
		switch f.kind {
		case kindInvalid:
			r.reset = http2.ErrCodeProtocol
			return r
		case kindMethod:
			r.httpMethod = f.value
			r.post = f.value == http.MethodPost
		case kindScheme:
			r.scheme = f.value
		case kindPath:
			r.path = f.value
		case kindAuthority:
			r.authority = f.value
			values[f.name] = append(values[f.name], f.value)
		case kindHost:
			hosts++
			if r.authority == "" {
				r.authority = f.value
			}
			values[f.name] = append(values[f.name], f.value)
		case kindContentType:
			contentType = f.value
			values[f.name] = append(values[f.name], f.value)
			r.grpc = isGRPC(f.value)
		case kindContentLength:
			n, err := strconv.ParseUint(f.value, 10, 63)
			if err != nil || r.length >= 0 && r.length != int64(n) {
				r.reset = http2.ErrCodeProtocol
				return r
			}
			r.length = int64(n)
		case kindEncoding:
			r.encoding = f.value
		case kindTE:
			r.te = true
		case kindBinary:
			for part := range strings.SplitSeq(f.value, ",") {
				v, err := decodeBinary(part)
				if err != nil {
					bad = status.Newf(codes.Internal, "malformed binary metadata %q in header %q: %v", f.value, f.name, err)
					break
				}
				values[f.name] = append(values[f.name], v)
			}
		case kindMetadata:
			values[f.name] = append(values[f.name], f.value)
		}
	}
	if pseudo[kindMethod] != 1 || r.httpMethod != http.MethodConnect && (pseudo[kindScheme] != 1 || r.path == "") || pseudo[kindProtocol] > 0 {
		r.reset = http2.ErrCodeProtocol
		return r
	}
	if r.encoding == "identity" {
		r.encoding = ""
	}
	r.gzip = r.encoding == "gzip"
	r.bare = responseHead(contentType, false, r.grpc)
	if r.head = r.bare; r.gzip {
		r.head = responseHead(contentType, true, r.grpc)
	}
	switch {
	case len(values[":authority"]) > 1 || hosts > 1:
		r.refuse = status.Newf(codes.Internal, "num values of :authority: %v, num values of host: %v, both must only have 1 value as per HTTP/2 spec", len(values[":authority"]), hosts)
		r.httpStatus = http.StatusBadRequest
	case !r.grpc && overHTTP:
		r.md = newMetadata(values)
		return r
	case !r.grpc:
		r.refuse = status.Newf(codes.InvalidArgument, "invalid gRPC request content-type %q", contentType)
		r.httpStatus = http.StatusUnsupportedMediaType
	case bad != nil:
		r.refuse, r.httpStatus = bad, http.StatusBadRequest
	case r.authority == "":
		r.refuse, r.httpStatus = status.New(codes.Internal, "no host or :authority header present"), http.StatusBadRequest
	case !r.post:
		r.refuse = status.Newf(codes.Internal, "Received a HEADERS frame with :method %q which should be POST", r.httpMethod)
		r.httpStatus = http.StatusMethodNotAllowed
	default:
		if len(values[":authority"]) == 0 {
			values[":authority"] = values["host"]
		}
		delete(values, "host")
		r.method, r.refuse = s.find(r.path)
		if r.refuse == nil && r.encoding != "" && !r.gzip {
			r.refuse = status.Newf(codes.Unimplemented, "grpc: Decompressor is not installed for grpc-encoding %q", r.encoding)
			r.bare = appendField(r.bare[:len(r.bare):len(r.bare)], "grpc-accept-encoding", "gzip,identity")
		}
	}
	r.md = newMetadata(values)
	return r
}

// same says that r was made of just these fields.
func (r *request) same(fields []*field) bool {
	if len(r.fields) != len(fields) {
		return false
	}
	for i, f := range fields {
		if r.fields[i] != f {
			return false
		}
	}
	return true
}

// requests remembers what a connection's last header blocks said.
type requests struct {
	slots [8]*request
	next  uint8 // the slot to forget first
}

// find returns the request of fields that were seen lately, nil if there is none.
func (rs *requests) find(fields []*field) *request {
	for _, r := range rs.slots {
		if r != nil && r.same(fields) {
			return r
		}
	}
	return nil
}

// keep remembers r, unless it is so large that a connection should not hold
// eight of its kind.
func (rs *requests) keep(r *request, size uint32) {
	if size > tableBytes {
		return
	}
	rs.slots[rs.next%uint8(len(rs.slots))] = r
	rs.next++
}

// isGRPC says that a content type is gRPC's, with a suffix or without.
func isGRPC(contentType string) bool {
	rest, ok := strings.CutPrefix(contentType, "application/grpc")
	return ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// decodeBinary decodes the value of a "-bin" header, padded or not.
func decodeBinary(v string) (string, error) {
	b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(strings.Trim(v, " "), "="))
	return string(b), err
}

// parseTimeout reads a grpc-timeout.
func parseTimeout(v []byte) (time.Duration, error) {
	if len(v) < 2 {
		return 0, fmt.Errorf("transport: timeout string is too short: %q", v)
	}
	if len(v) > 9 {
		return 0, fmt.Errorf("transport: timeout string is too long: %q", v)
	}
	unit := time.Duration(0)
	switch v[len(v)-1] {
	case 'H':
		unit = time.Hour
	case 'M':
		unit = time.Minute
	case 'S':
		unit = time.Second
	case 'm':
		unit = time.Millisecond
	case 'u':
		unit = time.Microsecond
	case 'n':
		unit = time.Nanosecond
	default:
		return 0, fmt.Errorf("transport: timeout unit is not recognized: %q", v)
	}
	n := int64(0)
	for _, c := range v[:len(v)-1] {
		if c < '0' || c > '9' {
			_, err := strconv.ParseUint(string(v[:len(v)-1]), 10, 64)
			return 0, err
		}
		n = 10*n + int64(c-'0')
	}
	if n > int64(1<<63-1)/int64(unit) {
		return 1<<63 - 1, nil
	}
	return time.Duration(n) * unit, nil
}
