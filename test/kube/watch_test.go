package kube

import (
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"

	"github.com/engram-kv/engram/test/kube/member"
)

func TestWatchFromRevision(t *testing.T) {
	store := newStore(t, newConfig(startMember(t)))
	a := create(t, store, "a")
	b := create(t, store, "b")
	bound, err := bind(t.Context(), store, "b", "node-1")
	if err != nil {
		t.Fatal(err)
	}
	aGone := remove(t, store, "a")

	// What happened before the watch comes first, then what happens after; a delete shows the Pod as it last was.
	w := watchPods(t, store, a.ResourceVersion, nil)
	wantEvent(t, w, watch.Added, b)
	wantEvent(t, w, watch.Modified, bound)
	wantEvent(t, w, watch.Deleted, aGone)
	wantEvent(t, w, watch.Added, create(t, store, "c"))
	bGone := remove(t, store, "b")
	wantEvent(t, w, watch.Deleted, bGone)
	if bGone.Spec.NodeName != "node-1" {
		t.Fatalf("b was deleted on node %q; want node-1", bGone.Spec.NodeName)
	}

	// From revision 0, a watch begins with what there is now.
	now := watchPods(t, store, "0", nil)
	wantEvent(t, now, watch.Added, get(t, store, "c"))
	wantEvent(t, now, watch.Added, create(t, store, "d"))
}

// A write may come before, while or after the member begins a watch that is to show it: it must come to the watch each time.
func TestWatchBegunBesideWrite(t *testing.T) {
	const rounds = 300
	store := newStore(t, newConfig(startMember(t, "--unsafe-no-fsync")))
	last := create(t, store, "first")
	var slowest time.Duration
	for i := range rounds {
		name, out := fmt.Sprintf("pod-%04d", i), &corev1.Pod{}
		created := make(chan error, 1)
		go func() { created <- store.Create(t.Context(), podKey(name), pod(name), out, 0) }()
		w := watchPods(t, store, last.ResourceVersion, nil)
		if err := <-created; err != nil {
			t.Fatal(err)
		}
		since := time.Now()
		wantEvent(t, w, watch.Added, out)
		slowest = max(slowest, time.Since(since))
		w.Stop()
		last = out
	}
	t.Logf("slowest event %v after its write was acknowledged", slowest)
}

// A watch of the Pods on one node must learn of those that leave it: the store finds them by the value before.
func TestWatchOfOneNode(t *testing.T) {
	store := newStore(t, newConfig(startMember(t)))
	start := create(t, store, "a")
	w := watchPods(t, store, start.ResourceVersion, func(o *storage.ListOptions) {
		o.Predicate.Field = fields.OneTermEqualSelector("spec.nodeName", "node-1")
	})
	move := func(node string) *corev1.Pod {
		t.Helper()
		p, err := bind(t.Context(), store, "a", node)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	wantEvent(t, w, watch.Added, move("node-1"))
	left := move("node-2")
	left.Spec.NodeName = "node-1" // as it was when it left
	wantEvent(t, w, watch.Deleted, left)
	wantEvent(t, w, watch.Added, move("node-1"))
	wantEvent(t, w, watch.Deleted, remove(t, store, "a"))
}

func TestWatchProgress(t *testing.T) {
	progress := func(o *storage.ListOptions) { o.ProgressNotify = true }

	t.Run("requested", func(t *testing.T) {
		m := startMember(t)
		store := newStore(t, newConfig(m))
		w := watchPods(t, store, create(t, store, "a").ResourceVersion, progress)
		elsewhere := putElsewhere(t, m)
		// A request may come before the watch has caught up; the watch cache repeats it as well.
		waitFor(t, "bookmark", func() error {
			if err := store.RequestWatchProgress(t.Context()); err != nil {
				return err
			}
			select {
			case e := <-w.ResultChan():
				wantBookmark(t, e, elsewhere)
				return nil
			default:
				return errNotYet
			}
		})
		wantEventAfterBookmarks(t, w, create(t, store, "b"))
	})

	t.Run("by the clock", func(t *testing.T) {
		m := startMember(t, "--watch-progress-notify-interval=200ms")
		store := newStore(t, newConfig(m))
		w := watchPods(t, store, create(t, store, "a").ResourceVersion, progress)
		elsewhere := putElsewhere(t, m)
		for {
			e := next(t, w)
			if e.Type == watch.Bookmark && revision(t, podOf(e).ResourceVersion) < elsewhere {
				continue // from before the write
			}
			wantBookmark(t, e, elsewhere)
			break
		}
		wantEventAfterBookmarks(t, w, create(t, store, "b"))
	})
}

// putElsewhere writes a key that no watch of Pods sees, and returns its revision.
func putElsewhere(t *testing.T, m *member.Member) uint64 {
	t.Helper()
	put, err := newClient(t, m).Put(t.Context(), "/registry/leases/a", "x")
	if err != nil {
		t.Fatal(err)
	}
	return uint64(put.Header.Revision)
}

// newClient connects etcd's plain client.
func newClient(t *testing.T, m *member.Member) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{m.ClientURL()}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func wantBookmark(t *testing.T, e watch.Event, atLeast uint64) {
	t.Helper()
	p := podOf(e)
	if p == nil || e.Type != watch.Bookmark || revision(t, p.ResourceVersion) < atLeast {
		t.Fatalf("event %s %+v; want a bookmark of revision %d or later", e.Type, e.Object, atLeast)
	}
}

// wantEventAfterBookmarks fails unless the next event that is no bookmark adds the Pod, and no bookmark before it claims to
// have passed it.
func wantEventAfterBookmarks(t *testing.T, w watch.Interface, p *corev1.Pod) {
	t.Helper()
	for {
		e := next(t, w)
		got := podOf(e)
		if e.Type == watch.Bookmark {
			if revision(t, got.ResourceVersion) >= revision(t, p.ResourceVersion) {
				t.Fatalf(brokenGuarantee+"bookmark of revision %s before the event of %s", got.ResourceVersion, p.ResourceVersion)
			}
			continue
		}
		if e.Type != watch.Added || got.Name != p.Name {
			t.Fatalf("event %s %s; want %s added", e.Type, got.Name, p.Name)
		}
		return
	}
}
