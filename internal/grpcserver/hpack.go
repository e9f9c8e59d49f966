package grpcserver

import (
	"bytes"
	"errors"

	"golang.org/x/net/http2/hpack"
)

// tableBytes is the size of the table that a client may have us keep. It is
// what HTTP/2 begins with; we never offer more.
const tableBytes = 4 << 10

// staticFields is the static table, from index 1 on.
var staticFields = func() (table [62]*field) {
	d := hpack.NewDecoder(tableBytes, nil)
	for i := 1; i < len(table); i++ {
		fs, err := d.DecodeFull([]byte{0x80 | byte(i)})
		if err != nil {
			panic("grpcserver: no static table entry " + err.Error())
		}
		table[i] = newField(fs[0].Name, fs[0].Value)
	}
	return table
}()

// tableOfNone is the update that makes a table hold nothing (RFC 7541, section 6.3).
const tableOfNone = 0x20

// mostTimeout is how much of a grpc-timeout is looked at: more than a good one has.
const mostTimeout = 64

var errCompression = errors.New("header block cannot be decoded")

// unpacker decodes header blocks. It is like hpack.Decoder, but yields pointers
// to fields that stay the same for as long as the client names the same entry,
// so that a call whose fields were seen before is recognized without looking at
// a single byte of them. It allocates for nothing but literals that it has not
// seen lately.
type unpacker struct {
	table   []*field // dynamic; the newest is the last
	bytes   uint32   // of table, by RFC 7541, section 4.1
	maximum uint32   // of bytes, as the client set it

	// Of the block that was decoded last.
	fields  []*field // but grpc-timeout
	size    uint32   // of all fields, saturating
	timeout []byte   // the last grpc-timeout, nil for none
	timed   bool

	limit   uint32 // of size; fields beyond it are left out
	scratch bytes.Buffer
	lately  [16]*field // literals by hash
}

func newUnpacker(limit uint32) *unpacker {
	return &unpacker{maximum: tableBytes, limit: limit}
}

// tooLarge says that fields were left out.
func (u *unpacker) tooLarge() bool { return u.size > u.limit }

// decode decodes a whole block. After an error the table is of no use.
func (u *unpacker) decode(block []byte) error {
	u.fields, u.size, u.timed, u.timeout = u.fields[:0], 0, false, u.timeout[:0]
	if u.scratch.Cap() > tableBytes {
		u.scratch = bytes.Buffer{} // of a string that was out of the common
	}
	first := true
	for len(block) > 0 {
		b := block[0]
		var err error
		switch {
		case b&0x80 != 0: // indexed
			var i uint32
			if i, block, err = readInt(block, 7); err != nil {
				return err
			}
			f := u.at(i)
			if f == nil {
				return errCompression
			}
			u.emit(f)
		case b&0xe0 == 0x20: // table size update
			var n uint32
			if n, block, err = readInt(block, 5); err != nil {
				return err
			}
			if !first || n > tableBytes {
				return errCompression
			}
			u.maximum = n
			u.evict(0)
			continue // another one may follow
		default:
			if block, err = u.literal(block); err != nil {
				return err
			}
		}
		first = false
	}
	return nil
}

// literal decodes one literal field.
func (u *unpacker) literal(block []byte) (rest []byte, err error) {
	prefix, keep := uint8(4), false
	if block[0]&0x40 != 0 {
		prefix, keep = 6, true
	}
	i, block, err := readInt(block, prefix)
	if err != nil {
		return nil, err
	}
	var name string
	var raw []byte
	if i > 0 {
		f := u.at(i)
		if f == nil {
			return nil, errCompression
		}
		name = f.name
	} else {
		if raw, block, err = u.string(block); err != nil {
			return nil, err
		}
		name = u.nameOf(raw)
	}
	if raw, block, err = u.string(block); err != nil {
		return nil, err
	}
	if name == timeoutName {
		// Each call has another value: it would drive what stays the same out of
		// what was seen lately.
		u.timed = true
		u.timeout = append(u.timeout[:0], raw[:min(len(raw), mostTimeout)]...)
		u.grow(fieldSize(name, len(raw)))
		if keep {
			u.add(newField(name, string(raw)))
		}
		return block, nil
	}
	f := u.seen(name, raw)
	if keep {
		u.add(f)
	}
	u.emit(f)
	return block, nil
}

// nameOf returns a name as a string, one of a known header without allocating.
func (u *unpacker) nameOf(raw []byte) string {
	if known, ok := knownNames[string(raw)]; ok {
		return known
	}
	return string(raw)
}

