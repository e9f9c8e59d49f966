package grpcserver

import (
	"sync"
	"time"
)

// Who has something to write appends it to the connection's output and calls
// kick. Bytes are written by whoever holds the writing token: the reader at the
// end of a batch, a flusher, the goroutine that replied if the connection has no
// other call, or, when the socket takes no more, a goroutine that waits for it.
// While one writes, the next write gathers.

// kick has the output written. The lock is held.
func (c *conn) kick() {
	if c.parsing || c.writing || c.dirty {
		return
	}
	c.dirty = true
	c.s.flushers.add(c)
}

// kickInline is kick for a goroutine that may write itself. It returns true if
// the caller now has the token, and is to call flush without the lock.
func (c *conn) kickInline() bool {
	if c.parsing || c.writing || c.dirty {
		return false
	}
	if c.calls == 0 && len(c.attention) == 0 && c.s.alone() {
		c.writing = true
		return true
	}
	c.dirty = true
	c.s.flushers.add(c)
	return false
}

// surrender gives the writing token back. The lock is held.
func (c *conn) surrender() {
	c.writing = false
	if c.closed {
		c.written.Broadcast()
	}
}

// token takes the writing token if it is free.
func (c *conn) token() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.writing {
		return false
	}
	c.writing = true
	return true
}

// flushNow writes if nobody does.
func (c *conn) flushNow() {
	if c.token() {
		c.flush(false)
	}
}

// flushRounds is how often one goroutine writes to a connection before others
// have their turn: there are few flushers, and the reader has to read.
const flushRounds = 8

// flush writes until nothing is left, and gives the token back, or to somebody
// who can wait. Inline says that the caller is a handler, which must not be made
// to call receivers.
func (c *conn) flush(inline bool) {
	for rounds := 0; ; rounds++ {
		if !inline {
			c.attend()
			c.resume()
		}
		c.mu.Lock()
		if inline && (len(c.attention) > 0 || c.resumable()) || rounds == flushRounds {
			c.handOver()
			c.mu.Unlock()
			return
		}
		if c.broken {
			c.out.bytes = 0
		} else {
			c.fill()
		}
		if c.out.empty() && !c.wireWaits() {
			if len(c.attention) > 0 || c.resumable() {
				c.mu.Unlock()
				continue
			}
			c.surrender()
			quit := c.quit && !c.closed
			c.mu.Unlock()
			c.nudge()
			if quit {
				c.fail(nil)
			}
			return
		}
		c.out.takeAll(&c.batch)
		c.replies = 0
		broken := c.broken
		c.mu.Unlock()
		c.left = c.batch.parts
		if broken {
			c.told(false)
			continue
		}
		if all, err := c.w.write(&c.left, false); err != nil {
			c.brokenBy()
		} else if !all {
			c.mu.Lock()
			c.blocked = true
			c.mu.Unlock()
			go c.flushWaiting()
			return
		} else {
			c.told(true)
		}
	}
}

// flushWaiting has the rest of a batch written however long that takes, and then
// all that has gathered.
func (c *conn) flushWaiting() {
	if _, err := c.w.write(&c.left, true); err != nil {
		c.brokenBy()
	} else {
		c.told(true)
	}
	c.mu.Lock()
	c.blocked = false
	c.mu.Unlock()
	c.flush(false)
	c.nudge()
}

// handOver gives the token, and what is to be done, to a flusher. The lock is
// held.
func (c *conn) handOver() {
	c.surrender()
	c.kick()
}

// brokenBy ends the connection after a failed write.
func (c *conn) brokenBy() {
	c.mu.Lock()
	c.broken = true
	c.mu.Unlock()
	c.hangUp()
	c.told(false)
}

// told tells the senders what became of the batch.
func (c *conn) told(written bool) {
	b := &c.batch
	if written {
		m := c.s.metrics
		m.writes.Add(1)
		m.sent.Add(int64(b.bytes))
		c.earned.Add(int64(b.bytes))
	}
	var now time.Time
	for i := range b.sent {
		r := &b.sent[i]
		if r.fn != nil {
			r.fn()
		}
		if r.stream != nil && written {
			if now.IsZero() {
				now = c.s.o.Clock.Now()
			}
			r.stream.bidi.wrote(r, now)
		}
	}
	c.left = nil
	b.release()
}

// wireWaits says that the wire itself has something to write. Only TLS does.
func (c *conn) wireWaits() bool {
	t, ok := c.w.(*tlsWire)
	return ok && !c.broken && (t.pipe.waiting() || len(t.out) > 0)
}

// attend has the streams looked at that asked for it.
func (c *conn) attend() {
	c.mu.Lock()
	list := c.attention
	if len(list) == 0 {
		c.mu.Unlock()
		return
	}
	c.attention = c.spare[:0]
	for _, s := range list {
		s.attending = false
	}
	c.mu.Unlock()
	for i, s := range list {
		s.bidi.attend()
		list[i] = nil
	}
	c.spare = list[:0]
}

// flushers write for goroutines that have other things to do.
type flushers struct {
	mu      sync.Mutex
	work    sync.Cond
	queue   []*conn
	idle    int
	stopped bool
	done    sync.WaitGroup
}

func newFlushers(n int) *flushers {
	f := &flushers{}
	f.work.L = &f.mu
	for range n {
		f.done.Go(f.run)
	}
	return f
}

// add has c flushed soon. The connection's lock may be held.
func (f *flushers) add(c *conn) {
	f.mu.Lock()
	f.queue = append(f.queue, c)
	if f.idle > 0 {
		f.work.Signal()
	}
	f.mu.Unlock()
}

func (f *flushers) run() {
	var own []*conn
	for {
		f.mu.Lock()
		for len(f.queue) == 0 {
			if f.stopped {
				f.mu.Unlock()
				return
			}
			f.idle++
			f.work.Wait()
			f.idle--
		}
		// One at a time while others could help, else all.
		if f.idle > 0 || len(f.queue) == 1 {
			own = append(own, f.queue[0])
			f.queue[0] = nil
			f.queue = f.queue[1:]
		} else {
			half := (len(f.queue) + 1) / 2
			own = append(own, f.queue[:half]...)
			n := copy(f.queue, f.queue[half:])
			clear(f.queue[n:])
			f.queue = f.queue[:n]
		}
		f.mu.Unlock()
		for i, c := range own {
			c.mu.Lock()
			c.dirty = false
			mine := !c.writing && !c.parsing
			if mine {
				c.writing = true
			}
			c.mu.Unlock()
			if mine {
				c.flush(false)
			}
			own[i] = nil
		}
		own = own[:0]
	}
}

// close ends the flushers once the queue is empty.
func (f *flushers) close() {
	f.mu.Lock()
	f.stopped = true
	f.work.Broadcast()
	f.mu.Unlock()
	f.done.Wait()
}
