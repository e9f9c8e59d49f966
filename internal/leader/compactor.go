package leader

import "time"

// Compactor decides when history is compacted without being asked. It is a
// step function: the caller gives it time and where the store stands, and
// proposes what it answers. The zero Compactor never asks for anything.
//
// With Period set, history is kept for that long: the revision of Period ago is
// compacted, at intervals of Period but at least every hour. With Revisions set,
// that many revisions are kept, looked at every five minutes. Both are etcd's
// rules (surface.md, section 3, --auto-compaction-mode).
//
// It takes samples whether this member leads or not, so that history does not
// grow without end where the leader changes more often than once a Period. What
// the store does not show to be compacted is asked for again.
type Compactor struct {
	Period    time.Duration
	Revisions int64

	samples  []sample // oldest first, at most samplesPerInterval * Period/interval + 1
	nextTake time.Time
	nextRun  time.Time
	asked    int64 // what was asked for, and is not compacted yet; or 0
	askedAt  time.Time
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

// interval is the time between two compactions, 0 for never.
func (c *Compactor) interval() time.Duration {
	switch {
	case c.Period > 0:
		return min(c.Period, maxInterval)
	case c.Revisions > 0:
		return revisionInterval
	}
	return 0
}

// retry is the time between two attempts at one compaction.
func (c *Compactor) retry() time.Duration { return c.interval() / samplesPerInterval }

// Step takes note of where the store stands and returns the revision to compact
// to, if it is time to and may says that this member can ask for it.
func (c *Compactor) Step(now time.Time, at Standing, may bool) (compactTo int64, ok bool) {
	if c.interval() == 0 {
		return 0, false
	}
	compactTo, known := c.target(now, at.Revision)
	if c.asked > 0 && at.CompactRevision >= c.asked {
		c.asked, c.nextRun = 0, c.askedAt.Add(c.interval())
	}
	if !known || !may || now.Before(c.nextRun) {
		return 0, false
	}
	c.nextRun = now.Add(c.interval())
	if compactTo <= at.CompactRevision || compactTo <= 0 {
		return 0, false
	}
	c.asked, c.askedAt, c.nextRun = compactTo, now, now.Add(c.retry())
	return compactTo, true
}

// target is the revision below which nothing is to be kept, once it is known.
func (c *Compactor) target(now time.Time, revision int64) (int64, bool) {
	if c.Period > 0 {
		return c.periodAgo(now, revision)
	}
	if c.nextRun.IsZero() {
		c.nextRun = now.Add(c.interval())
	}
	return revision - c.Revisions, true
}

// periodAgo is the revision of Period ago, by the samples.
func (c *Compactor) periodAgo(now time.Time, revision int64) (int64, bool) {
	if !now.Before(c.nextTake) {
		c.nextTake = now.Add(c.interval() / samplesPerInterval)
		c.samples = append(c.samples, sample{now, revision})
	}
	horizon := now.Add(-c.Period)
	if c.samples[0].at.After(horizon) {
		return 0, false // not yet run for a whole period
	}
	for len(c.samples) > 1 && !c.samples[1].at.After(horizon) {
		c.samples = c.samples[1:]
	}
	return c.samples[0].revision, true
}
