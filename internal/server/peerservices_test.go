package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/storage"
)

type fakeLeases struct{ err error }

func (f fakeLeases) renewHere(context.Context, int64) (int64, error) { return 30, f.err }

func (f fakeLeases) statusHere(_ context.Context, id int64, keys bool) (rpc.LeaseStatus, error) {
	s := rpc.LeaseStatus{ID: id, TTL: 20, GrantedTTL: 30}
	if keys {
		s.Keys = [][]byte{[]byte("k")}
	}
	return s, f.err
}

func TestPeerServices(t *testing.T) {
	c := newFakeCluster(t, "1 2 3l").version("3.7.0").downgrade("3.6.0")
	c.apply(func(b *storage.Batch) error {
		_, err := c.table.ApplyConfChange(b, member.RemoveChange(0, 2))
		return err
	})
	var failure error
	s := &peerServices{
		requestTimeout: 7 * time.Second, clock: c.clock, root: c.Root,
		indexes:  func() (uint64, uint64) { return 5, 5 },
		caughtUp: func(context.Context) error { return failure },
		mayAdminister: func(_ context.Context, token string) error {
			if token != "root's" {
				return auth.ErrInvalidToken
			}
			return nil
		},
		promote: func(context.Context, uint64) error { return failure },
		hash: func(_ context.Context, revision int64) (rpc.HashKV, error) {
			return rpc.HashKV{Hash: 1, CompactRevision: -1, HashRevision: revision, Revision: 9}, failure
		},
		leases: func() leaseAnswers { return fakeLeases{failure} },
	}
	ctx := t.Context()
	if got := s.Members(); len(got) != 2 || got[0].ID != 1 || got[0].Name != "n" || !got[1].IsLearner || !s.Removed(2) || s.Removed(1) {
		t.Errorf("members %+v", got)
	}
	if got, err := s.Promote(ctx, 3, "root's"); err != nil || len(got) != 2 {
		t.Errorf("promote: %v %v", got, err)
	}
	if _, err := s.Promote(ctx, 3, "somebody's"); !errors.Is(err, auth.ErrInvalidToken) {
		t.Errorf("promote without the right: %v", err)
	}
	if got, err := s.HashKV(ctx, 7); err != nil || got != (peer.HashKV{Revision: 9, Hash: 1, CompactRevision: -1, HashRevision: 7}) {
		t.Errorf("hash: %+v %v", got, err)
	}
	if ttl, err := s.RenewLease(ctx, 1); err != nil || ttl != 30 {
		t.Errorf("renew: %d %v", ttl, err)
	}
	if l, err := s.LeaseTimeToLive(ctx, 1, true); err != nil || l.ID != 1 || l.TTL != 20 || l.GrantedTTL != 30 || len(l.Keys) != 1 {
		t.Errorf("time to live: %+v %v", l, err)
	}
	if on, err := s.DowngradeEnabled(ctx); err != nil || !on {
		t.Errorf("downgrade: %v %v", on, err)
	}
	if v := s.Versions(); v.Cluster != "3.7.0" {
		t.Errorf("versions: %+v", v)
	}
	call := map[string]func() error{
		"renew":   func() error { _, err := s.RenewLease(ctx, 1); return err },
		"ttl":     func() error { _, err := s.LeaseTimeToLive(ctx, 1, false); return err },
		"promote": func() error { _, err := s.Promote(ctx, 3, "root's"); return err },
		"hash":    func() error { _, err := s.HashKV(ctx, 1); return err },
		"enabled": func() error { _, err := s.DowngradeEnabled(ctx); return err },
	}
	for _, e := range []struct {
		call       string
		ours, told error
	}{
		{"renew", lease.ErrNotFound, peer.ErrLeaseNotFound}, {"renew", lease.ErrNotPrimary, peer.ErrNotPrimary},
		{"ttl", lease.ErrNotFound, peer.ErrLeaseNotFound}, {"ttl", lease.ErrNotPrimary, peer.ErrNotPrimary},
		{"promote", member.ErrNotFound, peer.ErrMemberNotFound}, {"promote", member.ErrRemoved, peer.ErrMemberNotFound},
		{"promote", member.ErrNotLearner, peer.ErrNotLearner}, {"promote", member.ErrLearnerNotReady, peer.ErrLearnerNotReady},
		{"promote", rpc.ErrNotLeader, rpc.ErrNotLeader}, {"promote", member.ErrNotEnoughStarted, member.ErrNotEnoughStarted},
		{"hash", mvcc.ErrCompacted, peer.ErrCompacted}, {"hash", mvcc.ErrFutureRevision, peer.ErrFutureRevision},
		{"enabled", context.DeadlineExceeded, context.DeadlineExceeded},
	} {
		failure = fmt.Errorf("wrapped: %w", e.ours)
		if err := call[e.call](); !errors.Is(err, e.told) {
			t.Errorf("%s, %v: %v", e.call, e.ours, err)
		}
	}
	failure = errors.New("no leader")
	if _, err := s.DowngradeEnabled(ctx); err != failure { // the transport says what failed
		t.Errorf("downgrade: %v", err)
	}
}

