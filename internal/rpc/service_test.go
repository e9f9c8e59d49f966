package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/member"
)

func headerAt(revision int64) *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: testCluster, MemberId: testMember, Revision: revision, RaftTerm: 3}
}

func TestLease(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	leases := pb.NewLeaseClient(m.conn)
	m.put(t, "a", "1")
	g := must[*pb.LeaseGrantResponse](t)(leases.LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: 1}))
	if g.ID <= 0 || g.TTL != 2 || !proto.Equal(g.Header, headerAt(2)) {
		t.Errorf("grant: %v", g)
	}
	g = must[*pb.LeaseGrantResponse](t)(leases.LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: -7, TTL: 100}))
	if g.ID != -7 || g.TTL != 100 {
		t.Errorf("grant with ID: %v", g)
	}
	_, err := leases.LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: -7, TTL: 100})
	wantError(t, err, rpctypes.ErrGRPCLeaseExist)
	_, err = leases.LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: 9_000_000_001})
	wantError(t, err, rpctypes.ErrGRPCLeaseTTLTooLarge)

	must[*pb.PutResponse](t)(m.kv.Put(ctx, &pb.PutRequest{Key: []byte("l1"), Lease: -7}))
	must[*pb.PutResponse](t)(m.kv.Put(ctx, &pb.PutRequest{Key: []byte("l2"), Lease: -7}))
	ttl := must[*pb.LeaseTimeToLiveResponse](t)(leases.LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: -7, Keys: true}))
	slices.SortFunc(ttl.Keys, slices.Compare)
	if want := (&pb.LeaseTimeToLiveResponse{Header: headerAt(4), ID: -7, TTL: 99, GrantedTTL: 100, Keys: [][]byte{[]byte("l1"), []byte("l2")}}); !proto.Equal(ttl, want) {
		t.Errorf("time to live: %v", ttl)
	}
	ttl = must[*pb.LeaseTimeToLiveResponse](t)(leases.LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: 404}))
	if want := (&pb.LeaseTimeToLiveResponse{Header: headerAt(4), ID: 404, TTL: -1}); !proto.Equal(ttl, want) {
		t.Errorf("time to live of no lease: %v", ttl)
	}
	if all := must[*pb.LeaseLeasesResponse](t)(leases.LeaseLeases(ctx, &pb.LeaseLeasesRequest{})); len(all.Leases) != 2 || all.Leases[0].ID != -7 {
		t.Errorf("leases: %v", all)
	}

	stream := must[pb.Lease_LeaseKeepAliveClient](t)(leases.LeaseKeepAlive(ctx))
	for _, c := range []struct{ id, ttl int64 }{{-7, 100}, {404, 0}, {-7, 100}} {
		if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: c.id}); err != nil {
			t.Fatal(err)
		}
		if r := must[*pb.LeaseKeepAliveResponse](t)(stream.Recv()); r.ID != c.id || r.TTL != c.ttl || !proto.Equal(r.Header, headerAt(4)) {
			t.Errorf("keep alive of %d: %v", c.id, r)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after the client is done: %v", err)
	}

	r := must[*pb.LeaseRevokeResponse](t)(leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: -7}))
	if !proto.Equal(r.Header, headerAt(5)) {
		t.Errorf("revoke: %v", r)
	}
	_, err = leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: -7})
	wantError(t, err, rpctypes.ErrGRPCLeaseNotFound)
	if all := must[*pb.RangeResponse](t)(m.kv.Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})); keysOf(all.Kvs) != "a" {
		t.Errorf("left are %v", all.Kvs)
	}
}

