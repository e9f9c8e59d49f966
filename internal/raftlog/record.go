package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// Kind tells what a record holds.
type Kind uint8

// The kinds of records, as they stand in the file.
const (
	KindHeader    Kind = 1 // first record of a segment: whose log, and what was true when it began
	KindEntry     Kind = 2 // one raft entry; replaces those at its index and above
	KindHardState Kind = 3 // term, vote, commit
	KindSnapshot  Kind = 4 // a snapshot was installed: the log begins anew after it
	KindCompact   Kind = 5 // entries up to an index are no longer needed
	KindMark      Kind = 6 // nothing but the statement how far the log is synced
)

func (k Kind) String() string {
	switch k {
	case KindHeader:
		return "segment header"
	case KindEntry:
		return "entry"
	case KindHardState:
		return "hard state"
	case KindSnapshot:
		return "snapshot"
	case KindCompact:
		return "compaction"
	case KindMark:
		return "mark"
	}
	return fmt.Sprintf("record of unknown kind %d", uint8(k))
}

const (
	formatVersion = 1

	frameBytes = 32 // before each payload
	alignment  = 8  // of each record's position

	// firstPosition is where a log begins. It is not 0, so that zeroed bytes
	// never name their own position.
	firstPosition = 4096

	entryPrefix     = 16 // index and term, before an entry's data
	hardStateBytes  = 24
	compactBytes    = 24
	maxPayloadBytes = 1 << 30

	minSegmentBytes = 1 << 10
	maxSegmentBytes = 16 << 30
)

// magic opens the payload of a header.
var magic = [8]byte{'e', 'n', 'g', 'r', 'a', 'm', 'l', 'g'}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// frame is what stands before a payload.
type frame struct {
	crc      uint32
	length   uint32 // of the payload, without padding
	position uint64 // of the frame's first byte in the log
	synced   uint64 // all before this position was known to be on disk
	epoch    uint32
	kind     Kind
	sub      uint8 // entry: raft's entry type
}

// size is what the record occupies, with padding.
func (f *frame) size() int64 { return recordSize(int64(f.length)) }

func recordSize(payload int64) int64 {
	return (frameBytes + payload + alignment - 1) &^ (alignment - 1)
}

func decodeFrame(b []byte) frame {
	_ = b[frameBytes-1]
	return frame{
		crc:      binary.LittleEndian.Uint32(b[0:]),
		length:   binary.LittleEndian.Uint32(b[4:]),
		position: binary.LittleEndian.Uint64(b[8:]),
		synced:   binary.LittleEndian.Uint64(b[16:]),
		epoch:    binary.LittleEndian.Uint32(b[24:]),
		kind:     Kind(b[28]),
		sub:      b[29],
	}
}

// sealRecord fills in the frame of the record that occupies b, whose payload is
// in place and whose padding is zero.
func sealRecord(b []byte, f frame, seed uint32) {
	binary.LittleEndian.PutUint32(b[4:], f.length)
	binary.LittleEndian.PutUint64(b[8:], f.position)
	binary.LittleEndian.PutUint64(b[16:], f.synced)
	binary.LittleEndian.PutUint32(b[24:], f.epoch)
	b[28], b[29], b[30], b[31] = byte(f.kind), f.sub, 0, 0
	binary.LittleEndian.PutUint32(b[0:], crc32.Update(seed, castagnoli, b[4:]))
}

// checkRecord reports whether b, a whole record with padding, is what was written
// under seed.
func checkRecord(b []byte, seed uint32) bool {
	return binary.LittleEndian.Uint32(b) == crc32.Update(seed, castagnoli, b[4:])
}

// header is the payload of a segment's first record. It carries what the log
// must know although the record that said it may lie in a segment that is gone.
type header struct {
	sequence  uint64 // 1, 2, ... in the order of the files
	salt      uint64 // seeds the checksums of the segment
	identity  Identity
	first     uint64 // the log's last index + 1 when the segment began
	compacted point  // the entry before the first one kept
	needed    uint64 // lowest sequence not yet allowed to be deleted
	hard      hardState
	snap      *Snapshot
}

// point names an entry.
type point struct{ index, term uint64 }

type hardState struct{ term, vote, commit uint64 }

// seed is the start value of the checksums of a segment's other records. The
// header itself has the seed 0.
func (h *header) seed() uint32 {
	var b [32]byte
	binary.LittleEndian.PutUint64(b[0:], h.salt)
	binary.LittleEndian.PutUint64(b[8:], h.sequence)
	binary.LittleEndian.PutUint64(b[16:], h.identity.ClusterID)
	binary.LittleEndian.PutUint64(b[24:], h.identity.MemberID)
	return crc32.Checksum(b[:], castagnoli)
}

var errPayload = errors.New("payload does not parse")

