// Package etcddir reads the data directory of an etcd member, 3.5 to 3.7, that
// is stopped: its write-ahead log, its snapshot files, and what its database
// says of itself.
//
// It changes nothing there, and knows neither stores nor servers. Dir is the
// main type: Open finds out everything that is to be known before the first
// entry is taken, Entries gives the entries. The formats are told in
// state-machine.md, sections 5 and 7. Invariants:
//
//	E1: what Open accepts is a whole member: the database, every entry after the
//	    snapshot that the log begins with, and every entry known to be committed.
//	E2: nothing but the unfinished last write of a crash is ever left out, and
//	    Dir says what was.
//	E3: an etcd that runs on the directory keeps Open from succeeding, and no etcd
//	    can start there until Close.
//	E4: no bytes make it panic or take memory beyond the size of a file.
package etcddir

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/storage"
)

var (
	// ErrDamaged says that a file is not what etcd wrote. It comes with a
	// *DamageError where there is a place to name.
	ErrDamaged = errors.New("etcddir: damaged")
	// ErrIncomplete says that files are missing, or are of different moments or
	// members.
	ErrIncomplete = errors.New("etcddir: incomplete")
	// ErrVersion says that another release of etcd wrote it than those that can
	// be read.
	ErrVersion = errors.New("etcddir: release not supported")
	// ErrInUse says that an etcd runs on the directory.
	ErrInUse = errors.New("etcddir: in use")
)

// Options say where an etcd member's data is.
type Options struct {
	FS storage.FS
	// Dir is etcd's --data-dir.
	Dir string
	// WALDir is etcd's --wal-dir; empty means member/wal below Dir.
	WALDir string
}

// Names below Options.Dir.
const (
	// MemberDir holds all that etcd keeps in a data directory.
	MemberDir = "member"

	snapDir = "snap"
	walDir  = "wal"
	dbFile  = "db"
)

// Dir is the data of a stopped etcd member, locked.
type Dir struct {
	fs      storage.FS
	walPath string
	snaps   string
	locks   locks
	db      storage.File // nil: there is none

	ClusterID, MemberID uint64
	// DB is the database; it is empty if etcd had not made one yet.
	DB Database
	// Hard is the last hard state of the log.
	Hard HardState
	// Snapshot is the one after which the entries begin, index 0 if they begin
	// with the first.
	Snapshot Snapshot
	// Last is the index of the last entry, LastTerm its term.
	Last, LastTerm uint64
	Segments       []Segment
	// Torn is the write that a crash interrupted, nil if there is none.
	Torn *Torn
	// V2 is the membership as etcd 3.5 knows it, from its own store; nil for
	// later releases, which do not go by it.
	V2 *MembersV2
}

// Database is what etcd's database says of itself.
type Database struct {
	Path  string
	Bytes int64
	// Received says that it came from a leader and had not yet taken the place
	// of the old one.
	Received bool
	snapfile.EtcdInfo
}

// Release is the etcd that wrote the data, as "3.6"; empty if it had written too
// little to tell.
func (d *Dir) Release() string {
	switch {
	case d.DB.StorageVersion != "":
		return d.DB.StorageVersion
	case d.DB.Term > 0:
		return "3.5"
	}
	return ""
}

// Commit is the index up to which entries are known to be committed: what the
// database holds was, and a commit index that moved alone was not synced.
func (d *Dir) Commit() uint64 { return max(d.Hard.Commit, d.DB.Applied) }

// HardState is raft's, as the log has it last.
type HardState struct{ Term, Vote, Commit uint64 }

// Snapshot is a snapshot record of the log.
type Snapshot struct {
	Index, Term uint64
	// ConfState is nil in a record of index 0, and in those of etcd 3.4, some of
	// which may have survived an upgrade.
	ConfState *raftpb.ConfState
}

// Segment is a file of the log.
type Segment struct {
	Name     string
	Sequence uint64
	Index    uint64 // of the first entry that was to come when it began
	Bytes    int64  // that hold records
}

// Torn is what an interrupted write left at the end of the log.
type Torn struct {
	File   string
	Offset int64
	Why    string
}