func TestCluster(t *testing.T) {
	m := start(t, nil)
	m.put(t, "a", "1")
	for _, linearizable := range []bool{false, true} {
		r := must[*pb.MemberListResponse](t)(pb.NewClusterClient(m.conn).MemberList(t.Context(), &pb.MemberListRequest{Linearizable: linearizable}))
		if !proto.Equal(r.Header, headerAt(0)) || len(r.Members) != 1 || r.Members[0].ID != testMember || r.Members[0].ClientURLs[0] != "http://c:1" {
			t.Errorf("got %v", r)
		}
	}
	if err := m.client.Sync(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestChangesOfTheCluster checks what the cluster is asked for and what the client gets.
func TestChangesOfTheCluster(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	cluster, mt := pb.NewClusterClient(m.conn), pb.NewMaintenanceClient(m.conn)
	type members interface {
		GetHeader() *pb.ResponseHeader
		GetMembers() []*pb.Member
	}
	promote := func(ctx context.Context) (members, error) {
		return cluster.MemberPromote(ctx, &pb.MemberPromoteRequest{ID: 7})
	}
	changes := []struct {
		asked string
		call  func(ctx context.Context) (members, error)
	}{
		{"add [http://a:1 http://b:1] learner=true", func(ctx context.Context) (members, error) {
			r, err := cluster.MemberAdd(ctx, &pb.MemberAddRequest{PeerURLs: []string{" http://b:1", "HTTP://a:1 "}, IsLearner: true})
			if want := (&pb.Member{ID: 9, PeerURLs: []string{"http://a:1", "http://b:1"}, IsLearner: true}); err == nil && !proto.Equal(r.Member, want) {
				t.Errorf("added %v", r.Member)
			}
			return r, err
		}},
		{"remove 7", func(ctx context.Context) (members, error) {
			return cluster.MemberRemove(ctx, &pb.MemberRemoveRequest{ID: 7})
		}},
		{"update 7 [http://c:1]", func(ctx context.Context) (members, error) {
			return cluster.MemberUpdate(ctx, &pb.MemberUpdateRequest{ID: 7, PeerURLs: []string{"http://c:1"}})
		}},
		{`promote 7 for ""`, promote},
	}
	for _, c := range changes {
		r, err := c.call(ctx)
		if err != nil {
			t.Fatalf("%s: %v", c.asked, err)
		}
		if !proto.Equal(r.GetHeader(), &pb.ResponseHeader{ClusterId: testCluster, MemberId: testMember}) || len(r.GetMembers()) != 1 {
			t.Errorf("%s: header %v, members %v", c.asked, r.GetHeader(), r.GetMembers())
		}
		if got := *m.asked.Load(); got != c.asked {
			t.Errorf("the cluster was asked to %s, want %s", got, c.asked)
		}
	}
	move := func(ctx context.Context) error {
		r, err := mt.MoveLeader(ctx, &pb.MoveLeaderRequest{TargetID: 7})
		if r.GetHeader() != nil {
			t.Errorf("MoveLeader: header %v", r.GetHeader())
		}
		return err
	}
	downgrade := func(ctx context.Context, action pb.DowngradeRequest_DowngradeAction) error {
		r, err := mt.Downgrade(ctx, &pb.DowngradeRequest{Action: action, Version: "3.6"})
		if err == nil && (r.Version != "3.7" || r.Header.GetRevision() != 1) {
			t.Errorf("%v: %v", action, r)
		}
		return err
	}
	if err := errors.Join(move(ctx), downgrade(ctx, pb.DowngradeRequest_ENABLE)); err != nil {
		t.Error(err)
	}
	if got, want := *m.asked.Load(), `ENABLE "3.6"`; got != want {
		t.Errorf("the cluster was asked to %s, want %s", got, want)
	}

	fail := func(err error) { m.clusterErr.Store(&err) }
	fail(fmt.Errorf("of what was asked: %w", member.ErrUnhealthy))
	for _, c := range changes {
		_, err := c.call(ctx)
		wantError(t, err, rpctypes.ErrGRPCUnhealthy)
	}
	fail(ErrNotLeader)
	wantError(t, move(ctx), rpctypes.ErrGRPCNotLeader)
	fail(member.ErrNoInflightDowngrade) // which is no error of CANCEL
	wantError(t, downgrade(ctx, pb.DowngradeRequest_ENABLE), rpctypes.ErrGRPCNoInflightDowngrade)
	if err := downgrade(ctx, pb.DowngradeRequest_CANCEL); err != nil {
		t.Errorf("CANCEL of no downgrade: %v", err)
	}
	m.clusterErr.Store(nil)

	// With auth on only an administrator may ask, and his token goes along.
	m.authOn.Store(true)
	as := func(name string) context.Context { return metadata.AppendToOutgoingContext(ctx, "token", name) }
	m.asked.Store(nil)
	for _, c := range changes {
		_, err := c.call(as("user"))
		wantError(t, err, errDenied)
	}
	wantError(t, move(as("user")), errDenied)
	wantError(t, downgrade(as("user"), 9), errDenied)
	if got := m.asked.Load(); got != nil {
		t.Errorf("for a user the cluster was asked to %s", *got)
	}
	if _, err := promote(as("root")); err != nil || *m.asked.Load() != `promote 7 for "root"` {
		t.Errorf("%v, asked to %s", err, *m.asked.Load())
	}
}

// TestPeerURLs gives URLs that would end every real member which applied them, and the ID that no member has.
func TestPeerURLs(t *testing.T) {
	m := start(t, nil)
	cluster := pb.NewClusterClient(m.conn)
	for _, bad := range [][]string{nil, {""}, {"nonsense"}, {"http://ok:1", "127.0.0.1:2380"}, {"http://a:1/path"}, {"ftp://a:1"}, {"http://a"}, {"http://a:port"}} {
		_, err := cluster.MemberAdd(t.Context(), &pb.MemberAddRequest{PeerURLs: bad})
		wantError(t, err, rpctypes.ErrGRPCMemberBadURLs)
		_, err = cluster.MemberUpdate(t.Context(), &pb.MemberUpdateRequest{ID: testMember, PeerURLs: bad})
		wantError(t, err, rpctypes.ErrGRPCMemberBadURLs)
	}
	if got := m.asked.Load(); got != nil {
		t.Errorf("the cluster was asked to %s", *got)
	}
	for _, call := range []func() error{
		func() error { _, err := cluster.MemberRemove(t.Context(), &pb.MemberRemoveRequest{}); return err },
		func() error { _, err := cluster.MemberPromote(t.Context(), &pb.MemberPromoteRequest{}); return err },
		func() error {
			_, err := cluster.MemberUpdate(t.Context(), &pb.MemberUpdateRequest{PeerURLs: []string{"http://a:1"}})
			return err
		},
	} {
		wantError(t, call(), rpctypes.ErrGRPCMemberNotFound)
	}
	m.authOn.Store(true) // as in etcd, the URLs of an add come first
	_, err := cluster.MemberAdd(t.Context(), &pb.MemberAddRequest{PeerURLs: []string{"nonsense"}})
	wantError(t, err, rpctypes.ErrGRPCMemberBadURLs)
	_, err = cluster.MemberUpdate(t.Context(), &pb.MemberUpdateRequest{PeerURLs: []string{"nonsense"}})
	wantError(t, err, errDenied)
}

func TestMaintenance(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	mt := pb.NewMaintenanceClient(m.conn)
	for i, kv := range [][2]string{{"a", "1"}, {"a", "2"}, {"b", "1"}} {
		if rev := m.put(t, kv[0], kv[1]); rev != int64(i+2) {
			t.Fatalf("revision %d", rev)
		}
	}
	must[*pb.DeleteRangeResponse](t)(m.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("a")}))
	m.put(t, "c", "1")
	h := must[*pb.HashKVResponse](t)(mt.HashKV(ctx, &pb.HashKVRequest{}))
	if want := (&pb.HashKVResponse{Header: headerAt(6), Hash: 1306755273, CompactRevision: -1, HashRevision: 6}); !proto.Equal(h, want) {
		t.Errorf("HashKV: %v", h)
	}
	_, err := mt.HashKV(ctx, &pb.HashKVRequest{Revision: 7})
	wantError(t, err, rpctypes.ErrGRPCFutureRev)
	if h := must[*pb.HashResponse](t)(mt.Hash(ctx, &pb.HashRequest{})); h.Hash == 0 || !proto.Equal(h.Header, headerAt(6)) {
		t.Errorf("Hash: %v", h)
	}
	if d := must[*pb.DefragmentResponse](t)(mt.Defragment(ctx, &pb.DefragmentRequest{})); d.Header != nil {
		t.Errorf("Defragment: %v", d)
	}
	_, err = mt.Downgrade(ctx, &pb.DowngradeRequest{Action: 9})
	wantError(t, err, status.Error(codes.Unknown, "etcdserver: unknown method"))
	if d := must[*pb.DowngradeResponse](t)(mt.Downgrade(ctx, &pb.DowngradeRequest{Action: pb.DowngradeRequest_CANCEL})); d.Version != "3.7" || !proto.Equal(d.Header, headerAt(6)) {
		t.Errorf("Downgrade: %v", d)
	}
	st := must[*pb.StatusResponse](t)(mt.Status(ctx, &pb.StatusRequest{}))
	want := &pb.StatusResponse{
		Header: headerAt(6), Version: "3.7.3", StorageVersion: "3.7.0", DbSize: 4096, DbSizeInUse: st.DbSizeInUse, DbSizeQuota: 2 << 30,
		Leader: testMember, RaftTerm: 3, RaftIndex: m.Applied(), RaftAppliedIndex: m.Applied(), DowngradeInfo: &pb.DowngradeInfo{},
	}
	if !proto.Equal(st, want) || st.DbSizeInUse == 0 {
		t.Errorf("Status: %v", st)
	}
	m.leader.Store(0)
	m.learner.Store(true)
	st = must[*pb.StatusResponse](t)(mt.Status(ctx, &pb.StatusRequest{}))
	if !st.IsLearner || st.Leader != 0 || !slices.Equal(st.Errors, []string{"etcdserver: no leader"}) {
		t.Errorf("Status without leader: %v", st)
	}
}

