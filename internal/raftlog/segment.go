package raftlog

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cockroachdb/errors/oserror"
	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3"
)

// segment is one file of the log. Its records lie at positions base, base+size of
// the first, and so on, up to the base of the next segment.
type segment struct {
	name     string // without directory
	path     string
	header   header
	base     uint64 // position of the file's first byte
	capacity int64  // bytes that are reserved on disk
	seed     uint32

	// Under Log.mu. spots[i] is where the entry first+i lies; an entry that was
	// replaced or compacted has no spot.
	first uint64
	spots []spot

	// io is read-locked while file is being read, so that it is not closed or
	// reused under a reader.
	io   sync.RWMutex
	file vfs.File // nil after the segment was deleted
}

func (s *segment) close() error {
	s.io.Lock()
	defer s.io.Unlock()
	if s.file == nil {
		return nil
	}
	err := s.file.Close()
	s.file = nil
	return err
}

// readAt fills b from offset. A segment that was deleted meanwhile answers
// raft.ErrCompacted.
func (s *segment) readAt(b []byte, offset int64) error {
	s.io.RLock()
	defer s.io.RUnlock()
	if s.file == nil {
		return raft.ErrCompacted
	}
	if _, err := s.file.ReadAt(b, offset); err != nil {
		return fmt.Errorf("raftlog: read %d bytes at offset %d of %s: %w", len(b), offset, s.path, err)
	}
	return nil
}

// spare is a file made ready to become the next segment. It has its space on
// disk and nothing that matters in it.
type spare struct {
	name     string
	capacity int64
	file     vfs.File
}

// Names of files: a segment's end, a spare's beginning.
const (
	SegmentSuffix = ".log"
	SparePrefix   = "spare-"
)

// segmentName is the file's name: sequence and first index, so that a listing shows
// what lies where.
func segmentName(sequence, first uint64) string {
	return fmt.Sprintf("%08d-%020d%s", sequence, first, SegmentSuffix)
}

func parseSegmentName(name string) (sequence, first uint64, ok bool) {
	name, ok = strings.CutSuffix(name, SegmentSuffix)
	if !ok {
		return 0, 0, false
	}
	a, b, _ := strings.Cut(name, "-")
	sequence, err1 := strconv.ParseUint(a, 10, 64)
	first, err2 := strconv.ParseUint(b, 10, 64)
	return sequence, first, err1 == nil && err2 == nil
}

// listSegments returns the names of the segment files in order of sequence.
func listSegments(fs vfs.FS, dir string) ([]string, error) {
	all, err := fs.List(dir)
	if oserror.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("raftlog: list %s: %w", dir, err)
	}
	all = slices.DeleteFunc(all, func(name string) bool {
		_, _, ok := parseSegmentName(name)
		return !ok
	})
	slices.SortFunc(all, func(a, b string) int {
		x, _, _ := parseSegmentName(a)
		y, _, _ := parseSegmentName(b)
		if x < y {
			return -1
		}
		return 1
	})
	return all, nil
}

// Prepare makes the next segment file ready, so that Write need not wait for
// that when the present one is full. It returns at once if one is ready. It may
// run beside Write; the driver calls it off the loop, after a segment was begun
// or when it is idle. ErrNoSpace says in good time that the disk fills up.
func (l *Log) Prepare() error {
	l.dmu.Lock()
	defer l.dmu.Unlock()
	l.wmu.Lock()
	err, ready := l.err, l.spare != nil
	l.wmu.Unlock()
	if err != nil || ready {
		return err
	}
	sp, err := l.newSpare(l.o.SegmentBytes, true)
	if err != nil {
		return err
	}
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.err != nil || l.spare != nil {
		return errors.Join(l.err, l.discard(sp))
	}
	l.spare = sp
	return nil
}

// newSpare creates a file with capacity bytes reserved on disk. With durable set
// the reservation is synced, which saves the next segment from it.
func (l *Log) newSpare(capacity int64, durable bool) (*spare, error) {
	sp := &spare{name: l.spareName(), capacity: capacity}
	path := l.path(sp.name)
	fail := func(doing string, err error) error {
		if sp.file != nil {
			// The file is not part of the log; Open removes it if this fails.
			_ = sp.file.Close()
			_ = l.fs.Remove(path)
		}
		if vfs.IsNoSpaceError(err) {
			err = fmt.Errorf("%w: %w", ErrNoSpace, err)
		}
		return fmt.Errorf("raftlog: %s of %d bytes for %s: %w", doing, capacity, path, err)
	}
	var err error
	if sp.file, err = l.fs.OpenReadWrite(path, writeCategory); err != nil {
		sp.file = nil
		return nil, fail("create a file", err)
	}
	if err := reserve(sp.file, capacity); err != nil {
		return nil, fail("reserve space", err)
	}
	if durable {
		if err := sp.file.Sync(); err != nil {
			return nil, fail("sync the reservation", err)
		}
	}
	return sp, nil
}

