package state

import (
	"fmt"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/mvcc/index"
)

// put runs a Put (state-machine.md, section 2.3).
func (b *batch) put(r *command.PutRequest, reply *Reply) error {
	if err := b.checkPut(r); err != nil {
		return err
	}
	reply.Op.Kind = OpPut
	if r.PrevKV {
		b.pin(&reply.Op, r.Key, nil, mvcc.RangeOptions{})
	}
	b.kv.Begin()
	if err := b.doPut(r); err != nil {
		return err
	}
	reply.Revision = b.kv.End()
	return nil
}

// checkPut finds what would make a Put fail, without effects.
func (b *batch) checkPut(r *command.PutRequest) error {
	if r.Lease != 0 && !b.m.leases.Exists(r.Lease) {
		return fmt.Errorf("put with lease %x: %w", r.Lease, lease.ErrNotFound)
	}
	if r.IgnoreValue || r.IgnoreLease {
		if _, ok := b.kv.Item(r.Key); !ok {
			return fmt.Errorf("put %q keeping value or lease: %w", r.Key, ErrKeyNotFound)
		}
	}
	return nil
}

// doPut writes within the open transaction. Its request was checked.
func (b *batch) doPut(r *command.PutRequest) error {
	value, leaseID := r.Value, r.Lease
	if r.IgnoreValue || r.IgnoreLease {
		// A key that the same transaction deleted before has neither. Etcd's edge
		// lets no such transaction through.
		it, ok := b.kv.Item(r.Key)
		if ok && r.IgnoreLease {
			leaseID = it.Lease
		}
		if ok && r.IgnoreValue {
			kv, err := b.kv.Value(it)
			if err != nil {
				return errDisk{err}
			}
			value = mvcc.ValueOf(kv)
		}
	}
	prev, existed := b.kv.Put(r.Key, value, leaseID)
	if existed && prev.Lease == leaseID {
		return nil
	}
	if existed && prev.Lease != 0 {
		b.m.leases.Detach(prev.Lease, r.Key)
	}
	if leaseID != 0 {
		b.m.leases.Attach(leaseID, r.Key)
	}
	return nil
}

// deleteRange runs a DeleteRange (section 2.4).
func (b *batch) deleteRange(r *command.DeleteRangeRequest, reply *Reply) {
	reply.Op.Kind = OpDeleteRange
	if r.PrevKV {
		b.pin(&reply.Op, r.Key, r.RangeEnd, mvcc.RangeOptions{})
	}
	b.kv.Begin()
	reply.Op.Deleted = b.doDelete(r.Key, r.RangeEnd)
	reply.Revision = b.kv.End()
}

func (b *batch) doDelete(key, end []byte) int64 {
	return b.kv.DeleteRange(key, end, func(prev index.Item) {
		if prev.Lease != 0 {
			b.m.leases.Detach(prev.Lease, prev.Key)
		}
	})
}

// readRange answers a Range that went through the log.
func (b *batch) readRange(r *command.RangeRequest, reply *Reply) {
	reply.Op.Kind = OpRange
	reply.Revision = b.kv.Revision()
	b.pin(&reply.Op, r.Key, r.RangeEnd, RangeOptionsOf(r))
}

// txn runs a Txn in three phases: decide the path, check it, write (section
// 2.6). Only the last has effects, and it cannot fail.
func (b *batch) txn(r *command.TxnRequest, reply *Reply) error {
	plan, err := Decide(b.kv, r)
	if err != nil {
		return errDisk{err}
	}
	if err := b.checkOps(&plan, plan.Ops(r)); err != nil {
		return err
	}
	b.kv.Begin()
	err = b.runTxn(&plan, r, &reply.Op)
	reply.Revision = b.kv.End()
	return err
}

func (b *batch) checkOps(plan *Plan, ops []command.Op) error {
	nested := plan.Nested
	for i := range ops {
		var err error
		switch op := &ops[i]; op.Kind {
		case command.OpRange:
			err = CheckRangeRevision(op.Range.Revision, b.kv.Revision(), b.kv.CompactRevision())
		case command.OpPut:
			err = b.checkPut(op.Put)
		case command.OpTxn:
			err = b.checkOps(&nested[0], nested[0].Ops(op.Txn))
			nested = nested[1:]
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *batch) runTxn(plan *Plan, r *command.TxnRequest, reply *OpReply) error {
	reply.Kind, reply.Succeeded = OpTxn, plan.Succeeded
	ops, nested := plan.Ops(r), plan.Nested
	if len(ops) > 0 {
		reply.Ops = make([]OpReply, len(ops))
	}
	for i := range ops {
		op, out := &ops[i], &reply.Ops[i]
		switch op.Kind {
		case command.OpRange:
			out.Kind = OpRange
			b.pin(out, op.Range.Key, op.Range.RangeEnd, RangeOptionsOf(op.Range))
		case command.OpPut:
			out.Kind = OpPut
			if op.Put.PrevKV {
				b.pin(out, op.Put.Key, nil, mvcc.RangeOptions{})
			}
			if err := b.doPut(op.Put); err != nil {
				return err
			}
		case command.OpDeleteRange:
			out.Kind = OpDeleteRange
			if op.DeleteRange.PrevKV {
				b.pin(out, op.DeleteRange.Key, op.DeleteRange.RangeEnd, mvcc.RangeOptions{})
			}
			out.Deleted = b.doDelete(op.DeleteRange.Key, op.DeleteRange.RangeEnd)
		case command.OpTxn:
			if err := b.runTxn(&nested[0], op.Txn, out); err != nil {
				return err
			}
			nested = nested[1:]
			continue
		}
		out.Revision = b.kv.Revision()
	}
	return nil
}

// pin keeps the moment at which the answer to an operation is to be read, if
// somebody here waits for it.
func (b *batch) pin(o *OpReply, key, end []byte, opts mvcc.RangeOptions) {
	if !b.wanted {
		return
	}
	o.View, o.Key, o.End, o.Range = b.kv.View(), key, end, opts
}
