package storage

import (
	"github.com/cockroachdb/pebble/v2/vfs"
)

// File is a file of an FS.
type File = vfs.File

// syncEvery is how much may be written to a large file before it goes to the
// disk. Left to the end, all of it would go at once, and the sync of a log
// beside it would wait that long.
const syncEvery = 1 << 20

// CreateFile creates a large file to be written from its beginning to its end.
// What is written goes to the disk as it comes; only Sync promises it.
func CreateFile(fs FS, path, category string) (File, error) {
	f, err := fs.Create(path, vfs.DiskWriteCategory(category))
	if err != nil {
		return nil, err
	}
	return vfs.NewSyncingFile(f, vfs.SyncingFileOptions{NoSyncOnClose: true, BytesPerSync: syncEvery}), nil
}

// OpenFile opens a file to be read from its beginning to its end.
func OpenFile(fs FS, path string) (File, error) { return fs.Open(path, vfs.SequentialReadsOption) }

// Link gives a file that nobody changes a second name, or copies it if the file
// system has no hard links.
func Link(fs FS, from, to string) error { return vfs.LinkOrCopy(fs, from, to) }
