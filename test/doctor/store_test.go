package doctor

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestStore has a member hold, one after the other, what the doctor warns of, and no more.
func TestStore(t *testing.T) {
	if !engram() {
		t.Skip("etcd does not tell what is in its store; run without CLUSTER_PROGRAM")
	}
	const quota = 32 << 20
	ctx, c := start(t, 1, fmt.Sprintf("--quota-backend-bytes=%d", quota), "--max-txn-ops=10000")
	m := c.Members()[0]
	client, err := m.Client()
	if err != nil {
		t.Fatal(err)
	}
	put := func(key string, bytes int) {
		t.Helper()
		if _, err := client.Put(ctx, key, strings.Repeat("v", bytes)); err != nil {
			t.Fatal(err)
		}
	}
	empty := func() {
		t.Helper()
		r, err := client.Delete(ctx, "", clientv3.WithPrefix())
		if err == nil {
			_, err = client.Compact(ctx, r.Header.Revision)
		}
		if err != nil {
			t.Fatal(err)
		}
		examine(t, ctx, c, m.Endpoint(), 0)
	}

	put("/large/value", 1_200_000)
	put("/large/less", 200_000)
	a := examine(t, ctx, c, m.Endpoint(), 1, "warning large-values")
	if f := a.found("large-values"); !strings.Contains(f.What, "/large/value (1.") || strings.Contains(f.What, "/large/less") {
		t.Errorf("%+v", f)
	}
	empty()

	const crowd, batch = 100_000, 10_000
	for first := 0; first < crowd; first += batch {
		ops := make([]clientv3.Op, batch)
		for i := range ops {
			ops[i] = clientv3.OpPut(fmt.Sprintf("/registry/events/%06d", first+i), "v")
		}
		if first+batch == crowd { // not yet
			a := examine(t, ctx, c, m.Endpoint(), 0)
			if f := a.found("crowded"); f.Check != "" {
				t.Errorf("with %d keys: %+v", first, f)
			}
		}
		if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	a = examine(t, ctx, c, m.Endpoint(), 1, "warning crowded")
	if f := a.found("crowded"); f.What != "/registry/events/ has 100000 keys" {
		t.Errorf("%+v", f)
	}
	empty()

	inUse := func() int64 {
		t.Helper()
		s, err := m.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return s.DbSizeInUse
	}
	fill := func(percent int64) {
		t.Helper()
		for i := 0; inUse() < quota*percent/100; i++ {
			put(fmt.Sprintf("/fill/%d/%d", percent, i), 100_000)
		}
	}
	fill(79)
	examine(t, ctx, c, m.Endpoint(), 0)
	fill(85)
	a = examine(t, ctx, c, m.Endpoint(), 1, "warning quota")
	if f := a.found("quota"); !strings.HasSuffix(f.What, " are used (85%)") {
		t.Errorf("%+v", f)
	}
	fill(90)
	examine(t, ctx, c, m.Endpoint(), 2, "error quota")
}

// TestBusyPrefix reads keys of one prefix all the time, and one of another now and then.
func TestBusyPrefix(t *testing.T) {
	if !engram() {
		t.Skip("etcd does not count by prefix; run without CLUSTER_PROGRAM")
	}
	ctx, c := start(t, 1)
	m := c.Members()[0]
	client, err := m.Client()
	if err != nil {
		t.Fatal(err)
	}
	loading, end := context.WithCancel(ctx)
	var load sync.WaitGroup
	defer load.Wait()
	defer end()
	for range 8 {
		load.Go(func() {
			for i := 0; loading.Err() == nil; i++ {
				key := "/registry/busy/ns/a"
				if i%50 == 0 {
					key = "/registry/calm/ns/a"
				}
				if _, err := client.Get(loading, key, clientv3.WithSerializable()); err != nil && loading.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	eventually(t, ctx, "the busy prefix is told", func() error {
		a, err := look(t, ctx, c, m.Endpoint(), 0)
		if err != nil {
			return err
		}
		if f := a.found("hot"); f.Severity != "note" || !strings.HasPrefix(f.What, "the prefix /registry/busy/ns/ makes ") {
			return fmt.Errorf("%+v", a.Findings)
		}
		return nil
	})
}
