package storage

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// brokenFS has no room for tables while it is broken, and counts who asks for some.
type brokenFS struct {
	vfs.FS
	broken atomic.Bool
	asked  atomic.Int64
}

var errBroken = errors.New("input/output error")

func (fs *brokenFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if strings.HasSuffix(name, ".sst") {
		fs.asked.Add(1)
		if fs.broken.Load() {
			return nil, errBroken
		}
	}
	return fs.FS.Create(name, c)
}

func (fs *brokenFS) Unwrap() vfs.FS { return fs.FS }

// TestFlushThatFails: who asks for a flush is told after a while that it cannot be, Pebble tries with pauses meanwhile, and once it can be
// all is well again.
func TestFlushThatFails(t *testing.T) {
	t.Parallel()
	fs := &brokenFS{FS: vfs.NewMem()}
	s, err := Open(Options{FS: fs, Dir: "store"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	set(t, s, "a", "1")
	fs.broken.Store(true)
	before, began := fs.asked.Load(), time.Now()
	if err := s.Flush(); !errors.Is(err, errBroken) {
		t.Fatalf("a flush that is not possible ends with %v", err)
	}
	took, tries := time.Since(began), fs.asked.Load()-before
	if most := int64(10 + took/retryMost); tries < 3 || tries > most {
		t.Errorf("%d tries in %v, want 3 to %d", tries, took, most)
	}
	fs.broken.Store(false)
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	set(t, s, "b", "2")
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := s.background.hopeless(time.Time{}); err != nil || s.background.retry != 0 {
		t.Errorf("a failure that is over is remembered: %v, %v", err, s.background.retry)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestHopeless: only what fails again and again, for a while, says that waiting is of no use.
func TestHopeless(t *testing.T) {
	now := time.Now()
	long, just := now.Add(-time.Hour), now.Add(-retryMost)
	for name, c := range map[string]struct {
		fails failing
		asked time.Time
		want  bool
	}{
		"all is well":           {asked: long},
		"fails again and again": {failing{long, just, errBroken}, long, true},
		"asked just now":        {failing{long, just, errBroken}, just, false},
		"fails since just now":  {failing{just, just, errBroken}, long, false},
		"failed once":           {failing{long, long, errBroken}, long, false},
	} {
		for kind := range works {
			b := newBackground(nil)
			b.fails[kind] = c.fails
			if err := b.hopeless(c.asked); (err != nil) != c.want || err != nil && !errors.Is(err, errBroken) {
				t.Errorf("%s, kind %d: %v", name, kind, err)
			}
		}
	}
}

// TestCloseThatFails: a store that cannot be flushed is closed all the same, and holds what was flushed before.
func TestCloseThatFails(t *testing.T) {
	t.Parallel()
	fs := &brokenFS{FS: vfs.NewMem()}
	s, err := Open(Options{FS: fs, Dir: "store"})
	if err != nil {
		t.Fatal(err)
	}
	set(t, s, "a", "1")
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	set(t, s, "b", "2")
	fs.broken.Store(true)
	if err := s.Close(); !errors.Is(err, errBroken) {
		t.Fatalf("it ends with %v", err)
	}
	tries := fs.asked.Load()
	time.Sleep(2 * retryMost) // the pause after which the next try would be
	if n := fs.asked.Load(); n != tries {
		t.Errorf("%d tries after the end", n-tries)
	}
	fs.broken.Store(false)
	s, err = Open(Options{FS: fs, Dir: "store"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	want(t, s, "a", "1")
	if _, err := s.Get(RowKey(TableMeta, []byte("b"))); !errors.Is(err, ErrNotFound) {
		t.Errorf("what was not flushed: %v", err)
	}
}
