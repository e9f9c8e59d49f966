package consensus

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestWaitersAgainstModel drives the wheel beside a plain map of deadlines.
func TestWaitersAgainstModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		start := time.Unix(1e9, 0)
		now := start
		const tick = 100 * time.Millisecond
		ws := newWaiters(tick, 2*time.Second, now)
		model := map[uint64]time.Time{}
		expired := map[uint64]bool{}
		for op := range 2000 {
			switch rng.IntN(6) {
			case 0, 1, 2:
				id := uint64(rng.IntN(200) + 1)
				deadline := now.Add(time.Duration(rng.IntN(4000)-200) * time.Millisecond)
				_, taken := model[id]
				if ws.add(id, nil, int(id), now, deadline) == taken {
					t.Fatalf("op %d: add %d, taken %v", op, id, taken)
				}
				if !taken {
					model[id] = deadline
					if deadline.Before(now) {
						model[id] = now // a wait that is over before it begins ends at the next tick
					}
				}
			case 3:
				id := uint64(rng.IntN(200) + 1)
				w, ok := ws.take(id)
				if _, want := model[id]; ok != want || ok && (w.id != id || w.size != int(id)) {
					t.Fatalf("op %d: take %d gave %v %v", op, id, w, ok)
				}
				delete(model, id)
			case 4, 5:
				now = now.Add(time.Duration(rng.IntN(150)) * time.Millisecond)
				if rng.IntN(100) == 0 {
					now = now.Add(10 * time.Second)
				}
				clear(expired)
				ws.expire(now, func(w waiter) { expired[w.id] = true })
				for id := range expired {
					if model[id].After(now) {
						t.Fatalf("op %d: %d expired %v too early", op, id, model[id].Sub(now))
					}
					delete(model, id)
				}
				for id, deadline := range model {
					if now.Sub(deadline) > tick {
						t.Fatalf("op %d: %d is overdue by %v", op, id, now.Sub(deadline))
					}
				}
			}
			if ws.len() != len(model) {
				t.Fatalf("op %d: %d waiters, want %d", op, ws.len(), len(model))
			}
		}
		var left []uint64
		ws.drain(func(w waiter) { left = append(left, w.id) })
		slices.Sort(left)
		if want := slices.Sorted(maps.Keys(model)); !slices.Equal(left, want) {
			t.Fatalf("drained %v, want %v", left, want)
		}
	}
}
