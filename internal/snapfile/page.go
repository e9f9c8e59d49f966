package snapfile

import (
	"encoding/binary"
	"hash/fnv"
)

// The pages of a bbolt file, version 2. Numbers are little-endian: bbolt writes
// those of its machine, and all that etcd supports but s390x are that way.
//
//	page     id 8 | flags 2 | count 2 | overflow 4 | elements | keys and values
//	leaf     flags 4 | pos 4 | key size 4 | value size 4        pos counts from
//	branch   pos 4 | key size 4 | child page 8                  the element's start
//	bucket   root page 8 | sequence 8 [| page]                  the value of a bucket's key;
//	                                                            root 0: the page follows inline
//	meta     magic 4 | version 4 | page size 4 | flags 4 | root bucket 16 |
//	         freelist page 8 | page count 8 | txid 8 | FNV-1a of these 8
//
// A page with overflow n takes the n pages behind it too.
const (
	pageSize       = 4096
	pageHeaderSize = 16
	elementSize    = 16 // leaf and branch
	bucketSize     = 16
	metaSize       = 64
	metaSumAt      = metaSize - 8

	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagMeta     = 0x04
	flagFreelist = 0x10

	elementBucket = 0x01 // flag of a leaf element whose value is a bucket

	boltMagic   = 0xED0CDAED
	boltVersion = 2
	noFreelist  = ^uint64(0)

	// maxKeySize and maxValueSize are what bbolt takes.
	maxKeySize   = 32768
	maxValueSize = 1<<31 - 2
)

var le = binary.LittleEndian

type pageHeader struct {
	id       uint64
	flags    uint16
	count    int
	overflow uint32
}

func putPageHeader(b []byte, h pageHeader) {
	le.PutUint64(b, h.id)
	le.PutUint16(b[8:], h.flags)
	le.PutUint16(b[10:], uint16(h.count))
	le.PutUint32(b[12:], h.overflow)
}

func parsePageHeader(b []byte) pageHeader {
	return pageHeader{le.Uint64(b), le.Uint16(b[8:]), int(le.Uint16(b[10:])), le.Uint32(b[12:])}
}

func appendBucket(dst []byte, root uint64) []byte {
	return le.AppendUint64(le.AppendUint64(dst, root), 0)
}

type boltMeta struct {
	pageSize                        uint32
	root, freelist, pageCount, txid uint64
}

func (m boltMeta) append(dst []byte) []byte {
	at := len(dst)
	dst = le.AppendUint32(dst, boltMagic)
	dst = le.AppendUint32(dst, boltVersion)
	dst = le.AppendUint32(dst, m.pageSize)
	dst = le.AppendUint32(dst, 0)
	dst = appendBucket(dst, m.root)
	dst = le.AppendUint64(dst, m.freelist)
	dst = le.AppendUint64(dst, m.pageCount)
	dst = le.AppendUint64(dst, m.txid)
	return le.AppendUint64(dst, metaSum(dst[at:]))
}

// parseMeta reads what follows the header of a meta page. It says whether that
// is one.
func parseMeta(b []byte) (m boltMeta, ok bool) {
	if len(b) < metaSize || le.Uint32(b) != boltMagic || le.Uint32(b[4:]) != boltVersion ||
		le.Uint64(b[metaSumAt:]) != metaSum(b[:metaSumAt]) {
		return m, false
	}
	return boltMeta{
		pageSize: le.Uint32(b[8:]),
		root:     le.Uint64(b[16:]), freelist: le.Uint64(b[32:]), pageCount: le.Uint64(b[40:]), txid: le.Uint64(b[48:]),
	}, true
}

func metaSum(b []byte) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(b)
	return h.Sum64()
}
