package bench

import (
	"math/rand/v2"

	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/bench/wire"
)

// workload makes operations and judges their answers. Its methods that take a slot are called by one goroutine at a time
// for any one slot.
type workload interface {
	// kinds names the kinds of operations; the first is what throughput is told of.
	kinds() []string
	// next builds the slot's next operation, its request in s.buf[:0]. False: there is nothing to do for this slot any more.
	next(s *slot) (op, bool)
	// message takes an answer, or one of many; an error is what is wrong with it. Its bytes are valid during the call only.
	message(s *slot, m []byte) error
	// piece takes a part of an answer to an operation with pieces.
	piece(s *slot, p []byte, last bool) error
	// end judges an operation that succeeded as far as the server is concerned.
	end(s *slot) error
	// over follows each operation, however it ended.
	over(s *slot)
}

// plain has the methods that most workloads do not need.
type plain struct{}

func (plain) piece(*slot, []byte, bool) error { return nil }
func (plain) end(*slot) error                 { return nil }
func (plain) over(*slot)                      {}

// op is one operation.
type op struct {
	kind    int
	method  string
	request []byte
	// exchange: the request goes over a stream that stays open, and one message is the answer.
	exchange bool
	// many: any number of messages is an answer, not just one.
	many bool
	// pieces: the answer is too large to be kept, and handed out as it comes.
	pieces bool
	// held: with the answer the operation is not over; the workload calls release.
	held bool
}

// slot makes one operation at a time.
type slot struct {
	call  wire.Call
	lane  *lane
	drive *drive
	id    int
	rng   *rand.Rand
	buf   []byte
	own   any // of the workload
	// begins is when the operation that next is asked for is due.
	begins int64

	// Under lane.mu, apart from op, which the callbacks of a running operation may read.
	op    op
	busy  bool
	due   int64 // when the operation was to begin
	sent  int64 // when it began
	parts int   // what must still happen before it is over
	open  bool  // an exchange's stream is open

	// Of the running operation, for its callbacks.
	got int   // messages
	bad error // what was wrong with one
}

var _ wire.Handler = (*slot)(nil)

func (s *slot) Message(_ *wire.Call, m []byte) {
	if s.got++; s.bad == nil {
		s.bad = s.drive.work.message(s, m)
	}
	if s.op.exchange {
		s.finish(nil)
	}
}

func (s *slot) Piece(_ *wire.Call, p []byte, last bool) {
	if last {
		s.got++
	}
	if s.bad == nil {
		s.bad = s.drive.work.piece(s, p, last)
	}
}

func (s *slot) End(_ *wire.Call, err *wire.Error) {
	if s.op.exchange {
		s.lane.streamEnded(s, err)
		return
	}
	if err == nil && s.got == 0 && !s.op.many {
		err = &wire.Error{Code: codes.Internal, Message: "status OK, but no message"}
	}
	s.finish(err)
}

// finish ends the operation, or one half of a held one.
func (s *slot) finish(err *wire.Error) {
	if err == nil && s.bad == nil {
		s.bad = s.drive.work.end(s)
	}
	if err == nil && s.bad != nil {
		err = &wire.Error{Code: codeWrong, Message: s.bad.Error()}
	}
	s.lane.finished(s, err)
}
