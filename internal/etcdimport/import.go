// Package etcdimport makes a member of Engram out of the data directory of a
// stopped etcd member: the same member of the same cluster, with all that etcd
// had acknowledged.
//
// It knows the files of both, and nothing of the network. Import does it, Check
// tells what Import would do. etcddir reads etcd's files; the store is filled by
// snapfile and brought up to the committed index by the state machine itself,
// and the log gets the same entries. Invariants:
//
//	I1: what etcd wrote is never changed, only given another name.
//	I2: until etcd's directory has its other name the import may be forgotten and
//	    begun again, and etcd may be started; from then on it is carried to its
//	    end by the next Import, and etcd cannot start there.
//	I3: an import that Import reports is durable and whole.
//	I4: a directory with data of both is refused.
package etcdimport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/etcddir"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
)

// ErrBoth says that a directory has data of etcd and of Engram.
var ErrBoth = errors.New("etcdimport: data of etcd and of Engram")

// ErrMoved says that etcd's data was imported from here, and what came of it is
// gone.
var ErrMoved = errors.New("etcdimport: etcd's data was imported before")

// ErrNoSpace says that the disk has no room for what would be written.
var ErrNoSpace = errors.New("etcdimport: not enough space")

// ErrRefused says that the data is whole, and still nothing can be made of it.
var ErrRefused = errors.New("etcdimport: cannot be imported")

// Options say what is imported, and how.
type Options struct {
	FS storage.FS
	// Dir is etcd's data directory, and becomes Engram's.
	Dir string
	// WALDir is --wal-dir, of both; empty means below Dir.
	WALDir string
	// State is how the state machine is set; it decides about entries that are
	// replayed as it would have decided when they came. Storage, MVCC, Publisher
	// and Logger are set here.
	State state.Options
	// ReserveBytes is what must be free when all is done.
	ReserveBytes uint64
	Logger       *slog.Logger
	// OnFatal is storage.Options.OnFatal.
	OnFatal func(error)
	// Name and PeerURLs are those of the flags; a warning says if the cluster
	// knows the member by others. Empty ones are not looked at.
	Name     string
	PeerURLs []string
}

// Names that are only there during an import.
const (
	tempDir    = datadir.ImportDir
	markerFile = datadir.ImportMarker // in tempDir: what takes the place of etcd's directory
	// movedDir begins the name that etcd's directory gets, movedWAL that of what
	// etcd had in a WALDir.
	movedDir = datadir.MovedMember
	movedWAL = datadir.MovedWAL
)

// Import imports what etcd left in a directory, or ends an import that a crash
// interrupted. The report is nil if there is nothing of etcd. The caller holds
// Engram's lock of the directory, which exists.
func Import(ctx context.Context, o Options) (*Report, error) {
	began := time.Now()
	if err := CheckWALDir(o.Dir, o.WALDir); err != nil {
		return nil, err
	}
	j, decided, err := o.pending()
	if err != nil {
		return nil, err
	}
	if decided {
		o.Logger.Info("ending an import of etcd's data that was interrupted", "dir", o.Dir, "etcd-data", j.Member)
		return nil, j.finish(o.FS)
	}
	there, err := etcddir.Exists(o.FS, o.Dir, o.WALDir)
	if err != nil {
		return nil, err
	}
	if !there {
		return nil, o.checkMoved()
	}
	if err := o.checkAlone(); err != nil {
		return nil, err
	}
	o.Logger.Info("the data directory is etcd's: importing it", "dir", o.Dir)
	d, err := etcddir.Open(ctx, etcddir.Options{FS: o.FS, Dir: o.Dir, WALDir: o.WALDir})
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }() // only read from
	r, err := o.importFrom(ctx, d, began)
	if err != nil {
		_, _, left := o.pending()
		return nil, errors.Join(err, left)
	}
	r.Took = time.Since(began)
	r.Log(o.Logger)
	return r, nil
}

// pending returns the import that is to be ended, and deletes what there is of
// one that is not decided: etcd may have run since.
func (o *Options) pending() (j *journal, decided bool, err error) {
	j, found, err := readJournal(o.FS, o.Dir)
	if err != nil {
		return nil, false, err
	}
	if found {
		if decided, err = j.moved(o.FS); err == nil && !decided {
			err = j.discard(o.FS)
		}
		if err != nil || decided {
			return j, decided, err
		}
	}
	if err := forget(o.FS, o.Dir, o.WALDir); err != nil {
		return nil, false, fmt.Errorf("deleting an import that was not ended: %w", err)
	}
	return nil, false, nil
}

func (o *Options) importFrom(ctx context.Context, d *etcddir.Dir, began time.Time) (*Report, error) {
	temp := o.FS.PathJoin(o.Dir, tempDir)
	logTemp := o.FS.PathJoin(temp, datadir.Log)
	if o.WALDir != "" {
		logTemp = o.FS.PathJoin(o.WALDir, tempDir)
	}
	if err := o.checkSpace(d, o.Dir, o.WALDir); err != nil {
		return nil, err
	}
	r, err := o.build(ctx, d, temp, logTemp)
	if err != nil {
		return nil, err
	}
	j := o.newJournal(d, began)
	r.MovedTo = o.FS.PathJoin(o.Dir, j.Member)
	if j.WAL != "" {
		r.WALMovedTo = o.FS.PathJoin(o.WALDir, j.WAL)
	}
	// It has joined: its first entries, if it has them, were written by etcd.
	id := datadir.Identity{Cluster: d.ClusterID, Member: d.MemberID, Joined: true}
	if err := datadir.WriteIdentity(o.FS, temp, id); err != nil {
		return nil, err
	}
	if err := j.writeMarker(o.FS); err != nil {
		return nil, err
	}
	if err := syncAll(o.FS, temp, o.Dir, o.WALDir); err != nil {
		return nil, err
	}
	if err := j.write(o.FS); err != nil {
		return nil, err
	}
	return r, j.finish(o.FS)
}