func TestAlarm(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	mt := pb.NewMaintenanceClient(m.conn)
	ask := func(action pb.AlarmRequest_AlarmAction, member uint64, kind pb.AlarmType) []*pb.AlarmMember {
		t.Helper()
		r := must[*pb.AlarmResponse](t)(mt.Alarm(ctx, &pb.AlarmRequest{Action: action, MemberID: member, Alarm: kind}))
		if !proto.Equal(r.Header, headerAt(1)) {
			t.Errorf("header %v", r.Header)
		}
		return r.Alarms
	}
	m.machine.View().Release()
	if got := ask(pb.AlarmRequest_ACTIVATE, 5, pb.AlarmType_NOSPACE); len(got) != 1 || got[0].MemberID != 5 {
		t.Errorf("activate: %v", got)
	}
	_, err := m.kv.Put(ctx, &pb.PutRequest{Key: []byte("a")})
	wantError(t, err, rpctypes.ErrGRPCNoSpace)
	for kind, n := range map[pb.AlarmType]int{pb.AlarmType_NONE: 1, pb.AlarmType_NOSPACE: 1, pb.AlarmType_CORRUPT: 0} {
		if got := ask(pb.AlarmRequest_GET, 0, kind); len(got) != n {
			t.Errorf("get %v: %v", kind, got)
		}
	}
	st := must[*pb.StatusResponse](t)(mt.Status(ctx, &pb.StatusRequest{}))
	if len(st.Errors) != 1 || strings.Join(strings.Fields(st.Errors[0]), " ") != "memberID:5 alarm:NOSPACE" {
		t.Errorf("Status: %v", st)
	}
	if got := ask(pb.AlarmRequest_DEACTIVATE, 5, pb.AlarmType_NOSPACE); len(got) != 1 {
		t.Errorf("deactivate: %v", got)
	}
	if rev := m.put(t, "a", ""); rev != 2 {
		t.Errorf("after the alarm: revision %d", rev)
	}
}

