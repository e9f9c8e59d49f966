package rpc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// errBusy refuses a read that found no room for its answer in time.
var errBusy = errors.New("no room for the answer")

// budget bounds the bytes of responses that are being made or sent. Who finds
// no room waits in line, without a goroutine, until its deadline. A later,
// smaller request never overtakes an earlier one, so large ones are not starved.
type budget struct {
	limit   int64 // bytes
	waiting int   // longest line
	now     func() time.Time
	scarce  func() // called when somebody waits, or waited in vain; may be nil

	mu   sync.Mutex
	free int64
	line []*claim // oldest first
}

// claim is one place in the line.
type claim struct {
	bytes int64
	grant func(error)
	timer *time.Timer
}

func newBudget(limit int64, waiting int, now func() time.Time) *budget {
	return &budget{limit: limit, waiting: waiting, now: now, free: limit}
}

// acquire calls grant(nil) once n bytes are the caller's, who then releases
// them, or grant with an error that wraps errBusy when that cannot be, or not
// by the deadline. Grant may be called before acquire returns; it must not block.
func (b *budget) acquire(n int64, deadline time.Time, grant func(error)) {
	if n > b.limit {
		grant(fmt.Errorf("%w: it needs %d bytes, and all answers in flight may have %d (ask for fewer keys at a time)", errBusy, n, b.limit))
		return
	}
	b.mu.Lock()
	if len(b.line) == 0 && n <= b.free {
		b.free -= n
		b.mu.Unlock()
		grant(nil)
		return
	}
	if len(b.line) >= b.waiting {
		b.mu.Unlock()
		grant(fmt.Errorf("%w: %d answers already wait for it", errBusy, b.waiting))
		return
	}
	c := &claim{bytes: n, grant: grant}
	b.line = append(b.line, c)
	c.timer = time.AfterFunc(deadline.Sub(b.now()), func() { b.expire(c) })
	b.mu.Unlock()
	if b.scarce != nil {
		b.scarce()
	}
}

// try takes n bytes if they are free and nobody waits.
func (b *budget) try(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.line) > 0 || n > b.free {
		return false
	}
	b.free -= n
	return true
}

// available is how many bytes are free.
func (b *budget) available() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.free
}

// wait is acquire for a goroutine that can block.
func (b *budget) wait(ctx context.Context, n int64, deadline time.Time) error {
	got := make(chan error, 1)
	b.acquire(n, deadline, func(err error) { got <- err })
	select {
	case err := <-got:
		return err
	case <-ctx.Done():
		// The claim stays in line till its turn or its deadline.
		go func() {
			if <-got == nil {
				b.release(n)
			}
		}()
		return ctx.Err()
	}
}

// release gives n bytes back.
func (b *budget) release(n int64) {
	b.mu.Lock()
	b.free += n
	granted := b.advance()
	b.mu.Unlock()
	for _, grant := range granted {
		grant(nil)
	}
}

// advance serves the line as far as there is room. b.mu is held.
func (b *budget) advance() (granted []func(error)) {
	for len(b.line) > 0 && b.line[0].bytes <= b.free {
		c := b.line[0]
		b.line = slices.Delete(b.line, 0, 1)
		b.free -= c.bytes
		c.timer.Stop()
		granted = append(granted, c.grant)
	}
	return granted
}

// expire ends a claim whose time is up.
func (b *budget) expire(c *claim) {
	b.mu.Lock()
	at := slices.Index(b.line, c)
	if at < 0 { // granted at the same moment
		b.mu.Unlock()
		return
	}
	b.line = slices.Delete(b.line, at, at+1)
	granted := b.advance()
	b.mu.Unlock()
	if b.scarce != nil {
		b.scarce()
	}
	c.grant(fmt.Errorf("%w: the answers in flight took all of %d bytes until its deadline", errBusy, b.limit))
	for _, grant := range granted {
		grant(nil)
	}
}
