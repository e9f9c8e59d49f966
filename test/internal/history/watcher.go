package history

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/broken"
)

const (
	askProgress = 300 * time.Millisecond
	watchAgain  = 50 * time.Millisecond
)

// watcher follows all keys from the first revision on, and checks what watchers are promised:
//
//	W1: no event twice, and none out of order.
//	W2: every event, since every revision has one.
//	W3: a progress notice for revision r follows every event up to r.
type watcher struct {
	name string

	mu      sync.Mutex
	events  []*mvccpb.Event
	live    map[string]*mvccpb.KeyValue
	notices int
	resumed int
	failure error
	wake    chan struct{} // closed and replaced at each message
}

func newWatcher(name string) *watcher {
	return &watcher{name: name, live: map[string]*mvccpb.KeyValue{}, wake: make(chan struct{})}
}

// follow watches through a client until ctx ends, and again from where it was when the stream breaks.
func (w *watcher) follow(ctx context.Context, client *clientv3.Client) {
	for ctx.Err() == nil {
		w.once(ctx, client)
		select {
		case <-ctx.Done():
		case <-time.After(watchAgain):
		}
	}
}

func (w *watcher) once(ctx context.Context, client *clientv3.Client) {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	events := client.Watch(ctx, "", clientv3.WithPrefix(), clientv3.WithRev(w.seen()+1), clientv3.WithProgressNotify(), clientv3.WithFragment())
	ask := time.NewTicker(askProgress)
	defer ask.Stop()
	w.mu.Lock()
	w.resumed++
	w.mu.Unlock()
	for {
		select {
		case r, ok := <-events:
			if !ok {
				return
			}
			if r.CompactRevision != 0 {
				w.fail(broken.Errorf("watcher %s at revision %d: compacted at %d", w.name, w.seen(), r.CompactRevision))
				return
			}
			if r.Err() != nil {
				return
			}
			if err := w.observe(r); err != nil {
				w.fail(fmt.Errorf("watcher %s: %w", w.name, err))
				return
			}
		case <-ask.C:
			_ = client.RequestProgress(ctx) // a broken stream shows by itself
		}
	}
}

func (w *watcher) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failure == nil {
		w.failure = err
	}
}

func (w *watcher) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failure
}

// seen is the revision of the last event.
func (w *watcher) seen() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seenLocked()
}

func (w *watcher) seenLocked() int64 {
	if len(w.events) == 0 {
		return 1
	}
	return w.events[len(w.events)-1].Kv.ModRevision
}

// observe adds one message. The client library puts fragments together, so a revision comes whole.
func (w *watcher) observe(r clientv3.WatchResponse) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.seenLocked()
	if r.IsProgressNotify() {
		if w.notices++; r.Header.Revision > before {
			return broken.Errorf("progress notice for revision %d after events up to %d", r.Header.Revision, before)
		}
	}
	for _, e := range r.Events {
		revision, last := e.Kv.ModRevision, w.seenLocked()
		switch {
		case revision <= before:
			return broken.Errorf("event of %q at revision %d after revision %d was seen", e.Kv.Key, revision, before)
		case revision != last && revision != last+1:
			return broken.Errorf("event of %q at revision %d follows revision %d: events between are missing", e.Kv.Key, revision, last)
		}
		if err := w.fits(e); err != nil {
			return err
		}
		w.events = append(w.events, e)
		if e.Type == mvccpb.DELETE {
			delete(w.live, string(e.Kv.Key))
		} else {
			w.live[string(e.Kv.Key)] = e.Kv
		}
	}
	if len(r.Events) > 0 && r.Header.Revision < w.seenLocked() {
		return broken.Errorf("header revision %d with events up to %d", r.Header.Revision, w.seenLocked())
	}
	close(w.wake)
	w.wake = make(chan struct{})
	return nil
}

// fits checks an event against what was live before it.
func (w *watcher) fits(e *mvccpb.Event) error {
	prev, kv := w.live[string(e.Kv.Key)], e.Kv
	switch {
	case e.Type == mvccpb.DELETE && prev == nil:
		return broken.Errorf("delete of %q at revision %d, which was not there", kv.Key, kv.ModRevision)
	case e.Type == mvccpb.DELETE:
	case prev == nil && (kv.CreateRevision != kv.ModRevision || kv.Version != 1):
		return broken.Errorf("new key %v", kv)
	case prev != nil && (kv.CreateRevision != prev.CreateRevision || kv.Version != prev.Version+1):
		return broken.Errorf("%v follows %v", kv, prev)
	}
	return nil
}

// reach waits until a revision was seen.
func (w *watcher) reach(ctx context.Context, revision int64) error {
	for {
		w.mu.Lock()
		seen, failure, wake := w.seenLocked(), w.failure, w.wake
		w.mu.Unlock()
		if failure != nil || seen >= revision {
			return failure
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("watcher %s has seen revision %d of %d", w.name, seen, revision), ctx.Err(), w.failed())
		}
	}
}

// all is every event so far.
func (w *watcher) all() []*mvccpb.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.events)
}
