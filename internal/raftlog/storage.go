package raftlog

import (
	"errors"
	"fmt"
	"math"
	"math/bits"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

var _ raft.Storage = (*Log)(nil)

// InitialState implements raft.Storage. The commit index is at least the
// compacted one and what SetInitialState said, since commit-only changes are not
// synced. The ConfState is that of SetInitialState, else of the installed
// snapshot. Both are the caller's.
func (l *Log) InitialState() (*raftpb.HardState, *raftpb.ConfState, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	h := l.st.hard
	h.commit = max(h.commit, l.st.compacted.index, l.applied)
	cs := l.boot
	if cs == nil && l.st.snap != nil {
		cs = l.st.snap.ConfState
	}
	if h == (hardState{}) {
		return nil, cloneConfState(cs), nil
	}
	return &raftpb.HardState{Term: &h.term, Vote: &h.vote, Commit: &h.commit}, cloneConfState(cs), nil
}

// FirstIndex implements raft.Storage.
func (l *Log) FirstIndex() (uint64, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.st.first(), nil
}

// LastIndex implements raft.Storage.
func (l *Log) LastIndex() (uint64, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.st.last, nil
}

// Term implements raft.Storage. It never touches the disk.
func (l *Log) Term(i uint64) (uint64, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	switch {
	case i < l.st.compacted.index:
		return 0, raft.ErrCompacted
	case i > l.st.last:
		return 0, raft.ErrUnavailable
	}
	return l.st.term(i), nil
}

// Snapshot implements raft.Storage.
func (l *Log) Snapshot() (*raftpb.Snapshot, error) {
	l.mu.RLock()
	f, s := l.snapshot, l.st.snap
	l.mu.RUnlock()
	if f != nil {
		return f()
	}
	if s == nil {
		return nil, raft.ErrSnapshotTemporarilyUnavailable
	}
	return &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: &s.Index, Term: &s.Term, ConfState: cloneConfState(s.ConfState),
	}}, nil
}

// Entries implements raft.Storage: entries from lo to below hi, of at most
// maxSize encoded bytes but at least one. It returns a shorter prefix
// where the entries in memory end; see SetOnMiss for lo not being in memory. The
// slice is the caller's; the entries are shared and must not be changed.
func (l *Log) Entries(lo, hi, maxSize uint64) ([]*raftpb.Entry, error) {
	l.mu.RLock()
	if err := l.inRange(lo, hi); err != nil || lo == hi {
		l.mu.RUnlock()
		return nil, err
	}
	cached := l.tail.from(lo)
	if cached == nil {
		cached = l.windows.from(lo)
	}
	if cached != nil {
		n := prefixLength(cached[:min(uint64(len(cached)), hi-lo)], maxSize)
		out := make([]*raftpb.Entry, n)
		copy(out, cached)
		l.mu.RUnlock()
		return out, nil
	}
	onMiss := l.onMiss
	l.mu.RUnlock()
	if onMiss != nil && onMiss(lo, hi) {
		return nil, nil
	}
	out, _, err := l.load(lo, hi, maxSize)
	return out, err
}

// inRange checks lo and hi against the log. Called with mu.
func (l *Log) inRange(lo, hi uint64) error {
	switch {
	case lo <= l.st.compacted.index:
		return raft.ErrCompacted
	case hi > l.st.last+1 || lo > hi:
		return raft.ErrUnavailable
	}
	return nil
}

// prefixLength returns how many entries raft's size limit lets through.
func prefixLength(entries []*raftpb.Entry, maxSize uint64) int {
	size := uint64(0)
	for i, e := range entries {
		size += encodedSize(e)
		if size > maxSize && i > 0 {
			return i
		}
	}
	return len(entries)
}

// encodedSize is proto.Size of an entry without unknown fields, and much faster.
func encodedSize(e *raftpb.Entry) uint64 {
	n := uint64(0)
	if e.Type != nil {
		n += 1 + varintSize(uint64(*e.Type))
	}
	if e.Term != nil {
		n += 1 + varintSize(*e.Term)
	}
	if e.Index != nil {
		n += 1 + varintSize(*e.Index)
	}
	if e.Data != nil {
		n += 1 + varintSize(uint64(len(e.Data))) + uint64(len(e.Data))
	}
	return n
}

func varintSize(v uint64) uint64 { return uint64(bits.Len64(v|1)+6) / 7 }

