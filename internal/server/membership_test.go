package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/storage"
)

// fakeCluster is the membership of a cluster with the raft of one member, who
// has what it proposes applied at once.
type fakeCluster struct {
	t     *testing.T
	store *storage.Store
	clock *clock.Fake

	mu        sync.Mutex
	table     *member.Table
	leader    uint64
	progress  []consensus.Progress
	proposed  []*raftpb.ConfChange
	hold      bool // proposals wait for ever
	waiting   func(consensus.Result, error)
	cancelled chan uint64
	moved     chan uint64
	active    map[uint64]time.Time
	promote   func(urls []string, token string) ([]peer.Member, error)
	caughtUp  func() error

	promotions *promotionMetrics
}

// newFakeCluster has members described as "id", with l for a learner, - for one
// that has not started: "1 2- 3l".
func newFakeCluster(t *testing.T, members string) *fakeCluster {
	t.Helper()
	store, err := storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "db"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	c := &fakeCluster{t: t, store: store, clock: clock.NewFake(time.Unix(1700000000, 0)), leader: 1, active: map[uint64]time.Time{},
		cancelled: make(chan uint64, 1), moved: make(chan uint64, 1), caughtUp: func() error { return nil }, promotions: newPromotionMetrics()}
	if c.table, err = member.Open(store, member.Options{Version: "3.7.3"}); err != nil {
		t.Fatal(err)
	}
	for word := range strings.FieldsSeq(members) {
		var id uint64
		if _, err := fmt.Sscanf(word, "%d", &id); err != nil {
			t.Fatal(err)
		}
		c.apply(func(b *storage.Batch) error {
			_, err := c.table.ApplyConfChange(b, member.AddChange(0, member.Member{ID: id, PeerURLs: []string{peerURL(id)}, IsLearner: strings.Contains(word, "l")}))
			return err
		})
		if !strings.Contains(word, "-") {
			c.apply(func(b *storage.Batch) error {
				return c.table.SetAttributes(b, &membershippb.ClusterMemberAttrSetRequest{Member_ID: id, MemberAttributes: &membershippb.Attributes{Name: "n"}})
			})
		}
	}
	return c
}

func peerURL(id uint64) string { return fmt.Sprintf("http://10.0.0.%d:2380", id) }

func (c *fakeCluster) apply(fn func(*storage.Batch) error) {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.store.NewBatch()
	if err := fn(b); err != nil {
		c.t.Fatal(err)
	}
	if err := c.store.Commit(b); err != nil {
		c.t.Fatal(err)
	}
}

func (c *fakeCluster) version(v string) *fakeCluster {
	c.apply(func(b *storage.Batch) error {
		return c.table.SetVersion(b, &membershippb.ClusterVersionSetRequest{Ver: v})
	})
	return c
}

func (c *fakeCluster) downgrade(target string) *fakeCluster {
	c.apply(func(b *storage.Batch) error {
		c.table.SetDowngrade(b, &membershippb.DowngradeInfoSetRequest{Enabled: target != "", Ver: target})
		return nil
	})
	return c
}

// connect says which members are connected, for how long.
func (c *fakeCluster) connect(since time.Duration, ids ...uint64) *fakeCluster {
	for _, id := range ids {
		c.active[id] = c.clock.Now().Add(-since)
	}
	return c
}

func (c *fakeCluster) Leader() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leader
}

func (c *fakeCluster) lead(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leader = id
}

func (c *fakeCluster) Progress() []consensus.Progress { return c.progress }

func (c *fakeCluster) Root() *member.Root {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.table.Root()
}

func (c *fakeCluster) ProposeConfChange(p consensus.ConfProposal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.proposed = append(c.proposed, p.Change)
	if c.hold {
		c.waiting = p.Done
		return nil
	}
	b := c.store.NewBatch()
	_, err := c.table.ApplyConfChange(b, p.Change)
	if cerr := c.store.Commit(b); cerr != nil {
		return cerr
	}
	go p.Done(consensus.Result{ID: p.Change.GetId(), Err: err}, nil)
	return nil
}

func (c *fakeCluster) Cancel(id uint64) {
	c.cancelled <- id
	c.waiting(consensus.Result{}, consensus.ErrCanceled)
}

func (c *fakeCluster) TransferLeadership(to uint64)   { c.moved <- to }
func (c *fakeCluster) HandOver(context.Context) error { return consensus.ErrNoSuccessor }

