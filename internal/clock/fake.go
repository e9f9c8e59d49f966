package clock

import (
	"sync"
	"time"
)

// Fake is a clock that stands still until Advance turns it. Safe for concurrent use.
type Fake struct {
	mu     sync.Mutex
	moved  sync.Cond
	now    time.Time
	alarms map[*fakeAlarm]struct{}
}

// NewFake returns a clock that shows start.
func NewFake(start time.Time) *Fake {
	f := &Fake{now: start, alarms: map[*fakeAlarm]struct{}{}}
	f.moved.L = &f.mu
	return f
}

// Now implements Clock.
func (f *Fake) Now() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now
}

// NewTimer implements Clock. A timer of no duration rings at once.
func (f *Fake) NewTimer(d time.Duration) Timer {
	a := &fakeAlarm{clock: f, ch: make(chan time.Time, 1)}
	a.Reset(d)
	return a
}

// NewTicker implements Clock.
func (f *Fake) NewTicker(d time.Duration) Ticker {
	if d <= 0 {
		panic("clock: NewTicker needs a positive period")
	}
	a := &fakeAlarm{clock: f, ch: make(chan time.Time, 1), period: d}
	a.Reset(d)
	return fakeTicker{a}
}

// Advance turns the clock forward by d, ringing on the way whatever falls due, in order of time. A ring nobody has
// received yet is not repeated.
func (f *Fake) Advance(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	end := f.now.Add(d)
	for {
		var next *fakeAlarm
		for a := range f.alarms {
			if !a.at.After(end) && (next == nil || a.at.Before(next.at)) {
				next = a
			}
		}
		if next == nil {
			break
		}
		f.now = next.at
		next.ring()
	}
	f.now = end
}

// Alarms returns how many timers and tickers are set.
func (f *Fake) Alarms() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.alarms)
}

// WaitAlarms blocks until at least n timers and tickers are set: a test turns the clock only after the code under test
// has begun to wait.
func (f *Fake) WaitAlarms(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.alarms) < n {
		f.moved.Wait()
	}
}

type fakeAlarm struct {
	clock  *Fake
	ch     chan time.Time
	period time.Duration // of a ticker, 0 for a timer
	at     time.Time     // guarded by clock.mu, as is membership in clock.alarms
}

// ring is called with the clock's lock held.
func (a *fakeAlarm) ring() {
	select {
	case a.ch <- a.clock.now:
	default:
	}
	if a.period > 0 {
		a.at = a.at.Add(a.period)
		return
	}
	delete(a.clock.alarms, a)
}

func (a *fakeAlarm) C() <-chan time.Time { return a.ch }

func (a *fakeAlarm) Stop() bool {
	a.clock.mu.Lock()
	defer a.clock.mu.Unlock()
	_, set := a.clock.alarms[a]
	delete(a.clock.alarms, a)
	select {
	case <-a.ch:
	default:
	}
	return set
}

func (a *fakeAlarm) Reset(d time.Duration) {
	a.clock.mu.Lock()
	defer a.clock.mu.Unlock()
	select {
	case <-a.ch:
	default:
	}
	a.at = a.clock.now.Add(d)
	a.clock.alarms[a] = struct{}{}
	if d <= 0 {
		a.ring()
	}
	a.clock.moved.Broadcast()
}

type fakeTicker struct{ a *fakeAlarm }

func (t fakeTicker) C() <-chan time.Time { return t.a.ch }
func (t fakeTicker) Stop()               { t.a.Stop() }
