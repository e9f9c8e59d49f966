package peer

import (
	"fmt"
	"io"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Field numbers of raftpb.Entry.
const (
	entryType  = 1
	entryTerm  = 2
	entryIndex = 3
	entryData  = 4
)

// entryReader reads the entries of compact MsgApps, by far the most of what a
// follower receives. Entries that come together live and die together, so they
// share their memory: a block of entries, and a piece that the bytes of several
// are read into and that their data stays in.
type entryReader struct {
	block []entryCell
	piece []byte
}

// entryCell is an entry with what its pointers point to.
type entryCell struct {
	entry       raftpb.Entry
	term, index uint64
	kind        raftpb.EntryType
}

const (
	entriesOfBlock = 64
	entryPiece     = 32 << 10 // bytes of a piece; a longer entry has one of its own
)

// next reads an entry of size bytes from r, as one of so many that are still to come.
func (r *entryReader) next(from io.Reader, size, left int) (e *raftpb.Entry, read int, err error) {
	var b []byte
	if size <= entryPiece/4 {
		if size > len(r.piece) {
			r.piece = make([]byte, entryPiece)
		}
		b = r.piece[:size:size]
		r.piece = r.piece[size:]
		if read, err = io.ReadFull(from, b); err != nil {
			return nil, read, noEOF(err)
		}
	} else if b, err = readExactly(from, size, nil); err != nil {
		return nil, len(b), err
	}
	if len(r.block) == 0 {
		r.block = make([]entryCell, min(max(left, 1), entriesOfBlock))
	}
	c := &r.block[0]
	r.block = r.block[1:]
	if !c.decode(b) {
		if err := proto.Unmarshal(b, &c.entry); err != nil {
			return nil, len(b), fmt.Errorf("%w: %w", errFrame, err)
		}
	}
	return &c.entry, len(b), nil
}

// decode fills the entry, whose data stays in b. It does so only for what every
// member sends, known fields each at most once; else it returns false and has done nothing.
func (c *entryCell) decode(b []byte) bool {
	var d struct {
		seen              [entryData + 1]bool
		kind, term, index uint64
		data              []byte
	}
	for len(b) > 0 {
		field, wire, n := protowire.ConsumeTag(b)
		if n < 0 || field > entryData || d.seen[field] {
			return false
		}
		b = b[n:]
		d.seen[field] = true
		var v uint64
		switch wire {
		case protowire.VarintType:
			v, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			d.data, n = protowire.ConsumeBytes(b)
		default:
			return false
		}
		if n < 0 || (wire == protowire.BytesType) != (field == entryData) {
			return false
		}
		b = b[n:]
		switch field {
		case entryType:
			d.kind = v
		case entryTerm:
			d.term = v
		case entryIndex:
			d.index = v
		case entryData:
			d.data = d.data[:len(d.data):len(d.data)]
		}
	}
	if d.kind > uint64(raftpb.EntryConfChangeV2) {
		return false
	}
	c.kind, c.term, c.index = raftpb.EntryType(d.kind), d.term, d.index
	if d.seen[entryType] {
		c.entry.Type = &c.kind
	}
	if d.seen[entryTerm] {
		c.entry.Term = &c.term
	}
	if d.seen[entryIndex] {
		c.entry.Index = &c.index
	}
	c.entry.Data = d.data
	return true
}
