package snapfile

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/engram-kv/engram/internal/storage"
)

// Info is what etcd's file says of itself.
type Info struct {
	// Hash is the CRC-32C of the names and rows of all buckets. It is neither that
	// of Maintenance.Hash, which leaves rows out, nor HashKV.
	Hash uint32
	// Revision is that of the last record, 0 if there is none.
	Revision int64
	// CompactRevision is the one that a store made of the file has, -1 if it was
	// never compacted.
	CompactRevision int64
	// Keys are those that are there at Revision.
	Keys int64
	// Bytes is the length of the database, without a checksum behind it.
	Bytes int64
	// Version is that of the file's schema, "" for one of etcd 3.5.
	Version string
}

// Inspect reads all of etcd's file, of size bytes, and checks what ReadEtcd
// checks: a file that passes can be restored. Memory is some 50 bytes for each
// key that is there at some moment.
func Inspect(ctx context.Context, r io.ReaderAt, size int64) (Info, error) {
	i := inspector{keys: map[keyHash]revision{}, upTo: maxMain}
	err := i.inspect(ctx, r, size)
	return i.info, err
}

// revision is where a record stands.
type revision struct{ main, sub int64 }

// keyHash stands for a key: large stores have large keys, and many.
type keyHash [16]byte

func hashOf(key []byte) (h keyHash) {
	sum := sha256.Sum256(key)
	copy(h[:], sum[:])
	return h
}

type inspector struct {
	info Info
	crc  uint32
	last revision
	// keys are those that are there at the last record up to upTo, with theirs.
	keys map[keyHash]revision
	upTo int64
}

