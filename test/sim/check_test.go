package sim

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/state"
)

// checker watches the whole cluster from outside.
type checker struct {
	w *world
	// log is what was applied anywhere, by index. It never changes: entries of
	// different members, and of different lives of one, have to agree.
	log     map[uint64]entrySeen
	highest uint64            // index applied anywhere
	at      map[uint64]uint64 // index of each request that was applied, by ID
	// told is the highest index that a client was told of, as the one of its own
	// write or through a read. Each later linearizable read must include it.
	told uint64
	// events are those of each revision, and keys their history, as the first
	// member told them.
	events   map[int64][]eventSeen
	keys     map[string][]version
	revision int64 // the last of events
	leases   map[int64]*leaseSeen
	term     uint64 // the highest that a leader has acted in
	clock    int64  // counts calls and returns
	journal  []*op
}

type entrySeen struct {
	term uint64
	data string
}

// version is what a key held from a revision on; "" is nothing.
type version struct {
	revision int64
	value    string
}

// leaseSeen is what clients were promised of a lease.
type leaseSeen struct {
	ttl   time.Duration
	until time.Time // it may not end before
}

func newChecker(w *world) *checker {
	return &checker{
		w: w, log: map[uint64]entrySeen{}, at: map[uint64]uint64{}, events: map[int64][]eventSeen{}, keys: map[string][]version{},
		leases: map[int64]*leaseSeen{}, revision: 1,
	}
}

// applied checks an entry as it comes out of a member's machine.
func (c *checker) applied(m *member, e *raftpb.Entry, r *state.Result) {
	w := c.w
	index := e.GetIndex()
	w.note("%d applies %d of term %d: request %x, error %v", m.id, index, e.GetTerm(), r.ID, r.Err)
	seen := entrySeen{e.GetTerm(), string(e.GetData())}
	was, known := c.log[index]
	if known && was != seen {
		w.fail("member %d applies at index %d an entry of term %d, another one of term %d was applied there before",
			m.id, index, seen.term, was.term)
		return
	}
	if known {
		return
	}
	c.log[index] = seen
	c.highest = max(c.highest, index)
	if r.ID != 0 {
		if before, ok := c.at[r.ID]; ok {
			w.fail("request %x was applied at index %d and again at %d", r.ID, before, index)
		}
		c.at[r.ID] = index
	}
	if r.Err == nil && e.GetType() == raftpb.EntryNormal && len(e.GetData()) > 0 {
		c.leaseEntry(m, e)
	}
}

// installed checks a snapshot's place in the log.
func (c *checker) installed(m *member, s raftlog.Snapshot) {
	if was, ok := c.log[s.Index]; ok && was.term != s.Term {
		c.w.fail("member %d installs a snapshot of index %d and term %d, the entry there is of term %d", m.id, s.Index, s.Term, was.term)
	}
}

// leaseEntry notes what an entry, applied for the first time, does to leases.
func (c *checker) leaseEntry(m *member, e *raftpb.Entry) {
	var cmd command.Command
	if err := command.Decode(e.GetData(), &cmd); err != nil {
		c.w.fail("entry %d: %w", e.GetIndex(), err)
		return
	}
	switch r := cmd.Msg.(type) {
	case *pb.LeaseGrantRequest:
		ttl := time.Duration(r.GetTTL()) * time.Second
		c.leases[r.GetID()] = &leaseSeen{ttl: ttl, until: c.w.now.Add(ttl)}
	case *pb.LeaseRevokeRequest:
		id := r.GetID()
		l := c.leases[id]
		if l != nil && c.w.now.Before(l.until) {
			c.w.fail("member %d is the first to apply, at index %d, that lease %d ends, %v before its time",
				m.id, e.GetIndex(), id, l.until.Sub(c.w.now))
		}
		delete(c.leases, id)
		c.w.cover["lease ended"]++
	}
}

// renewed notes that a member told a client that its lease lives on. It counts if
// nobody has led in a later term.
func (c *checker) renewed(m *member, id int64) {
	if l := c.leases[id]; l != nil && m.leads >= c.term {
		l.until = maxTime(l.until, c.w.now.Add(l.ttl))
		c.w.cover["lease renewed"]++
	}
}

// published checks the events of one batch of a member.
func (c *checker) published(m *member, events []mvcc.Event) {
	for n := 0; n < len(events); {
		rev := events[n].Rev.Main
		var told []eventSeen
		first := n
		for ; n < len(events) && events[n].Rev.Main == rev; n++ {
			told = append(told, eventSeen{events[n].Delete, string(events[n].KV)})
		}
		if was, ok := c.events[rev]; ok {
			if !slices.Equal(was, told) {
				c.w.fail("member %d tells of revision %d\n%v, it was\n%v", m.id, rev, told, was)
			}
			continue
		}
		if rev != c.revision+1 {
			c.w.fail("member %d tells of revision %d, the last one known is %d", m.id, rev, c.revision)
		}
		c.revision = rev
		c.events[rev] = told
		for i := first; i < n; i++ {
			c.note(&events[i])
		}
	}
}

func (c *checker) note(e *mvcc.Event) {
	value := ""
	if !e.Delete {
		value = string(mvcc.ValueOf(e.KV))
	}
	key := string(e.Key)
	c.keys[key] = append(c.keys[key], version{e.Rev.Main, value})
}

// eventSeen is one change of a key.
type eventSeen struct {
	deleted bool
	kv      string // encoded
}

func (e eventSeen) String() string { return fmt.Sprintf("(deleted %v, %.40q)", e.deleted, e.kv) }

func (e eventSeen) key() string { return string(keyValue([]byte(e.kv)).GetKey()) }

