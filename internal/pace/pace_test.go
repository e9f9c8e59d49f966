package pace

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

type rig struct {
	*Pace
	clock *clock.Fake
}

func newRig() *rig {
	c := clock.NewFake(time.Unix(1000, 0))
	return &rig{New(Options{Clock: c, Most: 100 << 20, Least: 0.25}), c}
}

// sync is one sync of the log that takes so long.
func (r *rig) sync(took time.Duration) {
	r.SyncBegan()
	r.clock.Advance(took)
	r.SyncEnded()
}

func (r *rig) syncs(n int, took time.Duration) {
	for range n {
		r.sync(took)
		r.clock.Advance(time.Millisecond)
	}
}

// learned is a rig whose syncs usually take 4 ms.
func learned() *rig {
	r := newRig()
	r.clock.Advance(2 * aftermath)
	r.syncs(2*leastSamples, 4*time.Millisecond)
	return r
}

// spend does pieces that take so long each, for a time, and returns the bytes done and the share of the time that they took.
func (r *rig) spend(t *testing.T, w *Work, bytes int, each, during time.Duration) (done int, busy float64) {
	t.Helper()
	began, worked := r.clock.Now(), time.Duration(0)
	for r.clock.Now().Sub(began) < during {
		r.clock.Advance(each)
		worked += each
		done += bytes
		waited := make(chan error, 1)
		set := r.clock.Alarms()
		go func() { waited <- w.Wait(t.Context(), bytes) }()
		for over := false; !over; {
			select {
			case err := <-waited:
				if err != nil {
					t.Fatal(err)
				}
				over = true
			default:
				if r.clock.Alarms() > set {
					r.clock.Advance(100 * time.Microsecond)
				}
			}
		}
	}
	return done, float64(worked) / float64(r.clock.Now().Sub(began))
}

// TestRate: without anything that is late, work gets all of the rate, and no more; what rests is not saved up.
func TestRate(t *testing.T) {
	r := learned()
	w := r.Begin()
	defer w.End()
	for range 3 {
		done, _ := r.spend(t, w, 256<<10, 10*time.Microsecond, time.Second)
		if rate := float64(done) / (100 << 20); math.Abs(rate-1) > 0.05 {
			t.Errorf("%.2f of the rate was done in a second", rate)
		}
		r.clock.Advance(10 * time.Second)
	}
}

// TestLate: late syncs take the share down to its least and not below, where work is done during that share of the time, and good
// ones bring it back.
func TestLate(t *testing.T) {
	r := learned()
	w := r.Begin()
	defer w.End()
	r.syncs(5, 7*time.Millisecond) // within twice the usual
	if s := r.Share(); s != 1 {
		t.Errorf("syncs that are not late leave a share of %v", s)
	}
	r.sync(12 * time.Millisecond)
	if s := r.Share(); s >= 1 || s < 1-1.1*lateCut {
		t.Errorf("one late sync leaves a share of %v", s)
	}
	r.syncs(20, 30*time.Millisecond)
	if s := r.Share(); s != 0.25 {
		t.Fatalf("late syncs leave a share of %v", s)
	}
	// A sync goes on meanwhile, or the share would grow.
	r.SyncBegan()
	w = r.Begin() // of now
	defer w.End()
	if done, _ := r.spend(t, w, 256<<10, 10*time.Microsecond, 200*time.Millisecond); math.Abs(float64(done)/(25<<20)/0.2-1) > 0.1 {
		t.Errorf("%d bytes in 200 ms at a quarter of 100 MiB/s", done)
	}
	if _, busy := r.spend(t, w, 1, 500*time.Microsecond, 200*time.Millisecond); math.Abs(busy-0.25) > 0.05 {
		t.Errorf("pieces took %.2f of the time with a share of a quarter", busy)
	}
	r.SyncEnded()
	r.syncs(600, 4*time.Millisecond)
	if s := r.Share(); s != 1 {
		t.Errorf("600 good syncs bring the share to %v", s)
	}
}

// TestBalance: with one late sync in a hundred the share stays, with more it falls, with fewer it rises.
func TestBalance(t *testing.T) {
	after := func(every int) float64 {
		r := learned()
		w := r.Begin()
		defer w.End()
		r.sync(30 * time.Millisecond)
		r.sync(30 * time.Millisecond)
		for i := range 2000 {
			took := 4 * time.Millisecond
			if i%every == every-1 {
				took = 9 * time.Millisecond
			}
			r.sync(took)
		}
		return r.Share()
	}
	if s := after(20); s > 0.3 {
		t.Errorf("with one in 20 late the share is %v", s)
	}
	if s := after(400); s < 0.65 {
		t.Errorf("with one in 400 late the share is %v", s)
	}
}

