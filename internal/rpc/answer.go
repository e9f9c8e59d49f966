package rpc

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/internal/state"
)

// Field numbers of etcdserverpb's responses to KV methods.
const (
	fieldHeader = 1 // of every response

	fieldRangeKVs   = 2
	fieldRangeMore  = 3
	fieldRangeCount = 4

	fieldPutPrevKV = 2

	fieldDeleted       = 2
	fieldDeletePrevKVs = 3

	fieldSucceeded = 2
	fieldResponses = 3

	fieldStreamRange = 1 // RangeStreamResponse.range_response

	fieldHeaderCluster  = 1
	fieldHeaderMember   = 2
	fieldHeaderRevision = 3
	fieldHeaderTerm     = 4
)

// Field numbers of ResponseOp, one per kind.
var responseOpField = [...]protowire.Number{
	state.OpRange: 1, state.OpPut: 2, state.OpDeleteRange: 3, state.OpTxn: 4,
}

// header is a ResponseHeader. Its zero value encodes as an empty message.
type header struct {
	cluster, member uint64
	revision        int64
	term            uint64
}

func (h header) size() int {
	return sizeVarint(fieldHeaderCluster, h.cluster) + sizeVarint(fieldHeaderMember, h.member) +
		sizeVarint(fieldHeaderRevision, uint64(h.revision)) + sizeVarint(fieldHeaderTerm, h.term)
}

func (h header) append(dst []byte) []byte {
	dst = appendVarint(dst, fieldHeaderCluster, h.cluster)
	dst = appendVarint(dst, fieldHeaderMember, h.member)
	dst = appendVarint(dst, fieldHeaderRevision, uint64(h.revision))
	return appendVarint(dst, fieldHeaderTerm, h.term)
}

// answer is the response to one KV operation, with its parts not yet joined:
// key-values are the encoded ones that the store keeps, and are copied once:
// into the response, or, if they are many, into what is written to the client.
type answer struct {
	kind state.OpKind
	// bare leaves the header out altogether, as all but the last chunk of a
	// RangeStream do.
	bare      bool
	header    header
	kvs       [][]byte // rows of a range, or previous values
	count     int64    // of a range's rows, or of deleted keys
	more      bool
	succeeded bool
	ops       []answer

	pins  int64 // memory that kvs keep in use, 0 if that was not counted
	bytes int   // encoded size, set by measure
}

// measure computes the encoded size of a and of all within it.
func (a *answer) measure() int {
	n := 0
	if !a.bare {
		n += sizeBytes(fieldHeader, a.header.size())
	}
	switch a.kind {
	case state.OpRange:
		n += sizeRepeated(fieldRangeKVs, a.kvs) + sizeBool(fieldRangeMore, a.more) +
			sizeVarint(fieldRangeCount, uint64(a.count))
	case state.OpPut:
		n += sizeRepeated(fieldPutPrevKV, a.kvs)
	case state.OpDeleteRange:
		n += sizeVarint(fieldDeleted, uint64(a.count)) + sizeRepeated(fieldDeletePrevKVs, a.kvs)
	case state.OpTxn:
		n += sizeBool(fieldSucceeded, a.succeeded)
		for i := range a.ops {
			op := &a.ops[i]
			inner := sizeBytes(responseOpField[op.kind], op.measure())
			n += sizeBytes(fieldResponses, inner)
		}
	}
	a.bytes = n
	return n
}

// encode returns the response in one slice of exactly its size.
func (a *answer) encode() []byte {
	return a.append(make([]byte, 0, a.measure()))
}

