package storage

import (
	"errors"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// manifestFS makes the name of a new MANIFEST durable with its first sync.
// Pebble next creates a marker file that names the MANIFEST, and syncs the
// directory once for both; a power cut before that may keep the marker and not
// what it names, and the store could not be opened any more. Common file
// systems keep the order, POSIX does not promise it.
type manifestFS struct{ vfs.FS }

const manifestPrefix = "MANIFEST-"

// Create implements vfs.FS.
func (fs manifestFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, c)
	if err != nil || !strings.HasPrefix(fs.PathBase(name), manifestPrefix) {
		return f, err
	}
	return &manifestFile{File: f, fs: fs.FS, dir: fs.PathDir(name)}, nil
}

// Unwrap implements vfs.FS.
func (fs manifestFS) Unwrap() vfs.FS { return fs.FS }

type manifestFile struct {
	vfs.File
	fs    vfs.FS
	dir   string
	named bool // the directory was synced
}

// Sync implements vfs.File.
func (f *manifestFile) Sync() error { return f.sync(f.File.Sync) }

// SyncData implements vfs.File.
func (f *manifestFile) SyncData() error { return f.sync(f.File.SyncData) }

func (f *manifestFile) sync(data func() error) error {
	if err := data(); err != nil || f.named {
		return err
	}
	dir, err := f.fs.OpenDir(f.dir)
	if err != nil {
		return err
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return err
	}
	f.named = true
	return nil
}
