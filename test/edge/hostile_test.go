package edge

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/edge/member"
	"github.com/engram-kv/engram/test/internal/race"
	"github.com/engram-kv/engram/test/internal/stall"
)

const (
	poll = 20 * time.Millisecond // of another process: there is no event to wait for

	// What the good client gets at worst while the machine's cores are shared with an attacker.
	worstShare = 500 * time.Millisecond // of all calls but one in a hundred
	worst      = 3 * time.Second        // of all

	// On a machine that is busy with other things it is so many times what it is while nobody attacks.
	busy = 20

	// A process in Go takes memory ahead of its need; what an attack may make a member hold comes on top.
	slack = 64 << 20
)

// battle is a member with a good client beside the hostile ones.
type battle struct {
	*member.Member
	t    testing.TB
	good *good
	tls  *tls.Config
	ease float64 // CPU seconds per second that the good client alone costs

	stalls            *stall.Watch
	worstShare, worst time.Duration // for the good client, beside what the machine withholds from everybody
}

// begin starts a member and the good client.
func begin(t testing.TB, flags ...string) *battle {
	t.Helper()
	return beside(t, member.Start(t, 0, flags...))
}

// beside starts the good client of a member.
func beside(t testing.TB, m *member.Member) *battle {
	t.Helper()
	b := &battle{t: t, Member: m, worstShare: worstShare, worst: worst}
	var err error
	b.stalls, err = stall.Begin()
	check(t, err)
	t.Cleanup(func() { check(t, b.stalls.Close()) })
	b.tls = b.ClientTLS(t, "")
	b.good = beGood(t, b.Member, false)
	t.Cleanup(func() { b.served(t, "after the attacks", b.good.end(t)) })
	first := b.good.next()
	before, began := b.cpu(), time.Now()
	<-time.After(time.Second) // the measure is the time
	b.ease = (b.cpu() - before).Seconds() / time.Since(began).Seconds()
	quiet := b.good.next()
	b.worstShare = max(b.worstShare, busy*share(quiet.latencies, 990))
	if race.On() { // under which all takes longer: an answer is what is asked for
		b.worstShare, b.worst = goodWithin, goodWithin
	}
	b.served(t, "at first", first)
	b.served(t, "while nobody attacks", quiet)
	t.Logf("quiet: the good client costs %.3f cores, %v", b.ease, quiet)
	return b
}

func (l *lap) String() string {
	return fmt.Sprintf("%d answers in %v, 99%% within %v, the worst %v", len(l.latencies), l.took.Round(time.Millisecond),
		share(l.latencies, 990).Round(time.Millisecond), share(l.latencies, 1000).Round(time.Millisecond))
}

// served checks that the good client got in a lap what is its due: answers, no errors, and none of them late.
func (b *battle) served(t testing.TB, when string, l *lap) {
	t.Helper()
	var longest, stood time.Duration
	for _, s := range b.stalls.Since(l.began) {
		longest, stood = max(longest, s.Length()), stood+s.Length()
	}
	if len(l.errs) > 0 {
		t.Errorf("%s the good client had %d errors, the first: %v", when, len(l.errs), l.errs[0])
	}
	// It shares its machine with an attacker, and does not come to each of its calls in time.
	if least := int((l.took - stood) / goodEvery / 2); len(l.latencies) < least {
		t.Errorf("%s the good client had %d answers in %v, at least %d are its due", when, len(l.latencies), l.took, least)
	}
	some := member.Long() && len(l.latencies) >= 100 // or there are too few to tell a share of them
	if most, last := share(l.latencies, 990), share(l.latencies, 1000); some && most > b.worstShare+longest || last > b.worst+longest {
		t.Errorf("%s the good client waited too long, %v: 99%% may take %v, and the worst %v, and %v were the machine's", when, l, b.worstShare, b.worst, longest)
	}
}

func (b *battle) cpu() time.Duration {
	b.t.Helper()
	d, err := b.CPU()
	if err != nil {
		b.t.Fatal(err)
	}
	return d
}

