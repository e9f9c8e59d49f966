package leader

import "time"

// Space decides when the alarm NOSPACE goes by itself: once the store has been
// well below its quota for a while. It is a step function, as Compactor is.
type Space struct {
	since time.Time // when usage was first seen low, zero if it is not
}

const (
	// clearBelowPercent of the quota is what counts as well below, clearAfter how
	// long it must last: a store that goes up and down about its quota keeps the alarm.
	clearBelowPercent = 90
	clearAfter        = 10 * time.Second
)

// SpaceUse is what is to be known for it.
type SpaceUse struct {
	// Alarm says that the alarm stands.
	Alarm                  bool
	UsageBytes, QuotaBytes int64 // a quota of 0 is none
}

// Reset forgets what was seen: another member led meanwhile.
func (s *Space) Reset() { s.since = time.Time{} }

// Step says whether the alarm is to be cleared now.
func (s *Space) Step(now time.Time, u SpaceUse) bool {
	low := u.QuotaBytes == 0 || u.UsageBytes < u.QuotaBytes/100*clearBelowPercent+u.QuotaBytes%100*clearBelowPercent/100
	if !u.Alarm || !low {
		s.Reset()
		return false
	}
	if s.since.IsZero() {
		s.since = now
	}
	if now.Sub(s.since) < clearAfter {
		return false
	}
	s.Reset() // not again before as long has passed
	return true
}
