package backup

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/storage"
)

// syncEvery is how much is written before it goes to the disk. Left to the end, all of it would go at once, and whoever else syncs
// files there, a member its log, would wait that long.
const syncEvery = 4 << 20

// partSuffix ends the name of a backup that is being written, as in etcd.
const partSuffix = ".part"

// Piece is some bytes of a backup. Bytes are good until the next piece.
type Piece struct {
	Bytes []byte
	// Remaining is how many bytes of the database follow.
	Remaining int64
}

// Save writes what next returns, until io.EOF, to path, which it replaces: under
// another name until all of it is there, checked, and on the disk. If anything
// fails before, or ctx ends, nothing is left of it. If only what makes the name
// durable fails, the file stays, which is whole. Progress may be nil.
func Save(ctx context.Context, path string, next func() (Piece, error), progress func(done, of int64)) (info snapfile.Info, err error) {
	if old, err := os.Stat(path); err == nil && old.IsDir() {
		// etcd's words, which it finds after all bytes have come.
		return info, fmt.Errorf("could not rename %s to %s (rename %s %s: file exists)", path+partSuffix, path, path+partSuffix, path)
	}
	part, err := createPart(path + partSuffix)
	if err != nil {
		return info, err
	}
	named := false
	defer func() {
		if err != nil && !named {
			err = errors.Join(err, os.Remove(part.Name()))
		}
		err = errors.Join(err, part.Close()) // and with it the lock, the last
	}()
	dir, err := os.Open(filepath.Dir(path)) // now, as long as nothing is lost if that fails
	if err != nil {
		return info, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	w := &saver{f: part, sum: sha256.New(), progress: progress}
	if err := w.copy(ctx, next); err != nil {
		return info, err
	}
	if err := part.Sync(); err != nil {
		return info, fmt.Errorf("could not fsync snapshot: %w", err)
	}
	// From here on what counts is what the file gives back.
	if info, err = verify(ctx, part.Name()); err != nil {
		return info, err
	}
	if err := os.Rename(part.Name(), path); err != nil {
		return info, fmt.Errorf("could not rename %s to %s (%w)", part.Name(), path, err)
	}
	named = true
	if err := dir.Sync(); err != nil {
		return info, fmt.Errorf("%s is whole, but may have another name after a power cut: could not fsync its directory: %w", path, err)
	}
	return info, nil
}

// createPart creates the file to write to. What an interrupted save left there is
// overwritten, unless that goes on still.
func createPart(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("could not open %s (%w)", path, err)
		}
		ours, err := lockPart(f)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if !ours {
			if err := f.Close(); err != nil {
				return nil, err
			}
			continue
		}
		if err := f.Truncate(0); err != nil {
			return nil, errors.Join(fmt.Errorf("could not open %s (%w)", path, err), os.Remove(path), f.Close())
		}
		return f, nil
	}
}

// lockPart locks a file to write to. It is not ours if it lost its name before: then it is the backup of another save that ended, or
// what that one deleted.
func lockPart(f *os.File) (ours bool, err error) {
	path := f.Name()
	switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return false, fmt.Errorf("could not open %s (another process writes to it): wait for that one, or name another file", path)
	case errors.Is(err, unix.ENOTSUP), errors.Is(err, unix.ENOLCK): // no locks on this file system
	case err != nil:
		return false, fmt.Errorf("could not lock %s (%w)", path, err)
	}
	held, err := f.Stat()
	if err != nil {
		return false, fmt.Errorf("could not open %s (%w)", path, err)
	}
	named, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(held, named), err
}

// saver writes pieces and checks their sum: the last sumBytes are that of all
// before them.
type saver struct {
	f        *os.File
	size     int64
	synced   int64
	last     []byte // up to 32 bytes, which are not in sum yet
	sum      hash.Hash
	progress func(done, of int64)
}

func (s *saver) copy(ctx context.Context, next func() (Piece, error)) error {
	for first := true; ; first = false {
		if err := ctx.Err(); err != nil {
			return err
		}
		p, err := next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("could not write snapshot: %w", err)
		}
		of := s.size + int64(len(p.Bytes)) + p.Remaining
		if first {
			if err := checkRoom(filepath.Dir(s.f.Name()), of); err != nil {
				return err
			}
		}
		if _, err := s.f.Write(p.Bytes); err != nil {
			return fmt.Errorf("could not write snapshot: %w", err)
		}
		s.add(p.Bytes)
		if s.size-s.synced >= syncEvery {
			s.synced = s.size
			if err := s.f.Sync(); err != nil {
				return fmt.Errorf("could not fsync snapshot: %w", err)
			}
		}
		if s.progress != nil {
			s.progress(s.size, of)
		}
	}
	if !snapfile.HasSum(s.size) {
		return fmt.Errorf("sha256 checksum not found [bytes: %d]: the connection ended early; take it again", s.size)
	}
	if got := s.sum.Sum(nil); string(got) != string(s.last) {
		return &sumError{path: s.f.Name(), sum: snapfile.Sum{Got: [sha256.Size]byte(got), Want: [sha256.Size]byte(s.last)}}
	}
	return nil
}

func (s *saver) add(b []byte) {
	s.size += int64(len(b))
	s.last = append(s.last, b...)
	if over := len(s.last) - sha256.Size; over > 0 {
		s.sum.Write(s.last[:over])
		s.last = append(s.last[:0], s.last[over:]...)
	}
}

// checkRoom refuses what the disk has no room for, before it is full of it.
func checkRoom(dir string, bytes int64) error {
	usage, err := storage.DefaultFS.GetDiskUsage(dir)
	if err == nil && usage.AvailBytes < uint64(bytes) {
		return fmt.Errorf("%w: the backup has %d bytes, %s has room for %d: free some, or save to another disk", ErrSpace, bytes, dir, usage.AvailBytes)
	}
	return nil // or the file system does not say
}

// verify reads a file back and checks all of it.
func verify(ctx context.Context, path string) (info snapfile.Info, err error) {
	b, err := Open(path)
	if err != nil {
		return info, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	if err := b.CheckSum(ctx); err != nil {
		return info, err
	}
	return b.Inspect(ctx)
}
