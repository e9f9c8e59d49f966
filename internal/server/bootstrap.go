package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-semver/semver"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/discovery"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/peer"
)

// birth is how a member without a log begins: as one of the founders of a new
// cluster, or with none of them when it joins one that runs.
type birth struct {
	id       identity
	founders []consensus.Founder
	// remotes are the members of the cluster that is joined, this one included.
	// They are who can be asked for the log before it says who the members are.
	remotes []peer.Member
}

// askMembers asks members of a cluster over their peer URLs: *peer.Client.
type askMembers interface {
	Members(ctx context.Context, url string) (clusterID uint64, members []peer.Member, err error)
	Version(ctx context.Context, urls []string) (peer.Versions, error)
	DowngradeEnabled(ctx context.Context, urls []string) (bool, error)
}

// hostResolver finds the addresses of a host: *net.Resolver.
type hostResolver interface {
	LookupHost(ctx context.Context, host string) ([]string, error)
}

const (
	probeTimeout   = time.Second      // of the question whether a member was bootstrapped before
	joinTimeout    = 10 * time.Second // of asking one URL who the members are
	resolveTimeout = 30 * time.Second // of waiting for names to become known
	resolvePause   = time.Second
)

// planBirth decides how a member without a log begins. The flags about the
// initial cluster mean nothing once there is one.
func planBirth(ctx context.Context, cfg *config.Config, ask askMembers, clk clock.Clock, log *slog.Logger) (birth, error) {
	p := birthPlan{
		name: cfg.Name, advertised: urlTexts(cfg.AdvertisePeer), token: cfg.InitialClusterToken, maxLearners: cmp.Or(cfg.MaxLearners, 1),
		version: config.EtcdVersion, ask: ask, resolver: net.DefaultResolver, clock: clk, log: log,
	}
	found := *cfg
	var err error
	switch {
	case cfg.DiscoverySRV != "":
		found.InitialCluster, err = discovery.SRV(ctx, discovery.SRVOptions{
			Domain: cfg.DiscoverySRV, ServiceSuffix: cfg.DiscoverySRVName, Name: cfg.Name, Advertised: cfg.AdvertisePeer,
			Resolver: net.DefaultResolver, Logger: log,
		})
	case len(cfg.Discovery.Endpoints) > 0 && cfg.InitialClusterState == "new":
		p.token = cfg.Discovery.Token
		found.InitialCluster, err = discovery.Join(ctx, discovery.Options{
			Token: cfg.Discovery.Token, Endpoints: cfg.Discovery.Endpoints,
			DialTimeout: cfg.Discovery.DialTimeout, RequestTimeout: cfg.Discovery.RequestTimeout,
			KeepaliveTime: cfg.Discovery.KeepaliveTime, KeepaliveTimeout: cfg.Discovery.KeepaliveEnd,
			Insecure: cfg.Discovery.Insecure, SkipVerify: cfg.Discovery.SkipVerify,
			CertFile: cfg.Discovery.Cert, KeyFile: cfg.Discovery.Key, CAFile: cfg.Discovery.CA,
			User: cfg.Discovery.User, Password: cfg.Discovery.Password, Clock: clk, Logger: log,
		}, member.FoundingID(p.advertised, p.token), clusterText([]config.Member{{Name: cfg.Name, PeerURLs: p.advertised}}))
	}
	if err != nil {
		return birth{}, err
	}
	if p.cluster, err = found.InitialMembers(); err != nil {
		return birth{}, err
	}
	if cfg.InitialClusterState == "existing" {
		return p.join(ctx)
	}
	return p.found(ctx)
}

// birthPlan is what a birth is decided by.
type birthPlan struct {
	name        string
	advertised  []string        // this member's peer URLs, sorted
	cluster     []config.Member // who founds the cluster, or who it consists of
	token       string
	maxLearners int
	version     string // etcd's, that this member is compatible with
	ask         askMembers
	resolver    hostResolver
	clock       clock.Clock
	log         *slog.Logger
}

