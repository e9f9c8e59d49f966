package crash

import (
	"testing"
)

// TestPowerCut takes the power away before random file operations of log and
// store, and keeps more or less of what was not synced, life after life.
func TestPowerCut(t *testing.T) {
	runs, lives := 12, 12
	if long() {
		runs, lives = 80, 25
	}
	if *livesFlag != 0 {
		lives = *livesFlag
	}
	seen := map[string]int{}
	for _, seed := range seeds(t, runs) {
		if err := newWorld(seed, mutant{}, seed%2 == 0, seen).run(lives); err != nil {
			replay(t, seed)
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	t.Log(seen)
	if *seedFlag != 0 {
		return
	}
	for _, what := range []string{"audit", "crash", "cut", "flush", "flush asked", "put", "txn", "delete_range", "lease_grant", "lease_revoke", "compaction", "refused"} {
		if seen[what] == 0 {
			t.Errorf("no run saw %q", what)
		}
	}
}
