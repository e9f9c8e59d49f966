package storage

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// TestRecentDiskBytes: while a sync of the MANIFEST hangs, what was told before is told; afterwards what is so.
func TestRecentDiskBytes(t *testing.T) {
	var hangs atomic.Bool
	hanging, goOn := make(chan struct{}), make(chan struct{})
	fs := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind == errorfs.OpFileSync && strings.Contains(op.Path, "MANIFEST") && hangs.CompareAndSwap(true, false) {
			close(hanging)
			<-goOn
		}
		return nil
	}))
	s := mustOpen(t, Options{FS: fs, Dir: "db"})
	before := s.RecentDiskBytes()
	set(t, s, "a", "value")
	hangs.Store(true)
	flushed := make(chan error, 1)
	go func() { flushed <- s.Flush() }()
	<-hanging
	told := make(chan uint64, 1)
	go func() {
		s.RecentDiskBytes()
		told <- s.RecentDiskBytes()
	}()
	select {
	case got := <-told:
		if got != before {
			t.Errorf("while the disk hangs %d bytes, want %d as before", got, before)
		}
	case <-time.After(time.Minute):
		t.Error("nothing is told while the disk hangs")
	}
	close(goOn)
	if err := <-flushed; err != nil {
		t.Fatal(err)
	}
	// The answer that hung may be the first, and what is so changes once more when what the flush replaced is deleted.
	for until := time.Now().Add(time.Minute); s.RecentDiskBytes() != s.DiskBytes(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("what is so is not told")
		}
	}
	if now := s.DiskBytes(); now <= before {
		t.Errorf("%d bytes after a flush, %d before", now, before)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}
