package etcddir

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/engram-kv/engram/internal/storage"
)

// locks are files that are locked as etcd locks them: the database by flock, the
// segments of the log by locks of an open file. The locks here are shared ones,
// since that needs no right to write; they conflict with those of an etcd.
type locks []storage.File

// lock locks the database and the last segment.
func (d *Dir) lock(segments []string) error {
	last := ""
	for _, name := range segments {
		last = max(last, name)
	}
	for _, l := range [...]struct {
		path string
		lock func(fd int) error
	}{
		{d.fs.PathJoin(d.snaps, dbFile), func(fd int) error { return unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB) }},
		{d.fs.PathJoin(d.walPath, last), func(fd int) error {
			l := unix.Flock_t{Type: unix.F_RDLCK, Whence: io.SeekStart}
			return unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &l)
		}},
	} {
		f, err := d.fs.Open(l.path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		d.locks = append(d.locks, f)
		fd := int(f.Fd())
		if fd < 0 {
			continue // a file system in memory, where no other process is
		}
		switch err := l.lock(fd); {
		case errors.Is(err, unix.EWOULDBLOCK), errors.Is(err, unix.EACCES):
			return fmt.Errorf("%w: another process has locked %s: stop etcd, and see that nothing starts it again", ErrInUse, l.path)
		case errors.Is(err, unix.ENOTSUP), errors.Is(err, unix.ENOLCK), errors.Is(err, unix.EINVAL):
			continue // no locks on this file system, and then etcd has none either
		case err != nil:
			return fmt.Errorf("locking %s: %w", l.path, err)
		}
	}
	return nil
}

func (l *locks) release() error {
	var errs []error
	for _, f := range *l {
		errs = append(errs, f.Close())
	}
	*l = nil
	return errors.Join(errs...)
}
