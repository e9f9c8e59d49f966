package grpcserver

import (
	"container/heap"
	"sync"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

// timers rings for all that a server waits for: deadlines, keepalives, drains.
// One goroutine serves them, on the server's clock.
type timers struct {
	clock clock.Clock

	mu      sync.Mutex
	heap    timerHeap
	next    time.Time // when the goroutine wakes; zero if only by wake
	wake    chan struct{}
	running bool
	stopped bool
	done    sync.WaitGroup
}

// timer calls ring once for each time that it was set. A ring may come although
// the timer was stopped at the same moment.
type timer struct {
	ring  func() // does not block
	at    time.Time
	index int // in the heap, -1 if not set
}

func newTimer(ring func()) *timer { return &timer{ring: ring, index: -1} }

func newTimers(c clock.Clock) *timers { return &timers{clock: c, wake: make(chan struct{}, 1)} }

// set has t ring at a time instead of whatever it was set to.
func (ts *timers) set(t *timer, at time.Time) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.stopped {
		return
	}
	t.at = at
	if t.index < 0 {
		heap.Push(&ts.heap, t)
	} else {
		heap.Fix(&ts.heap, t.index)
	}
	if !ts.running {
		ts.running = true
		ts.done.Go(ts.run)
	}
	if ts.next.IsZero() || at.Before(ts.next) {
		select {
		case ts.wake <- struct{}{}:
		default:
		}
	}
}

// stop keeps t from ringing.
func (ts *timers) stop(t *timer) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if t.index >= 0 {
		heap.Remove(&ts.heap, t.index)
	}
}

// close ends the goroutine. Nothing rings afterwards.
func (ts *timers) close() {
	ts.mu.Lock()
	ts.stopped = true
	ts.mu.Unlock()
	select {
	case ts.wake <- struct{}{}:
	default:
	}
	ts.done.Wait()
}

func (ts *timers) run() {
	t := ts.clock.NewTimer(time.Hour)
	defer t.Stop()
	for {
		due, wait, ok := ts.due()
		if !ok {
			return
		}
		for _, d := range due {
			d.ring()
		}
		if len(due) > 0 {
			continue
		}
		t.Reset(wait)
		select {
		case <-t.C():
		case <-ts.wake:
		}
	}
}

// due takes out the timers whose time has come, or says how long to wait.
func (ts *timers) due() (due []*timer, wait time.Duration, ok bool) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.stopped {
		return nil, 0, false
	}
	now := ts.clock.Now()
	for len(ts.heap) > 0 && !ts.heap[0].at.After(now) {
		due = append(due, heap.Pop(&ts.heap).(*timer))
	}
	if len(ts.heap) == 0 {
		ts.next = time.Time{}
		return due, time.Hour, true
	}
	ts.next = ts.heap[0].at
	return due, ts.next.Sub(now), true
}

type timerHeap []*timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h timerHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *timerHeap) Push(x any) {
	t := x.(*timer)
	t.index = len(*h)
	*h = append(*h, t)
}

// Pop implements heap.Interface.
func (h *timerHeap) Pop() any {
	old := *h
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	t.index = -1
	return t
}