func (h *header) append(b []byte) ([]byte, error) {
	b = append(b, magic[:]...)
	b = binary.LittleEndian.AppendUint64(b, formatVersion)
	for _, v := range []uint64{
		h.sequence, h.salt, h.identity.ClusterID, h.identity.MemberID,
		h.first, h.compacted.index, h.compacted.term, h.needed,
		h.hard.term, h.hard.vote, h.hard.commit,
	} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	if h.snap == nil {
		return b, nil
	}
	return appendSnapshot(b, h.snap)
}

const headerFixedBytes = 8 + 8 + 11*8

func decodeHeader(b []byte) (header, error) {
	var h header
	if len(b) < headerFixedBytes || [8]byte(b[:8]) != magic {
		return h, errPayload
	}
	if v := binary.LittleEndian.Uint64(b[8:]); v != formatVersion {
		return h, fmt.Errorf("format version %d, this program knows %d: %w", v, formatVersion, ErrFormat)
	}
	for i, p := range []*uint64{
		&h.sequence, &h.salt, &h.identity.ClusterID, &h.identity.MemberID,
		&h.first, &h.compacted.index, &h.compacted.term, &h.needed,
		&h.hard.term, &h.hard.vote, &h.hard.commit,
	} {
		*p = binary.LittleEndian.Uint64(b[16+8*i:])
	}
	if rest := b[headerFixedBytes:]; len(rest) > 0 {
		s, err := decodeSnapshot(rest)
		if err != nil {
			return h, err
		}
		h.snap = &s
	}
	return h, nil
}

func appendSnapshot(b []byte, s *Snapshot) ([]byte, error) {
	b = binary.LittleEndian.AppendUint64(b, s.Index)
	b = binary.LittleEndian.AppendUint64(b, s.Term)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(s.Dir)))
	b = append(b, s.Dir...)
	b, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend(b, cloneConfState(s.ConfState))
	if err != nil {
		return nil, fmt.Errorf("raftlog: encode the configuration of snapshot %d: %w", s.Index, err)
	}
	return b, nil
}

func decodeSnapshot(b []byte) (Snapshot, error) {
	if len(b) < 24 {
		return Snapshot{}, errPayload
	}
	s := Snapshot{
		Index:     binary.LittleEndian.Uint64(b),
		Term:      binary.LittleEndian.Uint64(b[8:]),
		ConfState: &raftpb.ConfState{},
	}
	n := binary.LittleEndian.Uint64(b[16:])
	if n > uint64(len(b)-24) {
		return Snapshot{}, errPayload
	}
	s.Dir = string(b[24 : 24+n])
	if err := proto.Unmarshal(b[24+n:], s.ConfState); err != nil {
		return Snapshot{}, errPayload
	}
	return s, nil
}

func appendHardState(b []byte, h hardState) []byte {
	b = binary.LittleEndian.AppendUint64(b, h.term)
	b = binary.LittleEndian.AppendUint64(b, h.vote)
	return binary.LittleEndian.AppendUint64(b, h.commit)
}

func decodeHardState(b []byte) (hardState, error) {
	if len(b) != hardStateBytes {
		return hardState{}, errPayload
	}
	return hardState{
		term:   binary.LittleEndian.Uint64(b),
		vote:   binary.LittleEndian.Uint64(b[8:]),
		commit: binary.LittleEndian.Uint64(b[16:]),
	}, nil
}

func appendCompact(b []byte, p point, needed uint64) []byte {
	b = binary.LittleEndian.AppendUint64(b, p.index)
	b = binary.LittleEndian.AppendUint64(b, p.term)
	return binary.LittleEndian.AppendUint64(b, needed)
}

func decodeCompact(b []byte) (p point, needed uint64, err error) {
	if len(b) != compactBytes {
		return point{}, 0, errPayload
	}
	return point{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])},
		binary.LittleEndian.Uint64(b[16:]), nil
}

func decodePoint(b []byte) (point, error) {
	if len(b) < entryPrefix {
		return point{}, errPayload
	}
	return point{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])}, nil
}

// entrySlot is one allocation for an entry and the numbers it points to.
type entrySlot struct {
	entry       raftpb.Entry
	index, term uint64
	kind        raftpb.EntryType
}

// decodeEntry fills slot from an entry's payload. The entry's data aliases b.
func decodeEntry(slot *entrySlot, f *frame, b []byte) (*raftpb.Entry, error) {
	p, err := decodePoint(b)
	if err != nil {
		return nil, err
	}
	slot.index, slot.term, slot.kind = p.index, p.term, raftpb.EntryType(f.sub)
	slot.entry.Index, slot.entry.Term, slot.entry.Type = &slot.index, &slot.term, &slot.kind
	if len(b) > entryPrefix {
		slot.entry.Data = b[entryPrefix:len(b):len(b)]
	}
	return &slot.entry, nil
}
