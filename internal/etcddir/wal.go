package etcddir

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// segmentEnd ends the names of segments: <sequence>-<index>.wal, 16 hexadecimal
// digits each.
const segmentEnd = ".wal"

func segmentName(sequence, index uint64) string {
	return fmt.Sprintf("%016x-%016x%s", sequence, index, segmentEnd)
}

// seen is what the records of the whole log say, in their order.
type seen struct {
	metadata  []byte
	snapshots []Snapshot
}

// start returns the last snapshot that the log vouches for. One beyond the
// commit index came just before a crash, and what belongs to it may be missing.
func (s *seen) start(commit uint64) Snapshot {
	var start Snapshot
	for _, snap := range s.snapshots {
		if snap.Index <= commit && snap.Index >= start.Index {
			start = snap
		}
	}
	return start
}

// scan reads all segments: every byte of the log is checked, whatever of it is
// needed. It fills in what Dir says of the log.
func (d *Dir) scan(ctx context.Context, names []string) (*seen, error) {
	if err := d.listSegments(names); err != nil {
		return nil, err
	}
	s := &seen{}
	err := d.read(ctx, 0, func(path string, rec record) error {
		if why := d.take(s, rec); why != nil {
			return &DamageError{File: path, Offset: rec.offset, Why: why.Error()}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	first := d.segmentPath(d.Segments[0])
	if s.metadata == nil {
		return nil, fmt.Errorf("%w: %s does not say whose log it is: etcd was stopped while it made it; delete %s and start anew",
			ErrIncomplete, first, d.fs.PathDir(d.snaps))
	}
	if len(s.snapshots) == 0 {
		return nil, fmt.Errorf("%w: %s has no record of a snapshot, which each log begins with: %s", ErrIncomplete, first, cureMember)
	}
	return s, nil
}

const cureMember = "put the missing files back, or remove this member from its cluster and add a new one, or restore a backup"

// listSegments takes the names apart and checks that none is missing between.
func (d *Dir) listSegments(names []string) error {
	for _, name := range names {
		s := Segment{Name: name}
		if _, err := fmt.Sscanf(name, "%016x-%016x"+segmentEnd, &s.Sequence, &s.Index); err != nil || name != segmentName(s.Sequence, s.Index) {
			return fmt.Errorf("%w: %s is not named as a segment of etcd's log: move it away if it is none", ErrIncomplete, d.fs.PathJoin(d.walPath, name))
		}
		d.Segments = append(d.Segments, s)
	}
	slices.SortFunc(d.Segments, func(a, b Segment) int { return strings.Compare(a.Name, b.Name) })
	for i, s := range d.Segments[1:] {
		if prev := d.Segments[i]; s.Sequence != prev.Sequence+1 || s.Index < prev.Index {
			return fmt.Errorf("%w: in %s segment %s follows %s, between are others missing: %s", ErrIncomplete, d.walPath, s.Name, prev.Name, cureMember)
		}
	}
	return nil
}

func (d *Dir) segmentPath(s Segment) string { return d.fs.PathJoin(d.walPath, s.Name) }

// take notes what one record says. An error says why it cannot be what etcd
// wrote: the checksum covers what is in a record, but not of what kind it is.
func (d *Dir) take(s *seen, rec record) error {
	switch rec.kind {
	case recordMetadata:
		if s.metadata == nil {
			s.metadata = append([]byte{}, rec.data...)
			return d.parseMetadata(rec.data)
		}
		if string(s.metadata) != string(rec.data) {
			return errors.New("it names another member or cluster than the records before")
		}
	case recordEntry:
		_, err := parseEntry(rec.data)
		return err
	case recordState:
		h, err := parseHardState(rec.data)
		if err != nil {
			return err
		}
		if h.Term < d.Hard.Term || h.Commit < d.Hard.Commit {
			return fmt.Errorf("a hard state of term %d and commit index %d follows one of %d and %d", h.Term, h.Commit, d.Hard.Term, d.Hard.Commit)
		}
		d.Hard = h
	case recordSnapshot:
		snap, err := parseSnapshot(rec.data)
		if err != nil {
			return err
		}
		s.snapshots = append(s.snapshots, snap)
	case recordCRC:
	default:
		return fmt.Errorf("a record is of type %d, known are 1 to 5", rec.kind)
	}
	return nil
}

// read gives the records of segments from the i-th on.
func (d *Dir) read(ctx context.Context, i int, fn func(path string, rec record) error) (err error) {
	crc := uint32(0)
	for ; err == nil && i < len(d.Segments); i++ {
		if err = ctx.Err(); err == nil {
			crc, err = d.readSegment(i, crc, fn)
		}
	}
	return err
}

func (d *Dir) readSegment(i int, crc uint32, fn func(path string, rec record) error) (_ uint32, err error) {
	s := &d.Segments[i]
	path := d.segmentPath(*s)
	f, err := d.fs.Open(path)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	r := newReader(path, f, info.Size(), i == len(d.Segments)-1, crc)
	for n := 0; ; n++ {
		rec, err := r.next()
		var torn errTorn
		switch {
		case errors.Is(err, io.EOF):
		case errors.As(err, &torn):
			d.Torn = &Torn{File: path, Offset: r.off, Why: torn.why}
		case err != nil:
			return 0, err
		case n == 0 && rec.kind != recordCRC:
			return 0, &DamageError{File: path, Why: "a segment begins with a checksum record, this one does not"}
		default:
			if err := fn(path, rec); err != nil {
				return 0, err
			}
			continue
		}
		s.Bytes = r.off
		return r.crc, nil
	}
}

func (d *Dir) parseMetadata(b []byte) error {
	err := numbers(b, func(num protowire.Number, v uint64) error {
		switch num {
		case 1:
			d.MemberID = v
		case 2:
			d.ClusterID = v
		default:
			return fmt.Errorf("field %d", num)
		}
		return nil
	})
	if err == nil && (d.MemberID == 0 || d.ClusterID == 0) {
		err = fmt.Errorf("member %x, cluster %x", d.MemberID, d.ClusterID)
	}
	if err != nil {
		return fmt.Errorf("it does not say whose log this is: %w", err)
	}
	return nil
}

func parseHardState(b []byte) (h HardState, err error) {
	err = numbers(b, func(num protowire.Number, v uint64) error {
		switch num {
		case 1:
			h.Term = v
		case 2:
			h.Vote = v
		case 3:
			h.Commit = v
		default:
			return fmt.Errorf("field %d", num)
		}
		return nil
	})
	if err == nil && h.Term == 0 {
		err = errors.New("its term is 0")
	}
	if err != nil {
		return h, fmt.Errorf("no hard state: %w", err)
	}
	return h, nil
}

// numbers gives the fields of a message that has only numbers.
func numbers(b []byte, fn func(num protowire.Number, v uint64) error) error {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if typ != protowire.VarintType {
			return fmt.Errorf("field %d has wire type %d", num, typ)
		}
		b = b[n:]
		v, n := protowire.ConsumeVarint(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if err := fn(num, v); err != nil {
			return err
		}
	}
	return nil
}

func parseSnapshot(b []byte) (s Snapshot, err error) {
	for rest := b; len(rest) > 0; {
		num, typ, n := protowire.ConsumeTag(rest)
		if n < 0 {
			return s, fmt.Errorf("no snapshot record: %w", protowire.ParseError(n))
		}
		rest = rest[n:]
		switch {
		case num == 1 && typ == protowire.VarintType:
			s.Index, n = protowire.ConsumeVarint(rest)
		case num == 2 && typ == protowire.VarintType:
			s.Term, n = protowire.ConsumeVarint(rest)
		case num == 3 && typ == protowire.BytesType:
			var state []byte
			if state, n = protowire.ConsumeBytes(rest); n >= 0 {
				s.ConfState = new(raftpb.ConfState)
				if err := proto.Unmarshal(state, s.ConfState); err != nil {
					return s, fmt.Errorf("no snapshot record: %w", err)
				}
			}
		default:
			return s, fmt.Errorf("no snapshot record: field %d of type %d", num, typ)
		}
		if n < 0 {
			return s, fmt.Errorf("no snapshot record: %w", protowire.ParseError(n))
		}
		rest = rest[n:]
	}
	if (s.Index == 0) != (s.Term == 0) {
		return s, fmt.Errorf("a snapshot of index %d and term %d", s.Index, s.Term)
	}
	return s, nil
}

func parseEntry(b []byte) (*raftpb.Entry, error) {
	e := new(raftpb.Entry)
	if err := proto.Unmarshal(b, e); err != nil {
		return nil, fmt.Errorf("no entry: %w", err)
	}
	if len(e.ProtoReflect().GetUnknown()) > 0 || e.GetIndex() == 0 || e.GetTerm() == 0 {
		return nil, fmt.Errorf("no entry: index %d, term %d, %d bytes of other fields", e.GetIndex(), e.GetTerm(), len(e.ProtoReflect().GetUnknown()))
	}
	switch e.GetType() {
	case raftpb.EntryNormal:
		return e, nil
	case raftpb.EntryConfChange:
		if len(e.GetData()) > 0 {
			return e, nil
		}
	}
	return nil, fmt.Errorf("entry %d has type %d and %d bytes, which etcd never writes", e.GetIndex(), e.GetType(), len(e.GetData()))
}

// Entries gives the entries after d.Snapshot in the order in which they were
// written: one may have an index that was given before, and then takes the place
// of that entry and all above. fn may keep what it gets.
func (d *Dir) Entries(ctx context.Context, fn func(*raftpb.Entry) error) error {
	return d.read(ctx, d.firstSegment(), func(path string, rec record) error {
		if rec.kind != recordEntry {
			return nil
		}
		e, err := parseEntry(rec.data)
		if err != nil {
			return &DamageError{File: path, Offset: rec.offset, Why: err.Error()}
		}
		if e.GetIndex() <= d.Snapshot.Index {
			return nil
		}
		return fn(e)
	})
}

// firstSegment is the last one that began at or below the index of the snapshot,
// -1 if there is none.
func (d *Dir) firstSegment() int {
	for i, s := range slices.Backward(d.Segments) {
		if s.Index <= d.Snapshot.Index {
			return i
		}
	}
	return -1
}

// check goes through the entries that there will be, and holds them against the
// hard state and the database.
func (d *Dir) check(ctx context.Context) error {
	s := d.Snapshot
	if d.firstSegment() < 0 {
		return fmt.Errorf("%w: the log in %s begins with %s, entries from %d on are needed: %s", ErrIncomplete, d.walPath, d.Segments[0].Name, s.Index+1, cureMember)
	}
	c := chain{runs: []run{{s.Index, s.Term}}, last: s.Index}
	err := d.read(ctx, d.firstSegment(), func(path string, rec record) (err error) {
		switch rec.kind {
		case recordState:
			var h HardState
			h, err = parseHardState(rec.data)
			c.commit = h.Commit
		case recordEntry:
			var e *raftpb.Entry
			if e, err = parseEntry(rec.data); err == nil && e.GetIndex() > s.Index {
				err = c.add(e.GetIndex(), e.GetTerm())
			}
		}
		if err != nil {
			return &DamageError{File: path, Offset: rec.offset, Why: err.Error()}
		}
		return nil
	})
	if err != nil {
		return err
	}
	d.Last, d.LastTerm = c.last, c.term(c.last)
	if d.LastTerm > d.Hard.Term {
		// The crash came in the write that had the entries, before their hard state.
		// It did not vote in that term, or an earlier write would say so.
		d.Hard.Term, d.Hard.Vote = d.LastTerm, 0
	}
	applied := d.DB.Applied
	switch {
	case d.Hard.Commit > d.Last:
		return fmt.Errorf("%w: the log in %s says that index %d is committed and ends at index %d: %s", ErrIncomplete, d.walPath, d.Hard.Commit, d.Last, cureMember)
	case applied > d.Last:
		return fmt.Errorf("%w: %s holds index %d, the log in %s ends at index %d: the log was lost in part, or one of the two is from another time; %s",
			ErrIncomplete, d.DB.Path, applied, d.walPath, d.Last, cureMember)
	case applied >= max(s.Index, 1) && c.term(applied) != d.DB.Term:
		return fmt.Errorf("%w: index %d has term %d in %s and term %d in the log in %s: they are of different members or times; %s",
			ErrIncomplete, applied, d.DB.Term, d.DB.Path, c.term(applied), d.walPath, cureMember)
	}
	return nil
}

// chain is what the entries of a log add up to.
type chain struct {
	runs   []run // ascending
	last   uint64
	commit uint64 // of the last hard state
}

// run says that entries from index on, up to the next run, have term.
type run struct{ index, term uint64 }

func (c *chain) add(index, term uint64) error {
	if index > c.last+1 {
		return fmt.Errorf("entry %d follows entry %d", index, c.last)
	}
	if index <= c.commit && c.term(index) != term {
		return fmt.Errorf("entry %d of term %d takes the place of one of term %d, which was committed", index, term, c.term(index))
	}
	for c.runs[len(c.runs)-1].index >= index {
		c.runs = c.runs[:len(c.runs)-1]
	}
	if before := c.runs[len(c.runs)-1].term; term < before {
		return fmt.Errorf("entry %d of term %d follows one of term %d", index, term, before)
	} else if term > before {
		c.runs = append(c.runs, run{index, term})
	}
	c.last = index
	return nil
}

// term returns the term of an entry from the first one to the last.
func (c *chain) term(index uint64) uint64 {
	for _, r := range slices.Backward(c.runs) {
		if r.index <= index {
			return r.term
		}
	}
	return 0
}
