package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/coreos/go-semver/semver"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/peer"
)

const (
	// versionInterval is between two rounds of asking the members for their
	// versions, downgradeInterval between two looks whether a downgrade is done.
	versionInterval   = 4 * time.Second
	downgradeInterval = 5 * time.Second
	// lowestVersion is the cluster version while not all members tell theirs.
	lowestVersion = "3.0.0"
)

// versions decides, on the leader, what the cluster's version is, and its feature
// level: what all its members understand. It is where a downgrade begins and ends.
type versions struct {
	self              uint64
	requestTimeout    time.Duration
	downgradeInterval time.Duration // 0 is etcd's

	root     func() *member.Root
	leads    func() bool // this member leads, and has applied all that came before its term
	caughtUp func(ctx context.Context) error
	propose  func(ctx context.Context, kind command.Kind, msg proto.Message) error // returns once it is applied here
	setLevel func(ctx context.Context, l command.FeatureLevel) error               // likewise
	ask      versionTeller
	clock    clock.Clock
	log      *slog.Logger

	wake chan struct{} // capacity 1
}

// versionTeller asks a member for its versions: *peer.Client.
type versionTeller interface {
	Version(ctx context.Context, urls []string) (peer.Versions, error)
}

// Wake has the versions looked at now: leadership was confirmed, or the members
// or the cluster version changed. It does not block.
func (v *versions) Wake() { notify(v.wake) }

// Run works until ctx ends, while this member leads.
func (v *versions) Run(ctx context.Context) {
	rounds := v.clock.NewTicker(versionInterval)
	defer rounds.Stop()
	downgrades := v.clock.NewTicker(cmp.Or(v.downgradeInterval, downgradeInterval))
	defer downgrades.Stop()
	for {
		var work func(context.Context) error
		select {
		case <-ctx.Done():
			return
		case <-v.wake:
			work = v.decide
		case <-rounds.C():
			work = v.decide
		case <-downgrades.C():
			work = v.endDowngrade
		}
		if !v.leads() {
			continue
		}
		if err := work(ctx); err != nil && ctx.Err() == nil {
			v.log.Warn("setting the cluster version or feature level failed, trying again", "error", err)
		}
	}
}

// decide proposes a cluster version and a feature level if there are to be other ones.
func (v *versions) decide(ctx context.Context) error {
	told := v.askAll(ctx, v.root())
	root := v.root() // the answers took their time; who came meanwhile has not told anything
	return errors.Join(v.decideVersion(ctx, root, told), v.decideLevel(ctx, root, told))
}

func (v *versions) decideVersion(ctx context.Context, root *member.Root, told map[uint64]peer.Versions) error {
	next := nextVersion(root.Version(), root.Downgrade(), lowest(root, told))
	if next == "" || !v.leads() {
		return nil
	}
	v.log.Info("the cluster version is to change", "from", root.Version(), "to", next)
	return v.propose(ctx, command.KindClusterVersionSet, &membershippb.ClusterVersionSetRequest{Ver: next})
}

// decideLevel proposes the feature level for the membership that was asked. If
// there is another one when the proposal is applied, it does nothing.
func (v *versions) decideLevel(ctx context.Context, root *member.Root, told map[uint64]peer.Versions) error {
	next := nextLevel(root, told)
	if next == root.FeatureLevel() || !v.leads() {
		return nil
	}
	return v.setLevel(ctx, command.FeatureLevel{Level: next, Fingerprint: root.Fingerprint()})
}

// nextLevel is the feature level that all members know. It goes up only if all of
// them told what they are; one that is no Engram is enough for it to go down.
func nextLevel(root *member.Root, told map[uint64]peer.Versions) uint64 {
	level, all := uint64(member.FeatureLevel), true
	for _, m := range root.List() {
		if said, ok := told[m.ID]; ok {
			level = min(level, levelOfVersion(said.Engram))
		} else {
			all = false
		}
	}
	if level > root.FeatureLevel() && !all {
		return root.FeatureLevel()
	}
	return level
}

// levelOfVersion is the feature level that a version of Engram knows. All that
// there are know 1.
func levelOfVersion(engram string) uint64 {
	if engram == "" {
		return 0
	}
	return 1
}

