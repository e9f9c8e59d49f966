// Package datadir is the layout of a member's data directory: which names are in
// it, and whose directory it is. docs/format.md describes what is in the files.
//
// It is for whoever makes or examines a directory, with or without a member that
// runs. It knows no request and no cluster.
package datadir

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/storage"
)

// Names inside a data directory.
const (
	Store = snapfile.StoreDir // Pebble: revision log and small tables
	Index = snapfile.IndexDir // checkpoints of the in-memory index
	Log   = "log"             // segments of the raft log
	Lock  = "LOCK"            // held while a process uses the directory
	// IdentityFile says whose directory it is. It appears once the raft log has
	// seen the birth of the cluster, and lies outside of it on purpose: a
	// directory that lost its log must not look like a new one.
	IdentityFile = "IDENTITY"
	// LogLock is for the directory of the log, which may lie elsewhere.
	LogLock = "LOG-LOCK"
)

// Identity says which member of which cluster a directory belongs to.
type Identity struct {
	Cluster, Member uint64
	// Joined says that the member came to a cluster that was there, so its log has
	// no first entries of its own.
	Joined bool
}

// The text of the identity file.
const (
	identityFormat = "cluster %x\nmember %x\n"
	joinedLine     = "joined\n" // follows if the member joined
)

// ReadIdentity returns what the identity file of a directory says; ok is false if
// there is none.
func ReadIdentity(fs storage.FS, dir string) (id Identity, ok bool, err error) {
	path := fs.PathJoin(dir, IdentityFile)
	f, err := fs.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return Identity{}, false, nil
	}
	if err != nil {
		return Identity{}, false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	text, err := io.ReadAll(io.LimitReader(f, 4<<10))
	if err != nil {
		return Identity{}, false, fmt.Errorf("%s: %w", path, err)
	}
	if _, err := fmt.Sscanf(string(text), identityFormat, &id.Cluster, &id.Member); err != nil {
		return Identity{}, false, fmt.Errorf("%s: %q names no cluster and member: delete the file if the raft log is in place: %w", path, text, err)
	}
	id.Joined = strings.HasSuffix(string(text), "\n"+joinedLine)
	return id, true, nil
}

// WriteIdentity writes the identity file of a directory, whole or not at all.
func WriteIdentity(fs storage.FS, dir string, id Identity) error {
	path := fs.PathJoin(dir, IdentityFile)
	temp := path + TempSuffix
	f, err := storage.CreateFile(fs, temp, "identity")
	if err != nil {
		return err
	}
	text := fmt.Sprintf(identityFormat, id.Cluster, id.Member)
	if id.Joined {
		text += joinedLine
	}
	_, err = io.WriteString(f, text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = fs.Rename(temp, path)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return Sync(fs, dir)
}

// Sync makes the names in a directory durable.
func Sync(fs storage.FS, dir string) error {
	d, err := fs.OpenDir(dir)
	if err != nil {
		return err
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync of directory %s: %w", dir, err)
	}
	return nil
}

// Make creates a directory with those above it, and makes their names durable: a
// power cut must not take away the directory with all that was synced in it.
func Make(fs storage.FS, path string) error {
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
		err := Sync(fs, fs.PathDir(dir))
		if errors.Is(err, os.ErrPermission) {
			continue // somebody else made it, and may keep us from reading it
		}
		if err != nil {
			return err
		}
	}
	return nil
}
