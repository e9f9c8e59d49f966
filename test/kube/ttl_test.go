package kube

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// Kubernetes' Events live on leases; the lease manager puts objects that expire at about one time on one lease.
func TestPodsExpireWithTheirLease(t *testing.T) {
	t.Parallel()       // it waits most of the time
	const seconds = 20 // the shortest that the lease manager shares: a twentieth of it is a whole second
	m := startMember(t)
	config := newConfig(m)
	config.LeaseManagerConfig.ReuseDurationSeconds = 1
	store := newStore(t, config)
	stays := create(t, store, "stays")
	w := watchPods(t, store, stays.ResourceVersion, nil)

	for _, name := range []string{"a", "b"} {
		out := &corev1.Pod{}
		if err := store.Create(t.Context(), podKey(name), pod(name), out, seconds); err != nil {
			t.Fatal(err)
		}
		wantEvent(t, w, watch.Added, out)
	}
	client := newClient(t, m)
	leases, err := client.Leases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(leases.Leases) != 1 {
		t.Fatalf("%d leases for two Pods created together; want them to share one", len(leases.Leases))
	}

	// One lease expires in one transaction, so both deletes have one revision.
	deleted := map[string]string{}
	for range 2 {
		e := next(t, w)
		p := podOf(e)
		if p == nil || e.Type != watch.Deleted || p.Spec.RestartPolicy != corev1.RestartPolicyAlways {
			t.Fatalf("event %s %+v; want a Pod that expired, as it last was", e.Type, e.Object)
		}
		deleted[p.Name] = p.ResourceVersion
	}
	if len(deleted) != 2 || deleted["a"] != deleted["b"] {
		t.Fatalf("expired, by name and revision: %v; want a and b at one revision", deleted)
	}
	if err := store.Get(t.Context(), podKey("a"), storage.GetOptions{}, &corev1.Pod{}); !storage.IsNotFound(err) {
		t.Fatalf("get of an expired Pod: %v; want not found", err)
	}
	if leases, err = client.Leases(t.Context()); err != nil || len(leases.Leases) != 0 {
		t.Fatalf("leases after expiry: %v, %v; want none", leases, err)
	}
	if got := get(t, store, "stays"); got.ResourceVersion != stays.ResourceVersion {
		t.Fatalf("the Pod without a lease moved to revision %s", got.ResourceVersion)
	}
}
