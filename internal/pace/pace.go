// Package pace keeps long work from being felt by writes.
//
// Backups, snapshots for other members, the deletions of a compaction and giving space back are done in pieces, and each waits its
// turn after every piece. How long follows how the syncs of the raft log are doing: every write waits for one, and it is late when
// the disk is busy as well as when the processors are. Pace is the main type; it knows neither, and what a piece counts as is for
// the worker to say. Invariants:
//
//	P1: work has a share of at least Options.Least, however late the syncs are, so it ends: a share s means at most s*Options.Most
//	    bytes a second for all work together, and work during s of the time for each.
//	P2: what is usual is learned from syncs beside which no work went on.
package pace

import (
	"context"
	"math"
	"runtime"
	"sync"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

// Options configure a Pace. The zero value is usable.
type Options struct {
	Clock clock.Clock // nil is the operating system's
	Most  int64       // bytes a second; default 192 MiB
	Least float64     // share; default a quarter
}

// The share is such that one sync in a hundred is late: by more than lateFactor of what one in a hundred usually takes. A late one
// takes lateCut of the share, and each other gives back a part of that which is smaller in that ratio.
const (
	lateFactor = 2
	lateCut    = 0.3
	lateOnes   = 0.01
)

const (
	// While nobody writes, the share grows by idleGrowth in each idleEvery.
	idleEvery  = 50 * time.Millisecond
	idleGrowth = 1.1
	// unknownLate is late while too few syncs were seen to know what is usual, leastLate is never late.
	unknownLate = 20 * time.Millisecond
	leastLate   = 2 * time.Millisecond
	// aftermath is how long work is felt after its end: what it wrote is on its way to the disk.
	aftermath = time.Second
	// step is the shortest pause, and what may be made up for after a stall.
	step = 2 * time.Millisecond
	// pieceMost bounds the time that a piece counts as: what took longer waited for something else.
	pieceMost = 20 * time.Millisecond
)

// Pace is what the work of one member shares. Its methods may be called by anyone at any time.
type Pace struct {
	clock clock.Clock
	most  float64
	least float64

	mu    sync.Mutex // covers all below
	usual histogram
	works int
	ended time.Time // of the last work, if there was one

	began time.Time // of the sync under way; zero if there is none
	late  bool      // it was found late already
	quiet time.Time // since then no sync was under way, or the share was raised for that

	share float64
	cut   time.Time // when it was last lowered
	due   time.Time // of the next byte
}

// New returns a Pace without any work.
func New(o Options) *Pace {
	if o.Clock == nil {
		o.Clock = clock.Real()
	}
	if o.Most == 0 {
		o.Most = 192 << 20
	}
	if o.Least == 0 {
		o.Least = 0.25
	}
	now := o.Clock.Now()
	return &Pace{clock: o.Clock, most: float64(o.Most), least: o.Least, share: 1, quiet: now, cut: now, due: now}
}

// SyncBegan notes that a sync of the raft log is under way, of which there is one at a time.
func (p *Pace) SyncBegan() {
	now := p.clock.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle(now)
	p.began, p.late = now, false
}

// SyncEnded notes that it has ended.
func (p *Pace) SyncEnded() {
	now := p.clock.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	took := now.Sub(p.began)
	switch {
	case p.works > 0 && took > p.lateAfter():
		p.lower(now)
	case p.works > 0:
		p.set(p.share * (1 + lateCut*lateOnes/(1-lateOnes)))
	case now.Sub(p.ended) > aftermath:
		p.usual.add(took)
	}
	p.began, p.quiet = time.Time{}, now
}

// lateAfter is how long a sync takes that is late.
func (p *Pace) lateAfter() time.Duration {
	usual, ok := p.usual.quantile(1 - lateOnes)
	if !ok {
		return unknownLate
	}
	return max(lateFactor*usual, leastLate)
}

// lower takes from the share for a late sync, once for each. One that began before it was last lowered says nothing of the present
// share.
func (p *Pace) lower(now time.Time) {
	if !p.late && !p.began.Before(p.cut) {
		p.set(p.share * (1 - lateCut))
		p.cut = now
	}
	p.late = true
}

// idle gives the share back while nobody writes.
func (p *Pace) idle(now time.Time) {
	if !p.began.IsZero() {
		return
	}
	if n := math.Floor(float64(now.Sub(p.quiet)) / float64(idleEvery)); n > 0 {
		p.set(p.share * math.Pow(idleGrowth, n))
		p.quiet = now
	}
}

func (p *Pace) set(share float64) { p.share = min(max(share, p.least), 1) }

// Share is the present one.
func (p *Pace) Share() float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.share
}

func (p *Pace) busy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.works > 0
}

// Work is one piece of work after another, by one goroutine.
type Work struct {
	p     *Pace
	began time.Time     // of the piece in hand
	owed  time.Duration // rest that was too short for a pause

	joined bool
}

// Begin begins a work.
func (p *Pace) Begin() *Work {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.works++
	return &Work{p: p, began: p.clock.Now()}
}

// Join returns a Work that belongs to what others have begun: while they go on it waits as they do, else it does not. It has no end.
func (p *Pace) Join() *Work { return &Work{p: p, joined: true} }

// End ends the work. It is called once.
func (w *Work) End() {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	w.p.works--
	w.p.ended = w.p.clock.Now()
}

// Wait returns when the next piece may be begun, after one of so many bytes, or with the error of ctx.
func (w *Work) Wait(ctx context.Context, bytes int) error {
	now := w.p.clock.Now()
	if w.joined && !w.p.busy() {
		w.began, w.owed = now, 0
		return ctx.Err()
	}
	due, rest := w.p.take(now, min(now.Sub(w.began), pieceMost), bytes)
	w.owed += rest
	pause := max(due, w.owed)
	if pause < step {
		runtime.Gosched() // a call may wait for the processor
		w.began = w.p.clock.Now()
		return ctx.Err()
	}
	t := w.p.clock.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C():
	case <-ctx.Done():
		return ctx.Err()
	}
	w.began = w.p.clock.Now()
	w.owed = max(0, w.owed-w.began.Sub(now))
	return nil
}

// take accounts for a piece that took so long: after what time the next may begin for its bytes, and what rest is due for its time.
func (p *Pace) take(now time.Time, took time.Duration, bytes int) (due, rest time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle(now)
	if !p.began.IsZero() && now.Sub(p.began) > p.lateAfter() {
		p.lower(now)
	}
	if earliest := now.Add(-step); p.due.Before(earliest) {
		p.due = earliest
	}
	p.due = p.due.Add(time.Duration(float64(bytes) / (p.share * p.most) * float64(time.Second)))
	return p.due.Sub(now), time.Duration(float64(took) * (1/p.share - 1))
}
