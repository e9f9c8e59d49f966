package server

import (
	"slices"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/tlsfiles"
)

// openClient prepares what is asked of other members outside of raft.
func (m *Member) openClient() error {
	o, err := peerTLS(m.cfg)
	if err != nil {
		return err
	}
	if m.dialTLS, err = tlsfiles.Client(o); err != nil {
		return err
	}
	m.client = peer.NewClient(peer.ClientOptions{TLS: m.dialTLS, DialTimeout: m.cfg.PeerDialTimeout(), RequestTimeout: m.cfg.RequestTimeout()})
	return nil
}

// openTransport prepares the way to the other members. It is not used before
// the node runs.
func (m *Member) openTransport(metrics *metrics) {
	m.transport = peer.New(peer.Options{
		MemberID: m.id.member, ClusterID: m.id.cluster, Version: config.EtcdVersion, Engram: config.Version, SnapshotVersion: snapfile.NativeVersion,
		PeerURLs: urlTexts(m.cfg.AdvertisePeer),
		Raft:     raftEnd{m}, Snapshots: snapshots{m},
		Services: m.newPeerServices(func() *membership { return m.membership }, func() *leases { return m.leases }),
		TLS:      m.dialTLS, OnRemoved: m.onRemoved,
		Clock: m.clock, Logger: m.log, Metrics: metrics.peer,
		DialTimeout: m.cfg.PeerDialTimeout(), RequestTimeout: m.cfg.RequestTimeout(),
		ReadTimeout: m.cfg.RaftReadTimeout, WriteTimeout: m.cfg.RaftWriteTimeout,
	})
	m.refreshPeers()
}

// raftEnd is peer.Raft: the node, which comes to be after the transport.
type raftEnd struct{ m *Member }

// Receive implements peer.Raft.
func (r raftEnd) Receive(msg *raftpb.Message) error { return r.m.node.Receive(msg) }

// ReportUnreachable implements peer.Raft.
func (r raftEnd) ReportUnreachable(member uint64) { r.m.node.ReportUnreachable(member) }

// ReportSnapshot implements peer.Raft.
func (r raftEnd) ReportSnapshot(member uint64, ok bool) { r.m.node.ReportSnapshot(member, ok) }

// refreshPeers tells the transport who the members are. One that joins does not
// know of all of them yet: those it joined by stay until they are removed.
func (m *Member) refreshPeers() {
	_, members, _ := m.machine().Tables()
	list := peersOf(members)
	for _, r := range m.remotes {
		if members.Member(r.ID) == nil && !members.Removed(r.ID) {
			list = append(list, r)
		}
	}
	m.transport.SetMembers(list, members.Removed)
}

// peersOf lists a membership as peers tell it each other.
func peersOf(members *member.Root) []peer.Member {
	var list []peer.Member
	for _, mem := range members.List() {
		list = append(list, peer.Member{
			ID: mem.ID, PeerURLs: slices.Clone(mem.PeerURLs), IsLearner: mem.IsLearner, Name: mem.Name, ClientURLs: slices.Clone(mem.ClientURLs),
		})
	}
	return list
}