func (c *fakeCluster) Promote(_ context.Context, urls []string, _ uint64, token string) ([]peer.Member, error) {
	return c.promote(urls, token)
}

func (c *fakeCluster) membership(self uint64, strict bool) *membership {
	return &membership{
		self: self, strict: strict, tick: 100 * time.Millisecond, requestTimeout: 7 * time.Second,
		root: c.Root, raft: c, ids: consensus.NewIDs(self, c.clock.Now()), active: func(id uint64) time.Time { return c.active[id] },
		caughtUp: func(context.Context) error { return c.caughtUp() }, peers: c, clock: c.clock, promotions: c.promotions,
	}
}

// TestHealthRules is section 4.6 row by row. Member 1 is the one that is asked;
// the last column but one says who is connected besides it.
func TestHealthRules(t *testing.T) {
	const ok = ""
	const started, unhealthy = "not enough started", "unhealthy"
	for _, c := range []struct {
		op        string
		members   string
		connected []uint64
		want      string
	}{
		// A second voter may come to a lone one; a third only once the second runs.
		{"add", "1", nil, ok},
		{"add", "1-", nil, started}, // n = 2 needs s = 1
		{"add", "1 2-", []uint64{2}, started},
		{"add", "1 2", nil, unhealthy},
		{"add", "1 2", []uint64{2}, ok},
		// n = 4 needs 3 started, and (3+1)/2+1 = 3 connected.
		{"add", "1 2 3-", []uint64{2, 3}, started},
		{"add", "1 2 3", []uint64{2}, unhealthy},
		{"add", "1 2 3", []uint64{2, 3}, ok},
		// n = 5 needs 3 started, and (4+1)/2+1 = 3 connected.
		{"add", "1 2 3 4-", []uint64{2, 3}, ok},
		{"add", "1 2 3- 4-", []uint64{2, 3, 4}, started},
		{"add", "1 2 3 4", []uint64{2}, unhealthy},
		// n = 6 needs 4 started, and (5+1)/2+1 = 4 connected.
		{"add", "1 2 3 4 5", []uint64{2, 3}, unhealthy},
		{"add", "1 2 3 4 5-", []uint64{2, 3, 4}, ok},
		// A learner counts for nothing.
		{"add", "1 2l", nil, ok},
		{"add", "1 2-l", nil, ok},
		{"add", "1 2 3l", []uint64{3}, unhealthy},
		// A learner may come as long as there is a quorum.
		{"learner", "1", nil, ok},
		{"learner", "1 2-", nil, unhealthy},
		{"learner", "1 2", []uint64{2}, ok},
		{"learner", "1 2 3", nil, unhealthy},
		{"learner", "1 2 3", []uint64{2}, ok},
		{"learner", "1 2 3-", []uint64{2}, ok},
		{"learner", "1 2 3 4", []uint64{2}, unhealthy},
		{"learner", "1 2 3 4 5", []uint64{4, 5}, ok},
		// Nothing is asked of a learner's removal.
		{"remove 3", "1 2- 3l", nil, ok},
		// The last voter stays.
		{"remove 1", "1", nil, started},
		// W of 1 needs 1 started. Who is not connected is let go.
		{"remove 2", "1 2", nil, ok},
		{"remove 2", "1 2-", nil, ok},
		{"remove 1", "1 2-", []uint64{2}, started},
		// Connected: connected(V) - 1 >= 1 + (|V|-1)/2.
		{"remove 2", "1 2", []uint64{2}, ok}, // 2-1 >= 1+0
		{"remove 1", "1 2", []uint64{2}, ok},
		{"remove 1", "1 2", nil, unhealthy},
		{"remove 2", "1 2 3", []uint64{2}, unhealthy}, // 2-1 >= 2 fails
		{"remove 2", "1 2 3", []uint64{2, 3}, ok},     // 3-1 >= 2
		{"remove 3", "1 2 3", []uint64{2}, ok},        // it is inactive
		{"remove 2", "1 2 3-", []uint64{2, 3}, started},
		{"remove 3", "1 2 3-", nil, ok}, // W = {1,2} is started
		{"remove 2", "1 2 3 4", []uint64{2, 3}, ok},
		{"remove 2", "1 2 3 4", []uint64{2}, unhealthy},
		{"remove 2", "1 2 3 4 5", []uint64{2, 3}, unhealthy}, // 3-1 >= 3 fails
		{"remove 2", "1 2 3 4 5", []uint64{2, 3, 4}, ok},
		// Promotion: n = |V|+1 and s = 1 + started.
		{"promote", "1 9l", nil, ok},
		{"promote", "1- 9l", nil, started},
		{"promote", "1 2 9l", nil, ok},
		{"promote", "1 2- 9l", nil, ok}, // 2 >= 3/2+1
		{"promote", "1 2 3- 9l", nil, ok},
		{"promote", "1 2- 3- 9l", nil, started}, // 2 >= 4/2+1 fails
	} {
		cluster := newFakeCluster(t, c.members).connect(healthInterval, c.connected...)
		h := cluster.membership(1, true).health()
		var err error
		var id uint64
		switch {
		case c.op == "add":
			err = h.mayAdd(false)
		case c.op == "learner":
			err = h.mayAdd(true)
		case c.op == "promote":
			err = h.mayPromote()
		default:
			if _, serr := fmt.Sscanf(c.op, "remove %d", &id); serr != nil {
				t.Fatal(serr)
			}
			err = h.mayRemove(id)
		}
		want := map[string]error{ok: nil, started: member.ErrNotEnoughStarted, unhealthy: member.ErrUnhealthy}[c.want]
		if !errors.Is(err, want) {
			t.Errorf("%s to %q with %v connected: %v, want %q", c.op, c.members, c.connected, err, c.want)
		}
	}
	// A connection counts once it is five seconds old.
	c := newFakeCluster(t, "1 2 3").connect(healthInterval-1, 2, 3)
	if err := c.membership(1, true).health().mayAdd(false); !errors.Is(err, member.ErrUnhealthy) {
		t.Errorf("young connections: %v", err)
	}
}

