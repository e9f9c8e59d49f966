package consensus

import (
	"math"
	"time"
)

// latency is how long something takes, timed one sample at a time and smoothed. What is being timed and has not ended counts
// with its age, for a disk that hangs gives no samples.
type latency struct {
	since time.Time // when what is being timed began; zero if nothing is
	value time.Duration
	at    time.Time // of the last sample; zero if there was none
}

// A sample moves the smoothed value by one part in latencySmoothing, and without samples it halves in latencyHalfLife.
const (
	latencySmoothing = 4
	latencyHalfLife  = 10 * time.Second
)

// end takes the sample under way.
func (l *latency) end(now time.Time) time.Duration {
	took := now.Sub(l.since)
	if old := l.decayed(now); l.at.IsZero() {
		l.value = took
	} else {
		l.value = old + (took-old)/latencySmoothing
	}
	l.since, l.at = time.Time{}, now
	return took
}

func (l *latency) decayed(now time.Time) time.Duration {
	idle := now.Sub(l.at)
	if l.at.IsZero() || idle <= latencyHalfLife {
		return l.value
	}
	return time.Duration(float64(l.value) * math.Exp2(1-float64(idle)/float64(latencyHalfLife)))
}

// age is how long what is being timed has been going on.
func (l *latency) age(now time.Time) time.Duration {
	if l.since.IsZero() {
		return 0
	}
	return now.Sub(l.since)
}

// estimate is the present latency, 0 if nothing is known.
func (l *latency) estimate(now time.Time) time.Duration { return max(l.decayed(now), l.age(now)) }

// persistTimer times this member's own log: from an append being given to the writer to its being stored. The writer answers
// in order, so counting the answers tells which one it is.
type persistTimer struct {
	latency
	given, answered uint64
	timed           uint64 // the one being timed
	ticks           int    // ticks that it has been under way
	strikes         int    // samples in a row that took too long
}

// sent notes an append that the writer will answer.
func (p *persistTimer) sent(entries bool, now time.Time) {
	p.given++
	if entries && p.since.IsZero() {
		p.since, p.timed, p.ticks = now, p.given, 0
	}
}

// stored notes an answer. A sample above limit is a strike.
func (p *persistTimer) stored(now time.Time, limit time.Duration) {
	p.answered++
	if p.since.IsZero() || p.answered < p.timed {
		return
	}
	if p.end(now) > limit {
		p.strikes++
	} else {
		p.strikes = 0
	}
}

// tick notes that a tick has passed.
func (p *persistTimer) tick() {
	if p.since.IsZero() {
		p.ticks = 0
	} else {
		p.ticks++
	}
}

// slowFor tells how many times in a row limit was passed: a write that hangs passes it again and again. Its time is counted in
// ticks, for a member that was paused has a clock that jumps and not a slow disk.
func (p *persistTimer) slowFor(limit, tick time.Duration) int {
	return p.strikes + int(time.Duration(p.ticks)*tick/limit)
}

// ackTimer times a follower: from an entry being sent to its being acknowledged.
type ackTimer struct {
	latency
	index uint64
}

func (a *ackTimer) begin(index uint64, now time.Time) {
	if a.since.IsZero() {
		a.since, a.index = now, index
	}
}

func (a *ackTimer) reached(index uint64, now time.Time) {
	if !a.since.IsZero() && index >= a.index {
		a.end(now)
	}
}

// forget drops the sample under way: what was sent may have been lost.
func (a *ackTimer) forget() { a.since = time.Time{} }
