package snapfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
)

// boltFile reads a bbolt file. It does not map it into memory as bbolt does: a
// damaged page number would end the process there, beyond recover. It makes the
// checks that bbolt's Check makes of all that it reads: no page is used twice,
// or free, or beyond the last one, keys are in order and where the pages above
// promise them.
type boltFile struct {
	r    io.ReaderAt
	size int64
	meta boltMeta
	used bitmap
	free bitmap
	bufs [][]byte // by depth
}

const (
	// maxDepth is more levels than any file has that a disk could hold.
	maxDepth = 32
	// Page sizes that bbolt looks for.
	minPageSize, maxPageSize = 1024, 1024 << 15
)

type bitmap []uint64

func (b bitmap) has(i uint64) bool { return b[i/64]&(1<<(i%64)) != 0 }
func (b bitmap) set(i uint64)      { b[i/64] |= 1 << (i % 64) }

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrDamaged, fmt.Errorf(format, args...))
}

// openBolt reads the meta pages and the freelist of a file of the given size.
// What follows the last page is not looked at: backups have a checksum there.
func openBolt(r io.ReaderAt, size int64) (*boltFile, error) {
	f := &boltFile{r: r, size: size}
	if err := f.findMeta(); err != nil {
		return nil, err
	}
	m := f.meta
	if need := m.pageCount; need < 4 || need > uint64(size)/uint64(m.pageSize) {
		return nil, damaged("%d pages of %d bytes should be in %d bytes: the file was cut", need, m.pageSize, size)
	}
	f.used = make(bitmap, m.pageCount/64+1)
	f.used.set(0)
	f.used.set(1)
	return f, f.readFreelist()
}

// findMeta takes the newer one of the two meta pages that are whole. Like bbolt,
// it takes the older one if the newer is not: its pages are kept as long, in
// case that the last write was interrupted.
func (f *boltFile) findMeta() error {
	found := false
	take := func(at int64, pageSize uint32) {
		b := make([]byte, pageHeaderSize+metaSize)
		if _, err := f.r.ReadAt(b, at); err != nil {
			return
		}
		m, ok := parseMeta(b[pageHeaderSize:])
		if ok && (pageSize == 0 || m.pageSize == pageSize) && m.pageSize >= minPageSize && m.pageSize <= maxPageSize &&
			m.pageSize&(m.pageSize-1) == 0 && (!found || m.txid > f.meta.txid) {
			f.meta, found = m, true
		}
	}
	if take(0, 0); found {
		take(int64(f.meta.pageSize), f.meta.pageSize)
	}
	for size := uint32(minPageSize); !found && size <= maxPageSize; size *= 2 {
		take(int64(size), size)
	}
	if !found {
		return damaged("neither of the two meta pages is whole: this is no database file of etcd, or not all of it")
	}
	return nil
}

func (f *boltFile) readFreelist() error {
	if f.meta.freelist == noFreelist {
		return nil
	}
	h, b, err := f.page(f.meta.freelist, 0)
	if err != nil {
		return err
	}
	if h.flags != flagFreelist {
		return damaged("page %d should be the freelist, it has flags %x", h.id, h.flags)
	}
	b = b[pageHeaderSize:]
	count := uint64(h.count)
	if count == 0xFFFF { // more than that: the number stands first
		count, b = le.Uint64(b), b[8:]
	}
	if count > uint64(len(b)/8) {
		return damaged("the freelist says %d pages, %d bytes are there", count, len(b))
	}
	f.free = make(bitmap, len(f.used))
	for i := range count {
		id := le.Uint64(b[i*8:])
		if id >= f.meta.pageCount || f.used.has(id) || f.free.has(id) {
			return damaged("the freelist has page %d, which is none that can be free", id)
		}
		f.free.set(id)
	}
	return nil
}

// page reads a page and those that it overflows to, once in the life of f. What
// it returns is good until the next page of the same depth.
func (f *boltFile) page(id uint64, depth int) (h pageHeader, b []byte, err error) {
	if id < 2 || id >= f.meta.pageCount {
		return h, nil, damaged("page %d is used, the file has %d", id, f.meta.pageCount)
	}
	if depth >= maxDepth {
		return h, nil, damaged("page %d is %d levels deep", id, depth)
	}
	size := int64(f.meta.pageSize)
	for len(f.bufs) <= depth {
		f.bufs = append(f.bufs, nil)
	}
	if cap(f.bufs[depth]) < int(size) {
		f.bufs[depth] = make([]byte, size)
	}
	b = f.bufs[depth][:size]
	if err := f.read(b, int64(id)*size); err != nil {
		return h, nil, err
	}
	if h = parsePageHeader(b); h.id != id {
		return h, nil, damaged("page %d says that it is page %d", id, h.id)
	}
	last := id + uint64(h.overflow)
	whole := (int64(h.overflow) + 1) * size
	if last >= f.meta.pageCount || whole > maxValueSize+2*size {
		return h, nil, damaged("page %d says that it has %d pages, the file has %d", id, h.overflow+1, f.meta.pageCount)
	}
	for i := id; i <= last; i++ {
		if f.used.has(i) || f.free != nil && f.free.has(i) {
			return h, nil, damaged("page %d is used twice, or free", i)
		}
		f.used.set(i)
	}
	if h.overflow == 0 {
		return h, b, nil
	}
	large := make([]byte, whole) // not kept: few are
	copy(large, b)
	return h, large, f.read(large[size:], int64(id+1)*size)
}

