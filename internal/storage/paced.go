package storage

import "github.com/cockroachdb/pebble/v2/vfs"

// compactionWrites is Pebble's category of what compactions write. Those that only move files write nothing, and flushes,
// which commits may wait for, have another.
const compactionWrites vfs.DiskWriteCategory = "pebble-compaction"

// pacedFS tells of what compactions write.
type pacedFS struct {
	vfs.FS
	compacting func() (wrote func(bytes int)) // nil: nobody asks
}

// Create implements vfs.FS.
func (fs pacedFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, c)
	if err != nil || fs.compacting == nil || c != compactionWrites {
		return f, err
	}
	return &pacedFile{f, fs.compacting()}, nil
}

// Unwrap implements vfs.FS.
func (fs pacedFS) Unwrap() vfs.FS { return fs.FS }

type pacedFile struct {
	vfs.File
	wrote func(bytes int)
}

// Write implements vfs.File.
func (f *pacedFile) Write(b []byte) (int, error) {
	n, err := f.File.Write(b)
	f.wrote(n)
	return n, err
}
