package kube

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"

	"github.com/engram-kv/engram/test/kube/member"
)

// eachEnd runs the test with both ways in which a member goes away.
func eachEnd(t *testing.T, test func(t *testing.T, end func(*testing.T, *member.Member))) {
	t.Run("SIGTERM", func(t *testing.T) {
		test(t, func(t *testing.T, m *member.Member) {
			if err := m.Stop(); err != nil {
				t.Fatal(err)
			}
		})
	})
	t.Run("SIGKILL", func(t *testing.T) {
		test(t, func(_ *testing.T, m *member.Member) { m.Kill() })
	})
}

// A store, a watch cache and a watch live through restarts of the member without being made anew.
func TestRestartBetweenOperations(t *testing.T) {
	t.Parallel()
	eachEnd(t, func(t *testing.T, end func(*testing.T, *member.Member)) {
		m := startMember(t)
		config := newConfig(m)
		store, cached := newStore(t, config), newCachedStore(t, config)
		healthy := newHealthCheck(t, config.Config)

		last := create(t, store, "first")
		w := watchPods(t, store, last.ResourceVersion, nil)
		for round := range 3 {
			before := list(t, store, nil)
			end(t, m)
			if err := m.Restart(); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "health", healthy)

			after := list(t, store, nil)
			if len(after.Items) != len(before.Items) || revision(t, after.ResourceVersion) < revision(t, before.ResourceVersion) {
				t.Fatalf(brokenGuarantee+"round %d: %d Pods at revision %s; before the restart %d at %s", round, len(after.Items), after.ResourceVersion, len(before.Items), before.ResourceVersion)
			}
			for i, p := range after.Items {
				if want := before.Items[i]; p.Name != want.Name || p.ResourceVersion != want.ResourceVersion || p.Spec.NodeName != want.Spec.NodeName {
					t.Fatalf(brokenGuarantee+"round %d: %s at %s after the restart; before it %s at %s", round, p.Name, p.ResourceVersion, want.Name, want.ResourceVersion)
				}
			}
			name := fmt.Sprintf("round-%d", round)
			created := create(t, store, name)
			bound, err := bind(t.Context(), store, name, "node-1")
			if err != nil {
				t.Fatal(err)
			}
			wantEvent(t, w, watch.Added, created)
			wantEvent(t, w, watch.Modified, bound)
			waitFor(t, "watch cache to be filled again", cached.ReadinessCheck)
			if got := list(t, cached, nil); len(got.Items) != len(before.Items)+1 {
				t.Fatalf("round %d: cached list holds %v", round, names(got))
			}
		}
		if removed := remove(t, store, "first"); removed.Name != "first" {
			t.Fatalf("removed %q; want the Pod created before all restarts", removed.Name)
		}
	})
}

// Writes go on while the member goes away and comes back. What was acknowledged is there afterwards, and the watch has every
// Pod exactly once and in order.
func TestRestartUnderWrites(t *testing.T) {
	t.Parallel()
	const writers, afterwards = 4, 20
	eachEnd(t, func(t *testing.T, end func(*testing.T, *member.Member)) {
		m := startMember(t)
		config := newConfig(m)
		store := newStore(t, config)
		w := watchPods(t, store, create(t, store, "first").ResourceVersion, nil)

		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		acknowledged := make(chan *corev1.Pod) // while the test wants more
		var wg sync.WaitGroup
		for i := range writers {
			own := newStore(t, config)
			wg.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					name, out := fmt.Sprintf("writer-%d-%05d", i, n), &corev1.Pod{}
					// An error leaves open if the Pod is there: the next one has another name.
					if own.Create(ctx, podKey(name), pod(name), out, 0) != nil {
						continue
					}
					select {
					case acknowledged <- out:
					case <-ctx.Done():
					}
				}
			})
		}
		stored := map[string]string{} // revision by name
		take := func(n int) {
			t.Helper()
			for range n {
				select {
				case p := <-acknowledged:
					stored[p.Name] = p.ResourceVersion
				case <-ctx.Done():
					t.Fatalf("%d writes acknowledged; no more came", len(stored))
				}
			}
		}
		for range 3 {
			take(afterwards)
			end(t, m)
			if err := m.Restart(); err != nil {
				t.Fatal(err)
			}
		}
		take(afterwards)
		cancel()
		wg.Wait()

		all := list(t, store, nil)
		found := map[string]string{}
		for _, p := range all.Items {
			found[p.Name] = p.ResourceVersion
		}
		for name, at := range stored {
			if found[name] != at {
				t.Errorf(brokenGuarantee+"%s was acknowledged at revision %s and is now at %q", name, at, found[name])
			}
		}
		seen, before := 0, uint64(0)
		for seen < len(all.Items)-1 { // all but the first
			e := next(t, w)
			p := podOf(e)
			if p == nil || e.Type != watch.Added {
				t.Fatalf("event %s %+v after %d; want a Pod added", e.Type, e.Object, seen)
			}
			at := revision(t, p.ResourceVersion)
			if at <= before || found[p.Name] != p.ResourceVersion {
				t.Fatalf(brokenGuarantee+"event of %s at revision %d after one at %d; it is stored at %q", p.Name, at, before, found[p.Name])
			}
			seen, before = seen+1, at
		}
		t.Logf("%d acknowledged, %d stored, %d seen", len(stored), len(all.Items)-1, seen)
	})
}

func TestHealthAndSizeAsTheAPIServerAsksThem(t *testing.T) {
	t.Parallel()
	m := startMember(t)
	config := newConfig(m)
	healthy := newHealthCheck(t, config.Config)
	waitFor(t, "health", healthy)
	monitor, err := factory.CreateMonitor(config.Config)
	if err != nil {
		t.Fatal(err)
	}
	defer monitor.Close()
	create(t, newStore(t, config), "a")
	size, err := monitor.Monitor(t.Context())
	if err != nil || size.Size <= 0 {
		t.Fatalf("database size %d, %v; want a positive one", size.Size, err)
	}
	if err := m.Stop(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "health to be lost", func() error {
		if healthy() == nil {
			return errNotYet
		}
		return nil
	})
	if err := m.Restart(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "health to come back", healthy)
}

// newHealthCheck returns the check behind /healthz and /readyz of an API server.
func newHealthCheck(t *testing.T, config storagebackend.Config) func() error {
	t.Helper()
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop) })
	check, err := factory.CreateHealthCheck(config, stop)
	if err != nil {
		t.Fatal(err)
	}
	return check
}
