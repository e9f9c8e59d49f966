package rpc

import (
	"errors"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// compact serves Compact.
func (s *Server) compact(call *grpcserver.Call, raw []byte, reply func(raw []byte, err error)) {
	q := s.request(call, requestCompaction, reply)
	var r command.CompactionRequest
	body, err := parse(command.KindCompaction, raw, func(b []byte) bool { return command.ParseCompaction(b, &r) })
	if err == nil {
		err = s.admit(call, kindUnary, false)
	}
	if err != nil {
		q.refuse(err)
		return
	}
	s.withCaller(call, func(who Identity, err error) {
		if err == nil {
			err = s.mayAdminister(who)
		}
		if err != nil {
			q.done(nil, err)
			return
		}
		q.compact(who, body, &r)
	})
}

// compact proposes a compaction. A physical one is answered when what it deletes
// is gone.
func (q *request) compact(who Identity, body []byte, r *command.CompactionRequest) {
	s, call := q.s, q.call
	if r.Physical && !s.answers.reserve() {
		q.done(nil, errTooManyRequests)
		return
	}
	s.proposeAs(call, who, command.KindCompaction, body, func(reply *state.Reply, err error) {
		var answer []byte
		var removed <-chan struct{}
		if err == nil {
			answer = s.encodeHeaderOnly(reply.Revision)
			removed = reply.CompactionDone
		}
		reply.Release()
		if !r.Physical {
			q.done(answer, err)
			return
		}
		if errors.Is(err, mvcc.ErrCompacted) {
			removed = s.o.Maintenance.CompactionDone(r.Revision)
		}
		// One goroutine for each that waits, as many as there are places.
		go func() {
			defer s.answers.cancel()
			if removed != nil {
				select {
				case <-removed:
				case <-call.Context().Done():
					answer, err = nil, call.Context().Err()
				}
			}
			q.done(answer, err)
		}()
	})
}

// encodeHeaderOnly returns a response that has nothing but a header.
func (s *Server) encodeHeaderOnly(revision int64) []byte {
	a := answer{header: s.header(revision)}
	return a.encode()
}
