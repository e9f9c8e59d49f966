// Package command is what a log entry contains: etcd's InternalRaftRequest, byte
// for byte.
//
// It neither checks nor runs a command; that is for rpc and state. Command is
// the main type, Decode and AppendRequest the two directions. The requests on
// the hot path (Put, Range, DeleteRange, Txn, Compaction) are decoded without
// the protobuf runtime, and a client's bytes are embedded as they came if they
// are canonical. Invariants:
//
//	C1: what a Parse function accepts, etcd's generated types accept too, with
//	    equal fields, and would write as the same bytes (but see parseCompare).
//	C2: what AppendRequest makes of such bytes, every etcd 3.5 to 3.7 can parse.
//	C3: Decode depends on the entry alone; whatever a 3.7 member accepts it
//	    accepts, and understands in the same way.
//	C4: recursion and memory are bounded by the input's size.
package command

import (
	"errors"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// ErrUnknown says that an entry carries no request known to etcd 3.7, or more
// than one. Real members stop at such an entry, and so must we.
var ErrUnknown = errors.New("command: not one known request")

// Command is a decoded entry. Byte slices alias the entry; the pieces of Txn lie
// in an arena that the next Decode into the same Command uses again.
type Command struct {
	// ID is the command's identity for its proposer: the legacy ID field, or if
	// that is 0 the one of the header.
	ID     uint64
	Header Header
	Kind   Kind

	// The request, in the field of its kind. All other kinds are in Msg, as the
	// generated type that InternalRaftRequest has for them.
	Put         PutRequest
	Range       RangeRequest
	DeleteRange DeleteRangeRequest
	Txn         TxnRequest
	Compaction  CompactionRequest
	Msg         proto.Message

	// FeatureLevel is what an Alarm GET carries beside itself, nil for none.
	FeatureLevel *FeatureLevel

	arena TxnArena
	name  string // the last user name, so that it need not be made again
}

// Reset empties c for another Decode, keeping its memory. Decode does it too.
func (c *Command) Reset() {
	if c.Header.Username != "" {
		c.name = c.Header.Username
	}
	switch c.Kind {
	case KindPut:
		c.Put = PutRequest{}
	case KindRange:
		c.Range = RangeRequest{}
	case KindDeleteRange:
		c.DeleteRange = DeleteRangeRequest{}
	case KindTxn:
		c.Txn = TxnRequest{}
		c.arena.Reset()
	case KindCompaction:
		c.Compaction = CompactionRequest{}
	}
	c.ID, c.Header, c.Kind, c.Msg, c.FeatureLevel = 0, Header{}, KindNone, nil, nil
}

// Decode decodes the data of a normal entry, which is not empty, into c. Entries
// of etcd 3.5 in the shape of its v2 store are translated as 3.6 does. It fails
// with ErrMalformed or ErrUnknown, and then c is unspecified.
func Decode(data []byte, c *Command) error {
	c.Reset()
	if c.decodeFast(data) {
		return nil
	}
	c.Reset()
	m := new(pb.InternalRaftRequest)
	err := proto.Unmarshal(data, m)
	if err == nil {
		err = c.fromMessage(m)
		if err == nil || c.Kind != KindNone {
			return err
		}
	}
	if legacy, isLegacy := parseLegacy(data); isLegacy {
		return c.fromLegacy(legacy)
	}
	if errors.Is(err, ErrUnknown) {
		return err
	}
	return fmt.Errorf("entry of %d bytes: %w: %w", len(data), ErrMalformed, err)
}

// decodeFast decodes an entry whose fields are known and occur once, and whose
// header and request are canonical. Otherwise it returns false.
func (c *Command) decodeFast(data []byte) bool {
	var body []byte
	var hasID, hasHeader bool
	for len(data) > 0 {
		field, typ, n := protowire.ConsumeTag(data)
		if n < 0 {
			return false
		}
		data = data[n:]
		if field == fieldID && typ == protowire.VarintType {
			id, n := varint(data)
			if n == 0 || hasID {
				return false
			}
			c.ID, data, hasID = id, data[n:], true
			continue
		}
		if typ != protowire.BytesType {
			return false
		}
		var value []byte
		var ok bool
		if value, data, ok = messageField(data); !ok {
			return false
		}
		if field == fieldHeader {
			c.Header.Username = c.name
			if hasHeader || !ParseHeader(value, &c.Header) {
				return false
			}
			hasHeader = true
			continue
		}
		kind := kindOf(field)
		if kind == KindNone || c.Kind != KindNone {
			return false
		}
		c.Kind, body = kind, value
	}
	if c.ID == 0 {
		if !hasHeader {
			return false
		}
		c.ID = c.Header.ID
	}
	switch c.Kind {
	case KindNone:
		return false
	case KindPut:
		return ParsePut(body, &c.Put)
	case KindRange:
		return ParseRange(body, &c.Range)
	case KindDeleteRange:
		return ParseDeleteRange(body, &c.DeleteRange)
	case KindTxn:
		return ParseTxn(body, &c.Txn, &c.arena)
	case KindCompaction:
		return ParseCompaction(body, &c.Compaction)
	}
	c.Msg = c.Kind.newMessage()
	return proto.Unmarshal(body, c.Msg) == nil
}

// fromMessage fills c from the generated type. If m has no request it fails and
// leaves c.Kind at KindNone.
func (c *Command) fromMessage(m *pb.InternalRaftRequest) error {
	count := 0
	m.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if kind := kindOf(f.Number()); kind != KindNone {
			count++
			c.Kind, c.Msg = kind, v.Message().Interface()
		}
		return true
	})
	if count != 1 {
		return fmt.Errorf("entry carries %d requests: %w", count, ErrUnknown)
	}
	if m.GetID() == 0 && m.GetHeader() == nil {
		return fmt.Errorf("%v entry has neither ID nor header: %w", c.Kind, ErrUnknown)
	}
	c.Header = Header{
		ID:           m.GetHeader().GetID(),
		Username:     m.GetHeader().GetUsername(),
		AuthRevision: m.GetHeader().GetAuthRevision(),
	}
	if c.ID = m.GetID(); c.ID == 0 {
		c.ID = c.Header.ID
	}
	switch r := c.Msg.(type) {
	case *pb.PutRequest:
		c.Put, c.Msg = putOf(r), nil
	case *pb.RangeRequest:
		c.Range, c.Msg = rangeOf(r), nil
	case *pb.DeleteRangeRequest:
		c.DeleteRange, c.Msg = deleteRangeOf(r), nil
	case *pb.TxnRequest:
		c.Txn, c.Msg = txnOf(r), nil
	case *pb.CompactionRequest:
		c.Compaction, c.Msg = CompactionRequest{Revision: r.GetRevision(), Physical: r.GetPhysical()}, nil
	case *pb.AlarmRequest:
		if r.GetAction() == pb.AlarmRequest_GET {
			c.FeatureLevel = parseFeatureLevel(m.GetHeader().ProtoReflect().GetUnknown())
		}
	}
	return nil
}