// found founds a new cluster. Every founder computes the same from the same
// flags: their first entries are born committed.
func (p *birthPlan) found(ctx context.Context) (birth, error) {
	self, err := p.local()
	if err != nil {
		return birth{}, err
	}
	if err := p.checkAdvertised(ctx, self); err != nil {
		return birth{}, err
	}
	var b birth
	owner := map[uint64]string{}
	var ids []uint64
	for _, m := range p.cluster {
		id := member.FoundingID(m.PeerURLs, p.token)
		if other, taken := owner[id]; id == 0 || taken {
			return birth{}, fmt.Errorf("--initial-cluster=%s: member %s would have ID %x, as %q has: give another --initial-cluster-token than %q",
				clusterText(p.cluster), m.Name, id, other, p.token)
		}
		owner[id] = m.Name
		ids = append(ids, id)
		if m.Name == p.name {
			b.id.member = id
		}
		born := member.Context{Member: member.Member{ID: id, PeerURLs: m.PeerURLs, Name: m.Name}}
		b.founders = append(b.founders, consensus.Founder{ID: id, Context: born.Encode()})
	}
	slices.SortFunc(b.founders, func(a, b consensus.Founder) int { return cmp.Compare(a.ID, b.ID) })
	b.id.cluster = member.ClusterID(ids)
	return b, p.checkNotBootstrapped(ctx, b.id.member)
}

// local finds this member in the initial cluster.
func (p *birthPlan) local() (config.Member, error) {
	i := slices.IndexFunc(p.cluster, func(m config.Member) bool { return m.Name == p.name })
	if i < 0 {
		return config.Member{}, fmt.Errorf("couldn't find local name %q in the initial cluster configuration: --initial-cluster=%s must list this member under its --name",
			p.name, clusterText(p.cluster))
	}
	seen := map[string]bool{}
	for _, m := range p.cluster {
		for _, u := range m.PeerURLs {
			if seen[u] {
				return config.Member{}, fmt.Errorf("initial cluster %s has duplicate url: give each member of --initial-cluster peer URLs of its own, %s is there twice",
					clusterText(p.cluster), u)
			}
			seen[u] = true
		}
	}
	return p.cluster[i], nil
}

// checkAdvertised compares the peer URLs that this member tells the others with
// those that the initial cluster has for it.
func (p *birthPlan) checkAdvertised(ctx context.Context, self config.Member) error {
	same, why := p.sameURLs(ctx, p.advertised, self.PeerURLs, p.clock.Now().Add(resolveTimeout))
	if same {
		return nil
	}
	const cure = "give this member the same peer URLs in both"
	for _, u := range self.PeerURLs {
		if !slices.Contains(p.advertised, u) {
			return fmt.Errorf("--initial-cluster has %s but missing from --initial-advertise-peer-urls=%s (%v): %s",
				clusterText([]config.Member{self}), strings.Join(p.advertised, ","), why, cure)
		}
	}
	return fmt.Errorf("--initial-advertise-peer-urls has %s but missing from --initial-cluster=%s (%v): %s",
		strings.Join(p.advertised, ","), clusterText([]config.Member{self}), why, cure)
}

// checkNotBootstrapped asks the others whether this member has run before. Its
// data would be gone, and with them votes and entries that it answers for.
func (p *birthPlan) checkNotBootstrapped(ctx context.Context, self uint64) error {
	for _, u := range p.otherURLs() {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		_, members, err := p.ask.Members(ctx, u)
		cancel()
		if err != nil {
			continue // most likely not started yet
		}
		for _, m := range members {
			if m.ID == self && len(m.ClientURLs) > 0 {
				return fmt.Errorf("member %x has already been bootstrapped, says %s: start it with its old --data-dir, or remove it from the cluster, add it anew and use --initial-cluster-state=existing", self, u)
			}
		}
		return nil
	}
	return nil
}

// otherURLs are the peer URLs of all but this member, sorted.
func (p *birthPlan) otherURLs() []string {
	var out []string
	for _, m := range p.cluster {
		if m.Name != p.name {
			out = append(out, m.PeerURLs...)
		}
	}
	slices.Sort(out)
	return out
}

