package leader

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/storage"
)

// revocations hands each revocation to the test, which decides when it is done.
type revocations chan func(error)

func (r revocations) Revoke(_ uint64, _ int64, done func(error))                          { r <- done }
func (r revocations) Checkpoint(_ uint64, _ *pb.LeaseCheckpointRequest, done func(error)) { done(nil) }
func (r revocations) Compact(_ uint64, _ int64, done func(error))                         { done(nil) }
func (r revocations) ClearNoSpace(_ uint64, done func(error))                             { done(nil) }

// heardClock is a fake clock that goes on only when the one ticker there is has
// been heard, so that no ring is lost on a goroutine that is slow.
type heardClock struct {
	*clock.Fake
	ticker atomic.Pointer[clock.Ticker]
}

func (c *heardClock) NewTicker(d time.Duration) clock.Ticker {
	t := c.Fake.NewTicker(d)
	c.ticker.Store(&t)
	return t
}

func (c *heardClock) turn(d time.Duration) {
	c.Advance(d)
	for t := *c.ticker.Load(); len(t.C()) > 0; {
		time.Sleep(time.Millisecond)
	}
}

// grant grants leases of one TTL, numbered from an ID on.
func grant(t *testing.T, s *storage.Store, leases *lease.Table, from, to, ttl int64) {
	t.Helper()
	b := s.NewBatch()
	for id := from; id < to; id++ {
		if _, err := leases.Grant(b, id, ttl); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Commit(b); err != nil {
		t.Fatal(err)
	}
}

// A member may be paused while its revocations are in flight. That must not
// pass for waiting: leases whose keep-alives it missed would end.
func TestStandstillWhileRevokingExtendsLeases(t *testing.T) {
	s, err := storage.Open(storage.Options{Dir: "store", FS: vfs.NewMem()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	leases, err := lease.Open(s, lease.Options{MinTTL: 2})
	if err != nil {
		t.Fatal(err)
	}
	clk := &heardClock{Fake: clock.NewFake(time.Unix(1_000_000, 0))}
	lessor := lease.NewLessor(leases, lease.LessorOptions{Now: clk.Now})
	const short, kept = MaxRevokes + 4, 1000
	grant(t, s, leases, 1, short+1, 2)
	grant(t, s, leases, kept, kept+1, 10)

	revoked := make(revocations, short+1)
	k := New(Options{Lessor: lessor, Proposer: revoked, Stands: func() Standing { return Standing{Revision: 1} }, Clock: clk})
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() { k.Run(ctx); close(over) }()
	defer func() { cancel(); <-over }()
	clk.WaitAlarms(1)
	k.Lead(2)
	for !lessor.Primary() {
		time.Sleep(time.Millisecond)
	}

	// The short ones expire; all that may be in flight is, and the keeper waits.
	var inFlight []func(error)
	for len(inFlight) < MaxRevokes {
		clk.turn(pass)
		for more := true; more && len(inFlight) < MaxRevokes; {
			select {
			case done := <-revoked:
				inFlight = append(inFlight, done)
			case <-time.After(5 * time.Millisecond):
				more = false
			}
		}
	}
	clk.turn(time.Minute) // the pause; then everything goes on
	before := clk.Now()
	for left, err := lessor.Remaining(kept, before); left == 0; left, err = lessor.Remaining(kept, before) {
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-t.Context().Done():
			t.Fatal("the lease was not extended")
		default:
		}
		for _, done := range inFlight {
			done(nil)
		}
		inFlight = inFlight[:0]
		clk.turn(pass)
		select {
		case done := <-revoked:
			inFlight = append(inFlight, done)
		case <-time.After(5 * time.Millisecond):
		}
		if clk.Now().Sub(before) > 30*time.Second {
			t.Fatal("the kept lease was not extended by the minute for which the member stood still")
		}
	}
}

// compactions hands each automatic compaction to the test.
type compactions struct {
	revocations
	asked chan int64
}

func (c compactions) Compact(_ uint64, revision int64, done func(error)) {
	c.asked <- revision
	done(nil)
}

// TestKeeperCompactsByWhatItSawAsAFollower: who has followed for a period need not lead for one.
func TestKeeperCompactsByWhatItSawAsAFollower(t *testing.T) {
	s, err := storage.Open(storage.Options{Dir: "store", FS: vfs.NewMem()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	leases, err := lease.Open(s, lease.Options{MinTTL: 2})
	if err != nil {
		t.Fatal(err)
	}
	clk := &heardClock{Fake: clock.NewFake(time.Unix(1_000_000, 0))}
	out := compactions{make(revocations, 1), make(chan int64, 10)}
	var revision atomic.Int64
	revision.Store(7)
	seen := make(chan struct{}, 1)
	k := New(Options{
		Lessor: lease.NewLessor(leases, lease.LessorOptions{Now: clk.Now}), Proposer: out, Clock: clk,
		Compactor: &Compactor{Period: time.Minute},
		Stands: func() Standing {
			defer func() {
				select {
				case seen <- struct{}{}:
				default:
				}
			}()
			return Standing{Revision: revision.Load()}
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() { k.Run(ctx); close(over) }()
	defer func() { cancel(); <-over }()
	clk.WaitAlarms(1)
	clk.turn(pass)
	select {
	case <-seen:
	case <-time.After(10 * time.Second):
		t.Fatal("a follower takes no sample")
	}
	revision.Store(1000)
	for range time.Minute / pass {
		clk.turn(pass)
	}
	if len(out.asked) != 0 {
		t.Fatal("a follower compacts")
	}
	k.Lead(2)
	for !k.o.Lessor.Primary() {
		time.Sleep(time.Millisecond)
	}
	clk.turn(pass)
	select {
	case rev := <-out.asked:
		if rev != 7 {
			t.Errorf("compacted to %d", rev)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a new leader compacts nothing")
	}
}