func TestUnknownMethodsAndHealth(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	for method, want := range map[string]string{
		"/etcdserverpb.KV/Swap":                                        "unknown method Swap for service etcdserverpb.KV",
		"/etcdserverpb.Lease/Borrow":                                   "unknown method Borrow for service etcdserverpb.Lease",
		"/grpc.reflection.v1.ServerReflection/ServerReflectionRequest": "unknown service grpc.reflection.v1.ServerReflection",
	} {
		wantError(t, m.conn.Invoke(ctx, method, &pb.RangeRequest{}, &pb.RangeResponse{}), status.Error(codes.Unimplemented, want))
	}
	health := healthpb.NewHealthClient(m.conn)
	if r := must[*healthpb.HealthCheckResponse](t)(health.Check(ctx, &healthpb.HealthCheckRequest{})); r.Status != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("health: %v", r)
	}
	_, err := health.Check(ctx, &healthpb.HealthCheckRequest{Service: "etcdserverpb.KV"})
	wantError(t, err, status.Error(codes.NotFound, "unknown service"))
	if err := m.conn.Invoke(ctx, "/etcdserverpb.KV/Put", &pb.RangeRequest{Key: []byte("k"), Limit: -1}, &pb.PutResponse{}); err == nil {
		t.Error("a lease that no one has was taken")
	}
}