func (i *inspector) inspect(ctx context.Context, r io.ReaderAt, size int64) error {
	f, err := openBolt(r, size)
	if err != nil {
		return err
	}
	buckets, err := f.buckets(ctx, func([]byte) bool { return true })
	if err != nil {
		return fmt.Errorf("list of buckets: %w", err)
	}
	for _, name := range [...]string{bucketKey, bucketMeta} {
		if _, ok := buckets[name]; !ok {
			return damaged("it has no bucket %s: it is no database of etcd 3", name)
		}
	}
	i.info.CompactRevision = -1
	i.info.Bytes = int64(f.meta.pageCount) * int64(f.meta.pageSize)
	for _, name := range slices.Sorted(maps.Keys(buckets)) {
		i.crc = crc32.Update(i.crc, castagnoli, []byte(name))
		check := i.checkOf(name)
		err := f.rows(ctx, buckets[name], func(key, value []byte) error {
			i.crc = crc32.Update(crc32.Update(i.crc, castagnoli, key), castagnoli, value)
			if err := check(key, value); err != nil {
				return fmt.Errorf("key %.60q: %w", key, err)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("bucket %s: %w", name, err)
		}
	}
	i.info.Hash, i.info.Keys, i.info.Revision = i.crc, int64(len(i.keys)), i.last.main
	return nil
}

// checkOf returns what looks at the rows of a bucket.
func (i *inspector) checkOf(bucket string) addFunc {
	switch bucket {
	case bucketKey:
		return i.record
	case bucketMeta:
		return i.meta
	}
	for _, s := range sources {
		if s.bucket == bucket {
			return func(key, value []byte) error {
				_, err := s.check(key, value)
				return err
			}
		}
	}
	return func(_, _ []byte) error { return nil }
}

func (i *inspector) meta(key, value []byte) (err error) {
	switch string(key) {
	case metaConsistentIndex, metaTerm:
		_, err = be64(value)
	case storage.MetaScheduledCompact, storage.MetaFinishedCompact:
		var main int64
		if main, _, _, err = parseBoltRevision(value); err == nil {
			i.info.CompactRevision = max(i.info.CompactRevision, main)
		}
	case metaStorageVersion:
		i.info.Version = string(value)
		err = checkStorageVersion(i.info.Version)
	}
	return err
}

func (i *inspector) record(key, value []byte) error {
	at, tombstone, err := parseRecord(key, value, i.last)
	if err != nil {
		return err
	}
	i.last = at
	if at.main > i.upTo {
		return nil
	}
	if h := hashOf(keyOf(value)); tombstone {
		delete(i.keys, h)
	} else {
		i.keys[h] = at
	}
	return nil
}

// parseRecord reads and checks a row of the bucket "key", which follows the one
// at last.
func parseRecord(key, value []byte, last revision) (at revision, tombstone bool, err error) {
	if at.main, at.sub, tombstone, err = parseBoltRevision(key); err != nil {
		return at, false, err
	}
	if at.main < 1 {
		return at, false, damaged("revision %d.%d is before the first", at.main, at.sub)
	}
	// A record and a tombstone of one revision have different keys there, and the
	// same one here.
	if at == last {
		return at, false, damaged("revision %d.%d is there twice", at.main, at.sub)
	}
	if err := checkKeyValue(value, at.main, tombstone); err != nil {
		return at, false, damaged("revision %d.%d: %w", at.main, at.sub, err)
	}
	return at, tombstone, nil
}

// keyOf returns the key of an encoded mvccpb.KeyValue that was checked.
func keyOf(b []byte) (key []byte) {
	_ = fields(b, func(num protowire.Number, _ uint64, b []byte) error {
		if num == 1 {
			key = b
		}
		return nil
	})
	return key
}

// HashKV is what Maintenance.HashKV answers from a store.
type HashKV struct {
	Hash                      uint32
	Revision, CompactRevision int64 // -1 if it was never compacted
}

// HashOfEtcd returns the HashKV at a revision, 0 meaning the last, of a store
// that is made of etcd's file. It reads the file twice. A revision that is
// compacted, or was never reached, is an error.
func HashOfEtcd(ctx context.Context, r io.ReaderAt, size int64, rev int64) (HashKV, error) {
	i := inspector{keys: map[keyHash]revision{}, upTo: maxMain}
	if rev > 0 {
		i.upTo = rev
	}
	if err := i.inspect(ctx, r, size); err != nil {
		return HashKV{}, err
	}
	compacted := i.info.CompactRevision
	h := HashKV{Revision: max(i.last.main, compacted, 1), CompactRevision: compacted}
	switch {
	case rev > 0 && rev < compacted:
		return h, fmt.Errorf("%w: it was compacted at %d, --rev is %d", ErrCompacted, compacted, rev)
	case rev > h.Revision:
		return h, fmt.Errorf("%w: its last revision is %d, --rev is %d", ErrFutureRevision, h.Revision, rev)
	case rev > 0:
		h.Revision = rev
	}
	// Of the records up to the compact revision only those that are live at
	// the revision count.
	keep := map[revision]bool{}
	for _, at := range i.keys {
		if at.main <= compacted {
			keep[at] = true
		}
	}
	someLive := len(i.keys) > 0
	i.keys = nil
	f, err := openBolt(r, size)
	if err != nil {
		return h, err
	}
	buckets, err := f.buckets(ctx, func(name []byte) bool { return string(name) == bucketKey })
	if err != nil {
		return h, err
	}
	h.Hash = crc32.Checksum([]byte(bucketKey), castagnoli)
	err = f.rows(ctx, buckets[bucketKey], func(key, value []byte) error {
		main, sub, tombstone, err := parseBoltRevision(key)
		switch {
		case err != nil:
			return err
		case main > h.Revision, main == compacted && tombstone,
			main <= compacted && someLive && !keep[revision{main, sub}]:
			return nil
		}
		h.Hash = crc32.Update(crc32.Update(h.Hash, castagnoli, key), castagnoli, value)
		return nil
	})
	return h, err
}

// sumBytes is the length of the SHA-256 that stands behind a backup, and
// sectorBytes what a database without one is a multiple of.
const (
	sumBytes    = sha256.Size
	sectorBytes = 512
)

// HasSum says whether a backup of that size has a checksum behind it.
func HasSum(size int64) bool { return size%sectorBytes == sumBytes }

// Sum is a checksum behind a backup, and the one that it should be.
type Sum struct{ Got, Want [sumBytes]byte }

// CheckSum reads a backup that has a checksum and compares.
func CheckSum(ctx context.Context, r io.ReaderAt, size int64) (s Sum, err error) {
	end := size - sumBytes
	if _, err := r.ReadAt(s.Want[:], end); err != nil {
		return s, err
	}
	h := sha256.New()
	buf := make([]byte, 256<<10)
	for at := int64(0); at < end; {
		if err := ctx.Err(); err != nil {
			return s, err
		}
		n, err := r.ReadAt(buf[:min(int64(len(buf)), end-at)], at)
		h.Write(buf[:n])
		at += int64(n)
		if err != nil && at < end {
			return s, err
		}
	}
	h.Sum(s.Got[:0])
	return s, nil
}
