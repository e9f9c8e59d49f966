package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"
)

// Append is what one MsgStorageAppend asks to persist. Its parts are written in
// the order Snapshot, Entries, HardState, so that a hard state that
// survives a crash never commits an entry that did not.
type Append struct {
	// Snapshot says that the state of another member was installed and its
	// files are synced: all entries are dropped. nil for none.
	Snapshot *Snapshot
	// Entries follow each other. They continue the log, or replace its tail
	// from the first one's index. The log keeps the entries in memory; nobody
	// may change them afterwards.
	Entries []*raftpb.Entry
	// HardState is nil or empty if unchanged.
	HardState *raftpb.HardState
}

// extent is where a record of the Write in hand lies, and what it says.
type extent struct {
	kind   Kind
	offset int64 // in buf
	size   uint32
	entry  *raftpb.Entry
	snap   *Snapshot
	hard   hardState
}

// Write adds appends to the log with one write to the file. It is not durable
// until Sync. mustSync is true if it must be before any of it is acknowledged:
// there are entries or a snapshot, or the term or the vote changed; it is also
// true if an earlier Write that needed it was not synced yet.
//
// ErrNoSpace and ErrOrder leave the log as it was, and the former may be tried
// again. Any other error is final: nothing is known about what is on disk, and
// every later call returns it too.
func (l *Log) Write(appends []Append) (mustSync bool, err error) {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.err != nil {
		return false, l.err
	}
	need, must, err := l.check(appends)
	if err != nil || need == 0 {
		return l.mustSync, err
	}
	if !l.fits(need + l.reserved()) {
		if err := l.beginSegment(need); err != nil {
			return false, err
		}
	}
	if err := l.encode(appends, need); err != nil {
		return false, err
	}
	seg := l.st.lastSegment()
	if err := l.writeAt(seg, l.buf, int64(l.end-seg.base)); err != nil {
		return false, l.poison(err)
	}
	l.advance(seg)
	l.mustSync = l.mustSync || must
	return l.mustSync, nil
}

// check finds out what appends need before anything of them is written.
func (l *Log) check(appends []Append) (need int64, must bool, err error) {
	last, floor, commit, hard := l.st.last, l.st.compacted.index, l.st.hard.commit, l.st.hard
	for i := range appends {
		a := &appends[i]
		if s := a.Snapshot; s != nil {
			if s.Index <= floor || s.Index < commit {
				return 0, false, fmt.Errorf("snapshot %d, log compacted at %d and committed to %d: %w",
					s.Index, floor, commit, ErrOrder)
			}
			b, err := appendSnapshot(nil, s)
			if err != nil {
				return 0, false, err
			}
			need += recordSize(int64(len(b)))
			last, floor, commit, must = s.Index, s.Index, s.Index, true
		}
		for j, e := range a.Entries {
			index := e.GetIndex()
			if index <= commit && l.replaces(e, floor) {
				return 0, false, fmt.Errorf("entry %d of term %d would replace a committed one: %w",
					index, e.GetTerm(), ErrOrder)
			}
			if index <= floor || index > last+1 || j > 0 && index != last+1 {
				return 0, false, fmt.Errorf("entry %d, log from %d to %d: %w", index, floor+1, last, ErrOrder)
			}
			if len(e.GetData()) > maxPayloadBytes-entryPrefix || uint64(e.GetType()) > 255 {
				return 0, false, fmt.Errorf("entry %d of type %d has %d bytes, at most %d: %w",
					index, e.GetType(), len(e.GetData()), maxPayloadBytes-entryPrefix, ErrTooLarge)
			}
			need += recordSize(int64(entryPrefix + len(e.GetData())))
			last, must = index, true
		}
		if h, ok := hardStateOf(a.HardState); ok && h != hard {
			need += recordSize(hardStateBytes)
			must = must || h.term != hard.term || h.vote != hard.vote
			commit, hard = max(commit, h.commit), h
		}
	}
	return need, must, nil
}

// replaces reports whether e differs from the log's entry at its index. An index
// that earlier appends of the same Write brought is not looked at.
func (l *Log) replaces(e *raftpb.Entry, floor uint64) bool {
	i := e.GetIndex()
	return i > floor && i >= l.st.first() && i <= l.st.last && l.st.term(i) != e.GetTerm()
}

func hardStateOf(h *raftpb.HardState) (hardState, bool) {
	s := hardState{h.GetTerm(), h.GetVote(), h.GetCommit()}
	return s, s != hardState{}
}

// encode puts the records of appends into buf, and what they say into pending.
func (l *Log) encode(appends []Append, need int64) error {
	if cap(l.buf) < int(need) || cap(l.buf) > maxKeptBuffer && need <= maxKeptBuffer {
		l.buf = make([]byte, 0, max(need, 64<<10))
	}
	l.buf, l.pending = l.buf[:0], l.pending[:0]
	hard := l.st.hard
	for i := range appends {
		a := &appends[i]
		if a.Snapshot != nil {
			payload, err := appendSnapshot(nil, a.Snapshot)
			if err != nil {
				return err
			}
			l.record(extent{kind: KindSnapshot, snap: keepSnapshot(a.Snapshot)}, 0, payload, nil)
		}
		for _, e := range a.Entries {
			var p [entryPrefix]byte
			binary.LittleEndian.PutUint64(p[0:], e.GetIndex())
			binary.LittleEndian.PutUint64(p[8:], e.GetTerm())
			l.record(extent{kind: KindEntry, entry: e}, uint8(e.GetType()), p[:], e.GetData())
		}
		if h, ok := hardStateOf(a.HardState); ok && h != hard {
			var p [hardStateBytes]byte
			l.record(extent{kind: KindHardState, hard: h}, 0, appendHardState(p[:0], h), nil)
			hard = h
		}
	}
	return nil
}