// TestLeaseWaitsForApply: what is committed when a lease is asked for is applied
// before the answer, or the answer is 408. A renewal does not wait here.
func TestLeaseWaitsForApply(t *testing.T) {
	c := newFakeCluster(t, "1")
	applied := uint64(3)
	s := &peerServices{clock: c.clock, leases: func() leaseAnswers { return fakeLeases{} }}
	s.indexes = func() (uint64, uint64) { c.mu.Lock(); defer c.mu.Unlock(); return 5, applied }
	ended := make(chan error, 1)
	ask := func(ctx context.Context) { _, err := s.LeaseTimeToLive(ctx, 1, false); ended <- err }
	if ttl, err := s.RenewLease(t.Context(), 1); err != nil || ttl != 30 {
		t.Errorf("a renewal: %d %v", ttl, err)
	}
	go ask(t.Context())
	c.clock.WaitAlarms(2)
	c.clock.Advance(applyPoll)
	c.mu.Lock()
	applied = 5
	c.mu.Unlock()
	c.clock.Advance(applyPoll) // a ring is there now, or is answered by what is applied now
	if err := <-ended; err != nil {
		t.Error(err)
	}
	applied = 4
	go ask(t.Context())
	c.clock.WaitAlarms(2)
	c.clock.Advance(applyWait)
	if err := <-ended; !errors.Is(err, peer.ErrNotCaughtUp) {
		t.Errorf("a member that is behind: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ask(ctx)
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("called off: %v", err)
	}
}

type fakeAsker struct {
	urls []string
	err  error
}

func (f *fakeAsker) RenewLease(_ context.Context, urls []string, _ int64) (int64, error) {
	f.urls = urls
	return 30, f.err
}

func (f *fakeAsker) LeaseTimeToLive(_ context.Context, urls []string, id int64, _ bool) (peer.LeaseTTL, error) {
	f.urls = urls
	return peer.LeaseTTL{ID: id, TTL: 20, GrantedTTL: 30, Keys: [][]byte{[]byte("k")}}, f.err
}

func TestLeaderLeases(t *testing.T) {
	c := newFakeCluster(t, "1 2")
	ask := &fakeAsker{}
	l := leaderLeases{leader: c.Leader, root: c.Root, peers: ask}
	c.lead(2)
	if ttl, err := l.RenewLease(t.Context(), 1); err != nil || ttl != 30 || !slices.Equal(ask.urls, []string{peerURL(2)}) {
		t.Errorf("%d %v at %v", ttl, err, ask.urls)
	}
	if s, err := l.LeaseTimeToLive(t.Context(), 7, true); err != nil || s.ID != 7 || s.TTL != 20 || s.GrantedTTL != 30 || len(s.Keys) != 1 {
		t.Errorf("%+v %v", s, err)
	}
	for _, e := range []struct{ theirs, ours error }{{peer.ErrLeaseNotFound, lease.ErrNotFound}, {peer.ErrNotPrimary, lease.ErrNotPrimary}, {peer.ErrNotCaughtUp, peer.ErrNotCaughtUp}} {
		ask.err = fmt.Errorf("wrapped: %w", e.theirs)
		_, err := l.RenewLease(t.Context(), 1)
		_, err2 := l.LeaseTimeToLive(t.Context(), 1, false)
		if !errors.Is(err, e.ours) || !errors.Is(err2, e.ours) {
			t.Errorf("%v: %v, %v", e.theirs, err, err2)
		}
	}
	c.lead(9)
	if _, err := l.RenewLease(t.Context(), 1); err == nil {
		t.Error("a leader that nobody knows was asked")
	}
}
