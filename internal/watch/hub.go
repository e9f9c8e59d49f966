// Package watch delivers committed events to watchers in revision order.
//
// It knows nothing of raft or gRPC, and it never waits for a client. Hub is the
// entry point: the applier publishes to it, a Stream holds the watchers of one
// client stream, a Sink takes what they are told. Invariants:
//
//	W1: a watcher never sees an event twice, and never out of order.
//	W2: a watcher that has seen revision r has seen every matching event from
//	    its start to r.
//	W3: a progress notice for revision r follows every event up to r.
//	W4: all events of one revision reach a watcher in one response, or in
//	    fragments that nothing of the same watcher comes between.
//	W5: memory is bounded by Options and by the caps of the sinks, however slow
//	    the readers are.
//
// DESIGN.md tells why it is built like this.
package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/mvcc"
)

// Options configure a Hub. Only Source is needed.
type Options struct {
	Source Source

	// ClusterID, MemberID and Term (raft's, as of now; nil means 0) go into the
	// header of each response. Term is called often and must be cheap.
	ClusterID, MemberID uint64
	Term                func() uint64

	// RecentBytes bounds the memory of recent events. Default 32 MiB. The
	// newest batch is kept whatever its size.
	RecentBytes int
	// ChunkBytes is how much history one step reads or delivers, apart from a
	// revision that is larger. Default 1 MiB.
	ChunkBytes int
	// BatchRevisions and BatchBytes bound one response. A response always holds
	// at least one whole revision. Defaults 1000 and 1 MiB.
	BatchRevisions int
	BatchBytes     int
	// FragmentBytes is the encoded size at which the response to a watcher that
	// asked for fragments is split. Default 2 MiB, which is the default
	// max-request-bytes and 512 KiB.
	FragmentBytes int
	// MaxWatchers bounds the watchers of all streams. Default 1,000,000.
	MaxWatchers int
	// ProgressInterval is the time between progress notices to a watcher that
	// asked for them; up to a tenth is added to it at random. Default 10 min.
	ProgressInterval time.Duration

	Clock   clock.Clock // default the operating system's
	Rand    *rand.Rand  // for the jitter; default seeded at random. The hub's from here on
	Metrics *Metrics    // default metrics that nobody collects
}

func (o Options) withDefaults() Options {
	o.RecentBytes = cmp.Or(o.RecentBytes, 32<<20)
	o.ChunkBytes = cmp.Or(o.ChunkBytes, 1<<20)
	o.BatchRevisions = cmp.Or(o.BatchRevisions, 1000)
	o.BatchBytes = cmp.Or(o.BatchBytes, 1<<20)
	o.FragmentBytes = cmp.Or(o.FragmentBytes, 2<<20)
	o.MaxWatchers = cmp.Or(o.MaxWatchers, 1_000_000)
	o.ProgressInterval = cmp.Or(o.ProgressInterval, 10*time.Minute)
	if o.Term == nil {
		o.Term = func() uint64 { return 0 }
	}
	if o.Clock == nil {
		o.Clock = clock.Real()
	}
	if o.Rand == nil {
		o.Rand = rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics()
	}
	return o
}

// Hub fans events out to watchers. Two steps do the work: Deliver gives what is
// newly published to live watchers, CatchUp gives history to the others. Run
// drives them; a simulation calls them itself. Publish, Deliver and CatchUp may
// each be called by one goroutine at a time, and concurrently with one another
// and with everything else.
type Hub struct {
	opts Options

	recent *recent // has a lock of its own, so that Publish waits for nobody else

	deliverWake chan struct{} // capacity 1
	catchUpWake chan struct{} // capacity 1

	mu      sync.Mutex // covers all below, and all watchers, streams and groups
	source  Source
	epoch   uint64               // counts Resets: a step that spans one drops its work
	streams map[*Stream]struct{} // that are open
	count   int                  // watchers of all streams

	// Watchers are in one of two sets, or parked in their stream until its sink
	// has room again. claimed is the revision up to which Deliver has taken
	// events for the live watchers, delivered that up to which it gave them;
	// they differ only in the midst of a Deliver.
	live      *matcher
	behind    *matcher
	claimed   int64
	delivered int64

	// cursor is the revision up to which the shared pass through history has
	// come. Watchers below it wait for the next pass.
	cursor int64

	asking []*Stream // wait for the answer to a progress request
	ticks  tickHeap  // streams by their next progress notice

	delivery fanOut // Deliver's own
	catchUp  fanOut // CatchUp's own
}