func (b *battle) memory() int64 {
	b.t.Helper()
	now, _, err := b.Memory()
	if err != nil {
		b.t.Fatal(err)
	}
	return now
}

// metrics are the member's, by name and labels.
func (b *battle) metrics(t testing.TB) map[string]float64 {
	t.Helper()
	all, err := b.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// limits are the counts of the member's limits by reason.
func (b *battle) limits(t testing.TB) map[string]float64 { return limitsOf(b.metrics(t)) }

func limitsOf(metrics map[string]float64) map[string]float64 {
	out := map[string]float64{}
	for name, v := range metrics {
		if reason, ok := strings.CutPrefix(name, `engram_grpc_limits_total{reason="`); ok {
			out[strings.TrimSuffix(reason, `"}`)] = v
		}
	}
	return out
}

// watcher sees what happens to a member during an attack.
type watcher struct {
	b      *battle
	began  time.Time
	cpu    time.Duration
	memory int64
	before map[string]float64 // metrics
	most   atomic.Int64
	stop   func()
}

// watch begins to look.
func (b *battle) watch(t testing.TB) *watcher {
	t.Helper()
	b.served(t, "before this attack", b.good.next())
	w := &watcher{b: b, began: time.Now(), cpu: b.cpu(), memory: b.memory(), before: b.metrics(t)}
	done := make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(poll):
				if now, _, err := b.Memory(); err == nil && now > w.most.Load() {
					w.most.Store(now)
				}
			}
		}
	})
	w.stop = sync.OnceFunc(func() { close(done); looking.Wait() })
	t.Cleanup(w.stop)
	return w
}

// met waits until the member has counted a reason since the attack began, or ctx ends.
func (w *watcher) met(ctx context.Context, t testing.TB, reason string) {
	t.Helper()
	for before := limitsOf(w.before)[reason]; member.Engram() && w.b.limits(t)[reason] <= before; {
		select {
		case <-time.After(poll):
		case <-ctx.Done():
			t.Errorf("the member did not meet its limit %q: %v", reason, ctx.Err())
			return
		}
	}
}

// counted checks that a metric of the member has risen by so much since the attack began.
func (w *watcher) counted(t testing.TB, metric string, least float64) {
	t.Helper()
	if !member.Engram() {
		return
	}
	now, is := w.b.metrics(t)[metric]
	n := now - w.before[metric]
	t.Logf("%s has risen by %v", metric, n)
	if !is || n < least {
		t.Errorf("%s has risen by %v, at least %v are in order", metric, n, least)
	}
}

// judge checks what was seen: memory, the good client's service, and that the member counted a reason. spent gets the CPU
// time beyond that of the good client.
func (w *watcher) judge(t testing.TB, memory int64, reason string, spent func(time.Duration)) {
	t.Helper()
	w.stop()
	took := time.Since(w.began)
	cpu := w.b.cpu() - w.cpu - time.Duration(w.b.ease*float64(took))
	l := w.b.good.next()
	grown := w.most.Load() - w.memory
	t.Logf("%v: %v of CPU, %d MiB more memory; the good client: %v", took.Round(time.Millisecond), cpu.Round(time.Millisecond), grown>>20, l)
	spent(max(0, cpu))
	if memory += slack; grown > memory && !race.On() {
		t.Errorf("it took %d MiB more memory, at most %d are in order", grown>>20, memory>>20)
	}
	w.b.served(t, "meanwhile", l)
	if !member.Engram() {
		return
	}
	now, before := w.b.limits(t), limitsOf(w.before)
	counted := map[string]float64{}
	for r, n := range now {
		if n > before[r] {
			counted[r] = n - before[r]
		}
	}
	t.Logf("limits met: %v", counted)
	if reason != "" && counted[reason] == 0 && !race.On() { // under which some attacks are slower than a limit
		t.Errorf("engram_grpc_limits_total{reason=%q} did not count it, of %v", reason, slices.Sorted(maps.Keys(now)))
	}
}
