package kube

import (
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/utils/ptr"
)

func TestPodFromCreateToDelete(t *testing.T) {
	store := newStore(t, newConfig(startMember(t)))

	created := create(t, store, "web-1")
	if err := store.Create(t.Context(), podKey("web-1"), pod("web-1"), nil, 0); !storage.IsExist(err) {
		t.Fatalf("create again: %v; want an error that the key exists", err)
	}
	if got := get(t, store, "web-1"); got.ResourceVersion != created.ResourceVersion || got.Spec.Containers[0].Image != "registry.example/app:1" {
		t.Fatalf("get: %+v; want it as created at revision %s", got, created.ResourceVersion)
	}
	if err := store.Get(t.Context(), podKey("web-2"), storage.GetOptions{}, &corev1.Pod{}); !storage.IsNotFound(err) {
		t.Fatalf("get of a Pod never created: %v; want not found", err)
	}

	bound, err := bind(t.Context(), store, "web-1", "node-1")
	if err != nil {
		t.Fatal(err)
	}
	if revision(t, bound.ResourceVersion) <= revision(t, created.ResourceVersion) {
		t.Fatalf("bound at revision %s, created at %s: want a later one", bound.ResourceVersion, created.ResourceVersion)
	}
	again, err := bind(t.Context(), store, "web-1", "node-1")
	if err != nil {
		t.Fatal(err)
	}
	if again.ResourceVersion != bound.ResourceVersion {
		t.Fatalf("an update that changes nothing moved the Pod from revision %s to %s", bound.ResourceVersion, again.ResourceVersion)
	}

	drop := func(want *storage.Preconditions) (*corev1.Pod, error) {
		out := &corev1.Pod{}
		return out, store.Delete(t.Context(), podKey("web-1"), out, want, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
	}
	for name, want := range map[string]*storage.Preconditions{
		"of another UID":        storage.NewUIDPreconditions("uid-of-another"),
		"at an older revision":  {ResourceVersion: ptr.To(created.ResourceVersion)},
		"at a later revision":   {ResourceVersion: ptr.To("1000000")},
		"of right UID, old rev": {UID: ptr.To(created.UID), ResourceVersion: ptr.To(created.ResourceVersion)},
	} {
		if _, err := drop(want); !storage.IsInvalidObj(err) {
			t.Fatalf("delete of the Pod %s: %v; want a failed precondition", name, err)
		}
	}
	gone, err := drop(&storage.Preconditions{UID: ptr.To(types.UID("uid-web-1")), ResourceVersion: ptr.To(bound.ResourceVersion)})
	if err != nil {
		t.Fatal(err)
	}
	if gone.Spec.NodeName != "node-1" || revision(t, gone.ResourceVersion) <= revision(t, bound.ResourceVersion) {
		t.Fatalf("delete answers %+v; want the Pod on node-1, at the revision of the delete", gone)
	}
	if _, err := drop(nil); !storage.IsNotFound(err) {
		t.Fatalf("delete again: %v; want not found", err)
	}
}

func TestUpdateLosesRaceAndTriesAgain(t *testing.T) {
	config := newConfig(startMember(t))
	one, two := newStore(t, config), newStore(t, config) // two API servers
	create(t, one, "web-1")

	tries := 0
	var seen []string
	out := &corev1.Pod{}
	err := one.GuaranteedUpdate(t.Context(), podKey("web-1"), out, false, nil, storage.SimpleUpdate(
		func(obj runtime.Object) (runtime.Object, error) {
			p := obj.(*corev1.Pod)
			tries++
			seen = append(seen, p.Spec.NodeName)
			if tries == 1 { // between our read and our write
				if _, err := bind(t.Context(), two, "web-1", "node-2"); err != nil {
					return nil, err
				}
			}
			p.Status.Phase = corev1.PodRunning
			return p, nil
		}), nil)
	if err != nil {
		t.Fatal(err)
	}
	if tries != 2 || seen[0] != "" || seen[1] != "node-2" {
		t.Fatalf("%d tries, which saw nodes %q; want 2, the second of which sees what the other wrote", tries, seen)
	}
	if got := get(t, two, "web-1"); got.Spec.NodeName != "node-2" || got.Status.Phase != corev1.PodRunning {
		t.Fatalf("got node %q, phase %s; want both updates", got.Spec.NodeName, got.Status.Phase)
	}

	err = one.GuaranteedUpdate(t.Context(), podKey("web-1"), out, false, storage.NewUIDPreconditions("uid-of-another"),
		storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) { return obj, nil }), nil)
	if !storage.IsInvalidObj(err) {
		t.Fatalf("update of another UID: %v; want a failed precondition", err)
	}
}

func TestManyUpdatersOfOnePod(t *testing.T) {
	const (
		servers = 4
		updates = 25 // of each
		counter = "example.com/count"
	)
	config := newConfig(startMember(t))
	stores := make([]storage.Interface, servers)
	for i := range stores {
		stores[i] = newStore(t, config)
	}
	create(t, stores[0], "web-1")

	var tries atomic.Int64
	var wg sync.WaitGroup
	for _, store := range stores {
		wg.Go(func() {
			for range updates {
				err := store.GuaranteedUpdate(t.Context(), podKey("web-1"), &corev1.Pod{}, false, nil, storage.SimpleUpdate(
					func(obj runtime.Object) (runtime.Object, error) {
						tries.Add(1)
						p := obj.(*corev1.Pod)
						n, _ := strconv.Atoi(p.Annotations[counter]) // absent is 0
						p.Annotations = map[string]string{counter: strconv.Itoa(n + 1)}
						return p, nil
					}), nil)
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if got := get(t, stores[0], "web-1").Annotations[counter]; got != strconv.Itoa(servers*updates) {
		t.Fatalf(brokenGuarantee+"count is %s after %d updates of %d servers in %d tries: updates were lost or made twice", got, updates, servers, tries.Load())
	}
	t.Logf("%d updates took %d tries", servers*updates, tries.Load())
}
