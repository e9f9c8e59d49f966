package sim

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// client asks for one thing after the other, of any member.
type client struct {
	w     *world
	id    int
	n     int
	busy  bool
	lease int64
	seen  map[string]string // what it last saw of each key
}

// keys are few, so that clients fight over them.
var keys = []string{"a", "b", "c", "d"}

// outcome is what a client knows of its request.
type outcome byte

const (
	unknown  outcome = iota // no answer, or one that does not tell
	answered                // it took place
	refused                 // it did not, and never will
)

// op is one request of a client.
type op struct {
	c       *client
	m       *member
	client  int
	kind    byte // as input's, and 's' serializable read, 'r' range, 'l' lease grant, 'k' keep-alive, 'a' put with lease
	input   input
	request uint64
	floor   uint64 // told when it was called

	called, returned int64
	outcome          outcome
	err              error
	index            uint64
	value            string
	done             bool
	over             bool
	gone             func() // stands in for a client: the member died
}

// registers says whether it belongs to the history of registers.
func (o *op) registers() bool {
	switch o.kind {
	case 'g', 'p', 'c', 'd':
		return true
	}
	return false
}

// pause has the client go on after a while.
func (c *client) pause() {
	c.w.after(c.w.about(c.w.plan.think), c.next)
}

// next asks for something.
func (c *client) next() {
	w := c.w
	if w.quiet || c.busy {
		return
	}
	m := w.members[w.rng.IntN(len(w.members))]
	if m.gone {
		c.pause()
		return
	}
	c.n++
	c.busy = true
	if c.seen == nil {
		c.seen = map[string]string{}
	}
	key := keys[w.rng.IntN(len(keys))]
	o := &op{c: c, m: m, client: c.id, called: w.check.stamp(), floor: w.check.told, outcome: refused}
	o.input = input{key: key, value: fmt.Sprintf("%d.%d", c.id, c.n), expected: c.seen[key]}
	if w.chance(0.1) { // a write of more than one block of the log
		o.input.value += strings.Repeat("x", w.rng.IntN(9000))
	}
	kinds := "ggggpppccccddsrrlkka"
	o.kind = kinds[w.rng.IntN(len(kinds))]
	if o.kind == 'a' && c.lease == 0 || o.kind == 'k' && c.lease == 0 {
		o.kind = 'l'
	}
	o.input.kind = o.kind
	w.check.journal = append(w.check.journal, o)
	w.after(w.upTo(50*time.Microsecond, 3*time.Millisecond), func() {
		if !m.up {
			o.answer(errors.New("nobody there"))
			return
		}
		o.outcome = unknown
		m.open = append(m.open, o)
		m.run(m.life, o.ask)
	})
}

// lost says that the member died that was asked.
func (o *op) lost() {
	if o.gone != nil {
		o.gone()
	} else if !o.over {
		o.answer(errors.New("connection lost"))
	}
}

// reply has the client hear what became of its request.
func (o *op) reply(err error) {
	o.m.ended(o)
	if o.over {
		return
	}
	o.over = true
	w := o.c.w
	w.after(w.upTo(50*time.Microsecond, 3*time.Millisecond), func() {
		o.over = false
		o.answer(err)
	})
}

// answer ends the request for the client.
func (o *op) answer(err error) {
	w := o.c.w
	o.over, o.err, o.returned = true, err, w.check.stamp()
	w.note("client %d: %c %s of %d: %v %v %.12q %v", o.client, o.kind, o.input.key, o.m.id, o.outcome, err, o.value, o.done)
	w.cover[fmt.Sprintf("%c: %s", o.kind, []string{"unknown", "answered", "refused"}[o.outcome])]++
	if o.outcome == answered {
		o.learn()
	}
	o.c.busy = false
	o.c.pause()
}

// learn has the client remember what it saw.
func (o *op) learn() {
	seen, i := o.c.seen, o.input
	switch {
	case o.kind == 'p', o.kind == 'c' && o.done:
		seen[i.key] = i.value
	case o.kind == 'd':
		seen[i.key] = ""
	case o.kind == 'g', o.kind == 's', o.kind == 'c':
		seen[i.key] = o.value
	}
}

