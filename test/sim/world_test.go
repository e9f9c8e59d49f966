package sim

import (
	"container/heap"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"time"
)

// world is a cluster and all that happens to it.
type world struct {
	seed    uint64
	rng     *rand.Rand
	plan    plan
	mutant  mutant
	now     time.Time
	seq     uint64
	queue   events
	net     network
	members []*member // all there ever were, in the order of their IDs
	clients []*client
	watches []*watchClient
	admin   *admin
	check   *checker
	trace   trace
	cover   map[string]int
	quiet   bool // no more faults and no more requests
	err     error
}

// plan is what kind of life a world has.
type plan struct {
	founders int
	rounds   int           // of trouble, each followed by rest
	round    time.Duration // how long trouble lasts
	think    time.Duration // mean pause of a client between requests
	faults   time.Duration // mean time between faults, 0 for none
	drop     float64       // share of messages lost
	delay    time.Duration // of a message, at most, mostly
	shuffle  bool          // messages may overtake each other
	changes  time.Duration // mean time between changes of members, 0 for none
	catchUp  uint64        // entries that a log keeps
	flush    time.Duration // mean time between flushes that nobody asked for
	compact  time.Duration // mean time between compactions
	rude     bool          // elections begin without asking first
}

func (w *world) newPlan() plan {
	p := plan{
		founders: 3, rounds: 1 + w.rng.IntN(2), round: w.upTo(3*time.Second, 9*time.Second),
		think: w.upTo(40*time.Millisecond, 300*time.Millisecond), faults: w.upTo(300*time.Millisecond, 3*time.Second),
		drop: []float64{0, 0.01, 0.05, 0.15}[w.rng.IntN(4)], delay: w.upTo(2*time.Millisecond, 40*time.Millisecond),
		shuffle: w.chance(0.3), catchUp: []uint64{1, 10, 10, 50, 5000}[w.rng.IntN(5)],
		flush: w.upTo(200*time.Millisecond, 4*time.Second), compact: w.upTo(500*time.Millisecond, 5*time.Second),
	}
	switch n := w.rng.IntN(20); {
	case n < 2:
		p.founders = 1
	case n < 5:
		p.founders = 5
	}
	if w.chance(0.5) {
		p.changes = w.upTo(300*time.Millisecond, 2*time.Second)
	}
	if w.chance(0.05) {
		p.faults, p.drop = 0, 0
	}
	p.rude = w.chance(0.15)
	if w.mutant != sound { // a hard life, so that few seeds are enough
		p.founders, p.rounds, p.faults, p.catchUp = 3, 3, min(p.faults, 700*time.Millisecond), 1
	}
	return p
}

var epoch = time.Unix(1_700_000_000, 0)

func newWorld(seed uint64, m mutant) *world {
	w := &world{
		seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), mutant: m, now: epoch,
		trace: trace{hash: fnv.New64a()}, cover: map[string]int{},
	}
	w.plan = w.newPlan()
	w.net = network{w: w, blocked: map[link]bool{}, slow: map[link]time.Duration{}, last: map[link]time.Time{}, since: map[link]time.Time{}}
	w.check = newChecker(w)
	w.note("plan %+v", w.plan)
	for range w.plan.founders {
		w.addMember(true)
	}
	for _, m := range w.members {
		m.start()
	}
	for i := range 3 + w.rng.IntN(3) {
		w.clients = append(w.clients, &client{w: w, id: i})
	}
	for i := range 2 {
		w.watches = append(w.watches, newWatchClient(w, i))
	}
	w.admin = &admin{w: w}
	return w
}

// run lives through the whole plan.
func (w *world) run() error {
	defer w.close()
	for _, c := range w.watches {
		c.connect()
	}
	for round := range w.plan.rounds {
		w.quiet = false
		for _, c := range w.clients {
			c.pause()
		}
		w.disturb()
		w.admin.begin()
		w.until(w.now.Add(w.plan.round), nil)
		w.note("round %d ends", round)
		w.rest()
		if w.err != nil {
			return w.err
		}
	}
	return w.check.history()
}

// rest ends all faults, waits until everybody has come as far as everybody
// else, and compares.
func (w *world) rest() {
	w.quiet = true
	w.net.heal()
	for _, m := range w.members {
		m.heal()
	}
	w.until(w.now.Add(time.Minute), w.settled)
	if w.err != nil {
		return
	}
	if !w.settled() {
		w.fail("no rest within a minute after the last fault: %s", w.situation())
		return
	}
	w.check.atRest()
}