// TestOrderOfChecks gives each call several reasons to be refused.
func TestOrderOfChecks(t *testing.T) {
	m := start(t, nil)
	leaderless := metadata.AppendToOutgoingContext(t.Context(), "hasleader", "true")
	m.quota.Store(1)
	m.leader.Store(0)
	put := func(ctx context.Context) error {
		_, err := m.kv.Put(ctx, &pb.PutRequest{Value: []byte("no key")})
		return err
	}
	grant := func(ctx context.Context) error {
		_, err := pb.NewLeaseClient(m.conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: 1 << 40})
		return err
	}
	stream := func(ctx context.Context) error {
		s, err := m.kv.RangeStream(ctx, &pb.RangeRequest{})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	}
	step := func(name string, ctx context.Context, want error, calls ...func(context.Context) error) {
		t.Helper()
		for i, call := range calls {
			if err := call(ctx); status.Convert(err).Message() != status.Convert(want).Message() || status.Code(err) != status.Code(want) {
				t.Errorf("%s, call %d: got %v, want %v", name, i, err, want)
			}
		}
	}
	m.capable.Store(false)
	m.learner.Store(true)
	step("capability", leaderless, rpctypes.ErrGRPCNotCapable, put, grant, stream)
	m.capable.Store(true)
	step("learner", leaderless, rpctypes.ErrGRPCNotSupportedForLearner, put, grant, stream)
	m.learner.Store(false)
	// No client of grpc-go's can send such a version.
	bad := grpcserver.NewCall(t.Context(), "/etcdserverpb.KV/Put", map[string][]string{"client-api-version": {"3.\xff"}, "hasleader": {"true"}})
	m.s.handlers()[bad.Method](bad, nil, func(_ []byte, err error) { wantError(t, err, rpctypes.ErrGRPCInvalidClientAPIVersion) })
	step("leader", leaderless, rpctypes.ErrGRPCNoLeader, put, grant, stream)
	m.leader.Store(testMember)
	step("quota", leaderless, rpctypes.ErrGRPCNoSpace, put, grant)
	m.quota.Store(0)
	step("request", leaderless, rpctypes.ErrGRPCEmptyKey, put, stream)
	step("apply", leaderless, rpctypes.ErrGRPCLeaseTTLTooLarge, grant)

	// A txn is refused for the space of its puts, not for its deletes.
	m.quota.Store(300)
	_, err := m.client.Txn(t.Context()).Then(clientv3.OpPut("a", ""), clientv3.OpPut("b", "")).Commit()
	wantError(t, toStatus(err), rpctypes.ErrGRPCNoSpace)
	if _, err = m.client.Txn(t.Context()).Then(clientv3.OpDelete("a", clientv3.WithFromKey())).Commit(); err != nil {
		t.Error(err)
	}
}

