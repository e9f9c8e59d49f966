package processors

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
)

func TestFollow(t *testing.T) {
	t.Setenv("GOMAXPROCS", "") // which is as if it were not set
	defer runtime.SetDefaultGOMAXPROCS()
	runtime.SetDefaultGOMAXPROCS()
	want := runtime.GOMAXPROCS(0)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := clock.NewFake(time.Unix(0, 0))
	follow(ctx, c)
	if got := runtime.GOMAXPROCS(0); got != want+forCalls {
		t.Errorf("%d processors for %d CPUs, want %d", got, want, want+forCalls)
	}
	if got := CPUs(); got != want {
		t.Errorf("%d CPUs, want %d", got, want)
	}
	runtime.GOMAXPROCS(want + forCalls + 3) // what Go chooses cannot be changed here; that it is looked at again can be seen
	c.WaitAlarms(1)
	c.Advance(every)
	for end := time.Now().Add(time.Minute); runtime.GOMAXPROCS(0) != want+forCalls; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("the processors were not looked at again")
		}
	}
}

// TestOperatorsChoice: GOMAXPROCS in the environment is left alone.
func TestOperatorsChoice(t *testing.T) {
	t.Setenv("GOMAXPROCS", "5")
	defer runtime.SetDefaultGOMAXPROCS()
	runtime.GOMAXPROCS(5)
	follow(t.Context(), clock.NewFake(time.Unix(0, 0)))
	if got := runtime.GOMAXPROCS(0); got != 5 {
		t.Errorf("%d processors, want the operator's 5", got)
	}
}
