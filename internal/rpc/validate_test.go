package rpc

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/engram-kv/engram/internal/command"
)

// Short hands for operations.

func opPut(key string) command.Op {
	return command.Op{Kind: command.OpPut, Put: &command.PutRequest{Key: []byte(key)}}
}

func opDelete(key, end string) command.Op {
	return command.Op{Kind: command.OpDeleteRange, DeleteRange: &command.DeleteRangeRequest{Key: []byte(key), RangeEnd: []byte(end)}}
}

func opRange(key string) command.Op {
	return command.Op{Kind: command.OpRange, Range: &command.RangeRequest{Key: []byte(key)}}
}

func opTxn(then, otherwise []command.Op) command.Op {
	return command.Op{Kind: command.OpTxn, Txn: &command.TxnRequest{Success: then, Failure: otherwise}}
}

func ops(o ...command.Op) []command.Op { return o }

func TestTxnDuplicateKeys(t *testing.T) {
	dup := rpctypes.ErrGRPCDuplicateKey
	for _, c := range []struct {
		name            string
		then, otherwise []command.Op
		want            error
	}{
		{"different keys", ops(opPut("a"), opPut("b")), nil, nil},
		{"put twice", ops(opPut("a"), opPut("a")), nil, dup},
		{"put twice in the failure branch", nil, ops(opPut("a"), opPut("a")), dup},
		{"both branches", ops(opPut("a")), ops(opPut("a")), nil},
		{"put and delete in different branches", ops(opPut("a")), ops(opDelete("a", "")), nil},
		{"put, then its key deleted", ops(opPut("a"), opDelete("a", "")), nil, dup},
		{"key deleted, then put", ops(opDelete("a", ""), opPut("a")), nil, dup},
		{"single delete spares the next key", ops(opDelete("a", ""), opPut("a\x00")), nil, nil},
		{"inside a range", ops(opPut("b"), opDelete("a", "c")), nil, dup},
		{"at a range's start", ops(opPut("a"), opDelete("a", "c")), nil, dup},
		{"at a range's end", ops(opPut("c"), opDelete("a", "c")), nil, nil},
		{"below an open range", ops(opPut("a"), opDelete("b", "\x00")), nil, nil},
		{"in an open range", ops(opPut("zzz"), opDelete("b", "\x00")), nil, nil},
		{"all keys", ops(opPut("a"), opDelete("\x00", "\x00")), nil, nil},
		{"inverted range covers nothing", ops(opPut("b"), opDelete("c", "a")), nil, nil},
		{"empty range covers nothing", ops(opPut("a"), opDelete("a", "a")), nil, nil},
		{"deletes overlap deletes", ops(opDelete("a", "c"), opDelete("b", "d"), opDelete("b", "")), nil, nil},
		{"a short range after a long one", ops(opDelete("a", "z"), opDelete("b", "c"), opPut("m")), nil, dup},
		{"ranges are free", ops(opRange("a"), opRange("a"), opPut("a")), nil, nil},
		{"nested branches exclude each other", ops(opTxn(ops(opPut("a")), ops(opPut("a")))), nil, nil},
		{"a nested branch may delete what the other puts", ops(opTxn(ops(opPut("a")), ops(opDelete("a", "b")))), nil, nil},
		{"nested put meets outer put", ops(opPut("a"), opTxn(ops(opPut("a")), nil)), nil, dup},
		{"nested else put meets outer put", ops(opTxn(nil, ops(opPut("a"))), opPut("a")), nil, dup},
		{"nested put meets outer delete", ops(opTxn(nil, ops(opPut("b"))), opDelete("a", "c")), nil, dup},
		{"nested delete meets outer put", ops(opTxn(ops(opDelete("a", "c")), nil), opPut("b")), nil, dup},
		{"nested put, then nested delete", ops(opTxn(ops(opPut("a")), nil), opTxn(ops(opDelete("a", "")), nil)), nil, nil},
		{"nested delete, then nested put", ops(opTxn(ops(opDelete("a", "")), nil), opTxn(ops(opPut("a")), nil)), nil, dup},
		{"nested put, then delete", ops(opTxn(ops(opPut("a")), nil), opDelete("a", "")), nil, dup},
		{"deeper", ops(opTxn(ops(opTxn(ops(opPut("a")), nil), opTxn(ops(opDelete("a", "")), nil)), nil)), nil, nil},
		{"two nested transactions", ops(opTxn(ops(opPut("a")), nil), opTxn(nil, ops(opPut("a")))), nil, dup},
		{"nested put twice", ops(opTxn(nil, ops(opPut("a"), opPut("a")))), nil, dup},
		{"own range longest, another's covers", ops(opTxn(ops(opDelete("a", "z")), ops(opPut("m"))), opDelete("b", "n")), nil, dup},
		{"own range longest, another's ends before", ops(opTxn(ops(opDelete("a", "z")), ops(opPut("m"))), opDelete("b", "l")), nil, nil},
		{"three levels", ops(opPut("k"), opTxn(nil, ops(opTxn(ops(opDelete("j", "l")), nil)))), nil, dup},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := checkTxn(&command.TxnRequest{Success: c.then, Failure: c.otherwise}, 128)
			if !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
		})
	}
}

