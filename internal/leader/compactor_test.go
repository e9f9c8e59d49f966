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
		for at := time.Duration(0); at < 3*period; at += time.Minute {
			revision := 2 + int64(at/time.Minute) // one write a minute
			to, ok := c.Step(start.Add(at), revision)
			if !ok {
				continue
			}
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
	if _, ok := c.Step(start, 5000); ok {
		t.Fatal("compacted at once")
	}
	if to, ok := c.Step(start.Add(5*time.Minute), 5000); !ok || to != 4000 {
		t.Fatalf("compacted to %d, %t", to, ok)
	}
	if _, ok := c.Step(start.Add(10*time.Minute), 5000); ok {
		t.Fatal("compacted twice to one revision")
	}
	if to, ok := c.Step(start.Add(15*time.Minute), 5001); !ok || to != 4001 {
		t.Fatalf("compacted to %d, %t", to, ok)
	}
	if _, ok := (&Compactor{Revisions: 1000}).Step(start, 10); ok {
		t.Fatal("compacted below nothing")
	}
}

func TestOffAsksForNothing(t *testing.T) {
	c := &Compactor{}
	for i := range 1000 {
		if _, ok := c.Step(time.Unix(int64(i)*3600, 0), int64(i)); ok {
			t.Fatal("compacted")
		}
	}
}

func TestResetForgets(t *testing.T) {
	c := &Compactor{Period: time.Hour}
	start := time.Unix(0, 0)
	c.Step(start, 2)
	c.Reset()
	if _, ok := c.Step(start.Add(time.Hour), 100); ok {
		t.Fatal("a new leader compacted by what it did not see")
	}
}