// maxKeptBuffer is how large an encoding buffer is kept between Writes.
const maxKeptBuffer = 4 << 20

func keepSnapshot(s *Snapshot) *Snapshot {
	return &Snapshot{s.Index, s.Term, s.Dir, cloneConfState(s.ConfState)}
}

// record adds one record with the payload a followed by b to buf.
func (l *Log) record(x extent, sub uint8, a, b []byte) {
	at, length := len(l.buf), len(a)+len(b)
	var zeros [frameBytes]byte
	l.buf = append(l.buf, zeros[:]...)
	l.buf = append(l.buf, a...)
	l.buf = append(l.buf, b...)
	l.buf = append(l.buf, zeros[:recordSize(int64(length))-frameBytes-int64(length)]...)
	sealRecord(l.buf[at:], frame{
		length:   uint32(length),
		position: l.end + uint64(at),
		synced:   l.synced,
		epoch:    l.epoch,
		kind:     x.kind,
		sub:      sub,
	}, l.st.lastSegment().seed)
	x.offset, x.size = int64(at), uint32(length)
	l.pending = append(l.pending, x)
}

// advance makes the written records visible to readers.
func (l *Log) advance(seg *segment) {
	l.mu.Lock()
	defer l.mu.Unlock()
	start := int64(l.end - seg.base)
	for i := range l.pending {
		x := &l.pending[i]
		switch x.kind {
		case KindEntry:
			p := point{x.entry.GetIndex(), x.entry.GetTerm()}
			if p.index <= l.st.last {
				l.restarts++
				l.windows.truncate(p.index)
			}
			at := spot{uint32((start + x.offset) / alignment), x.size}
			if err := l.st.addEntry(p, at); err != nil {
				panic(fmt.Sprintf("raftlog: check let through what cannot be added: %v", err))
			}
			l.tail.add(x.entry)
		case KindHardState:
			l.st.hard = x.hard
		case KindSnapshot:
			l.restarts++
			l.st.restore(x.snap)
			l.tail.clear()
			l.windows.clear()
		}
		if x.kind != KindMark {
			l.content = l.end + uint64(len(l.buf))
		}
		*x = extent{} // lets the entry go when the cache does
	}
	l.marked = l.synced
	l.end += uint64(len(l.buf))
	l.st.end = l.end
}

// Sync makes everything written durable. It returns at once if it is already.
// A failure is final.
func (l *Log) Sync() error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.err != nil {
		return l.err
	}
	return l.syncEnd()
}

// Mark syncs the log and writes, durably, that it is synced up to here: from now
// on any damage is told from a torn write. It returns at once if that was already
// said. The driver calls it when it has been idle for a moment.
func (l *Log) Mark() error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.err != nil {
		return l.err
	}
	return l.mark()
}

func (l *Log) mark() error {
	if err := l.syncEnd(); err != nil {
		return err
	}
	if l.content <= l.marked {
		return nil
	}
	if err := l.addSmall(KindMark, nil); err != nil {
		if errors.Is(err, ErrNoSpace) {
			return nil // the log is synced; the next record says so
		}
		return err
	}
	return l.syncEnd()
}

// addSmall writes one record of the kinds that may use a segment's reserve.
func (l *Log) addSmall(kind Kind, payload []byte) error {
	if n := recordSize(int64(len(payload))); !l.fits(n) {
		if err := l.beginSegment(n); err != nil {
			return err
		}
	}
	l.buf, l.pending = l.buf[:0], l.pending[:0]
	l.record(extent{kind: kind}, 0, payload, nil)
	seg := l.st.lastSegment()
	if err := l.writeAt(seg, l.buf, int64(l.end-seg.base)); err != nil {
		return l.poison(err)
	}
	l.advance(seg)
	return nil
}

// syncEnd syncs the last segment, if there is anything to sync.
func (l *Log) syncEnd() error {
	if l.synced == l.end {
		return nil
	}
	seg := l.st.lastSegment()
	if err := l.syncFile(seg.file); err != nil {
		return l.poison(fmt.Errorf("raftlog: sync %s: %w", seg.path, err))
	}
	l.synced, l.mustSync = l.end, false
	return nil
}

func (l *Log) syncFile(f vfs.File) error {
	if l.o.Syncs != nil {
		l.o.Syncs.SyncBegan()
		defer l.o.Syncs.SyncEnded()
	}
	start := time.Now()
	err := f.SyncData()
	l.o.Metrics.FsyncDuration.Observe(time.Since(start).Seconds())
	return err
}

func (l *Log) writeAt(seg *segment, b []byte, offset int64) error {
	start := time.Now()
	n, err := seg.file.WriteAt(b, offset)
	l.o.Metrics.WriteDuration.Observe(time.Since(start).Seconds())
	l.o.Metrics.WriteBytes.Add(float64(n))
	if err != nil {
		return fmt.Errorf("raftlog: write %d bytes at offset %d of %s: %w", len(b), offset, seg.path, err)
	}
	return nil
}

// poison makes err the answer of every later writing call.
func (l *Log) poison(err error) error {
	l.err = fmt.Errorf("the raft log takes no more writes, restart this member: %w", err)
	return l.err
}
