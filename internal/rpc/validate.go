package rpc

import (
	"maps"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/engram-kv/engram/internal/command"
)

func checkRange(r *command.RangeRequest) error {
	switch {
	case len(r.Key) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.SortOrder < 0 || r.SortOrder > 2, r.SortTarget < 0 || r.SortTarget > 4:
		return rpctypes.ErrGRPCInvalidSortOption
	}
	return nil
}

func checkPut(r *command.PutRequest) error {
	switch {
	case len(r.Key) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.IgnoreValue && len(r.Value) != 0:
		return rpctypes.ErrGRPCValueProvided
	case r.IgnoreLease && r.Lease != 0:
		return rpctypes.ErrGRPCLeaseProvided
	}
	return nil
}

func checkDeleteRange(r *command.DeleteRangeRequest) error {
	if len(r.Key) == 0 {
		return rpctypes.ErrGRPCEmptyKey
	}
	return nil
}

// checkTxn checks a transaction whose lists may have maxOps elements each. The
// lists of transactions within it share what its own longest leaves of that.
func checkTxn(r *command.TxnRequest, maxOps int) error {
	if err := checkTxnOps(r, maxOps); err != nil {
		return err
	}
	for _, branch := range [2][]command.Op{r.Success, r.Failure} {
		if len(branch) == 0 || len(branch) == 1 && branch[0].Kind != command.OpTxn {
			continue
		}
		if _, err := branchWrites(branch); err != nil {
			return err
		}
	}
	return nil
}

func checkTxnOps(r *command.TxnRequest, maxOps int) error {
	longest := max(len(r.Compare), len(r.Success), len(r.Failure))
	if longest > maxOps {
		return rpctypes.ErrGRPCTooManyOps
	}
	for i := range r.Compare {
		if len(r.Compare[i].Key) == 0 {
			return rpctypes.ErrGRPCEmptyKey
		}
	}
	for _, branch := range [2][]command.Op{r.Success, r.Failure} {
		for i := range branch {
			if err := checkOp(&branch[i], maxOps-longest); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkOp(op *command.Op, maxOps int) error {
	switch op.Kind {
	case command.OpRange:
		return checkRange(op.Range)
	case command.OpPut:
		return checkPut(op.Put)
	case command.OpDeleteRange:
		return checkDeleteRange(op.DeleteRange)
	case command.OpTxn:
		return checkTxnOps(op.Txn, maxOps)
	}
	return rpctypes.ErrGRPCKeyNotFound // as etcd answers an op without a request
}

// writes are the keys that some operations may put and what they may delete.
type writes struct {
	puts    map[string]struct{}
	deletes ranges
}

// branchWrites returns what a list of operations may write, and refuses the
// combinations that etcd refuses: a key that two operations put, and a key put
// that another operation deletes. The branches of a transaction within the list
// never both run, so they may write the same key.
//
// Of a transaction within the list and another one after it, only a put of the
// later one after a delete of the earlier one counts, not the other way round.
// This is no rule that one would choose, but programs run into what it refuses.
func branchWrites(ops []command.Op) (writes, error) {
	w := writes{puts: make(map[string]struct{}, len(ops))}
	var direct ranges
	for i := range ops {
		if ops[i].Kind == command.OpDeleteRange {
			direct = direct.with(ops[i].DeleteRange)
		}
	}
	w.deletes = direct.merged()
	for i := range ops {
		if ops[i].Kind != command.OpTxn {
			continue
		}
		inner, err := txnWrites(ops[i].Txn)
		if err != nil {
			return writes{}, err
		}
		for key := range inner.puts {
			if err := w.put(key); err != nil {
				return writes{}, err
			}
		}
		if len(inner.deletes) > 0 {
			w.deletes = slices.Concat(w.deletes, inner.deletes).merged()
		}
	}
	for i := range ops {
		if ops[i].Kind == command.OpPut {
			if err := w.put(string(ops[i].Put.Key)); err != nil {
				return writes{}, err
			}
		}
	}
	return w, nil
}

func (w *writes) put(key string) error {
	if _, twice := w.puts[key]; twice || w.deletes.hold(key) {
		return rpctypes.ErrGRPCDuplicateKey
	}
	w.puts[key] = struct{}{}
	return nil
}

// txnWrites returns what either branch of a transaction may write.
func txnWrites(r *command.TxnRequest) (writes, error) {
	w, err := branchWrites(r.Success)
	if err != nil {
		return writes{}, err
	}
	other, err := branchWrites(r.Failure)
	if err != nil {
		return writes{}, err
	}
	maps.Copy(w.puts, other.puts)
	w.deletes = slices.Concat(w.deletes, other.deletes).merged()
	return w, nil
}

// ranges are ranges of keys, each from from to before to.
type ranges []struct{ from, to string }

// with returns r and what a delete covers. Etcd does not hold one without an
// end against a put, nor one that ends before it begins.
func (r ranges) with(d *command.DeleteRangeRequest) ranges {
	from, to := string(d.Key), string(d.RangeEnd)
	if to == "" {
		to = from + "\x00"
	}
	if from >= to { // so is one without an end: that is written as "\x00"
		return r
	}
	return append(r, struct{ from, to string }{from, to})
}

// merged returns the same keys as ranges that ascend and do not meet. It may
// change r.
func (r ranges) merged() ranges {
	slices.SortFunc(r, func(a, b struct{ from, to string }) int { return strings.Compare(a.from, b.from) })
	out := r[:0]
	for _, x := range r {
		if n := len(out); n > 0 && x.from <= out[n-1].to {
			out[n-1].to = max(out[n-1].to, x.to)
			continue
		}
		out = append(out, x)
	}
	return out
}

// hold tells if a key is in one of the ranges, which are merged.
func (r ranges) hold(key string) bool {
	n, found := slices.BinarySearchFunc(r, key, func(x struct{ from, to string }, key string) int { return strings.Compare(x.from, key) })
	return found || n > 0 && key < r[n-1].to
}

// shape says what kinds of operations a transaction holds.
type shape struct {
	// readOnly is set if both branches hold only ranges; nested transactions,
	// even empty ones, go through the log.
	readOnly bool
	// serializable is set if every range of both branches asks for no more.
	serializable bool
	// reads is set if the answer may carry key-values.
	reads bool
}

func txnShape(r *command.TxnRequest) shape {
	sh := shape{readOnly: true, serializable: true}
	for _, branch := range [2][]command.Op{r.Success, r.Failure} {
		for i := range branch {
			op := &branch[i]
			switch op.Kind {
			case command.OpRange:
				sh.reads = true
				sh.serializable = sh.serializable && op.Range.Serializable
				continue
			case command.OpPut:
				sh.reads = sh.reads || op.Put.PrevKV
			case command.OpDeleteRange:
				sh.reads = sh.reads || op.DeleteRange.PrevKV
			case command.OpTxn:
				inner := txnShape(op.Txn)
				sh.reads = sh.reads || inner.reads
			}
			sh.readOnly = false
		}
	}
	return sh
}
