package index

import (
	"errors"
	"fmt"
)

// ErrRecord says that a Record contradicts itself or came out of order.
var ErrRecord = errors.New("index: bad record")

// Record is everything the index knows about one key. Walk yields it, Builder
// takes it, Encoder and Decoder turn it into bytes and back.
type Record struct {
	Key   []byte
	Lease int64    // of the newest revision, 0 if that is a tombstone
	Ref   ValueRef // of the newest revision; not encoded, since it means nothing after a restart
	Revs  []Rev    // every retained revision, oldest first; never empty
}

// Rev is one retained revision of a key.
type Rev struct {
	Revision
	Create    int64  // 0 for a tombstone
	Version   int64  // 0 for a tombstone
	Size      uint32 // length of the encoded record, in bytes
	Tombstone bool
}

// Live reports whether the newest revision is a put.
func (r *Record) Live() bool { return !r.Revs[len(r.Revs)-1].Tombstone }

// Validate returns an error that wraps ErrRecord unless the revisions can be
// what is left of a key's life: ascending, each generation counting its
// versions up by one, ended by at most one tombstone. The oldest ones may be
// missing, as after a compaction.
func (r *Record) Validate() error {
	if len(r.Revs) == 0 {
		return fmt.Errorf("%w: key %q has no revisions", ErrRecord, r.Key)
	}
	for i := range r.Revs {
		if err := r.validateRev(i); err != nil {
			return fmt.Errorf("%w: key %q, revision %v: %w", ErrRecord, r.Key, r.Revs[i].Revision, err)
		}
	}
	if r.Lease != 0 && !r.Live() {
		return fmt.Errorf("%w: deleted key %q has lease %d", ErrRecord, r.Key, r.Lease)
	}
	return nil
}

var (
	errRange      = errors.New("number out of range")
	errOrder      = errors.New("not newer than the one before")
	errGeneration = errors.New("create and version do not follow from the one before")
	errTombstone  = errors.New("tombstone of an absent key")
)

func (r *Record) validateRev(i int) error {
	v := &r.Revs[i]
	if v.Main < 1 || v.Sub < 0 || v.Sub > maxSub {
		return errRange
	}
	if v.Tombstone {
		if v.Create != 0 || v.Version != 0 {
			return errRange
		}
	} else if v.Create < 1 || v.Create > v.Main || v.Version < 1 || (v.Version == 1) && v.Create != v.Main {
		return errGeneration
	}
	if i == 0 {
		return nil
	}
	before := &r.Revs[i-1]
	switch {
	case !before.Less(v.Revision):
		return errOrder
	case v.Tombstone && before.Tombstone:
		return errTombstone
	case v.Tombstone:
		return nil
	case before.Tombstone && v.Version != 1:
		return errGeneration
	case !before.Tombstone && (v.Create != before.Create || v.Version != before.Version+1):
		return errGeneration
	}
	return nil
}
