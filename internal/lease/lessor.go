package lease

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

var (
	// ErrNotPrimary says that this member's clock does not count: it does not
	// lead.
	ErrNotPrimary = errors.New("lease: not the primary lessor")
	// ErrExpired says that a lease has expired, and waits for its revocation.
	ErrExpired = errors.New("lease: expired")
	// ErrCheckpointed says that what is left of a lease is in the log, or on its
	// way there: a next leader would go by it.
	ErrCheckpointed = errors.New("lease: what is left of it is checkpointed")
)

const (
	// maxExpiredPerPass is how many leases one pass hands over to be revoked.
	maxExpiredPerPass = 500
	// With spreadFrom leases or more, promotion sees to it that within no second
	// more than maxExpirePerSecond expire: they would all be revoked at once.
	spreadFrom         = 1000
	maxExpirePerSecond = 750
	// checkpointInterval is how often the rest of a long lease is put in the log.
	checkpointInterval = 5 * time.Minute
)

// LessorOptions configure a Lessor.
type LessorOptions struct {
	// Now is the clock that times a lease from the moment it is granted. It must
	// be monotonic, and the one whose times the methods are given.
	Now func() time.Time
	// Retry is after how long an expired lease that still exists is handed over
	// again; default 7 s.
	Retry time.Duration
	// Metrics may be nil.
	Metrics *Metrics
}

// Lessor judges on the leader when leases expire. It is a step function with no
// goroutine of its own: its caller asks it every half second, and proposes what
// it answers. On other members it is idle and knows no expiry. Its methods may
// be called concurrently; the applier waits for at most one pass over all leases.
type Lessor struct {
	o     LessorOptions
	table *Table

	mu      sync.Mutex // taken before the Table's
	primary bool
	timers  map[int64]*timer
	expiry  expiryQueue     // every lease
	due     checkpointQueue // those whose rest is worth a checkpoint
}

// timer is what the primary knows of one lease.
type timer struct {
	lease      Lease
	expiry     time.Time // when it expires
	next       time.Time // when to hand it over: expiry, or a later retry
	checkpoint time.Time
	// inFlight says that a checkpoint was proposed since one was applied last.
	inFlight  bool
	at, dueAt int // places in the queues, -1 for none
	// Ended by end, when the lease is gone or lives on; nil until somebody waits.
	gone context.Context
	end  context.CancelFunc
}

// NewLessor makes the one lessor of a table. It is not primary.
func NewLessor(t *Table, o LessorOptions) *Lessor {
	if o.Retry == 0 {
		o.Retry = 7 * time.Second
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics()
	}
	l := &Lessor{o: o, table: t, timers: map[int64]*timer{}}
	t.watch(l)
	return l
}

// seconds turns a TTL into a duration, in which MaxTTL just fits.
func seconds(ttl int64) time.Duration { return time.Duration(min(ttl, MaxTTL)) * time.Second }

// Promote makes this member's clock count: it leads, and has applied an entry of
// its term. Clients may have been told later expiries by the leader before, so
// every lease lives its remaining TTL once more, and extend (the election
// timeout) on top.
func (l *Lessor) Promote(now time.Time, extend time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clear()
	l.primary = true
	all := l.table.All()
	timers := make([]*timer, 0, len(all))
	for _, lease := range all {
		left := lease.TTL
		if lease.Remaining > 0 {
			left = lease.Remaining
		}
		tm := &timer{lease: lease, at: -1, dueAt: -1}
		tm.expiry = now.Add(extend).Add(seconds(left))
		timers = append(timers, tm)
	}
	slices.SortFunc(timers, func(a, b *timer) int {
		return cmp.Or(a.expiry.Compare(b.expiry), cmp.Compare(a.lease.ID, b.lease.ID))
	})
	for i, tm := range timers {
		if len(timers) >= spreadFrom && i >= maxExpirePerSecond {
			if soonest := timers[i-maxExpirePerSecond].expiry.Add(time.Second); tm.expiry.Before(soonest) {
				tm.expiry = soonest
			}
		}
		l.insert(tm, now)
	}
}

// Demote ends it: leadership is lost. Who waits for an expired lease wakes up.
func (l *Lessor) Demote() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clear()
}

// Reset puts another table in the place of the lessor's, as after a snapshot
// from the leader. This member does not lead then.
func (l *Lessor) Reset(t *Table) {
	l.mu.Lock()
	l.clear()
	l.table = t
	l.mu.Unlock()
	t.watch(l)
}

