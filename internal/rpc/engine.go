package rpc

import (
	"context"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// Proposal is a command on its way into the log.
type Proposal struct {
	// ID is the identity that Data carries in its header.
	ID uint64
	// Data is the encoded entry. It belongs to the receiver.
	Data []byte
	// Deadline is when the caller no longer waits.
	Deadline time.Time
	// Done is called once, from any goroutine, unless Propose failed. The reply
	// may be set beside an error: the command ran, and only its answer is an
	// error. Who gets a reply releases it.
	Done func(*state.Reply, error)
}

// Consensus orders commands and confirms reads. Its methods may be called
// concurrently and do not block; callbacks come from any goroutine.
type Consensus interface {
	// NextID returns an identity that no other request of the cluster has.
	NextID() uint64
	// Propose queues p. An error means that Done will not be called.
	Propose(p Proposal) error
	// ReadIndex calls done once what this member has applied is at least as new
	// as anything committed when ReadIndex was called, or with an error.
	ReadIndex(deadline time.Time, done func(error))
	// Leader returns the member that leads, 0 if none is known.
	Leader() uint64
	// Learner says that this member has no vote.
	Learner() bool
	// Committed and Applied are raft's indexes as of now, Term the term of the
	// last entry applied.
	Committed() uint64
	Applied() uint64
	Term() uint64
}

// View is one immutable moment of the state machine. Safe for concurrent use
// until it is released, which must happen once.
type View interface {
	// KV is the moment's keys. It is released with the View, not by itself.
	KV() *mvcc.View
	// MayRead checks that a user may read [key, end), or returns a sentinel of
	// package auth. While auth is off every read is allowed.
	MayRead(u Identity, key, end []byte) error
	// MayCall checks that, while auth is on, somebody calls.
	MayCall(u Identity) error
	// MayAdminister checks for the root role.
	MayAdminister(u Identity) error
	Release()
}

// Views pins moments of the state machine.
type Views interface {
	View() View
}

// Identity is who makes a call. It is the zero value while auth is off.
type Identity struct {
	User string
	// AuthRevision is the auth revision at which the identity was proven.
	AuthRevision uint64
}

// Auth knows whether calls need an identity, and whose tokens are whose.
type Auth interface {
	Enabled() bool
	Revision() uint64
	// Identify resolves a token, or returns a sentinel of package auth. With
	// auth.ErrTokenAhead the token may be known once this member has applied what
	// is committed.
	Identify(token string) (Identity, error)
	// Password returns the hash of a user's password, and the auth revision as of
	// which it is that, or a sentinel of package auth.
	Password(name string) (hash []byte, revision uint64, err error)
	// ClientCerts says that the common name of a client's certificate names
	// the user when there is no token.
	ClientCerts() bool
}

// Quota guards the space of the store.
type Quota interface {
	// Admit returns an error of errors.go's table when a request of this cost,
	// in bytes, does not fit below the quota. It raises the NOSPACE alarm then.
	Admit(cost int64) error
}

// LeaseStatus is what a member knows of one lease.
type LeaseStatus struct {
	ID int64
	// TTL is the time that is left, GrantedTTL what was granted; in seconds.
	TTL, GrantedTTL int64
	Keys            [][]byte
}

// Leases answers what does not go through the log.
type Leases interface {
	// Renew extends a lease and calls done with its TTL in seconds, 0 if it is
	// unknown: once, from any goroutine, maybe before Renew returns. It does not
	// block. When ctx ends nobody waits for done any more.
	Renew(ctx context.Context, u Identity, id int64, done func(ttl int64, err error))
	// Status returns a TTL of -1 for a lease that is unknown. It may forward.
	Status(ctx context.Context, u Identity, id int64, keys bool) (LeaseStatus, error)
	// IDs lists the leases that this member knows.
	IDs(u Identity) ([]int64, error)
}

// Cluster answers for the members and changes them. The methods that return an
// error may be called concurrently and block until this member has applied the
// change, with a bound of the implementation's own if ctx has none. The caller
// was found to be an administrator and the peer URLs to be such as a member can
// use. Beside the sentinels of package consensus they return those of package
// member (ErrNotFound, ErrExists, ErrPeerURLExists, ErrTooManyLearners,
// ErrNotLearner, ErrLearnerNotReady, ErrNotEnoughStarted, ErrUnhealthy).
type Cluster interface {
	// Members lists them with their URLs, by ID. The messages are the caller's,
	// as are those that the other methods return.
	Members() []*etcdserverpb.Member
	// Capable says that the cluster has agreed on a version.
	Capable() bool
	// AddMember returns the member that was added, and all members.
	AddMember(ctx context.Context, peerURLs []string, learner bool) (added *etcdserverpb.Member, members []*etcdserverpb.Member, err error)
	RemoveMember(ctx context.Context, id uint64) ([]*etcdserverpb.Member, error)
	// UpdateMember replaces the peer URLs of a member.
	UpdateMember(ctx context.Context, id uint64, peerURLs []string) ([]*etcdserverpb.Member, error)
	// PromoteMember makes a voter of a learner. A follower has the leader do it,
	// on behalf of the caller's token.
	PromoteMember(ctx context.Context, id uint64, token string) ([]*etcdserverpb.Member, error)
	// MoveLeader makes another voter lead and returns once it does. It fails with
	// ErrNotLeader, ErrBadLeaderTransferee or ErrLeaderTransferTimeout; moving to
	// the leader itself does nothing.
	MoveLeader(ctx context.Context, target uint64) error
	// Downgrade checks, begins or ends a downgrade to a version like "3.6" and
	// returns the cluster version, as "3.7". It fails with the sentinels of
	// package member about downgrades. The action is one of the known ones.
	Downgrade(ctx context.Context, action etcdserverpb.DowngradeRequest_DowngradeAction, version string) (clusterVersion string, err error)
}

// StoreStatus is the part of Status that the store knows.
type StoreStatus struct {
	// SizeBytes is what the store's files occupy, UsageBytes what lives in it,
	// QuotaBytes the limit in force.
	SizeBytes, UsageBytes, QuotaBytes int64
	// Version is etcd's version that this member is compatible with,
	// StorageVersion that of its format, and ClusterVersion what the cluster
	// agreed on, as "3.7".
	Version, StorageVersion, ClusterVersion string
	Downgrade                               *etcdserverpb.DowngradeInfo
}

// HashKV is a hash of the revisions up to Revision that were not compacted.
type HashKV struct {
	Hash            uint32
	CompactRevision int64
	HashRevision    int64
	// Revision is the newest one when the hash was made.
	Revision int64
}

// Maintenance looks after the store of this member.
type Maintenance interface {
	Status() StoreStatus
	Alarms() []*etcdserverpb.AlarmMember
	// Hash and HashKV read the whole store and end early with ctx.
	Hash(ctx context.Context) (hash uint32, revision int64, err error)
	HashKV(ctx context.Context, revision int64) (HashKV, error)
	// CompactionDone is closed once nothing older than a compaction that was
	// asked for is left to delete.
	CompactionDone(revision int64) <-chan struct{}
	// Reclaim starts to give space back to the file system and does not wait.
	Reclaim() error
	// Backup pins the present and lays it out, for which it reads the whole store.
	// Ctx is for that and for writing it. The caller closes it.
	Backup(ctx context.Context) (Backup, error)
}
