package consensus

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	dto "github.com/prometheus/client_model/go"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// script drives one Core step by step. The log writer and the applier run only when told to; peers are played by the
// script.
type script struct {
	t       *testing.T
	now     time.Time
	born    time.Time
	core    *Core
	writer  *LogWriter
	applier *Applier
	log     *memLog
	machine *listMachine
	out     Output
	said    *strings.Builder
	context []byte // of the last heartbeat sent

	toWrite   []*raftpb.Message
	toApply   []*raftpb.Entry
	stored    []*raftpb.Message
	applied   []Applied
	ids       *IDs
	durable   uint64
	gate      error
	lastGate  error
	connected map[uint64]time.Time
	opt       Options

	failInstall error
	late        Applied
}

func (s *script) Send(msgs []*raftpb.Message)         {}
func (s *script) ActiveSince(member uint64) time.Time { return s.connected[member] }

func (s *script) step(in Input) string {
	s.said = &strings.Builder{}
	in.Now = s.now
	in.Stored, in.Applied = s.stored, s.applied
	s.stored, s.applied = nil, nil
	s.core.Step(&in, &s.out)
	out := &s.out
	for _, e := range out.Events {
		fmt.Fprintf(s.said, "event %s%s\n", strings.TrimPrefix(fmt.Sprintf("%T", e), "consensus."), strings.ReplaceAll(fmt.Sprintf("%v", e), "  ", " "))
	}
	for _, m := range out.Send {
		if m.GetType() == raftpb.MsgHeartbeat {
			s.context = m.GetContext()
		}
		fmt.Fprintf(s.said, "send %s\n", describe(m))
	}
	for _, m := range out.Append {
		fmt.Fprintf(s.said, "append %s, %d answers\n", describe(m), len(m.GetResponses()))
	}
	for _, e := range out.Apply {
		fmt.Fprintf(s.said, "apply %s\n", describeEntry(e))
	}
	if out.CutTo != 0 {
		fmt.Fprintf(s.said, "cut to %d\n", out.CutTo)
		if err := s.log.Compact(out.CutTo); err != nil {
			s.t.Fatal(err)
		}
	}
	if out.StartFlush {
		fmt.Fprintf(s.said, "start flush\n")
	}
	s.toWrite = append(s.toWrite, out.Append...)
	s.toApply = append(s.toApply, out.Apply...)
	for _, c := range out.Completions {
		c.Done(c.Result, c.Err)
	}
	for _, c := range out.Reads {
		c.Done(c.Err)
	}
	if s.said.Len() == 0 {
		return "nothing\n"
	}
	return s.said.String()
}

func describeEntry(e *raftpb.Entry) string {
	text := "empty"
	if e.GetType() == raftpb.EntryConfChange {
		text = "conf change"
	} else if d := e.GetData(); len(d) > 8 {
		text = fmt.Sprintf("%q", d[8:])
	}
	if e.GetIndex() == 0 {
		return text
	}
	return fmt.Sprintf("%d/%d %s", e.GetTerm(), e.GetIndex(), text)
}

func describe(m *raftpb.Message) string {
	var b strings.Builder
	if m.GetType() != raftpb.MsgStorageAppend {
		fmt.Fprintf(&b, "%v to %x", m.GetType(), m.GetTo())
	}
	var list []string
	for _, e := range m.GetEntries() {
		if m.GetType() == raftpb.MsgReadIndex || m.GetType() == raftpb.MsgReadIndexResp {
			continue
		}
		list = append(list, describeEntry(e))
	}
	if len(list) > 0 {
		fmt.Fprintf(&b, " [%s]", strings.Join(list, ", "))
	}
	if meta := m.GetSnapshot().GetMetadata(); meta != nil {
		fmt.Fprintf(&b, " snapshot %d/%d of %s", meta.GetTerm(), meta.GetIndex(), members(meta.GetConfState()))
	}
	if m.GetType() == raftpb.MsgAppResp || m.GetType() == raftpb.MsgReadIndexResp {
		fmt.Fprintf(&b, " of %d", m.GetIndex())
	}
	switch m.GetType() {
	case raftpb.MsgStorageAppend, raftpb.MsgHeartbeat, raftpb.MsgApp:
		fmt.Fprintf(&b, " term %d commit %d", m.GetTerm(), m.GetCommit())
	}
	return strings.TrimSpace(b.String())
}

func members(cs *raftpb.ConfState) string {
	return fmt.Sprintf("voters %v learners %v", cs.GetVoters(), cs.GetLearners())
}

