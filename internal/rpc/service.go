package rpc

import (
	"context"
	"errors"
	"sync/atomic"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/state"
)

// What the generated services share: a goroutine per call, which may block.

// callFrom returns the call that a service method serves.
func callFrom(ctx context.Context) *grpcserver.Call { return grpcserver.CallFrom(ctx) }

// responseHeader returns a header as of a revision, 0 meaning the current one.
func (s *Server) responseHeader(revision int64) *etcdserverpb.ResponseHeader {
	if revision == 0 {
		v := s.o.Views.View()
		revision = v.KV().Revision()
		v.Release()
	}
	h := s.header(revision)
	return &etcdserverpb.ResponseHeader{ClusterId: h.cluster, MemberId: h.member, Revision: h.revision, RaftTerm: h.term}
}

// do puts a request into the log and waits for its reply, which the caller
// releases.
func (s *Server) do(ctx context.Context, who Identity, kind command.Kind, m proto.Message) (*state.Reply, error) {
	raw, err := proto.Marshal(m)
	if err != nil {
		return nil, err
	}
	body, err := command.Normalize(kind, raw)
	if err != nil {
		return nil, err
	}
	type result struct {
		reply *state.Reply
		err   error
	}
	got := make(chan result, 1)
	var over atomic.Bool // set by whoever comes first, the reply or the call's end
	call := callFrom(ctx)
	s.proposeAs(call, who, kind, body, func(reply *state.Reply, err error) {
		if over.CompareAndSwap(false, true) {
			got <- result{reply, err}
		} else {
			reply.Release()
		}
	})
	select {
	case r := <-got:
		return r.reply, r.err
	case <-ctx.Done():
	}
	if over.CompareAndSwap(false, true) {
		return nil, ctx.Err()
	}
	r := <-got
	return r.reply, r.err
}

// caller learns who calls, and may block until that is known.
func (s *Server) caller(call *grpcserver.Call) (Identity, error) {
	who, err := s.identify(call)
	if !errors.Is(err, auth.ErrTokenAhead) {
		return who, err
	}
	type result struct {
		who Identity
		err error
	}
	got := make(chan result, 1)
	s.identifyLater(call, func(who Identity, err error) { got <- result{who, err} })
	select {
	case r := <-got:
		return r.who, r.err
	case <-call.Context().Done():
		return Identity{}, call.Context().Err()
	}
}

// admin learns who calls, as caller does, and checks for the root role.
func (s *Server) admin(ctx context.Context) (Identity, error) {
	who, err := s.caller(callFrom(ctx))
	if err != nil {
		return Identity{}, err
	}
	return who, s.mayAdminister(who)
}

func (s *Server) mayAdminister(who Identity) error {
	v := s.o.Views.View()
	defer v.Release()
	return v.MayAdminister(who)
}

// user learns who calls and checks that, while auth is on, it is somebody.
func (s *Server) user(ctx context.Context) (Identity, error) {
	who, err := s.caller(callFrom(ctx))
	if err != nil {
		return Identity{}, err
	}
	v := s.o.Views.View()
	defer v.Release()
	return who, v.MayCall(who)
}
