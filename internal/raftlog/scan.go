package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// scanner reads the records of one segment in order, through a window of the
// file that moves along.
type scanner struct {
	path string
	file vfs.File
	size int64 // of the file; beyond it nothing is read

	header header
	base   uint64
	seed   uint32
	epoch  uint32 // of the last record read; later ones have no lower one
	synced uint64 // highest statement read so far

	window []byte
	start  int64 // offset of window
}

const windowBytes = 1 << 20

// openScanner reads the header of a segment file. A file with a segment's name
// has a header, so its absence is damage.
func openScanner(fs vfs.FS, dir, name string) (_ *scanner, err error) {
	s := &scanner{path: fs.PathJoin(dir, name)}
	if s.file, err = fs.Open(s.path, vfs.SequentialReadsOption); err != nil {
		return nil, fmt.Errorf("raftlog: open %s: %w", s.path, err)
	}
	defer func() {
		if err != nil {
			_ = s.file.Close() // it was only read
		}
	}()
	info, err := s.file.Stat()
	if err != nil {
		return nil, fmt.Errorf("raftlog: stat %s: %w", s.path, err)
	}
	s.size = info.Size()
	f, payload, err := s.at(0, 0)
	if err != nil {
		return nil, err
	}
	if payload == nil || f.kind != KindHeader || f.position < firstPosition || f.position%alignment != 0 || f.synced != f.position {
		return nil, s.damage(0, "the segment's header", "a segment gets its name only after its header was synced")
	}
	s.header, err = decodeHeader(payload)
	if errors.Is(err, ErrFormat) {
		return nil, fmt.Errorf("raftlog: %s: %w", s.path, err)
	}
	sequence, first, _ := parseSegmentName(name)
	if err != nil || s.header.sequence != sequence || s.header.first != first {
		return nil, s.damage(0, "the segment's header", "its checksum is right, but it is not that of a file of this name")
	}
	s.base, s.seed, s.epoch, s.synced = f.position, s.header.seed(), f.epoch, f.synced
	return s, nil
}

func (s *scanner) close() error { return s.file.Close() }

func (s *scanner) damage(offset int64, held, why string) error {
	return &DamageError{File: s.path, Offset: offset, Held: held, Why: why}
}

// bytes returns the n bytes at offset, or nil if the file ends before. They are
// valid until the next call.
func (s *scanner) bytes(offset, n int64) ([]byte, error) {
	if offset+n > s.size {
		return nil, nil
	}
	if offset < s.start || offset+n > s.start+int64(len(s.window)) {
		want := min(max(n, windowBytes), s.size-offset)
		if int64(cap(s.window)) < want {
			s.window = make([]byte, want)
		}
		s.window, s.start = s.window[:want], offset
		if m, err := s.file.ReadAt(s.window, offset); err != nil && (err != io.EOF || int64(m) < want) {
			s.window = s.window[:0]
			return nil, fmt.Errorf("raftlog: read %d bytes at offset %d of %s: %w", want, offset, s.path, err)
		}
	}
	return s.window[offset-s.start:][:n], nil
}

// at returns the record at offset if its checksum is right, whatever its position
// says. Otherwise payload is nil; an empty payload is not.
func (s *scanner) at(offset int64, seed uint32) (f frame, payload []byte, err error) {
	b, err := s.bytes(offset, frameBytes)
	if b == nil {
		return frame{}, nil, err
	}
	f = decodeFrame(b)
	if f.length > maxPayloadBytes {
		return f, nil, nil
	}
	b, err = s.bytes(offset, f.size())
	if b == nil || !checkRecord(b, seed) {
		return f, nil, err
	}
	return f, b[frameBytes:][:f.length:f.length], nil
}

// valid returns the record at offset if it is one that this log wrote there.
func (s *scanner) valid(offset int64) (f frame, payload []byte, err error) {
	f, payload, err = s.at(offset, s.seed)
	if payload == nil || f.position != s.base+uint64(offset) || f.synced > f.position || f.kind == KindHeader {
		return f, nil, err
	}
	return f, payload, nil
}

// records calls visit for each record after the header, until there is no valid
// one at the place where the next should be or limit is reached. It returns that
// place. The payload is valid during the call.
func (s *scanner) records(limit int64, visit func(offset int64, f *frame, payload []byte) error) (int64, error) {
	f, _, err := s.at(0, 0)
	if err != nil {
		return 0, err
	}
	offset := f.size()
	for offset < limit {
		f, payload, err := s.valid(offset)
		if err != nil {
			return offset, err
		}
		// A lower epoch is what an earlier life of the log left beyond a
		// torn tail that was cut.
		if payload == nil || f.epoch < s.epoch {
			break
		}
		s.epoch, s.synced = f.epoch, max(s.synced, f.synced)
		if err := visit(offset, &f, payload); err != nil {
			return offset, err
		}
		offset += f.size()
	}
	return offset, nil
}

// beyond looks for records after a place where there is no valid one. It returns
// the highest position any of them says to be synced, and where that one lies
// (0 if there is none).
func (s *scanner) beyond(offset int64) (synced uint64, where int64, err error) {
	for offset += alignment; offset+frameBytes <= s.size; offset += alignment {
		b, err := s.bytes(offset, frameBytes)
		if err != nil {
			return 0, 0, err
		}
		if binary.LittleEndian.Uint64(b[8:]) != s.base+uint64(offset) {
			continue
		}
		f, payload, err := s.valid(offset)
		if err != nil {
			return 0, 0, err
		}
		if payload != nil && f.synced > synced {
			synced, where = f.synced, offset
		}
	}
	return synced, where, nil
}

// Record is one record of a log, as Scan shows it.
type Record struct {
	File     string
	Offset   int64
	Position uint64
	Synced   uint64
	Kind     Kind
	// Index and Term are those of an entry, a compaction or a snapshot; of a
	// header those of the compaction it carries over; of a hard state its term.
	Index, Term uint64
	Data        []byte // payload; of an entry its data, of a header nil. Valid during the call
}

// Summary is what a log comes to.
type Summary struct {
	Identity           Identity
	Segments           int
	First, Last        uint64 // First > Last: no entries
	Term, Vote, Commit uint64
	Installed          *Snapshot // nil if none
	EndFile            string    // where the last whole record ends
	EndOffset          int64
	Unproven           int64 // bytes before the end that no mark covers: the window of L4
	Torn               bool  // there are records, or a piece of one, beyond the end
}

// Scan reads the log in dir without changing anything and calls visit, which may
// be nil, for each record in order, those of replaced entries included. Damage is
// reported as by Open. The log must not be open for writing.
func Scan(fs vfs.FS, dir string, visit func(Record) error) (Summary, error) {
	r, err := recoverLog(fs, dir, visit)
	if err != nil {
		return Summary{}, err
	}
	if len(r.st.segments) == 0 {
		return Summary{}, fmt.Errorf("raftlog: there is no log in %s", dir)
	}
	st, seg := &r.st, r.st.lastSegment()
	return Summary{
		Identity:  st.identity,
		Segments:  len(st.segments),
		First:     st.first(),
		Last:      st.last,
		Term:      st.hard.term,
		Vote:      st.hard.vote,
		Commit:    st.hard.commit,
		Installed: st.snap,
		EndFile:   seg.path,
		EndOffset: int64(st.end - seg.base),
		Unproven:  int64(st.end - r.synced),
		Torn:      r.torn,
	}, nil
}
