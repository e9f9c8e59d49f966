package snapfile

import (
	"fmt"
	"io"
)

// pages numbers the pages of a file in the order in which they are written.
// Without a writer it only counts: that is the first pass.
type pages struct {
	next uint64
	w    io.Writer
	buf  []byte
	done progress

	planned func(bytes int) error // of the first pass, or nil
	told    uint64                // pages that it was told of
}

// planBytes is the piece that the first pass tells of.
const planBytes = 256 << 10

// add writes a page with the given size of content, header included, that fill
// puts behind the header of a zeroed page.
func (p *pages) add(flags uint16, count, size int, fill func(page []byte)) (id uint64, err error) {
	n := max(1, (size+pageSize-1)/pageSize)
	id = p.next
	p.next += uint64(n)
	if p.w == nil {
		if bytes := int(p.next-p.told) * pageSize; p.planned != nil && bytes >= planBytes {
			p.told = p.next
			return id, p.planned(bytes)
		}
		return id, nil
	}
	if size := n * pageSize; cap(p.buf) < size {
		p.buf = make([]byte, size)
	} else {
		p.buf = p.buf[:size]
		clear(p.buf)
	}
	putPageHeader(p.buf, pageHeader{id, flags, count, uint32(n - 1)})
	fill(p.buf)
	if _, err := p.w.Write(p.buf); err != nil {
		return 0, fmt.Errorf("snapfile: write page %d: %w", id, err)
	}
	if cap(p.buf) > 64*pageSize {
		p.buf = nil // of a large record: most are not
	}
	p.done.at(int64(p.next) * pageSize)
	return id, nil
}

// tree lays out the pages of one bucket from keys in ascending order. A branch
// page is written as soon as its children are, so a tree holds one page per
// level at most. Pages are filled to the end: most of what etcd adds later comes
// behind the last key.
type tree struct {
	pages *pages

	// The leaf page at hand.
	count int
	size  int // of elements, keys and values
	first []byte
	elems []byte // with pos counted from the first key
	data  []byte

	levels []level
}

// level holds the children that wait for their branch page.
type level struct {
	children []child
	size     int // of elements and keys
}

type child struct {
	key []byte
	id  uint64
}

// minChildren is how many a branch page has at least, as in bbolt.
const minChildren = 2

// add adds an element. Key and value are copied.
func (t *tree) add(flags uint32, key, value []byte) error {
	if len(key) == 0 || len(key) > maxKeySize {
		return fmt.Errorf("key of %d bytes, etcd's file takes 1 to %d", len(key), maxKeySize)
	}
	if len(value) > maxValueSize {
		return fmt.Errorf("value of %d bytes, etcd's file takes up to %d", len(value), maxValueSize)
	}
	size := elementSize + len(key) + len(value)
	if t.count > 0 && pageHeaderSize+t.size+size > pageSize {
		if err := t.endLeaf(); err != nil {
			return err
		}
	}
	if t.count == 0 {
		t.first = append(t.first[:0], key...)
	}
	if t.pages.w != nil {
		t.elems = le.AppendUint32(t.elems, flags)
		t.elems = le.AppendUint32(t.elems, uint32(len(t.data)))
		t.elems = le.AppendUint32(t.elems, uint32(len(key)))
		t.elems = le.AppendUint32(t.elems, uint32(len(value)))
		t.data = append(append(t.data, key...), value...)
	}
	t.count++
	t.size += size
	return nil
}

func (t *tree) endLeaf() error {
	id, err := t.pages.add(flagLeaf, t.count, pageHeaderSize+t.size, func(page []byte) {
		for i := range t.count {
			pos := t.elems[i*elementSize+4:]
			le.PutUint32(pos, le.Uint32(pos)+uint32((t.count-i)*elementSize))
		}
		copy(page[pageHeaderSize:], t.elems)
		copy(page[pageHeaderSize+len(t.elems):], t.data)
	})
	if err != nil {
		return err
	}
	t.count, t.size, t.elems, t.data = 0, 0, t.elems[:0], t.data[:0]
	if cap(t.data) > 64*pageSize {
		t.data = nil
	}
	return t.push(0, t.first, id)
}

// push adds a page to those that wait at a level, and writes their branch page
// if it is full and enough are left for the next.
func (t *tree) push(at int, key []byte, id uint64) error {
	if at == len(t.levels) {
		t.levels = append(t.levels, level{})
	}
	l := &t.levels[at]
	l.children = append(l.children, child{append([]byte(nil), key...), id})
	l.size += elementSize + len(key)
	if n := l.fitting(); len(l.children)-n >= minChildren {
		return t.endBranch(at, n)
	}
	return nil
}

// fitting is how many children a page takes. Large keys make it overflow.
func (l *level) fitting() int {
	if pageHeaderSize+l.size <= pageSize {
		return len(l.children)
	}
	size := pageHeaderSize
	for i := range l.children {
		if size += elementSize + len(l.children[i].key); size > pageSize {
			return min(max(i, minChildren), len(l.children))
		}
	}
	return len(l.children)
}

// endBranch writes a branch page of the first n children.
func (t *tree) endBranch(at, n int) error {
	children := t.levels[at].children[:n]
	size := 0
	for i := range children {
		size += elementSize + len(children[i].key)
	}
	id, err := t.pages.add(flagBranch, n, pageHeaderSize+size, func(page []byte) {
		data := n * elementSize
		for i, c := range children {
			e := page[pageHeaderSize+i*elementSize:]
			le.PutUint32(e, uint32(data-i*elementSize))
			le.PutUint32(e[4:], uint32(len(c.key)))
			le.PutUint64(e[8:], c.id)
			data += copy(page[pageHeaderSize+data:], c.key)
		}
	})
	if err != nil {
		return err
	}
	first := children[0].key
	l := &t.levels[at]
	l.size -= size
	l.children = append(l.children[:0:0], l.children[n:]...)
	return t.push(at+1, first, id)
}

// finish writes what is left and returns the root page.
func (t *tree) finish() (root uint64, err error) {
	if t.count == 0 && len(t.levels) == 0 {
		return t.pages.add(flagLeaf, 0, pageHeaderSize, func([]byte) {})
	}
	if t.count > 0 {
		if err := t.endLeaf(); err != nil {
			return 0, err
		}
	}
	for at := 0; ; at++ {
		l := &t.levels[at]
		if at == len(t.levels)-1 && len(l.children) == 1 {
			return l.children[0].id, nil
		}
		// One too many: the last page gets two.
		if n := l.fitting(); n < len(l.children) && len(l.children) > minChildren+1 {
			if err := t.endBranch(at, n-1); err != nil {
				return 0, err
			}
		}
		if err := t.endBranch(at, len(t.levels[at].children)); err != nil {
			return 0, err
		}
	}
}
