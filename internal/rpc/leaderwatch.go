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
// long. One goroutine serves all streams.
type leaderWatch struct {
	consensus Consensus
	stop      chan struct{}
	done      sync.WaitGroup

	mu      sync.Mutex
	streams map[*context.CancelCauseFunc]struct{}
}

func newLeaderWatch(c Consensus, clk clock.Clock, every time.Duration) *leaderWatch {
	w := &leaderWatch{
		consensus: c,
		stop:      make(chan struct{}),
		streams:   map[*context.CancelCauseFunc]struct{}{},
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

// cut ends all streams. They take themselves out.
func (w *leaderWatch) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for cancel := range w.streams {
		(*cancel)(rpctypes.ErrGRPCNoLeader)
	}
}

// watch returns a context that also ends for lack of a leader, with the wire
// error as its cause. Forget must be called when the stream is over.
func (w *leaderWatch) watch(ctx context.Context) (_ context.Context, forget func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.streams[&cancel] = struct{}{}
	return ctx, func() {
		w.mu.Lock()
		delete(w.streams, &cancel)
		w.mu.Unlock()
		cancel(nil)
	}
}

func (w *leaderWatch) close() {
	close(w.stop)
	w.done.Wait()
}
