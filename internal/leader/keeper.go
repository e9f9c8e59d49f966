// Package leader does the jobs that only the leader does: it expires leases,
// checkpoints what is left of them, compacts history on schedule, clears the
// alarm of a store that is no longer full, and compares hashes with the others.
//
// It changes nothing itself: each job ends in a proposed command. Keeper is the
// main type, Checker the one that compares. Invariants:
//
//	D1: nothing is proposed before this member has applied an entry of its own
//	    term (Promote), and nothing gets into the log once it no longer leads in it.
//	D2: a member that was itself stalled extends leases rather than revoke them.
//	D3: at most MaxRevokes revocations are in flight.
//	D4: no alarm CORRUPT is raised for a difference that was seen only once.
package leader

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/lease"
)

const (
	// pass is the time between two looks at the leases.
	pass = 500 * time.Millisecond
	// stalledAfter is how late a look must be to mean that this member stood
	// still, rather than that the machine is busy.
	stalledAfter = time.Second
	// checkpointsPerEntry bounds the leases in one LeaseCheckpoint.
	checkpointsPerEntry = 1000
)

// MaxRevokes bounds the revocations in flight.
const MaxRevokes = 16

// Proposer puts commands into the log, if this member leads in that term: what it
// judged is not for the next leader to carry out, who may just have extended the
// lease. Its methods neither block nor call the Lessor, which may be calling them;
// done is called once with what became of the command.
type Proposer interface {
	// Revoke proposes the end of a lease, as root.
	Revoke(term uint64, id int64, done func(error))
	Checkpoint(term uint64, r *pb.LeaseCheckpointRequest, done func(error))
	Compact(term uint64, revision int64, done func(error))
	// ClearNoSpace proposes the end of every alarm NOSPACE.
	ClearNoSpace(term uint64, done func(error))
}

// Options configure a Keeper. Lessor and Proposer are required.
type Options struct {
	Lessor   *lease.Lessor
	Proposer Proposer
	// Compactor may be nil.
	Compactor *Compactor
	// Stands is how far this member has come.
	Stands func() Standing
	// SpaceUse says how full the store is. Nil leaves the alarm NOSPACE to people;
	// ok is false while it must be left to them.
	SpaceUse func() (u SpaceUse, ok bool)
	// ElectionTimeout is what leases live longer at a change of leader.
	ElectionTimeout time.Duration
	Clock           clock.Clock
	Logger          *slog.Logger
}

// Keeper drives the jobs. Run does the work in one goroutine; Lead and Follow
// may be called from any.
type Keeper struct {
	o Options
	// want is what Run is to become: the term that it leads in, or 0.
	want atomic.Uint64
	wake chan struct{} // capacity 1
	// free has a token for each revocation that may still be proposed.
	free chan struct{}
	// compacting says that an automatic compaction is in flight.
	compacting atomic.Bool

	// Run's own:
	leads uint64    // the term that it leads in, or 0
	last  time.Time // when it last looked at the clock
	space Space
}