// TestHangs: a sync that has not ended counts as soon as it is late, and once.
func TestHangs(t *testing.T) {
	r := learned()
	w := r.Begin()
	defer w.End()
	r.SyncBegan()
	r.clock.Advance(20 * time.Millisecond)
	r.spend(t, w, 1, time.Millisecond, 30*time.Millisecond)
	r.SyncEnded()
	if s := r.Share(); math.Abs(s-(1-lateCut)) > 1e-9 {
		t.Errorf("one late sync leaves a share of %v, want %v", s, 1-lateCut)
	}
}

// TestIdle: where nobody writes the share comes back by itself.
func TestIdle(t *testing.T) {
	r := learned()
	w := r.Begin()
	defer w.End()
	r.syncs(20, 30*time.Millisecond)
	r.clock.Advance(2 * time.Second)
	r.spend(t, w, 1, time.Millisecond, 2*time.Millisecond)
	if s := r.Share(); s != 1 {
		t.Errorf("after 2 s without a sync the share is %v", s)
	}
}

// TestUsual: what is usual is not learned beside work, nor in its aftermath.
func TestUsual(t *testing.T) {
	r := learned()
	before := r.lateAfter()
	w := r.Begin()
	r.syncs(1000, 100*time.Millisecond)
	w.End()
	r.syncs(9, 100*time.Millisecond)
	if after := r.lateAfter(); after != before || before < 8*time.Millisecond || before > 10*time.Millisecond {
		t.Errorf("late is after %v, was after %v: want 8 to 10 ms", after, before)
	}
	r.clock.Advance(aftermath)
	r.syncs(1000, 10*time.Millisecond)
	if after := r.lateAfter(); after < 20*time.Millisecond || after > 24*time.Millisecond {
		t.Errorf("late is after %v where syncs take 10 ms", after)
	}
}

// TestUnknown: a member that has hardly written has an idea of late, too.
func TestUnknown(t *testing.T) {
	r := newRig()
	w := r.Begin()
	defer w.End()
	r.sync(unknownLate)
	if s := r.Share(); s != 1 {
		t.Errorf("share %v", s)
	}
	r.sync(unknownLate + time.Millisecond)
	if s := r.Share(); s == 1 {
		t.Error("nothing is late")
	}
}

// TestJoin: what belongs to other work waits only while that goes on.
func TestJoin(t *testing.T) {
	r := learned()
	j := r.Join()
	for range 100 {
		if err := j.Wait(t.Context(), 1<<30); err != nil { // would wait for ten seconds
			t.Fatal(err)
		}
	}
	w := r.Begin()
	waited := make(chan error, 1)
	go func() { waited <- j.Wait(t.Context(), 10<<20) }()
	r.clock.WaitAlarms(1)
	r.clock.Advance(200 * time.Millisecond)
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
	w.End()
}

func TestCancelled(t *testing.T) {
	r := newRig()
	ctx, cancel := context.WithCancel(t.Context())
	w := r.Begin()
	defer w.End()
	waited := make(chan error, 1)
	go func() { waited <- w.Wait(ctx, 1<<30) }()
	r.clock.WaitAlarms(1)
	cancel()
	if err := <-waited; !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that was cancelled: %v", err)
	}
	if r.clock.Alarms() > 0 {
		t.Error("its timer is still set")
	}
}

// TestHistogram compares quantiles with what was put in, and sees old samples go.
func TestHistogram(t *testing.T) {
	var h histogram
	if _, ok := h.quantile(0.5); ok {
		t.Error("an empty histogram has a median")
	}
	for i := range 1000 {
		h.add(time.Duration(i+1) * time.Millisecond)
	}
	for share, want := range map[float64]time.Duration{0.5: 500 * time.Millisecond, 0.99: 990 * time.Millisecond, 1: time.Second} {
		if got, ok := h.quantile(share); !ok || got < want || float64(got) > float64(want)*(1+1.0/perPower)+1 {
			t.Errorf("quantile %v is %v, want %v", share, got, want)
		}
	}
	for range 8 * fullAt {
		h.add(time.Millisecond)
	}
	if got, _ := h.quantile(0.99); got > 2*time.Millisecond {
		t.Errorf("old samples are still there: p99 is %v", got)
	}
	h.add(-1)
	h.add(0)
	h.add(math.MaxInt64)
}
