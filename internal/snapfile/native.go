package snapfile

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/engram-kv/engram/internal/storage"
)

// Engram's own form is the store's keys and values as they are on disk, in
// order, so everything the store holds is in it (docs/format.md). Numbers are
// big-endian, checksums CRC-32C:
//
//	head    magic 8 | version 4 | store's format version 4 | index 8 | term 8 |
//	        revision 8 | checksum of these 4
//	frame   length 4, not 0 | checksum of length and payload 4 | payload
//	end     0 4 | records 8 | bytes of keys and values 8 | checksum of all before 4
//
// A payload is records: uvarint length of key, key, uvarint length of value,
// value. Nothing follows the end.
const (
	nativeMagic   = "ENGRSNAP"
	nativeVersion = 1
	headSize      = 8 + 4 + 4 + 8 + 8 + 8 + 4
	endSize       = 4 + 8 + 8 + 4

	// frameBytes is where a writer ends a frame; a large record is one alone.
	frameBytes = 256 << 10
	// maxFrameBytes is what a reader takes.
	maxFrameBytes = 1 << 30
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// WriteNative writes src in Engram's own form.
func WriteNative(ctx context.Context, w io.Writer, src Source) (err error) {
	m, err := src.resolve()
	if err != nil {
		return err
	}
	out := &summedWriter{w: w, done: progress{fn: src.Progress}}
	head := append(make([]byte, 0, headSize), nativeMagic...)
	head = binary.BigEndian.AppendUint32(head, nativeVersion)
	head = binary.BigEndian.AppendUint32(head, storage.FormatVersion)
	head = binary.BigEndian.AppendUint64(head, m.Applied)
	head = binary.BigEndian.AppendUint64(head, m.Term)
	head = binary.BigEndian.AppendUint64(head, uint64(m.Revision))
	head = binary.BigEndian.AppendUint32(head, crc32.Checksum(head, castagnoli))
	if err := out.write(head); err != nil {
		return err
	}
	it, err := src.Reader.Iter(ctx, nil, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	var records, size uint64
	frame := make([]byte, frameHead, frameHead+frameBytes)
	for ok := it.First(); ok; ok = it.Next() {
		key := it.Key()
		value, err := it.ValueAndErr()
		if err != nil {
			return err
		}
		// Lengths take up to 10 bytes each.
		if need := len(key) + len(value) + 2*binary.MaxVarintLen64; len(frame) > frameHead && len(frame)+need > frameHead+frameBytes {
			if frame, err = out.frame(frame); err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return err
			}
		} else if need > maxFrameBytes {
			return fmt.Errorf("snapfile: record %x has %d bytes, a frame takes %d", key, need, maxFrameBytes)
		}
		frame = binary.AppendUvarint(frame, uint64(len(key)))
		frame = append(frame, key...)
		frame = binary.AppendUvarint(frame, uint64(len(value)))
		frame = append(frame, value...)
		records++
		size += uint64(len(key) + len(value))
	}
	if err := it.Error(); err != nil {
		return err
	}
	if len(frame) > frameHead {
		if _, err := out.frame(frame); err != nil {
			return err
		}
	}
	end := make([]byte, 4, endSize)
	end = binary.BigEndian.AppendUint64(end, records)
	end = binary.BigEndian.AppendUint64(end, size)
	end = binary.BigEndian.AppendUint32(end, crc32.Update(out.sum, castagnoli, end))
	return out.write(end)
}

const frameHead = 4 + 4

type summedWriter struct {
	w    io.Writer
	sum  uint32
	n    int64
	done progress
}

func (s *summedWriter) write(b []byte) error {
	if _, err := s.w.Write(b); err != nil {
		return fmt.Errorf("snapfile: write: %w", err)
	}
	s.sum = crc32.Update(s.sum, castagnoli, b)
	s.n += int64(len(b))
	s.done.at(s.n)
	return nil
}

// frame completes and writes a frame whose payload stands behind room for its
// head, and returns the room for the next.
func (s *summedWriter) frame(f []byte) ([]byte, error) {
	binary.BigEndian.PutUint32(f, uint32(len(f)-frameHead))
	binary.BigEndian.PutUint32(f[4:], frameSum(f[:4], f[frameHead:]))
	err := s.write(f)
	if cap(f) > 4*frameBytes {
		f = make([]byte, frameHead, frameHead+frameBytes)
	}
	return f[:frameHead], err
}

func frameSum(length, payload []byte) uint32 {
	return crc32.Update(crc32.Checksum(length, castagnoli), castagnoli, payload)
}

// ReadNative reads into an empty store what WriteNative wrote, and makes it
// durable. It reads r to its end. A compaction that the source had not finished
// goes on when the store is opened.
func ReadNative(ctx context.Context, r io.Reader, into *storage.Store) (Meta, error) {
	if err := checkEmpty(into); err != nil {
		return Meta{}, err
	}
	n := &nativeReader{r: bufio.NewReaderSize(r, frameBytes), load: into.NewLoader()}
	said, err := n.read(ctx)
	if err != nil {
		n.load.Discard()
		return Meta{}, fmt.Errorf("snapfile: at byte %d: %w", n.at, err)
	}
	if err := n.load.Finish(); err != nil {
		return Meta{}, fmt.Errorf("snapfile: %w", err)
	}
	m, _, err := metaOf(into)
	if err == nil && (m.Applied != said.Applied || m.Term != said.Term || m.Revision != said.Revision) {
		err = fmt.Errorf("%w: its head says index %d, term %d, revision %d, its rows say %d, %d, %d: send it again", ErrDamaged,
			said.Applied, said.Term, said.Revision, m.Applied, m.Term, m.Revision)
	}
	return m, err
}

type nativeReader struct {
	r    *bufio.Reader
	load *storage.Loader
	at   int64 // bytes read
	sum  uint32
	buf  []byte
	prev []byte // last key

	records, size uint64
}

func (n *nativeReader) damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s: send it again, or take another backup", ErrDamaged, fmt.Sprintf(format, args...))
}

