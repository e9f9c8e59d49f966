package raftlog

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/errors/oserror"
	"go.etcd.io/raft/v3"
)

// Compact forgets the entries up to index, whose term is kept, and deletes the
// segments that hold no entry any more; one of them is kept as the next
// segment. An index that is already compacted only deletes what can be. The
// caller sees to it that the entries are applied and durable elsewhere. An index
// above the last is raft.ErrUnavailable.
//
// It syncs the log when there is a segment to delete, so it does not run on
// the raft loop.
func (l *Log) Compact(index uint64) error {
	l.dmu.Lock()
	defer l.dmu.Unlock()
	dead, err := l.forget(index)
	if err != nil {
		return err
	}
	return l.remove(dead)
}

// forget writes the compaction and takes the segments that are not needed any
// more out of the log. It returns them.
func (l *Log) forget(index uint64) ([]*segment, error) {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.err != nil {
		return nil, l.err
	}
	if index > l.st.last {
		return nil, fmt.Errorf("raftlog: compact at %d, last entry is %d: %w", index, l.st.last, raft.ErrUnavailable)
	}
	p := l.st.compacted
	if index > p.index {
		p = point{index, l.st.term(index)}
	}
	l.mu.Lock()
	old := l.st.compacted
	l.st.compact(p)
	l.tail.compact(p.index)
	l.windows.compact(p.index)
	n := l.st.dead()
	l.mu.Unlock()
	if p == old && n == 0 {
		return nil, nil
	}
	// A new segment may begin here; that makes none of the first n needed.
	needed := l.st.segments[n].header.sequence
	if err := l.addSmall(KindCompact, appendCompact(nil, p, needed)); err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, nil
	}
	if err := l.syncEnd(); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	dead := l.st.segments[:n:n]
	l.st.segments = append([]*segment(nil), l.st.segments[n:]...)
	return dead, nil
}

// remove deletes the files of segments that are no longer part of the log, or
// makes a spare of one. Called with dmu.
func (l *Log) remove(dead []*segment) error {
	var errs []error
	kept, err := l.recycle(dead)
	if err != nil {
		errs = append(errs, err)
	}
	for _, seg := range dead {
		if seg != kept {
			errs = append(errs, seg.close())
			l.garbage = append(l.garbage, seg.path)
		}
	}
	if len(l.garbage) == 0 {
		return errors.Join(errs...)
	}
	var left []string
	for _, path := range l.garbage {
		if err := l.fs.Remove(path); err != nil && !oserror.IsNotExist(err) {
			errs = append(errs, fmt.Errorf("raftlog: delete %s: %w", path, err))
			left = append(left, path)
		}
	}
	l.garbage = left
	if err := l.dir.Sync(); err != nil {
		errs = append(errs, fmt.Errorf("raftlog: sync directory %s: %w", l.o.Dir, err))
	}
	return errors.Join(errs...)
}

// recycle makes one of the dead segments the spare, if there is none. Its blocks
// are allocated and written, so that syncing into it is cheap; its old
// bytes can not be taken for records of the new segment.
func (l *Log) recycle(dead []*segment) (*segment, error) {
	l.wmu.Lock()
	want := l.spare == nil && l.err == nil
	l.wmu.Unlock()
	if !want {
		return nil, nil
	}
	for _, seg := range dead {
		if seg.capacity != l.o.SegmentBytes {
			continue
		}
		name := l.spareName()
		if err := l.fs.Rename(seg.path, l.path(name)); err != nil {
			return nil, fmt.Errorf("raftlog: rename %s to %s: %w", seg.path, name, err)
		}
		if err := seg.close(); err != nil { // waits for readers
			return seg, err
		}
		// The rename need not be durable: should the old name come back, it
		// is one that the synced compaction lets Open delete unread.
		f, err := l.fs.OpenReadWrite(l.path(name), writeCategory)
		if err != nil {
			return seg, fmt.Errorf("raftlog: open %s: %w", name, err)
		}
		sp := &spare{name: name, capacity: seg.capacity, file: f}
		l.wmu.Lock()
		defer l.wmu.Unlock()
		if l.err != nil || l.spare != nil {
			return seg, l.discard(sp)
		}
		l.spare = sp
		return seg, nil
	}
	return nil, nil
}