// open starts member 1 of a cluster with the given voters, or starts it again.
func (s *script) open(voters []uint64) string {
	if s.log == nil {
		s.log, s.machine = newMemLog(), newListMachine()
		var founders []Founder
		for _, id := range voters {
			founders = append(founders, Founder{ID: id})
		}
		if err := Bootstrap(s.log, founders); err != nil {
			return err.Error() + "\n"
		}
	}
	s.machine.onInstall = func(done bool) error {
		if !done && s.failInstall != nil {
			return s.failInstall
		}
		return nil
	}
	s.opt.ID, s.opt.Log, s.opt.Machine, s.opt.IDs = 1, s.log, s.machine, s.ids
	s.opt.Gate = func() error { return s.gate }
	s.opt.LastGate = func() error { return s.lastGate }
	s.opt.Pass = func(data []byte) error {
		if strings.Contains(string(data), "free") {
			return s.lastGate
		}
		return s.gate
	}
	s.opt.Transport = s
	core, err := NewCore(s.opt, s.now)
	if err != nil {
		return err.Error() + "\n"
	}
	s.core, s.applier = core, NewApplier(s.machine)
	s.writer = NewLogWriter(1, s.log, s.applier)
	return s.step(Input{})
}

func (s *script) write() string {
	syncs := s.log.syncs
	before := s.machine.index
	stored, send, err := s.writer.Step(s.toWrite)
	s.toWrite = nil
	if err != nil {
		return err.Error() + "\n"
	}
	s.stored = append(s.stored, stored...)
	var b strings.Builder
	fmt.Fprintf(&b, "%d syncs\n", s.log.syncs-syncs)
	if s.machine.index != before {
		fmt.Fprintf(&b, "the machine goes from index %d to %d\n", before, s.machine.index)
	}
	for _, m := range send {
		fmt.Fprintf(&b, "send %s\n", describe(m))
	}
	return b.String() + s.step(Input{})
}

func (s *script) apply() string {
	if len(s.toApply) == 0 {
		return "nothing to apply\n"
	}
	done, err := s.applier.Step(s.toApply)
	s.toApply = nil
	if err != nil {
		return err.Error() + "\n"
	}
	s.applied = append(s.applied, done)
	if done.Covered > 0 {
		return fmt.Sprintf("%d covered\n", done.Covered) + s.step(Input{})
	}
	return s.step(Input{})
}

// settle writes and applies until nothing is left to do.
func (s *script) settle() string {
	var b strings.Builder
	for len(s.toWrite)+len(s.toApply) > 0 {
		if len(s.toWrite) > 0 {
			b.WriteString(s.write())
		}
		if len(s.toApply) > 0 {
			b.WriteString(s.apply())
		}
	}
	return strings.ReplaceAll(b.String(), "nothing\n", "")
}

// proposal is of a name, or, as name@term, of what only the leader of a term may propose.
func (s *script) proposal(name string) Proposal {
	id := s.ids.Next()
	_, in, _ := strings.Cut(name, "@")
	term, _ := strconv.ParseUint(in, 10, 64)
	return Proposal{ID: id, Term: term, Data: encode(id, name), Done: func(r Result, err error) { s.answer(name, r, err) }}
}

func (s *script) conf(name string, typ raftpb.ConfChangeType, member uint64) ConfProposal {
	cc := &raftpb.ConfChange{Id: new(s.ids.Next()), Type: typ.Enum(), NodeId: new(member)}
	return ConfProposal{Change: cc, Done: func(r Result, err error) { s.answer(name, r, err) }}
}

func (s *script) read(name string) Read {
	return Read{Done: func(err error) { fmt.Fprintf(s.said, "read %s: %v\n", name, err) }}
}

func (s *script) answer(name string, r Result, err error) {
	switch {
	case err != nil:
		fmt.Fprintf(s.said, "%s: %v\n", name, err)
	case r.Err != nil:
		fmt.Fprintf(s.said, "%s: at %d, %v\n", name, r.Index, r.Err)
	default:
		fmt.Fprintf(s.said, "%s: at %d\n", name, r.Index)
	}
}