func (f *boltFile) read(b []byte, at int64) error {
	_, err := f.r.ReadAt(b, at)
	if errors.Is(err, io.EOF) {
		return damaged("it ends before byte %d", at+int64(len(b)))
	}
	return err
}

// rowFunc takes an element of a leaf page. Key and value are good during the
// call only.
type rowFunc func(flags uint32, key, value []byte) error

// bounds is where the keys of a page lie; nil is open.
type bounds struct{ lower, upper []byte }

// walk gives all elements below a page in order.
func (f *boltFile) walk(ctx context.Context, id uint64, in bounds, depth int, fn rowFunc) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	h, b, err := f.page(id, depth)
	if err != nil {
		return err
	}
	switch h.flags {
	case flagLeaf:
		return walkLeaf(h, b, in, fn)
	case flagBranch:
		return f.walkBranch(ctx, h, b, in, depth, fn)
	}
	return damaged("page %d should hold keys, it has flags %x", id, h.flags)
}

func walkLeaf(h pageHeader, b []byte, in bounds, fn rowFunc) error {
	var prev []byte
	for i := range h.count {
		at := pageHeaderSize + i*elementSize
		if at+elementSize > len(b) {
			return damaged("page %d has %d elements in %d bytes", h.id, h.count, len(b))
		}
		flags, pos, keySize, valueSize := le.Uint32(b[at:]), le.Uint32(b[at+4:]), le.Uint32(b[at+8:]), le.Uint32(b[at+12:])
		start := uint64(at) + uint64(pos)
		end := start + uint64(keySize) + uint64(valueSize)
		if keySize == 0 || end > uint64(len(b)) {
			return damaged("page %d: element %d is not within it", h.id, i)
		}
		key := b[start : start+uint64(keySize) : start+uint64(keySize)]
		if err := in.check(h.id, prev, key); err != nil {
			return err
		}
		prev = key
		if err := fn(flags, key, b[start+uint64(keySize):end:end]); err != nil {
			return err
		}
	}
	return nil
}

func (f *boltFile) walkBranch(ctx context.Context, h pageHeader, b []byte, in bounds, depth int, fn rowFunc) error {
	if h.count == 0 {
		return damaged("branch page %d is empty", h.id)
	}
	element := func(i int) (key []byte, child uint64, err error) {
		at := pageHeaderSize + i*elementSize
		if at+elementSize > len(b) {
			return nil, 0, damaged("page %d has %d elements in %d bytes", h.id, h.count, len(b))
		}
		pos, size := le.Uint32(b[at:]), le.Uint32(b[at+4:])
		start := uint64(at) + uint64(pos)
		if end := start + uint64(size); size == 0 || end > uint64(len(b)) {
			return nil, 0, damaged("page %d: element %d is not within it", h.id, i)
		}
		return b[start : start+uint64(size)], le.Uint64(b[at+8:]), nil
	}
	key, child, err := element(0)
	if err != nil {
		return err
	}
	if err := in.check(h.id, nil, key); err != nil {
		return err
	}
	for i := range h.count {
		below := bounds{key, in.upper}
		next := child
		if i+1 < h.count {
			prev := key
			if key, next, err = element(i + 1); err == nil {
				err = in.check(h.id, prev, key)
			}
			if err != nil {
				return err
			}
			below.upper = key
		}
		if err := f.walk(ctx, child, below, depth+1, fn); err != nil {
			return err
		}
		child = next
	}
	return nil
}

func (in bounds) check(id uint64, prev, key []byte) error {
	if prev != nil && bytes.Compare(key, prev) <= 0 {
		return damaged("page %d: key %.40x follows %.40x", id, key, prev)
	}
	if in.lower != nil && bytes.Compare(key, in.lower) < 0 || in.upper != nil && bytes.Compare(key, in.upper) >= 0 {
		return damaged("page %d: key %.40x is not from %.40x up to %.40x, where it was looked for", id, key, in.lower, in.upper)
	}
	return nil
}

// bucket is where the rows of a bucket are.
type bucket struct {
	root   uint64
	inline []byte // its page, if root is 0
}

// buckets lists the buckets of the wanted names.
func (f *boltFile) buckets(ctx context.Context, wanted func(name []byte) bool) (map[string]bucket, error) {
	found := map[string]bucket{}
	err := f.walk(ctx, f.meta.root, bounds{}, 0, func(flags uint32, key, value []byte) error {
		if flags&elementBucket == 0 {
			return damaged("key %.40q stands outside of all buckets", key)
		}
		if len(value) < bucketSize {
			return damaged("bucket %.40q has a head of %d bytes, want %d", key, len(value), bucketSize)
		}
		if !wanted(key) {
			return nil
		}
		b := bucket{root: le.Uint64(value)}
		if b.root == 0 {
			b.inline = append([]byte(nil), value[bucketSize:]...)
		}
		found[string(key)] = b
		return nil
	})
	return found, err
}

// rows gives the rows of a bucket in order.
func (f *boltFile) rows(ctx context.Context, b bucket, fn addFunc) error {
	row := func(flags uint32, key, value []byte) error {
		if flags&elementBucket != 0 {
			return damaged("key %.40q is a bucket", key)
		}
		return fn(key, value)
	}
	if b.root != 0 {
		return f.walk(ctx, b.root, bounds{}, 0, row)
	}
	if len(b.inline) < pageHeaderSize {
		return damaged("its inline page has %d bytes, want %d", len(b.inline), pageHeaderSize)
	}
	h := parsePageHeader(b.inline)
	if h.flags != flagLeaf {
		return damaged("its inline page has flags %x", h.flags)
	}
	return walkLeaf(h, b.inline, bounds{}, row)
}
