// Package peer speaks etcd's peer protocol: raft messages, snapshots and the few
// questions that members ask each other, over HTTP/1.1.
//
// It knows raft's messages and nothing of keys, consensus or storage: what it
// receives it hands to a Raft, what it is asked it asks a Services. Transport is
// the main type; Client makes the same calls from the other side, without one.
// Invariants:
//
//	P1: Send never blocks, whatever the peers and their sockets do.
//	P2: a slow or dead peer delays no other peer.
//	P3: heartbeats, votes and answers never wait behind entries or proposals
//	    larger than bulkFrame.
//	P4: every queue has a bound in messages and in bytes; what does not fit is
//	    dropped and reported to raft.
//	P5: nothing is allocated ahead of the bytes that came in.
//	P6: messages are passed on as they are; only the order of waiting MsgApps of
//	    one term may change.
//	P7: 410 is said only to a member in the applied removed set, 403 never: a real
//	    etcd member that hears either leaves the cluster for good.
//
// DESIGN.md tells why it is built like this.
package peer

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"go.etcd.io/raft/v3/raftpb"
)

// Raft takes what peers send. All methods may be called concurrently and must not block.
type Raft interface {
	// Receive takes a message that is its own from now on; an error means that it was dropped.
	Receive(m *raftpb.Message) error
	// ReportUnreachable says that messages to the member were lost.
	ReportUnreachable(member uint64)
	// ReportSnapshot says how sending a MsgSnap to the member ended.
	ReportSnapshot(member uint64, ok bool)
}

// Snapshots makes and takes the state that travels with MsgSnap.
type Snapshots interface {
	// Open pins a moment of this member to send; native asks for Engram's own form. The message of what it returns
	// takes the place of m. At most one is open for each member.
	Open(ctx context.Context, m *raftpb.Message, native bool) (Outgoing, error)
	// Receive reads body to its end and stores it durably. The transport gives m to Raft afterwards, and calls drop if raft does not
	// take it. It is never called concurrently. ctx ends when the sender goes away, when a leader of a later term sends one, or when
	// the transport is closed.
	Receive(ctx context.Context, m *raftpb.Message, native bool, body io.Reader) (drop func() error, err error)
}

// Outgoing is a snapshot to be sent. Its methods are called one at a time, Close last, once and always.
type Outgoing interface {
	Message() *raftpb.Message
	WriteTo(w io.Writer) (int64, error)
	Close() error
}

// Member is a member as peers tell each other of it.
type Member struct {
	ID         uint64   `json:"id"`
	PeerURLs   []string `json:"peerURLs"`
	IsLearner  bool     `json:"isLearner,omitempty"`
	Name       string   `json:"name,omitempty"`
	ClientURLs []string `json:"clientURLs,omitempty"`
}

// HashKV is a member's hash of its keys at a revision.
type HashKV struct {
	Revision        int64 // the member's present revision
	Hash            uint32
	CompactRevision int64 // -1 on a store that was never compacted
	HashRevision    int64 // the revision that was hashed
}

// LeaseTTL is the leader's answer about a lease.
type LeaseTTL struct {
	ID, TTL, GrantedTTL int64
	Keys                [][]byte
}

// Versions are what /version says.
type Versions struct {
	Server  string `json:"etcdserver"`
	Cluster string `json:"etcdcluster"`
	Storage string `json:"storage"`
	Engram  string `json:"engram,omitempty"` // empty for a real etcd member
}

// Services answers what the paths other than raft's ask. Methods may be called concurrently; those with a context may block.
// They return the errors of this package where one fits.
type Services interface {
	Members() []Member
	// Removed tells if the ID is in the applied removed set.
	Removed(id uint64) bool
	// Promote makes a learner a voter in the name of the client's token, which may be empty.
	Promote(ctx context.Context, id uint64, token string) ([]Member, error)
	// HashKV hashes the keys at revision; 0 is the latest.
	HashKV(ctx context.Context, revision int64) (HashKV, error)
	RenewLease(ctx context.Context, id int64) (ttl int64, err error)
	LeaseTimeToLive(ctx context.Context, id int64, keys bool) (LeaseTTL, error)
	DowngradeEnabled(ctx context.Context) (bool, error)
	Versions() Versions
}

