package server

import (
	"errors"
	"fmt"
	"io"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// Names inside a data directory. docs/format.md describes their content.
const (
	storeDir = "store" // Pebble: revision log and small tables
	logDir   = "log"   // segments of the raft log
	indexDir = "index" // checkpoints of the in-memory index
	lockFile = "LOCK"  // held while a process uses the directory
)

var (
	// ErrLocked: another process uses the data directory.
	ErrLocked = errors.New("data directory is in use")
	// ErrEtcdData: the directory holds an etcd member's data.
	ErrEtcdData = errors.New("data directory belongs to etcd")
)

// dataDir is a locked data directory.
type dataDir struct {
	fs   vfs.FS
	path string
	lock io.Closer
}

// openDataDir creates the directory if need be and locks it. A directory that
// etcd wrote is refused: starting an empty member beside its data would look as
// if the data were gone.
func openDataDir(fs vfs.FS, path string) (*dataDir, error) {
	for _, sub := range []string{"wal", "snap"} {
		p := fs.PathJoin(path, "member", sub)
		if _, err := fs.Stat(p); err == nil {
			return nil, fmt.Errorf("%s exists, so --data-dir=%s holds an etcd member, which this version cannot import: give another --data-dir, or start etcd on this one: %w", p, path, ErrEtcdData)
		}
	}
	if err := fs.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir=%s cannot be created: %w", path, err)
	}
	lock, err := fs.Lock(fs.PathJoin(path, lockFile))
	if err != nil {
		return nil, fmt.Errorf("--data-dir=%s: %w by another process (%w): stop it, or give another directory", path, ErrLocked, err)
	}
	return &dataDir{fs: fs, path: path, lock: lock}, nil
}

// join returns the path of a name inside the directory.
func (d *dataDir) join(name string) string { return d.fs.PathJoin(d.path, name) }

// Close releases the lock.
func (d *dataDir) Close() error { return d.lock.Close() }