// append appends the encoded answer; measure must have been called.
func (a *answer) append(dst []byte) []byte {
	if !a.bare {
		dst = protowire.AppendTag(dst, fieldHeader, protowire.BytesType)
		dst = protowire.AppendVarint(dst, uint64(a.header.size()))
		dst = a.header.append(dst)
	}
	switch a.kind {
	case state.OpRange:
		dst = appendRepeated(dst, fieldRangeKVs, a.kvs)
		dst = appendBool(dst, fieldRangeMore, a.more)
		dst = appendVarint(dst, fieldRangeCount, uint64(a.count))
	case state.OpPut:
		dst = appendRepeated(dst, fieldPutPrevKV, a.kvs)
	case state.OpDeleteRange:
		dst = appendVarint(dst, fieldDeleted, uint64(a.count))
		dst = appendRepeated(dst, fieldDeletePrevKVs, a.kvs)
	case state.OpTxn:
		dst = appendBool(dst, fieldSucceeded, a.succeeded)
		for i := range a.ops {
			op := &a.ops[i]
			field := responseOpField[op.kind]
			dst = protowire.AppendTag(dst, fieldResponses, protowire.BytesType)
			dst = protowire.AppendVarint(dst, uint64(sizeBytes(field, op.bytes)))
			dst = protowire.AppendTag(dst, field, protowire.BytesType)
			dst = protowire.AppendVarint(dst, uint64(op.bytes))
			dst = op.append(dst)
		}
	}
	return dst
}

// rows is the greater part of the answer to a range, from its key-values on: it is
// copied from where the store keeps them as it is sent. It implements
// grpcserver.Body.
type rows struct {
	kvs  [][]byte
	at   int    // of the first that is not wholly written
	off  int    // of that one, with its tag and length
	tail []byte // behind them
	size int
}

// split returns the answer to a range in two parts, the second of which is made
// as it is sent; measure must have been called.
func (a *answer) split() (head []byte, rest *rows) {
	first, last := answer{kind: a.kind, bare: a.bare, header: a.header}, answer{kind: a.kind, bare: true, count: a.count, more: a.more}
	head = first.encode()
	return head, &rows{kvs: a.kvs, tail: last.encode(), size: a.bytes - len(head)}
}

// Size implements grpcserver.Body.
func (r *rows) Size() int { return r.size }

// Fill implements grpcserver.Body.
func (r *rows) Fill(p []byte) {
	for len(p) > 0 {
		if r.at == len(r.kvs) {
			r.tail = r.tail[copy(p, r.tail):]
			return
		}
		kv := r.kvs[r.at]
		var buf [2 * binary.MaxVarintLen32]byte
		head := protowire.AppendVarint(protowire.AppendTag(buf[:0], fieldRangeKVs, protowire.BytesType), uint64(len(kv)))
		if r.off < len(head) {
			n := copy(p, head[r.off:])
			p = p[n:]
			r.off += n
		}
		if r.off >= len(head) {
			n := copy(p, kv[r.off-len(head):])
			p = p[n:]
			r.off += n
		}
		if r.off == len(head)+len(kv) {
			r.kvs[r.at] = nil
			r.at, r.off = r.at+1, 0
		}
	}
}

// encodeChunk returns the answer to a range as one message of a RangeStream.
func (a *answer) encodeChunk() []byte {
	n := a.measure()
	dst := make([]byte, 0, sizeBytes(fieldStreamRange, n))
	dst = protowire.AppendTag(dst, fieldStreamRange, protowire.BytesType)
	dst = protowire.AppendVarint(dst, uint64(n))
	return a.append(dst)
}

// The functions below leave out zero values, as proto3 does.

func sizeVarint(field protowire.Number, v uint64) int {
	if v == 0 {
		return 0
	}
	return protowire.SizeTag(field) + protowire.SizeVarint(v)
}

func sizeBool(field protowire.Number, v bool) int {
	if !v {
		return 0
	}
	return protowire.SizeTag(field) + 1
}

func sizeBytes(field protowire.Number, n int) int {
	return protowire.SizeTag(field) + protowire.SizeBytes(n)
}

func sizeRepeated(field protowire.Number, messages [][]byte) int {
	n := 0
	for _, m := range messages {
		n += sizeBytes(field, len(m))
	}
	return n
}

func appendVarint(dst []byte, field protowire.Number, v uint64) []byte {
	if v == 0 {
		return dst
	}
	return protowire.AppendVarint(protowire.AppendTag(dst, field, protowire.VarintType), v)
}

func appendBool(dst []byte, field protowire.Number, v bool) []byte {
	if !v {
		return dst
	}
	return appendVarint(dst, field, 1)
}

func appendRepeated(dst []byte, field protowire.Number, messages [][]byte) []byte {
	for _, m := range messages {
		dst = protowire.AppendBytes(protowire.AppendTag(dst, field, protowire.BytesType), m)
	}
	return dst
}