// What a peer may answer. Services return them, wrapped or not; Client returns them wrapped.
var (
	ErrLeaseNotFound   = errors.New("lease not found")
	ErrNotPrimary      = errors.New("not a primary lessor")
	ErrNotCaughtUp     = errors.New("waiting for node to catch up its applied index has timed out")
	ErrMemberNotFound  = errors.New("membership: ID not found")
	ErrNotLearner      = errors.New("membership: can only promote a learner member")
	ErrLearnerNotReady = errors.New("etcdserver: can only promote a learner member which is in sync with leader")
	ErrFutureRevision  = errors.New("mvcc: required revision is a future revision")
	ErrCompacted       = errors.New("mvcc: required revision has been compacted")
	ErrClusterMismatch = errors.New("cluster ID mismatch")
	ErrIncompatible    = errors.New("incompatible version")
	ErrRemoved         = errors.New("this member was removed from the cluster")
)

// Options configure a Transport. MemberID, ClusterID, Version and Raft are needed; without Snapshots or Services the paths
// that need them answer 500. Durations of 0 take etcd's values.
type Options struct {
	MemberID, ClusterID uint64
	// Version is the etcd version this member is compatible with; Engram is its own.
	Version, Engram string
	// SnapshotVersion is that of Engram's own form of snapshots, as this member reads and writes it. Who announces
	// another, or none, gets etcd's form. 0 means that this member has no own form.
	SnapshotVersion int
	// PeerURLs are this member's advertised peer URLs.
	PeerURLs []string

	Raft      Raft
	Snapshots Snapshots
	Services  Services

	// TLS is for dialing; nil trusts the system's roots. What the listener asks of peers is the listener's affair.
	TLS *tls.Config
	// OnRemoved is called once, from a goroutine of its own, when a peer says that this member was removed.
	OnRemoved func(error)

	Clock   clock.Clock  // default the operating system's. Deadlines of sockets are always real time
	Logger  *slog.Logger // default none
	Metrics *Metrics     // default metrics that nobody collects

	DialTimeout    time.Duration // of every dial; default 2s (1s + election timeout)
	ReadTimeout    time.Duration // silence that ends a stream or an upload; default 5s. A third of it is between link heartbeats
	WriteTimeout   time.Duration // of one write to a stream; default 5s
	RequestTimeout time.Duration // of one small request; default 7s (5s + 2 election timeouts)
	RedialInterval time.Duration // at least so long between two dials of one stream; default 100ms
	ProbeInterval  time.Duration // default 4s
	SnapshotStall  time.Duration // a write of a snapshot that takes longer ends the sending; default 30s
	SnapshotPause  time.Duration // after a snapshot that could not be sent, twice as long after each more up to 30 times; default 1s
}

func (o Options) withDefaults() Options {
	o.DialTimeout = cmp.Or(o.DialTimeout, 2*time.Second)
	o.ReadTimeout = cmp.Or(o.ReadTimeout, 5*time.Second)
	o.WriteTimeout = cmp.Or(o.WriteTimeout, 5*time.Second)
	o.RequestTimeout = cmp.Or(o.RequestTimeout, 7*time.Second)
	o.RedialInterval = cmp.Or(o.RedialInterval, 100*time.Millisecond)
	o.ProbeInterval = cmp.Or(o.ProbeInterval, 4*time.Second)
	o.SnapshotStall = cmp.Or(o.SnapshotStall, 30*time.Second)
	o.SnapshotPause = cmp.Or(o.SnapshotPause, time.Second)
	if o.Clock == nil {
		o.Clock = clock.Real()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics()
	}
	if o.OnRemoved == nil {
		o.OnRemoved = func(error) {}
	}
	return o
}
