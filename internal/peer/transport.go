package peer

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/coreos/go-semver/semver"
	"go.etcd.io/raft/v3/raftpb"
)

// maxRemotes bounds the senders that are answered before they are known as members.
const maxRemotes = 64

// Transport carries messages between this member and the others. Its methods are safe for concurrent use.
type Transport struct {
	opts    Options
	version *semver.Version
	headers http.Header // on every request; read only

	// Clients of one kind of traffic each, so that none waits for another's connections.
	streamClient, requestClient, snapshotClient *http.Client

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	removal sync.Once // of OnRemoved

	bodies    bodies // of single messages being read
	sender    snapshotSender
	receiving receiving

	life   sync.Mutex // covers closed, and adding to wg
	closed bool
	wg     sync.WaitGroup

	mu      sync.RWMutex // covers all below
	started bool
	peers   map[uint64]*peer // members
	remotes map[uint64]*peer // senders that are no members yet; send only, by single requests
	removed func(id uint64) bool
}

// New makes a Transport that knows no members. Its Handler works at once, its dialing begins with Start.
func New(o Options) *Transport {
	o = o.withDefaults()
	v, err := semver.NewVersion(o.Version)
	if err != nil {
		panic(fmt.Sprintf("peer: Options.Version %q: %v", o.Version, err))
	}
	t := &Transport{
		opts: o, version: v, bodies: bodies{limit: maxBodies},
		peers: map[uint64]*peer{}, remotes: map[uint64]*peer{},
		streamClient:   dialing{o.TLS, o.DialTimeout, o.ReadTimeout, o.WriteTimeout, -1}.httpClient(),
		requestClient:  dialing{o.TLS, o.DialTimeout, 0, o.WriteTimeout, bulkWorkers + 2}.httpClient(),
		snapshotClient: dialing{o.TLS, o.DialTimeout, 0, o.SnapshotStall, -1}.httpClient(),
	}
	t.headers = t.requestHeaders()
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.sender = snapshotSender{t: t, jobs: map[uint64]*snapshotJob{}, pauses: map[uint64]time.Duration{}}
	return t
}

// Start begins to dial the members known and those to come.
func (t *Transport) Start() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.started {
		return
	}
	t.started = true
	for _, p := range t.peers {
		p.start()
	}
}

// Close ends all streams and requests and waits for them.
func (t *Transport) Close() error {
	t.life.Lock()
	t.closed = true
	t.life.Unlock()
	t.cancel()
	t.SetMembers(nil, nil)
	t.wg.Wait()
	for _, c := range []*http.Client{t.streamClient, t.requestClient, t.snapshotClient} {
		c.CloseIdleConnections()
	}
	return nil
}

// begin counts work that Close waits for, until t.wg.Done. It reports false if the transport is closed.
func (t *Transport) begin() bool {
	t.life.Lock()
	defer t.life.Unlock()
	if !t.closed {
		t.wg.Add(1)
	}
	return !t.closed
}

// run starts a goroutine that Close waits for. It reports false if the transport is closed.
func (t *Transport) run(f func()) bool {
	if !t.begin() {
		return false
	}
	go func() {
		defer t.wg.Done()
		f()
	}()
	return true
}

// SetMembers makes members the whole set of peers; this member among them is passed over. Peers that stay keep their streams,
// unless they were dialed at a URL that is gone. removed is asked for senders that are not among the members, concurrently,
// beside Services.Removed; it may be nil.
func (t *Transport) SetMembers(members []Member, removed func(id uint64) bool) {
	var gone []*peer
	t.mu.Lock()
	t.removed = removed
	wanted := make(map[uint64]bool, len(members))
	for _, m := range members {
		if m.ID == t.opts.MemberID || m.ID == 0 || t.ctx.Err() != nil {
			continue
		}
		wanted[m.ID] = true
		urls, err := checkURLs(m.PeerURLs)
		if err != nil {
			t.opts.Logger.Error("a member has a peer URL that cannot be used", "member", hexID(m.ID), "error", err)
		}
		if r := t.remotes[m.ID]; r != nil {
			delete(t.remotes, m.ID)
			gone = append(gone, r)
		}
		if p := t.peers[m.ID]; p != nil {
			p.setURLs(urls)
			continue
		}
		p := newPeer(t, m.ID, urls, false)
		t.peers[m.ID] = p
		t.opts.Metrics.KnownPeers.WithLabelValues(p.local, p.name).Set(1)
		if t.started {
			p.start()
		}
	}
	for id, p := range t.peers {
		if !wanted[id] {
			delete(t.peers, id)
			gone = append(gone, p)
		}
	}
	for id, r := range t.remotes {
		if t.ctx.Err() != nil || removed != nil && removed(id) {
			delete(t.remotes, id)
			gone = append(gone, r)
		}
	}
	t.mu.Unlock()
	for _, p := range gone {
		p.stop()
	}
}

