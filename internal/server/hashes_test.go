package server

import (
	"context"
	"errors"
	"testing"

	"github.com/engram-kv/engram/internal/mvcc"
)

// TestHashesAtOnce: hashes wait for one another, those of clients not for those of members, and give up with their caller.
func TestHashesAtOnce(t *testing.T) {
	t.Parallel()
	m := start(t, t.TempDir())
	defer stop(t, m)
	c := client(t, m)
	if _, err := c.Put(t.Context(), "a", "1"); err != nil {
		t.Fatal(err)
	}
	for range hashesAtOnce {
		if err := m.hashing.take(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { _, _, err := m.Hash(ctx); done <- err }()
	go func() { _, err := m.HashKV(ctx, 0); done <- err }()
	if _, err := m.pacedHashKV(t.Context(), 0); err != nil {
		t.Errorf("another member's hash beside those of clients: %v", err)
	}
	if _, err := m.HashKV(t.Context(), 1<<40); !errors.Is(err, mvcc.ErrFutureRevision) {
		t.Errorf("an answer that takes no reading: %v", err)
	}
	cancel()
	for range 2 {
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("a hash beside %d others, given up by its caller: %v", hashesAtOnce, err)
		}
	}
	for range hashesAtOnce {
		m.hashing.give()
	}
	if _, err := m.HashKV(t.Context(), 0); err != nil {
		t.Errorf("once the others are done: %v", err)
	}
}
