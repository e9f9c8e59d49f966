package rpc

import (
	"context"
	"errors"
	"time"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/hot"
	"github.com/engram-kv/engram/internal/state"
)

// request is one unary KV call under way.
type request struct {
	s     *Server
	call  *grpcserver.Call
	kind  requestKind
	began time.Time
	reply func(raw []byte, err error)

	touched *touch // nil unless Options.Hot has picked the request
}

func (s *Server) request(call *grpcserver.Call, kind requestKind, reply func(raw []byte, err error)) *request {
	q := s.begin(call, kind, reply)
	return &q
}

func (s *Server) begin(call *grpcserver.Call, kind requestKind, reply func(raw []byte, err error)) request {
	return request{s: s, call: call, kind: kind, began: s.o.Clock.Now(), reply: reply}
}

// done answers the call. Err may be any error that errors.go knows.
func (q *request) done(raw []byte, err error) { q.finish(raw, len(raw), err) }

// finish is done for an answer of that many bytes, of which raw need not be all:
// see grpcserver.Call.Follow.
func (q *request) finish(raw []byte, bytes int, err error) {
	q.s.metrics.request(q.kind, err, q.s.o.Clock.Now().Sub(q.began))
	if err != nil {
		err = WireError(err)
	}
	q.tally(bytes)
	q.reply(raw, err)
}

// refuse answers a call that was not admitted or is not valid. It is not
// counted as a request of its kind.
func (q *request) refuse(err error) { q.reply(nil, WireError(err)) }

func (s *Server) put(call *grpcserver.Call, raw []byte, reply func(raw []byte, err error)) {
	q := s.request(call, requestPut, reply)
	var r command.PutRequest
	body, err := parse(command.KindPut, raw, func(b []byte) bool { return command.ParsePut(b, &r) })
	if err == nil {
		err = s.admit(call, kindUnary, false)
	}
	if err == nil {
		err = s.o.Quota.Admit(state.PutCost(&r))
	}
	if err == nil {
		err = checkPut(&r)
	}
	if err != nil {
		q.refuse(err)
		return
	}
	q.touches(hot.Write, r.Key, len(raw))
	q.propose(command.KindPut, body, r.PrevKV)
}

func (s *Server) deleteRange(call *grpcserver.Call, raw []byte, reply func(raw []byte, err error)) {
	q := s.request(call, requestDeleteRange, reply)
	var r command.DeleteRangeRequest
	body, err := parse(command.KindDeleteRange, raw, func(b []byte) bool { return command.ParseDeleteRange(b, &r) })
	if err == nil {
		err = s.admit(call, kindUnary, false)
	}
	if err == nil {
		err = checkDeleteRange(&r)
	}
	if err != nil {
		q.refuse(err)
		return
	}
	q.touches(hot.Write, r.Key, len(raw))
	q.propose(command.KindDeleteRange, body, r.PrevKV)
}

// propose puts a write into the log and answers once it is applied. Reads says
// that the answer may carry key-values, so that a worker may have to make it; its
// place is taken before anything is committed.
func (q *request) propose(kind command.Kind, body []byte, reads bool) {
	if reads && !q.s.answers.reserve() {
		q.done(nil, errTooManyRequests)
		return
	}
	q.s.propose(q.call, kind, body, func(reply *state.Reply, err error) {
		switch {
		case err == nil && hasView(&reply.Op):
			(&reading{
				request: q, op: &reply.Op, header: q.s.header(reply.Revision),
				committed: true, reserved: reads, pinned: reply,
			}).start()
			return
		case reads:
			q.s.answers.cancel()
		}
		var raw []byte
		if err == nil {
			raw, err = q.compose(reply)
		}
		reply.Release()
		q.done(raw, err)
	})
}

// compose returns the response of a write for which nothing has to be read.
func (q *request) compose(reply *state.Reply) ([]byte, error) {
	a, err := q.s.fill(context.Background(), &reply.Op, new(int64), false)
	if err != nil {
		return nil, err
	}
	a.header = q.s.header(reply.Revision)
	return a.encode(), nil
}

// rangeRead is one Range under way, in one piece of memory.
type rangeRead struct {
	request
	r  command.RangeRequest
	op state.OpReply
}

// rangeKeys serves Range.
func (s *Server) rangeKeys(call *grpcserver.Call, raw []byte, reply func(raw []byte, err error)) {
	q := &rangeRead{request: s.begin(call, requestRange, reply)}
	r := &q.r
	_, err := parse(command.KindRange, raw, func(b []byte) bool { return command.ParseRange(b, r) })
	if err == nil {
		err = s.admit(call, kindUnary, r.Serializable)
	}
	if err == nil {
		err = checkRange(r)
	}
	if err != nil {
		q.refuse(err)
		return
	}
	q.touches(hot.Read, r.Key, len(raw))
	q.read(r.Serializable, q)
}

// slow implements planner.
func (q *rangeRead) slow(View) bool { return false }

// plan implements planner.
func (q *rangeRead) plan(v View, who Identity) (*state.OpReply, error) {
	if err := v.MayRead(who, q.r.Key, q.r.RangeEnd); err != nil {
		return nil, err
	}
	q.op = state.OpReply{
		Kind: state.OpRange, View: v.KV(),
		Key: q.r.Key, End: q.r.RangeEnd, Range: state.RangeOptionsOf(&q.r),
	}
	return &q.op, nil
}

// planner says what is to be read from a view for an answer.
type planner interface {
	// slow says that to plan may read the disk or many keys.
	slow(v View) bool
	plan(v View, who Identity) (*state.OpReply, error)
}

// read pins a view, one that is new enough unless the read is serializable, and
// answers with what plan says is to be read from it. A plan that is slow is made
// by a worker.
func (q *request) read(serializable bool, plan planner) {
	who, err := q.s.identify(q.call)
	switch {
	case err == nil:
		q.readAs(who, serializable, plan)
	case errors.Is(err, auth.ErrTokenAhead):
		q.s.identifyLater(q.call, func(who Identity, err error) {
			if err != nil {
				q.done(nil, err)
				return
			}
			q.readAs(who, serializable, plan)
		})
	default:
		q.done(nil, err)
	}
}

func (q *request) readAs(who Identity, serializable bool, plan planner) {
	s := q.s
	confirmed := func(err error) {
		if err != nil {
			q.done(nil, err)
			return
		}
		v := s.view()
		if !plan.slow(v) {
			q.answer(v, who, plan, false)
			return
		}
		if !s.answers.reserve() {
			v.Release()
			q.done(nil, errTooManyRequests)
			return
		}
		s.answers.run(func() { q.answer(v, who, plan, true) })
	}
	if serializable {
		confirmed(nil)
		return
	}
	s.o.Consensus.ReadIndex(deadlineOf(q.call, q.began, s.o.RequestTimeout), confirmed)
}

// answer makes a plan and the answer from it. Reserved says that the request
// holds a worker's place.
func (q *request) answer(v View, who Identity, plan planner, reserved bool) {
	op, err := plan.plan(v, who)
	if err != nil {
		v.Release()
		if reserved {
			q.s.answers.cancel()
		}
		q.done(nil, err)
		return
	}
	(&reading{
		request: q, op: op, header: q.s.header(v.KV().Revision()),
		reserved: reserved, pinned: v,
	}).start()
}
