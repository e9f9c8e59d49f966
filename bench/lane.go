package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/bench/wire"
)

const redialEvery = 100 * time.Millisecond

// lane is one connection and the slots that use it. When the connection breaks a new one is made, at the next endpoint.
type lane struct {
	r     *runner
	index int
	stats *stats // changes only while no slot is busy

	mu      sync.Mutex
	drive   *drive     // what runs now
	conn    *wire.Conn // nil while there is none
	closing bool
	slots   []*slot
	free    []*slot // idle ones
	// Of an open loop: this lane's operations are due at first, first+every and so on.
	next   int64
	every  int64
	behind bool // something is due, and the pacer leaves it to the lane
}

// connect makes the first connection.
func (l *lane) connect(ctx context.Context) error {
	c, err := l.r.dial(ctx, l.r.endpoints[l.index%len(l.r.endpoints)], func(err error) { l.lost(err) })
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.conn = c
	l.mu.Unlock()
	return nil
}

// lost makes a new connection. It comes from the old one's reading goroutine, after the last End.
func (l *lane) lost(why error) {
	l.mu.Lock()
	l.conn = nil
	closing := l.closing
	l.mu.Unlock()
	if !closing {
		go l.redial(why)
	}
}

func (l *lane) redial(why error) {
	var err error
	for began, try := time.Now(), 0; ; try++ {
		at := l.r.endpoints[(l.index+try)%len(l.r.endpoints)]
		var c *wire.Conn
		if c, err = l.r.dial(l.r.ctx, at, func(err error) { l.lost(err) }); err == nil {
			l.mu.Lock()
			if l.closing {
				l.mu.Unlock()
				c.Close()
				return
			}
			l.conn = c
			l.fill(l.r.now())
			l.mu.Unlock()
			return
		}
		if time.Since(began) > l.r.o.timeout {
			break
		}
		select {
		case <-l.r.ctx.Done():
			return
		case <-time.After(redialEvery):
		}
	}
	l.r.fail(fmt.Errorf("lost the connection to %s (%w), and for %v no new one could be made: %w",
		l.r.endpoints[l.index%len(l.r.endpoints)].name, why, l.r.o.timeout, err))
}

func (l *lane) close() {
	l.mu.Lock()
	l.closing = true
	c := l.conn
	l.mu.Unlock()
	if c != nil {
		c.Close()
	}
}

// begin takes up a drive. No slot is busy.
func (l *lane) begin(d *drive, streams int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drive, l.stats = d, newStats(len(d.work.kinds()))
	_, l.stats.sums = d.work.(interface{ sums() })
	l.slots, l.free = l.slots[:0], l.free[:0]
	for i := range streams {
		s := &slot{lane: l, drive: d, id: l.index*streams + i}
		s.call.Handler = s
		s.rng = rand.New(rand.NewPCG(l.r.o.seed, uint64(s.id)))
		l.slots = append(l.slots, s)
	}
	for i := len(l.slots) - 1; i >= 0; i-- {
		l.free = append(l.free, l.slots[i])
	}
}

// end ends a drive. No slot is busy.
func (l *lane) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.slots {
		if s.open && l.conn != nil {
			l.conn.Cancel(&s.call, codes.Canceled, "the run is over")
		}
	}
	l.drive = nil
}

// fill gives idle slots work. l.mu is held, as in all below that do not take it.
func (l *lane) fill(now int64) {
	if l.conn == nil || l.drive == nil {
		return
	}
	l.conn.Hold()
	defer l.conn.Release()
	for len(l.free) > 0 && l.conn != nil {
		due := now
		if l.every > 0 {
			if l.next > now {
				l.caughtUp()
				return
			}
			due = l.next
		}
		s := l.free[len(l.free)-1]
		l.free = l.free[:len(l.free)-1]
		if !l.issue(s, due, now) {
			return
		}
	}
}

