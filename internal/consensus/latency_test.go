package consensus

import (
	"testing"
	"time"
)

func TestLatency(t *testing.T) {
	now := time.Unix(1e9, 0)
	at := func(d time.Duration) time.Time { return now.Add(d) }
	var a ackTimer
	if a.estimate(now) != 0 {
		t.Fatal("something is known before the first sample")
	}
	a.begin(10, now)
	a.begin(11, at(time.Millisecond)) // one at a time
	a.reached(9, at(50*time.Millisecond))
	if got := a.estimate(at(80 * time.Millisecond)); got != 80*time.Millisecond {
		t.Fatalf("under way for 80 ms, estimated at %v", got)
	}
	a.reached(12, at(100*time.Millisecond))
	if got := a.estimate(at(100 * time.Millisecond)); got != 100*time.Millisecond {
		t.Fatalf("the first sample gives %v", got)
	}
	a.begin(13, at(time.Second))
	a.reached(13, at(time.Second+20*time.Millisecond))
	if got := a.estimate(at(time.Second + 20*time.Millisecond)); got != 80*time.Millisecond {
		t.Fatalf("100 ms and then 20 ms give %v", got)
	}
	if got := a.estimate(at(time.Second + 20*time.Millisecond + 3*latencyHalfLife)); got != 20*time.Millisecond {
		t.Fatalf("after three half-lives %v", got)
	}
	a.begin(14, at(2*time.Second))
	a.forget()
	if got := a.age(at(time.Minute)); got != 0 {
		t.Fatalf("what may have been lost is %v old", got)
	}
}

func TestPersistTimer(t *testing.T) {
	const limit, tick = 500 * time.Millisecond, 100 * time.Millisecond
	now := time.Unix(1e9, 0)
	var p persistTimer
	write := func(entries bool, took time.Duration) {
		p.sent(entries, now)
		now = now.Add(took)
		p.stored(now, limit)
	}
	write(true, time.Second)
	write(false, time.Minute) // without entries there is nothing to time
	write(true, time.Second)
	if got := p.slowFor(limit, tick); got != 2 {
		t.Fatalf("two slow writes in a row count as %d", got)
	}
	write(true, time.Millisecond)
	if got := p.slowFor(limit, tick); got != 0 {
		t.Fatalf("a fast one leaves %d", got)
	}
	// Of two under way the first is timed; the answer to one before it ends nothing.
	p.sent(false, now)
	p.sent(true, now)
	p.sent(true, now.Add(time.Millisecond))
	p.stored(now.Add(10*time.Millisecond), limit)
	if p.since.IsZero() {
		t.Fatal("ended by the answer to another")
	}
	// A pause of the whole member is one tick; a write that hangs is many.
	now = now.Add(time.Hour)
	p.tick()
	if got := p.slowFor(limit, tick); got != 0 {
		t.Fatalf("an hour's pause counts as %d", got)
	}
	for range 14 {
		p.tick()
	}
	if got := p.slowFor(limit, tick); got != 3 {
		t.Fatalf("15 ticks count as %d", got)
	}
	p.stored(now, limit)
	p.tick()
	if got := p.slowFor(limit, tick); got != 1 {
		t.Fatalf("its end counts as %d", got)
	}
}
