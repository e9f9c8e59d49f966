package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/internal/watch"
)

const (
	testCluster = 0xc1
	testMember  = 0xfeed_0000_0000_0001
)

// engine is a real state machine whose log is whatever it is given, at once: a
// member without raft. Its other fields are what a test may turn.
type engine struct {
	machine *state.Machine
	store   *storage.Store
	queue   chan Proposal
	done    sync.WaitGroup
	ids     atomic.Uint64
	index   uint64

	leader   atomic.Uint64
	learner  atomic.Bool
	capable  atomic.Bool
	quota    atomic.Int64 // cost of what is admitted at most; 0 means any
	readHold atomic.Pointer[chan struct{}]
	asking   chan struct{}                 // capacity 1: a round of reading is held
	hold     atomic.Pointer[chan struct{}] // proposals wait for it
	authOn   atomic.Bool
	caughtUp atomic.Bool // there was a round of reading
	tokens   *auth.Tokens

	clusterErr atomic.Pointer[error]  // what changes of the cluster fail with
	asked      atomic.Pointer[string] // the change that the cluster was asked for last
}

// engineView is a state.View as this package wants it. Users have the right to
// what their name says: "root" to all, any other to keys below "user/".
type engineView struct {
	*state.View
	e *engine
}

var errDenied = WireError(errors.New("denied"))

func (v engineView) KV() *mvcc.View { return v.View.View }

func (v engineView) MayRead(u Identity, key, end []byte) error {
	prefix := u.User + "/"
	if !v.e.authOn.Load() || u.User == "root" || len(key) > len(prefix) && string(key[:len(prefix)]) == prefix {
		return nil
	}
	return errDenied
}

func (v engineView) MayCall(u Identity) error {
	if !v.e.authOn.Load() || u.User != "" {
		return nil
	}
	return errDenied
}

func (v engineView) MayAdminister(u Identity) error {
	if !v.e.authOn.Load() || u.User == "root" {
		return nil
	}
	return errDenied
}

// newEngine returns an engine whose store keeps so many bytes of values in
// memory, 0 meaning enough.
func newEngine(t testing.TB, values int64) *engine {
	store, err := storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "store"})
	if err != nil {
		t.Fatal(err)
	}
	tokens := auth.NewTokens(0, time.Now)
	machine, err := state.Open(state.Options{Storage: store, MinLeaseTTL: 2, Tokens: tokens, MVCC: mvcc.Options{ValueBudgetBytes: values}})
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{machine: machine, store: store, tokens: tokens, asking: make(chan struct{}, 1), queue: make(chan Proposal, 1024)}
	e.leader.Store(testMember)
	e.capable.Store(true)
	e.ids.Store(1 << 48)
	e.done.Go(e.run)
	return e
}

