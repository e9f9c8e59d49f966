package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
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
}

type applied struct {
	index, term, id uint64
	text            string
}

func newListMachine() *listMachine { return &listMachine{conf: &raftpb.ConfState{}} }

func encode(id uint64, text string) []byte {
	return append(binary.BigEndian.AppendUint64(nil, id), text...)
}

func (m *listMachine) clone() *listMachine {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &listMachine{index: m.index, term: m.term, conf: proto.Clone(m.conf).(*raftpb.ConfState), list: slices.Clone(m.list)}
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
	if string(cc.GetContext()) == "refuse" {
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
