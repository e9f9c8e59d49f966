package etcddir

import (
	"bufio"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"google.golang.org/protobuf/encoding/protowire"

	"encoding/binary"
)

// What a record of the log is of.
const (
	recordMetadata = 1
	recordEntry    = 2
	recordState    = 3
	recordCRC      = 4
	recordSnapshot = 5
)

const (
	frameBytes  = 8   // of the length before each record
	tagKind     = 0x8 // the first byte of a record
	sectorBytes = 512 // which a disk writes whole or not at all
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// record is one record of a segment.
type record struct {
	kind   uint64
	crc    uint32
	data   []byte // good until the next record
	offset int64  // of its length
}

// errTorn says why the rest of a segment is an interrupted write.
type errTorn struct{ why string }

func (e errTorn) Error() string { return "interrupted write: " + e.why }

// reader gives the records of one segment. The checksum runs through all
// segments: each record carries that of all data so far.
type reader struct {
	path string
	at   io.ReaderAt
	r    *bufio.Reader // of the same bytes
	size int64
	off  int64
	last bool // the log ends in this segment, so a write may be unfinished
	crc  uint32
	buf  []byte
}

// readerBytes is how much is read from a segment at a time.
const readerBytes = 256 << 10

func newReader(path string, at io.ReaderAt, size int64, last bool, crc uint32) *reader {
	return &reader{path: path, at: at, r: bufio.NewReaderSize(io.NewSectionReader(at, 0, size), readerBytes), size: size, last: last, crc: crc}
}

func (r *reader) damaged(format string, args ...any) error {
	return &DamageError{File: r.path, Offset: r.off, Why: fmt.Sprintf(format, args...)}
}

// torn is the end of what was written whole, if a write may be unfinished here.
func (r *reader) torn(format string, args ...any) error {
	if !r.last {
		return r.damaged(format+", and it is not the last segment", args...)
	}
	return errTorn{fmt.Sprintf(format, args...)}
}

// next returns the next record; io.EOF at the end, errTorn if the rest is an
// interrupted write. It ends at the first error.
func (r *reader) next() (rec record, err error) {
	left := r.size - r.off
	if left == 0 {
		return rec, io.EOF
	}
	if left < frameBytes {
		return rec, r.torn("%d bytes are left, a record begins with %d", left, frameBytes)
	}
	var frame [frameBytes]byte
	if err := r.read(frame[:]); err != nil {
		return rec, err
	}
	length, padding, ok := parseFrame(binary.LittleEndian.Uint64(frame[:]))
	left -= frameBytes
	if !ok || length == 0 || length+padding > left {
		return rec, r.badLength(length, ok, left)
	}
	if int64(cap(r.buf)) < length+padding {
		r.buf = make([]byte, length+padding)
	}
	r.buf = r.buf[:length+padding]
	if err := r.read(r.buf); err != nil {
		return rec, err
	}
	body := r.buf[:length]
	rec, _, err = parseRecord(body, true)
	if err == nil {
		err = r.checksum(rec)
	}
	if err != nil {
		if r.last && emptySector(body, r.off+frameBytes) {
			return rec, r.torn("%v, and a sector of it is empty", err)
		}
		return rec, r.damaged("%v", err)
	}
	rec.offset = r.off
	r.crc = rec.crc
	r.off += frameBytes + length + padding
	return rec, nil
}

func (r *reader) checksum(rec record) error {
	if rec.kind == recordCRC {
		if len(rec.data) > 0 {
			return fmt.Errorf("a checksum record has %d bytes of data", len(rec.data))
		}
		if r.crc != 0 && r.crc != rec.crc {
			return fmt.Errorf("the segment before ends with checksum %08x, this one goes on from %08x: records between are missing", r.crc, rec.crc)
		}
		return nil
	}
	if sum := crc32.Update(r.crc, castagnoli, rec.data); sum != rec.crc {
		return fmt.Errorf("a record has checksum %08x, its bytes have %08x", rec.crc, sum)
	}
	return nil
}

// badLength judges a length that is none: 0 is the end, for files are longer
// than what is in them; one beyond the file is a write that the crash cut. But a
// whole record with the right checksum behind it was written, and its length has
// rotted.
func (r *reader) badLength(length int64, ok bool, left int64) error {
	first, err := r.r.Peek(1)
	if err == nil && first[0] == tagKind { // else it is none, and mostly zeros up to the end of a large file
		body := make([]byte, left)
		if _, err = r.at.ReadAt(body, r.off+frameBytes); err == nil || errors.Is(err, io.EOF) {
			err = nil
			// Checksum records are only at the beginning.
			rec, size, bad := parseRecord(body, false)
			if bad == nil && (rec.kind != recordCRC || r.off == 0) && r.checksum(rec) == nil && (!ok || int64(size) != length) {
				return r.damaged("a whole record of %d bytes stands there, its length is given as %d", size, length)
			}
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: read at offset %d: %w", r.path, r.off+frameBytes, err)
	}
	switch {
	case !ok:
		return r.damaged("no length of a record stands there")
	case length == 0:
		return io.EOF
	}
	return r.torn("a record of %d bytes should stand there, %d are left", length, left)
}

func (r *reader) read(b []byte) error {
	if _, err := io.ReadFull(r.r, b); err != nil {
		return fmt.Errorf("%s: read at offset %d: %w", r.path, r.off, err)
	}
	return nil
}

// parseFrame takes a length field apart: 56 bits of length, and, if the top bit
// is set, how many bytes follow to make it a multiple of 8.
func parseFrame(field uint64) (length, padding int64, ok bool) {
	length = int64(field & (1<<56 - 1))
	top := byte(field >> 56)
	if top&0x80 != 0 {
		padding = int64(top & 0x7f)
		if padding == 0 || padding > 7 {
			return length, 0, false
		}
	} else if top != 0 {
		return length, 0, false
	}
	if (length+padding)%8 != 0 || length == 0 && padding > 0 {
		return length, 0, false
	}
	return length, padding, true
}

// parseRecord parses a record. If whole is false it ends where the fields end
// that every record has, which etcd writes in this order; size says where.
func parseRecord(b []byte, whole bool) (rec record, size int, err error) {
	var seen uint
	for rest := b; len(rest) > 0; {
		num, typ, n := protowire.ConsumeTag(rest)
		if !whole && (n < 0 || num > 3 || seen&(1<<num) != 0) {
			break
		}
		if n < 0 {
			return rec, 0, fmt.Errorf("a record cannot be parsed: %w", protowire.ParseError(n))
		}
		rest = rest[n:]
		switch {
		case num == 1 && typ == protowire.VarintType:
			rec.kind, n = protowire.ConsumeVarint(rest)
		case num == 2 && typ == protowire.VarintType:
			var v uint64
			v, n = protowire.ConsumeVarint(rest)
			rec.crc = uint32(v)
			if v>>32 != 0 {
				return rec, 0, fmt.Errorf("a record has checksum %x, which is none of 32 bits", v)
			}
		case num == 3 && typ == protowire.BytesType:
			rec.data, n = protowire.ConsumeBytes(rest)
		default:
			return rec, 0, fmt.Errorf("a record has field %d of type %d, which none has", num, typ)
		}
		if n < 0 {
			return rec, 0, fmt.Errorf("a record cannot be parsed: %w", protowire.ParseError(n))
		}
		if seen&(1<<num) != 0 {
			return rec, 0, fmt.Errorf("a record has field %d twice", num)
		}
		seen |= 1 << num
		rest = rest[n:]
		size = len(b) - len(rest)
	}
	if seen&(1<<1) == 0 || seen&(1<<2) == 0 {
		return rec, 0, errors.New("a record lacks its type or its checksum")
	}
	return rec, size, nil
}

// emptySector says whether some sector of a record holds only zeros: it never
// reached the disk.
func emptySector(b []byte, at int64) bool {
	for len(b) > 0 {
		n := min(int64(len(b)), sectorBytes-at%sectorBytes)
		empty := true
		for _, c := range b[:n] {
			if c != 0 {
				empty = false
				break
			}
		}
		if empty {
			return true
		}
		b, at = b[n:], at+n
	}
	return false
}
