// Package clock is the seam for time: code that waits takes a Clock, tests turn a Fake by hand.
//
// It is no scheduler and knows no wall-clock rules; a Clock says what time it is and rings.
package clock

import "time"

// Clock tells the time and makes timers. Implementations are safe for concurrent use.
type Clock interface {
	// Now returns the present time. Differences between two of its values are monotonic.
	Now() time.Time
	// NewTimer returns a timer that rings once, d from now.
	NewTimer(d time.Duration) Timer
	// NewTicker returns a ticker that rings every d > 0. Like time.Ticker it drops rings a slow receiver missed.
	NewTicker(d time.Duration) Ticker
}

// Timer rings once.
type Timer interface {
	// C is the channel the timer rings on.
	C() <-chan time.Time
	// Stop keeps the timer from ringing. It reports whether it came in time; after that nothing stale can be received.
	Stop() bool
	// Reset sets the timer to ring d from now, whatever it did before.
	Reset(d time.Duration)
}

// Ticker rings again and again.
type Ticker interface {
	// C is the channel the ticker rings on.
	C() <-chan time.Time
	// Stop ends the ringing; it does not close the channel.
	Stop()
}

// Real returns the clock of the operating system.
func Real() Clock { return realClock{} }

type realClock struct{}

func (realClock) Now() time.Time                   { return time.Now() }
func (realClock) NewTimer(d time.Duration) Timer   { return realTimer{time.NewTimer(d)} }
func (realClock) NewTicker(d time.Duration) Ticker { return realTicker{time.NewTicker(d)} }

type realTimer struct{ t *time.Timer }

func (t realTimer) C() <-chan time.Time   { return t.t.C }
func (t realTimer) Stop() bool            { return t.t.Stop() }
func (t realTimer) Reset(d time.Duration) { t.t.Reset(d) }

type realTicker struct{ t *time.Ticker }

func (t realTicker) C() <-chan time.Time { return t.t.C }
func (t realTicker) Stop()               { t.t.Stop() }