// valueAt is what a key held at a revision.
func (c *checker) valueAt(key string, rev int64) string {
	list := c.keys[key]
	i, _ := slices.BinarySearchFunc(list, rev+1, func(v version, rev int64) int { return int(v.revision - rev) })
	if i == 0 {
		return ""
	}
	return list[i-1].value
}

// stamp numbers calls and returns in the order in which they happen.
func (c *checker) stamp() int64 {
	c.clock++
	return c.clock
}

// tell notes that somebody was told of an entry.
func (c *checker) tell(index uint64) { c.told = max(c.told, index) }

// atRest compares the members when nothing is under way.
func (c *checker) atRest() {
	w := c.w
	var first *member
	var want string
	for _, m := range w.present() {
		if len(m.open) > 0 {
			w.fail("member %d has not called back %d requests", m.id, len(m.open))
			return
		}
		got, err := summary(m)
		if err != nil {
			w.fail("member %d: %w", m.id, err)
			return
		}
		w.note("%d at rest: %s", m.id, got)
		if first == nil {
			first, want = m, got
		} else if got != want {
			w.fail("members differ at rest:\n  %d: %s\n  %d: %s", first.id, want, m.id, got)
			return
		}
	}
	applied, _ := first.machine().Applied()
	if applied < c.told {
		w.fail("entries up to %d were acknowledged, at rest everybody has applied %d", c.told, applied)
	}
	if rev := first.machine().Root().Revision(); rev != c.revision {
		w.fail("at rest the store is at revision %d, revision %d was seen", rev, c.revision)
	}
	for i := uint64(1); i <= c.highest; i++ {
		if _, ok := c.log[i]; !ok {
			w.fail("entry %d of %d was never applied", i, c.highest)
			return
		}
	}
	w.cover["at rest"]++
	w.cover["entries"] += int(applied)
}

// summary is what has to be equal on all members that have applied the same.
func summary(m *member) (string, error) {
	ctx := context.Background()
	machine := m.machine()
	applied, term := machine.Applied()
	root := machine.Root()
	kv, err := machine.Keys().HashKV(ctx, root, 0)
	if err != nil {
		return "", err
	}
	all, _, err := machine.Hash(ctx)
	if err != nil {
		return "", err
	}
	text := fmt.Sprintf("applied %d of term %d, revision %d, compacted %d, %d keys, usage %d, hash of keys %08x, of all %08x, "+
		"members %v, leases",
		applied, term, root.Revision(), root.CompactRevision(), root.Keys(), root.UsageBytes(), kv.Hash, all, machine.ConfState())
	leases := machine.Leases().All()
	slices.SortFunc(leases, func(a, b lease.Lease) int { return cmp.Compare(a.ID, b.ID) })
	for _, l := range leases {
		keys := machine.Leases().Keys(l.ID)
		text += fmt.Sprintf(" %d:%d%q", l.ID, l.TTL, keys)
	}
	return text, nil
}

// history judges what the clients were told.
func (c *checker) history() error {
	var history []porcupine.Operation
	for _, o := range c.journal {
		if !o.registers() {
			continue
		}
		index, applied := c.at[o.request]
		switch {
		case o.outcome == refused:
			if applied {
				return fmt.Errorf("request %x of client %d was refused (%v), and applied at index %d", o.request, o.client, o.err, index)
			}
			continue
		case o.outcome == unknown && !applied:
			continue // it has not taken place, and never will: all is at rest
		case o.outcome == answered && o.kind != 'g' && (!applied || index != o.index):
			return fmt.Errorf("request %x of client %d was said to be at index %d, it is at %d (%v)", o.request, o.client, o.index, index, applied)
		}
		end := o.returned
		if o.outcome == unknown {
			end = c.clock + 1
		}
		history = append(history, porcupine.Operation{
			ClientId: o.client, Input: o.input, Call: o.called, Return: end,
			Output: output{unknown: o.outcome == unknown, value: o.value, done: o.done},
		})
	}
	c.w.cover["history"] += len(history)
	if result := porcupine.CheckOperationsTimeout(registers, history, time.Minute); result != porcupine.Ok {
		return fmt.Errorf("the history of %d operations is not linearizable (%v)", len(history), result)
	}
	return nil
}

// input is one operation on one key.
type input struct {
	kind     byte // 'g' get, 'p' put, 'c' put if it holds what was expected, 'd' delete
	key      string
	expected string // of 'c'; "" is absent
	value    string
}

// output is what the client was told.
type output struct {
	unknown bool   // nothing, but it took place
	value   string // of 'g', and of 'c' that found something else
	done    bool   // of 'c': it was as expected; of 'd': there was something
}

// registers is the model: each key holds a value, "" for none.
var registers = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		by := map[string]int{}
		var parts [][]porcupine.Operation
		for _, o := range history {
			key := o.Input.(input).key
			i, ok := by[key]
			if !ok {
				i = len(parts)
				by[key] = i
				parts = append(parts, nil)
			}
			parts[i] = append(parts[i], o)
		}
		return parts
	},
	Init: func() any { return "" },
	Step: func(state, in, out any) (bool, any) {
		now, i, o := state.(string), in.(input), out.(output)
		switch i.kind {
		case 'g':
			return o.value == now, now
		case 'p':
			return true, i.value
		case 'd':
			return o.unknown || o.done == (now != ""), ""
		}
		next := now
		if now == i.expected {
			next = i.value
		}
		ok := o.unknown || o.done == (now == i.expected) && (o.done || o.value == now)
		return ok, next
	},
	DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v -> %+v", in, out) },
}

// keyValue decodes what a store holds of a key.
func keyValue(kv []byte) *mvccpb.KeyValue {
	var out mvccpb.KeyValue
	if err := proto.Unmarshal(kv, &out); err != nil {
		panic(err)
	}
	return &out
}
