package random

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/compat/internal/wire"
	"github.com/engram-kv/engram/test/internal/broken"
)

const (
	catchUpWithin = 20 * time.Second
	askAgain      = 50 * time.Millisecond
	maxFuture     = 30 // revisions a watcher starts ahead of the store, at most
)

// watchPair is one watch stream on each server with the same watchers.
type watchPair struct {
	requests []*etcdserverpb.WatchCreateRequest
	streams  [2]*watchStream
}

// lastStart is the highest revision a watcher of the stream starts at. Below it the stream answers no progress request.
func (w *watchPair) lastStart() (start int64) {
	for _, r := range w.requests {
		start = max(start, r.StartRevision)
	}
	return start
}

// watchStream gathers the events of each watcher of one stream.
type watchStream struct {
	stream etcdserverpb.Watch_WatchClient
	cancel context.CancelFunc
	woken  chan struct{} // holds one token when anything came

	mu       sync.Mutex
	events   map[int64][]*mvccpb.Event
	control  []string // answers to create requests, cancellations
	created  int
	canceled int
	progress int64 // revision of the last answer to a progress request
	err      error
}

func openStream(s *process.Side) (*watchStream, error) {
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := etcdserverpb.NewWatchClient(s.Conn()).Watch(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	w := &watchStream{stream: stream, cancel: cancel, woken: make(chan struct{}, 1), events: make(map[int64][]*mvccpb.Event)}
	go w.read(s.Names)
	return w, nil
}

func (w *watchStream) read(names *wire.Names) {
	for {
		m, err := w.stream.Recv()
		w.mu.Lock()
		switch {
		case err != nil:
			w.err = err
		case len(m.Events) > 0:
			if last := m.Events[len(m.Events)-1].Kv.ModRevision; m.Header.GetRevision() < last {
				w.err = broken.Errorf("header revision %d below the event's, %d", m.Header.GetRevision(), last)
			}
			w.events[m.WatchId] = append(w.events[m.WatchId], m.Events...)
		case m.Created || m.Canceled:
			w.control = append(w.control, names.Text(m))
			if m.Created {
				w.created++
			}
			if m.Canceled {
				w.canceled++
			}
		case m.WatchId == -1:
			w.progress = max(w.progress, m.Header.GetRevision())
		}
		w.mu.Unlock()
		select {
		case w.woken <- struct{}{}:
		default:
		}
		if err != nil {
			return
		}
	}
}

// wait calls ask, and again from time to time, until done holds under w.mu.
func (w *watchStream) wait(done func() bool, ask func() error) error {
	deadline := time.Now().Add(catchUpWithin)
	for {
		if err := ask(); err != nil {
			return err
		}
		again := time.After(askAgain)
		for waiting := true; waiting; {
			w.mu.Lock()
			ok, err := done(), w.err
			w.mu.Unlock()
			if ok || err != nil {
				return err
			}
			select {
			case <-w.woken:
			case <-again:
				waiting = false
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("a watch stream did not get there within %v", catchUpWithin)
		}
	}
}

func nothing() error { return nil }

// changeWatches closes a stream now and then, opens one, or opens watchers that the servers must refuse.
func (d *driver) changeWatches() error {
	if len(d.watches) == maxWatches || len(d.watches) > 0 && d.rand.IntN(4) == 0 {
		if err := d.catchUp(); err != nil {
			return err
		}
		i := d.rand.IntN(len(d.watches))
		d.watches[i].close()
		d.watches = slices.Delete(d.watches, i, i+1)
	}
	if d.rand.IntN(4) == 0 {
		return d.refusedWatch()
	}
	var requests []*etcdserverpb.WatchCreateRequest
	for id := range 1 + d.rand.IntN(3) {
		requests = append(requests, d.generator.watch(int64(id)))
	}
	w, err := d.open(requests)
	if err != nil {
		return err
	}
	d.watches = append(d.watches, w)
	err = d.pair.Each(func(i int, s *process.Side) error {
		return w.streams[i].wait(func() bool { return w.streams[i].created == len(requests) }, nothing)
	})
	for _, r := range requests {
		d.coverage.Add("Watch", r, "", d.generator.State)
	}
	if err != nil {
		return err
	}
	return d.compareControl(w)
}

// refusedWatch opens a watcher that cannot be: its history is gone, it starts below zero, or its range holds nothing.
func (d *driver) refusedWatch() error {
	r := d.generator.watch(0)
	switch s := d.generator.State; {
	case d.rand.IntN(3) == 0 || s.Compact < 2:
		r.StartRevision = -1 - d.rand.Int64N(3)
	case d.rand.IntN(3) == 0:
		r.Key, r.RangeEnd = []byte("b"), []byte("a")
	default:
		r.StartRevision = 1 + d.rand.Int64N(s.Compact-1)
	}
	w, err := d.open([]*etcdserverpb.WatchCreateRequest{r})
	if err != nil {
		return err
	}
	defer w.close()
	err = d.pair.Each(func(i int, _ *process.Side) error {
		return w.streams[i].wait(func() bool { return w.streams[i].canceled == 1 }, nothing)
	})
	if err != nil {
		return fmt.Errorf("watch %s was not refused: %w", requestText(r), err)
	}
	d.coverage.Add("Watch", r, "watch canceled", d.generator.State)
	return d.compareControl(w)
}

func (d *driver) open(requests []*etcdserverpb.WatchCreateRequest) (*watchPair, error) {
	w := &watchPair{requests: requests}
	d.streams++
	d.number += len(requests)
	err := d.pair.Each(func(i int, s *process.Side) (err error) {
		if w.streams[i], err = openStream(s); err != nil {
			return err
		}
		for _, r := range requests {
			err := w.streams[i].stream.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{CreateRequest: r}})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

// catchUp waits until every watcher has seen all there is, and compares what both servers sent.
func (d *driver) catchUp() error {
	for _, w := range d.watches {
		for w.lastStart() > d.generator.State.Revision {
			put := &etcdserverpb.PutRequest{Key: []byte("a"), Value: []byte("on")}
			if err := d.write(d.operation("Put", put)); err != nil {
				return err
			}
		}
		revision := d.generator.State.Revision
		err := d.pair.Each(func(i int, _ *process.Side) error {
			s := w.streams[i]
			return s.wait(func() bool { return s.progress >= revision }, func() error {
				return s.stream.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_ProgressRequest{
					ProgressRequest: &etcdserverpb.WatchProgressRequest{}}})
			})
		})
		if err != nil {
			return fmt.Errorf("seed %d, operation %d, catching up with revision %d: %w", d.Seed, d.number, revision, err)
		}
		if err := d.compareEvents(w); err != nil {
			return err
		}
	}
	return nil
}

func (d *driver) compareControl(w *watchPair) error {
	var texts [2]string
	for i, s := range w.streams {
		s.mu.Lock()
		texts[i] = strings.Join(s.control, "; ")
		s.mu.Unlock()
	}
	if texts[0] == texts[1] {
		return nil
	}
	return d.watchDifference(w.requests[0], texts)
}

func (d *driver) compareEvents(w *watchPair) error {
	var events [2]map[int64][]*mvccpb.Event
	for i, s := range w.streams {
		s.mu.Lock()
		events[i], s.events = s.events, make(map[int64][]*mvccpb.Event)
		s.mu.Unlock()
	}
	for _, r := range w.requests {
		a, b := events[0][r.WatchId], events[1][r.WatchId]
		d.events += len(a)
		for i := range max(len(a), len(b)) {
			var left, right *mvccpb.Event
			if i < len(a) {
				left = a[i]
			}
			if i < len(b) {
				right = b[i]
			}
			if left == nil || right == nil || !proto.Equal(left, right) {
				return d.watchDifference(r, [2]string{
					fmt.Sprintf("event %d of %d since the last check: %s", i, len(a), eventText(d.pair[0].Names, left)),
					fmt.Sprintf("event %d of %d since the last check: %s", i, len(b), eventText(d.pair[1].Names, right)),
				})
			}
		}
	}
	return nil
}

func eventText(names *wire.Names, e *mvccpb.Event) string {
	if e == nil {
		return "none"
	}
	return names.Text(e)
}

func (d *driver) watchDifference(r *etcdserverpb.WatchCreateRequest, texts [2]string) error {
	op := Operation{Number: d.number, Method: "Watch", Request: r}
	keys := &etcdserverpb.RangeRequest{Key: r.Key, RangeEnd: r.RangeEnd}
	return &Difference{Seed: d.Seed, Operation: op, Reference: texts[0], Subject: texts[1], History: d.relevant(Operation{Request: keys})}
}

func (w *watchPair) close() {
	for _, s := range w.streams {
		if s != nil {
			s.cancel()
		}
	}
}

func (d *driver) closeWatches() {
	for _, w := range d.watches {
		w.close()
	}
	d.watches = nil
}

// watch makes a watcher with the given ID; 0 lets the server choose, which then chooses 0 too.
func (g *Generator) watch(id int64) *etcdserverpb.WatchCreateRequest {
	r := &etcdserverpb.WatchCreateRequest{
		Key: g.key(), WatchId: id, PrevKv: g.chance(50), ProgressNotify: g.chance(30), Fragment: g.chance(30),
	}
	if end := g.rangeEnd(r.Key); len(r.Key) > 0 && (bytes.Equal(end, []byte{0}) || bytes.Compare(r.Key, end) < 0) {
		r.RangeEnd = end
	}
	switch g.rand.IntN(6) {
	case 0:
		r.Filters = []etcdserverpb.WatchCreateRequest_FilterType{etcdserverpb.WatchCreateRequest_NOPUT}
	case 1:
		r.Filters = []etcdserverpb.WatchCreateRequest_FilterType{etcdserverpb.WatchCreateRequest_NODELETE}
	}
	s := g.State
	switch g.rand.IntN(5) {
	case 0:
		r.StartRevision = s.Revision
	case 1:
		r.StartRevision = s.Revision + 1 + g.rand.Int64N(maxFuture)
	case 2, 3:
		oldest := max(s.Compact, 1)
		r.StartRevision = oldest + g.rand.Int64N(s.Revision-oldest+1)
	}
	return r
}