func (s *script) run(d *datadriven.TestData) string {
	number := func(key string) (n uint64) {
		d.MaybeScanArgs(s.t, key, &n)
		return n
	}
	switch d.Cmd {
	case "options":
		for _, a := range d.CmdArgs {
			var n uint64
			a.Scan(s.t, 0, &n)
			switch a.Key {
			case "backlog":
				s.opt.MaxBacklog = n
			case "catch-up":
				s.opt.CatchUpEntries = n
			case "flush-entries":
				s.opt.FlushLogBytes = int64(n) * memEntryBytes
			case "catch-up-entries-bytes":
				s.opt.CatchUpBytes = int64(n) * memEntryBytes
			case "slow-disk-ms":
				s.opt.SlowDisk = time.Duration(n) * time.Millisecond
			case "forward-bytes":
				s.opt.MaxForwardBytes = int(n)
			case "uncommitted-bytes":
				s.opt.MaxUncommittedBytes = n
			}
		}
		return ""
	case "open":
		var voters []uint64
		d.ScanArgs(s.t, "voters", &voters)
		return s.open(voters)
	case "durable":
		s.durable = number("index")
		s.opt.DurableApplied = func() uint64 { return s.durable }
		if s.core != nil {
			s.core.opt.DurableApplied = s.opt.DurableApplied
		}
		return ""
	case "gate":
		s.gate = nil
		if d.HasArg("shut") || d.HasArg("freeing") {
			s.gate = errors.New("no space left")
		}
		if s.lastGate = nil; d.HasArg("shut") {
			s.lastGate = s.gate
		}
		return ""
	case "connect":
		s.connected[number("member")] = s.now
		return ""
	case "propose":
		var in Input
		for _, a := range d.CmdArgs {
			in.Proposals = append(in.Proposals, s.proposal(a.Key))
		}
		return s.step(in)
	case "propose-twice":
		p := s.proposal("first")
		again := p
		again.Done = func(r Result, err error) { s.answer("second", r, err) }
		return s.step(Input{Proposals: []Proposal{p, again}})
	case "cancelled":
		p := s.proposal("cancelled")
		return s.step(Input{Proposals: []Proposal{p}, Cancels: []uint64{p.ID}})
	case "conf":
		var in Input
		for _, a := range d.CmdArgs {
			var member uint64
			a.Scan(s.t, 0, &member)
			p := s.conf(a.String(), raftpb.ConfChangeAddLearnerNode, member)
			switch a.Key {
			case "remove":
				p.Change.Type = raftpb.ConfChangeRemoveNode.Enum()
			case "refuse":
				p.Change.Context = []byte("refuse")
			}
			in.ConfChanges = append(in.ConfChanges, p)
		}
		return s.step(in)
	case "read":
		var in Input
		for _, a := range d.CmdArgs {
			in.Reads = append(in.Reads, s.read(a.Key))
		}
		return s.step(in)
	case "tick":
		var b strings.Builder
		for range max(1, number("n")) {
			s.now = s.now.Add(100 * time.Millisecond)
			if text := s.step(Input{Ticks: 1}); text != "nothing\n" && !d.HasArg("quiet") {
				fmt.Fprintf(&b, "after %v\n%s", s.now.Sub(s.born), text)
			}
		}
		return b.String()
	case "write":
		return s.write()
	case "apply":
		return s.apply()
	case "settle":
		return s.settle()
	case "transfer":
		return s.step(Input{TransferTo: number("to")})
	case "hand-over":
		return s.step(Input{HandOver: true})
	case "report":
		return s.step(Input{Snapshots: []SnapshotReport{{Member: number("member"), OK: !d.HasArg("failed")}}})
	case "progress":
		var b strings.Builder
		for _, p := range s.core.progress() {
			fmt.Fprintf(&b, "%d: match %d active %v replicating %v snapshot %d ack %v\n", p.ID, p.Match, p.Active, p.Replicating, p.Snapshot, p.AckLatency)
		}
		fmt.Fprintf(&b, "own disk %v\n", s.core.persist.estimate(s.now))
		return b.String()
	case "error":
		return fmt.Sprintln(s.core.Err())
	case "wait":
		s.now = s.now.Add(time.Duration(number("ms")) * time.Millisecond)
		return ""
	case "apply-late":
		// The applier has done its work, and its report is on its way.
		s.late, _ = s.applier.Step(s.toApply)
		s.toApply = nil
		return ""
	case "report-applied":
		s.applied = append(s.applied, s.late)
		return s.step(Input{})
	case "fail-install":
		s.failInstall = errors.New("disk broken")
		return ""
	case "lose-received":
		s.machine.disk.stores = map[string]*listMachine{}
		return ""
	case "receive":
		return s.receive(d)
	case "crash":
		keep := number("keep")
		disk := s.machine.disk
		s.log, s.machine = s.log.crash(int(keep)), newListMachine()
		if snap, ok := s.log.Installed(); ok && !d.HasArg("old-store") {
			s.machine = disk.store(snap.Dir).clone()
		}
		s.machine.disk = disk
		s.core, s.toWrite, s.toApply, s.stored, s.applied = nil, nil, nil, nil, nil
		return ""
	case "metrics":
		var late, applying dto.Metric
		if err := errors.Join(s.core.opt.Metrics.HeartbeatsLate.Write(&late), s.core.opt.Metrics.SnapshotApplying.Write(&applying)); err != nil {
			return err.Error()
		}
		return fmt.Sprintf("late heartbeats %v, applying a snapshot %v\n", late.GetCounter().GetValue(), applying.GetGauge().GetValue())
	case "queues":
		return fmt.Sprintf("proposals %d conf changes %d\n", len(s.core.queue), len(s.core.confs))
	case "status":
		c := s.core
		return fmt.Sprintf("%v leader %x term %d commit %d applied %d waiting %d reads %d\n",
			c.role, c.leader, c.term, c.commit, c.applied, c.waiters.len(), c.reads.len())
	}
	return "unknown command " + d.Cmd + "\n"
}