// fill reads size bytes. What is there is read before memory for the rest is
// taken, for size may be a damaged number.
func (n *nativeReader) fill(size int) ([]byte, error) {
	n.buf = n.buf[:0]
	for len(n.buf) < size {
		step := min(size-len(n.buf), 4*frameBytes)
		old := len(n.buf)
		if cap(n.buf) < old+step {
			n.buf = append(make([]byte, 0, max(old+step, min(2*old, size))), n.buf...)
		}
		n.buf = n.buf[:old+step]
		got, err := io.ReadFull(n.r, n.buf[old:])
		n.at += int64(got)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, n.damaged("it ends early")
		}
		if err != nil {
			return nil, err
		}
	}
	return n.buf, nil
}

func (n *nativeReader) read(ctx context.Context) (m Meta, err error) {
	head, err := n.fill(headSize)
	if err != nil {
		return m, err
	}
	if string(head[:8]) != nativeMagic {
		return m, n.damaged("it does not begin with %s, so it is no snapshot of Engram", nativeMagic)
	}
	body := head[:headSize-4]
	if binary.BigEndian.Uint32(head[headSize-4:]) != crc32.Checksum(body, castagnoli) {
		return m, n.damaged("the head has a wrong checksum")
	}
	if v := binary.BigEndian.Uint32(head[8:]); v != nativeVersion {
		return m, fmt.Errorf("%w: snapshot has version %d, this Engram reads %d: use one that is as new", ErrUnsupported, v, nativeVersion)
	}
	if v := binary.BigEndian.Uint32(head[12:]); v != storage.FormatVersion {
		return m, fmt.Errorf("%w: snapshot holds a store of format %d, this Engram reads %d: use one that is as new", ErrUnsupported, v, storage.FormatVersion)
	}
	m.Applied, m.Term = binary.BigEndian.Uint64(head[16:]), binary.BigEndian.Uint64(head[24:])
	m.Revision = int64(binary.BigEndian.Uint64(head[32:]))
	n.sum = crc32.Update(0, castagnoli, head)
	for {
		if err := ctx.Err(); err != nil {
			return m, err
		}
		length, err := n.fill(4)
		if err != nil {
			return m, err
		}
		n.sum = crc32.Update(n.sum, castagnoli, length)
		size := binary.BigEndian.Uint32(length)
		if size == 0 {
			return m, n.end()
		}
		if size > maxFrameBytes {
			return m, n.damaged("a frame of %d bytes, at most %d are allowed", size, maxFrameBytes)
		}
		frame, err := n.fill(4 + int(size))
		if err != nil {
			return m, err
		}
		n.sum = crc32.Update(n.sum, castagnoli, frame)
		want := binary.BigEndian.Uint32(frame)
		if payload := frame[4:]; frameSum(binary.BigEndian.AppendUint32(nil, size), payload) != want {
			return m, n.damaged("a frame of %d bytes has a wrong checksum", size)
		} else if err := n.frame(payload); err != nil {
			return m, err
		}
		if cap(n.buf) > 8*frameBytes {
			n.buf = nil
		}
	}
}

func (n *nativeReader) frame(payload []byte) error {
	format := storage.RowKey(storage.TableMeta, []byte(storage.MetaFormat))
	for len(payload) > 0 {
		var key, value []byte
		for _, field := range [...]*[]byte{&key, &value} {
			l, w := binary.Uvarint(payload)
			if w <= 0 || l > uint64(len(payload)-w) {
				return n.damaged("record %d is longer than its frame", n.records+1)
			}
			*field = payload[w : w+int(l)]
			payload = payload[w+int(l):]
		}
		if bytes.Compare(key, n.prev) <= 0 {
			return n.damaged("key %x follows %x", key, n.prev)
		}
		n.prev = append(n.prev[:0], key...)
		n.records++
		n.size += uint64(len(key) + len(value))
		if bytes.Equal(key, format) {
			// The store to fill has it, of the version that the head was checked for.
			if len(value) != 4 || binary.BigEndian.Uint32(value) != storage.FormatVersion {
				return n.damaged("its format row is %x", value)
			}
			continue
		}
		if err := n.load.Set(key, value); err != nil {
			return err
		}
	}
	return nil
}

// end reads what follows the 0 that is no frame's length.
func (n *nativeReader) end() error {
	b, err := n.fill(endSize - 4)
	if err != nil {
		return err
	}
	records, size := binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])
	if sum := crc32.Update(n.sum, castagnoli, b[:16]); binary.BigEndian.Uint32(b[16:]) != sum {
		return n.damaged("the whole has a wrong checksum")
	}
	if records != n.records || size != n.size {
		return n.damaged("it should have %d records of %d bytes, it has %d of %d", records, size, n.records, n.size)
	}
	if _, err := n.r.ReadByte(); err == nil {
		return n.damaged("bytes follow its end")
	} else if !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