func TestAddMember(t *testing.T) {
	c := newFakeCluster(t, "1")
	m := c.membership(1, true)
	added, members, err := m.AddMember(t.Context(), []string{"http://10.0.0.9:2", "http://10.0.0.9:1"}, true)
	if err != nil || len(members) != 2 || !added.IsLearner || added.ID != member.NewID([]string{"http://10.0.0.9:1", "http://10.0.0.9:2"}, c.clock.Now()) {
		t.Fatalf("%v %v %v", added, members, err)
	}
	cc := c.proposed[0]
	if want := fmt.Sprintf(`{"id":%d,"peerURLs":["http://10.0.0.9:1","http://10.0.0.9:2"],"isLearner":true}`, added.ID); string(cc.GetContext()) != want ||
		cc.GetType() != raftpb.ConfChangeAddLearnerNode || cc.GetId() == 0 {
		t.Errorf("proposed %v, want the context %s", cc, want)
	}
	for _, bad := range []struct {
		urls    []string
		learner bool
		want    error
	}{
		{nil, false, member.ErrBadURL}, {[]string{"http://h"}, false, member.ErrBadURL}, {[]string{"http://h:1/p"}, true, member.ErrBadURL},
		{[]string{"http://h:1"}, true, member.ErrTooManyLearners}, {[]string{"http://10.0.0.9:2"}, false, member.ErrPeerURLExists},
	} {
		if _, _, err := m.AddMember(t.Context(), bad.urls, bad.learner); !errors.Is(err, bad.want) {
			t.Errorf("%v: %v, want %v", bad.urls, err, bad.want)
		}
	}
	if len(c.proposed) != 1 {
		t.Errorf("%d changes were proposed: a refused one is in everybody's log for ever", len(c.proposed))
	}
	// Removed and added again within a second: an ID never comes back.
	if _, err := m.RemoveMember(t.Context(), added.ID); err != nil {
		t.Fatal(err)
	}
	again, _, err := m.AddMember(t.Context(), added.PeerURLs, true)
	if err != nil || again.ID == added.ID {
		t.Errorf("added again: %v %v", again, err)
	}
	unhealthy := newFakeCluster(t, "1 2")
	if _, _, err := unhealthy.membership(1, true).AddMember(t.Context(), []string{"http://h:1"}, false); !errors.Is(err, member.ErrUnhealthy) {
		t.Errorf("strict: %v", err)
	}
	if _, _, err := unhealthy.membership(1, false).AddMember(t.Context(), []string{"http://h:1"}, false); err != nil {
		t.Errorf("not strict: %v", err)
	}
}

