package load

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/bench/histogram"
)

// drainWithin bounds the wait for answers after the last request.
const drainWithin = 2 * time.Minute

// ErrNoAnswer says that a server left calls open.
var ErrNoAnswer = errors.New("load: calls are still open")

// Result is what a run counted.
type Result struct {
	Ops     int64
	Elapsed time.Duration // from the first request to the last answer
	Latency histogram.Histogram
	Late    histogram.Histogram // of an open loop: how late the generator itself was
}

// Closed is a closed loop: each stream sends its next request when the last was answered.
type Closed struct {
	Conns   []*Conn
	Streams int           // on each connection
	For     time.Duration // no request begins later; 0 means no limit
	Count   int64         // no more requests than that; 0 means no limit
	// Next returns the next request of stream s, built into buf[:0]. It is called by one goroutine at a time for any one
	// stream, and the bytes are used before it is called again.
	Next func(s *Source) (path string, request []byte)
	// Answer, if set, sees each answer before the stream's next request is made.
	Answer func(s *Source, answer []byte) error
}

// Source is one stream of a closed loop.
type Source struct {
	ID     int
	Rand   *rand.Rand
	Buf    []byte // for Next to build in
	Serial int64  // of the request over all streams, from 0
	State  int64  // for Next and Answer to use
}

// Run drives the loop to its end. The first error of any call ends it.
func (c Closed) Run() (Result, error) {
	began := time.Now()
	var (
		taken  atomic.Int64
		failed atomic.Pointer[error]
		wg     sync.WaitGroup
		byConn = make([]histogram.Histogram, len(c.Conns)) // callbacks of one connection run one after another
	)
	fail := func(err error) { failed.CompareAndSwap(nil, &err) }
	next := func(s *Source) (string, []byte, bool) {
		if failed.Load() != nil || c.For > 0 && time.Since(began) >= c.For {
			return "", nil, false
		}
		s.Serial = taken.Add(1) - 1
		if c.Count > 0 && s.Serial >= c.Count {
			return "", nil, false
		}
		path, request := c.Next(s)
		return path, request, true
	}
	for i, conn := range c.Conns {
		for j := range c.Streams {
			s := &Source{ID: i*c.Streams + j}
			s.Rand = rand.New(rand.NewPCG(uint64(s.ID), 1))
			var sent time.Time
			var answered func([]byte, error)
			send := func() {
				path, request, ok := next(s)
				if !ok {
					wg.Done()
					return
				}
				sent = time.Now()
				conn.Call(path, request, answered)
			}
			answered = func(answer []byte, err error) {
				if err == nil && c.Answer != nil {
					err = c.Answer(s, answer)
				}
				if err != nil {
					fail(err)
					wg.Done()
					return
				}
				byConn[i].Add(time.Since(sent))
				send()
			}
			wg.Add(1)
			send()
		}
	}
	if err := waitFor(&wg, c.For+c.grace()); err != nil {
		return Result{}, err
	}
	if err := failed.Load(); err != nil {
		return Result{}, *err
	}
	r := Result{Elapsed: time.Since(began)}
	for i := range byConn {
		r.Latency.Merge(&byConn[i])
	}
	r.Ops = r.Latency.Count()
	return r, nil
}

// grace is how long beyond its time a loop may take: one that is bounded by a count gets a millisecond for each.
func (c Closed) grace() time.Duration { return drainWithin + time.Duration(c.Count)*time.Millisecond }

func waitFor(wg *sync.WaitGroup, within time.Duration) error {
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-time.After(within):
		return fmt.Errorf("after %v: %w", within, ErrNoAnswer)
	}
}
