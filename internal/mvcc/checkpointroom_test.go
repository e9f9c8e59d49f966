package mvcc

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// On a disk with too little room a compaction goes on without a checkpoint, and
// what was written of one does not go on taking space.
func TestCheckpointWithoutRoom(t *testing.T) {
	for _, full := range []bool{false, true} { // the disk itself has no room, or too little by what it is told
		t.Run(fmt.Sprint("full=", full), func(t *testing.T) {
			room := int64(1 << 30)
			fail := errorfs.Toggle{Injector: errorfs.InjectorFunc(func(op errorfs.Op) error {
				if op.Kind == errorfs.OpFileWrite && strings.HasSuffix(op.Path, CheckpointTemp) {
					return errorfs.ErrInjected
				}
				return nil
			})}
			f := newFixture(t, func(o *Options) {
				o.FS = errorfs.Wrap(o.FS, &fail)
				o.Room = func() int64 { return room }
			})
			f.put("a", "1", "b", "1")
			f.reopen()
			f.check(f.saverHolds(true))
			f.del("a")
			f.put("c", "1")
			if full {
				fail.On()
			} else {
				room = 30
			}
			f.compact(f.Root().Revision())
			f.work()
			f.check(f.saverHolds(false))
			if _, err := f.fs.Stat(f.saver.path(CheckpointTemp)); err == nil {
				t.Error("the beginning of a checkpoint was left")
			}
			fail.Off()
			if !full { // a stop is no failure for want of what need not be
				f.check(f.Close())
			}
			f.check(f.storage.Flush())
			f.check(f.storage.Abandon())
			room = 1 << 30
			f.open()
			if got := f.Root().Keys(); got != 2 {
				t.Errorf("%d keys, want 2", got)
			}
			f.put("d", "1")
			f.reopen()
			f.check(f.saverHolds(true))
		})
	}
}
