package snapfile

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/coreos/go-semver/semver"

	"github.com/engram-kv/engram/internal/storage"
)

// Plan is etcd's database file of a moment, laid out but not written.
type Plan struct {
	ctx    context.Context // PlanEtcd's: io.WriterTo has no place for one
	source Source
	root   uint64
	count  uint64 // pages
}

// Pages with a fixed place. The freelist is empty, and there all the same: a
// reader of a file without one visits every page to find the free ones.
const (
	pageFreelist = 2
	pageFirst    = 3
)

// PlanEtcd reads src once and lays out etcd's file of it, of its format since
// 3.6. The source must stay readable until WriteTo is done, and ctx is for both.
func PlanEtcd(ctx context.Context, src Source) (*Plan, error) {
	if _, err := src.resolve(); err != nil {
		return nil, err
	}
	p := &Plan{ctx: ctx, source: src}
	pages := &pages{next: pageFirst, planned: src.Planned, done: progress{fn: src.Progress}}
	root, err := p.write(pages)
	if err != nil {
		return nil, err
	}
	p.root, p.count = root, pages.next
	return p, nil
}

// Size is the length of the file in bytes.
func (p *Plan) Size() int64 { return int64(p.count) * pageSize }

// WriteTo writes the file. It may be called more than once.
func (p *Plan) WriteTo(w io.Writer) (int64, error) {
	counted := &countingWriter{w: w}
	buffered := bufio.NewWriterSize(counted, 64*pageSize)
	_, err := buffered.Write(p.head())
	if err == nil {
		pages := &pages{next: pageFirst, w: buffered, done: progress{fn: p.source.Progress, total: p.Size()}}
		var root uint64
		root, err = p.write(pages)
		if err == nil && (root != p.root || pages.next != p.count) {
			err = fmt.Errorf("snapfile: the source changed: %d pages with root %d were planned, %d with root %d written",
				p.count, p.root, pages.next, root)
		}
	}
	if err == nil {
		err = buffered.Flush()
	}
	return counted.n, err
}

// head is the pages before pageFirst.
func (p *Plan) head() []byte {
	head := make([]byte, pageFirst*pageSize)
	for id := range uint64(2) {
		page := head[id*pageSize:]
		putPageHeader(page, pageHeader{id: id, flags: flagMeta})
		// Of the two, the one with the higher txid is in force.
		m := boltMeta{pageSize: pageSize, root: p.root, freelist: pageFreelist, pageCount: p.count, txid: id}
		copy(page[pageHeaderSize:], m.append(nil))
	}
	putPageHeader(head[pageFreelist*pageSize:], pageHeader{id: pageFreelist, flags: flagFreelist})
	return head
}

type countingWriter struct {
	w io.Writer
	n int64
}

