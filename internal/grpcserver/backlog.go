package grpcserver

import (
	"bytes"
	"sync/atomic"

	"golang.org/x/net/http2"
)

// Calls that are held back: their message is there, and no handler has it yet,
// as the connection has enough in hand. The reader may not simply stop when it is
// the client's windows that keep answers back, since what widens them may be
// behind any number of calls.

// backlog is the calls of a connection that are held back, oldest first. The
// connection's lock covers it.
type backlog struct {
	first, last *heldCall
	n           atomic.Int64
	told        bool // the client was asked to make no more calls for now
}

// heldCall is one of them.
type heldCall struct {
	s          *stream
	raw        []byte
	prev, next *heldCall
}

// heldCallCost is what a call that is held back takes beside its message and what
// its stream counts.
const heldCallCost = 64

// resumed is how many calls the holder of the writing token begins before it
// writes.
const resumed = 64

// crowded says that so many answers are not read that no more calls should be
// begun: for this connection, or for all and this one has its part in it.
func (c *conn) crowded() bool {
	n := c.queued.Load()
	return n > int64(c.s.o.OutputBytes/4) || n > crowdedBytes && c.s.queued.Load() > int64(c.s.o.HeldBytes)
}

// saturated says that no handler should be given a call now.
func (c *conn) saturated() bool { return c.working.Load() >= maxWorking || c.crowded() }

// resumable says that calls are held back and need not be. The lock is held.
func (c *conn) resumable() bool { return c.backlog.first != nil && !c.closed && !c.saturated() }

// holdBack keeps a call with its message for later, and returns true, unless it
// may as well be begun now. It runs on the reader goroutine.
func (s *stream) holdBack(raw []byte) bool {
	c := s.conn
	if c.backlog.n.Load() == 0 && !c.saturated() { // the usual case
		return false
	}
	c.mu.Lock()
	if c.backlog.first == nil && !c.saturated() {
		c.mu.Unlock()
		return false
	}
	if s.gone.Load() { // by its deadline
		c.mu.Unlock()
		return true
	}
	if len(raw) <= maxFrame {
		raw = bytes.Clone(raw) // it may be a small part of a batch's memory, which is not counted
	}
	if !s.count(heldCallCost + len(raw)) {
		c.reset(s.id, http2.ErrCodeRefusedStream)
		mine := c.drop(s, true)
		c.mu.Unlock()
		c.s.metrics.refused.Add(1)
		if bad := c.overstep(limitOutput); bad != nil {
			c.fail(bad)
		}
		if mine {
			s.over(endCanceled)
		}
		return true
	}
	h := &heldCall{s: s, raw: raw, prev: c.backlog.last}
	if h.prev == nil {
		c.backlog.first = h
	} else {
		h.prev.next = h
	}
	c.backlog.last, s.held = h, h
	c.backlog.n.Add(1)
	c.s.metrics.heldBack.Add(1)
	if !c.backlog.told {
		c.backlog.told = true
		c.limitStreams(uint32(len(c.streams)))
	}
	c.mu.Unlock()
	return true
}

// overstep counts a call that is refused because of a limit. Who goes on for long
// is cut off. It runs on the reader goroutine.
func (c *conn) overstep(limit string) *connError {
	c.s.limited(limit, "remote", c.remote)
	c.idle.left -= callCredit // it was none after all
	if !c.spend() {
		return calm(limitFlood, "too many calls beyond those that may be open")
	}
	return nil
}

// limitStreams tells the client how many streams it may have. The lock is held.
func (c *conn) limitStreams(n uint32) {
	n = min(n, c.s.o.MaxStreams)
	c.control(frameHeaderLen+6, func(b []byte) []byte {
		return appendSetting(appendFrameHeader(b, 6, frameSettings, 0, 0), settingMaxConcurrentStreams, n)
	})
}

// unlist takes a call out of the backlog, if it is there. The lock is held.
func (c *conn) unlist(s *stream) {
	h := s.held
	if h == nil {
		return
	}
	s.held = nil
	if h.prev == nil {
		c.backlog.first = h.next
	} else {
		h.prev.next = h.next
	}
	if h.next == nil {
		c.backlog.last = h.prev
	} else {
		h.next.prev = h.prev
	}
	c.s.metrics.heldBack.Add(-1)
	if c.backlog.n.Add(-1) == 0 && !c.closed {
		c.backlog.told = false
		c.limitStreams(c.s.o.MaxStreams)
		c.widen()
	}
}

// resume begins calls that were held back, as far as there is room. It runs on
// the goroutine that has the writing token.
func (c *conn) resume() {
	for range resumed {
		if c.backlog.n.Load() == 0 {
			return
		}
		c.mu.Lock()
		if !c.resumable() {
			c.mu.Unlock()
			return
		}
		h := c.backlog.first
		c.unlist(h.s)
		h.s.dispatched.Store(true) // under the lock: who drops the stream must know
		c.mu.Unlock()
		h.s.release()
		h.s.handle(h.raw)
	}
}

// forgetBacklog drops the calls that no handler will get. The lock is held, and
// the connection closed.
func (c *conn) forgetBacklog() {
	for c.backlog.first != nil {
		c.unlist(c.backlog.first.s)
	}
}
