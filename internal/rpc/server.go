// Package rpc is etcd's gRPC services of one member.
//
// It knows etcd's wire names, checks what clients send, hands it on and turns
// what comes back into etcd's answers; it decides nothing, orders nothing and
// stores nothing. Server is the main type. What it calls stands in engine.go as
// interfaces. Package grpcserver carries the calls: the hot methods take and give
// raw bytes, the others are the generated services. Invariants:
//
//	E1: every call is answered exactly once.
//	E2: a write that may have been committed is never answered with an error
//	    that says it was not.
//	E3: no handler blocks, and the bytes of answers being made or sent, the
//	    answers waiting for that, and the goroutines that make them are bounded.
//	E4: what goes into the log came out of package command, so real members of
//	    etcd can read it.
package rpc

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/crypto/bcrypt"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/hot"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/watch"
)

// Options configure a Server. The interfaces are all needed.
type Options struct {
	ClusterID, MemberID uint64

	Consensus   Consensus
	Views       Views
	Auth        Auth
	Quota       Quota
	Leases      Leases
	Cluster     Cluster
	Maintenance Maintenance
	Watches     Watches
	Metrics     *Metrics
	// WatchMetrics are those of Watches; nil means that nobody collects them.
	WatchMetrics *watch.Metrics
	// Hot, if set, counts what calls are about, for engram.v1.Inspect/Top.
	Hot *hot.Sampler
	// Version is Engram's own, for engram.v1.Inspect/Clock.
	Version string

	// MaxRequestBytes bounds an encoded proposal; default 1.5 MiB.
	MaxRequestBytes int
	// MaxTxnOps bounds each list of a transaction; default 128.
	MaxTxnOps int
	// RequestTimeout bounds proposals and read rounds; default 7 s.
	RequestTimeout time.Duration
	// BcryptCost is that of the hashes of passwords; default 10.
	BcryptCost int
	// SlowCall is the time after which a finished unary call is logged; 0 is
	// never.
	SlowCall time.Duration
	// ElectionTimeout is the time after which a silent leader is given up;
	// streams that require a leader end after three of them; default 1 s.
	ElectionTimeout time.Duration

	// ResponseBytes bounds the answers being made or sent; default 256 MiB.
	// Those of at most InlineBytes have a sixteenth as much for themselves.
	// An answer read from disk takes as much again while it is joined, so
	// Workers bound what is above the limit.
	ResponseBytes int64
	// InlineBytes bounds an answer that is made at once, on the goroutine that
	// completes the request, if memory holds all of it; default 64 KiB.
	InlineBytes int64
	// Workers make all other answers; default two per CPU, at least 4.
	Workers int
	// PendingAnswers bounds the requests that may still need a worker, and the
	// answers that wait for room in ResponseBytes; default 16384.
	PendingAnswers int

	// StreamMessages and StreamBytes bound what one bidirectional stream may
	// have queued for its client; default 128 and 4 MiB. StreamsBytes bounds
	// it for all streams together; default 128 MiB. When that is used up,
	// streams that nobody read for StreamStall, default 10 s, are ended; and
	// when ResponseBytes are, connections that have answers to send and on which
	// nothing moved for that long are closed.
	StreamMessages, StreamBytes int
	StreamsBytes                int
	StreamStall                 time.Duration

	Clock  clock.Clock  // nil means the system's
	Logger *slog.Logger // nil means discard
}

