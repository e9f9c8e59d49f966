package leader

import "time"

// Compactor decides when history is compacted without being asked. It is a
// step function: the caller gives it time and revision, and proposes what it
// answers. The zero Compactor never asks for anything.
//
// With Period set, history is kept for that long: the revision of Period ago is
// compacted, at intervals of Period but at least every hour. With Revisions set,
// that many revisions are kept, looked at every five minutes. Both are etcd's
// rules (surface.md, section 3, --auto-compaction-mode).
type Compactor struct {
	Period    time.Duration
	Revisions int64

	samples   []sample // oldest first, at most samplesPerInterval * Period/interval + 1
	nextTake  time.Time
	nextRun   time.Time
	compacted int64
}

type sample struct {
	at       time.Time
	revision int64
}

const (
	samplesPerInterval = 10
	revisionInterval   = 5 * time.Minute
	maxInterval        = time.Hour
)

// interval is the time between two compactions.
func (c *Compactor) interval() time.Duration { return min(c.Period, maxInterval) }

// Reset forgets what was seen: another member led meanwhile.
func (c *Compactor) Reset() {
	c.samples, c.nextTake, c.nextRun = nil, time.Time{}, time.Time{}
}

// Step returns the revision to compact to, if it is time to. Revision is the
// store's newest.
func (c *Compactor) Step(now time.Time, revision int64) (compactTo int64, ok bool) {
	switch {
	case c.Period > 0:
		compactTo, ok = c.stepPeriod(now, revision)
	case c.Revisions > 0:
		compactTo, ok = c.stepRevisions(now, revision)
	}
	if !ok || compactTo <= c.compacted || compactTo <= 0 {
		return 0, false
	}
	c.compacted = compactTo
	return compactTo, true
}

func (c *Compactor) stepPeriod(now time.Time, revision int64) (int64, bool) {
	if now.Before(c.nextTake) {
		return 0, false
	}
	c.nextTake = now.Add(c.interval() / samplesPerInterval)
	c.samples = append(c.samples, sample{now, revision})
	horizon := now.Add(-c.Period)
	if c.samples[0].at.After(horizon) {
		return 0, false // not yet led for a whole period
	}
	for len(c.samples) > 1 && !c.samples[1].at.After(horizon) {
		c.samples = c.samples[1:]
	}
	if now.Before(c.nextRun) {
		return 0, false
	}
	c.nextRun = now.Add(c.interval())
	return c.samples[0].revision, true
}

func (c *Compactor) stepRevisions(now time.Time, revision int64) (int64, bool) {
	if c.nextRun.IsZero() {
		c.nextRun = now.Add(revisionInterval)
	}
	if now.Before(c.nextRun) {
		return 0, false
	}
	c.nextRun = now.Add(revisionInterval)
	return revision - c.Revisions, true
}
