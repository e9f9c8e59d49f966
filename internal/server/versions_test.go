package server

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coreos/go-semver/semver"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/storage"
)

func TestNextVersion(t *testing.T) {
	for _, c := range []struct{ what, cluster, target, lowest, want string }{
		{"first, all told", "", "", "3.7.3", "3.7.0"},
		{"first, one older", "", "", "3.6.14", "3.6.0"},
		{"first, one did not tell", "", "", "", "3.0.0"},
		{"unknown changes nothing", "3.6.0", "", "", ""},
		{"the same", "3.7.0", "", "3.7.9", ""},
		{"up", "3.6.0", "", "3.7.0", "3.7.0"},
		{"up from the lowest", "3.0.0", "", "3.7.3", "3.7.0"},
		{"never down by itself", "3.7.0", "", "3.6.14", ""},
		{"not over a major version", "3.7.0", "", "4.0.0", ""},
		{"downgrade", "3.7.0", "3.6.0", "3.7.3", "3.6.0"},
		{"downgrade done", "3.6.0", "3.6.0", "3.7.3", ""},
		{"downgrade done, members too", "3.6.0", "3.6.0", "3.6.14", ""},
		{"downgrade by two", "3.7.0", "3.5.0", "3.7.3", ""},
		{"downgrade with a member below already", "3.7.0", "3.6.0", "3.6.1", ""},
		{"downgrade, one did not tell", "3.7.0", "3.6.0", "", ""},
		{"downgrade to nonsense", "3.7.0", "x", "3.7.3", ""},
		{"no upgrade while downgrading", "3.6.0", "3.6.0", "3.8.0", ""},
	} {
		var low *semver.Version
		if c.lowest != "" {
			low = semver.New(c.lowest)
		}
		if got := nextVersion(c.cluster, member.Downgrade{Target: c.target, Enabled: c.target != ""}, low); got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
}

// fakeTeller tells versions by peer URL; who is not there does not answer.
type fakeTeller map[string]peer.Versions

func (f fakeTeller) Version(_ context.Context, urls []string) (peer.Versions, error) {
	if v, ok := f[urls[0]]; ok {
		return v, nil
	}
	return peer.Versions{}, errors.New("connection refused")
}

// meanwhile lets do happen once, when the members have been asked and none has
// answered. They are asked at the same time, from goroutines of their own.
func meanwhile(do func(), ask fakeTeller) versionTeller {
	return busyTeller{sync.OnceFunc(do), ask}
}

type busyTeller struct {
	do  func()
	ask fakeTeller
}

func (b busyTeller) Version(ctx context.Context, urls []string) (peer.Versions, error) {
	b.do()
	return b.ask.Version(ctx, urls)
}

// versionsOf is member 1's part of a cluster, whose proposals are applied at
// once and told to the test.
func versionsOf(c *fakeCluster, ask fakeTeller, proposed chan proto.Message) *versions {
	return &versions{
		self: 1, requestTimeout: 7 * time.Second, root: c.Root, leads: func() bool { return c.Leader() == 1 },
		caughtUp: func(context.Context) error { return c.caughtUp() }, ask: ask, clock: c.clock, log: slog.New(slog.DiscardHandler), wake: make(chan struct{}, 1),
		setLevel: func(_ context.Context, l command.FeatureLevel) error {
			c.apply(func(b *storage.Batch) error { return c.table.SetFeatureLevel(b, l.Level, l.Fingerprint) })
			return nil
		},
		propose: func(_ context.Context, _ command.Kind, msg proto.Message) error {
			c.apply(func(b *storage.Batch) error {
				switch m := msg.(type) {
				case *membershippb.ClusterVersionSetRequest:
					return c.table.SetVersion(b, m)
				case *membershippb.DowngradeInfoSetRequest:
					c.table.SetDowngrade(b, m)
				}
				return nil
			})
			proposed <- msg
			return nil
		},
	}
}

// TestVersionsOfACluster follows a cluster from its first version over an
// upgrade to the end of a downgrade.
func TestVersionsOfACluster(t *testing.T) {
	c := newFakeCluster(t, "1 2 3l")
	ask := fakeTeller{}
	proposed := make(chan proto.Message, 1)
	v := versionsOf(c, ask, proposed)
	round := func(work func(context.Context) error) proto.Message {
		t.Helper()
		if err := work(t.Context()); err != nil {
			t.Fatal(err)
		}
		select {
		case msg := <-proposed:
			return msg
		default:
			return nil
		}
	}
	setTo := func(msg proto.Message) string {
		r, _ := msg.(*membershippb.ClusterVersionSetRequest)
		return r.GetVer()
	}

	if got := setTo(round(v.decide)); got != "3.0.0" {
		t.Errorf("while nobody answers the version is %q", got)
	}
	if c.Root().Version() != "3.0.0" || tellVersions(c.Root()).Storage != "unknown" {
		t.Errorf("%+v", tellVersions(c.Root()))
	}
	ask[peerURL(2)] = peer.Versions{Server: "3.6.14"}
	if got := round(v.decide); got != nil {
		t.Errorf("a learner does not answer, and %v was proposed", got)
	}
	ask[peerURL(3)] = peer.Versions{Server: "3.7.3", Engram: "0.1.0"}
	if got := setTo(round(v.decide)); got != "3.6.0" || c.Root().FeatureLevel() != 0 {
		t.Errorf("with an older member: %q", got)
	}
	ask[peerURL(2)] = peer.Versions{Server: "3.7.3", Engram: "0.1.0"}
	if got := setTo(round(v.decide)); got != "3.7.0" || c.Root().FeatureLevel() != 1 {
		t.Errorf("after its upgrade: %q, feature level %d", got, c.Root().FeatureLevel())
	}
	if got := tellVersions(c.Root()); got.Cluster != "3.7.0" || got.Storage != "3.7.0" || got.Server != "3.7.3" || got.Engram == "" {
		t.Errorf("told are %+v", got)
	}

	if got, err := v.Downgrade(t.Context(), pb.DowngradeRequest_ENABLE, "3.6"); err != nil || got != "3.7" {
		t.Fatalf("%q %v", got, err)
	}
	if r := (<-proposed).(*membershippb.DowngradeInfoSetRequest); !r.Enabled || r.Ver != "3.6.0" {
		t.Errorf("proposed %v", r)
	}
	if len(v.wake) != 1 {
		t.Error("the cluster version is not looked at")
	}
	if got := setTo(round(v.decide)); got != "3.6.0" {
		t.Errorf("in the downgrade: %q", got)
	}
	for _, u := range []uint64{2, 3} {
		ask[peerURL(u)] = peer.Versions{Server: "3.6.14"}
	}
	if got := round(v.endDowngrade); got != nil { // this member is still of the version above
		t.Errorf("%v", got)
	}
	if downgraded(c.Root(), "3.6.0", map[uint64]peer.Versions{1: {Server: "3.6.14"}, 2: {Server: "3.6.1"}}) {
		t.Error("a downgrade ended without member 3")
	}
	if !downgraded(c.Root(), "3.6.0", map[uint64]peer.Versions{1: {Server: "3.6.14"}, 2: {Server: "3.6.1"}, 3: {Server: "3.6.0"}}) {
		t.Error("a downgrade does not end")
	}
	// A version is not lowered because of what was so when the question went out.
	v.ask = meanwhile(func() { c.downgrade("").version("3.7.0") }, ask)
	c.downgrade("3.6.0").version("3.7.0")
	if got := round(v.decide); got != nil {
		t.Errorf("after the downgrade was cancelled %v was proposed", got)
	}
	v.ask = ask
}

// TestFeatureLevelOfACluster follows the level with those who come, go, and do not
// answer.
func TestFeatureLevelOfACluster(t *testing.T) {
	engram, etcd := peer.Versions{Server: "3.7.3", Engram: "0.1.0"}, peer.Versions{Server: "3.7.3"}
	c := newFakeCluster(t, "1 2").version("3.7.0")
	ask := fakeTeller{}
	v := versionsOf(c, ask, make(chan proto.Message, 1))
	var proposed []uint64
	apply := v.setLevel
	v.setLevel = func(ctx context.Context, l command.FeatureLevel) error {
		proposed = append(proposed, l.Level)
		return apply(ctx, l)
	}
	change := func(cc *raftpb.ConfChange) {
		t.Helper()
		c.apply(func(b *storage.Batch) error { _, err := c.table.ApplyConfChange(b, cc); return err })
	}
	round := func(what string, level uint64, proposals ...uint64) {
		t.Helper()
		proposed = nil
		if err := v.decide(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := c.Root().FeatureLevel(); got != level || !slices.Equal(proposed, proposals) {
			t.Errorf("%s: level %d, proposed %v; want %d, %v", what, got, proposed, level, proposals)
		}
	}

	round("one does not answer", 0)
	ask[peerURL(2)] = etcd
	round("one is an etcd", 0)
	ask[peerURL(2)] = engram
	c.lead(2)
	round("this one does not lead", 0)
	c.lead(1)
	round("all are Engram", 1, 1)
	round("nothing is new", 1)
	delete(ask, peerURL(2))
	round("one is away", 1)
	ask[peerURL(2)] = engram

	change(member.AddChange(0, member.Member{ID: 3, PeerURLs: []string{peerURL(3)}, IsLearner: true}))
	round("a new one has not started", 0)
	ask[peerURL(3)] = etcd
	round("the new one is an etcd", 0)
	// While the members are asked, the etcd goes and another comes in its place.
	ask[peerURL(3)] = engram
	v.ask = meanwhile(func() {
		change(member.RemoveChange(0, 3))
		change(member.AddChange(0, member.Member{ID: 4, PeerURLs: []string{peerURL(3)}, IsLearner: true}))
	}, ask)
	round("one that was not asked is there", 0)
	v.ask = ask
	round("it is an Engram", 1, 1)

	// The proposal comes after another membership change.
	change(member.RemoveChange(0, 4))
	change(member.AddChange(0, member.Member{ID: 5, PeerURLs: []string{peerURL(3)}, IsLearner: true}))
	v.setLevel = func(ctx context.Context, l command.FeatureLevel) error {
		proposed = append(proposed, l.Level)
		change(member.RemoveChange(0, 5))
		return apply(ctx, l)
	}
	round("it was found for others", 0, 1)
	v.setLevel = func(ctx context.Context, l command.FeatureLevel) error {
		proposed = append(proposed, l.Level)
		return apply(ctx, l)
	}
	round("and then for those who are there", 1, 1)
	ask[peerURL(2)] = etcd
	round("one turned into an etcd", 0, 0)
}

func TestDowngradeRules(t *testing.T) {
	const valid, enable, cancel = pb.DowngradeRequest_VALIDATE, pb.DowngradeRequest_ENABLE, pb.DowngradeRequest_CANCEL
	for _, c := range []struct {
		action          pb.DowngradeRequest_DowngradeAction
		version, target string
		want            error
	}{
		{valid, "3.6", "", nil}, {valid, "3.6.0", "", nil}, {valid, "3.6.1", "", nil},
		{valid, "3.5", "", member.ErrInvalidDowngradeTarget}, {valid, "3.7", "", member.ErrInvalidDowngradeTarget}, {valid, "4.6", "", member.ErrInvalidDowngradeTarget},
		{valid, "x", "", member.ErrInvalidVersionFormat}, {valid, "3", "", member.ErrInvalidVersionFormat}, {valid, "", "", member.ErrInvalidVersionFormat},
		{valid, "3.6.0.1", "", member.ErrInvalidVersionFormat}, {valid, "v3.6", "", member.ErrInvalidVersionFormat},
		{valid, "3.6", "3.6.0", member.ErrDowngradeInProcess}, {enable, "3.6", "3.6.0", member.ErrDowngradeInProcess},
		{valid, "3.5", "3.6.0", member.ErrInvalidDowngradeTarget}, // as etcd, the target comes first
		{enable, "3.5", "", member.ErrInvalidDowngradeTarget}, {enable, "3.6", "", nil},
		{cancel, "", "", nil}, {cancel, "", "3.6.0", nil},
	} {
		cluster := newFakeCluster(t, "1").version("3.7.0").downgrade(c.target)
		proposed := make(chan proto.Message, 1)
		v := versionsOf(cluster, nil, proposed)
		got, err := v.Downgrade(t.Context(), c.action, c.version)
		if !errors.Is(err, c.want) || err == nil && got != "3.7" {
			t.Errorf("%v %q in a downgrade to %q: %q %v, want %v", c.action, c.version, c.target, got, err, c.want)
		}
		if changes := c.want == nil && (c.action == enable || c.action == cancel && c.target != ""); changes != (len(proposed) == 1) {
			t.Errorf("%v %q in a downgrade to %q: %d proposals", c.action, c.version, c.target, len(proposed))
		}
		if c.action == cancel && cluster.Root().Downgrade().Enabled {
			t.Error("a cancelled downgrade goes on")
		}
	}
	undecided := versionsOf(newFakeCluster(t, "1"), nil, nil)
	for _, action := range []pb.DowngradeRequest_DowngradeAction{valid, enable, cancel} {
		if _, err := undecided.Downgrade(t.Context(), action, "3.6"); !errors.Is(err, member.ErrNoClusterVersion) {
			t.Errorf("%v before there is a version: %v", action, err)
		}
	}
}

// TestVersionsRun: work is done by the clock and when woken, by the leader only.
func TestVersionsRun(t *testing.T) {
	c := newFakeCluster(t, "1")
	proposed := make(chan proto.Message, 1)
	v := versionsOf(c, nil, proposed)
	if err := v.decideLevel(t.Context(), c.Root(), map[uint64]peer.Versions{1: {Engram: "0.1.0"}}); err != nil || c.Root().FeatureLevel() == 0 {
		t.Fatal("the level does not stay as it is below", err)
	}
	looked := make(chan bool)
	v.leads = func() bool { leads := c.Leader() == 1; looked <- leads; return leads }
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { v.Run(ctx); close(ended) }()
	c.clock.WaitAlarms(2)
	c.lead(2)
	v.Wake()
	if <-looked {
		t.Error("a follower works")
	}
	c.lead(1)
	c.clock.Advance(versionInterval)
	<-looked // before the round
	<-looked // before the proposal
	if r := (<-proposed).(*membershippb.ClusterVersionSetRequest); r.Ver != "3.7.0" {
		t.Errorf("%v", r)
	}
	c.downgrade("3.7.0") // which every member runs
	c.clock.Advance(downgradeInterval - versionInterval)
	<-looked
	<-looked
	if r := (<-proposed).(*membershippb.DowngradeInfoSetRequest); r.Enabled {
		t.Errorf("%v", r)
	}
	cancel()
	<-ended
}
