package load

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/bench/histogram"
)

// maxOpen bounds the calls of an open loop in flight. A server that far behind has failed the measurement, and the loop
// waits, with latency still counted from when each request was due.
const maxOpen = 20_000

// Open is an open loop: requests begin at a fixed rate whether or not earlier ones were answered, and latency counts from
// when a request was due.
type Open struct {
	Conns []*Conn
	Rate  int // requests a second
	// Next builds the i-th request into s.Buf.
	Next func(s *Source) (path string, request []byte)
	// Done, if set, sees each request's due time and latency; called by several goroutines.
	Done func(due time.Time, latency time.Duration)
}

// Run drives the loop until ctx ends and all that was sent is answered. The first error of any call ends it.
func (o Open) Run(ctx context.Context) (Result, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var (
		failed atomic.Pointer[error]
		wg     sync.WaitGroup
		byConn = make([]histogram.Histogram, len(o.Conns))
		slots  = make(chan struct{}, maxOpen)
		r      Result
		s      = &Source{Rand: rand.New(rand.NewPCG(uint64(o.Rate), 2))}
	)
	began := time.Now()
	interval := time.Second / time.Duration(o.Rate)
	for i := int64(0); ; i++ {
		due := began.Add(time.Duration(i) * interval)
		if wait := time.Until(due); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil || failed.Load() != nil {
			break
		}
		r.Late.Add(time.Since(due))
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			continue // which ends the loop above
		}
		s.Serial = i
		path, request := o.Next(s)
		at := int(i) % len(o.Conns)
		wg.Add(1)
		o.Conns[at].Call(path, request, func(_ []byte, err error) {
			defer wg.Done()
			<-slots
			if err != nil {
				failed.CompareAndSwap(nil, &err)
				stop()
				return
			}
			took := time.Since(due)
			byConn[at].Add(took)
			if o.Done != nil {
				o.Done(due, took)
			}
		})
	}
	if err := waitFor(&wg, drainWithin); err != nil {
		return Result{}, err
	}
	if err := failed.Load(); err != nil {
		return Result{}, *err
	}
	r.Elapsed = time.Since(began)
	for i := range byConn {
		r.Latency.Merge(&byConn[i])
	}
	r.Ops = r.Latency.Count()
	return r, nil
}
