package command

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/coreos/go-semver/semver"
	"go.etcd.io/etcd/api/v3/membershippb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

var (
	// ErrMalformed says that bytes are not the wire form of their message.
	ErrMalformed = errors.New("command: malformed")
	// ErrDangerous says that a command, put into the log, would stop etcd
	// members that apply it.
	ErrDangerous = errors.New("command: would stop etcd members")
	// ErrTooComplex says that a Txn is beyond MaxTxnDepth or MaxTxnPieces.
	ErrTooComplex = errors.New("command: txn too complex")
)

// AppendRequest appends the InternalRaftRequest that carries body, the wire form
// of the kind's message, which goes in as it is: it must have come out of
// Normalize, AppendMessage or a Parse function. It fails, with dst unchanged,
// if the header has no ID or a name that is not UTF-8, or the kind is none.
func AppendRequest(dst []byte, kind Kind, h Header, body []byte) ([]byte, error) {
	field := kind.Field()
	switch {
	case field == 0:
		return dst, fmt.Errorf("kind %d is none: %w", kind, ErrDangerous)
	case h.ID == 0:
		return dst, fmt.Errorf("%v without an ID: %w", kind, ErrDangerous)
	case !utf8.ValidString(h.Username):
		return dst, fmt.Errorf("user name %q is not UTF-8: %w", h.Username, ErrDangerous)
	}
	if field < fieldHeader {
		dst = appendMessageField(dst, field, body)
		return appendHeader(dst, h), nil
	}
	return appendMessageField(appendHeader(dst, h), field, body), nil
}

// RequestSize is the number of bytes that AppendRequest will append.
func RequestSize(kind Kind, h Header, bodyLen int) int {
	return protowire.SizeTag(kind.Field()) + protowire.SizeBytes(bodyLen) +
		protowire.SizeTag(fieldHeader) + protowire.SizeBytes(headerSize(h))
}

func appendMessageField(dst []byte, field protowire.Number, body []byte) []byte {
	dst = protowire.AppendTag(dst, field, protowire.BytesType)
	return protowire.AppendBytes(dst, body)
}

func headerSize(h Header) (n int) {
	if h.ID != 0 {
		n += 1 + protowire.SizeVarint(h.ID)
	}
	if h.Username != "" {
		n += 1 + protowire.SizeBytes(len(h.Username))
	}
	if h.AuthRevision != 0 {
		n += 1 + protowire.SizeVarint(h.AuthRevision)
	}
	return n
}

func appendHeader(dst []byte, h Header) []byte {
	dst = protowire.AppendTag(dst, fieldHeader, protowire.BytesType)
	dst = protowire.AppendVarint(dst, uint64(headerSize(h)))
	return appendHeaderFields(dst, h)
}

func appendHeaderFields(dst []byte, h Header) []byte {
	if h.ID != 0 {
		dst = protowire.AppendVarint(append(dst, 1<<3), h.ID)
	}
	if h.Username != "" {
		dst = protowire.AppendString(append(dst, 2<<3|2), h.Username)
	}
	if h.AuthRevision != 0 {
		dst = protowire.AppendVarint(append(dst, 3<<3), h.AuthRevision)
	}
	return dst
}

// Normalize returns bytes of the kind's message that may stand in the log: raw
// itself if it is canonical, else a new slice, re-marshalled without unknown
// fields. It fails with ErrMalformed, ErrTooComplex or ErrDangerous.
func Normalize(kind Kind, raw []byte) ([]byte, error) {
	if canonical(kind, raw) {
		return raw, nil
	}
	if kind == KindTxn {
		pieces := 0
		if err := measureTxn(raw, &pieces, 1); err != nil {
			return nil, err
		}
	}
	m := kind.newMessage()
	if m == nil {
		return nil, fmt.Errorf("kind %d is none: %w", kind, ErrDangerous)
	}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, m); err != nil {
		return nil, fmt.Errorf("%v request of %d bytes: %w: %w", kind, len(raw), ErrMalformed, err)
	}
	return marshal(kind, m)
}

