package server

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/member"
)

// This file gives the parts of the cluster's logic what they need of a member.

// cluster is rpc.Cluster.
type cluster struct {
	*membership
	m *Member
}

// Members implements rpc.Cluster.
func (c cluster) Members() []*pb.Member { return wireMembers(c.m.root()) }

// Capable implements rpc.Cluster.
func (c cluster) Capable() bool { return c.m.root().Version() != "" }

// Downgrade implements rpc.Cluster.
func (c cluster) Downgrade(ctx context.Context, action pb.DowngradeRequest_DowngradeAction, version string) (string, error) {
	return c.m.versions.Downgrade(ctx, action, version)
}

// root is the membership as applied.
func (m *Member) root() *member.Root {
	_, members, _ := m.machine().Tables()
	return members
}

// newMembership is for a member whose node and transport are there.
func (m *Member) newMembership(metrics *metrics) *membership {
	return &membership{
		self: m.id.member, strict: m.cfg.StrictReconfig, tick: m.cfg.Tick(), requestTimeout: m.cfg.RequestTimeout(),
		root: m.root, raft: m.node, ids: m.ids, active: m.transport.ActiveSince, caughtUp: m.caughtUp, peers: m.client, clock: m.clock,
		promotions: metrics.promotions,
	}
}

// newVersions is for a member whose node is there. Leads says that this member
// leads and has applied the first entry of its term.
func (m *Member) newVersions(leads func() bool) *versions {
	return &versions{
		self: m.id.member, requestTimeout: m.cfg.RequestTimeout(), downgradeInterval: m.cfg.DowngradeCheckTime,
		root: m.root, leads: leads, caughtUp: m.caughtUp, propose: m.proposeAndWait, setLevel: m.proposeFeatureLevel,
		ask: m.client, clock: m.clock, log: m.log, wake: make(chan struct{}, 1),
	}
}

// newAnnouncer is for a member whose node runs.
func (m *Member) newAnnouncer() *announcer {
	urls := make([]string, len(m.cfg.AdvertiseClient))
	for i := range m.cfg.AdvertiseClient {
		urls[i] = m.cfg.AdvertiseClient[i].String()
	}
	return &announcer{
		self: m.id.member, name: m.cfg.Name, clientURLs: urls, requestTimeout: m.cfg.RequestTimeout(), pause: m.cfg.Tick(),
		root: m.root, caughtUp: m.caughtUp, propose: m.proposeAndWait, failed: m.failed, clock: m.clock, log: m.log,
	}
}

// newDeparture is for a member that knows its identity. Running ends when the
// member stops.
func (m *Member) newDeparture(running context.Context) *departure {
	return &departure{self: m.id.member, running: running, stop: m.fail, clock: m.clock, log: m.log}
}

// newLeaderLeases is how leases ask the leader.
func (m *Member) newLeaderLeases() leaseForwarder {
	return leaderLeases{leader: m.node.Leader, root: m.root, peers: m.client}
}

// newPeerServices answers peers. What the functions return may come to be after
// it, but before the transport serves.
func (m *Member) newPeerServices(members func() *membership, l func() *leases) *peerServices {
	return &peerServices{
		requestTimeout: m.cfg.RequestTimeout(), clock: m.clock, root: m.root, caughtUp: m.caughtUp, hash: m.pacedHashKV,
		indexes:       func() (committed, applied uint64) { return m.node.Status().Commit, m.node.Applied() },
		mayAdminister: m.mayAdminister,
		promote:       func(ctx context.Context, id uint64) error { _, err := members().promote(ctx, id); return err },
		leases:        func() leaseAnswers { return l() },
	}
}

// mayAdminister checks that, while auth is on, a token is one of an
// administrator. It waits for a token that is not known here yet.
func (m *Member) mayAdminister(ctx context.Context, token string) error {
	a := authenticator{m}
	if !a.Enabled() {
		return nil
	}
	who, err := a.Identify(token)
	if errors.Is(err, auth.ErrTokenAhead) {
		if err := m.caughtUp(ctx); err != nil {
			return err
		}
		who, err = a.Identify(token)
	}
	if err != nil {
		return err
	}
	v := views{m}.View()
	defer v.Release()
	return v.MayAdminister(who)
}