// caughtUp tells the pacer, if it left what was due to the lane, that it has to look after this lane again.
func (l *lane) caughtUp() {
	if !l.behind {
		return
	}
	l.behind = false
	select {
	case l.drive.wake <- struct{}{}:
	default:
	}
}

// issue begins the slot's next operation, and tells if others could follow. A slot that has none left to do is not idle but
// gone.
func (l *lane) issue(s *slot, due, now int64) bool {
	d := s.drive
	d.busy.Add(1)
	if d.stopped.Load() || l.conn == nil || !d.take(due) {
		l.free = append(l.free, s)
		d.release()
		return false
	}
	s.begins = due
	next, ok := d.work.next(s)
	if !ok {
		d.giveBack(due)
		d.gone()
		d.release()
		return true
	}
	if l.every > 0 {
		l.next += l.every
	}
	s.op, s.due, s.sent, s.busy, s.parts, s.got, s.bad = next, due, now, true, 1, 0, nil
	if next.held {
		s.parts = 2
	}
	var err *wire.Error
	if next.exchange && s.open {
		err = l.conn.Send(&s.call, next.request)
	} else {
		s.call.Pieces = next.pieces
		err = l.conn.Start(&s.call, next.method, next.request, !next.exchange)
		s.open = err == nil && next.exchange
	}
	if err == nil {
		return true
	}
	s.busy = false
	d.work.over(s)
	if err.Code == codes.Unavailable { // the connection is on its way out: the operation was not made
		if l.every > 0 {
			l.next -= l.every
		}
		d.giveBack(due)
		l.free = append(l.free, s)
		d.release()
		return false
	}
	l.count(s, now, err)
	l.free = append(l.free, s)
	d.release()
	return true
}

// finished takes the end of a slot's operation, or the answer of a held one.
func (l *lane) finished(s *slot, err *wire.Error) {
	now := l.r.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !s.busy {
		return // it was given up
	}
	if s.parts--; err != nil || !s.op.held || s.parts == 1 {
		l.count(s, now, err)
	}
	if err == nil && s.parts > 0 {
		return
	}
	l.over(s, now)
}

// delivered takes the other half of a held operation.
func (l *lane) delivered(s *slot) {
	now := l.r.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if !s.busy {
		return
	}
	if s.parts--; s.parts == 1 { // before its answer: then that only has to be counted
		s.op.held = false
		return
	}
	l.over(s, now)
}

func (l *lane) over(s *slot, now int64) {
	s.busy = false
	d := s.drive
	d.work.over(s)
	if l.every > 0 {
		l.free = append(l.free, s)
		l.fill(now)
	} else {
		l.issue(s, now, now)
	}
	d.release()
}

// count records an operation, if it belongs to what is measured.
func (l *lane) count(s *slot, now int64, err *wire.Error) {
	if s.due >= s.drive.from {
		l.stats.add(s.op.kind, time.Duration(now-s.due), now, err)
	}
}

// streamEnded takes the end of an exchange's stream.
func (l *lane) streamEnded(s *slot, err *wire.Error) {
	if err == nil {
		err = &wire.Error{Code: codes.Internal, Message: "the server ended the stream"}
	}
	l.mu.Lock()
	s.open = false
	l.mu.Unlock()
	l.finished(s, err)
}

// look gives up operations that take too long. With hopeless those that only wait for events are given up at once.
func (l *lane) look(now int64, hopeless bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.slots {
		waits := s.op.held && s.parts == 1
		late := time.Duration(now-s.sent) >= l.r.o.timeout
		switch {
		case !s.busy || !late && !(waits && hopeless):
		case waits:
			if late {
				l.count(s, now, &wire.Error{Code: codes.DeadlineExceeded, Message: fmt.Sprintf("its event had not reached every watcher after %v", l.r.o.timeout)})
			}
			s.bad = errGivenUp
			l.over(s, now)
		case l.conn != nil:
			l.conn.Cancel(&s.call, codes.DeadlineExceeded, fmt.Sprintf("no answer within %v (--timeout)", l.r.o.timeout))
		}
	}
}
