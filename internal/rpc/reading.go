package rpc

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// regrant is by how much an answer that turned out larger than estimated asks
// for more room.
const regrant = 4

// keyGuess is what a key-value without its value is reckoned to have.
const keyGuess = 100

// mostPins is how many times its own size an answer may keep in memory as it is
// sent from where the store keeps its key-values; one that would keep more is
// copied. kvsCost is what each of them takes beside.
const (
	mostPins = 3
	kvsCost  = 24
)

// reading is an answer that is to be read from pinned views. It is made at once
// if it is small and in memory, else by a worker once there is room for it.
type reading struct {
	*request
	op     *state.OpReply
	header header // of the whole answer
	// committed is set if the request changed the store: then no error may say
	// that nothing happened.
	committed bool
	// reserved is set if the request holds a worker's place.
	reserved bool
	// pinned is what op reads from.
	pinned interface{ Release() }
	// room is what the answer's bytes are taken from.
	room *budget
}

// start makes the answer, or has it made.
func (r *reading) start() {
	if r.tryInline() {
		return
	}
	if !r.reserved && !r.s.answers.reserve() {
		r.fail(fmt.Errorf("%w: %d answers are being made already", errBusy, r.s.o.PendingAnswers))
		return
	}
	r.reserved = true
	limit := r.s.o.ResponseBytes
	size, exact := estimate(r.op)
	switch {
	case !exact: // not all of the room for a guess
		size = min(size, limit/regrant)
	case size > limit:
		r.fail(r.tooBig(size))
		return
	}
	r.ask(min(max(size, r.s.o.InlineBytes), limit))
}

// tryInline answers at once if that touches no disk and takes little room. It
// returns false if the answer is not made.
func (r *reading) tryInline() bool {
	limit := r.s.o.InlineBytes
	if !r.try(limit) {
		return false
	}
	left := limit
	a, err := r.read(context.Background(), &left, true) // too short to be broken off
	switch {
	case errors.Is(err, mvcc.ErrNotInMemory), errors.Is(err, mvcc.ErrTooBig):
		r.room.release(limit)
		return false
	case err != nil:
		r.room.release(limit)
		r.fail(err)
	default:
		r.succeed(a, limit)
	}
	return true
}

// try takes n bytes if they are free: from what is kept for small answers, so
// that they do not wait in the line of large ones, else from what all share.
func (r *reading) try(n int64) bool {
	for _, room := range [...]*budget{r.s.small, r.s.room} {
		if n <= r.s.o.InlineBytes && room.try(n) {
			r.room = room
			return true
		}
	}
	return false
}

// ask waits in line for room for an answer of n bytes and then has it made.
func (r *reading) ask(n int64) {
	if r.try(n) {
		r.s.answers.run(func() { r.work(n) })
		return
	}
	r.room = r.s.room
	r.room.acquire(n, deadlineOf(r.call, r.s.o.Clock.Now(), r.s.o.RequestTimeout), func(err error) {
		if err != nil {
			r.fail(err)
			return
		}
		r.s.answers.run(func() { r.work(n) })
	})
}

// work runs on a worker and owns n bytes of room.
func (r *reading) work(n int64) {
	left := n
	a, err := r.read(r.call.Context(), &left, false)
	if err == nil {
		r.succeed(a, n)
		return
	}
	r.room.release(n)
	if !errors.Is(err, mvcc.ErrTooBig) {
		r.fail(err)
		return
	}
	if n >= r.s.o.ResponseBytes {
		r.fail(r.tooBig(n + 1))
		return
	}
	r.ask(min(regrant*n, r.s.o.ResponseBytes))
}

func (r *reading) tooBig(bytes int64) error {
	return fmt.Errorf("%w: it has %d bytes or more, and all answers in flight may have %d (ask for fewer keys at a time)", errBusy, bytes, r.s.o.ResponseBytes)
}

func (r *reading) read(ctx context.Context, left *int64, memoryOnly bool) (answer, error) {
	if err := r.call.Err(); err != nil {
		return answer{}, err
	}
	a, err := r.s.fill(ctx, r.op, left, memoryOnly)
	a.header = r.header
	return a, err
}

