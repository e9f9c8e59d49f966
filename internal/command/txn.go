package command

// MaxTxnDepth bounds how deep Txns nest within a Txn that we propose or decode
// fast. etcd's own bound is its operation limit (128 by default, and each level
// costs one); protobuf's decoders give up at some 5000 levels.
const MaxTxnDepth = 1024

// MaxTxnPieces bounds the compares and ops of a Txn, nested ones counted, that
// we propose or decode fast: a piece takes 2 bytes on the wire and a hundred in
// memory.
const MaxTxnPieces = 1 << 16

// TxnRequest is a decoded etcdserverpb.TxnRequest. Its slices belong to the
// arena (a Command or a TxnArena) that decoded it; the byte slices within alias
// the input.
type TxnRequest struct {
	Compare          []Compare
	Success, Failure []Op
}

// Union names the member of a Compare's target_union that is set. The numbers
// are those of Compare.target, plus one.
type Union uint8

// The members of target_union.
const (
	UnionNone Union = iota
	UnionVersion
	UnionCreate
	UnionMod
	UnionValue
	UnionLease
)

// Compare is a decoded etcdserverpb.Compare. Result and Target are the numbers
// of etcd's enums, unknown ones too.
type Compare struct {
	Result, Target int32
	Union          Union
	Key, RangeEnd  []byte
	Int            int64  // the operand, if Union is neither UnionNone nor UnionValue
	Value          []byte // the operand, if Union is UnionValue
}

// Number is the operand for a numeric target: 0 if target_union is missing or
// belongs to another target, as in etcd.
func (c *Compare) Number() int64 {
	if c.Union != UnionNone && int32(c.Union)-1 == c.Target {
		return c.Int
	}
	return 0
}

// Bytes is the operand for the target VALUE: empty if target_union is missing
// or belongs to another target.
func (c *Compare) Bytes() []byte {
	if c.Union == UnionValue {
		return c.Value
	}
	return nil
}

// OpKind says which request an Op carries. The numbers are the fields of
// etcdserverpb.RequestOp.
type OpKind uint8

// The kinds of an op. OpNone is an op without a request.
const (
	OpNone OpKind = iota
	OpRange
	OpPut
	OpDeleteRange
	OpTxn
)

// Op is a decoded etcdserverpb.RequestOp: the pointer named by Kind is set.
type Op struct {
	Kind        OpKind
	Range       *RangeRequest
	Put         *PutRequest
	DeleteRange *DeleteRangeRequest
	Txn         *TxnRequest
}

// arenaKeep is the number of elements of one type that an arena keeps for its
// next use; larger ones are left to the garbage collector.
const arenaKeep = 1024

// TxnArena holds the pieces of decoded Txns. Its zero value is ready. A piece
// is filled once, before anybody sees it, so a pointer into it stays good when
// the slice below moves to grow.
type TxnArena struct {
	pieces   int // of the Txn at hand
	compares []Compare
	ops      []Op
	ranges   []RangeRequest
	puts     []PutRequest
	deletes  []DeleteRangeRequest
	txns     []TxnRequest
}

// Reset makes the arena empty. What was decoded with it must no longer be used.
func (a *TxnArena) Reset() {
	a.compares = reset(a.compares)
	a.ops = reset(a.ops)
	a.ranges = reset(a.ranges)
	a.puts = reset(a.puts)
	a.deletes = reset(a.deletes)
	a.txns = reset(a.txns)
}

// reset empties s and drops its references to requests.
func reset[T any](s []T) []T {
	if cap(s) > arenaKeep {
		return nil
	}
	clear(s)
	return s[:0]
}

// take returns n zeroed elements of *s that nobody else uses.
func take[T any](s *[]T, n int) []T {
	if n == 0 {
		return nil
	}
	at := len(*s)
	if at+n <= cap(*s) {
		*s = (*s)[:at+n]
	} else {
		// Pieces taken before keep the old array; only new ones use this.
		*s = make([]T, n, max(n, 2*cap(*s), 8))
		at = 0
	}
	return (*s)[at : at+n : at+n]
}

// ParseTxn decodes a canonical TxnRequest of at most MaxTxnDepth levels, as the
// other Parse functions do. Its pieces are taken from a.
func ParseTxn(raw []byte, r *TxnRequest, a *TxnArena) (canonical bool) {
	a.pieces = 0
	return a.parse(raw, r, 1)
}

