package rpc

import (
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/engram-kv/engram/internal/clock"
)

// leaderlessLimit is after how many election timeouts without a leader the
// streams that require one end.
const leaderlessLimit = 3

// leaderWatch ends the streams that require a leader once there was none for
// long, and at a stop the streams that clients hold open. One goroutine serves
// all streams.
type leaderWatch struct {
	consensus Consensus
	stop      chan struct{}
	done      sync.WaitGroup

	mu       sync.Mutex
	streams  map[*openStream]struct{}
	stopping bool // no stream begins any more
}

// openStream is one stream that may have to end before its client does.
type openStream struct {
	end         func(error)
	needsLeader bool
	endless     bool // only the client would end it
}

func newLeaderWatch(c Consensus, clk clock.Clock, every time.Duration) *leaderWatch {
	w := &leaderWatch{
		consensus: c,
		stop:      make(chan struct{}),
		streams:   map[*openStream]struct{}{},
	}
	ticker := clk.NewTicker(every)
	w.done.Go(func() {
		defer ticker.Stop()
		w.run(ticker.C())
	})
	return w
}

func (w *leaderWatch) run(ticks <-chan time.Time) {
	leaderless := 0
	for {
		select {
		case <-w.stop:
			return
		case <-ticks:
		}
		if w.consensus.Leader() != 0 {
			leaderless = 0
			continue
		}
		if leaderless++; leaderless >= leaderlessLimit {
			w.cut()
		}
	}
}

// cut ends all streams that require a leader. They take themselves out.
func (w *leaderWatch) cut() {
	w.end(rpctypes.ErrGRPCNoLeader, func(o *openStream) bool { return o.needsLeader })
}

// endAll ends the streams that only their clients would end, now and as they
// come: the member stops.
func (w *leaderWatch) endAll() {
	w.mu.Lock()
	w.stopping = true
	w.mu.Unlock()
	w.end(rpctypes.ErrGRPCStopped, func(o *openStream) bool { return o.endless })
}

// end ends some streams, without the lock: a stream that ends forgets itself.
func (w *leaderWatch) end(why error, which func(*openStream) bool) {
	var some []*openStream
	w.mu.Lock()
	for o := range w.streams {
		if which(o) {
			some = append(some, o)
		}
	}
	w.mu.Unlock()
	for _, o := range some {
		o.end(why)
	}
}

// watch has end called with the wire error when the stream must end, maybe at
// once and maybe more than once. Forget must be called when the stream is over.
func (w *leaderWatch) watch(needsLeader, endless bool, end func(error)) (forget func()) {
	o := &openStream{end: end, needsLeader: needsLeader, endless: endless}
	w.mu.Lock()
	w.streams[o] = struct{}{}
	late := w.stopping && endless
	w.mu.Unlock()
	if late {
		end(rpctypes.ErrGRPCStopped)
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.streams, o)
	}
}

func (w *leaderWatch) close() {
	close(w.stop)
	w.done.Wait()
}