func canonical(kind Kind, raw []byte) bool {
	switch kind {
	case KindPut:
		return ParsePut(raw, new(PutRequest))
	case KindRange:
		return ParseRange(raw, new(RangeRequest))
	case KindDeleteRange:
		return ParseDeleteRange(raw, new(DeleteRangeRequest))
	case KindTxn:
		return ParseTxn(raw, new(TxnRequest), new(TxnArena))
	case KindCompaction:
		return ParseCompaction(raw, new(CompactionRequest))
	}
	return false
}

// measureTxn bounds what the generated type would allocate for raw. It reads
// any valid encoding; what is not one passes, for Unmarshal to refuse.
func measureTxn(raw []byte, pieces *int, depth int) error {
	if depth > MaxTxnDepth {
		return fmt.Errorf("txn nests more than %d deep: %w", MaxTxnDepth, ErrTooComplex)
	}
	for len(raw) > 0 {
		field, typ, piece, rest := nextField(raw)
		if raw = rest; typ != protowire.BytesType || field > 3 {
			continue
		}
		if *pieces++; *pieces > MaxTxnPieces {
			return fmt.Errorf("txn has more than %d compares and operations: %w", MaxTxnPieces, ErrTooComplex)
		}
		for field != 1 && len(piece) > 0 {
			var nested []byte
			var op protowire.Number
			op, typ, nested, piece = nextField(piece)
			if op != protowire.Number(OpTxn) || typ != protowire.BytesType {
				continue
			}
			if err := measureTxn(nested, pieces, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// nextField cuts the first field off raw; body is set for BytesType only. Of
// broken input it leaves no rest.
func nextField(raw []byte) (field protowire.Number, typ protowire.Type, body, rest []byte) {
	field, typ, n := protowire.ConsumeTag(raw)
	if n < 0 {
		return 0, 0, nil, nil
	}
	raw = raw[n:]
	if n = protowire.ConsumeFieldValue(field, typ, raw); n < 0 {
		return 0, 0, nil, nil
	}
	if typ == protowire.BytesType {
		body, _ = protowire.ConsumeBytes(raw)
	}
	return field, typ, body, raw[n:]
}

// AppendMessage is AppendRequest for a message of the generated type. It fails
// with ErrDangerous also if applying the command would stop etcd members.
func AppendMessage(dst []byte, kind Kind, h Header, m proto.Message) ([]byte, error) {
	want := kind.newMessage()
	if want == nil || m.ProtoReflect().Descriptor() != want.ProtoReflect().Descriptor() {
		return dst, fmt.Errorf("message %T is no %v request: %w", m, kind, ErrDangerous)
	}
	body, err := marshal(kind, m)
	if err != nil {
		return dst, err
	}
	return AppendRequest(dst, kind, h, body)
}

func marshal(kind Kind, m proto.Message) ([]byte, error) {
	if err := checkSafe(m); err != nil {
		return nil, err
	}
	body, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil { // a string that is not UTF-8
		return nil, fmt.Errorf("%v request: %w: %w", kind, ErrMalformed, err)
	}
	return body, nil
}

// checkSafe refuses the messages that are valid and yet stop etcd members.
func checkSafe(m proto.Message) error {
	switch m := m.(type) {
	case *membershippb.ClusterVersionSetRequest:
		if _, err := semver.NewVersion(m.GetVer()); err != nil {
			return fmt.Errorf("cluster version %q, want major.minor.patch: %w: %w", m.GetVer(), ErrDangerous, err)
		}
	case *membershippb.DowngradeInfoSetRequest:
		if !m.GetEnabled() {
			return nil
		}
		if _, err := semver.NewVersion(m.GetVer()); err != nil {
			return fmt.Errorf("downgrade target %q, want major.minor.patch: %w: %w", m.GetVer(), ErrDangerous, err)
		}
	case *membershippb.ClusterMemberAttrSetRequest:
		if m.GetMember_ID() == 0 || m.GetMemberAttributes() == nil {
			return fmt.Errorf("attributes of member %x are missing, or the member's id is: %w", m.GetMember_ID(), ErrDangerous)
		}
	}
	return nil
}
