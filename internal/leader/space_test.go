package leader

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/storage"
)

func TestSpaceIsClearedAfterTenSecondsBelow(t *testing.T) {
	full := func(usage int64) SpaceUse { return SpaceUse{Alarm: true, UsageBytes: usage, QuotaBytes: 1000} }
	for _, c := range []struct {
		story string
		steps []SpaceUse // one a second
		clear int        // the step that clears, -1: none
	}{
		{"stays at 90 %", repeat(full(900), 30), -1},
		{"below", repeat(full(899), 30), 10},
		{"up for a moment", append(append(repeat(full(10), 9), full(950)), repeat(full(10), 11)...), 20},
		{"the alarm was cleared by hand and came back", append(append(repeat(full(10), 9), SpaceUse{UsageBytes: 10, QuotaBytes: 1000}), repeat(full(10), 11)...), 20},
		{"no quota any more", repeat(SpaceUse{Alarm: true, UsageBytes: 1 << 40}, 11), 10},
		{"no alarm", repeat(SpaceUse{UsageBytes: 1, QuotaBytes: 1000}, 30), -1},
		{"a quota that would overflow", repeat(SpaceUse{Alarm: true, UsageBytes: 1 << 62, QuotaBytes: 1<<63 - 1}, 11), 10},
	} {
		var s Space
		got := -1
		for i, u := range c.steps {
			if s.Step(time.Unix(int64(i), 0), u) {
				got = i
				break
			}
		}
		if got != c.clear {
			t.Errorf("%s: cleared at step %d, want %d", c.story, got, c.clear)
		}
	}
}

func repeat(u SpaceUse, n int) []SpaceUse {
	out := make([]SpaceUse, n)
	for i := range out {
		out[i] = u
	}
	return out
}

// clearings counts what is proposed about the alarm.
type clearings struct {
	revocations
	n atomic.Int64
}

func (c *clearings) ClearNoSpace(_ uint64, done func(error)) { c.n.Add(1); done(nil) }

// TestKeeperClearsNoSpace: the leader does, and only where it may; who follows does not.
func TestKeeperClearsNoSpace(t *testing.T) {
	s, err := storage.Open(storage.Options{Dir: "store", FS: vfs.NewMem()})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	leases, err := lease.Open(s, lease.Options{MinTTL: 2})
	if err != nil {
		t.Fatal(err)
	}
	clk := clock.NewFake(time.Unix(1_000_000, 0))
	var may atomic.Bool
	looks := make(chan struct{})
	out := &clearings{}
	k := New(Options{
		Lessor: lease.NewLessor(leases, lease.LessorOptions{Now: clk.Now}), Proposer: out, Stands: func() Standing { return Standing{Revision: 1} }, Clock: clk,
		SpaceUse: func() (SpaceUse, bool) {
			looks <- struct{}{}
			return SpaceUse{Alarm: true, UsageBytes: 1, QuotaBytes: 1000}, may.Load()
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() { k.Run(ctx); close(over) }()
	defer func() { cancel(); <-over }()
	clk.WaitAlarms(1)
	for range 40 { // it follows: nobody looks, or this would never end
		clk.Advance(pass)
	}
	k.Lead(2)
	seconds := func(n int) {
		for range n * int(time.Second/pass) {
			clk.Advance(pass)
			select {
			case <-looks:
			case <-time.After(10 * time.Second):
				t.Fatal("the keeper does not look")
			}
		}
	}
	for !k.o.Lessor.Primary() {
		time.Sleep(time.Millisecond)
	}
	seconds(30)
	if n := out.n.Load(); n != 0 {
		t.Fatalf("cleared %d times where it must not", n)
	}
	may.Store(true)
	seconds(9)
	if n := out.n.Load(); n != 0 {
		t.Fatalf("cleared after 9 s")
	}
	seconds(3)
	if n := out.n.Load(); n != 1 {
		t.Fatalf("cleared %d times within 12 s", n)
	}
}

var _ Proposer = (*clearings)(nil)
