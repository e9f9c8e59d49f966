package snapfile

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/storage"
)

// Engram's own form is the files of a store, and that of its index, as they are
// on disk (docs/format.md). Numbers are big-endian. Each checksum is the CRC-32C
// of all that stands before it in the stream, other checksums too, so nothing
// can be missing, double or elsewhere:
//
//	head    magic 8 | version 4 | store's format version 4 | index 8 | term 8 |
//	        revision 8 | checksum 4
//	file    1 1 | length of name 1 | size 8 | name | checksum 4 | pieces
//	piece   256 KiB of the file, or what is left of it | checksum 4
//	end     0 1 | files 8 | sum of sizes 8 | checksum 4
//
// Files stand in the order of their names. Nothing follows the end.

// NativeVersion is that of Engram's own form. Members that announce different
// ones send each other etcd's, so it goes up with storage.FormatVersion too.
const NativeVersion = 2

const (
	nativeMagic  = "ENGRSNAP"
	headSize     = 8 + 4 + 4 + 8 + 8 + 8 + 4
	fileHeadSize = 1 + 1 + 8
	endSize      = 1 + 8 + 8 + 4
	sumSize      = 4

	markEnd, markFile = 0, 1

	// pieceBytes is what is read, checked and written at once.
	pieceBytes = 256 << 10
	// maxFileBytes and maxFiles are what a reader takes.
	maxFileBytes = 1 << 36
	maxFiles     = 1 << 20
)