func (l *Log) spareName() string {
	return fmt.Sprintf("%s%08d", SparePrefix, l.spares.Add(1))
}

// reserve makes sure that the file can grow to n bytes. File systems that cannot
// reserve get zeros written instead.
func reserve(f vfs.File, n int64) error {
	err := f.Preallocate(0, n)
	if err == nil || !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	zeros := make([]byte, min(n, 1<<20))
	for at := int64(0); at < n; at += int64(len(zeros)) {
		if _, err := f.WriteAt(zeros[:min(int64(len(zeros)), n-at)], at); err != nil {
			return err
		}
	}
	return nil
}

const writeCategory vfs.DiskWriteCategory = "raft-log"

func (l *Log) path(name string) string { return l.fs.PathJoin(l.o.Dir, name) }

// discard removes a spare that is not wanted.
func (l *Log) discard(sp *spare) error {
	return errors.Join(sp.file.Close(), l.fs.Remove(l.path(sp.name)))
}

// beginSegment syncs the present segment and continues in a new one with room for
// need bytes of records beside its header. ErrNoSpace leaves everything as it
// was; any other failure is of promised bytes. Called with wmu.
func (l *Log) beginSegment(need int64) error {
	h := l.nextHeader()
	payload, err := h.append(nil)
	if err != nil {
		return err
	}
	head := recordSize(int64(len(payload)))
	if need += head + l.reserved(); need > maxSegmentBytes {
		return fmt.Errorf("%d bytes, a segment holds at most %d: %w", need, int64(maxSegmentBytes), ErrTooLarge)
	}
	sp := l.spare
	if sp == nil || sp.capacity < need {
		if sp, err = l.newSpare(max(need, l.o.SegmentBytes), false); err != nil {
			if errors.Is(err, ErrNoSpace) {
				return err
			}
			return l.poison(err)
		}
	} else {
		l.spare = nil
	}
	seg := &segment{
		name:     segmentName(h.sequence, h.first),
		header:   h,
		base:     l.end,
		capacity: sp.capacity,
		seed:     h.seed(),
		file:     sp.file,
	}
	seg.path = l.path(seg.name)
	if err := l.syncEnd(); err != nil {
		return errors.Join(err, sp.file.Close())
	}
	record := make([]byte, head)
	copy(record[frameBytes:], payload)
	sealRecord(record, frame{
		length: uint32(len(payload)), position: seg.base, synced: l.synced, epoch: l.epoch, kind: KindHeader,
	}, 0)
	if err := l.publish(sp, seg, record); err != nil {
		return l.poison(errors.Join(err, sp.file.Close()))
	}
	l.mu.Lock()
	l.st.beginSegment(seg)
	l.end = seg.base + uint64(head)
	l.st.end = l.end
	l.mu.Unlock()
	l.marked, l.synced = l.synced, l.end
	return nil
}

// publish writes the header and only then gives the file its name, so that a file
// with a segment's name always begins with a whole header.
func (l *Log) publish(sp *spare, seg *segment, record []byte) error {
	if err := l.writeAt(seg, record, 0); err != nil {
		return err
	}
	if err := l.syncFile(seg.file); err != nil {
		return fmt.Errorf("raftlog: sync the header of %s: %w", seg.path, err)
	}
	if err := l.fs.Rename(l.path(sp.name), seg.path); err != nil {
		return fmt.Errorf("raftlog: rename %s to %s: %w", sp.name, seg.path, err)
	}
	if err := l.dir.Sync(); err != nil {
		return fmt.Errorf("raftlog: sync directory %s: %w", l.o.Dir, err)
	}
	return nil
}

// nextHeader carries over what the log knows.
func (l *Log) nextHeader() header {
	l.mu.RLock()
	defer l.mu.RUnlock()
	h := header{
		sequence:  1,
		salt:      l.o.Rand(),
		identity:  l.st.identity,
		first:     l.st.last + 1,
		compacted: l.st.compacted,
		hard:      l.st.hard,
		snap:      l.st.snap,
		needed:    1,
	}
	if len(l.st.segments) > 0 {
		h.sequence = l.st.lastSegment().header.sequence + 1
		h.needed = l.st.segments[0].header.sequence
	}
	return h
}

// reserved is the room at a segment's end that only marks and compactions use,
// so that a full disk does not keep the log from being cut.
func (l *Log) reserved() int64 { return min(4096, l.o.SegmentBytes/8) }

// fits reports whether n bytes fit into the present segment.
func (l *Log) fits(n int64) bool {
	seg := l.st.lastSegment()
	return int64(l.end-seg.base)+n <= seg.capacity
}
