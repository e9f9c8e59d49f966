package etcddir

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strconv"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/member"
)

// MembersV2 is the membership after the last applied entry as etcd 3.5 has it:
// that release goes by the store of its version 2, in snapshot files, and what
// its database says of members may be older.
type MembersV2 struct {
	// Learners has every member, and whether it is a learner.
	Learners map[uint64]bool
}

// Differs says how a membership read from the database differs, "" if it does
// not.
func (m *MembersV2) Differs(members []*member.Member) string {
	left := map[uint64]bool{}
	for id, learner := range m.Learners {
		left[id] = learner
	}
	for _, db := range members {
		learner, ok := left[db.ID]
		switch {
		case !ok:
			return fmt.Sprintf("member %x is in the database alone", db.ID)
		case learner && !db.IsLearner:
			return fmt.Sprintf("member %x is a learner, and a voter in the database", db.ID)
		case !learner && db.IsLearner:
			return fmt.Sprintf("member %x is a voter, and a learner in the database", db.ID)
		}
		delete(left, db.ID)
	}
	var missing []uint64
	for id := range left {
		missing = append(missing, id)
	}
	if len(missing) > 0 {
		return fmt.Sprintf("member %x is not in the database", slices.Min(missing))
	}
	return ""
}

// membersV2 reads the membership of the snapshot file that belongs to the start
// of the log, and makes the changes that were applied since.
func (d *Dir) membersV2(ctx context.Context) (*MembersV2, error) {
	m := &MembersV2{Learners: map[uint64]bool{}}
	if s := d.Snapshot; s.Index > 0 {
		path := d.fs.PathJoin(d.snaps, fmt.Sprintf("%016x-%016x.snap", s.Term, s.Index))
		if err := d.readSnap(path, m); err != nil {
			return nil, err
		}
	}
	err := d.Entries(ctx, func(e *raftpb.Entry) error {
		if e.GetType() != raftpb.EntryConfChange || e.GetIndex() > d.DB.Applied {
			return nil
		}
		if err := m.change(e.GetData()); err != nil {
			return fmt.Errorf("etcddir: %w: membership change at index %d in %s: %w", ErrDamaged, e.GetIndex(), d.walPath, err)
		}
		return nil
	})
	return m, err
}

// change makes a change as etcd 3.5 judges it: one that it refuses does nothing.
func (m *MembersV2) change(data []byte) error {
	var cc raftpb.ConfChange
	if err := proto.Unmarshal(data, &cc); err != nil {
		return err
	}
	id := cc.GetNodeId()
	_, there := m.Learners[id]
	switch cc.GetType() {
	case raftpb.ConfChangeRemoveNode:
		delete(m.Learners, id)
	case raftpb.ConfChangeAddNode, raftpb.ConfChangeAddLearnerNode:
		var c member.Context
		if err := json.Unmarshal(cc.GetContext(), &c); err != nil {
			return err
		}
		if c.IsPromote == there {
			m.Learners[id] = cc.GetType() == raftpb.ConfChangeAddLearnerNode
		}
	}
	return nil
}

// readSnap reads a snapshot file: a checksum, and a raft snapshot whose data is
// the store of version 2 as JSON.
func (d *Dir) readSnap(path string, m *MembersV2) (err error) {
	f, err := d.fs.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: %s is not there, which etcd 3.5 wrote at index %d: %s", ErrIncomplete, path, d.Snapshot.Index, cureMember)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	b, err := io.ReadAll(f)
	if err != nil {
		return err
	}
	if err := parseSnap(b, d.Snapshot, m); err != nil {
		return &DamageError{File: path, Why: err.Error()}
	}
	return nil
}

func parseSnap(b []byte, want Snapshot, m *MembersV2) error {
	var sum uint64
	var data []byte
	for rest := b; len(rest) > 0; {
		num, typ, n := protowire.ConsumeTag(rest)
		if n < 0 {
			return protowire.ParseError(n)
		}
		rest = rest[n:]
		switch {
		case num == 1 && typ == protowire.VarintType:
			sum, n = protowire.ConsumeVarint(rest)
		case num == 2 && typ == protowire.BytesType:
			data, n = protowire.ConsumeBytes(rest)
		default:
			n = protowire.ConsumeFieldValue(num, typ, rest)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		rest = rest[n:]
	}
	if got := crc32.Checksum(data, castagnoli); uint64(got) != sum || len(data) == 0 {
		return fmt.Errorf("its checksum is %08x, its bytes have %08x", sum, got)
	}
	var s raftpb.Snapshot
	if err := proto.Unmarshal(data, &s); err != nil {
		return fmt.Errorf("no raft snapshot: %w", err)
	}
	if meta := s.GetMetadata(); meta.GetIndex() != want.Index || meta.GetTerm() != want.Term {
		return fmt.Errorf("it is of index %d and term %d", meta.GetIndex(), meta.GetTerm())
	}
	return parseStoreV2(s.GetData(), m)
}

// parseStoreV2 takes the members out of the store of version 2.
func parseStoreV2(b []byte, m *MembersV2) error {
	type node struct {
		Value    string
		Children map[string]json.RawMessage
	}
	var root struct{ Root json.RawMessage }
	if err := json.Unmarshal(b, &root); err != nil {
		return fmt.Errorf("no store of version 2: %w", err)
	}
	at := node{Children: map[string]json.RawMessage{"": root.Root}}
	descend := func(from node, name string) (to node, err error) {
		raw, ok := from.Children[name]
		if !ok {
			return to, fmt.Errorf("the store of version 2 has no %q", name)
		}
		return to, json.Unmarshal(raw, &to)
	}
	var err error
	for _, name := range [...]string{"", "0", "members"} {
		if at, err = descend(at, name); err != nil {
			return err
		}
	}
	for name := range at.Children {
		id, err := strconv.ParseUint(name, 16, 64)
		if err != nil {
			return fmt.Errorf("the store of version 2 has a member %q", name)
		}
		of, err := descend(at, name)
		if err != nil {
			return err
		}
		attributes, err := descend(of, "raftAttributes")
		if err != nil {
			return err
		}
		var raft struct {
			IsLearner bool `json:"isLearner"`
		}
		if err := json.Unmarshal([]byte(attributes.Value), &raft); err != nil {
			return fmt.Errorf("the store of version 2 has member %x as %q: %w", id, attributes.Value, err)
		}
		m.Learners[id] = raft.IsLearner
	}
	return nil
}
