package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/rpc"
)

// errNotPrimary has the text that real members send.
var errNotPrimary = errors.New("not a primary lessor")

// leases is rpc.Leases.
type leases struct{ m *Member }

// Renew implements rpc.Leases. A lease whose rest was checkpointed is
// checkpointed anew first: else the next leader would let it expire early.
func (l leases) Renew(ctx context.Context, u rpc.Identity, id int64) (int64, error) {
	t := l.m.machine.Leases()
	known, ok := t.Lookup(id)
	if !ok {
		// It may have been granted a moment ago, in an entry not yet applied here.
		if err := l.m.caughtUp(ctx); err != nil {
			return 0, err
		}
		if known, ok = t.Lookup(id); !ok {
			return 0, nil
		}
	}
	if err := l.mayUse(u, id); err != nil {
		return 0, err
	}
	if known.Remaining > 0 {
		done := make(chan error, 1)
		l.m.proposer().Checkpoint(&pb.LeaseCheckpointRequest{Checkpoints: []*pb.LeaseCheckpoint{{ID: id}}}, func(err error) { done <- err })
		if err := wait(ctx, done); err != nil {
			return 0, err
		}
	}
	for {
		now := l.m.clock.Now()
		ttl, err := l.m.lessor.Renew(id, now)
		switch {
		case errors.Is(err, lease.ErrNotFound):
			return 0, nil
		case errors.Is(err, lease.ErrNotPrimary):
			return 0, errNotPrimary
		case !errors.Is(err, lease.ErrExpired):
			return ttl, err
		}
		// Its end is on its way, and the client is told once it is there; unless
		// this member stood still, and finds that the lease lives on.
		select {
		case <-l.m.lessor.Gone(id, now):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// Status implements rpc.Leases.
func (l leases) Status(ctx context.Context, u rpc.Identity, id int64, keys bool) (rpc.LeaseStatus, error) {
	if err := l.m.caughtUp(ctx); err != nil {
		return rpc.LeaseStatus{}, err
	}
	t := l.m.machine.Leases()
	known, ok := t.Lookup(id)
	if !ok {
		return rpc.LeaseStatus{ID: id, TTL: -1}, nil
	}
	left, err := l.m.lessor.Remaining(id, l.m.clock.Now())
	switch {
	case errors.Is(err, lease.ErrNotFound):
		return rpc.LeaseStatus{ID: id, TTL: -1}, nil
	case err != nil:
		return rpc.LeaseStatus{}, errNotPrimary
	}
	s := rpc.LeaseStatus{ID: id, TTL: int64(left / time.Second), GrantedTTL: known.TTL}
	if keys {
		a, _, _ := l.m.machine.Tables()
		s.Keys = t.Keys(id)
		for _, k := range s.Keys {
			if err := a.CheckRange(u.User, u.AuthRevision, k, nil); err != nil {
				return rpc.LeaseStatus{}, err
			}
		}
	}
	return s, nil
}

// IDs implements rpc.Leases.
func (l leases) IDs(u rpc.Identity) ([]int64, error) {
	a, _, _ := l.m.machine.Tables()
	if a.Enabled() && a.CheckAdmin(u.User) != nil {
		for _, known := range l.m.machine.Leases().All() {
			var refused error
			l.m.machine.Leases().EveryKey(known.ID, func(key []byte) bool {
				refused = a.CheckRange(u.User, u.AuthRevision, key, nil)
				return refused == nil
			})
			if refused != nil {
				return nil, refused
			}
		}
	}
	return l.m.lessor.IDs(), nil
}

// mayUse checks for the right to write every key of a lease.
func (l leases) mayUse(u rpc.Identity, id int64) error {
	a, _, _ := l.m.machine.Tables()
	if !a.Enabled() || a.CheckAdmin(u.User) == nil {
		return nil
	}
	var refused error
	l.m.machine.Leases().EveryKey(id, func(key []byte) bool {
		refused = a.CheckPut(u.User, u.AuthRevision, key)
		return refused == nil
	})
	return refused
}

// caughtUp waits until this member has applied all that was committed when it
// was asked.
func (m *Member) caughtUp(ctx context.Context) error {
	done := make(chan error, 1)
	deadline, _ := ctx.Deadline()
	proposer{m.node, m.ids}.ReadIndex(deadline, func(err error) { done <- err })
	return wait(ctx, done)
}

// wait returns what comes out of done, or why ctx ended.
func wait(ctx context.Context, done <-chan error) error {
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("waiting: %w", ctx.Err())
	}
}
