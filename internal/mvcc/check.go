package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"

	"github.com/engram-kv/engram/internal/mvcc/index"
)

// ErrIndex says that an index checkpoint says other things than the records. A
// member that loaded it would answer wrongly.
var ErrIndex = errors.New("mvcc: index checkpoint does not fit the records")

// IndexCheck is what CheckIndex found.
type IndexCheck struct {
	// There says that there is a checkpoint; Revision is the one that it was made at.
	There    bool
	Revision int64
	// Unusable is why a start would pass the checkpoint over and read all records.
	Unusable error

	Keys                          int64
	LastRevision, CompactRevision int64 // -1 if it was never compacted
	CompactionUnderWay            bool
	Applied, Term                 uint64
}

// CheckIndex makes the index of all records, and that of the checkpoint in o.Dir
// and the records after it, as a start does, and compares them: ErrIndex. It
// changes nothing.
func CheckIndex(o Options) (c IndexCheck, err error) {
	o.WarmBytes, o.CheckpointBytes = -1, -1
	scan := o
	scan.Dir = ""
	scan.unusable = func(error) {}
	all, err := Open(scan)
	if err != nil {
		return c, err
	}
	defer all.Abandon()
	root := all.Root()
	c.Keys, c.LastRevision, c.CompactRevision = root.Keys(), root.Revision(), root.CompactRevision()
	c.CompactionUnderWay = all.scheduled > all.finished
	c.Applied, c.Term = all.Applied()
	if err := root.index.Verify(); err != nil {
		return c, fmt.Errorf("mvcc: the index of all records: %w", err)
	}
	o.unusable = func(err error) {
		if !errors.Is(err, os.ErrNotExist) {
			c.There, c.Unusable = true, err
		}
		c.Revision = -1
	}
	quick, err := Open(o)
	if err != nil {
		return c, err
	}
	defer quick.Abandon()
	if c.Revision < 0 {
		c.Revision = 0
		return c, nil
	}
	c.There, c.Revision = true, quick.saver.revision
	return c, sameIndex(root.index, quick.Root().index)
}

// sameIndex compares the indexes of the records and of the checkpoint.
func sameIndex(want, got index.Root) error {
	next, stop := iter.Pull(iter.Seq[*index.Record](func(yield func(*index.Record) bool) { got.Walk(nil, yield) }))
	defer stop()
	var err error
	want.Walk(nil, func(w *index.Record) bool {
		g, ok := next()
		switch {
		case !ok:
			err = fmt.Errorf("%w: it ends before key %.60q", ErrIndex, w.Key)
		case !bytes.Equal(g.Key, w.Key):
			err = fmt.Errorf("%w: it has key %.60q where the records have %.60q", ErrIndex, g.Key, w.Key)
		case g.Lease != w.Lease || !slices.Equal(g.Revs, w.Revs):
			err = fmt.Errorf("%w: of key %.60q it has revisions %v and lease %x, the records have %v and %x", ErrIndex, w.Key, g.Revs, g.Lease, w.Revs, w.Lease)
		}
		return err == nil
	})
	if err == nil {
		if g, ok := next(); ok {
			err = fmt.Errorf("%w: it has key %.60q, which no record has", ErrIndex, g.Key)
		}
	}
	return err
}