func (a *TxnArena) parse(raw []byte, r *TxnRequest, depth int) bool {
	*r = TxnRequest{}
	if depth > MaxTxnDepth {
		return false
	}
	compares, success, failure, ok := countTxn(raw)
	a.pieces += compares + success + failure
	if !ok || a.pieces > MaxTxnPieces {
		return false
	}
	r.Compare = take(&a.compares, compares)
	r.Success = take(&a.ops, success)
	r.Failure = take(&a.ops, failure)
	for i := range r.Compare {
		var piece []byte
		piece, raw, _ = messageField(raw[1:])
		if !parseCompare(piece, &r.Compare[i]) {
			return false
		}
	}
	for _, ops := range [2][]Op{r.Success, r.Failure} {
		for i := range ops {
			var piece []byte
			piece, raw, _ = messageField(raw[1:])
			if !a.parseOp(piece, &ops[i], depth) {
				return false
			}
		}
	}
	return true
}

// countTxn counts the pieces of a TxnRequest whose fields stand in order.
func countTxn(raw []byte) (compares, success, failure int, ok bool) {
	var last byte
	for len(raw) > 0 {
		tag := raw[0]
		if tag < last {
			return 0, 0, 0, false
		}
		last = tag
		switch tag {
		case 1<<3 | 2:
			compares++
		case 2<<3 | 2:
			success++
		case 3<<3 | 2:
			failure++
		default:
			return 0, 0, 0, false
		}
		if _, raw, ok = messageField(raw[1:]); !ok {
			return 0, 0, 0, false
		}
	}
	return compares, success, failure, true
}

func (a *TxnArena) parseOp(raw []byte, op *Op, depth int) bool {
	if len(raw) == 0 {
		return true // OpNone; only the API layer refuses it
	}
	body, rest, ok := messageField(raw[1:])
	if !ok || len(rest) > 0 {
		return false
	}
	switch raw[0] {
	case 1<<3 | 2:
		op.Kind, op.Range = OpRange, &take(&a.ranges, 1)[0]
		return ParseRange(body, op.Range)
	case 2<<3 | 2:
		op.Kind, op.Put = OpPut, &take(&a.puts, 1)[0]
		return ParsePut(body, op.Put)
	case 3<<3 | 2:
		op.Kind, op.DeleteRange = OpDeleteRange, &take(&a.deletes, 1)[0]
		return ParseDeleteRange(body, op.DeleteRange)
	case 4<<3 | 2:
		op.Kind, op.Txn = OpTxn, &take(&a.txns, 1)[0]
		return a.parse(body, op.Txn, depth+1)
	}
	return false
}

// parseCompare takes target_union on either side of range_end: etcd's generated
// types up to 3.6 write it before, those of 3.7 behind.
func parseCompare(raw []byte, c *Compare) bool {
	*c = Compare{}
	var last byte
	for ok := true; len(raw) > 0; {
		tag := raw[0]
		if tag <= last {
			return false
		}
		last, raw = tag, raw[1:]
		if tag >= 4<<3 && tag <= 8<<3 && c.Union != UnionNone {
			return false
		}
		switch tag {
		case 1 << 3:
			c.Result, raw, ok = enumField(raw)
		case 2 << 3:
			c.Target, raw, ok = enumField(raw)
		case 3<<3 | 2:
			c.Key, raw, ok = bytesField(raw)
		// A member of a oneof is written even when it is zero.
		case 4 << 3, 5 << 3, 6 << 3, 8 << 3:
			c.Union = Union(tag>>3 - 3)
			u, n := varint(raw)
			c.Int, raw, ok = int64(u), raw[n:], n > 0
		case 7<<3 | 2:
			c.Union = UnionValue
			c.Value, raw, ok = messageField(raw)
		case 0x82: // first byte of the tag of field 64
			if len(raw) == 0 || raw[0] != 0x04 || c.RangeEnd != nil {
				return false
			}
			c.RangeEnd, raw, ok = bytesField(raw[1:])
			last = 3<<3 | 2
		default:
			return false
		}
		if !ok {
			return false
		}
	}
	return true
}
