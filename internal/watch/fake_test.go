package watch

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/mvcc"
)

// fakeStore is the dumbest store that is a Source: a list of events and a map
// of what each key holds.
type fakeStore struct {
	mu        sync.Mutex
	revision  int64
	compacted int64
	events    []mvcc.Event
	keys      map[string]*mvccpb.KeyValue
	values    map[mvcc.Revision][]byte
	// midway, if set, runs in the midst of History and Previous, when the hub
	// has let go of its lock.
	midway func()

	scans, scanned int // calls of History and the events they gave
	lookups        int // events that Previous was asked for
}

func newFakeStore() *fakeStore {
	return &fakeStore{revision: 1, compacted: -1, keys: map[string]*mvccpb.KeyValue{}, values: map[mvcc.Revision][]byte{}}
}

// op is a put, or a delete if value is nil.
type op struct{ key, value []byte }

// apply runs ops as one transaction and returns its events.
func (s *fakeStore) apply(ops ...op) []mvcc.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	main := s.revision + 1
	var events []mvcc.Event
	for _, o := range ops {
		old := s.keys[string(o.key)]
		if o.value == nil && old == nil {
			continue
		}
		ev := mvcc.Event{Rev: mvcc.Revision{Main: main, Sub: int64(len(events))}, Key: o.key, Delete: o.value == nil, Create: old == nil}
		if old != nil {
			ev.Prev = mvcc.Revision{Main: old.ModRevision, Sub: old.Lease}
		}
		kv := &mvccpb.KeyValue{Key: o.key, ModRevision: main}
		if o.value == nil {
			delete(s.keys, string(o.key))
		} else {
			kv.Value, kv.Version, kv.CreateRevision = o.value, 1, main
			if old != nil {
				kv.Version, kv.CreateRevision = old.Version+1, old.CreateRevision
			}
			// The lease remembers sub, so that values are found again.
			kv.Lease = ev.Rev.Sub
			s.keys[string(o.key)] = kv
		}
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(kv)
		if err != nil {
			panic(err)
		}
		ev.KV = raw
		s.values[ev.Rev] = raw
		events = append(events, ev)
	}
	if len(events) > 0 {
		s.revision = main
		s.events = append(s.events, events...)
	}
	return events
}

func (s *fakeStore) compact(rev int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.compacted = rev
}

func (s *fakeStore) Revision() (int64, int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision, s.compacted
}

func (s *fakeStore) History(_ context.Context, from, to int64, maxBytes int, fn func(mvcc.Event)) (int64, error) {
	s.mu.Lock()
	if s.compacted > from {
		defer s.mu.Unlock()
		return 0, fmt.Errorf("history from %d, compacted at %d: %w", from, s.compacted, mvcc.ErrCompacted)
	}
	s.scans++
	var chunk []mvcc.Event
	next, n := to+1, 0
	for _, ev := range s.events[s.search(from):] {
		if ev.Rev.Main > to {
			break
		}
		if n >= maxBytes && ev.Rev.Main != chunk[len(chunk)-1].Rev.Main {
			next = ev.Rev.Main
			break
		}
		chunk = append(chunk, ev)
		n += len(ev.KV)
	}
	s.scanned += len(chunk)
	s.mu.Unlock()
	if s.midway != nil {
		s.midway()
	}
	for _, ev := range chunk {
		fn(ev)
	}
	return next, nil
}

// search returns the place of the first event at or after a revision.
func (s *fakeStore) search(main int64) int {
	lo, hi := 0, len(s.events)
	for lo < hi {
		if mid := (lo + hi) / 2; s.events[mid].Rev.Main < main {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

func (s *fakeStore) Previous(events []mvcc.Event, found func(int, []byte)) error {
	if s.midway != nil {
		s.midway()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, ev := range events {
		s.lookups++
		if ev.Rev.Main-1 >= s.compacted {
			found(i, s.values[ev.Prev])
		}
	}
	return nil
}

// fakeSink is a client that reads when told to.
type fakeSink struct {
	mu      sync.Mutex
	cap     int // responses
	queue   []Response
	refused bool
	arrived chan struct{} // capacity 1
}

func newFakeSink(cap int) *fakeSink { return &fakeSink{cap: cap, arrived: make(chan struct{}, 1)} }

func (s *fakeSink) Send(rs []Response) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) > 0 && len(s.queue)+len(rs) > s.cap {
		s.refused = true
		return false
	}
	s.queue = append(s.queue, rs...)
	wake(s.arrived)
	return true
}

// recv takes up to n responses; ready says that the stream is to be told so.
func (s *fakeSink) recv(n int) (rs []*etcdserverpb.WatchResponse, ready bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n = min(n, len(s.queue))
	for _, r := range s.queue[:n] {
		raw := r.AppendTo(nil)
		if len(raw) != r.Size() {
			panic(fmt.Sprintf("response of %d bytes says %d", len(raw), r.Size()))
		}
		m := new(etcdserverpb.WatchResponse)
		if err := proto.Unmarshal(raw, m); err != nil {
			panic(err)
		}
		if canonical, _ := (proto.MarshalOptions{Deterministic: true}).Marshal(m); !bytes.Equal(canonical, raw) {
			panic(fmt.Sprintf("response %x is not encoded as etcd does: %x", raw, canonical))
		}
		rs = append(rs, m)
	}
	s.queue = s.queue[n:]
	ready = s.refused && (n > 0 || len(s.queue) == 0)
	if ready {
		s.refused = false
	}
	return rs, ready
}

// show prints a response in one line.
func show(r *etcdserverpb.WatchResponse) string {
	var b strings.Builder
	fmt.Fprintf(&b, "id %d at %d:", r.WatchId, r.Header.Revision)
	if r.Created {
		b.WriteString(" created")
	}
	if r.Canceled {
		b.WriteString(" canceled")
	}
	if r.CompactRevision != 0 {
		fmt.Fprintf(&b, " compacted at %d", r.CompactRevision)
	}
	if r.CancelReason != "" {
		fmt.Fprintf(&b, " because %q", r.CancelReason)
	}
	if r.Fragment {
		b.WriteString(" fragment")
	}
	if !r.Created && !r.Canceled && len(r.Events) == 0 {
		b.WriteString(" progress")
	}
	main := int64(0)
	for _, e := range r.Events {
		if e.Kv.ModRevision != main {
			main = e.Kv.ModRevision
			fmt.Fprintf(&b, " [%d]", main)
		}
		b.WriteString(" " + showEvent(e))
	}
	return b.String()
}

func showEvent(e *mvccpb.Event) string {
	s := fmt.Sprintf("%s=%s", e.Kv.Key, abridge(e.Kv.Value))
	if e.Type == mvccpb.Event_DELETE {
		s = fmt.Sprintf("-%s", e.Kv.Key)
		if e.Kv.CreateRevision != 0 || e.Kv.Value != nil {
			s += " with more than a key"
		}
	}
	if e.PrevKv != nil {
		s += fmt.Sprintf("(was %s)", abridge(e.PrevKv.Value))
	}
	return s
}

func abridge(v []byte) string {
	if len(v) > 12 {
		return fmt.Sprintf("%s..%d", v[:4], len(v))
	}
	return string(v)
}
