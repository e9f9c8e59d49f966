package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/peer"
)

// fakePeers are the members that a plan asks, by URL.
type fakePeers struct {
	cluster   uint64
	members   []peer.Member
	up        []string // URLs that answer
	version   string
	downgrade bool
	asked     []string
}

func (f *fakePeers) Members(_ context.Context, url string) (uint64, []peer.Member, error) {
	f.asked = append(f.asked, url)
	if !slices.Contains(f.up, url) {
		return 0, nil, errors.New("connection refused")
	}
	return f.cluster, f.members, nil
}

func (f *fakePeers) Version(_ context.Context, urls []string) (peer.Versions, error) {
	if !slices.ContainsFunc(urls, func(u string) bool { return slices.Contains(f.up, u) }) {
		return peer.Versions{}, errors.New("connection refused")
	}
	return peer.Versions{Server: "3.7.3", Cluster: f.version}, nil
}

func (f *fakePeers) DowngradeEnabled(context.Context, []string) (bool, error) {
	return f.downgrade, nil
}

// fakeNames resolves hosts; one that is not there is unknown.
type fakeNames map[string][]string

func (f fakeNames) LookupHost(_ context.Context, host string) ([]string, error) {
	if a, ok := f[host]; ok {
		return a, nil
	}
	return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
}

func plan(t *testing.T, name, advertised, cluster string, ask *fakePeers) *birthPlan {
	t.Helper()
	members, err := (&config.Config{InitialCluster: cluster}).InitialMembers()
	if err != nil {
		t.Fatal(err)
	}
	return &birthPlan{
		name: name, advertised: slices.Sorted(strings.SplitSeq(advertised, ",")), cluster: members, token: "etcd-cluster", maxLearners: 1,
		version: config.EtcdVersion, ask: ask, resolver: fakeNames{}, clock: clock.NewFake(time.Unix(0, 0)), log: slog.New(slog.DiscardHandler),
	}
}

const three = "a=http://127.0.0.1:47001,b=http://127.0.0.1:47002,c=http://127.0.0.1:47003"

