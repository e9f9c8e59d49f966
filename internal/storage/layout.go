package storage

import (
	"encoding/binary"
	"fmt"
)

// Every key on disk starts with one byte that names its table. The revision
// log is by far the largest and is written in order; the small tables are kept
// away from it by being split into sstables of their own (see spanPolicy).
const (
	prefixMeta         = 'a'
	prefixAlarm        = 'b'
	prefixAuth         = 'c'
	prefixAuthRole     = 'd'
	prefixAuthUser     = 'e'
	prefixCluster      = 'f'
	prefixLease        = 'g'
	prefixMember       = 'h'
	prefixMemberGone   = 'i'
	prefixRevision     = 'r'
	prefixRevisionNext = prefixRevision + 1
)

// Table is one of the small replicated tables. Rows of a table are ordered as
// in the bucket of the same purpose in etcd's file (state-machine.md, section 5).
type Table byte

// The small tables.
const (
	TableMeta          Table = prefixMeta
	TableAlarm         Table = prefixAlarm
	TableAuth          Table = prefixAuth
	TableAuthRole      Table = prefixAuthRole
	TableAuthUser      Table = prefixAuthUser
	TableCluster       Table = prefixCluster
	TableLease         Table = prefixLease
	TableMember        Table = prefixMember
	TableMemberRemoved Table = prefixMemberGone
)

// Rows of TableMeta.
const (
	// MetaFormat holds the format version of the store, see FormatVersion.
	MetaFormat = "format"
	// MetaApplied holds an applied mark (AppendApplied). The mark in force is
	// the greater of this row and the trailer of the last revision record.
	MetaApplied = "applied"
	// MetaScheduledCompact and MetaFinishedCompact hold BE64 main revisions.
	MetaScheduledCompact = "scheduledCompactRev"
	MetaFinishedCompact  = "finishedCompactRev"
	// MetaFeatureLevel holds the cluster's feature level, BE64, and is missing
	// while it is 0. No etcd knows it, so it goes into no file and no hash of etcd's.
	MetaFeatureLevel = "featureLevel"
	// MetaFullAt holds the usage in bytes, BE64, at which the reserve began that
	// a full store gives out at feature level 1; it is missing while there is none.
	MetaFullAt = "fullAt"
)

// FormatVersion is written by this version of Engram and is the only one that
// it opens.
const FormatVersion = 1

// RowKey returns the disk key of a row of a small table.
func RowKey(t Table, row []byte) []byte {
	k := make([]byte, 0, 1+len(row))
	return append(append(k, byte(t)), row...)
}

// TableBounds returns the half-open interval of disk keys that a table covers.
func TableBounds(t Table) (lower, upper []byte) {
	return []byte{byte(t)}, []byte{byte(t) + 1}
}

// RowOf returns the row name within a disk key that RowKey made. It aliases key.
func RowOf(key []byte) []byte { return key[1:] }

// revisionKeySize is the length of a revision's disk key without tombstone mark.
const revisionKeySize = 1 + 8 + 8

// AppendRevisionKey appends the disk key of the record at (main, sub):
// the prefix, BE64(main), BE64(sub).
func AppendRevisionKey(dst []byte, main, sub int64) []byte {
	dst = append(dst, prefixRevision)
	dst = binary.BigEndian.AppendUint64(dst, uint64(main))
	return binary.BigEndian.AppendUint64(dst, uint64(sub))
}

// ParseRevisionKey is the inverse of AppendRevisionKey.
func ParseRevisionKey(key []byte) (main, sub int64, err error) {
	if len(key) != revisionKeySize || key[0] != prefixRevision {
		return 0, 0, fmt.Errorf("storage: %x is not a revision key", key)
	}
	return int64(binary.BigEndian.Uint64(key[1:])), int64(binary.BigEndian.Uint64(key[9:])), nil
}

// RevisionBounds returns the interval that holds the revisions with
// fromMain <= main < toMain. A toMain of 0 means no upper end.
func RevisionBounds(fromMain, toMain int64) (lower, upper []byte) {
	lower = AppendRevisionKey(nil, fromMain, 0)
	if toMain == 0 {
		return lower, []byte{prefixRevisionNext}
	}
	return lower, AppendRevisionKey(nil, toMain, 0)
}

// A revision's value is flags, the encoded KeyValue, and for the last record of
// an apply batch an applied mark:
//
//	flags (1 byte) | KeyValue | [index BE64 | term BE64]
//
// The mark travels here because a second, far-away hot row would cost Pebble
// as much as the record itself.
const (
	flagTombstone = 1 << 0
	flagApplied   = 1 << 1
	appliedSize   = 16
)

// RevisionRecord is a decoded value of the revision log.
type RevisionRecord struct {
	KV        []byte // encoded mvccpb.KeyValue; of a tombstone only its key is set
	Tombstone bool
	// Applied is the raft index and Term its term, if the record carries the
	// mark of its batch; otherwise both are 0.
	Applied, Term uint64
}

func (r RevisionRecord) valueSize() int {
	n := 1 + len(r.KV)
	if r.Applied != 0 {
		n += appliedSize
	}
	return n
}

// AppendRevisionValue appends the disk form of r.
func AppendRevisionValue(dst []byte, r RevisionRecord) []byte {
	var flags byte
	if r.Tombstone {
		flags |= flagTombstone
	}
	if r.Applied != 0 {
		flags |= flagApplied
	}
	dst = append(dst, flags)
	dst = append(dst, r.KV...)
	if r.Applied != 0 {
		dst = AppendApplied(dst, r.Applied, r.Term)
	}
	return dst
}

// ParseRevisionValue decodes a value of the revision log. KV aliases value.
func ParseRevisionValue(value []byte) (RevisionRecord, error) {
	if len(value) == 0 || value[0]&^(flagTombstone|flagApplied) != 0 {
		return RevisionRecord{}, fmt.Errorf("storage: revision record of %d bytes has a bad flag byte", len(value))
	}
	r := RevisionRecord{Tombstone: value[0]&flagTombstone != 0}
	body := value[1:]
	if value[0]&flagApplied != 0 {
		if len(body) < appliedSize {
			return RevisionRecord{}, fmt.Errorf("storage: revision record of %d bytes is too short for its applied mark", len(value))
		}
		cut := len(body) - appliedSize
		if r.Applied, r.Term, _ = ParseApplied(body[cut:]); r.Applied == 0 {
			return RevisionRecord{}, fmt.Errorf("storage: revision record of %d bytes has an applied mark of index 0", len(value))
		}
		body = body[:cut]
	}
	r.KV = body[:len(body):len(body)]
	return r, nil
}

// AppendApplied appends an applied mark: raft index and term, BE64 each.
func AppendApplied(dst []byte, index, term uint64) []byte {
	dst = binary.BigEndian.AppendUint64(dst, index)
	return binary.BigEndian.AppendUint64(dst, term)
}

// ParseApplied is the inverse of AppendApplied.
func ParseApplied(b []byte) (index, term uint64, err error) {
	if len(b) != appliedSize {
		return 0, 0, fmt.Errorf("storage: applied mark of %d bytes, want %d", len(b), appliedSize)
	}
	return binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:]), nil
}
