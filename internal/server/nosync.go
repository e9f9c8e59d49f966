package server

import (
	"github.com/cockroachdb/pebble/v2/vfs"
)

// noSync is a file system on which nothing is synced (--unsafe-no-fsync).
type noSync struct{ vfs.FS }

func (fs noSync) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return unsynced(fs.FS.Create(name, c))
}

func (fs noSync) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return unsynced(fs.FS.OpenReadWrite(name, c, opts...))
}

func (fs noSync) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	return unsynced(fs.FS.ReuseForWrite(old, name, c))
}

func (fs noSync) OpenDir(name string) (vfs.File, error) { return unsynced(fs.FS.OpenDir(name)) }

func unsynced(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return noSyncFile{f}, nil
}

type noSyncFile struct{ vfs.File }

func (noSyncFile) Sync() error                { return nil }
func (noSyncFile) SyncData() error            { return nil }
func (noSyncFile) SyncTo(int64) (bool, error) { return true, nil }