// TestFoundLikeEtcd compares with the first entries of a live etcd cluster,
// started with the same flags.
func TestFoundLikeEtcd(t *testing.T) {
	want := []string{
		`1e6b0208996cb577 {"id":2191847879602910583,"peerURLs":["http://127.0.0.1:47003"],"name":"c"}`,
		`3b7eaae1345643c9 {"id":4287051779525723081,"peerURLs":["http://127.0.0.1:47001"],"name":"a"}`,
		`9c2a03e1ef2e7a12 {"id":11252810887853931026,"peerURLs":["http://127.0.0.1:47002"],"name":"b"}`,
	}
	for i, name := range []string{"a", "b", "c"} {
		p := plan(t, name, fmt.Sprintf("http://127.0.0.1:4700%d", i+1), three, &fakePeers{})
		b, err := p.found(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, f := range b.founders {
			got = append(got, fmt.Sprintf("%x %s", f.ID, f.Context))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s founds\n%s\nwant\n%s", name, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		self := map[string]uint64{"a": 0x3b7eaae1345643c9, "b": 0x9c2a03e1ef2e7a12, "c": 0x1e6b0208996cb577}[name]
		if !b.id.equal(identity{cluster: 0xd36eb73548d3a8c3, member: self}) || b.remotes != nil {
			t.Errorf("%s is member %x of cluster %x", name, b.id.member, b.id.cluster)
		}
	}
	// Several URLs, in whatever order they are given.
	b, err := plan(t, "a", "http://127.0.0.1:47611,http://127.0.0.1:47601", "a=http://127.0.0.1:47611,a=http://127.0.0.1:47601", &fakePeers{}).found(t.Context())
	if err != nil || !b.id.equal(identity{cluster: 18424141692313399233, member: 6246892036133268603}) ||
		string(b.founders[0].Context) != `{"id":6246892036133268603,"peerURLs":["http://127.0.0.1:47601","http://127.0.0.1:47611"],"name":"a"}` {
		t.Errorf("two URLs: %+v %v", b, err)
	}
}

func TestFoundRefusals(t *testing.T) {
	bootstrapped := &fakePeers{up: []string{"http://127.0.0.1:47002"}, members: []peer.Member{{ID: 0x3b7eaae1345643c9, ClientURLs: []string{"http://c"}}}}
	for _, c := range []struct{ what, name, advertised, cluster, want string }{
		{"name", "zz", "http://127.0.0.1:47001", three, `couldn't find local name "zz" in the initial cluster configuration`},
		{"duplicate", "a", "http://h:1", "a=http://h:1,b=http://h:1", "initial cluster a=http://h:1,b=http://h:1 has duplicate url"},
		{"other URL", "a", "http://127.0.0.1:47005", "a=http://127.0.0.1:47006",
			`--initial-cluster has a=http://127.0.0.1:47006 but missing from --initial-advertise-peer-urls=http://127.0.0.1:47005 (resolved urls: "http://127.0.0.1:47005" != "http://127.0.0.1:47006")`},
		{"one URL more", "a", "http://127.0.0.1:47001,http://127.0.0.1:47009", three, "--initial-advertise-peer-urls has http://127.0.0.1:47001,http://127.0.0.1:47009 but missing from --initial-cluster=a=http://127.0.0.1:47001"},
		{"localhost", "a", "http://localhost:1", "a=http://127.0.0.1:1", "missing from --initial-advertise-peer-urls"},
		{"bootstrapped", "a", "http://127.0.0.1:47001", three, "member 3b7eaae1345643c9 has already been bootstrapped"},
	} {
		_, err := plan(t, c.name, c.advertised, c.cluster, bootstrapped).found(t.Context())
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v\nwant %s", c.what, err, c.want)
		}
	}
	// Who has not told client URLs has not run; who does not answer says nothing.
	bootstrapped.members[0].ClientURLs = nil
	for _, up := range [][]string{{"http://127.0.0.1:47002"}, nil} {
		bootstrapped.up, bootstrapped.asked = up, nil
		if _, err := plan(t, "a", "http://127.0.0.1:47001", three, bootstrapped).found(t.Context()); err != nil {
			t.Error(err)
		}
		if slices.Contains(bootstrapped.asked, "http://127.0.0.1:47001") || len(bootstrapped.asked) != 2-len(up) {
			t.Errorf("with %v up, %v were asked", up, bootstrapped.asked)
		}
	}
}

// TestNamesBecomeKnown: a peer URL's host may be published after the start.
func TestNamesBecomeKnown(t *testing.T) {
	p := plan(t, "a", "http://a.example:1", "a=http://10.0.0.1:1", &fakePeers{})
	clk := p.clock.(*clock.Fake)
	names := fakeNames{}
	p.resolver = names
	found := make(chan error, 1)
	go func() { _, err := p.found(t.Context()); found <- err }()
	clk.WaitAlarms(1)
	names["a.example"] = []string{"10.0.0.9", "10.0.0.1"}
	clk.Advance(resolvePause)
	if err := <-found; err != nil {
		t.Error(err)
	}
	delete(names, "a.example")
	go func() { _, err := p.found(t.Context()); found <- err }()
	for range int(resolveTimeout/resolvePause) - 1 {
		clk.WaitAlarms(1)
		clk.Advance(resolvePause)
	}
	if err := <-found; err == nil || !strings.Contains(err.Error(), `failed to resolve "http://a.example:1" (lookup a.example: no such host)`) {
		t.Errorf("a host that nobody knows: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { _, err := p.found(ctx); found <- err }()
	clk.WaitAlarms(1)
	cancel()
	if err := <-found; err == nil {
		t.Error("a start that was called off went on")
	}
}

func TestJoin(t *testing.T) {
	running := []peer.Member{
		{ID: 1, PeerURLs: []string{"http://10.0.0.1:1"}, Name: "one", ClientURLs: []string{"http://c"}},
		{ID: 2, PeerURLs: []string{"http://10.0.0.2:1", "http://10.0.0.2:2"}, Name: "two", ClientURLs: []string{"http://c"}},
		{ID: 3, PeerURLs: []string{"http://10.0.0.3:1"}, IsLearner: true},
	}
	const flags = "a=http://10.0.0.1:1,b=http://10.0.0.2:2,b=http://10.0.0.2:1,c=http://10.0.0.3:1"
	up := []string{"http://10.0.0.2:1"} // the first that is asked is down
	base := fakePeers{cluster: 77, members: running, up: up, version: "3.7.0"}
	with := func(change func(*fakePeers)) *fakePeers { f := base; change(&f); return &f }
	for _, c := range []struct {
		what, cluster string
		peers         *fakePeers
		names         fakeNames
		want          string // an error; empty for member 3 of cluster 77
	}{
		{"same URLs", flags, &base, nil, ""},
		{"a host name", "a=http://one.example:1,b=http://10.0.0.2:2,b=http://10.0.0.2:1,c=http://10.0.0.3:1", &base, fakeNames{"one.example": {"10.0.0.1"}}, ""},
		{"own name", strings.Replace(flags, "c=", "d=", 1), &base, nil, `couldn't find local name "c"`},
		{"duplicate", "a=http://h:1,c=http://h:1", &base, nil, "has duplicate url"},
		{"count", "a=http://10.0.0.1:1,b=http://10.0.0.2:1,c=http://10.0.0.3:1,d=http://10.0.0.4:1", &base, nil, "member count is unequal"},
		{"one of two URLs", strings.Replace(flags, "b=http://10.0.0.2:2,", "", 1), &base, nil, "no match found for existing member (2, [http://10.0.0.2:1 http://10.0.0.2:2])"},
		{"other port", strings.Replace(flags, "10.0.0.3:1", "10.0.0.3:9", 1), &base, nil, "no match found for existing member (3, [http://10.0.0.3:1])"},
		{"two with the URLs of one", flags, with(func(f *fakePeers) {
			f.members = slices.Clone(running)
			f.members[2].PeerURLs = running[0].PeerURLs
		}), nil, "no match found for existing member (3, [http://10.0.0.1:1])"},
		{"nobody answers", flags, with(func(f *fakePeers) { f.up = nil }), nil, "cannot fetch cluster info from peer urls: could not retrieve cluster information from the given URLs"},
		{"alone", "c=http://10.0.0.3:1", &base, nil, "names no other member"},
		{"no cluster ID", flags, with(func(f *fakePeers) { f.cluster = 0 }), nil, "names no cluster"},
		{"newer cluster", flags, with(func(f *fakePeers) { f.version = "3.8.0" }), nil, "incompatible with current running cluster: its version is 3.8, this member can join one from 3.0 to 3.7"},
		{"ancient cluster", flags, with(func(f *fakePeers) { f.version = "2.3.0" }), nil, "incompatible with current running cluster"},
		{"older cluster", flags, with(func(f *fakePeers) { f.version = "3.6.0" }), nil, ""},
		{"no version", flags, with(func(f *fakePeers) { f.version = "not_decided" }), nil, "no member tells a cluster version"},
		{"downgrade from the version above", flags, with(func(f *fakePeers) { f.version, f.downgrade = "3.8.0", true }), nil, ""},
		{"downgrade from ours", flags, with(func(f *fakePeers) { f.downgrade = true }), nil, "its version is 3.7, this member can join one from 3.8 to 3.8"},
		{"learners", flags, with(func(f *fakePeers) {
			f.members = slices.Clone(running)
			f.members[0].IsLearner = true
		}), nil, "the cluster has 2 learners, and --max-learners=1"},
	} {
		p := plan(t, "c", "http://elsewhere:1", c.cluster, c.peers) // as in etcd, what is advertised does not matter here
		if c.names != nil {
			p.resolver = c.names
		}
		b, err := p.join(t.Context())
		switch {
		case c.want == "" && (err != nil || !b.id.equal(identity{cluster: 77, member: 3}) || b.founders != nil || len(b.remotes) != 3):
			t.Errorf("%s: %+v %v", c.what, b, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v\nwant %s", c.what, err, c.want)
		}
	}
}

// TestPlanBirth goes from the flags to the plan.
func TestPlanBirth(t *testing.T) {
	peers := &fakePeers{cluster: 7, version: "3.7.0", up: []string{"http://127.0.0.1:47002"}, members: []peer.Member{
		{ID: 1, PeerURLs: []string{"http://127.0.0.1:47001"}}, {ID: 2, PeerURLs: []string{"http://127.0.0.1:47002"}, Name: "b"}, {ID: 3, PeerURLs: []string{"http://127.0.0.1:47003"}, Name: "c"},
	}}
	planOf := func(flags ...string) (birth, error) {
		t.Helper()
		cfg, err := config.Parse("engram", append([]string{"--name=a", "--initial-advertise-peer-urls=http://127.0.0.1:47001"}, flags...), nil)
		if err != nil {
			t.Fatal(err)
		}
		return planBirth(t.Context(), cfg, peers, clock.Real(), slog.New(slog.DiscardHandler))
	}
	b, err := planOf("--initial-cluster=" + three)
	if err != nil || len(b.founders) != 3 || b.id.cluster != 0xd36eb73548d3a8c3 {
		t.Errorf("new: %+v %v", b, err)
	}
	other, err := planOf("--initial-cluster="+three, "--initial-cluster-token=other")
	if err != nil || other.id.cluster == b.id.cluster || other.id.member == b.id.member {
		t.Errorf("another token: %+v %v", other, err)
	}
	if alone, err := planOf(); err != nil || len(alone.founders) != 1 || alone.id.member != b.id.member {
		t.Errorf("the default, alone: %+v %v", alone, err)
	}
	if joined, err := planOf("--initial-cluster="+three, "--initial-cluster-state=existing"); err != nil || joined.founders != nil || !joined.id.equal(identity{cluster: 7, member: 1}) {
		t.Errorf("existing: %+v %v", joined, err)
	}
	if _, err := planOf("--initial-cluster=a"); err == nil {
		t.Error("nonsense was planned")
	}
}
