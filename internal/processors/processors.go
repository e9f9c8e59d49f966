// Package processors decides how many of Go's processors a member runs on, which is more than it may use CPUs.
//
// A goroutine in a system call keeps its processor (GOMAXPROCS of them) until Go's monitor takes it away, tens of microseconds later
// at the soonest. A member's log is in fdatasync for most of the time under writes, its store and its sockets are in calls of their
// own, and on two CPUs what could run meanwhile waits although a CPU is idle (docs/decisions/009). How many such calls there are at a
// time does not grow with the CPUs, so neither does what is added for them.
package processors

import (
	"context"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

const (
	// forCalls is for the log and for the store, which each have one goroutine in a call to the disk at most times.
	forCalls = 2
	// every is how often the limit of the container is looked at, as Go itself would if its setting were left alone.
	every = time.Minute
)

// cpus is what Go would have as GOMAXPROCS by itself; 0 before Follow.
var cpus atomic.Int64

// CPUs is how many goroutines can compute at once.
func CPUs() int {
	if n := cpus.Load(); n > 0 {
		return int(n)
	}
	return runtime.GOMAXPROCS(0)
}

// Follow adds processors for those that are in system calls, and again whenever the container is given more or fewer CPUs, until ctx
// ends. It does nothing if the operator has set GOMAXPROCS.
func Follow(ctx context.Context) { follow(ctx, clock.Real()) }

func follow(ctx context.Context, c clock.Clock) {
	if os.Getenv("GOMAXPROCS") != "" {
		return
	}
	add()
	go func() {
		t := c.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-t.C():
			}
			add()
		}
	}()
}

func add() {
	runtime.SetDefaultGOMAXPROCS()
	n := runtime.GOMAXPROCS(0)
	cpus.Store(int64(n))
	runtime.GOMAXPROCS(n + forCalls)
}