// receive plays a peer.
func (s *script) receive(d *datadriven.TestData) string {
	m := &raftpb.Message{To: new(uint64(1))}
	in := Input{Received: []*raftpb.Message{m}}
	for _, a := range d.CmdArgs {
		var n uint64
		if len(a.Vals) == 1 && !slices.Contains([]string{"entries", "empty", "conf", "bytes", "snapshot", "voters", "learners", "and-propose", "and-read"}, a.Key) {
			a.Scan(s.t, 0, &n)
		}
		switch a.Key {
		case "from":
			m.From = new(n)
		case "to":
			m.To = new(n)
		case "term":
			m.Term = new(n)
		case "index":
			m.Index = new(n)
		case "log-term":
			m.LogTerm = new(n)
		case "commit":
			m.Commit = new(n)
		case "conf":
			var term, index uint64
			fmt.Sscanf(a.Vals[0], "%d/%d", &term, &index)
			data, _ := proto.Marshal(&raftpb.ConfChange{Type: raftpb.ConfChangeAddLearnerNode.Enum(), NodeId: new(uint64(7))})
			m.Entries = append(m.Entries, &raftpb.Entry{Type: raftpb.EntryConfChange.Enum(), Term: new(term), Index: new(index), Data: data})
		case "reject":
			m.Reject = new(true)
		case "hint":
			m.RejectHint = new(n)
		case "type":
			m.Type = raftpb.MessageType(n).Enum()
		case "bytes":
			m.Context = []byte(a.Vals[0])
		case "snapshot":
			// Its state has arrived, unless said otherwise.
			var index, term uint64
			fmt.Sscanf(a.Vals[0], "%d/%d", &term, &index)
			state := newListMachine()
			state.index, state.term = index, term
			d.MaybeScanArgs(s.t, "voters", &state.conf.Voters)
			d.MaybeScanArgs(s.t, "learners", &state.conf.Learners)
			if d.HasArg("not-arrived") {
				m.Snapshot = (&listDisk{stores: map[string]*listMachine{}}).receive(state)
			} else {
				m.Snapshot = s.machine.disk.receive(state)
			}
		case "voters", "learners", "not-arrived":
		case "context":
			// The answer to whatever was asked last.
			m.Context = s.context
		case "read-context":
			ids := s.core.reads.ids
			m.Entries = []*raftpb.Entry{{Data: []byte{0, 0, 0, 0, 0, 0, 0, 0}}}
			if len(ids) > 0 {
				s.core.reads.ids = slices.Clip(ids)
				id := ids[len(ids)-1]
				for i := range 8 {
					m.Entries[0].Data[i] = byte(id >> (56 - 8*i))
				}
			}
		case "entries", "empty":
			for _, v := range a.Vals {
				var term, index uint64
				fmt.Sscanf(v, "%d/%d", &term, &index)
				e := &raftpb.Entry{Term: new(term), Index: new(index)}
				if a.Key == "entries" {
					e.Data = encode(index, v)
				}
				m.Entries = append(m.Entries, e)
			}
		case "and-propose": // in the same step
			for _, v := range a.Vals {
				in.Proposals = append(in.Proposals, s.proposal(v))
			}
		case "and-read":
			in.Reads = append(in.Reads, s.read(a.Vals[0]))
		case "and-tick":
			s.now = s.now.Add(100 * time.Millisecond)
			in.Ticks = 1
		case "and-learner":
			in.ConfChanges = append(in.ConfChanges, s.conf(a.String(), raftpb.ConfChangeAddLearnerNode, n))
		default:
			typ, ok := raftpb.MessageType_value[a.Key]
			if !ok {
				return "unknown argument " + a.Key + "\n"
			}
			m.Type = raftpb.MessageType(typ).Enum()
		}
	}
	if err := s.core.check(m); err != nil {
		s.step(in)
		return "refused: " + err.Error() + "\n"
	}
	return s.step(in)
}
