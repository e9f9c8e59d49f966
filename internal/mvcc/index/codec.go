package index

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"slices"
)

// A record is encoded with uvarints; its key without what it shares with the
// key before, its revisions as differences:
//
//	shared | length of the rest | rest | revisions<<1 + has lease | [lease, zigzag] |
//	for each revision, oldest first:
//	  flags (1 byte) | main - main of the one before | [sub] | size | [main - create | version]
//
// The last two only for a put that does not continue the revision before it.
const (
	codeTombstone = 1 << iota
	codeSub
	codeContinues // create is the same and version one more than in the revision before
	codeFlags     = codeTombstone | codeSub | codeContinues
)

// minCodedRev is the fewest bytes of a revision: flags, main, size.
const minCodedRev = 3

// Encoder turns records into bytes. The zero value is ready.
type Encoder struct {
	last   []byte // key
	before Rev    // of the record at hand
}

// Reset makes the next record independent of those before, as a Decoder needs
// it at the start of its block.
func (e *Encoder) Reset() { e.last = e.last[:0] }

// Append appends a valid record to dst. Ref is left out.
func (e *Encoder) Append(dst []byte, r *Record) []byte {
	dst = e.begin(dst, r.Key, r.Lease, len(r.Revs))
	for i := range r.Revs {
		dst = e.rev(dst, &r.Revs[i])
	}
	return dst
}

// begin appends what comes before the revisions.
func (e *Encoder) begin(dst, key []byte, lease int64, revs int) []byte {
	shared := commonPrefix(e.last, key)
	rest := key[shared:]
	e.last = append(e.last[:shared], rest...)

	dst = binary.AppendUvarint(dst, uint64(shared))
	dst = binary.AppendUvarint(dst, uint64(len(rest)))
	dst = append(dst, rest...)
	e.before = Rev{}
	if lease != 0 {
		dst = binary.AppendUvarint(dst, uint64(revs)<<1|1)
		return binary.AppendVarint(dst, lease)
	}
	return binary.AppendUvarint(dst, uint64(revs)<<1)
}

// rev appends the next revision of the record that was begun.
func (e *Encoder) rev(dst []byte, v *Rev) []byte {
	var flags byte
	if v.Tombstone {
		flags |= codeTombstone
	}
	if v.Sub != 0 {
		flags |= codeSub
	}
	if continues(&e.before, v) {
		flags |= codeContinues
	}
	dst = append(dst, flags)
	dst = binary.AppendUvarint(dst, uint64(v.Main-e.before.Main))
	if v.Sub != 0 {
		dst = binary.AppendUvarint(dst, uint64(v.Sub))
	}
	dst = binary.AppendUvarint(dst, uint64(v.Size))
	if flags&(codeTombstone|codeContinues) == 0 {
		dst = binary.AppendUvarint(dst, uint64(v.Main-v.Create))
		dst = binary.AppendUvarint(dst, uint64(v.Version))
	}
	e.before = *v
	return dst
}

func continues(before, v *Rev) bool {
	return !v.Tombstone && before.Version != 0 && v.Create == before.Create && v.Version == before.Version+1
}

// Decoder turns a block of encoded records back. Any bytes give records that
// pass Validate, or an error.
type Decoder struct {
	rest []byte
	size int // of the whole block
	key  []byte
	err  error // the first one; final
}

// NewDecoder returns a Decoder of a block, which it reads in place.
func NewDecoder(block []byte) *Decoder { return &Decoder{rest: block, size: len(block)} }

// Next overwrites r with the next record; it reuses r.Revs, and r.Key is valid
// until the next call. At the end it returns io.EOF, on bad bytes an error that
// wraps ErrRecord and names the place. After an error it returns the same again.
func (d *Decoder) Next(r *Record) error {
	if d.err == nil && len(d.rest) == 0 {
		return io.EOF
	}
	*r = Record{Revs: r.Revs[:0]}
	d.header(r)
	for i := range r.Revs {
		if d.err != nil {
			break
		}
		var before Rev
		if i > 0 {
			before = r.Revs[i-1]
		}
		d.rev(&before, &r.Revs[i])
	}
	if d.err == nil {
		if err := r.Validate(); err != nil {
			d.err = fmt.Errorf("before byte %d of %d: %w", d.size-len(d.rest), d.size, err)
		}
	}
	return d.err
}

// header decodes all but the revisions, and makes room for these.
func (d *Decoder) header(r *Record) {
	shared := d.number(uint64(len(d.key)))
	length := d.number(uint64(len(d.rest)))
	d.key = append(d.key[:shared], d.take(length)...)
	r.Key = d.key
	count := d.number(math.MaxUint64)
	if count&1 != 0 {
		zigzag := d.number(math.MaxUint64)
		r.Lease = int64(zigzag>>1) ^ -int64(zigzag&1)
		if r.Lease == 0 {
			d.fail() // it would have been left out
		}
	}
	if count >>= 1; count > uint64(len(d.rest)/minCodedRev) {
		d.fail()
	}
	if d.err == nil {
		r.Revs = slices.Grow(r.Revs, int(count))[:count]
	}
}

// rev decodes one revision.
func (d *Decoder) rev(before, v *Rev) {
	*v = Rev{}
	flags := d.take(1)
	if len(flags) == 0 || flags[0]&^codeFlags != 0 {
		d.fail()
		return
	}
	v.Tombstone = flags[0]&codeTombstone != 0
	v.Main = before.Main + int64(d.number(uint64(math.MaxInt64-before.Main)))
	if flags[0]&codeSub != 0 {
		v.Sub = int64(d.number(maxSub))
	}
	v.Size = uint32(d.number(math.MaxUint32))
	switch {
	case flags[0]&codeContinues != 0:
		if v.Tombstone || before.Version == 0 || before.Version == math.MaxInt64 {
			d.fail()
			return
		}
		v.Create, v.Version = before.Create, before.Version+1
	case !v.Tombstone:
		v.Create = v.Main - int64(d.number(uint64(v.Main)))
		v.Version = int64(d.number(math.MaxInt64))
	}
}

// number decodes a number of at most limit. After an error it returns 0.
func (d *Decoder) number(limit uint64) uint64 {
	n, size := binary.Uvarint(d.rest)
	if size <= 0 || n > limit {
		d.fail()
	}
	if d.err != nil {
		return 0
	}
	d.rest = d.rest[size:]
	return n
}

// take returns the next n bytes, or nil after an error.
func (d *Decoder) take(n uint64) []byte {
	if n > uint64(len(d.rest)) {
		d.fail()
	}
	if d.err != nil {
		return nil
	}
	b := d.rest[:n]
	d.rest = d.rest[n:]
	return b
}

func (d *Decoder) fail() {
	if d.err == nil {
		d.err = fmt.Errorf("%w: cannot be decoded at byte %d of %d", ErrRecord, d.size-len(d.rest), d.size)
	}
}