func TestLearner(t *testing.T) {
	m := start(t, nil)
	m.put(t, "a", "1")
	m.learner.Store(true)
	ctx := t.Context()
	if r := must[*pb.RangeResponse](t)(m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("a"), Serializable: true})); r.Count != 1 {
		t.Errorf("got %v", r)
	}
	_, err := m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
	wantError(t, err, rpctypes.ErrGRPCNotSupportedForLearner)
	cluster, mt := pb.NewClusterClient(m.conn), pb.NewMaintenanceClient(m.conn)
	for _, call := range []func() error{
		func() error { _, err := cluster.MemberList(ctx, &pb.MemberListRequest{}); return err },
		func() error { _, err := cluster.MemberAdd(ctx, &pb.MemberAddRequest{}); return err },
		func() error { _, err := cluster.MemberRemove(ctx, &pb.MemberRemoveRequest{}); return err },
		func() error { _, err := cluster.MemberUpdate(ctx, &pb.MemberUpdateRequest{}); return err },
		func() error { _, err := cluster.MemberPromote(ctx, &pb.MemberPromoteRequest{}); return err },
		func() error { _, err := mt.MoveLeader(ctx, &pb.MoveLeaderRequest{}); return err },
		func() error { _, err := mt.Downgrade(ctx, &pb.DowngradeRequest{}); return err },
		func() error { _, err := mt.HashKV(ctx, &pb.HashKVRequest{}); return err },
	} {
		wantError(t, call(), rpctypes.ErrGRPCNotSupportedForLearner)
	}
	if _, err := mt.Status(ctx, &pb.StatusRequest{}); err != nil {
		t.Error(err)
	}
	_, err = must[pb.Lease_LeaseKeepAliveClient](t)(pb.NewLeaseClient(m.conn).LeaseKeepAlive(ctx)).Recv()
	wantError(t, err, rpctypes.ErrGRPCNotSupportedForLearner)
}

// TestLeaderless ends the streams that require a leader, and only those, after
// three election timeouts.
func TestLeaderless(t *testing.T) {
	fake := clock.NewFake(time.Unix(1000, 0))
	m := start(t, func(o *Options) { o.Clock = fake })
	leases := pb.NewLeaseClient(m.conn)
	strict := must[pb.Lease_LeaseKeepAliveClient](t)(leases.LeaseKeepAlive(metadata.AppendToOutgoingContext(t.Context(), "hasleader", "true")))
	lax := must[pb.Lease_LeaseKeepAliveClient](t)(leases.LeaseKeepAlive(t.Context()))
	exchange := func(s pb.Lease_LeaseKeepAliveClient) error {
		if err := s.Send(&pb.LeaseKeepAliveRequest{ID: 1}); err != nil {
			return err
		}
		_, err := s.Recv()
		return err
	}
	if err := errors.Join(exchange(strict), exchange(lax)); err != nil {
		t.Fatal(err)
	}
	m.leader.Store(0)
	ended := make(chan error)
	go func() {
		_, err := strict.Recv()
		ended <- err
	}()
	for turned := 0; ; turned++ {
		fake.Advance(time.Second)
		select {
		case err := <-ended:
			if turned < leaderlessLimit-1 {
				t.Errorf("ended after %d election timeouts", turned+1)
			}
			wantError(t, err, rpctypes.ErrGRPCNoLeader)
		case <-time.After(2 * time.Millisecond):
			continue
		}
		break
	}
	if err := exchange(lax); err != nil {
		t.Errorf("the other stream: %v", err)
	}
}