// leaf is one write of a transaction, with the branches that lead to it.
type leaf struct {
	path  []branchAt
	put   string
	erase *command.DeleteRangeRequest
}

type branchAt struct {
	op   int
	then bool
}

func leaves(ops []command.Op, path []branchAt, out *[]leaf) {
	for i, op := range ops {
		here := append(append([]branchAt(nil), path...), branchAt{op: i})
		switch op.Kind {
		case command.OpPut:
			*out = append(*out, leaf{path: here, put: string(op.Put.Key)})
		case command.OpDeleteRange:
			*out = append(*out, leaf{path: here, erase: op.DeleteRange})
		case command.OpTxn:
			here[len(here)-1].then = true
			leaves(op.Txn.Success, here, out)
			other := append([]branchAt(nil), here...)
			other[len(other)-1].then = false
			leaves(op.Txn.Failure, other, out)
		}
	}
}

// counts says that etcd holds a put against a delete: not if both are inside
// transactions where their ways part, and the delete comes later.
func counts(put, erase leaf) bool {
	for i := range min(len(put.path), len(erase.path)) {
		if a, b := put.path[i].op, erase.path[i].op; a != b {
			nested := len(put.path) > i+1 && len(erase.path) > i+1
			return !nested || b < a
		}
	}
	return true
}

// together says that two writes can both happen: where their ways part, it is
// at different operations, not at the branches of one.
func together(a, b leaf) bool {
	for i := range min(len(a.path), len(b.path)) {
		if a.path[i].op != b.path[i].op {
			return true
		}
		if a.path[i].then != b.path[i].then {
			return false
		}
	}
	return false
}

func clash(a, b leaf) bool {
	switch {
	case a.erase == nil && b.erase == nil:
		return a.put == b.put
	case a.erase != nil && b.erase != nil:
		return false
	case a.erase != nil:
		a, b = b, a
	}
	key, end := string(b.erase.Key), string(b.erase.RangeEnd)
	if end == "" {
		return a.put == key && counts(a, b)
	}
	return key <= a.put && a.put < end && counts(a, b)
}

// TestTxnDuplicateKeysModel compares the sweep with asking each pair of writes.
func TestTxnDuplicateKeysModel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	key := func() string { return string(rune('a' + rnd.IntN(9))) }
	var branch func(depth int) []command.Op
	branch = func(depth int) (out []command.Op) {
		for range rnd.IntN(4) {
			switch k := rnd.IntN(6); {
			case k < 2:
				out = append(out, opPut(key()))
			case k == 2:
				out = append(out, opDelete(key(), []string{"", "\x00", key(), key()}[rnd.IntN(4)]))
			case k == 3:
				out = append(out, opRange(key()))
			case depth > 0:
				out = append(out, opTxn(branch(depth-1), branch(depth-1)))
			}
		}
		return out
	}
	refused := 0
	const rounds = 20000
	for i := range rounds {
		r := &command.TxnRequest{Success: branch(3)}
		var all []leaf
		leaves(r.Success, nil, &all)
		var want error
		for i, a := range all {
			for _, b := range all[:i] {
				if together(a, b) && clash(a, b) {
					want = rpctypes.ErrGRPCDuplicateKey
				}
			}
		}
		if want != nil {
			refused++
		}
		if got := checkTxn(r, 128); !errors.Is(got, want) {
			t.Fatalf("round %d: got %v, want %v for %+v", i, got, want, all)
		}
	}
	if refused < rounds/10 || refused > rounds*9/10 {
		t.Fatalf("%d of %d rounds refused: the generator covers one side only", refused, rounds)
	}
}