func TestRemoveAndUpdateMember(t *testing.T) {
	c := newFakeCluster(t, "1 2 3").connect(time.Minute, 2, 3)
	m := c.membership(1, true)
	if _, err := m.RemoveMember(t.Context(), 9); !errors.Is(err, member.ErrNotFound) {
		t.Errorf("unknown: %v", err)
	}
	if members, err := m.RemoveMember(t.Context(), 3); err != nil || len(members) != 2 {
		t.Errorf("%v %v", members, err)
	}
	if _, err := m.RemoveMember(t.Context(), 3); !errors.Is(err, member.ErrRemoved) {
		t.Errorf("twice: %v", err)
	}
	for _, bad := range []struct {
		id   uint64
		url  string
		want error
	}{{2, "h:1", member.ErrBadURL}, {2, peerURL(1), member.ErrPeerURLExists}, {9, "http://h:1", member.ErrNotFound}} {
		if _, err := m.UpdateMember(t.Context(), bad.id, []string{bad.url}); !errors.Is(err, bad.want) {
			t.Errorf("update of %d to %s: %v", bad.id, bad.url, err)
		}
	}
	members, err := m.UpdateMember(t.Context(), 2, []string{"http://h:1"})
	if err != nil || !slices.ContainsFunc(members, func(m *pb.Member) bool {
		return m.ID == 2 && slices.Equal(m.PeerURLs, []string{"http://h:1"}) && m.Name == "n"
	}) {
		t.Errorf("%v %v", members, err)
	}
	// Whoever is behind catches up before it refuses.
	c.caughtUp = func() error {
		c.apply(func(b *storage.Batch) error {
			_, err := c.table.ApplyConfChange(b, member.AddChange(0, member.Member{ID: 7, PeerURLs: []string{peerURL(7)}, IsLearner: true}))
			return err
		})
		c.caughtUp = func() error { return nil }
		return nil
	}
	if _, err := m.RemoveMember(t.Context(), 7); err != nil {
		t.Errorf("a member that was added a moment ago: %v", err)
	}
	c.caughtUp = func() error { return consensus.ErrTimeout }
	if _, err := m.RemoveMember(t.Context(), 8); !errors.Is(err, consensus.ErrTimeout) {
		t.Errorf("without a quorum: %v", err)
	}
	c.hold = true
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { _, err := m.UpdateMember(ctx, 2, []string{"http://h:2"}); ended <- err }()
	cancel()
	<-c.cancelled
	if err := <-ended; !errors.Is(err, consensus.ErrCanceled) {
		t.Errorf("called off: %v", err)
	}
}

func TestPromoteOnTheLeader(t *testing.T) {
	counted := newPromotionMetrics()
	for _, c := range []struct {
		what, members string
		id, match     uint64
		want          error
	}{
		{"ready", "1 2l", 2, 90, nil},
		{"not quite", "1 2l", 2, 89, member.ErrLearnerNotReady},
		{"empty log", "1 2l", 2, 0, member.ErrLearnerNotReady},
		{"raft does not know it yet", "1 3l", 3, 100, member.ErrLearnerNotReady},
		{"unknown", "1", 9, 100, member.ErrNotFound},
		{"a voter", "1 2", 2, 100, member.ErrNotLearner},
		{"the leader", "1", 1, 100, member.ErrNotLearner},
		{"few started", "1 4- 5- 2l", 2, 100, member.ErrNotEnoughStarted},
	} {
		cluster := newFakeCluster(t, c.members)
		cluster.progress = []consensus.Progress{{ID: 1, Match: 100}, {ID: 2, Learner: true, Match: c.match}}
		cluster.promotions = counted
		members, err := cluster.membership(1, true).PromoteMember(t.Context(), c.id, "")
		if !errors.Is(err, c.want) || err == nil && (members[1].IsLearner || string(cluster.proposed[0].GetContext()) != `{"id":2,"peerURLs":null,"isPromote":true}`) {
			t.Errorf("%s: %v %v, want %v", c.what, members, err, c.want)
		}
		if err != nil && len(cluster.proposed) > 0 {
			t.Errorf("%s was proposed", c.what)
		}
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(counted.collectors()...)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, one := range f.GetMetric() {
			name := f.GetName()
			for _, l := range one.GetLabel() {
				name += ", " + l.GetName() + " " + l.GetValue()
			}
			got[name] = one.GetCounter().GetValue()
		}
	}
	const failures = "etcd_server_learner_promote_failures, Reason "
	if want := map[string]float64{
		"etcd_server_learner_promote_successes":                                                 1,
		failures + "etcdserver: can only promote a learner member which is in sync with leader": 3,
		failures + "membership: ID not found":                                                   1,
		failures + "membership: can only promote a learner member":                              2,
		failures + "other": 1,
	}; !maps.Equal(got, want) {
		t.Errorf("counted %v, want %v", got, want)
	}
	// Readiness is no matter of strictness.
	c := newFakeCluster(t, "1 2l")
	if _, err := c.membership(1, false).PromoteMember(t.Context(), 2, ""); !errors.Is(err, member.ErrLearnerNotReady) {
		t.Errorf("not strict: %v", err)
	}
}

