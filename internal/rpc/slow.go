package rpc

import (
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/internal/grpcserver"
)

// slowCallPause is the shortest time between two lines on slow calls: under
// overload all are slow, and logging must not add to it.
const slowCallPause = time.Second

// slowCalls remembers when a slow call was logged, and counts those that were
// not.
type slowCalls struct {
	logged atomic.Int64 // in nanoseconds of the Unix time
	hidden atomic.Int64
}

// finished logs a unary call that took longer than Options.SlowCall.
func (s *Server) finished(call *grpcserver.Call, code codes.Code, took time.Duration) {
	if s.o.SlowCall <= 0 || took <= s.o.SlowCall {
		return
	}
	now, last := s.o.Clock.Now().UnixNano(), s.slow.logged.Load()
	if last != 0 && now-last < int64(slowCallPause) || !s.slow.logged.CompareAndSwap(last, now) {
		s.slow.hidden.Add(1)
		return
	}
	from := ""
	if addr := call.RemoteAddr(); addr != nil {
		from = addr.String()
	}
	s.o.Logger.Warn("call took too long", "method", call.Method, "took", took, "expected", s.o.SlowCall, "code", code.String(),
		"client", from, "not-logged", s.slow.hidden.Swap(0))
}
