package server

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/grpcserver"
)

// The parts of --memory-budget are no more than it, from where the least that
// each part must have is no matter.
func TestBudgets(t *testing.T) {
	for _, gib := range []int64{1, 2, 7, 64} {
		for _, responses := range []int64{0, 512 << 20, gib << 29} {
			flags := []string{fmt.Sprintf("--memory-budget=%dGiB", gib)}
			if responses > 0 {
				flags = append(flags, fmt.Sprintf("--response-bytes=%d", responses))
			}
			cfg, err := config.Parse("engram", flags, nil)
			if err != nil {
				t.Fatal(err)
			}
			b := (&Member{cfg: cfg}).budgets()
			if sum := b.values + b.blockCache + b.logCache + b.recentEvents + b.requests + b.responses + b.streams; sum > gib<<30 {
				t.Errorf("%q: the parts %+v have %d bytes", flags, b, sum)
			}
		}
	}
}

// What streams may have queued for clients is part of --memory-budget.
func TestStreamsAreBudgeted(t *testing.T) {
	for budget, want := range map[string]int{"64MiB": 8 << 20, "1GiB": 64 << 20, "16GiB": 128 << 20} {
		m := start(t, filepath.Join(t.TempDir(), "data"), "--memory-budget="+budget)
		if got := m.rpc.ServerOptions(grpcserver.Options{}).StreamsBytes; got != want {
			t.Errorf("of %s all streams may have %d bytes, not %d", budget, got, want)
		}
		stop(t, m)
	}
}