// until works off what happens up to a time, or until done says so.
func (w *world) until(end time.Time, done func() bool) {
	looked := w.now
	for w.err == nil && len(w.queue) > 0 && !w.queue[0].at.After(end) {
		e := heap.Pop(&w.queue).(event)
		w.now = e.at
		e.do()
		if done != nil && w.now.Sub(looked) > 50*time.Millisecond {
			looked = w.now
			if done() {
				return
			}
		}
	}
	if w.err == nil {
		w.now = maxTime(w.now, end)
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// settled says that nothing is under way any more.
func (w *world) settled() bool {
	last := uint64(0)
	for _, m := range w.present() {
		if !m.up {
			return false
		}
		end, _ := m.log.LastIndex()
		applied, _ := m.machine().Applied()
		if applied != end || last != 0 && end != last || len(m.toWrite)+len(m.toApply) > 0 || m.compactionLeft() {
			return false
		}
		last = end
	}
	for _, c := range w.clients {
		if c.busy {
			return false
		}
	}
	for _, c := range w.watches {
		if !c.caughtUp() {
			return false
		}
	}
	return w.admin.busy == 0
}

// present are the members of the cluster, as whoever has come farthest knows
// them.
func (w *world) present() []*member {
	var best *member
	for _, m := range w.members {
		if m.up && (best == nil || m.appliedIndex() > best.appliedIndex()) {
			best = m
		}
	}
	if best == nil {
		return w.members
	}
	_, members, _ := best.machine().Tables()
	var out []*member
	for _, mem := range members.List() {
		out = append(out, w.member(mem.ID))
	}
	return out
}

// situation says where everybody is.
func (w *world) situation() string {
	s := ""
	for _, m := range w.members {
		if !m.up {
			s += fmt.Sprintf("\n  member %d is down, gone %v", m.id, m.gone)
			continue
		}
		end, _ := m.log.LastIndex()
		applied, term := m.machine().Applied()
		s += fmt.Sprintf("\n  member %d: log to %d, applied %d of term %d, leader %d, members %v, revision %d, "+
			"%d to write, %d to apply, compaction left %v",
			m.id, end, applied, term, m.leader, m.machine().ConfState(), m.machine().Root().Revision(),
			len(m.toWrite), len(m.toApply), m.compactionLeft())
	}
	for _, c := range w.clients {
		if c.busy {
			s += fmt.Sprintf("\n  client %d waits", c.id)
		}
	}
	if w.admin.busy > 0 {
		s += "\n  the admin waits"
	}
	for _, c := range w.watches {
		s += fmt.Sprintf("\n  watcher %d at member %d is at revision %d, caught up %v", c.id, c.at.id, c.next, c.caughtUp())
	}
	return s
}

func (w *world) close() {
	for _, m := range w.members {
		m.abandon()
	}
}

func (w *world) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

// newRand gives a source of chance of its own to something.
func (w *world) newRand() *rand.Rand { return rand.New(rand.NewPCG(w.rng.Uint64(), 2)) }

func (w *world) chance(p float64) bool { return w.rng.Float64() < p }

// upTo draws a time from the range.
func (w *world) upTo(least, most time.Duration) time.Duration {
	return least + time.Duration(w.rng.Int64N(int64(most-least)+1))
}

// about draws a time with the given mean.
func (w *world) about(mean time.Duration) time.Duration {
	return time.Duration(w.rng.ExpFloat64()*float64(mean)) + time.Microsecond
}

// event is something that will happen.
type event struct {
	at  time.Time
	seq uint64
	do  func()
}

type events []event

func (q events) Len() int { return len(q) }
func (q events) Less(i, j int) bool {
	return q[i].at.Before(q[j].at) || q[i].at.Equal(q[j].at) && q[i].seq < q[j].seq
}
func (q events) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *events) Push(x any)   { *q = append(*q, x.(event)) }
func (q *events) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = event{}
	*q = old[:len(old)-1]
	return e
}

// at has something happen at a time.
func (w *world) at(t time.Time, do func()) {
	w.seq++
	heap.Push(&w.queue, event{maxTime(t, w.now), w.seq, do})
}

func (w *world) after(d time.Duration, do func()) { w.at(w.now.Add(d), do) }

// trace is what happened, line by line: a hash of all, and the last lines.
type trace struct {
	hash interface {
		Write([]byte) (int, error)
		Sum64() uint64
	}
	line []byte
	last [traceLines]string
	n    int
}

// traceLines is how much of the end is shown with a failure.
const traceLines = 60

// note adds a line to the trace.
func (w *world) note(format string, args ...any) {
	w.whisper(format, args...)
	t := &w.trace
	if *linesFlag {
		fmt.Printf("%s", t.line)
	}
	t.last[t.n%traceLines] = string(t.line)
	t.n++
}

// whisper adds a line to the hash alone.
func (w *world) whisper(format string, args ...any) {
	t := &w.trace
	t.line = fmt.Appendf(t.line[:0], "%v ", w.now.Sub(epoch))
	t.line = fmt.Appendf(t.line, format+"\n", args...)
	_, _ = t.hash.Write(t.line)
}

// end returns the last lines.
func (t *trace) end() string {
	s := ""
	for i := max(0, t.n-traceLines); i < t.n; i++ {
		s += t.last[i%traceLines]
	}
	return s
}