// seen returns the field for a literal, the same as the last time if that was
// lately.
func (u *unpacker) seen(name string, value []byte) *field {
	h := uint32(2166136261)
	for i := range len(name) {
		h = (h ^ uint32(name[i])) * 16777619
	}
	for _, b := range value {
		h = (h ^ uint32(b)) * 16777619
	}
	slot := &u.lately[(h^h>>16)%uint32(len(u.lately))]
	if f := *slot; f != nil && f.name == name && f.value == string(value) {
		return f
	}
	f := newField(name, string(value))
	if f.size <= tableBytes/4 {
		*slot = f
	}
	return f
}

func (u *unpacker) emit(f *field) {
	if f.kind == kindTimeout {
		u.timed = true
		u.timeout = append(u.timeout[:0], f.value[:min(len(f.value), mostTimeout)]...)
		u.grow(f.size)
		return
	}
	if u.grow(f.size); u.size <= u.limit {
		u.fields = append(u.fields, f)
	}
}

func (u *unpacker) grow(n uint32) {
	if u.size += n; u.size < n {
		u.size = ^uint32(0)
	}
}

// at returns the entry of an index, nil if there is none.
func (u *unpacker) at(i uint32) *field {
	if i < uint32(len(staticFields)) {
		return staticFields[i] // nil for 0
	}
	i -= uint32(len(staticFields))
	if i >= uint32(len(u.table)) {
		return nil
	}
	return u.table[uint32(len(u.table))-1-i]
}

// add puts a field into the table. One that is larger than the table empties it.
func (u *unpacker) add(f *field) {
	u.evict(f.size)
	if f.size <= u.maximum {
		u.table = append(u.table, f)
		u.bytes += f.size
	}
}

// evict makes room for n bytes.
func (u *unpacker) evict(n uint32) {
	gone := 0
	for u.bytes+n > u.maximum && gone < len(u.table) {
		u.bytes -= u.table[gone].size
		u.table[gone] = nil
		gone++
	}
	// The front moves on; append copies what is left when the slice is used up,
	// so the cost of moving is spread over as many additions.
	u.table = u.table[gone:]
}

// string reads a string literal. What it returns is valid until the next one.
func (u *unpacker) string(b []byte) (s, rest []byte, err error) {
	if len(b) == 0 {
		return nil, nil, errCompression
	}
	packed := b[0]&0x80 != 0
	n, b, err := readInt(b, 7)
	if err != nil || uint64(n) > uint64(len(b)) {
		return nil, nil, errCompression
	}
	s, rest = b[:n], b[n:]
	if packed {
		u.scratch.Reset()
		if _, err := hpack.HuffmanDecode(&u.scratch, s); err != nil {
			return nil, nil, errCompression
		}
		s = u.scratch.Bytes()
	}
	return s, rest, nil
}

// readInt reads an integer with a prefix of n bits (RFC 7541, section 5.1).
func readInt(b []byte, n uint8) (v uint32, rest []byte, err error) {
	if len(b) == 0 {
		return 0, nil, errCompression
	}
	most := uint32(1)<<n - 1
	v = uint32(b[0]) & most
	b = b[1:]
	if v < most {
		return v, b, nil
	}
	for shift := 0; shift <= 21; shift += 7 {
		if len(b) == 0 {
			return 0, nil, errCompression
		}
		v += uint32(b[0]&0x7f) << shift
		more := b[0]&0x80 != 0
		if b = b[1:]; !more {
			return v, b, nil
		}
	}
	return 0, nil, errCompression // nothing that we take is as large as that
}

// appendString adds a string literal to dst.
func appendString(dst []byte, s string) []byte {
	return append(appendInt(dst, 0, 7, len(s)), s...)
}

// appendInt adds an integer with a prefix of n bits to dst; high are the bits
// before the prefix.
func appendInt(dst []byte, high byte, n uint8, v int) []byte {
	most := 1<<n - 1
	if v < most {
		return append(dst, high|byte(v))
	}
	dst = append(dst, high|byte(most))
	for v -= most; v >= 0x80; v >>= 7 {
		dst = append(dst, byte(v)|0x80)
	}
	return append(dst, byte(v))
}

// appendField adds a field to dst as a literal that enters no table, so that
// blocks can be encoded once and sent to every client.
func appendField(dst []byte, name, value string) []byte {
	dst = append(dst, 0)
	dst = appendString(dst, name)
	return appendString(dst, value)
}