// succeed sends the answer, for which room bytes are held.
func (r *reading) succeed(a answer, room int64) {
	size := a.measure()
	need := int64(size)
	raw, rest := []byte(nil), (*rows)(nil)
	if pins := a.pins + int64(len(a.kvs))*kvsCost; a.pins > 0 && a.kind == state.OpRange && pins <= mostPins*need && (pins <= room || r.room.try(pins-room)) {
		room, need = max(room, pins), pins
		raw, rest = a.split()
		r.call.Follow(rest)
	} else {
		raw = a.append(make([]byte, 0, size))
	}
	r.close()
	if spare := room - need; spare > 0 {
		r.room.release(spare)
		room -= spare
	}
	if room > 0 {
		r.call.OnSent(func() { r.room.release(room) })
	}
	r.finish(raw, size, nil)
}

func (r *reading) fail(err error) {
	r.close()
	if r.committed {
		err = status.Errorf(codes.Unavailable, "etcdserver: the request was committed at revision %d, but its answer could not be made: %v", r.header.revision, err)
	}
	r.done(nil, err)
}

// close gives up all that was held for making the answer.
func (r *reading) close() {
	r.pinned.Release()
	if r.reserved {
		r.s.answers.cancel()
	}
}

// fill reads what the answer to op needs. Left bounds the bytes of its
// key-values and is lowered by what was read; mvcc.ErrTooBig if it is not enough,
// and mvcc.ErrNotInMemory if memory alone is not.
func (s *Server) fill(ctx context.Context, op *state.OpReply, left *int64, memoryOnly bool) (answer, error) {
	a := answer{kind: op.Kind, count: op.Deleted, succeeded: op.Succeeded, header: header{revision: op.Revision}}
	if op.View != nil {
		res, err := s.readRange(ctx, op, *left, memoryOnly)
		if err != nil {
			return answer{}, err
		}
		if op.Kind == state.OpRange {
			a.count, a.more = res.Count, res.More
		}
		a.kvs, a.pins = res.KVs, res.Pins
		*left -= res.Bytes
	}
	if len(op.Ops) > 0 {
		a.ops = make([]answer, len(op.Ops))
	}
	for i := range op.Ops {
		var err error
		if a.ops[i], err = s.fill(ctx, &op.Ops[i], left, memoryOnly); err != nil {
			return answer{}, err
		}
	}
	return a, nil
}

// readRange reads what one op asks for, of at most maxBytes.
func (s *Server) readRange(ctx context.Context, op *state.OpReply, maxBytes int64, memoryOnly bool) (mvcc.RangeResult, error) {
	o := op.Range
	o.MaxBytes, o.MemoryOnly = max(1, maxBytes), memoryOnly
	if op.Kind != state.OpRange {
		return op.View.Range(ctx, op.Key, op.End, o)
	}
	began := s.o.Clock.Now()
	res, err := op.View.Range(ctx, op.Key, op.End, o)
	if !memoryOnly || err == nil { // else it is done again
		s.metrics.rangeTook(err, s.o.Clock.Now().Sub(began))
	}
	return res, err
}

// estimate returns the bytes of key-values that the answer to op takes, from the
// index's counts of what its ranges hold at present. Exact says that it is not a
// guess.
func estimate(op *state.OpReply) (bytes int64, exact bool) {
	exact = true
	if o := &op.Range; op.View != nil && !o.CountOnly {
		keys, size := op.View.Count(op.Key, op.End)
		switch {
		case o.KeysOnly && o.Target != mvcc.TargetValue: // which takes the values to sort
			if o.Limit > 0 {
				keys = min(keys, o.Limit)
			}
			size, exact = keys*keyGuess, false
		case o.Limit > 0 && o.Limit < keys:
			size, exact = size/keys*(o.Limit+o.Limit/4+1), false
		case o.Revision > 0 && o.Revision < op.View.Revision(), o.MinMod|o.MaxMod|o.MinCreate|o.MaxCreate != 0:
			exact = false
		}
		bytes = size
	}
	for i := range op.Ops {
		more, known := estimate(&op.Ops[i])
		bytes += more
		exact = exact && known
	}
	return bytes, exact
}

func hasView(op *state.OpReply) bool {
	if op.View != nil {
		return true
	}
	for i := range op.Ops {
		if hasView(&op.Ops[i]) {
			return true
		}
	}
	return false
}