// AddRemote remembers where a sender that is not a member yet can be reached, so that this member can answer it. It does
// nothing for members, for those removed, and for URLs that cannot be used.
func (t *Transport) AddRemote(id uint64, urls []string) {
	urls, _ = checkURLs(urls)
	if id == 0 || id == t.opts.MemberID || len(urls) == 0 || t.isRemoved(id) || t.ctx.Err() != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.peers[id] != nil || t.remotes[id] != nil || len(t.remotes) >= maxRemotes {
		return
	}
	t.remotes[id] = newPeer(t, id, urls, true)
}

// isRemoved tells if the ID is in the applied removed set.
func (t *Transport) isRemoved(id uint64) bool {
	t.mu.RLock()
	removed := t.removed
	t.mu.RUnlock()
	return removed != nil && removed(id) || t.opts.Services != nil && t.opts.Services.Removed(id)
}

// peer returns the member, nil if it is none.
func (t *Transport) peer(id uint64) *peer {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.peers[id]
}

// receiver returns who messages to the ID go through: the member, else the remote, else nil.
func (t *Transport) receiver(id uint64) *peer {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if p := t.peers[id]; p != nil {
		return p
	}
	return t.remotes[id]
}

// Send queues messages in their order. Of the MsgAppResps to one member only the last is sent: it says what the others said.
// Messages to an unknown ID are dropped.
func (t *Transport) Send(msgs []*raftpb.Message) {
	for i, m := range msgs {
		if m.GetType() == raftpb.MsgAppResp && slices.ContainsFunc(msgs[i+1:], func(later *raftpb.Message) bool {
			return later.GetType() == raftpb.MsgAppResp && later.GetTo() == m.GetTo()
		}) {
			continue
		}
		p := t.receiver(m.GetTo())
		t.sender.saw(m)
		switch {
		case p == nil:
		case m.GetType() == raftpb.MsgSnap:
			t.sender.put(p, m)
		default:
			p.send(m)
		}
	}
}

// ActiveSince returns since when the member is connected, the zero time if it is not.
func (t *Transport) ActiveSince(id uint64) time.Time {
	if p := t.peer(id); p != nil {
		return p.activity.activeSince()
	}
	return time.Time{}
}

// Native tells if the member, when last heard of, said that it is an Engram.
func (t *Transport) Native(id uint64) bool {
	p := t.receiver(id)
	return p != nil && p.native.Load()
}

// receive hands on a message that came in. Its kind must be one that members send each other.
func (t *Transport) receive(m *raftpb.Message) error {
	if err := t.check(m); err != nil {
		return err
	}
	return t.opts.Raft.Receive(m)
}

func (t *Transport) check(m *raftpb.Message) error {
	switch m.GetType() {
	case raftpb.MsgProp, raftpb.MsgApp, raftpb.MsgAppResp, raftpb.MsgVote, raftpb.MsgVoteResp, raftpb.MsgSnap, raftpb.MsgHeartbeat,
		raftpb.MsgHeartbeatResp, raftpb.MsgTransferLeader, raftpb.MsgTimeoutNow, raftpb.MsgReadIndex, raftpb.MsgReadIndexResp,
		raftpb.MsgPreVote, raftpb.MsgPreVoteResp:
	default:
		return fmt.Errorf("%v is no message between members", m.GetType())
	}
	if m.GetTo() != t.opts.MemberID {
		return fmt.Errorf("message to %x, this is %x", m.GetTo(), t.opts.MemberID)
	}
	if t.isRemoved(m.GetFrom()) {
		return fmt.Errorf("message of %x, which was removed", m.GetFrom())
	}
	return nil
}

// sawRemoval acts on a peer's word that this member was removed, if the peer is of this cluster.
func (t *Transport) sawRemoval(p *peer, h http.Header, status int) error {
	err := fmt.Errorf("peer %s at status %d: %w", p.name, status, ErrRemoved)
	if cluster := h.Get(clusterHeader); cluster != hexID(t.opts.ClusterID) && (cluster != "" || status != http.StatusGone) {
		return fmt.Errorf("status %d of cluster %q: %w", status, cluster, ErrClusterMismatch)
	}
	t.removal.Do(func() { go t.opts.OnRemoved(err) })
	return err
}
