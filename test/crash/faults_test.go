package crash

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// fault is one kind of file operation that fails.
type fault struct {
	name  string
	match func(op errorfs.Op) bool
	// ends says that the member must stop with an error; if it is false the
	// member goes on once the operation works again.
	ends bool
	// fatal says that it ends in Pebble, by OnFatal.
	fatal bool
}

func isWrite(k errorfs.OpKind) bool {
	return k == errorfs.OpFileWrite || k == errorfs.OpFileWriteAt
}

func isSync(k errorfs.OpKind) bool {
	return k == errorfs.OpFileSync || k == errorfs.OpFileSyncData || k == errorfs.OpFileSyncTo
}

func on(kind func(errorfs.OpKind) bool, name func(path string) bool) func(errorfs.Op) bool {
	return func(op errorfs.Op) bool { return kind(op.Kind) && name(op.Path) }
}

func isTable(path string) bool    { return strings.HasSuffix(path, ".sst") }
func isManifest(path string) bool { return strings.HasPrefix(filepath.Base(path), "MANIFEST-") }

// isSegment goes by the directory: an open segment is known by the name it was
// prepared under.
func isSegment(path string) bool { return filepath.Base(filepath.Dir(path)) == "log" }

// patience is how long is waited at most for what clients do, or a fault leads to.
const patience = 2 * time.Minute

var faults = []fault{
	{name: "sstable write", match: on(isWrite, isTable)},
	{name: "sstable sync", match: on(isSync, isTable)},
	{name: "MANIFEST write", match: on(isWrite, isManifest), ends: true, fatal: true},
	{name: "MANIFEST sync", match: on(isSync, isManifest), ends: true, fatal: true},
	{name: "log write", match: on(isWrite, isSegment), ends: true},
	{name: "log sync", match: on(isSync, isSegment), ends: true},
}

// TestFaults lets one kind of file operation fail, under load. Nothing that was
// acknowledged is lost when the member is opened again on a disk that works.
func TestFaults(t *testing.T) {
	for _, f := range faults {
		for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOSPC} {
			t.Run(fmt.Sprintf("%s %v", f.name, errno), func(t *testing.T) {
				times := 1
				if long() {
					times = 5
				}
				for _, seed := range seeds(t, times) {
					replay(t, seed)
					faultRun(t, seed, f, errno)
				}
			})
		}
	}
}

func faultRun(t *testing.T, seed uint64, f fault, errno syscall.Errno) {
	d, w := newDisk(seed), newLoad(seed)
	w.padding = 3000
	fatal := make(chan error, 1)
	h, err := startHost(tinySeams(d.fs(), func(err error) {
		fatal <- err
		select {} // as when the process has ended
	}))
	if err != nil {
		t.Fatal(err)
	}
	l, err := w.begin(h.addr, 400)
	if err != nil {
		t.Fatal(err)
	}
	l.wait(t, h.ended)

	var failures, healed atomic.Int64
	skip := int64(d.rnd.IntN(5))
	enough := make(chan struct{})
	d.setHook(func(op errorfs.Op) error {
		if !f.match(op) || healed.Load() != 0 {
			return nil
		}
		n := failures.Add(1) - skip
		if n <= 0 {
			return nil
		}
		if n == 3 {
			close(enough)
		}
		return &fs.PathError{Op: "injected", Path: op.Path, Err: errno}
	})
	late := time.After(patience)
	switch {
	case f.fatal:
		select {
		case err := <-fatal:
			if !strings.Contains(err.Error(), errno.Error()) {
				t.Errorf("the store says that it cannot go on, and not why: %v", err)
			}
		case <-late:
			t.Fatal("the store goes on")
		}
	case f.ends:
		select {
		case <-h.ended:
			if !errors.Is(h.err, errno) {
				t.Errorf("the member ended, and not by what happened: %v", h.err)
			}
		case <-late:
			t.Fatal("the member goes on")
		}
	default:
		select {
		case <-enough:
		case <-h.ended: // it may stop, with a reason
			if !errors.Is(h.err, errno) {
				t.Errorf("the member ended, and not by what happened: %v", h.err)
			}
		case <-late:
			t.Fatal("nothing failed")
		}
		healed.Store(1)
		w.ledger.mu.Lock()
		now := w.ledger.count
		w.ledger.mu.Unlock()
		for deadline := time.Now().Add(patience); ; {
			w.ledger.mu.Lock()
			count := w.ledger.count
			w.ledger.mu.Unlock()
			if count > now+300 {
				break
			}
			if time.Now().After(deadline) || w.failed() != nil {
				t.Fatalf("the member does not go on with a disk that works again: %d answers since, %v", count-now, w.failed())
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	d.cut(w)
	l.gone()
	if !f.fatal { // the other one stands still for ever
		h.drop(t)
	}
	d.next()
	h, err = startHost(tinySeams(d.fs(), nil))
	if err != nil {
		t.Fatal(err)
	}
	defer h.drop(t)
	if err := w.end(h.addr, t.Logf); err != nil && !errors.Is(err, errTooLittle) {
		t.Fatal(err)
	}
}

// TestNoAnswerAfterFailedSync takes a closer look at the worst moment: what a
// failed sync of the log was to make durable is never acknowledged, and nothing
// after it either.
func TestNoAnswerAfterFailedSync(t *testing.T) {
	for _, seed := range seeds(t, 3) {
		replay(t, seed)
		d, w := newDisk(seed), newLoad(seed)
		h, err := startHost(tinySeams(d.fs(), nil))
		if err != nil {
			t.Fatal(err)
		}
		l, err := w.begin(h.addr, 100)
		if err != nil {
			t.Fatal(err)
		}
		l.wait(t, h.ended)
		var once atomic.Bool
		d.setHook(func(op errorfs.Op) error {
			if !isSync(op.Kind) || !isSegment(op.Path) || !once.CompareAndSwap(false, true) {
				return nil
			}
			d.cut(w) // before anything else can become durable
			w.ledger.thaw()
			return syscall.EIO
		})
		select {
		case <-h.ended:
		case <-time.After(patience):
			t.Fatal("the member goes on")
		}
		l.gone()
		if !errors.Is(h.err, syscall.EIO) {
			t.Errorf("the member ended with %v", h.err)
		}
		d.next()
		if h, err = startHost(tinySeams(d.fs(), nil)); err != nil {
			t.Fatal(err)
		}
		err = w.end(h.addr, t.Logf)
		h.drop(t)
		if err != nil && !errors.Is(err, errTooLittle) {
			t.Fatal(err)
		}
	}
}
