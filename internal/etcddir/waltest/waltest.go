// Package waltest writes the files of an etcd member for tests: a write-ahead
// log byte by byte as state-machine.md, section 7, tells, snapshot files and a
// database. It is not used by the program.
package waltest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// The kinds of records.
const (
	Metadata = 1
	Entry    = 2
	State    = 3
	CRC      = 4
	Snapshot = 5
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Log is a log being written.
type Log struct {
	Segments []Segment

	crc      uint32
	metadata []byte
	state    []byte
	sequence uint64
	last     uint64 // index
}

// Segment is one file of it.
type Segment struct {
	Name  string
	Bytes []byte
	Ends  []int // of the records
}

// New begins a log as etcd does: with an empty snapshot record.
func New(member, cluster uint64) *Log {
	l := &Log{metadata: numbers(member, cluster)}
	l.begin()
	l.Record(Snapshot, numbers(0, 0))
	return l
}

// numbers encodes fields 1, 2, … of a message, zeros too.
func numbers(values ...uint64) (b []byte) {
	for i, v := range values {
		b = protowire.AppendTag(b, protowire.Number(i+1), protowire.VarintType)
		b = protowire.AppendVarint(b, v)
	}
	return b
}

func (l *Log) begin() {
	l.Segments = append(l.Segments, Segment{Name: fmt.Sprintf("%016x-%016x.wal", l.sequence, l.nextIndex())})
	l.sequence++
	l.Record(CRC, nil)
	l.Record(Metadata, l.metadata)
	if l.state != nil {
		l.Record(State, l.state)
	}
}

func (l *Log) nextIndex() uint64 {
	if l.sequence == 0 {
		return 0
	}
	return l.last + 1
}

// Cut begins the next segment.
func (l *Log) Cut() { l.begin() }

// Record adds a record of any kind.
func (l *Log) Record(kind uint64, data []byte) {
	s := &l.Segments[len(l.Segments)-1]
	if kind != CRC {
		l.crc = crc32.Update(l.crc, castagnoli, data)
	}
	s.Bytes = AppendRecord(s.Bytes, kind, l.crc, data)
	s.Ends = append(s.Ends, len(s.Bytes))
}

// AppendRecord appends a record with its frame.
func AppendRecord(b []byte, kind uint64, crc uint32, data []byte) []byte {
	rec := protowire.AppendTag(nil, 1, protowire.VarintType)
	rec = protowire.AppendVarint(rec, kind)
	rec = protowire.AppendTag(rec, 2, protowire.VarintType)
	rec = protowire.AppendVarint(rec, uint64(crc))
	if data != nil {
		rec = protowire.AppendTag(rec, 3, protowire.BytesType)
		rec = protowire.AppendBytes(rec, data)
	}
	length := uint64(len(rec))
	padding := (8 - length%8) % 8
	if padding > 0 {
		length |= (0x80 | padding) << 56
	}
	b = binary.LittleEndian.AppendUint64(b, length)
	return append(append(b, rec...), make([]byte, padding)...)
}

// Entries adds entries as they are.
func (l *Log) Entries(entries ...*raftpb.Entry) {
	for _, e := range entries {
		b, err := proto.Marshal(e)
		if err != nil {
			panic(err)
		}
		l.Record(Entry, b)
		l.last = e.GetIndex()
	}
}

// Normal is an entry of the normal kind.
func Normal(index, term uint64, data []byte) *raftpb.Entry {
	return &raftpb.Entry{Index: &index, Term: &term, Data: data}
}

// Change is an entry that changes the members.
func Change(index, term uint64, cc *raftpb.ConfChange) *raftpb.Entry {
	data, err := proto.Marshal(cc)
	if err != nil {
		panic(err)
	}
	return &raftpb.Entry{Type: raftpb.EntryConfChange.Enum(), Index: &index, Term: &term, Data: data}
}

// State adds a hard state.
func (l *Log) State(term, vote, commit uint64) {
	l.state = numbers(term, vote, commit)
	l.Record(State, l.state)
}

// Snapshot adds the record of a snapshot.
func (l *Log) Snapshot(index, term uint64, voters ...uint64) {
	b := numbers(index, term)
	cs, err := proto.Marshal(&raftpb.ConfState{Voters: voters, AutoLeave: new(bool)})
	if err != nil {
		panic(err)
	}
	b = protowire.AppendTag(b, 3, protowire.BytesType)
	l.Record(Snapshot, protowire.AppendBytes(b, cs))
}

// Files are the segments by name.
func (l *Log) Files() map[string][]byte {
	files := map[string][]byte{}
	for _, s := range l.Segments {
		files[s.Name] = bytes.Clone(s.Bytes)
	}
	return files
}

// SnapFile returns name and content of a snapshot file.
func SnapFile(index, term uint64, data []byte) (name string, content []byte) {
	b, err := proto.Marshal(&raftpb.Snapshot{Data: data, Metadata: &raftpb.SnapshotMetadata{Index: &index, Term: &term, ConfState: &raftpb.ConfState{}}})
	if err != nil {
		panic(err)
	}
	content = protowire.AppendTag(content, 1, protowire.VarintType)
	content = protowire.AppendVarint(content, uint64(crc32.Checksum(b, castagnoli)))
	content = protowire.AppendTag(content, 2, protowire.BytesType)
	return fmt.Sprintf("%016x-%016x.snap", term, index), protowire.AppendBytes(content, b)
}

// buckets are those that etcd makes.
var buckets = [...]string{"alarm", "auth", "authRoles", "authUsers", "cluster", "key", "lease", "members", "members_removed", "meta"}

// DB returns the bytes of a database after fill. Index and term are those that
// it is said to hold; 0 leaves them out.
func DB(t testing.TB, index, term uint64, version string, fill func(set func(bucket, key string, value []byte))) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "db")
	db, err := bolt.Open(path, 0o600, &bolt.Options{NoFreelistSync: true})
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range buckets {
			if _, err := tx.CreateBucket([]byte(name)); err != nil {
				return err
			}
		}
		set := func(bucket, key string, value []byte) {
			if err := tx.Bucket([]byte(bucket)).Put([]byte(key), value); err != nil {
				t.Fatal(err)
			}
		}
		if index > 0 {
			set("meta", "consistent_index", binary.BigEndian.AppendUint64(nil, index))
		}
		if term > 0 {
			set("meta", "term", binary.BigEndian.AppendUint64(nil, term))
		}
		if version != "" {
			set("meta", "storageVersion", []byte(version))
		}
		if fill != nil {
			fill(set)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