// join joins a cluster that runs, and that has this member in its list. Nothing
// is written: the leader sends the log.
func (p *birthPlan) join(ctx context.Context) (birth, error) {
	if _, err := p.local(); err != nil { // as in etcd, its peer URLs are those that the cluster has for it
		return birth{}, err
	}
	cluster, remotes, from, err := p.fetchMembers(ctx)
	if err != nil {
		return birth{}, err
	}
	self, err := p.match(ctx, remotes, from)
	if err != nil {
		return birth{}, err
	}
	if err := p.checkVersions(ctx, remotes, self.ID); err != nil {
		return birth{}, err
	}
	learners := 0
	for _, m := range remotes {
		if m.IsLearner {
			learners++
		}
	}
	if learners > p.maxLearners {
		return birth{}, fmt.Errorf("the cluster has %d learners, and --max-learners=%d: give the value that the other members have", learners, p.maxLearners)
	}
	if self.Name != "" {
		p.log.Warn("this member has run before and its data is gone: what it acknowledged may be lost to the cluster; remove it and add it anew instead",
			"member", fmt.Sprintf("%x", self.ID), "name", self.Name)
	}
	return birth{id: identity{cluster: cluster, member: self.ID}, remotes: remotes}, nil
}

// fetchMembers asks the other members, one URL after the other, who they are.
func (p *birthPlan) fetchMembers(ctx context.Context) (cluster uint64, members []peer.Member, from string, err error) {
	var failures []string
	for _, u := range p.otherURLs() {
		ctx, cancel := context.WithTimeout(ctx, joinTimeout)
		cluster, members, err := p.ask.Members(ctx, u)
		cancel()
		switch {
		case err != nil:
			failures = append(failures, fmt.Sprintf("%s: %v", u, err))
		case cluster == 0 || len(members) == 0:
			failures = append(failures, fmt.Sprintf("%s names no cluster or no members", u))
		default:
			return cluster, members, u, nil
		}
	}
	const text = "cannot fetch cluster info from peer urls: could not retrieve cluster information from the given URLs"
	if len(failures) == 0 {
		return 0, nil, "", fmt.Errorf("%s: --initial-cluster=%s names no other member: add the members that run, or use --initial-cluster-state=new",
			text, clusterText(p.cluster))
	}
	return 0, nil, "", fmt.Errorf("%s (%s): check that these members of --initial-cluster run and can be reached", text, strings.Join(failures, "; "))
}

// match finds for each member of the cluster the entry with its URLs, and
// returns the one that is this member.
func (p *birthPlan) match(ctx context.Context, remotes []peer.Member, from string) (self peer.Member, err error) {
	const cure = "list in --initial-cluster exactly the members of the cluster with their peer URLs, after this one was added to it"
	if len(remotes) != len(p.cluster) {
		return self, fmt.Errorf("error validating peerURLs: member count is unequal: --initial-cluster=%s has %d members, the cluster at %s has %d (%s): %s",
			clusterText(p.cluster), len(p.cluster), from, len(remotes), remoteText(remotes), cure)
	}
	left := slices.Clone(p.cluster)
	until := p.clock.Now().Add(resolveTimeout)
	for _, r := range remotes {
		urls := slices.Sorted(slices.Values(r.PeerURLs))
		i := slices.IndexFunc(left, func(m config.Member) bool { return slices.Equal(m.PeerURLs, urls) })
		var why error
		for j := 0; i < 0 && j < len(left); j++ {
			var same bool
			if same, why = p.sameURLs(ctx, left[j].PeerURLs, urls, until); same {
				i = j
			}
		}
		if i < 0 {
			return self, fmt.Errorf("error validating peerURLs: PeerURLs: no match found for existing member (%x, %v), last resolver error (%v): --initial-cluster=%s has nobody with these: %s",
				r.ID, urls, why, clusterText(p.cluster), cure)
		}
		if left[i].Name == p.name {
			self = r
		}
		left = slices.Delete(left, i, i+1)
	}
	return self, nil
}

// checkVersions checks that this member can read what the cluster writes.
func (p *birthPlan) checkVersions(ctx context.Context, remotes []peer.Member, self uint64) error {
	ours, err := semver.NewVersion(p.version)
	if err != nil {
		return fmt.Errorf("our own version %q: %w", p.version, err)
	}
	low, high := semver.Version{Major: 3}, semver.Version{Major: ours.Major, Minor: ours.Minor}
	decided := 0
	var found []semver.Version
	for _, m := range remotes {
		if m.ID == self {
			continue
		}
		versions, err := p.ask.Version(ctx, m.PeerURLs)
		if err != nil {
			p.log.Warn("a member does not tell its version", "member", fmt.Sprintf("%x", m.ID), "error", err)
			continue
		}
		if v, err := semver.NewVersion(versions.Cluster); err == nil {
			found = append(found, semver.Version{Major: v.Major, Minor: v.Minor})
			decided++
		}
		if on, err := p.ask.DowngradeEnabled(ctx, m.PeerURLs); err == nil && on {
			// Only who comes to replace the version above may join.
			low.Major, low.Minor = ours.Major, ours.Minor+1
			high = low
		}
	}
	if decided == 0 {
		return fmt.Errorf("incompatible with current running cluster: no member tells a cluster version: check that the members of --initial-cluster=%s have a leader", clusterText(p.cluster))
	}
	for _, v := range found {
		if v.LessThan(low) || high.LessThan(v) {
			return fmt.Errorf("incompatible with current running cluster: its version is %s, this member can join one from %s to %s: use a release that fits", minorText(v), minorText(low), minorText(high))
		}
	}
	return nil
}

