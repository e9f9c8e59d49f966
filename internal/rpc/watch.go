package rpc

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/watch"
)

// Watches holds the watchers of all streams; *watch.Hub is one.
type Watches interface {
	NewStream(sink watch.Sink) *watch.Stream
}

// watchStream is one call of etcdserverpb.Watch/Watch.
type watchStream struct {
	s       *Server
	call    *grpcserver.Call
	out     grpcserver.StreamOut
	stream  *watch.Stream
	metrics *watch.Metrics
	pending atomic.Int64 // events queued and not sent

	messages []grpcserver.Message // scratch of Send
}

// openWatch serves etcdserverpb.Watch/Watch.
func (s *Server) openWatch(call *grpcserver.Call, out grpcserver.StreamOut) grpcserver.StreamReceiver {
	w := &watchStream{s: s, call: call, out: out, metrics: s.o.WatchMetrics}
	w.stream = s.o.Watches.NewStream(w)
	return w
}

// Message implements grpcserver.StreamReceiver.
func (w *watchStream) Message(raw []byte) error {
	var r etcdserverpb.WatchRequest
	if err := proto.Unmarshal(raw, &r); err != nil {
		return undecoded(undecodedMessage, err)
	}
	switch u := r.RequestUnion.(type) {
	case *etcdserverpb.WatchRequest_CreateRequest:
		return w.create(u.CreateRequest)
	case *etcdserverpb.WatchRequest_CancelRequest:
		return wireWatchError(w.stream.Cancel(u.CancelRequest.GetWatchId()))
	case *etcdserverpb.WatchRequest_ProgressRequest:
		return wireWatchError(w.stream.Progress())
	}
	return nil // of a later version; etcd ignores it too
}

// create creates a watcher. While the caller is not known yet no other request is
// read.
func (w *watchStream) create(c *etcdserverpb.WatchCreateRequest) error {
	who, err := w.s.identify(w.call)
	if !errors.Is(err, auth.ErrTokenAhead) {
		return w.createAs(who, err, c)
	}
	w.out.Hold()
	w.s.identifyLater(w.call, func(who Identity, err error) {
		if err := w.createAs(who, err, c); err != nil {
			w.out.End(err)
			return
		}
		w.out.Resume()
	})
	return nil
}

// createAs creates a watcher for a caller, or refuses it for an error in learning
// who calls.
func (w *watchStream) createAs(who Identity, err error, c *etcdserverpb.WatchCreateRequest) error {
	if err == nil {
		err = w.mayWatch(who, c.GetKey(), c.GetRangeEnd())
	}
	if err != nil {
		return wireWatchError(w.stream.Refuse(WireError(err).Error()))
	}
	r := watch.Request{
		Key: c.GetKey(), End: c.GetRangeEnd(),
		Start: c.GetStartRevision(), ID: c.GetWatchId(),
		ProgressNotify: c.GetProgressNotify(), PrevKV: c.GetPrevKv(), Fragment: c.GetFragment(),
	}
	for _, f := range c.GetFilters() {
		switch f {
		case etcdserverpb.WatchCreateRequest_NOPUT:
			r.NoPut = true
		case etcdserverpb.WatchCreateRequest_NODELETE:
			r.NoDelete = true
		}
	}
	return wireWatchError(w.stream.Create(r))
}

// mayWatch checks that the caller may read a range. As in etcd it is checked
// once, when the watcher is created.
func (w *watchStream) mayWatch(who Identity, key, end []byte) error {
	if len(key) == 0 {
		key = []byte{0}
	}
	v := w.s.o.Views.View()
	defer v.Release()
	return v.MayRead(who, key, end)
}

// wireWatchError returns what ends a stream whose client asks too much.
func wireWatchError(err error) error {
	if err == nil {
		return nil
	}
	return status.Error(codes.ResourceExhausted, fmt.Sprintf("etcdserver: %v; read the answers before asking for more", err))
}

// HalfClose implements grpcserver.StreamReceiver. Events go on: the JSON gateway, for one,
// closes its half once it has sent what it was asked to.
func (w *watchStream) HalfClose() (over bool) { return false }

// Ready implements grpcserver.StreamReceiver.
func (w *watchStream) Ready() { w.stream.Ready() }

// Close implements grpcserver.StreamReceiver.
func (w *watchStream) Close() {
	w.stream.Close()
	w.metrics.Pending.Sub(float64(w.pending.Load()))
}

// Send implements watch.Sink. The hub calls it from one goroutine at a time.
func (w *watchStream) Send(rs []watch.Response) bool {
	events := 0
	w.messages = w.messages[:0]
	for _, r := range rs {
		w.messages = append(w.messages, grpcserver.Message{Head: r.Prefix, Rest: r.Events, Kind: uint8(r.Kind)})
		events += len(r.Events)
	}
	w.pending.Add(int64(events)) // first, lest Sent come before it
	queued := w.out.Send(w.messages)
	clear(w.messages)
	if !queued {
		w.pending.Add(-int64(events))
		return false
	}
	w.metrics.Pending.Add(float64(events))
	return true
}

// Sent implements grpcserver.StreamReceiver.
func (w *watchStream) Sent(m grpcserver.Message, took time.Duration) {
	seconds := took.Seconds()
	switch watch.Kind(m.Kind) {
	case watch.KindControl:
		w.metrics.SendControl.Observe(seconds)
	case watch.KindProgress:
		w.metrics.SendProgress.Observe(seconds)
	case watch.KindEvents:
		w.s.tallyEvents(w.call, m.Rest)
		n := float64(len(m.Rest))
		w.pending.Add(-int64(len(m.Rest)))
		w.metrics.Pending.Sub(n)
		w.metrics.SendEvents.Observe(seconds)
		w.metrics.SendPerEvent.Observe(seconds / n)
	}
}
