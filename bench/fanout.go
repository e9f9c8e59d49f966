package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/bench/wire"
)

// stampBytes begin each value of the fan-out: slot, serial of its put, and when that was due.
const stampBytes = 16

var errGivenUp = errors.New("given up")

// fanout puts keys that many watchers watch. A put is over when every watcher has its event.
type fanout struct {
	plain
	r        *runner
	watchers int
	value    []byte
	states   []putState // by slot
	conns    []*watchConn
	created  atomic.Int64
	ready    chan struct{} // closed when all watchers are there
	from     atomic.Int64  // events of puts that were due earlier are not counted
}

const (
	eventKind = iota
	putKind
)

// putState is a slot's running put.
type putState struct {
	slot atomic.Pointer[slot]
	// serial in the upper half, and the events that are still to come in the lower.
	left atomic.Uint64
}

// watchConn is one connection with one stream that a share of the watchers uses.
type watchConn struct {
	w     *fanout
	conn  *wire.Conn
	call  wire.Call
	stats *stats
	last  map[int64]int64 // revision of each watcher's last event

	closing atomic.Bool
}

func newFanout(r *runner, slots int) *fanout {
	return &fanout{r: r, watchers: r.o.watchers, value: api.Value(r.o.valueSize), states: make([]putState, slots), ready: make(chan struct{})}
}

func (w *fanout) kinds() []string { return []string{"event", "put"} }

func (w *fanout) counters() []*stats {
	var all []*stats
	for _, c := range w.conns {
		all = append(all, c.stats)
	}
	return all
}

func (w *fanout) counting(from int64) { w.from.Store(from) }

// open makes the connections and creates the watchers.
func (w *fanout) open(ctx context.Context, connections int) error {
	for i := range min(connections, w.watchers) {
		c := &watchConn{w: w, stats: newStats(2), last: make(map[int64]int64)}
		c.call.Handler = c
		var err error
		if c.conn, err = w.r.dial(ctx, w.r.endpoints[i%len(w.r.endpoints)], nil); err != nil {
			return err
		}
		w.conns = append(w.conns, c)
	}
	from, end := w.r.o.numbered()
	request := api.AppendWatch(nil, from, end, 0, 0)
	for i := range w.watchers {
		c := w.conns[i%len(w.conns)]
		var err *wire.Error
		if i < len(w.conns) {
			err = c.conn.Start(&c.call, api.Watch, request, false)
		} else {
			err = c.conn.Send(&c.call, request)
		}
		if err != nil {
			return explain(err)
		}
	}
	select {
	case <-w.ready:
		return nil
	case <-w.r.failed:
		return w.r.failure()
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(w.r.o.timeout + time.Duration(w.watchers)*time.Millisecond):
		return fmt.Errorf("only %d of %d watchers were created in time", w.created.Load(), w.watchers)
	}
}

func (w *fanout) close() {
	for _, c := range w.conns {
		c.closing.Store(true)
		c.conn.Close()
	}
}

func (c *watchConn) Piece(*wire.Call, []byte, bool) {}

func (c *watchConn) End(_ *wire.Call, err *wire.Error) {
	if c.closing.Load() {
		return
	}
	if err == nil {
		err = &wire.Error{Code: codes.Internal, Message: "the server ended the stream"}
	}
	c.w.r.fail(fmt.Errorf("a watch stream ended: %w", explain(err)))
}

func (c *watchConn) Message(_ *wire.Call, m []byte) {
	w := c.w
	if c.closing.Load() {
		return
	}
	now := w.r.now()
	var wrong error
	var done []*slot
	c.stats.mu.Lock()
	from := w.from.Load()
	e, err := api.EventsOf(m, func(watcher int64, e *api.Event) {
		if last := c.last[watcher]; e.ModRevision <= last {
			wrong = fmt.Errorf("watcher %d got an event of revision %d after one of %d", watcher, e.ModRevision, last)
			return
		}
		c.last[watcher] = e.ModRevision
		if e.Deleted || len(e.Value) < stampBytes {
			return // not one of ours
		}
		due := int64(binary.LittleEndian.Uint64(e.Value[8:]))
		if due >= from {
			c.stats.last = max(c.stats.last, now)
			c.stats.kinds[eventKind].latency.Add(time.Duration(now - due))
		}
		if s := w.take(binary.LittleEndian.Uint32(e.Value), binary.LittleEndian.Uint32(e.Value[4:])); s != nil {
			done = append(done, s)
		}
	})
	c.stats.mu.Unlock()
	for _, s := range done {
		s.lane.delivered(s)
	}
	switch {
	case err != nil:
		w.r.fail(fmt.Errorf("a watch answer cannot be read: %w", err))
	case wrong != nil:
		w.r.fail(wrong)
	case e.Canceled:
		w.r.fail(fmt.Errorf("the server cancelled watcher %d: %s (compact revision %d)", e.Watcher, e.Reason, e.Compacted))
	case e.Created && w.created.Add(1) == int64(w.watchers):
		close(w.ready)
	}
}

// take counts an event, and returns the slot whose put that was the last event of.
func (w *fanout) take(id, serial uint32) *slot {
	if int(id) >= len(w.states) {
		return nil
	}
	st := &w.states[id]
	if left := st.left.Load(); uint32(left>>32) != serial || uint32(left) == 0 {
		return nil // of a put that was given up
	}
	if uint32(st.left.Add(^uint64(0))) > 0 {
		return nil
	}
	return st.slot.Load()
}

func (w *fanout) next(s *slot) (op, bool) {
	if s.bad == errGivenUp {
		return op{}, false // its events may still come: they must not be taken for those of the next put
	}
	st := &w.states[s.id]
	st.slot.Store(s)
	serial := uint32(st.left.Load()>>32) + 1
	st.left.Store(uint64(serial)<<32 | uint64(w.watchers))
	var room [maxKeySize]byte
	key := w.r.o.appendKey(room[:0], s.rng.IntN(w.r.o.keys))
	s.buf = api.AppendPut(s.buf[:0], key, w.value, 0)
	value := s.buf[len(s.buf)-len(w.value):]
	binary.LittleEndian.PutUint32(value, uint32(s.id))
	binary.LittleEndian.PutUint32(value[4:], serial)
	binary.LittleEndian.PutUint64(value[8:], uint64(s.begins))
	return op{kind: putKind, method: api.Put, request: s.buf, held: true}, true
}

func (w *fanout) message(_ *slot, m []byte) error {
	_, err := api.Revision(m)
	return err
}
