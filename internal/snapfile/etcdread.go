package snapfile

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/coreos/go-semver/semver"

	"github.com/engram-kv/engram/internal/storage"
)

// newest is the newest storage version whose file we know.
var newest = semver.Version{Major: 3, Minor: 7}

// ReadEtcd reads etcd's database file at path, of 3.5 to 3.7, into an empty
// store and makes it durable: member/snap/db of a member that is stopped, or a
// backup, with or without the checksum behind it. A member that runs must not
// write to it meanwhile.
//
// As in etcd, what it does not know is not looked at: other buckets, and other
// keys of the buckets auth, cluster and meta. In the rest a key that etcd could
// not read is an error.
func ReadEtcd(ctx context.Context, path string, into *storage.Store) (m Meta, err error) {
	file, err := os.Open(path)
	if err != nil {
		return m, fmt.Errorf("snapfile: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return m, fmt.Errorf("snapfile: %w", err)
	}
	return ReadEtcdAt(ctx, path, file, info.Size(), into)
}

// ReadEtcdAt is ReadEtcd for a file that is open, of size bytes. path is for
// errors.
func ReadEtcdAt(ctx context.Context, path string, r io.ReaderAt, size int64, into *storage.Store) (m Meta, err error) {
	if m, err = readEtcd(ctx, r, size, into); err != nil {
		cure := ""
		if errors.Is(err, ErrDamaged) {
			cure = ": take another backup, or another member's file"
		}
		return m, fmt.Errorf("snapfile: %s: %w%s", path, err, cure)
	}
	return m, nil
}

func readEtcd(ctx context.Context, r io.ReaderAt, size int64, into *storage.Store) (Meta, error) {
	if err := checkEmpty(into); err != nil {
		return Meta{}, err
	}
	f, err := openBolt(r, size)
	if err != nil {
		return Meta{}, err
	}
	e := &etcdReader{ctx: ctx, f: f, load: into.NewLoader()}
	if err := e.read(); err != nil {
		e.load.Discard()
		return Meta{}, err
	}
	if err := e.load.Finish(); err != nil {
		return Meta{}, err
	}
	m, _, err := metaOf(into)
	return m, err
}

type etcdReader struct {
	ctx     context.Context
	f       *boltFile
	load    *storage.Loader
	buckets map[string]bucket
	value   []byte
	disk    []byte
	last    revision // of the last record
}

// source is a bucket and the table that its rows go to, in the order of the
// tables on disk.
type source struct {
	bucket string
	table  storage.Table
	check  func(key, value []byte) (wanted bool, err error)
}

var sources = [...]source{
	{bucketAlarm, storage.TableAlarm, checkAlarm},
	{bucketAuth, storage.TableAuth, checkAuth},
	{bucketAuthRoles, storage.TableAuthRole, checkRole},
	{bucketAuthUsers, storage.TableAuthUser, checkUser},
	{bucketCluster, storage.TableCluster, checkCluster},
	{bucketLease, storage.TableLease, checkLease},
	{bucketMembers, storage.TableMember, checkMember},
	{bucketMembersRemoved, storage.TableMemberRemoved, checkRemoved},
}

func (e *etcdReader) read() (err error) {
	known := map[string]bool{bucketKey: true, bucketMeta: true}
	for _, s := range sources {
		known[s.bucket] = true
	}
	if e.buckets, err = e.f.buckets(e.ctx, func(name []byte) bool { return known[string(name)] }); err != nil {
		return fmt.Errorf("list of buckets: %w", err)
	}
	// A running etcd has all of them and makes those that are missing. A file
	// without these two was never its database.
	for _, name := range [...]string{bucketKey, bucketMeta} {
		if _, ok := e.buckets[name]; !ok {
			return damaged("it has no bucket %s: it is no database of etcd 3", name)
		}
	}
	if err := e.meta(); err != nil {
		return err
	}
	for _, s := range sources {
		err := e.bucket(s.bucket, func(key, value []byte) error {
			wanted, err := s.check(key, value)
			if err != nil || !wanted {
				return err
			}
			return e.load.Set(storage.RowKey(s.table, key), value)
		})
		if err != nil {
			return err
		}
	}
	return e.bucket(bucketKey, e.revision)
}

// bucket gives the rows of a bucket, none if there is no such bucket.
func (e *etcdReader) bucket(name string, fn addFunc) error {
	b, ok := e.buckets[name]
	if !ok {
		return nil
	}
	err := e.f.rows(e.ctx, b, func(key, value []byte) error {
		if err := fn(key, value); err != nil {
			return fmt.Errorf("key %.60q: %w", key, err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("bucket %s: %w", name, err)
	}
	return nil
}

// meta reads the bucket "meta" and writes our table of that name.
func (e *etcdReader) meta() error {
	var index, term uint64
	compact := map[string]int64{}
	err := e.bucket(bucketMeta, func(key, value []byte) (err error) {
		switch name := string(key); name {
		case metaConsistentIndex:
			index, err = be64(value)
		case metaTerm:
			term, err = be64(value)
		case storage.MetaScheduledCompact, storage.MetaFinishedCompact: // etcd's names
			var main int64
			if main, _, _, err = parseBoltRevision(value); err == nil {
				compact[name] = main
			}
		case metaStorageVersion:
			err = checkStorageVersion(string(value))
		}
		return err
	})
	if err != nil {
		return err
	}
	if term > 0 && index == 0 {
		return damaged("bucket %s: %s is missing or 0 at term %d", bucketMeta, metaConsistentIndex, term)
	}
	if index > 0 {
		if err := e.load.Set(storage.RowKey(storage.TableMeta, []byte(storage.MetaApplied)), storage.AppendApplied(nil, index, term)); err != nil {
			return err
		}
	}
	for _, name := range [...]string{storage.MetaFinishedCompact, storage.MetaScheduledCompact} {
		if rev, ok := compact[name]; ok {
			if err := e.load.Set(storage.RowKey(storage.TableMeta, []byte(name)), binary.BigEndian.AppendUint64(nil, uint64(rev))); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkStorageVersion(text string) error {
	v, err := semver.NewVersion(text)
	if err != nil {
		return damaged("%q is no version: %w", text, err)
	}
	if v.Major > newest.Major || v.Major == newest.Major && v.Minor > newest.Minor {
		return fmt.Errorf("%w: the file is of etcd %s, known are those up to %d.%d: downgrade etcd first", ErrUnsupported, v, newest.Major, newest.Minor)
	}
	return nil
}

func be64(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, damaged("value of %d bytes, want 8", len(b))
	}
	return binary.BigEndian.Uint64(b), nil
}

// revision takes a record of the bucket "key".
func (e *etcdReader) revision(key, value []byte) error {
	at, tombstone, err := parseRecord(key, value, e.last)
	if err != nil {
		return err
	}
	e.last = at
	e.disk = storage.AppendRevisionKey(e.disk[:0], at.main, at.sub)
	e.value = storage.AppendRevisionValue(e.value[:0], storage.RevisionRecord{KV: value, Tombstone: tombstone})
	return e.load.Set(e.disk, e.value)
}

// maxMain is a revision that no cluster reaches.
const maxMain = 1 << 56

func parseBoltRevision(b []byte) (main, sub int64, tombstone bool, err error) {
	tombstone = len(b) == boltRevisionSize+1 && b[boltRevisionSize] == tombstoneMark
	if len(b) != boltRevisionSize && !tombstone || b[8] != '_' {
		return 0, 0, false, damaged("%x is no revision", b)
	}
	m, s := binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[9:])
	if m > maxMain || s > maxMain {
		return 0, 0, false, damaged("%x is a revision beyond all that a cluster reaches", b)
	}
	return int64(m), int64(s), tombstone, nil
}