// New returns a hub that takes up at the source's revision.
func New(o Options) *Hub {
	o = o.withDefaults()
	revision, _ := o.Source.Revision()
	h := &Hub{
		opts:        o,
		recent:      newRecent(o.RecentBytes, revision),
		deliverWake: make(chan struct{}, 1),
		catchUpWake: make(chan struct{}, 1),
		source:      o.Source,
		streams:     map[*Stream]struct{}{},
		live:        newMatcher(live),
		behind:      newMatcher(behind),
		claimed:     revision,
		delivered:   revision,
	}
	h.delivery.hub, h.catchUp.hub = h, h
	return h
}

// Publish takes the events of one apply batch, in revision order; root is the
// store as the batch left it. It is called after root became readable, by one
// goroutine, in the order of batches. It waits for no client and no disk. The
// hub may keep events and the slices within.
func (h *Hub) Publish(root mvcc.Root, events []mvcc.Event) {
	h.publish(root.Revision(), events)
}

func (h *Hub) publish(revision int64, events []mvcc.Event) {
	if len(events) == 0 {
		return
	}
	h.recent.add(revision, events)
	if !h.pass(revision) {
		wake(h.deliverWake)
	}
}

// pass lets events go by for whom nobody is there, without waking anybody; false
// if somebody may be.
func (h *Hub) pass(revision int64) bool {
	if !h.mu.TryLock() {
		return false
	}
	defer h.mu.Unlock()
	if len(h.streams) > 0 {
		return false
	}
	h.claimed, h.delivered = revision, revision
	return true
}

// Reset puts another store in the place of the present one, as after a snapshot
// from the leader. All watchers go on at the revision they had come to; those
// below the new compact revision are cancelled by the next CatchUp. No Publish
// may run meanwhile.
func (h *Hub) Reset(source Source) {
	revision, _ := source.Revision()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.source = source
	h.epoch++
	h.recent.reset(revision)
	for _, w := range h.live.watchers() {
		next := max(w.next, h.delivered+1)
		if next <= revision {
			h.fallBack(w, next)
		}
	}
	h.claimed, h.delivered, h.cursor = revision, revision, 0
	wake(h.catchUpWake)
	wake(h.deliverWake)
}

// Run drives the steps until ctx ends, then returns nil, or until the disk
// fails, then returns that error.
func (h *Hub) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var catchUpErr error
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer cancel()
		catchUpErr = h.runCatchUp(ctx)
	}()
	err := h.runDeliver(ctx)
	cancel()
	<-done
	if err = errors.Join(err, catchUpErr); err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	return nil
}

func (h *Hub) runDeliver(ctx context.Context) error {
	timer := h.opts.Clock.NewTimer(h.opts.ProgressInterval)
	defer timer.Stop()
	for ctx.Err() == nil {
		now := h.opts.Clock.Now()
		more, next, err := h.Deliver(now)
		if err != nil {
			return err
		}
		if more {
			continue
		}
		if next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(next.Sub(now))
		}
		select {
		case <-ctx.Done():
		case <-h.deliverWake:
		case <-timer.C():
		}
	}
	return nil
}

func (h *Hub) runCatchUp(ctx context.Context) error {
	for ctx.Err() == nil {
		more, err := h.CatchUp(ctx)
		if ctx.Err() != nil {
			break
		}
		if err != nil {
			return err
		}
		if more {
			continue
		}
		select {
		case <-ctx.Done():
		case <-h.catchUpWake:
		}
	}
	return nil
}

// wake makes the step behind c run once more.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// broken reports a broken invariant of this package. It does not return.
func broken(format string, args ...any) {
	panic("watch: broken invariant: " + fmt.Sprintf(format, args...))
}