// The directories that the form is made from and read into. The names of the
// files have them in front.
const (
	StoreDir = "store"
	IndexDir = "index"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// names are the files that a snapshot consists of. Others are neither sent nor
// taken: they are no part of a store, or of one with a write-ahead log or
// separated values, which ours has not.
var names = map[string]*regexp.Regexp{
	StoreDir: regexp.MustCompile(`^(\d{6,20}\.sst|MANIFEST-\d{6,20}|OPTIONS-\d{6,20}|marker\.(manifest|format-version)\.\d{6,20}\.[0-9A-Za-z-]{1,40})$`),
	IndexDir: regexp.MustCompile(`^index\.checkpoint$`),
}

// known says whether a name is one that a snapshot may have.
func known(name string) bool {
	dir, file, _ := strings.Cut(name, "/")
	form := names[dir]
	return form != nil && form.MatchString(file)
}

// Files is a moment to write in Engram's own form. Nobody changes its files.
type Files struct {
	Meta
	Members *member.Root

	fs   storage.FS
	list []file
}

type file struct {
	name, path string
	size       int64
}

// OpenFiles looks at the store and the index in dir, which state.Machine's
// Checkpoint made and nobody has open.
func OpenFiles(fs storage.FS, dir string) (*Files, error) {
	f := &Files{fs: fs}
	for _, sub := range [...]string{IndexDir, StoreDir} {
		path := fs.PathJoin(dir, sub)
		list, err := fs.List(path)
		if err != nil && !(sub == IndexDir && errors.Is(err, os.ErrNotExist)) {
			return nil, fmt.Errorf("snapfile: %w", err)
		}
		slices.Sort(list)
		for _, name := range list {
			one := file{name: sub + "/" + name, path: fs.PathJoin(path, name)}
			info, err := fs.Stat(one.path)
			if err != nil {
				return nil, fmt.Errorf("snapfile: %w", err)
			}
			one.size = info.Size()
			if one.size == 0 && (name == "LOCK" || strings.HasSuffix(name, ".log")) {
				continue // Pebble makes a write-ahead log that is off, too
			}
			if !known(one.name) {
				return nil, fmt.Errorf("snapfile: %s of %d bytes is no file that a snapshot may have", one.path, one.size)
			}
			if one.size > maxFileBytes {
				return nil, fmt.Errorf("snapfile: %s has %d bytes, a snapshot takes files of %d", one.path, one.size, int64(maxFileBytes))
			}
			f.list = append(f.list, one)
		}
	}
	if len(f.list) > maxFiles {
		return nil, fmt.Errorf("snapfile: %s has %d files, a snapshot takes %d", dir, len(f.list), maxFiles)
	}
	var err error
	f.Meta, f.Members, err = metaOfDir(fs, fs.PathJoin(dir, StoreDir))
	return f, err
}

// metaOfDir reads what the store in a directory says of itself.
func metaOfDir(fs storage.FS, dir string) (Meta, *member.Root, error) {
	s, err := storage.Open(storage.Options{FS: fs, Dir: dir, ReadOnly: true, CacheBytes: 1 << 20})
	if err != nil {
		return Meta{}, nil, fmt.Errorf("snapfile: %w", err)
	}
	m, members, err := metaOf(s)
	return m, members, errors.Join(err, s.Close())
}

// Size is the number of bytes that WriteNative writes.
func (f *Files) Size() int64 {
	n := int64(headSize + endSize)
	for _, one := range f.list {
		pieces := (one.size + pieceBytes - 1) / pieceBytes
		n += fileHeadSize + int64(len(one.name)) + sumSize + one.size + pieces*sumSize
	}
	return n
}

// WriteNative writes f. Progress may be nil, see Source.
func (f *Files) WriteNative(ctx context.Context, w io.Writer, done func(done, total int64)) error {
	out := &summedWriter{w: w, done: progress{fn: done, total: f.Size()}}
	head := append(make([]byte, 0, headSize), nativeMagic...)
	head = binary.BigEndian.AppendUint32(head, NativeVersion)
	head = binary.BigEndian.AppendUint32(head, storage.FormatVersion)
	head = binary.BigEndian.AppendUint64(head, f.Applied)
	head = binary.BigEndian.AppendUint64(head, f.Term)
	head = binary.BigEndian.AppendUint64(head, uint64(f.Revision))
	if err := out.write(head); err != nil {
		return err
	}
	buf := make([]byte, pieceBytes+sumSize)
	var size int64
	for _, one := range f.list {
		if err := f.writeFile(ctx, out, one, buf); err != nil {
			return err
		}
		size += one.size
	}
	end := append(make([]byte, 0, endSize), markEnd)
	end = binary.BigEndian.AppendUint64(end, uint64(len(f.list)))
	return out.write(binary.BigEndian.AppendUint64(end, uint64(size)))
}

func (f *Files) writeFile(ctx context.Context, out *summedWriter, one file, buf []byte) (err error) {
	head := append(buf[:0], markFile, byte(len(one.name)))
	head = binary.BigEndian.AppendUint64(head, uint64(one.size))
	if err := out.write(append(head, one.name...)); err != nil {
		return err
	}
	in, err := storage.OpenFile(f.fs, one.path)
	if err != nil {
		return fmt.Errorf("snapfile: %w", err)
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	for left := one.size; left > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		piece := buf[:min(left, pieceBytes)]
		if _, err := io.ReadFull(in, piece); err != nil {
			return fmt.Errorf("snapfile: read %s: %w", one.path, err)
		}
		if err := out.write(piece); err != nil {
			return err
		}
		left -= int64(len(piece))
	}
	return nil
}

// summedWriter writes parts with the checksum of all before behind each.
type summedWriter struct {
	w    io.Writer
	sum  uint32
	n    int64
	done progress
}

// write appends the checksum in b's spare room, if it has some.
func (s *summedWriter) write(b []byte) error {
	s.sum = crc32.Update(s.sum, castagnoli, b)
	sum := binary.BigEndian.AppendUint32(b, s.sum)
	s.sum = crc32.Update(s.sum, castagnoli, sum[len(b):])
	if _, err := s.w.Write(sum); err != nil {
		return fmt.Errorf("snapfile: write: %w", err)
	}
	s.n += int64(len(sum))
	s.done.at(s.n)
	return nil
}

// ReadNative makes the store and the index that WriteNative wrote, in directories
// of dir that are there and empty, and makes the files durable; names become so
// with a sync of the directories. It reads r to its end. A compaction that the
// source had not finished goes on when the store is opened.
func ReadNative(ctx context.Context, r io.Reader, fs storage.FS, dir string) (Meta, error) {
	for _, sub := range [...]string{StoreDir, IndexDir} {
		list, err := fs.List(fs.PathJoin(dir, sub))
		if err != nil {
			return Meta{}, fmt.Errorf("snapfile: %w", err)
		}
		if len(list) > 0 {
			return Meta{}, fmt.Errorf("%w: %s holds %s: read into a new directory", ErrNotEmpty, fs.PathJoin(dir, sub), list[0])
		}
	}
	n := &nativeReader{r: bufio.NewReaderSize(r, pieceBytes), fs: fs, dir: dir, buf: make([]byte, pieceBytes+sumSize)}
	said, err := n.read(ctx)
	if err != nil {
		return Meta{}, fmt.Errorf("snapfile: at byte %d: %w", n.at, err)
	}
	m, _, err := metaOfDir(fs, fs.PathJoin(dir, StoreDir))
	if err != nil {
		return m, fmt.Errorf("%w: what it holds is no store: %w: send it again", ErrDamaged, err)
	}
	if m.Applied != said.Applied || m.Term != said.Term || m.Revision != said.Revision {
		err = fmt.Errorf("%w: its head says index %d, term %d, revision %d, its rows say %d, %d, %d: send it again", ErrDamaged,
			said.Applied, said.Term, said.Revision, m.Applied, m.Term, m.Revision)
	}
	return m, err
}

type nativeReader struct {
	r    *bufio.Reader
	fs   storage.FS
	dir  string
	at   int64 // bytes read
	sum  uint32
	buf  []byte
	last string // name

	files, size uint64
}

func (n *nativeReader) damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s: send it again", ErrDamaged, fmt.Sprintf(format, args...))
}

