package raftlog

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// recovery is what reading a log's files found.
type recovery struct {
	fs    vfs.FS
	dir   string
	visit func(Record) error

	st       state
	sizes    []int64  // of the files of st.segments
	obsolete []string // segments that a compaction allowed to be deleted
	epoch    uint32
	synced   uint64 // highest position said to be synced
	torn     bool
}

// recoverLog reads all segments. It changes nothing on disk and leaves no file
// open. No segments give an empty state.
func recoverLog(fs vfs.FS, dir string, visit func(Record) error) (*recovery, error) {
	r := &recovery{fs: fs, dir: dir, visit: visit}
	names, err := listSegments(fs, dir)
	if err != nil || len(names) == 0 {
		return r, err
	}
	end, needed, err := r.readEnd(names[len(names)-1])
	if err != nil {
		return nil, err
	}
	for len(names) > 1 {
		if sequence, _, _ := parseSegmentName(names[0]); sequence >= needed {
			break
		}
		r.obsolete = append(r.obsolete, names[0])
		names = names[1:]
	}
	if err := r.contiguous(names, needed); err != nil {
		return nil, err
	}
	for i, name := range names {
		if err := r.readSegment(name, i == len(names)-1, end); err != nil {
			return nil, err
		}
	}
	if err := r.st.complete(); err != nil {
		seg := r.st.segments[0]
		return nil, &DamageError{File: seg.path, Held: "the segment's header", Why: err.Error()}
	}
	return r, nil
}

// readEnd finds where the last segment ends, decides whether what follows may be
// cut, and returns the lowest segment still needed.
func (r *recovery) readEnd(name string) (end int64, needed uint64, err error) {
	s, err := openScanner(r.fs, r.dir, name)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	needed = s.header.needed
	held := "the record after the segment's header"
	end, err = s.records(s.size, func(_ int64, f *frame, payload []byte) error {
		held = "the record after " + describe(f, payload)
		if f.kind == KindCompact {
			_, n, err := decodeCompact(payload)
			needed = max(needed, n)
			return ignorePayload(err) // readSegment reports it
		}
		return nil
	})
	if err != nil {
		return 0, 0, err
	}
	later, where, err := s.beyond(end)
	if err != nil {
		return 0, 0, err
	}
	if later > s.base+uint64(end) {
		return 0, 0, s.damage(end, held, fmt.Sprintf(
			"the record at offset %d says that everything before offset %d was on disk", where, int64(later-s.base)))
	}
	f, _, err := s.at(end, s.seed)
	if err != nil {
		return 0, 0, err
	}
	r.torn = where != 0 || f.position == s.base+uint64(end)
	return end, needed, nil
}

func ignorePayload(err error) error {
	if errors.Is(err, errPayload) {
		return nil
	}
	return err
}

// contiguous checks that the files are those from the lowest needed one on.
func (r *recovery) contiguous(names []string, needed uint64) error {
	for i, name := range names {
		want := needed + uint64(i)
		if sequence, _, _ := parseSegmentName(name); sequence != want {
			return &DamageError{
				File: r.fs.PathJoin(r.dir, name),
				Held: fmt.Sprintf("what follows segment %d of the log", want),
				Why:  fmt.Sprintf("segment %d is missing and was not allowed to be deleted", want),
			}
		}
	}
	return nil
}

