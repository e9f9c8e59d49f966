package rpc

import (
	"context"
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
	cancel      context.CancelCauseFunc
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
	w.mu.Lock()
	defer w.mu.Unlock()
	for o := range w.streams {
		if o.needsLeader {
			o.cancel(rpctypes.ErrGRPCNoLeader)
		}
	}
}

// endAll ends the streams that only their clients would end, now and as they
// come: the member stops.
func (w *leaderWatch) endAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopping = true
	for o := range w.streams {
		if o.endless {
			o.cancel(rpctypes.ErrGRPCStopped)
		}
	}
}

// watch returns a context that also ends when the stream must, with the wire
// error as its cause. Forget must be called when the stream is over.
func (w *leaderWatch) watch(ctx context.Context, needsLeader, endless bool) (_ context.Context, forget func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	o := &openStream{cancel: cancel, needsLeader: needsLeader, endless: endless}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.streams[o] = struct{}{}
	if w.stopping && endless {
		cancel(rpctypes.ErrGRPCStopped)
	}
	return ctx, func() {
		w.mu.Lock()
		delete(w.streams, o)
		w.mu.Unlock()
		cancel(nil)
	}
}

func (w *leaderWatch) close() {
	close(w.stop)
	w.done.Wait()
}
