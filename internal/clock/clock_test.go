package clock

import (
	"testing"
	"time"
)

var start = time.Unix(1_000_000, 0)

func rung(c <-chan time.Time) (time.Duration, bool) {
	select {
	case at := <-c:
		return at.Sub(start), true
	default:
		return 0, false
	}
}

func TestFakeTimer(t *testing.T) {
	f := NewFake(start)
	tm := f.NewTimer(3 * time.Second)
	f.Advance(2999 * time.Millisecond)
	if _, ok := rung(tm.C()); ok {
		t.Fatal("rang too early")
	}
	f.Advance(time.Second)
	if at, ok := rung(tm.C()); !ok || at != 3*time.Second {
		t.Fatalf("rang %v at %v, want at 3s", ok, at)
	}
	if tm.Stop() {
		t.Fatal("Stop claims to have stopped a timer that rang")
	}
	tm.Reset(time.Second)
	if !tm.Stop() {
		t.Fatal("Stop missed a timer that was set")
	}
	f.Advance(time.Hour)
	if _, ok := rung(tm.C()); ok {
		t.Fatal("a stopped timer rang")
	}
	tm.Reset(0)
	if _, ok := rung(tm.C()); !ok {
		t.Fatal("a timer of no duration did not ring at once")
	}
}

func TestFakeTickerDropsMissedRings(t *testing.T) {
	f := NewFake(start)
	tk := f.NewTicker(time.Second)
	f.Advance(3500 * time.Millisecond)
	if at, ok := rung(tk.C()); !ok || at != time.Second {
		t.Fatalf("first ring %v %v, want at 1s", at, ok)
	}
	if _, ok := rung(tk.C()); ok {
		t.Fatal("a missed ring was kept")
	}
	f.Advance(500 * time.Millisecond)
	if at, ok := rung(tk.C()); !ok || at != 4*time.Second {
		t.Fatalf("ring %v %v, want at 4s", at, ok)
	}
	tk.Stop()
	if n := f.Alarms(); n != 0 {
		t.Fatalf("%d alarms after Stop, want 0", n)
	}
}

func TestFakeRingsInOrder(t *testing.T) {
	f := NewFake(start)
	late, early := f.NewTimer(2*time.Second), f.NewTimer(time.Second)
	f.Advance(5 * time.Second)
	a, _ := rung(late.C())
	b, _ := rung(early.C())
	if a != 2*time.Second || b != time.Second {
		t.Fatalf("rang at %v and %v, want 2s and 1s", a, b)
	}
	if got := f.Now(); !got.Equal(start.Add(5 * time.Second)) {
		t.Fatalf("clock shows %v", got)
	}
}

func TestWaitAlarms(t *testing.T) {
	f := NewFake(start)
	done := make(chan time.Time)
	go func() { done <- <-f.NewTimer(time.Minute).C() }()
	f.WaitAlarms(1)
	f.Advance(time.Minute)
	if at := <-done; !at.Equal(start.Add(time.Minute)) {
		t.Fatalf("rang at %v", at)
	}
}

func TestRealRings(t *testing.T) {
	c := Real()
	before := c.Now()
	tm, tk := c.NewTimer(time.Millisecond), c.NewTicker(time.Millisecond)
	defer tk.Stop()
	<-tm.C()
	<-tk.C()
	if c.Now().Sub(before) < time.Millisecond {
		t.Fatal("rang before its time")
	}
}
