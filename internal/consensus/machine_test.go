package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/raftlog"
)

var errRefused = errors.New("refused by the machine")

// listMachine is a Machine that keeps what it applied. A command is 8 bytes of ID and a text; the text "refuse" is answered
// with an error, as is a conf change whose context says so.
type listMachine struct {
	mu    sync.Mutex
	index uint64
	term  uint64
	conf  *raftpb.ConfState
	list  []applied
	fail  error
	gate  chan struct{} // if not nil, Apply waits for a token
	disk  *listDisk
	// onInstall, if not nil, is asked before and after Install has done its work.
	onInstall func(done bool) error
}

// listDisk holds what was received for a member, by directory.
type listDisk struct {
	mu     sync.Mutex
	stores map[string]*listMachine
}

// receive stores what another machine holds and returns the message that says so.
func (d *listDisk) receive(from *listMachine) *raftpb.Snapshot {
	state := from.clone()
	state.disk = d
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stores[storeName(state.index, state.term)] = state
	return &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{
		Index: new(state.index), Term: new(state.term), ConfState: proto.Clone(state.conf).(*raftpb.ConfState),
	}}
}

func (d *listDisk) store(dir string) *listMachine {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.stores[dir]
}

func storeName(index, term uint64) string { return fmt.Sprintf("snapshot-%d-%d", index, term) }

type applied struct {
	index, term, id uint64
	text            string
}

func newListMachine() *listMachine {
	return &listMachine{conf: &raftpb.ConfState{}, disk: &listDisk{stores: map[string]*listMachine{}}}
}

func (m *listMachine) Received(index, term uint64) (string, bool) {
	dir := storeName(index, term)
	return dir, m.disk.store(dir) != nil
}

func (m *listMachine) Install(s raftlog.Snapshot) error {
	if m.onInstall != nil {
		if err := m.onInstall(false); err != nil {
			return err
		}
	}
	state := m.disk.store(s.Dir).clone()
	m.mu.Lock()
	m.index, m.term, m.conf, m.list = state.index, state.term, state.conf, state.list
	m.mu.Unlock()
	if m.onInstall != nil {
		return m.onInstall(true)
	}
	return nil
}

func encode(id uint64, text string) []byte {
	return append(binary.BigEndian.AppendUint64(nil, id), text...)
}

func (m *listMachine) clone() *listMachine {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &listMachine{index: m.index, term: m.term, conf: proto.Clone(m.conf).(*raftpb.ConfState), list: slices.Clone(m.list), disk: m.disk}
}

func (m *listMachine) Applied() (uint64, uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.index, m.term
}

func (m *listMachine) ConfState() *raftpb.ConfState {
	m.mu.Lock()
	defer m.mu.Unlock()
	return proto.Clone(m.conf).(*raftpb.ConfState)
}

func (m *listMachine) texts() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, a := range m.list {
		out = append(out, a.text)
	}
	return out
}

func (m *listMachine) Apply(entries []*raftpb.Entry) ([]Result, error) {
	if m.gate != nil {
		<-m.gate
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return nil, m.fail
	}
	var out []Result
	for _, e := range entries {
		if e.GetIndex() != m.index+1 {
			panic(fmt.Sprintf("entry %d handed over after %d", e.GetIndex(), m.index))
		}
		m.index, m.term = e.GetIndex(), e.GetTerm()
		r := Result{Index: e.GetIndex(), Term: e.GetTerm()}
		if e.GetType() == raftpb.EntryConfChange {
			m.confChange(e, &r)
			out = append(out, r)
			return out, nil
		}
		if len(e.GetData()) == 0 {
			r.Empty = true
		} else {
			r.ID = binary.BigEndian.Uint64(e.GetData())
			text := string(e.GetData()[8:])
			if text == "refuse" {
				r.Err = errRefused
			} else {
				m.list = append(m.list, applied{r.Index, r.Term, r.ID, text})
				r.Reply = text
			}
		}
		out = append(out, r)
	}
	return out, nil
}

func (m *listMachine) confChange(e *raftpb.Entry, r *Result) {
	cc := &raftpb.ConfChange{}
	if err := proto.Unmarshal(e.GetData(), cc); err != nil {
		panic(err)
	}
	r.ID, r.ConfChange = cc.GetId(), cc
	// As a machine must: raft does not survive a change that leaves no voters.
	last := slices.Equal(m.conf.Voters, []uint64{cc.GetNodeId()}) && cc.GetType() != raftpb.ConfChangeAddNode
	if string(cc.GetContext()) == "refuse" || last || cc.GetType() > raftpb.ConfChangeAddLearnerNode {
		cc.NodeId = new(uint64(0))
		r.Err = errRefused
		return
	}
	id := cc.GetNodeId()
	not := func(other uint64) bool { return other == id }
	m.conf.Voters = slices.DeleteFunc(m.conf.Voters, not)
	m.conf.Learners = slices.DeleteFunc(m.conf.Learners, not)
	switch cc.GetType() {
	case raftpb.ConfChangeAddNode:
		m.conf.Voters = append(m.conf.Voters, id)
	case raftpb.ConfChangeAddLearnerNode:
		m.conf.Learners = append(m.conf.Learners, id)
	}
}