func minorText(v semver.Version) string { return fmt.Sprintf("%d.%d", v.Major, v.Minor) }

// sameURLs says whether two sets of URLs are the same, or lead to the same
// addresses. Names that nobody knows yet are asked for again until the time is
// up; if the sets differ, why says how.
func (p *birthPlan) sameURLs(ctx context.Context, a, b []string, until time.Time) (same bool, why error) {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	if slices.Equal(a, b) {
		return true, nil
	}
	differ := fmt.Errorf("resolved urls: %q != %q", strings.Join(a, ","), strings.Join(b, ","))
	if len(a) != len(b) {
		return false, differ
	}
	left, err := p.resolveAll(ctx, b, until)
	if err != nil {
		return false, err
	}
	ours, err := p.resolveAll(ctx, a, until)
	if err != nil {
		return false, err
	}
	for _, u := range ours {
		i := slices.IndexFunc(left, func(v []string) bool {
			return slices.ContainsFunc(u, func(x string) bool { return slices.Contains(v, x) })
		})
		if i < 0 {
			return false, differ
		}
		left = slices.Delete(left, i, i+1)
	}
	return true, nil
}

func (p *birthPlan) resolveAll(ctx context.Context, urls []string, until time.Time) ([][]string, error) {
	out := make([][]string, len(urls))
	for i, u := range urls {
		var err error
		if out[i], err = p.resolve(ctx, u, until); err != nil {
			return nil, fmt.Errorf("failed to resolve %q (%w)", u, err)
		}
	}
	return out, nil
}

// resolve returns what a URL may be written as: itself with the host replaced by
// each of its addresses. "localhost" is left as it is.
func (p *birthPlan) resolve(ctx context.Context, text string, until time.Time) ([]string, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, err
	}
	host := u.Hostname()
	if u.Scheme == "unix" || u.Scheme == "unixs" || host == "localhost" || host == "" || net.ParseIP(host) != nil {
		return []string{text}, nil
	}
	for {
		addrs, err := p.resolver.LookupHost(ctx, host)
		if err == nil && len(addrs) > 0 {
			out := make([]string, len(addrs))
			for i, a := range addrs {
				out[i] = u.Scheme + "://" + net.JoinHostPort(a, u.Port())
			}
			return out, nil
		}
		if err == nil {
			err = errors.New("no address")
		}
		if !p.clock.Now().Add(resolvePause).Before(until) {
			return nil, err
		}
		p.log.Warn("a host of a peer URL is not known, trying again", "url", text, "error", err)
		if perr := pause(ctx, p.clock, resolvePause); perr != nil {
			return nil, errors.Join(err, perr)
		}
	}
}

// pause waits for a time, or returns why ctx ended before.
func pause(ctx context.Context, clk clock.Clock, d time.Duration) error {
	t := clk.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// clusterText is a cluster as --initial-cluster has it.
func clusterText(members []config.Member) string {
	var parts []string
	for _, m := range members {
		for _, u := range m.PeerURLs {
			parts = append(parts, m.Name+"="+u)
		}
	}
	return strings.Join(parts, ",")
}

func remoteText(members []peer.Member) string {
	var parts []string
	for _, m := range members {
		parts = append(parts, fmt.Sprintf("%x=%s", m.ID, strings.Join(m.PeerURLs, "+")))
	}
	return strings.Join(parts, ",")
}

// urlTexts are URLs as text, sorted.
func urlTexts(urls []url.URL) []string {
	out := make([]string, len(urls))
	for i := range urls {
		out[i] = urls[i].String()
	}
	slices.Sort(out)
	return out
}
