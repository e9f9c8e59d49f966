package grpcgo

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/internal/watch"
)

// engine is a real state machine whose log is whatever it is given, at once: a
// member without raft. Two engines that are asked the same say the same.
type engine struct {
	machine *state.Machine
	store   *storage.Store
	hub     *watch.Hub
	queue   chan rpc.Proposal
	done    sync.WaitGroup
	stop    context.CancelFunc
	ids     atomic.Uint64
	index   uint64

	leaderless, learner, authOn, held atomic.Bool
	calls                             chan context.Context // of renewals that no answer comes to
}

func newEngine(t testing.TB) *engine {
	store, err := storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "store"})
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{store: store, queue: make(chan rpc.Proposal, 1024), calls: make(chan context.Context, 16)}
	if e.machine, err = state.Open(state.Options{Storage: store, MinLeaseTTL: 2, Publisher: e}); err != nil {
		t.Fatal(err)
	}
	e.hub = watch.New(watch.Options{
		ClusterID: 1, MemberID: 2, Term: e.Term, Source: watch.StoreSource{Store: e.machine.Keys(), Root: e.machine.Root},
	})
	ctx, stop := context.WithCancel(context.Background())
	e.stop = stop
	e.ids.Store(1 << 48)
	e.done.Go(func() { _ = e.hub.Run(ctx) })
	e.done.Go(e.run)
	return e
}

func (e *engine) run() {
	for p := range e.queue {
		e.index++
		results, err := e.machine.Apply([]*raftpb.Entry{{Term: new(uint64(3)), Index: new(e.index), Data: p.Data}})
		if err != nil {
			panic(err)
		}
		p.Done(results[0].Reply, results[0].Err)
	}
}

func (e *engine) close(t testing.TB) {
	close(e.queue)
	e.stop()
	e.done.Wait()
	if err := errors.Join(e.machine.Close(), e.store.Close()); err != nil {
		t.Error(err)
	}
}

// Publish implements state.Publisher.
func (e *engine) Publish(root mvcc.Root, events []mvcc.Event) { e.hub.Publish(root, events) }

func (e *engine) NextID() uint64 { return e.ids.Add(1) }

func (e *engine) Propose(p rpc.Proposal) error {
	e.queue <- p
	return nil
}

// ReadIndex never calls back while reads are held.
func (e *engine) ReadIndex(_ time.Time, done func(error)) {
	if !e.held.Load() {
		done(nil)
	}
}

func (e *engine) Leader() uint64 {
	if e.leaderless.Load() {
		return 0
	}
	return 2
}

func (e *engine) Learner() bool     { return e.learner.Load() }
func (e *engine) Committed() uint64 { return e.Applied() }
func (e *engine) Applied() uint64   { i, _ := e.machine.Applied(); return i }
func (e *engine) Term() uint64      { _, term := e.machine.Applied(); return term }
func (e *engine) View() rpc.View    { return view{e.machine.View(), e} }

func (e *engine) Enabled() bool     { return e.authOn.Load() }
func (e *engine) Revision() uint64  { return 1 }
func (e *engine) ClientCerts() bool { return false }

// Identify takes the token for the name.
func (e *engine) Identify(token string) (rpc.Identity, error) {
	if strings.HasPrefix(token, "bad") {
		return rpc.Identity{}, auth.ErrInvalidToken
	}
	return rpc.Identity{User: token, AuthRevision: 1}, nil
}

func (e *engine) Password(string) ([]byte, uint64, error) { return nil, 1, auth.ErrNotEnabled }
func (e *engine) Admit(int64) error                       { return nil }

// view lets users read the keys that begin with their names.
type view struct {
	*state.View
	e *engine
}

func (v view) KV() *mvcc.View { return v.View.View }

func (v view) MayRead(u rpc.Identity, key, _ []byte) error {
	if v.e.authOn.Load() && !strings.HasPrefix(string(key), u.User+"/") {
		return auth.ErrPermissionDenied
	}
	return nil
}

func (v view) MayCall(u rpc.Identity) error {
	if v.e.authOn.Load() && u.User == "" {
		return auth.ErrUserEmpty
	}
	return nil
}

func (v view) MayAdminister(u rpc.Identity) error { return v.MayCall(u) }

// leases do not expire. Lease 13 is renewed by nobody, and 14 fails.
type leases struct{ e *engine }

func (l leases) Renew(ctx context.Context, _ rpc.Identity, id int64, done func(int64, error)) {
	switch id {
	case 13:
		l.e.calls <- ctx
	case 14:
		done(0, rpctypes.ErrGRPCTimeout)
	default:
		found, _ := l.e.machine.Leases().Lookup(id)
		done(found.TTL, nil)
	}
}

func (l leases) Status(_ context.Context, _ rpc.Identity, id int64, _ bool) (rpc.LeaseStatus, error) {
	found, ok := l.e.machine.Leases().Lookup(id)
	if !ok {
		return rpc.LeaseStatus{ID: id, TTL: -1}, nil
	}
	return rpc.LeaseStatus{ID: id, TTL: found.TTL, GrantedTTL: found.TTL}, nil
}

func (l leases) IDs(rpc.Identity) ([]int64, error) { return nil, nil }

// cluster has one member. What else clusters do nobody asks for.
type cluster struct{ rpc.Cluster }

func (cluster) Capable() bool         { return true }
func (cluster) Members() []*pb.Member { return []*pb.Member{{ID: 2, Name: "m"}} }

// upkeep is the part of rpc.Maintenance that is asked for.
type upkeep struct{ rpc.Maintenance }

func (upkeep) Status() rpc.StoreStatus   { return rpc.StoreStatus{Version: "3.7.3"} }
func (upkeep) Alarms() []*pb.AlarmMember { return nil }
func (upkeep) Reclaim() error            { return nil }
