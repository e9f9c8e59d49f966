package member

import (
	"bytes"
	"sync"
)

const tailBytes = 64 << 10

// tail keeps the last tailBytes written to it, and closes seen once the phrase has been written.
type tail struct {
	phrase []byte
	seen   chan struct{}

	mu    sync.Mutex
	kept  []byte // at most 2*tailBytes
	found bool
}

func newTail(phrase string) *tail {
	return &tail{phrase: []byte(phrase), seen: make(chan struct{})}
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	from := max(0, len(t.kept)-len(t.phrase)) // the phrase may lie across two writes
	t.kept = append(t.kept, p...)
	if !t.found && bytes.Contains(t.kept[from:], t.phrase) {
		t.found = true
		close(t.seen)
	}
	if len(t.kept) > 2*tailBytes {
		t.kept = append(t.kept[:0], t.kept[len(t.kept)-tailBytes:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.kept)
}

func (t *tail) holds(text string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Contains(t.kept, []byte(text))
}
