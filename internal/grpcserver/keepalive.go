package grpcserver

import (
	"time"

	"golang.org/x/net/http2"
)

// pingIdle is how often a client without calls may ping.
const pingIdle = 2 * time.Hour

// maxPingStrikes is how many pings may come too soon.
const maxPingStrikes = 2

// drainWait is how long a client may take to learn that no call should follow.
const drainWait = 5 * time.Second

var (
	keepalivePing = [8]byte{'a', 'l', 'i', 'v', 'e'}
	drainingPing  = [8]byte{'d', 'r', 'a', 'i', 'n'}
)

// keepAlive pings a client that was silent, and hangs up on one that does not
// answer.
func (c *conn) keepAlive() {
	now := c.s.o.Clock.Now()
	silent := now.Sub(time.Unix(0, c.lastRead.Load()))
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	switch {
	case c.pinged && c.batches.Load() == c.pingedAfter:
		c.s.limited(limitKeepalive, "remote", c.remote, "silent", silent)
		c.hangUp()
	case silent >= c.s.o.KeepaliveTime:
		c.pinged, c.pingedAfter = true, c.batches.Load()
		c.out.used(appendPing(c.out.room(frameHeaderLen+8), 0, keepalivePing))
		c.kick()
		c.s.timers.set(c.keepalive, now.Add(c.s.o.KeepaliveTimeout))
	default:
		c.pinged = false
		c.s.timers.set(c.keepalive, now.Add(c.s.o.KeepaliveTime-silent))
	}
}

// ping answers a client's ping, unless it pings too often. That an answer was
// sent in between makes up for it: such a client measures its bandwidth.
func (c *conn) ping(data [8]byte) *connError {
	c.mu.Lock()
	c.control(frameHeaderLen+8, func(b []byte) []byte { return appendPing(b, flagAck, data) })
	open := len(c.streams)
	answered := c.answered
	c.answered = false
	c.mu.Unlock()
	last := c.pingAt
	c.pingAt = c.now
	if answered {
		c.strikes = 0
		return nil
	}
	least := c.s.o.KeepaliveMinTime
	if open == 0 {
		least = pingIdle
	}
	if !last.IsZero() && c.now.Sub(last) < least {
		c.strikes++
	}
	if c.strikes > maxPingStrikes {
		return calm(limitPings, "too_many_pings")
	}
	return nil
}

// startDrain asks the client to make no more calls here. Those that it made
// before it knew are still served.
func (c *conn) startDrain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining || c.closed {
		return
	}
	c.draining = true
	c.goAway(maxWindow, http2.ErrCodeNo, "graceful_stop")
	c.out.used(appendPing(c.out.room(frameHeaderLen+8), 0, drainingPing))
	c.s.timers.set(c.drain, c.s.o.Clock.Now().Add(drainWait))
	c.kick()
}

// finishDrain says which call was the last one, and closes the connection after
// it.
func (c *conn) finishDrain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.drained || c.closed {
		return
	}
	c.drained, c.lastID = true, c.maxID
	c.goAway(c.lastID, http2.ErrCodeNo, "graceful_stop")
	if len(c.streams) == 0 {
		c.quit = true
	}
	c.kick()
}