func TestAuthOn(t *testing.T) {
	m := start(t, nil)
	m.put(t, "user/a", "1")
	m.put(t, "other", "1")
	m.authOn.Store(true)
	as := func(name string) context.Context { return metadata.AppendToOutgoingContext(t.Context(), "token", name) }
	read := func(ctx context.Context, key string) error {
		_, err := m.kv.Range(ctx, &pb.RangeRequest{Key: []byte(key)})
		return err
	}
	if err := errors.Join(read(as("user"), "user/a"), read(as("root"), "other"),
		read(metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer user"), "user/a")); err != nil {
		t.Error(err)
	}
	for _, err := range []error{read(as("user"), "other"), read(t.Context(), "other")} {
		wantError(t, err, errDenied)
	}
	_, err := m.kv.Txn(as("user"), &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: []byte("other")}},
		Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("user/a")}}}},
	})
	wantError(t, err, errDenied)
	_, err = m.kv.Compact(as("user"), &pb.CompactionRequest{Revision: 2})
	wantError(t, err, errDenied)
	_, err = pb.NewMaintenanceClient(m.conn).Status(t.Context(), &pb.StatusRequest{})
	wantError(t, err, errDenied)
	if _, err = pb.NewMaintenanceClient(m.conn).Status(as("user"), &pb.StatusRequest{}); err != nil {
		t.Error(err)
	}
	_, err = pb.NewMaintenanceClient(m.conn).HashKV(as("user"), &pb.HashKVRequest{})
	wantError(t, err, errDenied)
}

func TestMetrics(t *testing.T) {
	m := start(t, nil)
	series := func(name string) map[string]float64 {
		out := map[string]float64{}
		for _, family := range must[[]*metricFamily](t)(gather(m.reg)) {
			if family.name == name {
				out = family.values
			}
		}
		return out
	}
	started := series("grpc_server_started_total")
	for _, want := range []string{
		"grpc_method=Range grpc_service=etcdserverpb.KV grpc_type=unary",
		"grpc_method=RangeStream grpc_service=etcdserverpb.KV grpc_type=server_stream",
		"grpc_method=Watch grpc_service=etcdserverpb.Watch grpc_type=bidi_stream",
		"grpc_method=LeaseKeepAlive grpc_service=etcdserverpb.Lease grpc_type=bidi_stream",
		"grpc_method=Snapshot grpc_service=etcdserverpb.Maintenance grpc_type=server_stream",
		"grpc_method=Check grpc_service=grpc.health.v1.Health grpc_type=unary",
	} {
		if v, ok := started[want]; !ok || v != 0 {
			t.Errorf("%s is %v, there: %v", want, v, ok)
		}
	}
	m.put(t, "a", "1")
	if _, err := m.kv.Put(t.Context(), &pb.PutRequest{}); err == nil {
		t.Error("a put without key was taken")
	}
	if _, err := m.client.Get(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	put := "grpc_method=Put grpc_service=etcdserverpb.KV grpc_type=unary"
	wrong := func() string {
		for name, want := range map[string]map[string]float64{
			"grpc_server_started_total":      {put: 2},
			"grpc_server_msg_received_total": {put: 2},
			"grpc_server_msg_sent_total":     {put: 1},
			"grpc_server_handled_total":      {"grpc_code=OK " + put: 1, "grpc_code=InvalidArgument " + put: 1, "grpc_code=Unavailable " + put: 0},
			"grpc_server_handling_seconds":   {put: 2},
			"etcd_server_client_requests_total": {
				"client_api_version=unknown type=unary": 2, "client_api_version=3.7 type=unary": 1},
			"etcd_server_request_duration_seconds": {"success=true type=Put": 1, "success=true type=Range": 1},
			"etcd_server_range_duration_seconds":   {"success=true": 1, "success=false": 0},
		} {
			got := series(name)
			for labels, v := range want {
				if have, ok := got[labels]; !ok || have != v {
					return fmt.Sprintf("%s{%s} is %v (there: %v), want %v", name, labels, have, ok, v)
				}
			}
		}
		return ""
	}
	// A call is counted when it is over, perhaps a moment after its client has the answer.
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		text := wrong()
		if text == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(text)
		}
	}
	if v := series("etcd_network_client_grpc_received_bytes_total")[""]; v != 9 { // two keys and one value with tags and lengths
		t.Errorf("%v bytes received", v)
	}
	if v := series("etcd_network_client_grpc_sent_bytes_total")[""]; v < 40 { // two headers, at least
		t.Errorf("%v bytes sent", v)
	}
}