func TestTxnLimits(t *testing.T) {
	many := func(n int) (out []command.Op) {
		for i := range n {
			out = append(out, opPut(fmt.Sprintf("k%03d", i)))
		}
		return out
	}
	compares := func(n int) (out []command.Compare) {
		for range n {
			out = append(out, command.Compare{Key: []byte("c")})
		}
		return out
	}
	tooMany := rpctypes.ErrGRPCTooManyOps
	for _, c := range []struct {
		name string
		r    command.TxnRequest
		want error
	}{
		{"empty", command.TxnRequest{}, nil},
		{"full lists", command.TxnRequest{Compare: compares(128), Success: many(128), Failure: many(128)}, nil},
		{"compares", command.TxnRequest{Compare: compares(129)}, tooMany},
		{"success", command.TxnRequest{Success: many(129)}, tooMany},
		{"failure", command.TxnRequest{Failure: many(129)}, tooMany},
		{"limit before empty key", command.TxnRequest{Compare: make([]command.Compare, 129)}, tooMany},
		{"nested has the rest", command.TxnRequest{Success: ops(opTxn(many(127), nil))}, nil},
		{"nested beyond the rest", command.TxnRequest{Success: ops(opTxn(many(128), nil))}, tooMany},
		{"longest list counts", command.TxnRequest{Compare: compares(100), Success: ops(opTxn(many(29), nil))}, tooMany},
		{"siblings do not share", command.TxnRequest{Failure: ops(opTxn(many(126), nil), opTxn(nil, many(126)))}, rpctypes.ErrGRPCDuplicateKey},
		{"third level", command.TxnRequest{Success: ops(opTxn(ops(opTxn(many(127), nil)), nil))}, tooMany},
		{"empty compare key", command.TxnRequest{Compare: make([]command.Compare, 1)}, rpctypes.ErrGRPCEmptyKey},
		{"empty put key", command.TxnRequest{Success: ops(opPut(""))}, rpctypes.ErrGRPCEmptyKey},
		{"empty nested delete key", command.TxnRequest{Failure: ops(opTxn(nil, ops(opDelete("", ""))))}, rpctypes.ErrGRPCEmptyKey},
		{"empty range key", command.TxnRequest{Failure: ops(opRange(""))}, rpctypes.ErrGRPCEmptyKey},
		{"op without request", command.TxnRequest{Success: make([]command.Op, 1)}, rpctypes.ErrGRPCKeyNotFound},
		{"ops before duplicates", command.TxnRequest{Success: ops(opPut("a"), opPut("a")), Failure: make([]command.Op, 1)}, rpctypes.ErrGRPCKeyNotFound},
		{"value with ignore_value", command.TxnRequest{Success: ops(command.Op{Kind: command.OpPut, Put: &command.PutRequest{Key: []byte("a"), Value: []byte("v"), IgnoreValue: true}})}, rpctypes.ErrGRPCValueProvided},
		{"lease with ignore_lease", command.TxnRequest{Success: ops(command.Op{Kind: command.OpPut, Put: &command.PutRequest{Key: []byte("a"), Lease: 1, IgnoreLease: true}})}, rpctypes.ErrGRPCLeaseProvided},
		{"sort order", command.TxnRequest{Success: ops(command.Op{Kind: command.OpRange, Range: &command.RangeRequest{Key: []byte("a"), SortOrder: 3}})}, rpctypes.ErrGRPCInvalidSortOption},
		{"sort target", command.TxnRequest{Success: ops(command.Op{Kind: command.OpRange, Range: &command.RangeRequest{Key: []byte("a"), SortTarget: -1}})}, rpctypes.ErrGRPCInvalidSortOption},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := checkTxn(&c.r, 128); !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
		})
	}
}

func TestTxnShape(t *testing.T) {
	serializable := command.Op{Kind: command.OpRange, Range: &command.RangeRequest{Key: []byte("a"), Serializable: true}}
	prev := command.Op{Kind: command.OpDeleteRange, DeleteRange: &command.DeleteRangeRequest{Key: []byte("a"), PrevKV: true}}
	for _, c := range []struct {
		name string
		r    command.TxnRequest
		want shape
	}{
		{"empty", command.TxnRequest{}, shape{readOnly: true, serializable: true}},
		{"reads", command.TxnRequest{Success: ops(opRange("a"))}, shape{readOnly: true, reads: true}},
		{"serializable", command.TxnRequest{Success: ops(serializable), Failure: ops(serializable)}, shape{readOnly: true, serializable: true, reads: true}},
		{"half serializable", command.TxnRequest{Success: ops(serializable), Failure: ops(opRange("a"))}, shape{readOnly: true, reads: true}},
		{"empty nested goes through the log", command.TxnRequest{Success: ops(opTxn(nil, nil))}, shape{serializable: true}},
		{"nested reads", command.TxnRequest{Failure: ops(opPut("a"), opTxn(nil, ops(prev)))}, shape{serializable: true, reads: true}},
		{"prev_kv", command.TxnRequest{Failure: ops(prev)}, shape{serializable: true, reads: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := txnShape(&c.r); got != c.want {
				t.Fatalf("got %+v, want %+v", got, c.want)
			}
		})
	}
}