// checkMoved refuses a directory whose etcd data has been imported and where
// nothing is left of that: an empty member must not begin beside it.
func (o *Options) checkMoved() error {
	if _, err := o.FS.Stat(o.FS.PathJoin(o.Dir, datadir.IdentityFile)); err == nil || !errors.Is(err, os.ErrNotExist) {
		return err
	}
	names, err := o.FS.List(o.Dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasPrefix(name, movedDir) {
			return fmt.Errorf("%w: %s holds %s but no member of Engram: to import it again, give it the name %s (delete the file of that name first); to begin with nothing, move it elsewhere",
				ErrMoved, o.Dir, name, etcddir.MemberDir)
		}
	}
	return nil
}

// checkAlone refuses to import beside data of Engram.
func (o *Options) checkAlone() error {
	names, err := o.FS.List(o.Dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		switch name { // what publish gives a name
		case datadir.Store, datadir.Index, datadir.Log, datadir.IdentityFile:
			return fmt.Errorf("%w: %s has %s of etcd's and %s of Engram's: to go on with Engram, move %s elsewhere; to import it anew, move everything else elsewhere, %s first",
				ErrBoth, o.Dir, etcddir.MemberDir, name, etcddir.MemberDir, name)
		}
	}
	if o.WALDir == "" {
		return nil
	}
	if names, err = o.FS.List(o.WALDir); err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasSuffix(name, ".log") {
			return fmt.Errorf("%w: --wal-dir=%s has %s, a log of Engram's: give a directory of its own to each member", ErrBoth, o.WALDir, name)
		}
	}
	return nil
}

// CheckWALDir refuses a --wal-dir that would be moved away with etcd's directory.
func CheckWALDir(dir, walDir string) error {
	if walDir == "" {
		return nil
	}
	member, err := filepath.Abs(filepath.Join(dir, etcddir.MemberDir))
	if err != nil {
		return err
	}
	wal, err := filepath.Abs(walDir)
	if err != nil {
		return err
	}
	if strings.HasPrefix(wal+"/", member+"/") {
		return fmt.Errorf("%w: --wal-dir=%s lies in %s, which is etcd's and gets another name: give another one, or none for one below --data-dir; etcd's log is found without it",
			ErrRefused, walDir, member)
	}
	return nil
}

// Check tells what Import would do, and all that it would refuse: then there is an
// error, and a report of as much as was found, which is nil if that is nothing.
// It does all of it below scratch, which is deleted again, so both take the same
// time and space; the directory itself is only read.
func Check(ctx context.Context, o Options, scratch string) (r *Report, err error) {
	began := time.Now()
	if j, pending, err := readJournal(o.FS, o.Dir); err != nil {
		return nil, err
	} else if pending {
		return nil, fmt.Errorf("an import of %s was interrupted: start Engram on it, which ends it", j.dir)
	}
	there, err := etcddir.Exists(o.FS, o.Dir, o.WALDir)
	switch {
	case err != nil:
		return nil, err
	case !there:
		if err := o.checkMoved(); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("%w: %s has no directory %s: give etcd's --data-dir", ErrRefused, o.Dir, etcddir.MemberDir)
	}
	refused := errors.Join(CheckWALDir(o.Dir, o.WALDir), o.checkAlone())
	d, err := etcddir.Open(ctx, etcddir.Options{FS: o.FS, Dir: o.Dir, WALDir: o.WALDir})
	if err != nil {
		return nil, errors.Join(refused, err)
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	refused = errors.Join(refused, o.checkSpace(d, o.Dir, o.WALDir))
	if err := o.checkSpace(d, scratch, ""); err != nil {
		return newReport(d), errors.Join(refused, err)
	}
	defer func() { err = errors.Join(err, o.FS.RemoveAll(o.FS.PathJoin(scratch, tempDir))) }()
	r, err = o.build(ctx, d, o.FS.PathJoin(scratch, tempDir), o.FS.PathJoin(scratch, tempDir, datadir.Log))
	r.Took = time.Since(began)
	return r, errors.Join(refused, err)
}

// writeFile writes a small file and syncs it.
func writeFile(fs storage.FS, path string, text []byte) error {
	f, err := storage.CreateFile(fs, path, "etcd-import")
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

func readFile(fs storage.FS, path string) (_ []byte, err error) {
	f, err := fs.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return io.ReadAll(f)
}

// syncAll makes names durable in directories, of which some may be "".
func syncAll(fs storage.FS, dirs ...string) error {
	for _, dir := range dirs {
		if dir == "" {
			continue
		}
		if err := datadir.Sync(fs, dir); err != nil {
			return err
		}
	}
	return nil
}
