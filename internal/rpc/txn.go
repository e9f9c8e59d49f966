package rpc

import (
	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/state"
)

// txn serves Txn. One whose branches only read does not go through the log.
func (s *Server) txn(call *Call, raw []byte, reply func(raw []byte, err error)) {
	q := s.request(call, requestTxn, reply)
	var r command.TxnRequest
	var arena command.TxnArena
	body, err := parse(command.KindTxn, raw, func(b []byte) bool {
		arena.Reset()
		return command.ParseTxn(b, &r, &arena)
	})
	if err == nil {
		err = s.admit(call.Metadata, kindUnary, false)
	}
	var sh shape
	if err == nil {
		sh = txnShape(&r)
		if cost := state.TxnCost(&r); cost > 0 {
			err = s.o.Quota.Admit(cost)
		}
	}
	if err == nil {
		err = checkTxn(&r, s.o.MaxTxnOps)
	}
	switch {
	case err != nil:
		q.refuse(err)
	case sh.readOnly:
		q.kind = requestReadonlyTxn
		q.read(sh.serializable, func(v View) bool { return s.slowCompares(v, &r) },
			func(v View, who Identity) (*state.OpReply, error) { return planTxn(v, who, &r) })
	default:
		q.propose(command.KindTxn, body, sh.reads)
	}
}

// slowCompares says that the compares may read values from disk, or many keys.
func (s *Server) slowCompares(v View, r *command.TxnRequest) bool {
	for i := range r.Compare {
		c := &r.Compare[i]
		looks := len(c.RangeEnd) > 0 || c.Target == int32(etcdserverpb.Compare_VALUE)
		if looks && !v.KV().InMemory(c.Key, c.RangeEnd, s.o.InlineBytes) {
			return true
		}
	}
	return false
}

// planTxn decides a transaction that only reads.
func planTxn(v View, who Identity, r *command.TxnRequest) (*state.OpReply, error) {
	for i := range r.Compare {
		if err := v.MayRead(who, r.Compare[i].Key, r.Compare[i].RangeEnd); err != nil {
			return nil, err
		}
	}
	for _, branch := range [2][]command.Op{r.Success, r.Failure} {
		for i := range branch {
			if err := v.MayRead(who, branch[i].Range.Key, branch[i].Range.RangeEnd); err != nil {
				return nil, err
			}
		}
	}
	kv := v.KV()
	succeeded, err := state.Holds(kv, r.Compare)
	if err != nil {
		return nil, err
	}
	ops := r.Failure
	if succeeded {
		ops = r.Success
	}
	reply := &state.OpReply{Kind: state.OpTxn, Succeeded: succeeded, Ops: make([]state.OpReply, len(ops))}
	for i := range ops {
		o := ops[i].Range
		if err := state.CheckRangeRevision(o.Revision, kv.Revision(), kv.CompactRevision()); err != nil {
			return nil, err
		}
		reply.Ops[i] = state.OpReply{
			Kind: state.OpRange, Revision: kv.Revision(), View: kv,
			Key: o.Key, End: o.RangeEnd, Range: state.RangeOptionsOf(o),
		}
	}
	return reply, nil
}