// fill reads to the end of b and adds it to the checksum.
func (n *nativeReader) fill(b []byte) error {
	got, err := io.ReadFull(n.r, b)
	n.at += int64(got)
	n.sum = crc32.Update(n.sum, castagnoli, b[:got])
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return n.damaged("it ends early")
	}
	return err
}

// part fills b, which has room for a checksum behind it, and checks that.
func (n *nativeReader) part(b []byte, what string) error {
	if err := n.fill(b); err != nil {
		return err
	}
	want := n.sum
	sum := b[len(b) : len(b)+sumSize]
	if err := n.fill(sum); err != nil {
		return err
	}
	if got := binary.BigEndian.Uint32(sum); got != want {
		return n.damaged("%s: checksum %08x, want %08x", what, got, want)
	}
	return nil
}

func (n *nativeReader) read(ctx context.Context) (m Meta, err error) {
	if m, err = n.head(); err != nil {
		return m, err
	}
	for {
		mark := n.buf[:1]
		if err := n.fill(mark); err != nil {
			return m, err
		}
		switch mark[0] {
		case markFile:
			err = n.file(ctx)
		case markEnd:
			return m, n.end()
		default:
			err = n.damaged("a part has mark %d", mark[0])
		}
		if err != nil {
			return m, err
		}
	}
}

func (n *nativeReader) head() (m Meta, err error) {
	// The magic and the version say what the rest looks like.
	head := n.buf[:headSize-sumSize]
	if err := n.fill(head[:12]); err != nil {
		return m, err
	}
	if string(head[:8]) != nativeMagic {
		return m, n.damaged("it does not begin with %s, so it is no snapshot of Engram", nativeMagic)
	}
	if v := binary.BigEndian.Uint32(head[8:]); v != NativeVersion {
		return m, fmt.Errorf("%w: snapshot has version %d, this Engram reads %d: let both members have one version", ErrUnsupported, v, NativeVersion)
	}
	if err := n.part(head[12:], "head"); err != nil {
		return m, err
	}
	if v := binary.BigEndian.Uint32(head[12:]); v != storage.FormatVersion {
		return m, fmt.Errorf("%w: snapshot holds a store of format %d, this Engram reads %d: let both members have one version", ErrUnsupported, v, storage.FormatVersion)
	}
	m.Applied, m.Term = binary.BigEndian.Uint64(head[16:]), binary.BigEndian.Uint64(head[24:])
	m.Revision = int64(binary.BigEndian.Uint64(head[32:]))
	return m, nil
}

// file reads one file, whose mark was read, and writes it.
func (n *nativeReader) file(ctx context.Context) (err error) {
	head := n.buf[:fileHeadSize-1]
	if err := n.fill(head); err != nil {
		return err
	}
	length, size := int(head[0]), binary.BigEndian.Uint64(head[1:])
	if err := n.part(n.buf[:length], "a file's head"); err != nil {
		return err
	}
	name := string(n.buf[:length])
	switch {
	case !known(name):
		return fmt.Errorf("%w: it has a file %q: let both members have one version", ErrUnsupported, name)
	case name <= n.last:
		return n.damaged("file %s follows %s", name, n.last)
	case size > maxFileBytes:
		return n.damaged("file %s has %d bytes, at most %d are allowed", name, size, int64(maxFileBytes))
	case n.files == maxFiles:
		return n.damaged("it has more than %d files", maxFiles)
	}
	n.last = name
	n.files++
	n.size += size
	dir, base, _ := strings.Cut(name, "/")
	f, err := storage.CreateFile(n.fs, n.fs.PathJoin(n.dir, dir, base), "snapshot")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for left := size; left > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		piece := n.buf[:min(left, pieceBytes)]
		if err := n.part(piece, name); err != nil {
			return err
		}
		if _, err := f.Write(piece); err != nil {
			return err
		}
		left -= uint64(len(piece))
	}
	return f.Sync()
}

// end reads what follows its mark.
func (n *nativeReader) end() error {
	b := n.buf[:endSize-1-sumSize]
	if err := n.part(b, "end"); err != nil {
		return err
	}
	if files, size := binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:]); files != n.files || size != n.size {
		return n.damaged("it should have %d files of %d bytes, it has %d of %d", files, size, n.files, n.size)
	}
	if _, err := n.r.ReadByte(); err == nil {
		return n.damaged("bytes follow its end")
	} else if !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
