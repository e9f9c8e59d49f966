package watch

import (
	"bytes"
	"container/heap"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Errors of a stream's methods.
var (
	// ErrClosed says that the stream was closed.
	ErrClosed = errors.New("watch stream is closed")
	// ErrCongested says that a client asks on and on without reading answers.
	ErrCongested = errors.New("watch stream has too many unread answers")
)

// What a created-and-canceled response gives as reason, where etcd has a text.
const (
	reasonEmptyRange = "mvcc: watcher range is empty"
	reasonDuplicate  = "mvcc: duplicate watch ID provided on the WatchStream"
	reasonCompacted  = "etcdserver: mvcc: required revision has been compacted"
)

// noWatcher is the id in responses that concern no watcher, or all of a stream.
const noWatcher = -1

// maxControls bounds the answers to requests that wait for room in a sink.
const maxControls = 1024

// Sink takes the responses of one stream.
type Sink interface {
	// Send queues the responses in order, all of them or none. It must not
	// block and must not call the stream. It returns false if it has no room,
	// and then calls Stream.Ready once it has. An empty sink must take a
	// response of any size sooner or later, or its watcher never gets past it.
	// The slice rs is the hub's, what is in it may be kept.
	Send(rs []Response) bool
}

// Request describes a watcher to create.
type Request struct {
	// Key and End are the range: an empty key means the lowest one, an empty
	// End just Key, an End of one zero byte all from Key on.
	Key, End []byte
	// Start is the revision to begin at, 0 for the next one.
	Start int64
	// ID names the watcher in its stream; with 0 the stream chooses.
	ID int64
	// ProgressNotify asks for progress notices, PrevKV for previous values,
	// Fragment allows to split large responses.
	ProgressNotify, PrevKV, Fragment bool
	NoPut, NoDelete                  bool
}

// Stream is the watchers of one client stream. Safe for concurrent use.
type Stream struct {
	hub  *Hub
	sink Sink

	// The hub's lock covers all below.
	closed   bool
	watchers map[int64]*watcher
	order    []*watcher // the same, each at its own place
	nextID   int64
	// stalled is set from a refused Send to the next Ready. Nothing is sent meanwhile.
	stalled  bool
	controls []Response // wait for room, oldest first
	parked   int        // watchers that do

	asking bool  // is in Hub.asking
	wanted int64 // the least revision that the answer may tell

	tick    time.Time // the next progress notices
	tickAt  int       // in Hub.ticks
	inTicks bool
	one     [1]Response // what sendOne passes on
}

// NewStream returns a stream that sends to sink.
func (h *Hub) NewStream(sink Sink) *Stream {
	s := &Stream{hub: h, sink: sink, watchers: map[int64]*watcher{}}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.streams[s] = struct{}{}
	h.opts.Metrics.Streams.Inc()
	return s
}

// Create adds a watcher. The client is told of it, or why there is none, before
// any event. Key and End are copied. Errors are ErrClosed and ErrCongested.
func (s *Stream) Create(r Request) error {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	// Read under the lock: whoever saw a revision finds a created response
	// that is not below it, although its events may yet have to be published.
	revision, compacted := h.source.Revision()
	span, ok := newSpan(bytes.Clone(r.Key), bytes.Clone(r.End))
	switch {
	case !ok:
		return s.refuse(revision, reasonEmptyRange)
	case r.Start < 0:
		return s.refuse(revision, reasonCompacted)
	case r.ID != 0 && s.watchers[r.ID] != nil:
		return s.refuse(revision, reasonDuplicate)
	case h.count >= h.opts.MaxWatchers:
		return s.refuse(revision, fmt.Sprintf("engram: this member has %d watchers, which is its limit; cancel some or use another member", h.count))
	}
	id := r.ID
	if id == 0 {
		for s.watchers[s.nextID] != nil {
			s.nextID++
		}
		id = s.nextID
		s.nextID++
	}
	w := &watcher{
		id: id, stream: s, span: span, order: len(s.order), quiet: true,
		filter:   filter{prevKV: r.PrevKV, noPut: r.NoPut, noDelete: r.NoDelete},
		fragment: r.Fragment, progress: r.ProgressNotify,
		next: r.Start,
	}
	if w.next == 0 {
		w.next = revision + 1
	}
	if err := s.control(control{revision: revision, watchID: id, created: true}); err != nil {
		return err
	}
	s.watchers[id] = w
	s.order = append(s.order, w)
	h.count++
	h.opts.Metrics.Watchers.Inc()
	// A start that is compacted is refused even if its events still wait to be
	// delivered: what a client gets must not hang on how busy we are.
	if w.next > h.claimed && w.next >= compacted {
		h.live.add(w)
	} else {
		h.behind.add(w)
		wake(h.catchUpWake)
	}
	if w.progress && !s.inTicks {
		s.tick = h.nextTick(h.opts.Clock.Now())
		heap.Push(&h.ticks, s)
		wake(h.deliverWake)
	}
	return nil
}

// Refuse tells the client that a watcher is not created, for the given reason.
func (s *Stream) Refuse(reason string) error {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	revision, _ := h.source.Revision()
	return s.refuse(revision, reason)
}

func (s *Stream) refuse(revision int64, reason string) error {
	return s.control(control{revision: revision, watchID: noWatcher, created: true, canceled: true, reason: reason})
}

// Cancel removes a watcher and tells the client. An unknown id is ignored.
func (s *Stream) Cancel(id int64) error {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	w := s.watchers[id]
	if w == nil {
		return nil
	}
	revision, _ := h.source.Revision()
	if err := s.control(control{revision: revision, watchID: id, canceled: true}); err != nil {
		return err
	}
	h.forget(w)
	h.opts.Metrics.Watchers.Dec()
	return nil
}

// Progress asks for one notice that concerns all watchers there are now, if
// any. It is given if by the time that all events up to the present revision
// have been delivered, all watchers are live and none starts in the future;
// otherwise nothing is sent.
func (s *Stream) Progress() error {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	if len(s.watchers) == 0 {
		return nil
	}
	s.wanted, _ = h.source.Revision()
	if !s.asking {
		s.asking = true
		h.asking = append(h.asking, s)
	}
	wake(h.deliverWake)
	return nil
}

// Ready says that a sink that refused a Send has room again.
func (s *Stream) Ready() {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed || !s.stalled {
		return
	}
	s.stalled = false
	for len(s.controls) > 0 {
		if !s.sendOne(s.controls[0]) {
			return
		}
		s.controls = slices.Delete(s.controls, 0, 1)
	}
	h.unpark(s)
	if s.asking {
		wake(h.deliverWake)
	}
}

// Close removes all watchers. Nothing is sent after it returned.
func (s *Stream) Close() {
	h := s.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	h.opts.Metrics.Watchers.Sub(float64(len(s.order)))
	h.opts.Metrics.Streams.Dec()
	for len(s.order) > 0 {
		h.forget(s.order[len(s.order)-1])
	}
	s.controls = nil
	delete(h.streams, s)
	if s.inTicks {
		heap.Remove(&h.ticks, s.tickAt)
	}
	if s.asking {
		h.asking = slices.DeleteFunc(h.asking, func(o *Stream) bool { return o == s })
	}
}

// send passes responses to the sink unless earlier ones wait for room in it.
func (s *Stream) send(rs []Response) bool {
	if s.closed || s.stalled {
		return false
	}
	if !s.sink.Send(rs) {
		s.stalled = true
		return false
	}
	return true
}

func (s *Stream) sendOne(r Response) bool {
	s.one[0] = r
	ok := s.send(s.one[:])
	s.one[0] = Response{}
	return ok
}

// control sends an answer to a request, or keeps it till there is room.
func (s *Stream) control(c control) error {
	r := s.hub.encodeControl(c)
	if s.sendOne(r) {
		return nil
	}
	if len(s.controls) >= maxControls {
		return fmt.Errorf("%w: %d", ErrCongested, len(s.controls))
	}
	s.controls = append(s.controls, r)
	return nil
}

// nextTick returns when the progress notices after now are due.
func (h *Hub) nextTick(now time.Time) time.Time {
	jitter := h.opts.Rand.Int64N(int64(h.opts.ProgressInterval)/10 + 1)
	return now.Add(h.opts.ProgressInterval + time.Duration(jitter))
}

// tickHeap orders streams by their next tick.
type tickHeap []*Stream

func (t tickHeap) Len() int           { return len(t) }
func (t tickHeap) Less(i, j int) bool { return t[i].tick.Before(t[j].tick) }
func (t tickHeap) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].tickAt, t[j].tickAt = i, j
}
func (t *tickHeap) Push(x any) {
	s := x.(*Stream)
	s.tickAt, s.inTicks = len(*t), true
	*t = append(*t, s)
}
func (t *tickHeap) Pop() any {
	old := *t
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*t = old[:len(old)-1]
	s.inTicks = false
	return s
}
