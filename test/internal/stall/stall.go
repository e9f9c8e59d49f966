// Package stall watches the machine beside a test that judges times. Its watch wants next to nothing, a moment of a core and a small write to
// the disk, many times a second: when even that comes late, everybody on the machine waited, and it is no fault of the program under test.
package stall

import (
	"errors"
	"os"
	"sync"
	"time"
)

const (
	every = 20 * time.Millisecond
	short = 100 * time.Millisecond // less is every machine's daily life, and not noted
)

// Stall is a time in which the machine gave nothing.
type Stall struct{ Begin, End time.Time }

// Length is how long it lasted.
func (s Stall) Length() time.Duration { return s.End.Sub(s.Begin) }

// Watch notes stalls until Close.
type Watch struct {
	file *os.File
	stop chan struct{}
	done sync.WaitGroup

	mu     sync.Mutex
	due    time.Time // of the beat that is awaited or under way
	stalls []Stall
	failed error
}

// Begin begins a watch. It writes where temporary files are.
func Begin() (*Watch, error) {
	file, err := os.CreateTemp("", "engram-stall-")
	if err != nil {
		return nil, err
	}
	w := &Watch{file: file, stop: make(chan struct{}), due: time.Now().Add(every)}
	w.done.Go(w.run)
	return w, nil
}

func (w *Watch) run() {
	block := make([]byte, 512)
	for {
		select {
		case <-w.stop:
			return
		case <-time.After(every):
		}
		_, err := w.file.WriteAt(block, 0)
		if err == nil {
			err = w.file.Sync()
		}
		w.mu.Lock()
		now := time.Now()
		if s := (Stall{w.due, now}); s.Length() >= short {
			w.stalls = append(w.stalls, s)
		}
		w.due = now.Add(every)
		w.failed = err
		w.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Since are the stalls that ended after from, and the one that lasts.
func (w *Watch) Since(from time.Time) (out []Stall) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.stalls {
		if s.End.After(from) {
			out = append(out, s)
		}
	}
	if s := (Stall{w.due, time.Now()}); w.failed == nil && s.Length() >= short {
		out = append(out, s)
	}
	return out
}

// Longest is how long the longest of the stalls since from was.
func (w *Watch) Longest(from time.Time) (longest time.Duration) {
	for _, s := range w.Since(from) {
		longest = max(longest, s.Length())
	}
	return longest
}

// Close ends the watch. It is an error if it could not write.
func (w *Watch) Close() error {
	close(w.stop)
	w.done.Wait()
	return errors.Join(w.failed, w.file.Close(), os.Remove(w.file.Name()))
}