// Prefetch reads entries from lo to below hi from disk, at most maxBytes of them
// but at least one, and keeps them for Entries. It blocks, so it is called off the
// raft loop. Entries that are in memory already are not read. It returns
// raft.ErrCompacted if lo is gone, and nil if the entries were replaced
// meanwhile: the caller drives raft again in any case.
func (l *Log) Prefetch(lo, hi, maxBytes uint64) error {
	l.mu.RLock()
	hi = min(hi, l.st.last+1)
	if lo >= hi {
		l.mu.RUnlock()
		return nil
	}
	err := l.inRange(lo, hi)
	there := l.tail.from(lo) != nil || l.windows.from(lo) != nil
	l.mu.RUnlock()
	if err != nil || there {
		return err
	}
	entries, restarts, err := l.load(lo, hi, min(maxBytes, uint64(l.o.PrefetchBytes)))
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.restarts == restarts && lo > l.st.compacted.index {
		l.windows.add(entries)
	}
	return nil
}

// Replay reads entries from lo to below hi from disk in order, in pieces of some
// MiB, and hands each to f, which may keep it. It does not use or fill the cache.
// An error of f ends it and is returned.
func (l *Log) Replay(lo, hi uint64, f func(*raftpb.Entry) error) error {
	for lo < hi {
		entries, _, err := l.load(lo, hi, replayBytes)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := f(e); err != nil {
				return err
			}
		}
		lo += uint64(len(entries))
	}
	return nil
}

const (
	replayBytes = 4 << 20
	// readBytes is how much is read from a segment at a time. The entries read
	// share its memory, so it also bounds what one kept entry pins.
	readBytes = 256 << 10
)

// load reads entries from disk: at least one, at most maxSize encoded bytes. It
// returns the count of truncations as of when it looked the entries up. If
// they are replaced while it reads, it starts again.
func (l *Log) load(lo, hi, maxSize uint64) ([]*raftpb.Entry, uint64, error) {
	for {
		l.mu.RLock()
		if err := l.inRange(lo, hi); err != nil {
			l.mu.RUnlock()
			return nil, 0, err
		}
		restarts := l.restarts
		runs := l.plan(lo, hi, maxSize)
		l.mu.RUnlock()
		var out []*raftpb.Entry
		var err error
		for i := range runs {
			if out, err = runs[i].read(out); err != nil {
				break
			}
		}
		l.mu.RLock()
		same := l.restarts == restarts
		l.mu.RUnlock()
		if same || err == nil {
			return out, restarts, err
		}
		if errors.Is(err, raft.ErrCompacted) {
			return nil, restarts, err
		}
	}
}

// run is a stretch of entries in one segment that is read at once.
type run struct {
	seg   *segment
	index uint64 // of the first entry
	spots []spot
	bytes int64 // from the first frame to the end of the last record
}

// plan looks up where the entries lie. Called with mu.
func (l *Log) plan(lo, hi, maxSize uint64) []run {
	var runs []run
	size := uint64(0)
	for i := lo; i < hi; {
		seg, n := l.st.find(i)
		r := run{seg: seg, index: i}
		start := int64(seg.spots[n].unit) * alignment
		for _, s := range seg.spots[n:] {
			end := int64(s.unit)*alignment + recordSize(int64(s.size))
			if i == hi || len(r.spots) > 0 && end-start > readBytes {
				break
			}
			// An upper bound of the encoded size: the frame is larger than
			// the tags and numbers of an entry.
			size += uint64(s.size) + frameBytes
			if i > lo && size > maxSize {
				hi = i
				break
			}
			r.spots = append(r.spots, s)
			r.bytes = end - start
			i++
		}
		if len(r.spots) > 0 {
			runs = append(runs, r)
		}
	}
	return runs
}

// read appends the entries of the run to out.
func (r *run) read(out []*raftpb.Entry) ([]*raftpb.Entry, error) {
	start := int64(r.spots[0].unit) * alignment
	b := make([]byte, r.bytes)
	if err := r.seg.readAt(b, start); err != nil {
		return nil, err
	}
	slots := make([]entrySlot, len(r.spots))
	for i, s := range r.spots {
		offset := int64(s.unit) * alignment
		rec := b[offset-start:][:recordSize(int64(s.size))]
		f := decodeFrame(rec)
		ok := f.kind == KindEntry && f.length == s.size && f.position == r.seg.base+uint64(offset) &&
			checkRecord(rec, r.seg.seed)
		var e *raftpb.Entry
		if ok {
			var err error
			e, err = decodeEntry(&slots[i], &f, rec[frameBytes:][:s.size])
			ok = err == nil && e.GetIndex() == r.index+uint64(i)
		}
		if !ok {
			return nil, &DamageError{
				File: r.seg.path, Offset: offset, Held: fmt.Sprintf("entry %d", r.index+uint64(i)),
				Why: "it was read or written correctly since this member started",
			}
		}
		out = append(out, e)
	}
	return out, nil
}

// NoLimit as a size asks for all entries.
const NoLimit = math.MaxUint64
