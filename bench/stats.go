package bench

import (
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/bench/histogram"
	"github.com/engram-kv/engram/bench/wire"
)

// stats counts what happened on one connection since they were last collected.
type stats struct {
	mu    sync.Mutex
	kinds []kindStats
	sums  bool  // the first kind stands for all others together
	last  int64 // when the last operation ended
}

// kindStats counts operations of one kind.
type kindStats struct {
	latency  histogram.Histogram // of those that succeeded
	events   int64               // things that were counted without a latency
	failures failures
}

func (k *kindStats) count() int64 { return k.latency.Count() + k.events }

// failures are by code, each with the first text seen.
type failures map[codes.Code]*failure

type failure struct {
	count int64
	first string
}

func newStats(kinds int) *stats { return &stats{kinds: make([]kindStats, kinds)} }

// codeWrong stands for an answer that is not what was asked for. It is no gRPC code.
const codeWrong codes.Code = 1000

func codeName(c codes.Code) string {
	if c == codeWrong {
		return "WrongAnswer"
	}
	return c.String()
}

func (s *stats) add(kind int, latency time.Duration, now int64, err *wire.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := &s.kinds[kind]
	s.last = max(s.last, now)
	if err == nil {
		k.latency.Add(latency)
		if s.sums {
			s.kinds[0].latency.Add(latency)
		}
		return
	}
	k.failures.add(err.Code, 1, err.Message)
}

func (f *failures) add(code codes.Code, n int64, text string) {
	if *f == nil {
		*f = make(failures)
	}
	if have := (*f)[code]; have != nil {
		have.count += n
		return
	}
	(*f)[code] = &failure{count: n, first: text}
}

func (f failures) count() (n int64) {
	for _, e := range f {
		n += e.count
	}
	return n
}

// collect moves what was counted into both sums.
func (s *stats) collect(recent, all *stats) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, to := range []*stats{recent, all} {
		to.last = max(to.last, s.last)
		for i := range s.kinds {
			to.kinds[i].latency.Merge(&s.kinds[i].latency)
			to.kinds[i].events += s.kinds[i].events
			for code, e := range s.kinds[i].failures {
				to.kinds[i].failures.add(code, e.count, e.first)
			}
		}
	}
	s.reset()
}

func (s *stats) reset() {
	for i := range s.kinds {
		s.kinds[i].latency.Reset()
		s.kinds[i].events, s.kinds[i].failures = 0, nil
	}
}
