package leader

import (
	"testing"
	"time"
)

func TestPeriodKeepsThatMuchHistory(t *testing.T) {
	for _, period := range []time.Duration{10 * time.Minute, 5 * time.Hour} {
		c := &Compactor{Period: period}
		start := time.Unix(0, 0)
		var runs []time.Duration
		compacted := int64(0)
		for at := time.Duration(0); at < 3*period; at += time.Minute {
			revision := 2 + int64(at/time.Minute) // one write a minute
			to, ok := c.Step(start.Add(at), Standing{revision, compacted}, true)
			if !ok {
				continue
			}
			compacted = to
			runs = append(runs, at)
			kept := time.Duration(revision-to) * time.Minute
			if kept < period || kept > period+period/5 {
				t.Errorf("period %v: at %v kept %v", period, at, kept)
			}
		}
		if len(runs) < 2 || runs[0] < period {
			t.Fatalf("period %v: runs at %v", period, runs)
		}
		if gap := runs[1] - runs[0]; gap != min(period, time.Hour) {
			t.Errorf("period %v: runs %v apart", period, gap)
		}
		if len(c.samples) > 12*int(1+period/time.Hour) {
			t.Errorf("%d samples kept", len(c.samples))
		}
	}
}

func TestRevisionsKeepsThatMany(t *testing.T) {
	c := &Compactor{Revisions: 1000}
	start := time.Unix(0, 0)
	if _, ok := c.Step(start, Standing{5000, 0}, true); ok {
		t.Fatal("compacted at once")
	}
	if to, ok := c.Step(start.Add(5*time.Minute), Standing{5000, 0}, true); !ok || to != 4000 {
		t.Fatalf("compacted to %d, %t", to, ok)
	}
	if _, ok := c.Step(start.Add(10*time.Minute), Standing{5000, 4000}, true); ok {
		t.Fatal("compacted twice to one revision")
	}
	if to, ok := c.Step(start.Add(15*time.Minute), Standing{5001, 4000}, true); !ok || to != 4001 {
		t.Fatalf("compacted to %d, %t", to, ok)
	}
	c = &Compactor{Revisions: 1000}
	c.Step(start, Standing{10, 0}, true)
	if _, ok := c.Step(start.Add(5*time.Minute), Standing{10, 0}, true); ok {
		t.Fatal("compacted below nothing")
	}
}

func TestOffAsksForNothing(t *testing.T) {
	c := &Compactor{}
	for i := range int64(1000) {
		if _, ok := c.Step(time.Unix(i*3600, 0), Standing{i, 0}, true); ok {
			t.Fatal("compacted")
		}
	}
}

// TestPeriodCountsWhileFollowing: members that lead in turn, each for less than the period, compact all the same; and none of them what
// is younger than the period.
func TestPeriodCountsWhileFollowing(t *testing.T) {
	const period = 24 * time.Hour
	members := []*Compactor{{Period: period}, {Period: period}, {Period: period}}
	start := time.Unix(0, 0)
	compacted, last := int64(0), period
	for at := time.Duration(0); at < 4*period; at += time.Minute {
		revision := 2 + int64(at/time.Minute)
		before := compacted
		for i, c := range members {
			to, ok := c.Step(start.Add(at), Standing{revision, before}, int(at/(7*time.Hour))%len(members) == i)
			if !ok {
				continue
			}
			if at-last > 2*maxInterval {
				t.Errorf("none between %v and %v", last, at)
			}
			compacted, last = to, at
			if kept := time.Duration(revision-to) * time.Minute; kept < period || kept > period+maxInterval {
				t.Fatalf("at %v kept %v", at, kept)
			}
		}
	}
	if last < 4*period-2*maxInterval {
		t.Errorf("the last compaction was at %v", last)
	}
}

// TestCompactionIsTriedAgain until the store shows it, and the next one comes when it would have.
func TestCompactionIsTriedAgain(t *testing.T) {
	start := time.Unix(0, 0)
	for _, c := range []*Compactor{{Period: time.Hour}, {Revisions: 10}} {
		at, asked := start, []time.Time(nil)
		s := Standing{Revision: 100}
		var to int64
		for ; len(asked) < 3; at = at.Add(pass) {
			if rev, ok := c.Step(at, s, true); ok {
				asked, to = append(asked, at), rev
			}
			if at.Sub(start) > 3*time.Hour {
				t.Fatalf("%+v: asked at %v only", c, asked)
			}
		}
		if gap := asked[2].Sub(asked[1]); gap != c.retry() {
			t.Errorf("asked again after %v, want %v", gap, c.retry())
		}
		s.CompactRevision, s.Revision = to, 200
		for ; len(asked) < 4; at = at.Add(pass) {
			if _, ok := c.Step(at, s, true); ok {
				asked = append(asked, at)
			}
			if at.Sub(start) > 5*time.Hour {
				t.Fatalf("asked at %v only", asked)
			}
		}
		if gap := asked[3].Sub(asked[2]); gap < c.interval() || c.Revisions > 0 && gap > c.interval() {
			t.Errorf("the next was asked for after %v, want %v", gap, c.interval())
		}
	}
}