func (l *Lessor) clear() {
	for _, tm := range l.timers {
		tm.close()
	}
	l.primary = false
	l.timers, l.expiry, l.due = map[int64]*timer{}, nil, nil
}

// Primary says whether this member's clock counts.
func (l *Lessor) Primary() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.primary
}

// Stalled says that this member did nothing for d (paused, or stuck on a slow
// disk) and may have missed keep-alives: every lease that it still holds lives
// that much longer, also those that expired meanwhile. Who waits for the end of
// one is woken: it may live again.
func (l *Lessor) Stalled(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, tm := range l.timers { // all by the same amount: the order stays
		tm.expiry, tm.next = tm.expiry.Add(d), tm.next.Add(d)
		tm.close()
	}
}

// Expired returns leases that have expired, longest ago first and a bounded
// number at a time; a Revoke is to be proposed for each. One that still exists
// is returned again after Retry.
func (l *Lessor) Expired(now time.Time) []int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ids []int64
	for len(l.expiry) > 0 && len(ids) < maxExpiredPerPass {
		tm := l.expiry[0]
		if tm.next.After(now) {
			break
		}
		if tm.next.Equal(tm.expiry) {
			l.o.Metrics.expired.Inc()
		}
		ids = append(ids, tm.lease.ID)
		tm.next = now.Add(l.o.Retry)
		heap.Fix(&l.expiry, tm.at)
	}
	return ids
}

// Renew makes a lease live its whole TTL from now on, and returns the TTL in
// seconds. It fails with ErrNotPrimary, ErrNotFound, ErrExpired, after which Gone
// tells when to ask again, or ErrCheckpointed, after which it is to be asked again
// when a Checkpoint of 0 is applied: else a next leader would let the lease expire
// early.
func (l *Lessor) Renew(id int64, now time.Time) (ttl int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	tm, err := l.find(id)
	if err != nil {
		return 0, err
	}
	if !tm.expiry.After(now) {
		return 0, fmt.Errorf("renew lease %x: %w", id, ErrExpired)
	}
	if tm.lease.Remaining != 0 || tm.inFlight {
		return 0, fmt.Errorf("renew lease %x: %w", id, ErrCheckpointed)
	}
	l.o.Metrics.renewed.Inc()
	l.restart(tm, seconds(tm.lease.TTL), now)
	return tm.lease.TTL, nil
}

func (l *Lessor) find(id int64) (*timer, error) {
	if !l.primary {
		return nil, fmt.Errorf("lease %x: %w", id, ErrNotPrimary)
	}
	tm := l.timers[id]
	if tm == nil {
		return nil, fmt.Errorf("lease %x: %w", id, ErrNotFound)
	}
	return tm, nil
}

// Remaining returns how long a lease still lives, 0 if it has expired. It fails
// with ErrNotPrimary or ErrNotFound.
func (l *Lessor) Remaining(id int64, now time.Time) (time.Duration, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	tm, err := l.find(id)
	if err != nil {
		return 0, err
	}
	return max(0, tm.expiry.Sub(now)), nil
}

// Gone returns a context that ends when a lease that has expired is revoked, or
// extended (Stalled), or this member is no longer primary; at once, if there is
// none to wait for. Who waited asks Renew again. That it is a context lets many
// wait by context.AfterFunc, without a goroutine each.
func (l *Lessor) Gone(id int64, now time.Time) context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	tm := l.timers[id]
	if tm == nil || tm.expiry.After(now) {
		tm = &timer{}
		defer tm.close()
	}
	if tm.gone == nil {
		tm.gone, tm.end = context.WithCancel(context.Background())
	}
	return tm.gone
}

// IDs returns the leases, those that expire first first if this member is
// primary, else by ID.
func (l *Lessor) IDs() []int64 {
	all := l.table.All()
	l.mu.Lock()
	expiry := make(map[int64]time.Time, len(l.timers))
	for id, tm := range l.timers {
		expiry[id] = tm.expiry
	}
	l.mu.Unlock()
	slices.SortFunc(all, func(a, b Lease) int {
		return cmp.Or(expiry[a.ID].Compare(expiry[b.ID]), cmp.Compare(a.ID, b.ID))
	})
	ids := make([]int64, len(all))
	for i, lease := range all {
		ids[i] = lease.ID
	}
	return ids
}

