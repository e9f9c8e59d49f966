package rpc

import (
	"bytes"
	"slices"

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

// writes are the keys that some operations may put and the ranges that they
// may delete.
type writes struct {
	puts    [][]byte
	deletes []interval
}

// interval is [from, to), or everything from from if open is set.
type interval struct {
	from, to []byte
	open     bool
}

func (i interval) beyond(key []byte) bool { return i.open || bytes.Compare(key, i.to) < 0 }

func (i interval) furtherThan(o interval) bool {
	return !o.open && (i.open || bytes.Compare(i.to, o.to) > 0)
}

// deleteInterval returns the interval that a DeleteRange covers, false if it
// covers nothing.
func deleteInterval(r *command.DeleteRangeRequest) (interval, bool) {
	switch {
	case len(r.RangeEnd) == 0:
		return interval{from: r.Key, to: append(bytes.Clone(r.Key), 0)}, true
	case len(r.RangeEnd) == 1 && r.RangeEnd[0] == 0:
		return interval{from: r.Key, open: true}, true
	}
	return interval{from: r.Key, to: r.RangeEnd}, bytes.Compare(r.Key, r.RangeEnd) < 0
}

// branchWrites returns what a list of operations may write. It refuses a list
// in which two operations can both run, and put the same key, or one puts a key
// that the other deletes. The two branches of a transaction within the list
// never both run, so they may put the same key.
func branchWrites(ops []command.Op) (writes, error) {
	if len(ops) == 1 && ops[0].Kind != command.OpTxn {
		return opWrites(&ops[0])
	}
	type put struct {
		key []byte
		op  int
	}
	type deletion struct {
		interval
		op int
	}
	var puts []put
	var deletions []deletion
	for i := range ops {
		w, err := opWrites(&ops[i])
		if err != nil {
			return writes{}, err
		}
		for _, key := range w.puts {
			puts = append(puts, put{key, i})
		}
		for _, d := range w.deletes {
			deletions = append(deletions, deletion{d, i})
		}
	}
	slices.SortFunc(puts, func(a, b put) int { return bytes.Compare(a.key, b.key) })
	slices.SortFunc(deletions, func(a, b deletion) int { return bytes.Compare(a.from, b.from) })

	// Going up the keys, reach is the deletion begun so far that reaches
	// furthest, and other the one that does among those of other operations.
	reach, other := deletion{op: -1}, deletion{op: -1}
	next := 0
	for i, p := range puts {
		if i > 0 && puts[i-1].op != p.op && bytes.Equal(puts[i-1].key, p.key) {
			return writes{}, rpctypes.ErrGRPCDuplicateKey
		}
		for ; next < len(deletions) && bytes.Compare(deletions[next].from, p.key) <= 0; next++ {
			d := deletions[next]
			switch {
			case reach.op < 0 || d.furtherThan(reach.interval):
				if d.op != reach.op {
					other = reach
				}
				reach = d
			case d.op != reach.op && (other.op < 0 || d.furtherThan(other.interval)):
				other = d
			}
		}
		d := reach
		if d.op == p.op {
			d = other
		}
		if d.op >= 0 && d.beyond(p.key) {
			return writes{}, rpctypes.ErrGRPCDuplicateKey
		}
	}
	var w writes
	for _, p := range puts {
		w.puts = append(w.puts, p.key)
	}
	for _, d := range deletions {
		w.deletes = append(w.deletes, d.interval)
	}
	return w, nil
}

func opWrites(op *command.Op) (writes, error) {
	switch op.Kind {
	case command.OpPut:
		return writes{puts: [][]byte{op.Put.Key}}, nil
	case command.OpDeleteRange:
		if d, ok := deleteInterval(op.DeleteRange); ok {
			return writes{deletes: []interval{d}}, nil
		}
	case command.OpTxn:
		then, err := branchWrites(op.Txn.Success)
		if err != nil {
			return writes{}, err
		}
		otherwise, err := branchWrites(op.Txn.Failure)
		if err != nil {
			return writes{}, err
		}
		return writes{
			puts:    append(then.puts, otherwise.puts...),
			deletes: append(then.deletes, otherwise.deletes...),
		}, nil
	}
	return writes{}, nil
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
