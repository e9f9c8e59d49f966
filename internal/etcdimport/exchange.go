package etcdimport

import (
	"golang.org/x/sys/unix"

	"github.com/engram-kv/engram/internal/storage"
)

// exchanges says whether paths of fs are those of the operating system.
func exchanges(fs storage.FS) bool { return fs == storage.DefaultFS }

// exchange swaps two names in one step.
func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}
