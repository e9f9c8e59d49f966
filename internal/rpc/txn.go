package rpc

import (
	"sync"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/state"
)

// txn serves Txn. One whose branches only read does not go through the log.
func (s *Server) txn(call *grpcserver.Call, raw []byte, reply func(raw []byte, err error)) {
	q := s.request(call, requestTxn, reply)
	d := decodedTxns.Get().(*decodedTxn)
	r := &d.request
	body, err := parse(command.KindTxn, raw, func(b []byte) bool {
		d.arena.Reset()
		return command.ParseTxn(b, r, &d.arena)
	})
	if err == nil {
		err = s.admit(call, kindUnary, false)
	}
	var sh shape
	if err == nil {
		sh = txnShape(r)
		if cost := state.TxnCost(r); cost > 0 {
			err = s.o.Quota.Admit(cost)
		}
	}
	if err == nil {
		err = checkTxn(r, s.o.MaxTxnOps)
	}
	if err == nil {
		q.touchesOps(r, sh.readOnly, len(raw))
	}
	if err == nil && sh.readOnly { // the request is kept until it is answered
		q.kind = requestReadonlyTxn
		q.read(sh.serializable, &txnRead{s, r})
		return
	}
	d.arena.Reset()
	decodedTxns.Put(d)
	if err != nil {
		q.refuse(err)
		return
	}
	q.propose(command.KindTxn, body, sh.reads)
}

// decodedTxn is a transaction taken apart to be checked, and what its parts lie
// in.
type decodedTxn struct {
	request command.TxnRequest
	arena   command.TxnArena
}

var decodedTxns = sync.Pool{New: func() any { return new(decodedTxn) }}

// txnRead is a transaction that only reads.
type txnRead struct {
	s *Server
	r *command.TxnRequest
}

// slow implements planner: the compares may read values from disk, or many keys.
func (t *txnRead) slow(v View) bool {
	r := t.r
	for i := range r.Compare {
		c := &r.Compare[i]
		looks := len(c.RangeEnd) > 0 || c.Target == int32(etcdserverpb.Compare_VALUE)
		if looks && !v.KV().InMemory(c.Key, c.RangeEnd, t.s.o.InlineBytes) {
			return true
		}
	}
	return false
}

// plan implements planner: it decides which branch is read.
func (t *txnRead) plan(v View, who Identity) (*state.OpReply, error) {
	r := t.r
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
