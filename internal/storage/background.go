package storage

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

const (
	// Before Pebble's next try it waits for retryFirst, and for twice as long after each failure, up to retryMost.
	retryFirst = 10 * time.Millisecond
	retryMost  = time.Second
	// patience is how long a flush or the end of the store waits while nothing that Pebble tries succeeds.
	patience = 3 * time.Second
	// tellEvery is the time between two words about failures.
	tellEvery = time.Second
)

// background is how Pebble's flushes and compactions fare. Pebble tries again what failed: at once and for ever, be it that the disk
// is full, that it is broken or that the directory is gone, and who waits for a flush waits meanwhile.
type background struct {
	log *slog.Logger

	mu     sync.Mutex
	fails  [works]failing
	last   time.Time     // when something failed
	retry  time.Duration // what is tried waits so long after that
	told   time.Time
	silent int // failures since that were not told

	closing chan struct{}
}

// The kinds of work that fare differently: a full disk may have room for one of them.
const (
	flushes = iota
	compactions
	works
)

// failing is a kind of work of which nothing succeeded since, and which failed last then; zero if all is well.
type failing struct {
	since, last time.Time
	err         error
}

func newBackground(log *slog.Logger) *background {
	return &background{log: log, closing: make(chan struct{})}
}

// ended notes how a work of that kind ended.
func (b *background) ended(kind int, err error) {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err == nil {
		b.fails[kind] = failing{}
		if b.fails == ([works]failing{}) {
			b.retry = 0
		}
		return
	}
	if b.fails[kind].since.IsZero() {
		b.fails[kind].since = now
	}
	b.fails[kind].last, b.fails[kind].err = now, err
	b.last, b.retry = now, min(max(2*b.retry, retryFirst), retryMost)
}

// tell logs a failure, once in tellEvery at most.
func (b *background) tell(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if now.Sub(b.told) < tellEvery {
		b.silent++
		return
	}
	b.log.Warn("storage background work failed, it is tried again", "error", err, "silent", b.silent)
	b.told, b.silent = now, 0
}

// holdBack returns when the next try is due.
func (b *background) holdBack() {
	b.mu.Lock()
	pause := b.retry - time.Since(b.last)
	b.mu.Unlock()
	if pause <= 0 {
		return
	}
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-b.closing:
	}
}

// hopeless is why it is of no use to wait any longer for what was asked of Pebble then; nil if it is. What did not fail for some time
// is not tried any more, or takes its time.
func (b *background) hopeless(asked time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.fails {
		if from := later(f.since, asked); f.err != nil && time.Since(from) > patience && time.Since(f.last) < 2*retryMost {
			return fmt.Errorf("nothing has succeeded for %v: %w", time.Since(f.since).Round(time.Millisecond), f.err)
		}
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// wait is do, or an error if that is hopeless: do then goes on for as long as Pebble tries.
func (b *background) wait(do func() error) error {
	asked, done := time.Now(), make(chan error, 1)
	go func() { done <- do() }()
	look := time.NewTicker(patience / 10)
	defer look.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-look.C:
			if err := b.hopeless(asked); err != nil {
				return err
			}
		}
	}
}

// heldBackFS is a file system on which nobody begins a file right after a failure.
type heldBackFS struct {
	vfs.FS
	background *background
}

// Create implements vfs.FS.
func (fs heldBackFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	fs.background.holdBack()
	return fs.FS.Create(name, c)
}

// Unwrap implements vfs.FS.
func (fs heldBackFS) Unwrap() vfs.FS { return fs.FS }