// askAll asks all members, learners too, at the same time. Who does not answer
// is missing from the result.
func (v *versions) askAll(ctx context.Context, root *member.Root) map[uint64]peer.Versions {
	ctx, cancel := context.WithTimeout(ctx, v.requestTimeout)
	defer cancel()
	told := map[uint64]peer.Versions{}
	var mu sync.Mutex
	var asking sync.WaitGroup
	for _, m := range root.List() {
		if m.ID == v.self {
			mu.Lock()
			told[m.ID] = tellVersions(root)
			mu.Unlock()
			continue
		}
		asking.Go(func() {
			said, err := v.ask.Version(ctx, m.PeerURLs)
			if err != nil {
				v.log.Warn("a member does not tell its version", "member", fmt.Sprintf("%x", m.ID), "error", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			told[m.ID] = said
		})
	}
	asking.Wait()
	return told
}

// lowest is the lowest server version, or nil if a member did not tell one.
func lowest(root *member.Root, told map[uint64]peer.Versions) *semver.Version {
	var low *semver.Version
	for _, m := range root.List() {
		s, err := semver.NewVersion(told[m.ID].Server)
		if err != nil {
			return nil
		}
		if low == nil || s.LessThan(*low) {
			low = s
		}
	}
	return low
}

// nextVersion is the cluster version to propose, empty if it stays. It goes down
// in a downgrade only, and then by one minor version.
func nextVersion(cluster string, d member.Downgrade, low *semver.Version) string {
	if cluster == "" && low == nil {
		return lowestVersion
	}
	if low == nil {
		return ""
	}
	if cluster == "" {
		return minorVersion(low.Major, low.Minor)
	}
	now, err := semver.NewVersion(cluster)
	if err != nil {
		return ""
	}
	if d.Enabled {
		target, err := semver.NewVersion(d.Target)
		if err != nil || !oneBelow(target, now) || !oneBelow(target, low) {
			return "" // done already, or some member is not where a downgrade begins
		}
		return minorVersion(target.Major, target.Minor)
	}
	if now.Major == low.Major && now.Minor < low.Minor {
		return minorVersion(low.Major, low.Minor)
	}
	return ""
}

// oneBelow says whether a is the minor version just below that of b.
func oneBelow(a, b *semver.Version) bool { return a.Major == b.Major && a.Minor+1 == b.Minor }

func minorVersion(major, minor int64) string { return fmt.Sprintf("%d.%d.0", major, minor) }

// endDowngrade ends a downgrade once every member runs the version below.
func (v *versions) endDowngrade(ctx context.Context) error {
	if !v.root().Downgrade().Enabled {
		return nil
	}
	told := v.askAll(ctx, v.root())
	root := v.root()
	d := root.Downgrade()
	if !d.Enabled || !downgraded(root, d.Target, told) || !v.leads() {
		return nil
	}
	v.log.Info("all members run the version of the downgrade, it has ended", "version", d.Target)
	return v.propose(ctx, command.KindDowngradeInfoSet, &membershippb.DowngradeInfoSetRequest{Enabled: false})
}

// downgraded says whether all members run the target's minor version.
func downgraded(root *member.Root, target string, told map[uint64]peer.Versions) bool {
	want, err := semver.NewVersion(target)
	if err != nil {
		return false
	}
	for _, m := range root.List() {
		s, err := semver.NewVersion(told[m.ID].Server)
		if err != nil || s.Major != want.Major || s.Minor != want.Minor {
			return false
		}
	}
	return true
}

// Downgrade implements rpc.Cluster.
func (v *versions) Downgrade(ctx context.Context, action pb.DowngradeRequest_DowngradeAction, version string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, v.requestTimeout)
	defer cancel()
	if action == pb.DowngradeRequest_CANCEL {
		return v.cancelDowngrade(ctx)
	}
	target, err := downgradeTarget(version)
	if err != nil {
		return "", err
	}
	if err := v.caughtUp(ctx); err != nil {
		return "", err
	}
	root := v.root()
	if err := mayDowngrade(root, target); err != nil {
		return "", err
	}
	if action == pb.DowngradeRequest_ENABLE {
		r := &membershippb.DowngradeInfoSetRequest{Enabled: true, Ver: minorVersion(target.Major, target.Minor)}
		if err := v.propose(ctx, command.KindDowngradeInfoSet, r); err != nil {
			return "", err
		}
		v.Wake()
	}
	return minorOf(root.Version()), nil
}

// downgradeTarget reads what a client gives: 3.6, or 3.6.0, whose patch is nothing.
func downgradeTarget(text string) (*semver.Version, error) {
	v, err := semver.NewVersion(text)
	if err != nil {
		v, err = semver.NewVersion(text + ".0")
	}
	if err != nil {
		return nil, fmt.Errorf("%q: %w", text, member.ErrInvalidVersionFormat)
	}
	return v, nil
}

// mayDowngrade says whether a downgrade to that version can begin.
func mayDowngrade(root *member.Root, target *semver.Version) error {
	now, err := semver.NewVersion(root.Version())
	switch {
	case err != nil:
		return member.ErrNoClusterVersion
	case !oneBelow(target, now):
		return fmt.Errorf("to %d.%d, the cluster version is %s: %w", target.Major, target.Minor, now, member.ErrInvalidDowngradeTarget)
	case root.Downgrade().Enabled:
		return fmt.Errorf("to %s: %w", root.Downgrade().Target, member.ErrDowngradeInProcess)
	}
	return nil
}

// cancelDowngrade ends a downgrade. As in etcd, it is no error if there is none.
func (v *versions) cancelDowngrade(ctx context.Context) (string, error) {
	if err := v.caughtUp(ctx); err != nil {
		return "", err
	}
	root := v.root()
	if root.Version() == "" {
		return "", member.ErrNoClusterVersion
	}
	if root.Downgrade().Enabled {
		if err := v.propose(ctx, command.KindDowngradeInfoSet, &membershippb.DowngradeInfoSetRequest{Enabled: false}); err != nil {
			return "", err
		}
		v.Wake()
	}
	return minorOf(root.Version()), nil
}

// tellVersions is what this member answers to /version.
func tellVersions(root *member.Root) peer.Versions {
	return peer.Versions{
		Server: config.EtcdVersion, Cluster: cmp.Or(root.Version(), "not_decided"), Storage: cmp.Or(storageVersion(root), "unknown"), Engram: config.Version,
	}
}

// storageVersion is the version of the format that a member keeps its store in,
// as etcd tells it: the cluster version, once there is one that means something.
func storageVersion(root *member.Root) string {
	if v := root.Version(); v != lowestVersion {
		return v
	}
	return ""
}
