package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/rpc"
)

const (
	// maxForwards bounds the requests about leases that are on their way to the
	// leader, and so the goroutines that wait for it.
	maxForwards = 64
	// maxForwardsWaiting bounds those that wait for one of these to end. A stream
	// has at most one.
	maxForwardsWaiting = 16 << 10
	// forwardPause is the time between two tries, as in etcd (peer-protocol.md,
	// section 5).
	forwardPause = 50 * time.Millisecond
)

// leaseForwarder asks the leader. Its methods block until it has answered or ctx
// ends, may be called concurrently, and fail with lease.ErrNotFound if the leader
// does not know the lease. Any other error is worth another try.
type leaseForwarder interface {
	RenewLease(ctx context.Context, id int64) (ttl int64, err error)
	LeaseTimeToLive(ctx context.Context, id int64, keys bool) (rpc.LeaseStatus, error)
}

// forwards brings what only the leader can answer to the leader, whoever that is
// by then. It runs at most maxForwards at a time.
type forwards struct {
	to    leaseForwarder // nil for a member alone
	clock clock.Clock
	// electionTimeout is how long it waits for a leader before it looks again, in
	// case that it was not told of one.
	electionTimeout time.Duration
	// leader returns the member that leads, 0 if none is known; member is this one.
	leader func() uint64
	member uint64
	// primary says that this member's own clock counts.
	primary func() bool

	mu      sync.Mutex
	running int
	waiting []func()
	changed chan struct{} // closed when there may be another leader
}

// errLeads says that what was to be forwarded is this member's own to answer.
var errLeads = errors.New("server: this member leads")

// leaderChanged has those that wait for a leader look again.
func (f *forwards) leaderChanged() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.changed)
	f.changed = make(chan struct{})
}

// start runs fn on a goroutine, now or when its turn comes. It returns false if
// too many wait already.
func (f *forwards) start(fn func()) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.running < maxForwards:
		f.running++
		go f.work(fn)
	case len(f.waiting) < maxForwardsWaiting:
		f.waiting = append(f.waiting, fn)
	default:
		return false
	}
	return true
}

func (f *forwards) work(fn func()) {
	for {
		fn()
		f.mu.Lock()
		if len(f.waiting) == 0 {
			f.waiting = nil
			f.running--
			f.mu.Unlock()
			return
		}
		fn, f.waiting[0] = f.waiting[0], nil
		f.waiting = f.waiting[1:]
		f.mu.Unlock()
	}
}

// ask calls the leader until that succeeds, or fails with lease.ErrNotFound, or
// the deadline comes (consensus.ErrTimeout) or ctx ends. It returns errLeads once
// this member is the one to ask.
func (f *forwards) ask(ctx context.Context, deadline time.Time, call func(ctx context.Context, to leaseForwarder) error) error {
	left := deadline.Sub(f.clock.Now())
	late := f.clock.NewTimer(left)
	defer late.Stop()
	calls, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	last := errors.New("no leader is known")
	for {
		f.mu.Lock()
		changed := f.changed
		f.mu.Unlock()
		pause := forwardPause
		switch leader := f.leader(); {
		case leader == f.member && f.primary():
			return errLeads
		case leader == f.member: // it has yet to apply the first entry of its term
		case leader == 0:
			pause = f.electionTimeout
		case f.to == nil:
			return fmt.Errorf("member %x leads and cannot be asked: %w", leader, lease.ErrNotPrimary)
		default:
			if last = call(calls, f.to); last == nil || errors.Is(last, lease.ErrNotFound) {
				return last
			}
		}
		again := f.clock.NewTimer(pause)
		select {
		case <-changed:
		case <-again.C():
		case <-late.C():
			again.Stop()
			return fmt.Errorf("asking the leader about a lease: %w (%v)", consensus.ErrTimeout, last)
		case <-ctx.Done():
			again.Stop()
			return context.Cause(ctx)
		}
		again.Stop()
	}
}
