package server

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/datadir"
)

// Names inside a data directory. docs/format.md describes their content.
const (
	storeDir    = datadir.Store
	logDir      = datadir.Log
	indexDir    = datadir.Index
	lockFile    = datadir.Lock
	logLockFile = datadir.LogLock
)

var (
	// ErrLocked: another process uses the data directory.
	ErrLocked = errors.New("directory is in use")
	// ErrEtcdData: the directory of the log holds one of etcd.
	ErrEtcdData = errors.New("directory belongs to etcd")
)

// dataDir is a locked data directory.
type dataDir struct {
	fs   vfs.FS
	path string
	lock io.Closer
}

// openDataDir creates the directory if need be and locks it.
func openDataDir(fs vfs.FS, path string) (*dataDir, error) {
	if err := makeDir(fs, path); err != nil {
		return nil, fmt.Errorf("--data-dir=%s cannot be created: %w", path, err)
	}
	lock, err := fs.Lock(fs.PathJoin(path, lockFile))
	if err != nil {
		return nil, fmt.Errorf("--data-dir=%s: %w by another process (%w): stop it, or give another directory", path, ErrLocked, err)
	}
	return &dataDir{fs: fs, path: path, lock: lock}, nil
}

// openLogDir creates and locks the directory of the raft log. Two members with
// data directories of their own may still be given one --wal-dir.
func openLogDir(fs vfs.FS, path string) (io.Closer, error) {
	if names, err := fs.List(path); err == nil {
		for _, name := range names {
			if strings.HasSuffix(name, ".wal") {
				return nil, fmt.Errorf("--wal-dir=%s holds %s, a log of etcd, beside Engram's data: give another directory, or move it away: %w", path, name, ErrEtcdData)
			}
		}
	}
	if err := makeDir(fs, path); err != nil {
		return nil, fmt.Errorf("--wal-dir=%s cannot be created: %w", path, err)
	}
	return lockLogDir(fs, path)
}

func lockLogDir(fs vfs.FS, path string) (io.Closer, error) {
	lock, err := fs.Lock(fs.PathJoin(path, logLockFile))
	if err != nil {
		return nil, fmt.Errorf("--wal-dir=%s: %w by another process (%w): stop it, or give another directory", path, ErrLocked, err)
	}
	return lock, nil
}

// makeDir creates a directory, durably.
func makeDir(fs vfs.FS, path string) error { return datadir.Make(fs, path) }

// join returns the path of a name inside the directory.
func (d *dataDir) join(name string) string { return d.fs.PathJoin(d.path, name) }

// Close releases the lock.
func (d *dataDir) Close() error { return d.lock.Close() }

// readIdentity returns what the identity file says; ok is false if there is none.
func (d *dataDir) readIdentity() (id identity, ok bool, err error) {
	is, ok, err := datadir.ReadIdentity(d.fs, d.path)
	return identity{cluster: is.Cluster, member: is.Member, joined: is.Joined}, ok, err
}

// writeIdentity writes the identity file, whole or not at all.
func (d *dataDir) writeIdentity(id identity) error {
	return datadir.WriteIdentity(d.fs, d.path, datadir.Identity{Cluster: id.cluster, Member: id.member, Joined: id.joined})
}