// DueCheckpoints has at most limit leases whose remaining TTL is to be put in the
// log proposed, which happens every five minutes of a lease's life, and returns how
// many. Only ID and Remaining of them are meant. Propose is called within, if there
// is any, so that what takes one back after a Renew is proposed later and gets into
// the log behind it: it must neither block nor call the lessor.
func (l *Lessor) DueCheckpoints(now time.Time, limit int, propose func([]Lease)) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	var due []Lease
	for len(l.due) > 0 && len(due) < limit {
		tm := l.due[0]
		if tm.checkpoint.After(now) {
			break
		}
		left := tm.expiry.Sub(now)
		rest := int64((left + time.Second - 1) / time.Second)
		if left > 0 && rest < tm.lease.TTL {
			due = append(due, Lease{ID: tm.lease.ID, TTL: tm.lease.TTL, Remaining: rest})
			tm.inFlight = true
		}
		l.schedule(tm, now)
	}
	if len(due) > 0 {
		propose(due)
	}
	return len(due)
}

// restart gives a lease that much to live from now.
func (l *Lessor) restart(tm *timer, left time.Duration, now time.Time) {
	tm.expiry = now.Add(left)
	tm.next = tm.expiry
	heap.Fix(&l.expiry, tm.at)
	l.schedule(tm, now)
}

func (l *Lessor) insert(tm *timer, now time.Time) {
	l.timers[tm.lease.ID] = tm
	tm.next = tm.expiry
	heap.Push(&l.expiry, tm)
	l.schedule(tm, now)
}

func (l *Lessor) remove(tm *timer) {
	delete(l.timers, tm.lease.ID)
	heap.Remove(&l.expiry, tm.at)
	if tm.dueAt >= 0 {
		heap.Remove(&l.due, tm.dueAt)
	}
	tm.close()
}

// schedule sets the next checkpoint, an interval from now if that much is left.
func (l *Lessor) schedule(tm *timer, now time.Time) {
	worth := tm.expiry.Sub(now) > checkpointInterval
	tm.checkpoint = now.Add(checkpointInterval)
	switch {
	case worth && tm.dueAt < 0:
		heap.Push(&l.due, tm)
	case worth:
		heap.Fix(&l.due, tm.dueAt)
	case tm.dueAt >= 0:
		heap.Remove(&l.due, tm.dueAt)
	}
}

func (tm *timer) close() {
	if tm.gone != nil {
		tm.end()
		tm.gone, tm.end = nil, nil
	}
}

// granted implements watcher.
func (l *Lessor) granted(lease Lease) {
	l.o.Metrics.granted.Inc()
	l.o.Metrics.ttls.Observe(float64(lease.TTL))
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.primary {
		return
	}
	now := l.o.Now()
	if tm := l.timers[lease.ID]; tm != nil { // Promote saw it already
		l.restart(tm, seconds(lease.TTL), now)
		return
	}
	l.insert(&timer{lease: lease, expiry: now.Add(seconds(lease.TTL)), at: -1, dueAt: -1}, now)
}

// revoked implements watcher.
func (l *Lessor) revoked(id int64) {
	l.o.Metrics.revoked.Inc()
	l.mu.Lock()
	defer l.mu.Unlock()
	if tm := l.timers[id]; tm != nil {
		l.remove(tm)
	}
}

// checkpointed implements watcher.
func (l *Lessor) checkpointed(lease Lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if tm := l.timers[lease.ID]; tm != nil {
		tm.lease.Remaining, tm.inFlight = lease.Remaining, false
	}
}

// expiryQueue is a heap by next.
type expiryQueue []*timer

func (q expiryQueue) Len() int           { return len(q) }
func (q expiryQueue) Less(i, j int) bool { return q[i].next.Before(q[j].next) }
func (q expiryQueue) Swap(i, j int)      { q[i], q[j] = q[j], q[i]; q[i].at, q[j].at = i, j }
func (q *expiryQueue) Push(x any)        { tm := x.(*timer); tm.at = len(*q); *q = append(*q, tm) }
func (q *expiryQueue) Pop() any          { return pop((*[]*timer)(q)) }

// checkpointQueue is a heap by checkpoint.
type checkpointQueue []*timer

func (q checkpointQueue) Len() int           { return len(q) }
func (q checkpointQueue) Less(i, j int) bool { return q[i].checkpoint.Before(q[j].checkpoint) }
func (q checkpointQueue) Swap(i, j int)      { q[i], q[j] = q[j], q[i]; q[i].dueAt, q[j].dueAt = i, j }
func (q *checkpointQueue) Push(x any)        { tm := x.(*timer); tm.dueAt = len(*q); *q = append(*q, tm) }
func (q *checkpointQueue) Pop() any {
	tm := pop((*[]*timer)(q))
	tm.dueAt = -1
	return tm
}

func pop(q *[]*timer) *timer {
	last := len(*q) - 1
	tm := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return tm
}
