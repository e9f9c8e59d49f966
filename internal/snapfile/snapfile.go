// Package snapfile writes a moment of the store as one file or stream, and makes
// a store from one: in etcd's form (its bbolt database) and in Engram's.
//
// It knows rows, files and bytes, not who asks for them and where they go: a
// backup, a snapshot for a member, an import. PlanEtcd and ReadEtcd are etcd's
// form, made of rows; Files and ReadNative ours, made of the store's own files;
// StoreV2 is the document that members of etcd 3.6 want beside a snapshot.
// Invariants:
//
//	F1: the same moment gives the same bytes in etcd's form. Ours depends on how
//	    the store has laid it out, too.
//	F2: nothing is written to disk but the store that is read into, and memory
//	    depends on the largest record, not on their number; in our form not even
//	    on that.
//	F3: a store that was read holds what the file held, or there was an error;
//	    then what the store holds is to be thrown away.
//	F4: no input makes it panic. What has the right checksums was made by an
//	    Engram: Pebble opens it and must get along with it.
package snapfile

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/storage"
)

// ErrDamaged says that a file or stream is not what was written.
var ErrDamaged = errors.New("snapfile: damaged")

// ErrUnsupported says that a file is whole but of a version that this one does
// not know.
var ErrUnsupported = errors.New("snapfile: not supported")

// ErrNotEmpty says that the store to read into holds something.
var ErrNotEmpty = errors.New("snapfile: the store is not empty")

// ErrCompacted and ErrFutureRevision say that a revision asked for is none that a
// file holds.
var (
	ErrCompacted      = errors.New("snapfile: revision has been compacted")
	ErrFutureRevision = errors.New("snapfile: revision is in the future")
)

// Source is a moment to write.
type Source struct {
	// Reader is pinned: it reads the same whenever it is read.
	Reader storage.Reader
	// Applied and Term are the index and term that the caller tells others. They
	// must be those that Reader holds; 0 and 0 take these.
	Applied, Term uint64
	// Members are those of the same moment; nil: they are read from Reader.
	Members *member.Root
	// Progress, if not nil, is called now and then with the bytes that are done
	// and how many there are, 0 while nobody knows. It must not block.
	Progress func(done, total int64)
	// Planned, if not nil, is called by PlanEtcd after each piece that it has read, and may hold it back.
	Planned func(bytes int) error
}

// Meta is what a snapshot says of itself.
type Meta struct {
	// Applied and Term are those of the last entry whose effects it holds.
	Applied, Term uint64
	Revision      int64
	// ConfState is the configuration that the member table gives, as in etcd 3.7.
	// That of etcd's row confState may be older: it is not read.
	ConfState *raftpb.ConfState
	// ClusterVersion is empty if the cluster did not decide it.
	ClusterVersion string
}

// resolve checks s and fills in what it leaves out.
func (s *Source) resolve() (Meta, error) {
	m, members, err := metaOf(s.Reader)
	if err != nil {
		return m, err
	}
	if s.Applied == 0 && s.Term == 0 {
		s.Applied, s.Term = m.Applied, m.Term
	}
	if s.Applied != m.Applied || s.Term != m.Term {
		return m, fmt.Errorf("snapfile: source is said to be at index %d of term %d, its rows are at %d of %d: take both from one moment",
			s.Applied, s.Term, m.Applied, m.Term)
	}
	if s.Members == nil {
		s.Members = members
	}
	return m, nil
}

// metaOf reads what a store says of itself.
func metaOf(r storage.Reader) (m Meta, members *member.Root, err error) {
	if m.Applied, m.Term, err = mvcc.AppliedOf(r); err != nil {
		return m, nil, fmt.Errorf("snapfile: %w", err)
	}
	if m.Revision, err = lastRevision(r); err != nil {
		return m, nil, fmt.Errorf("snapfile: last revision: %w", err)
	}
	for _, row := range [...]string{storage.MetaScheduledCompact, storage.MetaFinishedCompact} {
		rev, err := compactRow(r, row)
		if err != nil {
			return m, nil, err
		}
		m.Revision = max(m.Revision, rev)
	}
	table, err := member.Open(r, member.Options{})
	if err != nil {
		return m, nil, fmt.Errorf("snapfile: %w", err)
	}
	members = table.Root()
	m.ConfState, m.ClusterVersion = confState(members), members.Version()
	return m, members, nil
}

// lastRevision returns the main revision of the last record, 1 if there is none.
func lastRevision(r storage.Reader) (rev int64, err error) {
	lower, upper := storage.RevisionBounds(0, 0)
	it, err := r.Iter(context.Background(), lower, upper)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	if !it.Last() {
		return 1, it.Error()
	}
	rev, _, err = storage.ParseRevisionKey(it.Key())
	return max(rev, 1), err
}

// compactRow reads a compact revision, -1 if there is none.
func compactRow(r storage.Reader, row string) (int64, error) {
	v, err := r.Get(storage.RowKey(storage.TableMeta, []byte(row)))
	if errors.Is(err, storage.ErrNotFound) {
		return -1, nil
	}
	if err == nil && len(v) != 8 {
		err = fmt.Errorf("%d bytes, want 8", len(v))
	}
	if err != nil {
		return 0, fmt.Errorf("snapfile: row %s: %w", row, err)
	}
	return int64(binary.BigEndian.Uint64(v)), nil
}

func confState(members *member.Root) *raftpb.ConfState {
	cs := &raftpb.ConfState{AutoLeave: new(bool)}
	for _, m := range members.List() {
		if m.IsLearner {
			cs.Learners = append(cs.Learners, m.ID)
		} else {
			cs.Voters = append(cs.Voters, m.ID)
		}
	}
	return cs
}

// checkEmpty refuses a store that holds anything but its format row.
func checkEmpty(r storage.Reader) (err error) {
	it, err := r.Iter(context.Background(), nil, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	format := string(storage.RowKey(storage.TableMeta, []byte(storage.MetaFormat)))
	for ok := it.First(); ok; ok = it.Next() {
		if string(it.Key()) != format {
			return fmt.Errorf("%w: it has key %x: read into a new directory", ErrNotEmpty, it.Key())
		}
	}
	return it.Error()
}

// progress calls back at most once per so many bytes.
const progressBytes = 4 << 20

type progress struct {
	fn    func(done, total int64)
	total int64
	next  int64
}

func (p *progress) at(done int64) {
	if p.fn != nil && done >= p.next {
		p.fn(done, p.total)
		p.next = done + progressBytes
	}
}
