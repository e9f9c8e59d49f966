// Package backup is the file that an operator saves, and what becomes of it: it is
// written whole or not at all, checked, looked at, and made into data
// directories of new members.
//
// A backup is etcd's: its database, and behind that the SHA-256 of it. snapfile
// reads and writes the database; who asks for a backup, and how it travels, is
// not known here. Invariants:
//
//	K1: a file has the name of a backup only if all of it was checked and synced.
//	K2: a data directory that was restored is whole, or no member starts on it.
//	K3: what is not what was saved is refused before anything is made of it.
package backup

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/engram-kv/engram/internal/snapfile"
)

var (
	// ErrNoSum says that no checksum stands behind the database. The text is etcd's.
	ErrNoSum = errors.New("snapshot missing hash but --skip-hash-check=false")
	// ErrSum says that the file is not what was saved.
	ErrSum = errors.New("backup: wrong checksum")
	// ErrEmpty says that the file has no bytes.
	ErrEmpty = errors.New("backup: empty file")
)

// File is a backup that is open for reading.
type File struct {
	path string
	f    *os.File
	size int64
}

// Open opens a backup. Nothing of it is read.
func Open(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case info.IsDir():
		err = fmt.Errorf("%s is a directory: name the file of a backup; a data directory's database is in member/snap/db of it", path)
	case info.Size() == 0:
		err = fmt.Errorf("%w: nothing was written to %s: take another backup", ErrEmpty, path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &File{path: path, f: f, size: info.Size()}, nil
}

// Close closes the file.
func (b *File) Close() error { return b.f.Close() }

// HasSum says whether a checksum stands behind the database: not if the file is
// one copied from a data directory, or was cut off.
func (b *File) HasSum() bool { return snapfile.HasSum(b.size) }

// CheckSum reads the whole file and compares it with its checksum: ErrNoSum,
// ErrSum.
func (b *File) CheckSum(ctx context.Context) error {
	if !b.HasSum() {
		return fmt.Errorf("%w: no checksum stands behind the %d bytes of %s: if it was cut off, take another backup; if it was copied from the data directory of a member that was stopped, use --skip-hash-check",
			ErrNoSum, b.size, b.path)
	}
	s, err := snapfile.CheckSum(ctx, b.f, b.size)
	if err != nil {
		return fmt.Errorf("%s: %w", b.path, err)
	}
	if s.Got != s.Want {
		return &sumError{path: b.path, sum: s}
	}
	return nil
}

// sumError begins with etcd's text.
type sumError struct {
	path string
	sum  snapfile.Sum
}

func (e *sumError) Error() string {
	return fmt.Sprintf("expected sha256 %v, got %v: %s is not what was saved: it was damaged or cut off, take another backup", e.sum.Want, e.sum.Got, e.path)
}

func (e *sumError) Is(target error) bool { return target == ErrSum }

// Inspect reads and checks all of the database.
func (b *File) Inspect(ctx context.Context) (snapfile.Info, error) {
	info, err := snapfile.Inspect(ctx, b.f, b.size)
	return info, b.explain(err)
}

// HashKV returns what a member restored from the file answers for a revision, 0
// meaning the last.
func (b *File) HashKV(ctx context.Context, rev int64) (snapfile.HashKV, error) {
	h, err := snapfile.HashOfEtcd(ctx, b.f, b.size, rev)
	return h, b.explain(err)
}

// explain says which file an error is about, and what to do.
func (b *File) explain(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, snapfile.ErrDamaged):
		return fmt.Errorf("%s: %w: take another backup", b.path, err)
	}
	return fmt.Errorf("%s: %w", b.path, err)
}
