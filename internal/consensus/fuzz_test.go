package consensus

import (
	"errors"
	"math/rand/v2"
	"testing"
	"testing/cryptotest"
	"time"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// bytesReader makes numbers of the fuzzer's bytes; when they end, zeros.
type bytesReader []byte

func (r *bytesReader) byte() byte {
	if len(*r) == 0 {
		return 0
	}
	b := (*r)[0]
	*r = (*r)[1:]
	return b
}

// number is mostly small, near what is likely to be valid, and now and then extreme.
func (r *bytesReader) number() uint64 {
	switch b := r.byte(); {
	case b < 240:
		return uint64(b % 24)
	default:
		return []uint64{1 << 31, 1<<62 - 1, 1 << 62, 1 << 63, ^uint64(0), ^uint64(0) - 1, ^uint64(0) - 2, 1 << 40}[b%8]
	}
}

// message makes one that a peer might send, or might not.
func (r *bytesReader) message(core *Core, disk *listDisk) *raftpb.Message {
	flags := r.byte()
	m := &raftpb.Message{Type: raftpb.MessageType(r.byte() % 26).Enum(), To: new(uint64(1)), From: new(1 + uint64(r.byte()%4))}
	if flags&1 == 0 {
		m.Term = new(core.term + uint64(r.byte()%3))
	} else {
		m.Term = new(r.number())
	}
	if flags&2 == 0 {
		m.Index, m.LogTerm, m.Commit = new(core.last), new(core.term), new(core.commit)
	} else {
		m.Index, m.LogTerm, m.Commit = new(r.number()), new(r.number()), new(r.number())
	}
	if t := m.GetType(); t == raftpb.MsgProp || t == raftpb.MsgReadIndex {
		if flags&4 == 0 {
			m.Term = nil
		}
	}
	if flags&8 != 0 {
		m.Reject, m.RejectHint = new(r.byte()%2 == 0), new(r.number())
	}
	if flags&16 != 0 {
		for n := r.byte() % 12; n > 0; n-- {
			m.Context = append(m.Context, r.byte()%4)
		}
	}
	for i := range uint64(r.byte() % 4) {
		e := &raftpb.Entry{Index: new(m.GetIndex() + 1 + i), Term: m.Term, Data: encode(i, "x")}
		switch r.byte() % 8 {
		case 0:
			e.Index, e.Term = new(r.number()), new(r.number())
		case 1:
			e.Type = raftpb.EntryType(r.byte() % 4).Enum()
		case 2:
			cc := &raftpb.ConfChange{Type: raftpb.ConfChangeType(r.byte() % 5).Enum(), NodeId: new(uint64(r.byte() % 5))}
			e.Type = raftpb.EntryConfChange.Enum()
			e.Data, _ = proto.Marshal(cc)
		}
		m.Entries = append(m.Entries, e)
	}
	if flags&32 != 0 {
		state := newListMachine()
		state.index, state.term = r.number(), r.number()
		for n := r.byte() % 4; n > 0; n-- {
			state.conf.Voters = append(state.conf.Voters, uint64(r.byte()%4))
		}
		if r.byte()%4 == 0 {
			state.conf.Learners = append(state.conf.Learners, uint64(r.byte()%4))
		}
		m.Snapshot = disk.receive(state)
	}
	if flags&64 != 0 {
		m.To, m.From = new(r.number()), new(r.number())
	}
	return m
}

// survive runs one member of three against peers that send whatever b says, and fails if it does not live through it.
func survive(t *testing.T, b []byte) (refused, taken int) {
	cryptotest.SetGlobalRandom(t, 1)
	now := time.Unix(1e9, 0)
	log, machine := newMemLog(), newListMachine()
	if err := Bootstrap(log, []Founder{{ID: 1}, {ID: 2}, {ID: 3}}); err != nil {
		t.Fatal(err)
	}
	core, err := NewCore(Options{ID: 1, Log: log, Machine: machine, IDs: NewIDs(1, now), Transport: &script{}}, now)
	if err != nil {
		t.Fatal(err)
	}
	applier := NewApplier(machine)
	writer := NewLogWriter(1, log, applier)
	var in Input
	var out Output
	var toWrite []*raftpb.Message
	var toApply []*raftpb.Entry
	step := func() bool {
		now = now.Add(10 * time.Millisecond)
		in.Now = now
		core.Step(&in, &out)
		in = Input{}
		toWrite, toApply = append(toWrite, out.Append...), append(toApply, out.Apply...)
		if err := core.Err(); err != nil && !errors.Is(err, ErrLogLost) {
			t.Fatal(err)
		}
		return core.Err() == nil
	}
	settle := func() bool {
		for len(toWrite)+len(toApply) > 0 {
			stored, _, err := writer.Step(toWrite)
			if err != nil {
				t.Fatal(err)
			}
			in.Stored = append(in.Stored, stored...)
			toWrite = nil
			if len(toApply) > 0 {
				done, err := applier.Step(toApply)
				if err != nil {
					t.Fatal(err)
				}
				in.Applied, toApply = append(in.Applied, done), nil
			}
			if !step() {
				return false
			}
		}
		return true
	}
	r := bytesReader(b)
	if !step() || !settle() {
		return 0, 0
	}
	if r.byte()%2 == 0 { // as a leader
		for core.role != raft.StatePreCandidate {
			in.Ticks = 1
			step()
			settle()
		}
		for _, typ := range []raftpb.MessageType{raftpb.MsgPreVoteResp, raftpb.MsgVoteResp} {
			in.Received = []*raftpb.Message{{Type: typ.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(2))}}
			step()
			settle()
		}
		if core.role != raft.StateLeader {
			t.Fatal("no leader")
		}
	}
	for len(r) > 0 {
		for n := 1 + r.byte()%3; n > 0; n-- {
			m := r.message(core, machine.disk)
			// What goes over a wire can be encoded.
			data, err := proto.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			m = &raftpb.Message{}
			if err := proto.Unmarshal(data, m); err != nil {
				t.Fatal(err)
			}
			if core.check(m) != nil {
				refused++
			} else {
				taken++
			}
			in.Received = append(in.Received, m)
		}
		switch b := r.byte(); b % 8 {
		case 0:
			in.Ticks = int(b) % 30
		case 1:
			in.Reads = append(in.Reads, Read{Done: func(error) {}})
		case 2:
			in.Unreachable = append(in.Unreachable, uint64(b%4))
		case 3:
			in.Snapshots = append(in.Snapshots, SnapshotReport{uint64(b % 4), b&8 == 0})
		case 4:
			in.TransferTo = uint64(b % 4)
		case 5:
			id := core.opt.IDs.Next()
			in.Proposals = append(in.Proposals, Proposal{ID: id, Data: encode(id, "p"), Done: func(Result, error) {}})
		}
		if !step() || r.byte()%4 != 0 && !settle() {
			return refused, taken
		}
	}
	return refused, taken
}

// FuzzReceive sends a member whatever can be put into a message.
func FuzzReceive(f *testing.F) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		b := make([]byte, 200)
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) { survive(t, b[:min(len(b), 2000)]) })
}

// TestReceiveSurvives does so with many messages, of which many are taken.
func TestReceiveSurvives(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var refused, taken int
	runs := 3000
	if raceDetector {
		runs = 200
	}
	for range runs {
		b := make([]byte, 20+rng.IntN(600))
		for i := range b {
			b[i] = byte(rng.Uint32())
			if i%16 == 0 { // few flags, so that more messages make sense
				b[i] &= byte(rng.Uint32())
			}
		}
		r, n := survive(t, b)
		refused, taken = refused+r, taken+n
	}
	if refused < runs/3 || taken < runs/3 {
		t.Fatalf("%d messages refused, %d taken", refused, taken)
	}
	t.Logf("%d messages refused, %d taken", refused, taken)
}
