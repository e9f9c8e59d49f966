package backup

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/storage"
)

// staging is a data directory that is being made.
//
// Where the target is not there yet, it is made beside it and renamed. A target
// that is there and empty may be a mount, or have an owner and a mode that are
// meant: it is made inside of that. There the identity stands before all else
// and the log, without which a member refuses such a directory, comes last.
type staging struct {
	fs     storage.FS
	target Target
	inside bool
	dir    string // what becomes the data directory, or its content
	logDir string
	apart  bool // the log is renamed by itself, to target.LogDir
	lock   io.Closer
}

const (
	stagingSuffix = datadir.RestoringSuffix // of a directory beside the target
	stagingInside = datadir.Restoring       // in the target
)

// stage begins a directory. What an interrupted restore left beside the target
// is deleted, whatever it is: it would become part of the directory.
func (r *Restore) stage(t Target, id datadir.Identity) (_ *staging, err error) {
	s := &staging{fs: r.FS, target: t, dir: t.DataDir + stagingSuffix}
	if _, err := r.FS.Stat(t.DataDir); err == nil {
		s.inside, s.dir = true, r.FS.PathJoin(t.DataDir, stagingInside)
	}
	inside, err := t.logInside()
	if err != nil {
		return nil, err
	}
	s.logDir = r.FS.PathJoin(s.dir, inside)
	if t.LogDir != "" && (s.inside || inside == "") {
		s.logDir, s.apart = t.LogDir+stagingSuffix, true
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.discard())
		}
	}()
	if s.inside {
		if err := datadir.WriteIdentity(r.FS, t.DataDir, id); err != nil {
			return nil, err
		}
	}
	if err := datadir.Make(r.FS, s.dir); err != nil {
		return nil, err
	}
	if s.lock, err = r.FS.Lock(r.FS.PathJoin(s.dir, datadir.Lock)); err != nil {
		s.dir, s.logDir = "", "" // another process's
		return nil, fmt.Errorf("another restore into %s is under way: %w", t.DataDir, err)
	}
	names, err := r.FS.List(s.dir)
	if err != nil {
		return nil, err
	}
	left := []string{s.logDir} // which may lie elsewhere
	for _, name := range names {
		if name != datadir.Lock {
			left = append(left, r.FS.PathJoin(s.dir, name))
		}
	}
	for _, path := range left {
		if err := r.FS.RemoveAll(path); err != nil {
			return nil, err
		}
	}
	for _, dir := range [...]string{r.FS.PathJoin(s.dir, datadir.Store), r.FS.PathJoin(s.dir, datadir.Index), s.logDir} {
		if err := datadir.Make(r.FS, dir); err != nil {
			return nil, err
		}
	}
	if s.inside {
		return s, nil
	}
	return s, datadir.WriteIdentity(r.FS, s.dir, id)
}

// sync makes the names of all that was made durable.
func (s *staging) sync() error {
	var errs []error
	for _, dir := range [...]string{s.fs.PathJoin(s.dir, datadir.Store), s.fs.PathJoin(s.dir, datadir.Index), s.logDir, s.dir, s.fs.PathDir(s.logDir), s.fs.PathDir(s.dir)} {
		errs = append(errs, datadir.Sync(s.fs, dir))
	}
	return errors.Join(errs...)
}

// commit gives what was made its name. What another process may have put at the
// place meanwhile is not replaced.
func (s *staging) commit() error {
	if s.inside {
		return s.commitInside()
	}
	if _, err := s.fs.Stat(s.target.DataDir); err == nil {
		return fmt.Errorf("%w: it was not there when the restore began", ErrNotEmpty)
	}
	if err := s.fs.Rename(s.dir, s.target.DataDir); err != nil {
		return err
	}
	s.dir = s.target.DataDir
	if err := datadir.Sync(s.fs, s.fs.PathDir(s.dir)); err != nil {
		return err
	}
	return s.commitLog()
}

// commitLog gives a log outside of the data directory its name.
func (s *staging) commitLog() error {
	if !s.apart {
		return nil
	}
	if err := s.fs.Rename(s.logDir, s.target.LogDir); err != nil {
		return err
	}
	s.logDir = s.target.LogDir
	return datadir.Sync(s.fs, s.fs.PathDir(s.logDir))
}

func (s *staging) commitInside() error {
	for _, name := range [...]string{datadir.Store, datadir.Index} {
		if err := s.fs.Rename(s.fs.PathJoin(s.dir, name), s.fs.PathJoin(s.target.DataDir, name)); err != nil {
			return err
		}
	}
	if err := datadir.Sync(s.fs, s.target.DataDir); err != nil {
		return err
	}
	if s.apart {
		if err := s.commitLog(); err != nil {
			return err
		}
	} else if err := s.fs.Rename(s.logDir, s.fs.PathJoin(s.target.DataDir, datadir.Log)); err != nil {
		return err
	}
	if err := s.unlock(); err != nil {
		return err
	}
	if err := s.fs.RemoveAll(s.dir); err != nil {
		return err
	}
	return datadir.Sync(s.fs, s.target.DataDir)
}

// discard deletes what was made, under whatever name it has by now. The target is
// as it was then.
func (s *staging) discard() error {
	errs := []error{s.unlock()}
	remove := func(path string) {
		if err := s.fs.RemoveAll(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if s.dir == "" {
		return errors.Join(errs...)
	}
	if s.apart {
		remove(s.logDir)
	}
	if s.inside {
		// The log first: without it no member starts on what is left.
		for _, name := range [...]string{datadir.Log, datadir.Store, datadir.Index, stagingInside, datadir.IdentityFile + datadir.TempSuffix, datadir.IdentityFile} {
			remove(s.fs.PathJoin(s.target.DataDir, name))
		}
	} else {
		remove(s.dir)
	}
	return errors.Join(errs...)
}

func (s *staging) unlock() error {
	if s.lock == nil {
		return nil
	}
	lock := s.lock
	s.lock = nil
	return lock.Close()
}