// Exists says whether a data directory holds etcd's data: a directory named
// "member", or segments of a log in walDir, if that is given.
func Exists(fs storage.FS, dir, walDir string) (bool, error) {
	if info, err := fs.Stat(fs.PathJoin(dir, MemberDir)); err == nil {
		if info.IsDir() {
			return true, nil
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return false, err
	}
	if walDir == "" {
		return false, nil
	}
	names, err := listWAL(fs, walDir)
	return len(names) > 0, err
}

// Open locks a member's data and reads all of its log. The caller closes Dir.
func Open(ctx context.Context, o Options) (_ *Dir, err error) {
	d := &Dir{fs: o.FS, snaps: o.FS.PathJoin(o.Dir, MemberDir, snapDir)}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if _, err := o.FS.Stat(o.FS.PathJoin(o.Dir, MemberDir)); err != nil {
		return nil, fmt.Errorf("%w: etcd keeps its database in %s: give etcd's --data-dir, or another --wal-dir than %s: %w",
			ErrIncomplete, o.FS.PathJoin(o.Dir, MemberDir), o.WALDir, err)
	}
	names, err := d.findWAL(o)
	if err != nil {
		return nil, err
	}
	if err := d.lock(names); err != nil {
		return nil, err
	}
	seen, err := d.scan(ctx, names)
	if err != nil {
		return nil, err
	}
	if d.db, d.DB, err = d.openDB(ctx, d.fs.PathJoin(d.snaps, dbFile)); err != nil {
		return nil, err
	}
	d.Snapshot = seen.start(d.Hard.Commit)
	if err := d.takeReceived(ctx); err != nil {
		return nil, err
	}
	if err := d.checkRelease(); err != nil {
		return nil, err
	}
	if err := d.check(ctx); err != nil {
		return nil, err
	}
	if d.Release() == "3.5" {
		d.V2, err = d.membersV2(ctx)
	}
	return d, err
}

// findWAL finds the directory of the log, and its segments.
func (d *Dir) findWAL(o Options) (names []string, err error) {
	inside := o.FS.PathJoin(o.Dir, MemberDir, walDir)
	if names, err = listWAL(o.FS, inside); err != nil {
		return nil, err
	}
	d.walPath = inside
	if o.WALDir != "" && o.WALDir != inside {
		apart, err := listWAL(o.FS, o.WALDir)
		if err != nil {
			return nil, err
		}
		switch {
		case len(apart) > 0 && same(o.FS, inside, o.WALDir): // the one is a link to the other
			d.walPath = o.WALDir
		case len(apart) > 0 && len(names) > 0:
			return nil, fmt.Errorf("%w: both %s and --wal-dir=%s hold a log of etcd: move away the one that etcd did not use last", ErrIncomplete, inside, o.WALDir)
		case len(apart) > 0:
			names, d.walPath = apart, o.WALDir
		}
	}
	if len(names) > 0 {
		return names, nil
	}
	where, flag := inside, "if etcd had a --wal-dir, give the same one"
	if o.WALDir != "" {
		where += " and " + o.WALDir
		flag = "put the log back"
	}
	if _, err := o.FS.Stat(o.FS.PathJoin(d.snaps, dbFile)); err == nil {
		return nil, fmt.Errorf("%w: %s has a database, but there is no log of etcd (*.wal) in %s: %s; without it, make a new cluster of the database by `snapshot restore`",
			ErrIncomplete, d.snaps, where, flag)
	}
	return nil, fmt.Errorf("%w: there is no log of etcd (*.wal) in %s: %s, or delete %s if etcd never ran on it",
		ErrIncomplete, where, flag, o.FS.PathJoin(o.Dir, MemberDir))
}

// same says whether two paths lead to one directory. os.SameFile does not know
// what an FS returns.
func same(fs storage.FS, a, b string) bool {
	var stats [2]*syscall.Stat_t
	for i, path := range [...]string{a, b} {
		info, err := fs.Stat(path)
		if err != nil {
			return false
		}
		var ok bool
		if stats[i], ok = info.Sys().(*syscall.Stat_t); !ok {
			return false
		}
	}
	return stats[0].Dev == stats[1].Dev && stats[0].Ino == stats[1].Ino
}

// WALPath is the directory of the log.
func (d *Dir) WALPath() string { return d.walPath }

// openDB opens a database; file is nil if there is none.
func (d *Dir) openDB(ctx context.Context, path string) (file storage.File, db Database, err error) {
	db.Path = path
	file, err = d.fs.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, db, nil
	}
	if err != nil {
		return nil, db, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
			file = nil
		}
	}()
	info, err := file.Stat()
	if err != nil {
		return file, db, err
	}
	if db.Bytes = info.Size(); db.Bytes == 0 { // etcd was ended while it made it
		return nil, db, file.Close()
	}
	if db.EtcdInfo, err = snapfile.StatEtcd(ctx, file, db.Bytes); err != nil {
		return file, db, fmt.Errorf("%s: %w: take another member's data, or restore a backup", path, err)
	}
	return file, db, nil
}

// takeReceived goes on with what etcd does at its next start: a database that
// came from the leader takes the place of one that is older than the snapshot.
func (d *Dir) takeReceived(ctx context.Context) error {
	s := d.Snapshot.Index
	if s <= d.DB.Applied {
		return nil
	}
	own := "there is no database"
	if d.db != nil {
		own = fmt.Sprintf("%s holds index %d", d.DB.Path, d.DB.Applied)
	}
	path := d.fs.PathJoin(d.snaps, fmt.Sprintf("%016x.snap.db", s))
	file, db, err := d.openDB(ctx, path)
	if err != nil {
		return err
	}
	if file == nil {
		return fmt.Errorf("%w: the log goes on after the snapshot of index %d, %s, and %s is not there: an older copy of the database was put back, or a snapshot was lost; "+
			"remove this member from its cluster and add a new one, or restore a backup", ErrIncomplete, s, own, path)
	}
	if db.Applied < s {
		return errors.Join(fmt.Errorf("%w: %s holds index %d, the log goes on after index %d: remove this member from its cluster and add a new one, or restore a backup",
			ErrIncomplete, path, db.Applied, s), file.Close())
	}
	if d.db != nil {
		if err := d.db.Close(); err != nil {
			return errors.Join(err, file.Close())
		}
	}
	db.Received = true
	d.db, d.DB = file, db
	return nil
}

// checkRelease refuses what is older or newer than known.
func (d *Dir) checkRelease() error {
	if d.DB.Applied > 0 && d.DB.Term == 0 && d.DB.StorageVersion == "" {
		return fmt.Errorf("%w: %s is of etcd 3.4 or older: upgrade to etcd 3.5 first, start it once, and stop it", ErrVersion, d.DB.Path)
	}
	return nil // StatEtcd knows the newest
}

// Database reads the database. It is nil if there is none, and then the log has
// every entry from the first.
func (d *Dir) Database() storage.File { return d.db }

// Close lets go of the data.
func (d *Dir) Close() error {
	err := d.locks.release()
	if d.db != nil {
		err = errors.Join(err, d.db.Close())
		d.db = nil
	}
	return err
}

// listWAL lists the segments in a directory, none if it does not exist.
func listWAL(fs storage.FS, dir string) (names []string, err error) {
	all, err := fs.List(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, name := range all {
		if strings.HasSuffix(name, segmentEnd) {
			names = append(names, name)
		}
	}
	return names, err
}
