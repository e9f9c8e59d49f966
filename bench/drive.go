package bench

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/bench/histogram"
)

// drive is one workload at work on all lanes, from its first operation to its last answer.
type drive struct {
	r     *runner
	work  workload
	total int64 // operations to be counted; 0: no limit
	from  int64 // what was due earlier is not counted

	taken   atomic.Int64
	busy    atomic.Int64
	left    atomic.Int64 // slots that may have work to do
	stopped atomic.Bool
	once    sync.Once
	done    chan struct{} // closed when it is stopped and nothing is busy
	wake    chan struct{} // capacity 1: a lane of an open loop has caught up

	mu   sync.Mutex
	late histogram.Histogram // of an open loop: how late the generator was itself
}

// extent is how much a drive does.
type extent struct {
	streams  int
	total    int64
	warmup   time.Duration
	duration time.Duration // 0: until total, or until there is no work
	rate     float64       // 0: closed loop
}

// take counts an operation in, unless there are enough.
func (d *drive) take(due int64) bool {
	if d.total == 0 || due < d.from {
		return true
	}
	if d.taken.Add(1) > d.total {
		d.taken.Add(-1)
		d.stop()
		return false
	}
	return true
}

func (d *drive) giveBack(due int64) {
	if d.total > 0 && due >= d.from {
		d.taken.Add(-1)
	}
}

// stop lets no further operation begin.
func (d *drive) stop() {
	d.stopped.Store(true)
	if d.busy.Load() == 0 {
		d.once.Do(func() { close(d.done) })
	}
}

// release is the end of one that was busy. When none is, and nothing can start another one, that is the end.
func (d *drive) release() {
	if d.busy.Add(-1) == 0 && d.stopped.Load() {
		d.once.Do(func() { close(d.done) })
	}
}

// gone is the end of a slot that has nothing left to do.
func (d *drive) gone() {
	if d.left.Add(-1) == 0 {
		d.stop()
	}
}

// run drives a workload. measured is called when counting begins.
func (r *runner) run(ctx context.Context, w workload, e extent, measured func()) (*drive, *stats, time.Duration, error) {
	d := &drive{r: r, work: w, total: e.total, done: make(chan struct{}), wake: make(chan struct{}, 1)}
	all, recent := newStats(len(w.kinds())), newStats(len(w.kinds()))
	_, all.sums = w.(interface{ sums() })
	for _, l := range r.lanes {
		l.begin(d, e.streams)
	}
	d.left.Store(int64(len(r.lanes) * e.streams))
	if e.warmup == 0 && measured != nil {
		measured() // before the first request
	}
	start := r.now()
	d.from = start + int64(e.warmup)
	if c, ok := w.(interface{ counting(from int64) }); ok {
		c.counting(d.from)
	}
	for i, l := range r.lanes {
		l.mu.Lock()
		l.every, l.next = 0, 0
		if e.rate > 0 {
			l.every = max(1, int64(float64(len(r.lanes))*float64(time.Second)/e.rate))
			l.next = start + int64(float64(i)*float64(time.Second)/e.rate)
		}
		l.mu.Unlock()
	}
	d.busy.Add(1) // so that it does not end before all have begun
	for _, l := range r.lanes {
		l.mu.Lock()
		l.fill(start)
		l.mu.Unlock()
	}
	d.release()

	if e.rate > 0 {
		pacing, end := context.WithCancel(context.Background())
		defer end()
		go d.pace(pacing)
	}
	look := time.NewTicker(time.Second)
	defer look.Stop()
	var warm, end <-chan time.Time
	if e.warmup > 0 {
		warm = time.After(e.warmup)
	}
	if e.duration > 0 && e.total == 0 {
		end = time.After(e.warmup + e.duration)
	}
	began := r.now() // of what was counted since it was shown
	collect := func(show bool) {
		for _, l := range r.lanes {
			l.stats.collect(recent, all)
		}
		if more, ok := w.(interface{ counters() []*stats }); ok {
			for _, s := range more.counters() {
				s.collect(recent, all)
			}
		}
		now := r.now()
		if show && (e.duration > 0 || e.total > 0) {
			r.progress.show(w, recent, all, time.Duration(now-began), time.Duration(now-d.from), e)
		}
		began = now
		recent.reset()
	}
	cancelled, failed := ctx.Done(), r.failed
	for running := true; running; {
		select {
		case <-warm:
			if measured != nil {
				measured()
			}
		case <-end:
			d.stop()
		case <-cancelled:
			cancelled = nil
			d.stop()
		case <-failed:
			failed = nil
			d.stop()
			r.look(true)
		case <-look.C:
			r.look(failed == nil)
			collect(true)
		case <-d.done:
			running = false
		}
	}
	collect(false)
	r.progress.clear()
	for _, l := range r.lanes {
		l.end()
	}
	return d, all, time.Duration(max(all.last, d.from) - d.from), r.failure()
}

// look gives up operations that take too long; with hopeless those, too, whose events will not come any more.
func (r *runner) look(hopeless bool) {
	now := r.now()
	for _, l := range r.lanes {
		l.look(now, hopeless)
	}
}

// lookAgain bounds how long an open loop sleeps.
const lookAgain = 50 * time.Millisecond

// pace begins what is due. A lane whose slots are all busy, or that has no connection, goes on by itself when that changes, and says
// when it has caught up.
func (d *drive) pace(ctx context.Context) {
	t := time.NewTimer(0)
	defer t.Stop()
	for ctx.Err() == nil && !d.stopped.Load() {
		now := d.r.now()
		next := now + int64(lookAgain)
		for _, l := range d.r.lanes {
			l.mu.Lock()
			if l.next <= now {
				if len(l.free) > 0 && l.conn != nil {
					d.mu.Lock()
					d.late.Add(time.Duration(now - l.next))
					d.mu.Unlock()
				}
				l.fill(now)
			}
			if l.behind = l.next <= now; !l.behind {
				next = min(next, l.next)
			}
			l.mu.Unlock()
		}
		t.Reset(time.Duration(next - d.r.now()))
		select {
		case <-t.C:
		case <-d.wake:
		}
	}
}

// lateP99 is how late the generator was, in microseconds; 0 in a closed loop.
func (d *drive) lateP99() float64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return micros(d.late.Quantile(0.99))
}
