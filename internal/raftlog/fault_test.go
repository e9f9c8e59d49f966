package raftlog

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// TestFaults fails the n-th file operation of each kind, for every n that a
// workload reaches, and then takes the power away.
func TestFaults(t *testing.T) {
	kinds := map[string]func(errorfs.Op) bool{
		"write":       func(o errorfs.Op) bool { return o.Kind == errorfs.OpFileWriteAt },
		"sync":        func(o errorfs.Op) bool { return o.Kind == errorfs.OpFileSync || o.Kind == errorfs.OpFileSyncData },
		"create":      func(o errorfs.Op) bool { return o.Kind == errorfs.OpOpen && strings.Contains(o.Path, SparePrefix) },
		"preallocate": func(o errorfs.Op) bool { return o.Kind == errorfs.OpFilePreallocate },
		"rename":      func(o errorfs.Op) bool { return o.Kind == errorfs.OpRename },
		"remove":      func(o errorfs.Op) bool { return o.Kind == errorfs.OpRemove },
		"read":        func(o errorfs.Op) bool { return o.Kind == errorfs.OpFileReadAt || o.Kind == errorfs.OpOpen },
	}
	for name, match := range kinds {
		t.Run(name, func(t *testing.T) {
			poisoned, survived := 0, 0
			for n := 1; ; n++ {
				hit, poison := faultRun(t, uint64(n), n, match)
				if !hit {
					break
				}
				if poison {
					poisoned++
				} else {
					survived++
				}
				if n > 400 {
					break
				}
			}
			t.Logf("%d runs were poisoned, %d went on", poisoned, survived)
			if poisoned+survived < 3 {
				t.Error("the workload reaches too few of these operations")
			}
			if (name == "write" || name == "sync") && poisoned < 20 {
				t.Error("a failed write or sync did not stop the log")
			}
		})
	}
}

// faultRun fails the n-th matching operation. It reports whether there was one,
// and whether the log stopped for it.
func faultRun(t *testing.T, seed uint64, n int, match func(errorfs.Op) bool) (hit, poisoned bool) {
	t.Helper()
	injected := fmt.Errorf("operation %d failed: %w", n, syscall.EIO)
	armed := true
	inject := func(op errorfs.Op) error {
		if !armed || !match(op) {
			return nil
		}
		if n--; n != 0 {
			return nil
		}
		hit = true
		return injected
	}
	c := &crasher{
		g:     &generator{rand.New(rand.NewPCG(seed, 3)), map[string]int{}},
		mem:   vfs.NewCrashableMem(),
		wrap:  func(fs vfs.FS) vfs.FS { return errorfs.Wrap(fs, errorfs.InjectorFunc(inject)) },
		where: "after a fault",
	}
	c.acknowledged()
	o := c.options()
	o.SegmentBytes = 4096
	var err error
	if c.log, err = Open(o); err == nil {
		for range 60 {
			if err = c.step(); err != nil {
				break
			}
		}
		if err != nil && !errors.Is(err, injected) {
			t.Fatalf("the failure is hidden: %v", err)
		}
		poisoned = checkPoison(t, c.log, injected)
		if err := c.log.Abandon(); err != nil && !errors.Is(err, injected) {
			t.Fatal(err)
		}
	} else if !errors.Is(err, injected) {
		t.Fatal(err)
	}
	armed = false
	c.crash("after a fault")
	c.mem = crashable(c.clone)
	c.wrap = keepFS
	if err := c.life(); err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	return hit, poisoned
}

// checkPoison checks that the log is as a whole stopped or not, and that it can
// be read in both cases.
func checkPoison(t *testing.T, l *Log, injected error) bool {
	t.Helper()
	last, _ := l.LastIndex()
	if _, err := l.Term(last); err != nil {
		t.Fatal(err)
	}
	if _, _, err := l.InitialState(); err != nil {
		t.Fatal(err)
	}
	l.wmu.Lock()
	poisoned := l.err != nil
	l.wmu.Unlock()
	if !poisoned {
		return false
	}
	first, _ := l.FirstIndex()
	_, writeErr := l.Write([]Append{{Entries: entries(last+1, last+1, 1000, 5)}})
	for name, err := range map[string]error{
		"Write": writeErr, "Sync": l.Sync(), "Mark": l.Mark(), "Compact": l.Compact(first), "Prepare": l.Prepare(),
	} {
		if !errors.Is(err, injected) || !strings.Contains(err.Error(), "restart this member") {
			t.Fatalf("%s after the failure: %v", name, err)
		}
	}
	if again, _ := l.LastIndex(); again != last {
		t.Fatalf("the stopped log grew from %d to %d", last, again)
	}
	return true
}

// TestFullDisk runs out of space where segments are made, and gets it back.
func TestFullDisk(t *testing.T) {
	for _, kind := range []errorfs.OpKind{errorfs.OpOpen, errorfs.OpFilePreallocate} {
		full := false
		fs := errorfs.Wrap(vfs.NewMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
			if full && op.Kind == kind && strings.Contains(op.Path, SparePrefix) {
				return &vfsError{op.Path, syscall.ENOSPC}
			}
			return nil
		}))
		o := testOptions(fs)
		l := closeAtEnd(t, mustOpen(t, o))
		full = true
		index := uint64(1)
		for {
			_, err := l.Write([]Append{{Entries: entries(index, index, 1, 500)}})
			if errors.Is(err, ErrNoSpace) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			index++
		}
		before := readAll(t, l)
		if before.entries[len(before.entries)-1].index != index-1 {
			t.Fatal("the refused entry is there")
		}
		if err := l.Prepare(); !errors.Is(err, ErrNoSpace) {
			t.Fatal(err)
		}
		// What was written can still be synced, marked and compacted.
		if err := errors.Join(l.Sync(), l.Mark(), l.Compact(2)); err != nil {
			t.Fatal(err)
		}
		full = false
		write(t, l, Append{Entries: entries(index, index, 1, 500)})
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		l = closeAtEnd(t, mustOpen(t, o))
		if last, _ := l.LastIndex(); last != index {
			t.Fatalf("last is %d, want %d", last, index)
		}
		if names, _ := fs.List(testDir); len(names) != l.Segments() {
			t.Fatalf("files left over: %v", names)
		}
	}
}

type vfsError struct {
	path string
	err  error
}

func (e *vfsError) Error() string { return e.path + ": " + e.err.Error() }
func (e *vfsError) Unwrap() error { return e.err }