func (o *Options) setDefaults() {
	o.MaxRequestBytes = orDefault(o.MaxRequestBytes, 3<<19)
	o.MaxTxnOps = orDefault(o.MaxTxnOps, 128)
	o.RequestTimeout = orDefault(o.RequestTimeout, 7*time.Second)
	o.ElectionTimeout = orDefault(o.ElectionTimeout, time.Second)
	o.BcryptCost = orDefault(o.BcryptCost, bcrypt.DefaultCost)
	o.ResponseBytes = orDefault(o.ResponseBytes, 256<<20)
	o.InlineBytes = orDefault(o.InlineBytes, 64<<10)
	o.Workers = orDefault(o.Workers, max(4, 2*runtime.GOMAXPROCS(0)))
	o.PendingAnswers = orDefault(o.PendingAnswers, 16<<10)
	o.StreamMessages = orDefault(o.StreamMessages, 128)
	o.StreamBytes = orDefault(o.StreamBytes, 4<<20)
	o.StreamsBytes = orDefault(o.StreamsBytes, 128<<20)
	o.StreamStall = orDefault(o.StreamStall, 10*time.Second)
	if o.WatchMetrics == nil {
		o.WatchMetrics = watch.NewMetrics()
	}
	if o.Clock == nil {
		o.Clock = clock.Real()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// smallShare is the part of ResponseBytes that small answers have on top.
const smallShare = 16

func orDefault[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}

// Server is the services. Safe for concurrent use.
type Server struct {
	o       Options
	metrics *Metrics
	answers *pool
	room    *budget
	small   *budget // for answers of at most InlineBytes
	leader  *leaderWatch
	slow    *slowCalls
	hasher  *hasher
	backups *backups
}

// New returns the services; Close ends their goroutines.
func New(o Options) *Server {
	o.setDefaults()
	return &Server{
		o:       o,
		metrics: o.Metrics,
		answers: newPool(o.Workers, o.PendingAnswers),
		room:    newBudget(o.ResponseBytes, o.PendingAnswers, o.Clock.Now),
		small:   newBudget(max(o.ResponseBytes/smallShare, o.InlineBytes), o.PendingAnswers, o.Clock.Now),
		leader:  newLeaderWatch(o.Consensus, o.Clock, o.ElectionTimeout),
		slow:    &slowCalls{},
		hasher:  newHasher(o.BcryptCost),
		backups: newBackups(),
	}
}

// EndStreams ends the watch and keep-alive streams, which clients hold open,
// with etcd's error of a server that stops: clients go elsewhere or try again.
func (s *Server) EndStreams() { s.leader.endAll() }

// Close waits for the answers in hand. No call may come any more, and those
// that wait for Consensus must have been answered.
func (s *Server) Close() {
	s.leader.close()
	s.answers.close()
	s.backups.running.Wait()
}

// admit makes the checks that come before a request's own: the cluster's
// capability, what learners serve, and the call's metadata, in this order.
func (s *Server) admit(call *grpcserver.Call, kind callKind, learnerServes bool) error {
	if !s.o.Cluster.Capable() {
		return rpctypes.ErrGRPCNotCapable
	}
	if !learnerServes && s.o.Consensus.Learner() {
		return rpctypes.ErrGRPCNotSupportedForLearner
	}
	f := factsOf(call)
	if f.versionErr != nil {
		return f.versionErr
	}
	s.metrics.clientRequest(f, kind)
	if f.requiresLeader && s.o.Consensus.Leader() == 0 {
		return rpctypes.ErrGRPCNoLeader
	}
	return nil
}

// identify learns who calls. While auth is off it does not look. Who gets
// auth.ErrTokenAhead goes on with identifyLater.
func (s *Server) identify(call *grpcserver.Call) (Identity, error) {
	if !s.o.Auth.Enabled() {
		return Identity{}, nil
	}
	f := factsOf(call)
	if f.token != "" {
		return s.o.Auth.Identify(f.token)
	}
	if !s.o.Auth.ClientCerts() || f.fromGateway {
		return Identity{}, nil
	}
	if name := call.CommonName(); name != "" {
		return Identity{User: name, AuthRevision: s.o.Auth.Revision()}, nil
	}
	return Identity{}, nil
}

// identifyLater learns who calls when the token may be of an entry that is not
// applied here yet, as when another member has issued it a moment ago. It calls
// done from any goroutine, after a round of reading: what no committed entry has
// issued by then was never issued.
func (s *Server) identifyLater(call *grpcserver.Call, done func(Identity, error)) {
	s.o.Consensus.ReadIndex(deadlineOf(call, s.o.Clock.Now(), s.o.RequestTimeout), func(err error) {
		if err != nil {
			done(Identity{}, err)
			return
		}
		done(s.identify(call))
	})
}

// withCaller calls done with who calls, at once unless that takes identifyLater.
func (s *Server) withCaller(call *grpcserver.Call, done func(Identity, error)) {
	who, err := s.identify(call)
	if errors.Is(err, auth.ErrTokenAhead) {
		s.identifyLater(call, done)
		return
	}
	done(who, err)
}

// propose puts a request of a kind into the log on behalf of the caller and
// calls done with what became of it. Body came out of command.Normalize.
func (s *Server) propose(call *grpcserver.Call, kind command.Kind, body []byte, done func(*state.Reply, error)) {
	who, err := s.identify(call)
	switch {
	case err == nil:
		s.proposeAs(call, who, kind, body, done)
	case errors.Is(err, auth.ErrTokenAhead):
		s.identifyLater(call, func(who Identity, err error) {
			if err != nil {
				done(nil, err)
				return
			}
			s.proposeAs(call, who, kind, body, done)
		})
	default:
		done(nil, err)
	}
}

func (s *Server) proposeAs(call *grpcserver.Call, who Identity, kind command.Kind, body []byte, done func(*state.Reply, error)) {
	c := s.o.Consensus
	h := command.Header{ID: c.NextID(), Username: who.User, AuthRevision: who.AuthRevision}
	size := command.RequestSize(kind, h, len(body))
	if size > s.o.MaxRequestBytes {
		done(nil, rpctypes.ErrGRPCRequestTooLarge)
		return
	}
	data, err := command.AppendRequest(make([]byte, 0, size), kind, h, body)
	if err == nil {
		err = c.Propose(Proposal{
			ID:       h.ID,
			Data:     data,
			Deadline: deadlineOf(call, s.o.Clock.Now(), s.o.RequestTimeout),
			Done:     done,
		})
	}
	if err != nil {
		done(nil, err)
	}
}

// view pins the newest moment for a read of keys. Compaction may begin to delete
// between the moment's publication and its pinning; then there is a newer one.
func (s *Server) view() View {
	v := s.o.Views.View()
	for tries := 0; v.KV().Stale() && tries < 10; tries++ {
		v.Release()
		v = s.o.Views.View()
	}
	return v
}

// header returns the header of a response as of a revision.
func (s *Server) header(revision int64) header {
	return header{cluster: s.o.ClusterID, member: s.o.MemberID, revision: revision, term: s.o.Consensus.Term()}
}

// parse decodes the request of a hot unary call, as decode does.
func parse(kind command.Kind, raw []byte, accept func([]byte) bool) ([]byte, error) {
	normal, err := decode(kind, raw, accept)
	if err != nil {
		return nil, undecoded(undecodedRequest, err)
	}
	return normal, nil
}

// decode decodes the raw bytes of a hot request. The bytes that it returns may
// stand in the log, and what accept decoded aliases them.
func decode(kind command.Kind, raw []byte, accept func([]byte) bool) ([]byte, error) {
	if accept(raw) {
		return raw, nil
	}
	normal, err := command.Normalize(kind, raw)
	if err == nil && !accept(normal) {
		err = fmt.Errorf("%v request of %d bytes cannot be normalized: %w", kind, len(raw), command.ErrMalformed)
	}
	return normal, err
}