func (e *engine) run() {
	for p := range e.queue {
		if hold := e.hold.Load(); hold != nil {
			<-*hold
		}
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
	e.done.Wait()
	if err := errors.Join(e.machine.Close(), e.store.Close()); err != nil {
		t.Error(err)
	}
}

func (e *engine) NextID() uint64 { return e.ids.Add(1) }

func (e *engine) Propose(p Proposal) error {
	e.queue <- p
	return nil
}

func (e *engine) ReadIndex(_ time.Time, done func(error)) {
	if hold := e.readHold.Load(); hold != nil {
		select {
		case e.asking <- struct{}{}:
		default:
		}
		e.done.Go(func() { // close waits for it: what a dropped answer gives back it gives back before that
			<-*hold
			e.caughtUp.Store(true)
			done(nil)
		})
		return
	}
	e.caughtUp.Store(true)
	done(nil)
}

func (e *engine) Leader() uint64    { return e.leader.Load() }
func (e *engine) Learner() bool     { return e.learner.Load() }
func (e *engine) Committed() uint64 { return e.Applied() }
func (e *engine) Applied() uint64   { i, _ := e.machine.Applied(); return i }
func (e *engine) Term() uint64      { _, term := e.machine.Applied(); return term }
func (e *engine) View() View        { return engineView{e.machine.View(), e} }
func (e *engine) ClientCerts() bool { return false }

// Enabled is whether auth is on, in the tables or because a test says so.
func (e *engine) Enabled() bool { return e.authOn.Load() || e.root().Enabled() }

func (e *engine) Revision() uint64 { return e.root().Revision() }

func (e *engine) root() *auth.Root {
	root, _, _ := e.machine.Tables()
	return root
}

// Identify takes the token for the name, unless auth is on in the tables. The
// token "ahead of x" is that of x as the next round of reading brings it.
func (e *engine) Identify(token string) (Identity, error) {
	if name, ok := strings.CutPrefix(token, "ahead of "); ok {
		if !e.caughtUp.Load() {
			return Identity{}, auth.ErrTokenAhead
		}
		token = name
	}
	if e.root().Enabled() {
		user, ok := e.tokens.User(token)
		if !ok {
			return Identity{}, auth.ErrInvalidToken
		}
		token = user
	}
	return Identity{User: token, AuthRevision: e.Revision()}, nil
}

func (e *engine) Password(name string) ([]byte, uint64, error) {
	hash, err := e.root().Password(name)
	return hash, e.Revision(), err
}

func (e *engine) Admit(cost int64) error {
	if q := e.quota.Load(); q > 0 && cost > q {
		return state.ErrNoSpace
	}
	return nil
}

// engineLeases are leases that never expire.
type engineLeases struct{ e *engine }

func (l engineLeases) Renew(_ context.Context, _ Identity, id int64, done func(int64, error)) {
	found, _ := l.e.machine.Leases().Lookup(id)
	done(found.TTL, nil)
}

func (l engineLeases) Status(_ context.Context, _ Identity, id int64, keys bool) (LeaseStatus, error) {
	found, ok := l.e.machine.Leases().Lookup(id)
	if !ok {
		return LeaseStatus{ID: id, TTL: -1}, nil
	}
	st := LeaseStatus{ID: id, TTL: found.TTL - 1, GrantedTTL: found.TTL}
	if keys {
		st.Keys = l.e.machine.Leases().Keys(id)
	}
	return st, nil
}

func (l engineLeases) IDs(Identity) (ids []int64, _ error) {
	for _, found := range l.e.machine.Leases().All() {
		ids = append(ids, found.ID)
	}
	slices.Sort(ids)
	return ids, nil
}

type engineCluster struct{ e *engine }

func (c engineCluster) Capable() bool { return c.e.capable.Load() }

func (c engineCluster) Members() []*pb.Member {
	return []*pb.Member{{ID: testMember, Name: "m1", PeerURLs: []string{"http://p:1"}, ClientURLs: []string{"http://c:1"}}}
}

// change notes down what was asked for and answers with the members.
func (c engineCluster) change(format string, args ...any) ([]*pb.Member, error) {
	c.e.asked.Store(new(fmt.Sprintf(format, args...)))
	if err := c.e.clusterErr.Load(); err != nil {
		return nil, *err
	}
	return c.Members(), nil
}

func (c engineCluster) AddMember(_ context.Context, peerURLs []string, learner bool) (*pb.Member, []*pb.Member, error) {
	members, err := c.change("add %v learner=%v", peerURLs, learner)
	return &pb.Member{ID: 9, PeerURLs: peerURLs, IsLearner: learner}, members, err
}

func (c engineCluster) RemoveMember(_ context.Context, id uint64) ([]*pb.Member, error) {
	return c.change("remove %d", id)
}

func (c engineCluster) UpdateMember(_ context.Context, id uint64, peerURLs []string) ([]*pb.Member, error) {
	return c.change("update %d %v", id, peerURLs)
}

func (c engineCluster) PromoteMember(_ context.Context, id uint64, token string) ([]*pb.Member, error) {
	return c.change("promote %d for %q", id, token)
}

func (c engineCluster) MoveLeader(_ context.Context, target uint64) error {
	_, err := c.change("move to %d", target)
	return err
}

func (c engineCluster) Downgrade(_ context.Context, action pb.DowngradeRequest_DowngradeAction, version string) (string, error) {
	_, err := c.change("%v %q", action, version)
	return "3.7", err
}

type engineMaintenance struct{ e *engine }

func (m engineMaintenance) Status() StoreStatus {
	return StoreStatus{SizeBytes: 4096, UsageBytes: m.e.machine.Root().UsageBytes(), QuotaBytes: 2 << 30,
		Version: "3.7.3", StorageVersion: "3.7.0", ClusterVersion: "3.7", Downgrade: &pb.DowngradeInfo{}}
}

func (m engineMaintenance) Alarms() (out []*pb.AlarmMember) {
	_, _, alarms := m.e.machine.Tables()
	for _, a := range alarms.List(pb.AlarmType_NONE) {
		out = append(out, &pb.AlarmMember{MemberID: a.Member, Alarm: a.Type})
	}
	return out
}

func (m engineMaintenance) Hash(ctx context.Context) (uint32, int64, error) {
	return m.e.machine.Hash(ctx)
}

func (m engineMaintenance) HashKV(ctx context.Context, revision int64) (HashKV, error) {
	h, err := m.e.machine.Keys().HashKV(ctx, m.e.machine.Root(), revision)
	return HashKV{Hash: h.Hash, CompactRevision: h.CompactRevision, HashRevision: h.HashRevision, Revision: h.Revision}, err
}

func (m engineMaintenance) CompactionDone(revision int64) <-chan struct{} {
	return m.e.machine.Keys().CompactionDone(revision)
}

func (m engineMaintenance) Reclaim() error { return nil }

func (m engineMaintenance) Backup(context.Context) (Backup, error) {
	return nil, errors.New("this engine has no backups")
}

// served is a Server that is served, and its clients.
type served struct {
	*engine
	s      *Server
	edge   *grpcserver.Server
	client *clientv3.Client
	conn   *grpc.ClientConn
	kv     pb.KVClient
	reg    *prometheus.Registry
}

// start starts a member. Its server must give back all room and all places.
func start(t *testing.T, change func(*Options)) *served {
	t.Helper()
	return startOn(t, newEngine(t, 0), change)
}

func startOn(t *testing.T, e *engine, change func(*Options)) *served {
	t.Helper()
	m := &served{engine: e, reg: prometheus.NewRegistry()}
	hub := watch.New(watch.Options{Source: watch.StoreSource{Store: e.machine.Keys(), Root: e.machine.Root}})
	o := Options{
		ClusterID: testCluster, MemberID: testMember,
		Consensus: e, Views: e, Auth: e, Quota: e,
		Leases: engineLeases{e}, Cluster: engineCluster{e}, Maintenance: engineMaintenance{e},
		Watches: hub, Metrics: NewMetrics(true),
	}
	if change != nil {
		change(&o)
	}
	if err := o.Metrics.Register(m.reg); err != nil {
		t.Fatal(err)
	}
	m.s = New(o)
	g := grpcserver.New(m.s.ServerOptions(grpcserver.Options{}))
	m.s.Register(g)
	m.edge = g
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	m.client, err = clientv3.New(clientv3.Config{Endpoints: []string{l.Addr().String()}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	m.conn, err = grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30), grpc.MaxCallSendMsgSize(1<<30)))
	if err != nil {
		t.Fatal(err)
	}
	m.kv = pb.NewKVClient(m.conn)
	t.Cleanup(func() {
		if err := errors.Join(m.client.Close(), m.conn.Close()); err != nil {
			t.Error(err)
		}
		g.Stop()
		if err := <-served; !errors.Is(err, grpc.ErrServerStopped) {
			t.Error(err)
		}
		e.close(t)
		m.s.Close()
		for name, room := range map[string]*budget{"answers": m.s.room, "small answers": m.s.small} {
			if room.available() != room.limit {
				t.Errorf("%d of %d bytes of room for %s were not given back", room.limit-room.available(), room.limit, name)
			}
		}
	})
	return m
}