// New returns a keeper that follows.
func New(o Options) *Keeper {
	if o.Clock == nil {
		o.Clock = clock.Real()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	k := &Keeper{o: o, wake: make(chan struct{}, 1), free: make(chan struct{}, MaxRevokes)}
	for range MaxRevokes {
		k.free <- struct{}{}
	}
	return k
}

// Lead says that this member leads and has applied the first entry of its term.
func (k *Keeper) Lead(term uint64) { k.set(term) }

// Follow says that this member does not lead.
func (k *Keeper) Follow() { k.set(0) }

func (k *Keeper) set(term uint64) {
	k.want.Store(term)
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Run works until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	ticker := k.o.Clock.NewTicker(pass)
	defer ticker.Stop()
	k.last = k.o.Clock.Now()
	for {
		select {
		case <-ctx.Done():
			k.o.Lessor.Demote()
			return
		case <-k.wake:
		case <-ticker.C():
		}
		if want := k.want.Load(); want != k.leads {
			k.last = k.o.Clock.Now()
			k.change(want, k.last)
			k.leads = want
			continue
		}
		now := k.look()
		k.compact(now)
		if k.leads == 0 {
			continue
		}
		k.leases(ctx, now, ticker.C())
		k.clearNoSpace(now)
	}
}

// look reads the clock. A look that comes late means that this member stood
// still and may have missed keep-alives.
func (k *Keeper) look() (now time.Time) {
	now = k.o.Clock.Now()
	late := now.Sub(k.last) - pass
	k.last = now
	if k.leads != 0 && late > stalledAfter {
		k.o.Logger.Warn("this member stood still: leases are extended", "late", late)
		k.o.Lessor.Stalled(late)
	}
	return now
}

func (k *Keeper) change(term uint64, now time.Time) {
	if term == 0 {
		k.o.Lessor.Demote()
		return
	}
	k.o.Lessor.Promote(now, k.o.ElectionTimeout)
	k.space.Reset()
}

// leases proposes what is due, and waits where too much is in flight. It looks
// at the clock while it waits, lest a standstill pass for waiting.
func (k *Keeper) leases(ctx context.Context, now time.Time, ticks <-chan time.Time) {
	for _, id := range k.o.Lessor.Expired(now) {
		for waits := true; waits; {
			select {
			case <-k.free:
				waits = false
			case <-ticks:
				k.look()
			case <-ctx.Done():
				return
			}
		}
		if k.want.Load() != k.leads {
			k.free <- struct{}{}
			return
		}
		k.o.Proposer.Revoke(k.leads, id, func(err error) {
			k.free <- struct{}{}
			if err != nil {
				k.o.Logger.Debug("revoking an expired lease failed, it is tried again", "lease", id, "error", err)
			}
		})
	}
	for k.want.Load() == k.leads {
		if k.o.Lessor.DueCheckpoints(now, checkpointsPerEntry, k.checkpoint) < checkpointsPerEntry {
			return
		}
	}
}

func (k *Keeper) checkpoint(due []lease.Lease) {
	r := &pb.LeaseCheckpointRequest{}
	for _, l := range due {
		r.Checkpoints = append(r.Checkpoints, &pb.LeaseCheckpoint{ID: l.ID, Remaining_TTL: l.Remaining})
	}
	k.o.Proposer.Checkpoint(k.leads, r, func(err error) {
		if err != nil {
			k.o.Logger.Debug("checkpointing leases failed", "error", err)
		}
	})
}

// compact has the compactor look at the store, and proposes what it asks for
// while this member leads.
func (k *Keeper) compact(now time.Time) {
	if k.o.Compactor == nil {
		return
	}
	revision, ok := k.o.Compactor.Step(now, k.o.Stands(), k.leads != 0 && !k.compacting.Load())
	if !ok {
		return
	}
	k.compacting.Store(true)
	k.o.Proposer.Compact(k.leads, revision, func(err error) {
		defer k.compacting.Store(false)
		if err != nil {
			k.o.Logger.Warn("automatic compaction failed, it is tried again", "revision", revision, "error", err)
			return
		}
		k.o.Logger.Info("automatic compaction", "revision", revision)
	})
}

func (k *Keeper) clearNoSpace(now time.Time) {
	if k.o.SpaceUse == nil {
		return
	}
	u, ok := k.o.SpaceUse()
	if !ok {
		k.space.Reset()
		return
	}
	if !k.space.Step(now, u) {
		return
	}
	k.o.Proposer.ClearNoSpace(k.leads, func(err error) {
		if err != nil {
			k.o.Logger.Warn("clearing alarm NOSPACE failed, it is tried again", "error", err)
			return
		}
		k.o.Logger.Info("the store is well below its quota again: alarm NOSPACE is cleared", "usage-bytes", u.UsageBytes, "quota-bytes", u.QuotaBytes)
	})
}