func (c *countingWriter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// addFunc adds a row to a bucket.
type addFunc func(key, value []byte) error

// write lays out all buckets, and then the page that lists them.
func (p *Plan) write(pages *pages) (root uint64, err error) {
	list := &tree{pages: pages}
	for _, bucket := range [...]struct {
		name string // ascending
		rows func(addFunc) error
	}{
		{bucketAlarm, p.table(storage.TableAlarm)},
		{bucketAuth, p.table(storage.TableAuth)},
		{bucketAuthRoles, p.table(storage.TableAuthRole)},
		{bucketAuthUsers, p.table(storage.TableAuthUser)},
		{bucketCluster, p.table(storage.TableCluster)},
		{bucketKey, p.revisions},
		{bucketLease, p.table(storage.TableLease)},
		{bucketMembers, p.table(storage.TableMember)},
		{bucketMembersRemoved, p.table(storage.TableMemberRemoved)},
		{bucketMeta, p.meta},
	} {
		t := &tree{pages: pages}
		err := bucket.rows(func(key, value []byte) error {
			if err := t.add(0, key, value); err != nil {
				return fmt.Errorf("%w: key %.40q: delete it first", err, key)
			}
			return nil
		})
		var root uint64
		if err == nil {
			root, err = t.finish()
		}
		if err == nil {
			err = list.add(elementBucket, []byte(bucket.name), appendBucket(nil, root))
		}
		if err != nil {
			return 0, fmt.Errorf("snapfile: bucket %s: %w", bucket.name, err)
		}
	}
	return list.finish()
}

// table gives the rows of a small table, which are those of the bucket.
func (p *Plan) table(t storage.Table) func(addFunc) error {
	return func(add addFunc) error {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		return storage.Rows(p.source.Reader, t, add)
	}
}

// Keys of the bucket "key": BE64 main, '_', BE64 sub, and 't' for a tombstone.
const (
	boltRevisionSize = 8 + 1 + 8
	tombstoneMark    = 't'
)

func appendBoltRevision(dst []byte, main, sub int64) []byte {
	dst = binary.BigEndian.AppendUint64(dst, uint64(main))
	return binary.BigEndian.AppendUint64(append(dst, '_'), uint64(sub))
}

func (p *Plan) revisions(add addFunc) (err error) {
	lower, upper := storage.RevisionBounds(0, 0)
	it, err := p.source.Reader.Iter(p.ctx, lower, upper)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	key := make([]byte, 0, boltRevisionSize+1)
	n := 0
	for ok := it.First(); ok; ok = it.Next() {
		if n++; n%1024 == 0 && p.ctx.Err() != nil {
			return p.ctx.Err()
		}
		main, sub, err := storage.ParseRevisionKey(it.Key())
		if err != nil {
			return err
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		r, err := storage.ParseRevisionValue(value)
		if err != nil {
			return fmt.Errorf("revision %d.%d: %w", main, sub, err)
		}
		key = appendBoltRevision(key[:0], main, sub)
		if r.Tombstone {
			key = append(key, tombstoneMark)
		}
		if err := add(key, r.KV); err != nil {
			return err
		}
	}
	return errors.Join(it.Error(), p.ctx.Err())
}

// meta gives the rows of the bucket "meta", ascending.
func (p *Plan) meta(add addFunc) error {
	type row struct {
		name  string
		value []byte
	}
	var rows []row
	cs := confState(p.source.Members)
	if len(cs.Voters)+len(cs.Learners) > 0 {
		text, err := json.Marshal(cs)
		if err != nil {
			return err
		}
		rows = append(rows, row{metaConfState, text})
	}
	rows = append(rows, row{metaConsistentIndex, binary.BigEndian.AppendUint64(nil, p.source.Applied)})
	for _, name := range [...]string{storage.MetaFinishedCompact, storage.MetaScheduledCompact} { // etcd's names
		rev, err := compactRow(p.source.Reader, name)
		if err != nil {
			return err
		}
		if rev >= 0 {
			rows = append(rows, row{name, appendBoltRevision(nil, rev, 0)})
		}
	}
	version, err := storageVersion(p.source.Members.Version())
	if err != nil {
		return err
	}
	if version != "" {
		rows = append(rows, row{metaStorageVersion, []byte(version)})
	}
	if p.source.Term > 0 {
		rows = append(rows, row{metaTerm, binary.BigEndian.AppendUint64(nil, p.source.Term)})
	}
	for _, r := range rows {
		if err := add([]byte(r.name), r.value); err != nil {
			return err
		}
	}
	return nil
}

// storageVersion is the version of the file's schema in a cluster of that
// version: the same from 3.6 on, none before or as long as there is none.
func storageVersion(cluster string) (string, error) {
	if cluster == "" {
		return "", nil
	}
	v, err := semver.NewVersion(cluster)
	if err != nil {
		return "", fmt.Errorf("cluster version %q: %w", cluster, err)
	}
	if v.LessThan(semver.Version{Major: 3, Minor: 6}) {
		return "", nil
	}
	return fmt.Sprintf("%d.%d.0", v.Major, v.Minor), nil
}
