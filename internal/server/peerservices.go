package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/rpc"
)

// applyWait is how long a leader that is asked what is left of a lease waits to
// have applied what was committed before it refuses.
const applyWait = time.Second

// applyPoll is the time between two looks at what is applied.
const applyPoll = 10 * time.Millisecond

// peerServices is peer.Services: what this member answers to others beside raft.
type peerServices struct {
	requestTimeout time.Duration
	clock          clock.Clock
	root           func() *member.Root
	// indexes are what is committed and what is applied here.
	indexes  func() (committed, applied uint64)
	caughtUp func(ctx context.Context) error
	// mayAdminister checks the token of whoever asked the other member.
	mayAdminister func(ctx context.Context, token string) error
	promote       func(ctx context.Context, id uint64) error // as the leader, or rpc.ErrNotLeader
	hash          func(ctx context.Context, revision int64) (rpc.HashKV, error)
	leases        func() leaseAnswers
}

// leaseAnswers is what a leader knows of leases: *leases.
type leaseAnswers interface {
	renewHere(ctx context.Context, id int64) (ttl int64, err error)
	statusHere(ctx context.Context, id int64, keys bool) (rpc.LeaseStatus, error)
}

// Members implements peer.Services.
func (s *peerServices) Members() []peer.Member { return peersOf(s.root()) }

// Removed implements peer.Services.
func (s *peerServices) Removed(id uint64) bool { return s.root().Removed(id) }

// Versions implements peer.Services.
func (s *peerServices) Versions() peer.Versions { return tellVersions(s.root()) }

// Promote implements peer.Services. A member that does not lead any more says
// so, and does not send the other one on.
func (s *peerServices) Promote(ctx context.Context, id uint64, token string) ([]peer.Member, error) {
	ctx, cancel := context.WithTimeout(ctx, s.requestTimeout)
	defer cancel()
	if err := s.mayAdminister(ctx, token); err != nil {
		return nil, err
	}
	if err := s.promote(ctx, id); err != nil {
		return nil, toPeer(err)
	}
	return s.Members(), nil
}

// HashKV implements peer.Services.
func (s *peerServices) HashKV(ctx context.Context, revision int64) (peer.HashKV, error) {
	h, err := s.hash(ctx, revision)
	if err != nil {
		return peer.HashKV{}, toPeer(err)
	}
	return peer.HashKV{Revision: h.Revision, Hash: h.Hash, CompactRevision: h.CompactRevision, HashRevision: h.HashRevision}, nil
}

// RenewLease implements peer.Services. Only a lease that is unknown here waits for
// what is committed, as in etcd with FastLeaseKeepAlive.
func (s *peerServices) RenewLease(ctx context.Context, id int64) (int64, error) {
	ttl, err := s.leases().renewHere(ctx, id)
	return ttl, toPeer(err)
}

// LeaseTimeToLive implements peer.Services.
func (s *peerServices) LeaseTimeToLive(ctx context.Context, id int64, keys bool) (peer.LeaseTTL, error) {
	if err := s.waitApplied(ctx); err != nil {
		return peer.LeaseTTL{}, err
	}
	l, err := s.leases().statusHere(ctx, id, keys)
	if err != nil {
		return peer.LeaseTTL{}, toPeer(err)
	}
	return peer.LeaseTTL{ID: l.ID, TTL: l.TTL, GrantedTTL: l.GrantedTTL, Keys: l.Keys}, nil
}

// DowngradeEnabled implements peer.Services.
func (s *peerServices) DowngradeEnabled(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, s.requestTimeout)
	defer cancel()
	if err := s.caughtUp(ctx); err != nil {
		return false, err
	}
	return s.root().Downgrade().Enabled, nil
}

// waitApplied waits until what is committed now is applied: a lease that was
// granted a moment ago must not be called unknown.
func (s *peerServices) waitApplied(ctx context.Context) error {
	committed, applied := s.indexes()
	if applied >= committed {
		return nil
	}
	late := s.clock.NewTimer(applyWait)
	defer late.Stop()
	look := s.clock.NewTicker(applyPoll)
	defer look.Stop()
	for {
		select {
		case <-look.C():
			if _, applied = s.indexes(); applied >= committed {
				return nil
			}
		case <-late.C():
			return fmt.Errorf("%w: applied index %d, committed %d", peer.ErrNotCaughtUp, applied, committed)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// peerErrors is the table from our errors to those that peers tell each other.
var peerErrors = []struct{ ours, theirs error }{
	{lease.ErrNotFound, peer.ErrLeaseNotFound},
	{lease.ErrNotPrimary, peer.ErrNotPrimary},
	{member.ErrNotFound, peer.ErrMemberNotFound},
	{member.ErrRemoved, peer.ErrMemberNotFound},
	{member.ErrNotLearner, peer.ErrNotLearner},
	{member.ErrLearnerNotReady, peer.ErrLearnerNotReady},
	{mvcc.ErrCompacted, peer.ErrCompacted},
	{mvcc.ErrFutureRevision, peer.ErrFutureRevision},
}

// toPeer adds to an error what the peer that asked is told.
func toPeer(err error) error {
	for _, e := range peerErrors {
		if errors.Is(err, e.ours) {
			return fmt.Errorf("%w: %w", e.theirs, err)
		}
	}
	return err
}

// leaderLeases is leaseForwarder: it asks the leader at its peer URLs.
type leaderLeases struct {
	leader func() uint64
	root   func() *member.Root
	peers  leaseAsker
}

// leaseAsker asks a member about leases: *peer.Client.
type leaseAsker interface {
	RenewLease(ctx context.Context, urls []string, id int64) (ttl int64, err error)
	LeaseTimeToLive(ctx context.Context, urls []string, id int64, keys bool) (peer.LeaseTTL, error)
}

// RenewLease implements leaseForwarder.
func (l leaderLeases) RenewLease(ctx context.Context, id int64) (int64, error) {
	urls, err := l.urls()
	if err != nil {
		return 0, err
	}
	ttl, err := l.peers.RenewLease(ctx, urls, id)
	return ttl, fromPeer(err)
}

// LeaseTimeToLive implements leaseForwarder.
func (l leaderLeases) LeaseTimeToLive(ctx context.Context, id int64, keys bool) (rpc.LeaseStatus, error) {
	urls, err := l.urls()
	if err != nil {
		return rpc.LeaseStatus{}, err
	}
	t, err := l.peers.LeaseTimeToLive(ctx, urls, id, keys)
	if err != nil {
		return rpc.LeaseStatus{}, fromPeer(err)
	}
	return rpc.LeaseStatus{ID: t.ID, TTL: t.TTL, GrantedTTL: t.GrantedTTL, Keys: t.Keys}, nil
}

func (l leaderLeases) urls() ([]string, error) {
	leader := l.leader()
	m := l.root().Member(leader)
	if m == nil {
		return nil, fmt.Errorf("the leader, %x, is not in the list of members", leader)
	}
	return m.PeerURLs, nil
}

// fromPeer adds to an error what it means here.
func fromPeer(err error) error {
	for _, e := range peerErrors {
		if errors.Is(err, e.theirs) {
			return fmt.Errorf("%w: %w", e.ours, err)
		}
	}
	return err
}