// ask is at the member, while it runs.
func (o *op) ask() {
	m, i := o.m, o.input
	switch o.kind {
	case 'g', 'r':
		done := func(err error) {
			if err == nil {
				o.read(o.kind == 'r')
			}
			o.reply(err)
		}
		if m.w.mutant == readAnywhere && m.w.chance(0.5) {
			done(nil)
			return
		}
		m.in.Reads = append(m.in.Reads, consensus.Read{Done: done})
		m.wake()
	case 's':
		o.floor = 0
		o.read(false)
		o.reply(nil)
	case 'p':
		o.propose(command.KindPut, &pb.PutRequest{Key: []byte(i.key), Value: []byte(i.value)})
	case 'd':
		o.propose(command.KindDeleteRange, &pb.DeleteRangeRequest{Key: []byte(i.key), PrevKv: m.w.chance(0.3)})
	case 'c':
		cmp := &pb.Compare{Target: pb.Compare_VALUE, Key: []byte(i.key), TargetUnion: &pb.Compare_Value{Value: []byte(i.expected)}}
		if i.expected == "" {
			cmp.Target, cmp.TargetUnion = pb.Compare_CREATE, &pb.Compare_CreateRevision{}
		}
		o.propose(command.KindTxn, &pb.TxnRequest{
			Compare: []*pb.Compare{cmp},
			Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(i.key), Value: []byte(i.value)}}}},
			Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte(i.key)}}}},
		})
	case 'l':
		id := int64(o.client+1)*1000 + int64(o.c.n)
		o.done = true
		o.propose(command.KindLeaseGrant, &pb.LeaseGrantRequest{ID: id, TTL: 2 + int64(m.w.rng.IntN(3))})
		o.c.lease = id
	case 'a':
		o.propose(command.KindPut, &pb.PutRequest{Key: fmt.Appendf(nil, "lease/%d", o.client), Value: []byte(i.value), Lease: o.c.lease})
	case 'k':
		ttl, err := m.lessor.Renew(o.c.lease, m.now())
		if err == nil && ttl > 0 {
			o.outcome = answered
			m.w.check.renewed(m, o.c.lease)
		} else if m.w.chance(0.1) {
			o.c.lease = 0
		}
		o.reply(err)
	}
}

// propose puts the request into the log.
func (o *op) propose(kind command.Kind, msg proto.Message) {
	m := o.m
	o.request = m.ids.Next()
	data, err := command.AppendMessage(nil, kind, command.Header{ID: o.request}, msg)
	if err != nil {
		m.w.fail("encoding %v: %w", kind, err)
		return
	}
	p := consensus.Proposal{ID: o.request, Data: data, Done: o.proposed}
	if m.w.chance(0.1) {
		p.Deadline = m.now().Add(m.w.upTo(0, time.Second))
	}
	m.in.Proposals = append(m.in.Proposals, p)
	if m.w.chance(0.02) {
		m.in.Cancels = append(m.in.Cancels, o.request)
	}
	m.wake()
}

// proposed hears what became of a proposal.
func (o *op) proposed(r consensus.Result, err error) {
	w := o.m.w
	if o.over {
		w.fail("request %x of client %d was called back again", o.request, o.client)
	}
	switch {
	case err == nil:
		o.outcome, o.index = answered, r.Index
		w.check.tell(r.Index)
		if at := w.check.at[o.request]; at != r.Index {
			w.fail("request %x was told index %d, it was applied at %d", o.request, r.Index, at)
		}
		o.result(&r)
		err = r.Err
	case errors.Is(err, consensus.ErrProposalDropped), errors.Is(err, consensus.ErrTooManyRequests), errors.Is(err, errFull):
		o.outcome = refused
	}
	for e := err; e != nil; e = errors.Unwrap(e) {
		if errors.Unwrap(e) == nil {
			w.cover["error: "+e.Error()]++
		}
	}
	o.reply(err)
}

// result takes from a reply what the model asks about.
func (o *op) result(r *consensus.Result) {
	reply, _ := r.Reply.(*state.Reply)
	if reply == nil {
		return
	}
	switch o.kind {
	case 'd':
		o.done = reply.Op.Deleted > 0
	case 'c':
		if o.done = reply.Op.Succeeded; !o.done {
			inner := &reply.Op.Ops[0]
			res, err := inner.View.Range(context.Background(), inner.Key, inner.End, inner.Range)
			o.m.must(err)
			if err == nil && len(res.KVs) > 0 {
				o.value = string(mvcc.ValueOf(res.KVs[0]))
			}
		}
	}
	reply.Release()
}

// read answers from the present moment, and compares it with what is known of
// its revision.
func (o *op) read(all bool) {
	m, w := o.m, o.m.w
	view := m.machine().View()
	defer view.Release()
	if view.Applied() < o.floor {
		w.fail("a read of member %d, life %d, sees index %d after %d had been acknowledged", m.id, m.life, view.Applied(), o.floor)
	}
	if o.kind != 's' {
		w.check.tell(view.Applied())
	}
	o.outcome = answered
	ask := []string{o.input.key}
	key, end := []byte(o.input.key), []byte(nil)
	if all {
		ask, key, end = keys, []byte("a"), []byte("e")
	}
	res, err := view.Range(context.Background(), key, end, mvcc.RangeOptions{})
	if err != nil {
		m.must(err)
		return
	}
	got := map[string]string{}
	for _, kv := range res.KVs {
		got[string(keyValue(kv).Key)] = string(mvcc.ValueOf(kv))
	}
	for _, k := range ask {
		if want := w.check.valueAt(k, view.Revision()); got[k] != want {
			w.fail("member %d, life %d, reads %.12q at %q, revision %d; it held %.12q", m.id, m.life, got[k], k, view.Revision(), want)
		}
	}
	o.value = got[o.input.key]
}
