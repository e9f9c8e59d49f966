package kube

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// The API server's compactor runs by the clock. What is older than two of its rounds is gone, and everybody who asks for it
// is told so in a way that makes clients list again.
func TestCompactorExpiresOldRevisions(t *testing.T) {
	t.Parallel() // it waits for the clock
	m := startMember(t)
	config := newConfig(m)
	config.CompactionInterval = 2 * time.Second // a watch begins within two of them after the list that it goes on from
	store := newStore(t, config)

	made := createMany(t, store, 5, 10)
	old := get(t, store, made[0]).ResourceVersion
	page := list(t, store, func(o *storage.ListOptions) { o.Predicate.Limit = 2 })
	if page.Continue == "" {
		t.Fatal("first of three pages has no continue token")
	}
	moved, err := bind(t.Context(), store, made[4], "node-1")
	if err != nil {
		t.Fatal(err)
	}

	at := func(change func(*storage.ListOptions)) error {
		opts := storage.ListOptions{Recursive: true, Predicate: everything()}
		change(&opts)
		return store.GetList(t.Context(), podsPrefix, opts, &corev1.PodList{})
	}
	exact := func(o *storage.ListOptions) {
		o.ResourceVersion, o.ResourceVersionMatch = moved.ResourceVersion, metav1.ResourceVersionMatchExact
	}
	waitFor(t, "compaction beyond the update", func() error {
		// The compactor itself writes a key, so revisions pass without us.
		if store.CompactRevision() <= int64(revision(t, moved.ResourceVersion)) {
			return errNotYet
		}
		return nil
	})
	// The store knows the revision before the compactor has asked the member for it.
	waitFor(t, "a list at a compacted revision to be refused as expired", func() error {
		if err := at(exact); !apierrors.IsResourceExpired(err) {
			return errNotYet
		}
		return nil
	})
	err = at(func(o *storage.ListOptions) { o.Predicate.Limit, o.Predicate.Continue = 2, page.Continue })
	if !apierrors.IsResourceExpired(err) {
		t.Fatalf("continue at a compacted revision: %v; want expired", err)
	}
	// The error carries a token with which the client may go on at the latest revision.
	status, ok := err.(apierrors.APIStatus)
	if !ok || status.Status().Continue == "" {
		t.Fatalf("error %#v carries no continue token", err)
	}
	rest := list(t, store, func(o *storage.ListOptions) { o.Predicate.Continue = status.Status().Continue })
	if got := strings.Join(names(rest), " "); got != strings.Join(made[2:], " ") || rest.Items[2].Spec.NodeName != "node-1" {
		t.Errorf("went on with %s; want %v as they are now", got, made[2:])
	}

	// A watch from there gets one error, 410 Gone, and ends.
	w := watchPods(t, store, old, nil)
	e := next(t, w)
	gone, ok := e.Object.(*metav1.Status)
	if !ok || e.Type != watch.Error || gone.Code != 410 || gone.Reason != metav1.StatusReasonExpired {
		t.Fatalf("event %s %+v; want the error 410 Expired", e.Type, e.Object)
	}
	if e, open := <-w.ResultChan(); open {
		t.Errorf("event %s %+v after the error; want the watch to end", e.Type, e.Object)
	}

	// What is now is as it was.
	if got := list(t, store, nil); len(got.Items) != len(made) || got.Items[4].ResourceVersion != moved.ResourceVersion {
		t.Errorf("%d Pods after compaction, the last at revision %s; want %d, the last at %s", len(got.Items), got.Items[4].ResourceVersion, len(made), moved.ResourceVersion)
	}
	fresh := watchPods(t, store, list(t, store, nil).ResourceVersion, nil)
	wantEvent(t, fresh, watch.Added, create(t, store, "new"))
}
