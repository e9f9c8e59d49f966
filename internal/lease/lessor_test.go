package lease

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/engram-kv/engram/internal/storage"
)

type bench struct {
	t      testing.TB
	store  *storage.Store
	table  *Table
	lessor *Lessor
	start  time.Time
	now    time.Time
}

func newBench(t testing.TB) *bench {
	b := &bench{t: t, start: time.Unix(1_000_000, 0)}
	b.now = b.start
	b.store, b.table = open(t, vfs.NewMem())
	b.lessor = NewLessor(b.table, LessorOptions{Now: func() time.Time { return b.now }})
	t.Cleanup(func() {
		if err := b.store.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// apply runs one command in a batch of its own.
func (b *bench) apply(fn func(*storage.Batch) error) error {
	batch := b.store.NewBatch()
	err := fn(batch)
	if err := b.store.Commit(batch); err != nil {
		b.t.Fatal(err)
	}
	return err
}

func (b *bench) grant(id, ttl int64) error {
	return b.apply(func(batch *storage.Batch) error {
		_, err := b.table.Grant(batch, id, ttl)
		return err
	})
}

func (b *bench) revoke(id int64) error {
	return b.apply(func(batch *storage.Batch) error { return b.table.Revoke(batch, id) })
}

func (b *bench) checkpoint(id, remaining int64) {
	_ = b.apply(func(batch *storage.Batch) error {
		b.table.Checkpoint(batch, id, remaining)
		return nil
	})
}

func TestLessorScript(t *testing.T) {
	b := newBench(t)
	datadriven.RunTest(t, "testdata/lessor", func(t *testing.T, d *datadriven.TestData) string {
		var id, ttl, remaining int64
		d.MaybeScanArgs(t, "id", &id)
		d.MaybeScanArgs(t, "ttl", &ttl)
		d.MaybeScanArgs(t, "remaining", &remaining)
		switch d.Cmd {
		case "at": // sets the clock
			after, err := time.ParseDuration(d.CmdArgs[0].Key)
			if err != nil {
				t.Fatal(err)
			}
			b.now = b.start.Add(after)
		case "grant":
			return answer("", b.grant(id, ttl))
		case "revoke":
			return answer("", b.revoke(id))
		case "checkpoint":
			b.checkpoint(id, remaining)
		case "promote":
			b.lessor.Promote(b.now, time.Second)
		case "demote":
			b.lessor.Demote()
		case "stalled":
			by, err := time.ParseDuration(d.CmdArgs[0].Key)
			if err != nil {
				t.Fatal(err)
			}
			b.lessor.Stalled(by)
		case "expired":
			return fmt.Sprintln(b.lessor.Expired(b.now))
		case "renew":
			ttl, err := b.lessor.Renew(id, b.now)
			return answer(fmt.Sprintf("ttl %d\n", ttl), err)
		case "remaining":
			left, err := b.lessor.Remaining(id, b.now)
			return answer(fmt.Sprintln(left), err)
		case "ids":
			return fmt.Sprintln(b.lessor.IDs())
		case "due":
			var out strings.Builder
			b.lessor.DueCheckpoints(b.now, 100, func(due []Lease) {
				for _, l := range due {
					fmt.Fprintf(&out, "lease %x remaining %d\n", l.ID, l.Remaining)
				}
			})
			return out.String()
		default:
			t.Fatalf("unknown command %s", d.Cmd)
		}
		return ""
	})
	if q, n := len(b.lessor.expiry), len(b.lessor.timers); q != n {
		t.Errorf("%d leases in the queue, %d known", q, n)
	}
}

func answer(s string, err error) string {
	if err != nil {
		return err.Error() + "\n"
	}
	return s
}

// TestSpread: after a promotion no second has more than 750 expiries in it, none
// is earlier than promised, and all come.
func TestSpread(t *testing.T) {
	for _, n := range []int{spreadFrom - 1, spreadFrom, 5000} {
		b := newBench(t)
		for i := range n {
			if err := b.grant(int64(i+1), 10+int64(i%2)); err != nil {
				t.Fatal(err)
			}
		}
		b.lessor.Promote(b.now, time.Second)
		var times []time.Duration
		for _, tm := range b.lessor.timers {
			at := tm.expiry.Sub(b.now)
			if promised := seconds(tm.lease.TTL) + time.Second; at < promised {
				t.Fatalf("lease expires after %v, promised %v", at, promised)
			}
			times = append(times, at)
		}
		most := 0
		perSecond := map[time.Duration]int{}
		for _, at := range times {
			perSecond[at/time.Second]++
			most = max(most, perSecond[at/time.Second])
		}
		if n < spreadFrom {
			if most <= n/2-1 {
				t.Errorf("%d leases were spread", n)
			}
			continue
		}
		if most > maxExpirePerSecond {
			t.Errorf("%d of %d leases expire in one second", most, n)
		}
		got := map[int64]bool{}
		for b.now = b.now.Add(10 * time.Second); len(got) < n && b.now.Sub(b.start) < time.Hour; b.now = b.now.Add(time.Second / 2) {
			ids := b.lessor.Expired(b.now)
			if len(ids) > maxExpiredPerPass {
				t.Fatalf("%d at once", len(ids))
			}
			for _, id := range ids {
				if got[id] {
					t.Fatalf("lease %d twice", id)
				}
				got[id] = true
				if err := b.revoke(id); err != nil {
					t.Fatal(err)
				}
			}
		}
		if len(got) != n || len(b.lessor.timers) != 0 || len(b.lessor.expiry) != 0 {
			t.Errorf("%d of %d expired", len(got), n)
		}
	}
}

func TestGone(t *testing.T) {
	b := newBench(t)
	closed := func(c context.Context) bool { return c.Err() != nil }
	if !closed(b.lessor.Gone(1, b.now)) {
		t.Error("an unknown lease is not gone")
	}
	b.lessor.Promote(b.now, 0)
	for id := range int64(3) {
		if err := b.grant(id+1, 5); err != nil {
			t.Fatal(err)
		}
	}
	if !closed(b.lessor.Gone(3, b.now)) {
		t.Error("a lease that lives is waited for")
	}
	b.now = b.now.Add(6 * time.Second)
	one, again, two := b.lessor.Gone(1, b.now), b.lessor.Gone(1, b.now), b.lessor.Gone(2, b.now)
	if closed(one) || closed(two) {
		t.Error("gone before they are revoked")
	}
	if err := b.revoke(1); err != nil {
		t.Fatal(err)
	}
	if !closed(one) || !closed(again) || closed(two) {
		t.Error("revoked lease is not gone, or another is")
	}
	b.lessor.Stalled(5 * time.Second)
	if !closed(two) {
		t.Error("who waits for a lease was not told that it lives on")
	}
	if _, err := b.lessor.Renew(2, b.now); err != nil {
		t.Errorf("renewing the extended lease: %v", err)
	}
	b.now = b.now.Add(6 * time.Second)
	two = b.lessor.Gone(2, b.now)
	b.lessor.Demote()
	if !closed(two) {
		t.Error("demotion woke nobody")
	}
}

func TestLongest(t *testing.T) {
	b := newBench(t)
	if err := b.grant(1, MaxTTL); err != nil {
		t.Fatal(err)
	}
	b.lessor.Promote(b.now, time.Minute)
	if left, err := b.lessor.Remaining(1, b.now); err != nil || left < seconds(MaxTTL) {
		t.Errorf("remaining %v, %v", left, err)
	}
	if ids := b.lessor.Expired(b.now.Add(200 * 365 * 24 * time.Hour)); len(ids) != 0 {
		t.Error("expired after 200 years")
	}
	b.now = b.now.Add(checkpointInterval)
	var due []Lease
	if b.lessor.DueCheckpoints(b.now, 10, func(all []Lease) { due = all }); len(due) != 1 || due[0].Remaining != MaxTTL-240 {
		t.Errorf("due %+v", due)
	}
}

func TestDueCheckpointsAreBounded(t *testing.T) {
	b := newBench(t)
	b.lessor.Promote(b.now, 0)
	for id := range int64(25) {
		if err := b.grant(id+1, 3600); err != nil {
			t.Fatal(err)
		}
	}
	b.now = b.now.Add(checkpointInterval)
	for _, want := range []int{10, 10, 5, 0} {
		proposed := 0
		if got := b.lessor.DueCheckpoints(b.now, 10, func(due []Lease) { proposed = len(due) }); got != want || proposed != want {
			t.Errorf("%d due, %d proposed, want %d", got, proposed, want)
		}
	}
}

// TestCheckpointIsProposedFirst: who renews a lease that is being checkpointed takes that back behind it: the next leader goes by the later one.
func TestCheckpointIsProposedFirst(t *testing.T) {
	b := newBench(t)
	b.lessor.Promote(b.now, 0)
	if err := b.grant(1, 600); err != nil {
		t.Fatal(err)
	}
	b.now = b.now.Add(checkpointInterval + time.Second)
	log, renewed := make(chan int64, 2), make(chan error)
	b.lessor.DueCheckpoints(b.now, 10, func(due []Lease) {
		go func() {
			_, err := b.lessor.Renew(1, b.now)
			log <- 0
			renewed <- err
		}()
		if b.lessor.mu.TryLock() {
			t.Error("a renewal gets in between")
			b.lessor.mu.Unlock()
		}
		log <- due[0].Remaining
	})
	if err := <-renewed; !errors.Is(err, ErrCheckpointed) {
		t.Fatalf("a renewal: %v", err)
	}
	first, second := <-log, <-log
	for _, left := range []int64{first, second} {
		b.checkpoint(1, left)
	}
	if l, ok := b.table.Lookup(1); !ok || first != 299 || l.Remaining != 0 {
		t.Errorf("proposed %d and %d, the next leader finds %+v", first, second, l)
	}
	if _, err := b.lessor.Renew(1, b.now); err != nil {
		t.Error(err)
	}
}

func TestMetrics(t *testing.T) {
	b := newBench(t)
	m := b.lessor.o.Metrics
	r := prometheus.NewRegistry()
	if err := m.Register(r); err != nil {
		t.Fatal(err)
	}
	b.lessor.Promote(b.now, 0)
	for id := range int64(3) {
		if err := b.grant(id+1, 5); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.lessor.Renew(1, b.now); err != nil {
		t.Fatal(err)
	}
	if _, err := b.lessor.Renew(9, b.now); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
	if err := b.revoke(2); err != nil {
		t.Fatal(err)
	}
	b.now = b.now.Add(6 * time.Second)
	for range 2 { // the second time is a retry and counts no more
		if got := len(b.lessor.Expired(b.now)); got != 2 {
			t.Fatalf("%d expired", got)
		}
		b.now = b.now.Add(10 * time.Second)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		m := f.GetMetric()[0]
		got[f.GetName()] = m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	want := map[string]float64{
		"etcd_debugging_lease_granted_total":        3,
		"etcd_debugging_lease_renewed_total":        1,
		"etcd_debugging_lease_revoked_total":        1,
		"etcd_debugging_lease_ttl_total":            3,
		"etcd_debugging_server_lease_expired_total": 2,
	}
	if !maps.Equal(got, want) {
		t.Errorf("metrics %v, want %v", got, want)
	}
}
