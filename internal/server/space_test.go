package server

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/state"
)

func TestQuotaWatchTellsOncePerCrossing(t *testing.T) {
	var w quotaWatch
	var got []string
	for _, usage := range []int64{0, 79, 80, 81, 85, 79, 80, 90, 95, 89, 90, 77, 95, 100, 120, 10, 80} {
		if passed := w.step(usage, 100); len(passed) > 0 {
			got = append(got, fmt.Sprint(usage, passed))
		}
	}
	want := []string{"80 [80]", "90 [90]", "95 [80 90]", "80 [80]"}
	if !slices.Equal(got, want) {
		t.Errorf("told %v, want %v", got, want)
	}
	if passed := (&quotaWatch{}).step(1<<40, 0); len(passed) > 0 {
		t.Errorf("without a quota told %v", passed)
	}
}

// TestFullStoreGetsOutByItself: a member that is alone is at feature level 1, so
// Kubernetes' compactor goes on when the store is full, and once it has made
// space the alarm goes by itself.
func TestFullStoreGetsOutByItself(t *testing.T) {
	t.Parallel()
	for _, manual := range []bool{false, true} {
		t.Run(fmt.Sprintf("manual=%t", manual), func(t *testing.T) {
			t.Parallel()
			m := start(t, t.TempDir(), "--quota-backend-bytes=2000000", fmt.Sprintf("--auto-clear-nospace=%t", !manual))
			defer stop(t, m)
			c := client(t, m)
			ctx := t.Context()
			if _, err := c.Put(ctx, "compact_rev_key", "1"); err != nil {
				t.Fatal(err)
			}
			for m.root().FeatureLevel() == 0 {
				if ctx.Err() != nil {
					t.Fatal("feature level 0")
				}
				time.Sleep(time.Millisecond)
			}
			value := string(make([]byte, 50_000))
			var err error
			for i := 0; err == nil && i < 100; i++ {
				_, err = c.Put(ctx, "fill", value)
			}
			if !errors.Is(err, rpctypes.ErrNoSpace) {
				t.Fatalf("filling ended with %v", err)
			}
			full := func() bool { return len(m.Alarms()) > 0 }
			for !full() {
				if ctx.Err() != nil {
					t.Fatal("no alarm")
				}
				time.Sleep(time.Millisecond)
			}
			if _, err := c.Put(ctx, "fill", value); !errors.Is(err, rpctypes.ErrNoSpace) {
				t.Fatalf("a large overwrite: %v", err)
			}
			if _, err := c.Put(ctx, "new", "1"); !errors.Is(err, rpctypes.ErrNoSpace) {
				t.Fatalf("a new key: %v", err)
			}
			// The compactor of an API server.
			txn, err := c.Txn(ctx).If(clientv3.Compare(clientv3.Version("compact_rev_key"), "=", 1)).
				Then(clientv3.OpPut("compact_rev_key", "2")).Else(clientv3.OpGet("compact_rev_key")).Commit()
			if err != nil || !txn.Succeeded {
				t.Fatalf("compactor's transaction: %v %v", txn, err)
			}
			began := time.Now() // there is space from now on at the earliest
			if _, err := c.Compact(ctx, txn.Header.Revision); err != nil {
				t.Fatal(err)
			}
			for full() && (!manual || time.Since(began) < 15*time.Second) {
				if time.Since(began) > time.Minute {
					t.Fatal("the alarm does not go by itself")
				}
				time.Sleep(10 * time.Millisecond)
			}
			if took := time.Since(began); full() != manual || took < 9*time.Second {
				t.Fatalf("after %v the alarm stands: %t", took, full())
			}
			if manual {
				if _, err := c.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := c.Put(ctx, "new", value); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestCompactorPassesBeforeTheAlarm: between the request that finds the store full and the alarm, what the reserve is for passes too, and
// nothing else, whichever of them it was.
func TestCompactorPassesBeforeTheAlarm(t *testing.T) {
	overwrite := func(t *testing.T, c *clientv3.Client) {
		if _, err := c.Put(t.Context(), "compact_rev_key", "2"); err != nil {
			t.Errorf("a small overwrite: %v", err)
		}
	}
	large := func(t *testing.T, c *clientv3.Client) {
		if _, err := c.Put(t.Context(), "fill", string(make([]byte, 5000))); !errors.Is(err, rpctypes.ErrNoSpace) {
			t.Errorf("a large one: %v", err)
		}
	}
	create := func(t *testing.T, c *clientv3.Client) {
		if _, err := c.Put(t.Context(), "new", "0123456789"); !errors.Is(err, rpctypes.ErrNoSpace) {
			t.Errorf("a key that there is not: %v", err)
		}
		if got, err := c.Get(t.Context(), "new"); err != nil || len(got.Kvs) > 0 {
			t.Errorf("a key that was refused: %v %v", got, err)
		}
	}
	type ask = func(*testing.T, *clientv3.Client)
	for name, asks := range map[string][]ask{"overwrite": {overwrite, large}, "create": {create, overwrite}} {
		t.Run(name, func(t *testing.T) {
			m, c := almostFull(t)
			defer stop(t, m)
			for _, ask := range asks {
				ask(t, c)
			}
		})
	}
}

// almostFull starts a member of feature level 1 at whose store no put fits below the quota any more, and which does not know that yet.
func almostFull(t *testing.T) (*Member, *clientv3.Client) {
	t.Helper()
	const limit = 1_000_000
	m := start(t, t.TempDir(), fmt.Sprintf("--quota-backend-bytes=%d", limit))
	c := client(t, m)
	ctx := t.Context()
	if _, err := c.Put(ctx, "compact_rev_key", "1"); err != nil {
		t.Fatal(err)
	}
	for m.root().FeatureLevel() == 0 {
		if ctx.Err() != nil {
			t.Fatal("feature level 0")
		}
		time.Sleep(time.Millisecond)
	}
	// The largest put that passes: no other does then.
	usage := m.machine().Root().UsageBytes()
	left := limit - 1 - usage - state.PutCost(&command.PutRequest{Key: []byte("fill")})
	if _, err := c.Put(ctx, "fill", string(make([]byte, left))); err != nil {
		t.Fatal(err)
	}
	usage = m.machine().Root().UsageBytes()
	small := state.PutCost(&command.PutRequest{Key: []byte("compact_rev_key"), Value: []byte("2")})
	if len(m.Alarms()) > 0 || usage+small < limit {
		t.Fatalf("usage is %d of %d, alarms %v", usage, limit, m.Alarms())
	}
	return m, c
}
