package server

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/snapfile"
)

// Names inside a data directory. docs/format.md describes their content.
const (
	storeDir = snapfile.StoreDir // Pebble: revision log and small tables
	logDir   = "log"             // segments of the raft log
	indexDir = snapfile.IndexDir // checkpoints of the in-memory index
	lockFile = "LOCK"            // held while a process uses the directory
	// identityFile says whose directory it is. It appears once the raft log has
	// seen the birth of the cluster, and lies outside of it on purpose: a
	// directory that lost its log must not look like a new one.
	identityFile = "IDENTITY"

	logLockFile = "LOG-LOCK" // the same for the log's, which may lie elsewhere
)

var (
	// ErrLocked: another process uses the data directory.
	ErrLocked = errors.New("directory is in use")
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
				return nil, fmt.Errorf("--wal-dir=%s holds %s, a log of etcd: give another directory: %w", path, name, ErrEtcdData)
			}
		}
	}
	if err := makeDir(fs, path); err != nil {
		return nil, fmt.Errorf("--wal-dir=%s cannot be created: %w", path, err)
	}
	lock, err := fs.Lock(fs.PathJoin(path, logLockFile))
	if err != nil {
		return nil, fmt.Errorf("--wal-dir=%s: %w by another process (%w): stop it, or give another directory", path, ErrLocked, err)
	}
	return lock, nil
}

// makeDir creates a directory with those above it, and makes their names
// durable: a power cut must not take away the directory with all that was
// synced in it.
func makeDir(fs vfs.FS, path string) error {
	made := []string{path}
	for dir := fs.PathDir(path); ; dir = fs.PathDir(dir) {
		if _, err := fs.Stat(dir); err == nil || dir == fs.PathDir(dir) {
			break
		}
		made = append(made, dir)
	}
	if err := fs.MkdirAll(path, 0o700); err != nil {
		return err
	}
	for _, dir := range made {
		parent, err := fs.OpenDir(fs.PathDir(dir))
		if errors.Is(err, os.ErrPermission) {
			continue // somebody else made it, and may keep us from reading it
		}
		if err != nil {
			return err
		}
		if err := errors.Join(parent.Sync(), parent.Close()); err != nil {
			return fmt.Errorf("sync of the directory of %s: %w", dir, err)
		}
	}
	return nil
}

// join returns the path of a name inside the directory.
func (d *dataDir) join(name string) string { return d.fs.PathJoin(d.path, name) }

// Close releases the lock.
func (d *dataDir) Close() error { return d.lock.Close() }

// identityFormat is the text of the identity file.
const (
	identityFormat = "cluster %x\nmember %x\n"
	joinedLine     = "joined\n" // follows if the member joined
)

// readIdentity returns what the identity file says; ok is false if there is none.
func (d *dataDir) readIdentity() (id identity, ok bool, err error) {
	path := d.join(identityFile)
	f, err := d.fs.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return identity{}, false, nil
	}
	if err != nil {
		return identity{}, false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	text, err := io.ReadAll(f)
	if err != nil {
		return identity{}, false, fmt.Errorf("%s: %w", path, err)
	}
	if _, err := fmt.Sscanf(string(text), identityFormat, &id.cluster, &id.member); err != nil {
		return identity{}, false, fmt.Errorf("%s: %q names no cluster and member: delete the file if the raft log is in place: %w", path, text, err)
	}
	id.joined = strings.HasSuffix(string(text), "\n"+joinedLine)
	return id, true, nil
}

// writeIdentity writes the identity file, whole or not at all.
func (d *dataDir) writeIdentity(id identity) error {
	path, temp := d.join(identityFile), d.join(identityFile+".tmp")
	f, err := d.fs.Create(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	text := fmt.Sprintf(identityFormat, id.cluster, id.member)
	if id.joined {
		text += joinedLine
	}
	_, err = io.WriteString(f, text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = d.fs.Rename(temp, path)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	dir, err := d.fs.OpenDir(d.path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
