package rpc

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// claimed records what became of a claim.
type claimed struct {
	done bool
	err  error
}

func (c *claimed) grant(err error) { c.done, c.err = true, err }

func TestBudgetServesInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(100, 10, time.Now)
		soon := time.Now().Add(time.Second)
		var first, large, small claimed
		b.acquire(60, soon, first.grant)
		b.acquire(80, soon, large.grant)
		b.acquire(10, soon, small.grant) // fits, but must not overtake
		if !first.done || large.done || small.done {
			t.Fatalf("granted %v %v %v, want the first only", first.done, large.done, small.done)
		}
		if b.try(1) {
			t.Fatal("try overtook the line")
		}
		b.release(60)
		if !large.done || !small.done || large.err != nil || small.err != nil {
			t.Fatalf("after a release: %+v %+v", large, small)
		}
		b.release(80)
		b.release(10)
		if !b.try(100) {
			t.Fatal("room was lost")
		}
	})
}

func TestBudgetDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(100, 10, time.Now)
		var late, next claimed
		if !b.try(50) {
			t.Fatal("no room in an empty budget")
		}
		b.acquire(80, time.Now().Add(time.Second), late.grant)
		b.acquire(20, time.Now().Add(time.Hour), next.grant)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if !late.done || !errors.Is(late.err, errBusy) {
			t.Fatalf("late claim: %+v", late)
		}
		if !next.done || next.err != nil {
			t.Fatalf("the claim behind it: %+v", next)
		}
		b.release(50)
		b.release(20)
		if !b.try(100) {
			t.Fatal("room was lost")
		}
	})
}

func TestBudgetLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(100, 1, time.Now)
		deadline := time.Now().Add(time.Second)
		var huge, waiting, excess claimed
		b.acquire(101, deadline, huge.grant)
		if !errors.Is(huge.err, errBusy) {
			t.Fatalf("a claim beyond the limit: %+v", huge)
		}
		b.try(100)
		b.acquire(1, deadline, waiting.grant)
		b.acquire(1, deadline, excess.grant)
		if waiting.done || !errors.Is(excess.err, errBusy) {
			t.Fatalf("a line of one: %+v %+v", waiting, excess)
		}
		b.release(100)
		if !waiting.done || waiting.err != nil {
			t.Fatalf("waiting claim: %+v", waiting)
		}
	})
}

func TestBudgetWaitCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(10, 10, time.Now)
		b.try(10)
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan error)
		go func() { got <- b.wait(ctx, 5, time.Now().Add(time.Hour)) }()
		synctest.Wait()
		cancel()
		if err := <-got; !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
		b.release(10) // reaches the claim that nobody waits for any more
		synctest.Wait()
		if !b.try(10) {
			t.Fatal("room of the cancelled claim was lost")
		}
	})
}

func TestPoolBounds(t *testing.T) {
	p := newPool(2, 3)
	for range 3 {
		if !p.reserve() {
			t.Fatal("no place in an empty pool")
		}
	}
	if p.reserve() {
		t.Fatal("a fourth place of three")
	}
	var ran atomic.Int64
	var wg sync.WaitGroup
	for range 3 {
		wg.Add(1)
		p.run(func() {
			ran.Add(1)
			p.cancel()
			wg.Done()
		})
	}
	wg.Wait()
	if !p.reserve() {
		t.Fatal("places were lost")
	}
	p.cancel()
	p.close()
	if ran.Load() != 3 {
		t.Fatalf("%d jobs ran", ran.Load())
	}
}