// readSegment adds what a segment says to the state.
func (r *recovery) readSegment(name string, last bool, end int64) (err error) {
	s, err := openScanner(r.fs, r.dir, name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := r.follows(s); err != nil {
		return err
	}
	s.epoch = max(s.epoch, r.epoch)
	seg := &segment{name: name, path: s.path, header: s.header, base: s.base, seed: s.seed, capacity: s.size}
	r.st.beginSegment(seg)
	r.sizes = append(r.sizes, s.size)
	if r.visit != nil {
		rec := Record{File: s.path, Position: s.base, Synced: s.synced, Kind: KindHeader}
		rec.Index, rec.Term = s.header.compacted.index, s.header.compacted.term
		if err := r.visit(rec); err != nil {
			return err
		}
	}
	limit := s.size
	if last {
		limit = end
	}
	stopped, err := s.records(limit, func(offset int64, f *frame, payload []byte) error {
		if err := r.record(s, offset, f, payload); err != nil {
			if errors.Is(err, errRecord) || errors.Is(err, errPayload) {
				return s.damage(offset, describe(f, payload), "its checksum is right, but "+err.Error())
			}
			return err
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.epoch, r.synced = s.epoch, max(r.synced, s.synced)
	r.st.end = s.base + uint64(stopped)
	return nil
}

// follows checks that a segment continues the one before it. It began only after
// all of that was synced.
func (r *recovery) follows(s *scanner) error {
	if len(r.st.segments) == 0 {
		return nil
	}
	prev := r.st.lastSegment()
	if s.base != r.st.end {
		return &DamageError{
			File:   prev.path,
			Offset: int64(r.st.end - prev.base),
			Held:   fmt.Sprintf("the record after entry %d", r.st.last),
			Why:    fmt.Sprintf("%s was begun after everything before offset %d was on disk", s.path, int64(s.base-prev.base)),
		}
	}
	if s.header.identity != r.st.identity || s.header.first != r.st.last+1 {
		return s.damage(0, "the segment's header", fmt.Sprintf("it does not continue %s", prev.path))
	}
	return nil
}

// errRecord marks a whole record that cannot stand where it does.
var errRecord = errors.New("it does not fit the records before it")

func (r *recovery) record(s *scanner, offset int64, f *frame, payload []byte) error {
	rec := Record{File: s.path, Offset: offset, Position: f.position, Synced: f.synced, Kind: f.kind, Data: payload}
	switch f.kind {
	case KindEntry:
		p, err := decodePoint(payload)
		if err != nil {
			return err
		}
		if err := r.st.addEntry(p, spot{uint32(offset / alignment), f.length}); err != nil {
			return fmt.Errorf("%w: %w", errRecord, err)
		}
		rec.Index, rec.Term, rec.Data = p.index, p.term, payload[entryPrefix:]
	case KindHardState:
		h, err := decodeHardState(payload)
		if err != nil {
			return err
		}
		r.st.hard = h
		rec.Term = h.term
	case KindSnapshot:
		snap, err := decodeSnapshot(payload)
		if err != nil {
			return err
		}
		r.st.restore(&snap)
		rec.Index, rec.Term = snap.Index, snap.Term
	case KindCompact:
		p, _, err := decodeCompact(payload)
		if err != nil {
			return err
		}
		if err := r.st.checkCompact(p); err != nil {
			return fmt.Errorf("%w: %w", errRecord, err)
		}
		r.st.compact(p)
		rec.Index, rec.Term = p.index, p.term
	case KindMark:
	default:
		return fmt.Errorf("raftlog: %s has a record of kind %d at offset %d, written by a newer version: %w",
			s.path, f.kind, offset, ErrFormat)
	}
	if r.visit == nil {
		return nil
	}
	return r.visit(rec)
}

// describe says what a record holds, for an error.
func describe(f *frame, payload []byte) string {
	if f.kind == KindEntry {
		if p, err := decodePoint(payload); err == nil {
			return fmt.Sprintf("entry %d of term %d", p.index, p.term)
		}
	}
	return "a " + f.kind.String()
}

// open brings the log in o.Dir to life.
func (l *Log) open() error {
	if err := l.openDir(); err != nil {
		return err
	}
	r, err := recoverLog(l.fs, l.o.Dir, nil)
	if err != nil {
		return err
	}
	exists := len(r.st.segments) > 0
	if id := l.o.Identity; exists && id != (Identity{}) && id != r.st.identity {
		return fmt.Errorf("raftlog: %s is of member %x of cluster %x, opened for member %x of cluster %x: %w",
			l.o.Dir, r.st.identity.MemberID, r.st.identity.ClusterID, id.MemberID, id.ClusterID, ErrIdentity)
	}
	if err := l.removeLeftovers(r.obsolete); err != nil {
		return err
	}
	if !exists {
		return l.create()
	}
	return l.resume(r)
}

// openDir makes the directory durable and keeps it open for syncing.
func (l *Log) openDir() error {
	if err := l.fs.MkdirAll(l.o.Dir, 0o700); err != nil {
		return fmt.Errorf("raftlog: create %s: %w", l.o.Dir, err)
	}
	parent, err := l.fs.OpenDir(l.fs.PathDir(l.o.Dir))
	if err != nil {
		return fmt.Errorf("raftlog: open the parent of %s: %w", l.o.Dir, err)
	}
	if err := errors.Join(parent.Sync(), parent.Close()); err != nil {
		return fmt.Errorf("raftlog: sync the parent of %s: %w", l.o.Dir, err)
	}
	if l.dir, err = l.fs.OpenDir(l.o.Dir); err != nil {
		return fmt.Errorf("raftlog: open %s: %w", l.o.Dir, err)
	}
	return nil
}

// removeLeftovers deletes spares and segments whose deletion a crash cut short.
func (l *Log) removeLeftovers(names []string) error {
	all, err := l.fs.List(l.o.Dir)
	if err != nil {
		return fmt.Errorf("raftlog: list %s: %w", l.o.Dir, err)
	}
	for _, name := range all {
		if strings.HasPrefix(name, SparePrefix) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		if err := l.fs.Remove(l.path(name)); err != nil {
			return fmt.Errorf("raftlog: delete %s: %w", l.path(name), err)
		}
	}
	if len(names) == 0 {
		return nil
	}
	// A later spare may get the name of one that was deleted here.
	if err := l.dir.Sync(); err != nil {
		return fmt.Errorf("raftlog: sync directory %s: %w", l.o.Dir, err)
	}
	return nil
}

// create begins an empty log.
func (l *Log) create() error {
	l.epoch = 1
	l.end, l.synced = firstPosition, firstPosition
	l.st = state{identity: l.o.Identity, terms: []termRun{{}}, end: firstPosition}
	return l.beginSegment(0)
}

// resume continues the log that r found. Before anything else can be written, a
// mark of a new epoch is synced: so no record that this life writes shares its
// epoch with a record that an earlier life left beyond the end, even if this one
// dies half-way too.
func (l *Log) resume(r *recovery) error {
	l.st = r.st
	last := l.st.lastSegment()
	for _, seg := range l.st.segments {
		var err error
		if seg == last {
			seg.file, err = l.fs.OpenReadWrite(seg.path, writeCategory)
		} else {
			seg.file, err = l.fs.Open(seg.path)
		}
		if err != nil {
			return fmt.Errorf("raftlog: open %s: %w", seg.path, err)
		}
	}
	last.capacity = max(r.sizes[len(r.sizes)-1], l.o.SegmentBytes)
	if err := last.file.Preallocate(0, last.capacity); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		if vfs.IsNoSpaceError(err) {
			err = fmt.Errorf("%w: %w", ErrNoSpace, err)
		}
		return fmt.Errorf("raftlog: reserve %d bytes for %s: %w", last.capacity, last.path, err)
	}
	if r.torn {
		l.o.Logger.Warn("raft log cut after an interrupted write",
			"file", last.path, "offset", int64(r.st.end-last.base), "index", l.st.last)
	}
	if err := l.rewrite(last, int64(r.synced-last.base), int64(r.st.end-last.base)); err != nil {
		return err
	}
	l.end, l.content, l.epoch = r.st.end, r.st.end, r.epoch+1
	if err := l.syncEnd(); err != nil {
		return err
	}
	if err := l.addSmall(KindMark, nil); err != nil {
		return err
	}
	return l.syncEnd()
}

// rewrite writes the bytes of a segment that no mark covers once more, unchanged.
// They may have been read from memory only: an operating system that failed to
// write pages out may hold them for written, and a sync alone would do nothing.
func (l *Log) rewrite(seg *segment, from, to int64) error {
	b := make([]byte, min(to-from, windowBytes))
	for ; from < to; from += int64(len(b)) {
		b = b[:min(int64(len(b)), to-from)]
		if err := seg.readAt(b, from); err != nil {
			return err
		}
		if err := l.writeAt(seg, b, from); err != nil {
			return err
		}
	}
	return nil
}
