package kube

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/utils/ptr"
)

// A list from the watch cache must hold what any API server wrote before. The cache asks the member for the revision that a
// list must reach, and for progress of its watch until it has reached it.
func TestCachedListSeesWritesOfOthers(t *testing.T) {
	config := newConfig(startMember(t))
	cached, other := newCachedStore(t, config), newStore(t, config)
	var want []string
	for i := range 30 {
		p := create(t, other, fmt.Sprintf("pod-%04d", i))
		want = append(want, p.Name)
		got := list(t, cached, nil)
		if !slices.Equal(names(got), want) || revision(t, got.ResourceVersion) < revision(t, p.ResourceVersion) {
			t.Fatalf("list after write %d: %v at revision %s; want %v at %s or later", i, names(got), got.ResourceVersion, want, p.ResourceVersion)
		}
	}
	page := list(t, cached, func(o *storage.ListOptions) { o.Predicate.Limit = 20 })
	remove(t, other, page.Items[0].Name)
	rest := list(t, cached, func(o *storage.ListOptions) { o.Predicate.Limit, o.Predicate.Continue = 20, page.Continue })
	if got := append(names(page), names(rest)...); !slices.Equal(got, want) || rest.ResourceVersion != page.ResourceVersion {
		t.Fatalf("two pages hold %v, at revisions %s and %s; want %v at one", got, page.ResourceVersion, rest.ResourceVersion, want)
	}
}

// This is how informers start since 1.32: one watch that begins with everything, marks the end of that, and goes on.
func TestWatchListThroughCache(t *testing.T) {
	config := newConfig(startMember(t))
	made := createMany(t, newStore(t, config), 100, 100)
	cached := newCachedStore(t, config)

	w := watchPods(t, cached, "", func(o *storage.ListOptions) {
		o.SendInitialEvents = ptr.To(true)
		o.Predicate.AllowWatchBookmarks = true
		o.ResourceVersionMatch = metav1.ResourceVersionMatchNotOlderThan
	})
	var got []string
	for range made {
		e := next(t, w)
		if e.Type != watch.Added {
			t.Fatalf("event %s %+v after %d Pods; want one added", e.Type, e.Object, len(got))
		}
		got = append(got, podOf(e).Name)
	}
	slices.Sort(got)
	if !slices.Equal(got, made) {
		t.Fatalf("initial events hold %v; want the Pods created", got)
	}
	e := next(t, w)
	if mark := podOf(e); mark == nil || e.Type != watch.Bookmark || mark.Annotations[metav1.InitialEventsAnnotationKey] != "true" {
		t.Fatalf("event %s %+v; want the bookmark that ends the initial events", e.Type, e.Object)
	}
	wantEvent(t, w, watch.Added, create(t, cached, "new"))
	wantEvent(t, w, watch.Deleted, remove(t, cached, "new"))
}

func TestManyWatchersThroughCache(t *testing.T) {
	const watchers, updates = 60, 20
	config := newConfig(startMember(t))
	cached, other := newCachedStore(t, config), newStore(t, config)
	start := create(t, other, "a")

	all := make([]watch.Interface, watchers)
	for i := range all {
		all[i] = watchPods(t, cached, start.ResourceVersion, nil)
	}
	var want []*corev1.Pod
	for i := range updates {
		p, err := bind(t.Context(), other, "a", fmt.Sprintf("node-%d", i))
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, p)
	}
	var wg sync.WaitGroup
	for i, w := range all {
		wg.Go(func() {
			for n, p := range want {
				e, open := <-w.ResultChan()
				if !open {
					t.Errorf("watcher %d ended after %d events", i, n)
					return
				}
				got := podOf(e)
				if got == nil || e.Type != watch.Modified || got.ResourceVersion != p.ResourceVersion {
					t.Errorf("watcher %d, event %d: %s %+v; want revision %s", i, n, e.Type, e.Object, p.ResourceVersion)
					return
				}
			}
		})
	}
	wg.Wait()
}