func TestPromoteOnAFollower(t *testing.T) {
	for _, e := range []struct{ theirs, ours error }{
		{peer.ErrMemberNotFound, member.ErrNotFound}, {peer.ErrNotLearner, member.ErrNotLearner}, {peer.ErrLearnerNotReady, member.ErrLearnerNotReady},
	} {
		c := newFakeCluster(t, "1 2 3l")
		c.lead(2)
		c.promote = func([]string, string) ([]peer.Member, error) { return nil, fmt.Errorf("%s: %w", peerURL(2), e.theirs) }
		if _, err := c.membership(1, true).PromoteMember(t.Context(), 3, ""); !errors.Is(err, e.ours) {
			t.Errorf("%v: %v", e.theirs, err)
		}
	}
	// No leader, then one that fails once, then one that does it.
	c := newFakeCluster(t, "1 2 3l")
	c.lead(0)
	calls := 0
	c.promote = func(urls []string, token string) ([]peer.Member, error) {
		if calls++; calls == 1 {
			return nil, errors.New("500 Internal Server Error")
		}
		if !slices.Equal(urls, []string{peerURL(2)}) || token != "secret" {
			t.Errorf("asked %v with %q", urls, token)
		}
		return []peer.Member{{ID: 1}, {ID: 2}, {ID: 3}}, nil
	}
	c.caughtUp = func() error { return consensus.ErrTimeout } // so the leader's list is all there is
	type answer struct {
		members []*pb.Member
		err     error
	}
	ended := make(chan answer, 1)
	go func() {
		members, err := c.membership(1, true).PromoteMember(t.Context(), 3, "secret")
		ended <- answer{members, err}
	}()
	c.clock.WaitAlarms(1)
	c.lead(2)
	c.clock.Advance(100 * time.Millisecond)
	c.clock.WaitAlarms(1)
	c.clock.Advance(100 * time.Millisecond)
	if a := <-ended; a.err != nil || len(a.members) != 3 || a.members[2].ID != 3 || a.members[2].IsLearner {
		t.Errorf("%v %v", a.members, a.err)
	}
	// Nobody leads, and time is up.
	c.lead(0)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := c.membership(1, true).PromoteMember(ctx, 3, ""); !errors.Is(err, consensus.ErrTimeout) {
		t.Errorf("late: %v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if _, err := c.membership(1, true).PromoteMember(ctx, 3, ""); !errors.Is(err, consensus.ErrCanceled) {
		t.Errorf("called off: %v", err)
	}
}

func TestMoveLeader(t *testing.T) {
	c := newFakeCluster(t, "1 2 3l")
	if err := c.membership(2, true).MoveLeader(t.Context(), 2); !errors.Is(err, rpc.ErrNotLeader) {
		t.Errorf("on a follower: %v", err)
	}
	m := c.membership(1, true)
	for _, bad := range []uint64{0, 3, 9} {
		if err := m.MoveLeader(t.Context(), bad); !errors.Is(err, rpc.ErrBadLeaderTransferee) {
			t.Errorf("to %d: %v", bad, err)
		}
	}
	if err := m.MoveLeader(t.Context(), 1); err != nil || len(c.moved) > 0 {
		t.Errorf("to itself: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- m.MoveLeader(t.Context(), 2) }()
	if to := <-c.moved; to != 2 {
		t.Errorf("moved to %d", to)
	}
	c.clock.Advance(100 * time.Millisecond)
	select {
	case err := <-ended:
		t.Errorf("ended before the target led: %v", err)
	default:
	}
	c.lead(2)
	for len(ended) == 0 { // the ticker drops rings that nobody waits for
		c.clock.Advance(100 * time.Millisecond)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	c.lead(1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := m.MoveLeader(ctx, 2); !errors.Is(err, rpc.ErrLeaderTransferTimeout) {
		t.Errorf("late: %v", err)
	}
}
