// Package random makes mixed operations from a seed, runs them on two servers and compares every answer.
//
// It does not know the right answers: the reference does. Generator makes operations; Run drives both servers; Coverage
// counts what was tried and what of it succeeded. Invariants:
//
//	G1: the operations are a function of the seed and of the reference's answers, so a seed run twice asks the same.
//	G2: a write is sent only when both servers have answered all before it; reads between two writes run at once.
//	G3: nothing is compared whose value the protocol leaves open: see equal.go.
package random

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// Operation is one request.
type Operation struct {
	Number  int
	Method  string
	Request proto.Message
}

// State is what the generator has learned from the reference's answers.
type State struct {
	Revision int64
	Compact  int64 // -1: never
	Leases   map[int64]bool

	// After SIGKILL a server runs the last compaction again if it had not written down that it ended, and then remembers its
	// hash or not. Until the next compaction the hash at the compact revision is not asked for.
	HashOpen bool
}

// Generator makes operations. It is for one goroutine.
type Generator struct {
	State State

	rand *rand.Rand
}

// NewGenerator starts with an empty store.
func NewGenerator(seed uint64) *Generator {
	return &Generator{
		State: State{Revision: 1, Compact: -1, Leases: make(map[int64]bool)},
		rand:  rand.New(rand.NewPCG(seed, 0)),
	}
}

// Read makes a request that changes nothing.
func (g *Generator) Read() (string, proto.Message) {
	switch n := g.rand.IntN(100); {
	case n < 60:
		return "Range", g.rangeRequest(true)
	case n < 72:
		return "RangeStream", g.streamRequest()
	case n < 84:
		return "Txn", g.txn(0, true)
	case n < 88:
		return "LeaseTimeToLive", &etcdserverpb.LeaseTimeToLiveRequest{ID: g.lease(), Keys: g.chance(50)}
	case n < 91:
		return "LeaseKeepAlive", &etcdserverpb.LeaseKeepAliveRequest{ID: g.lease()} // leases live so long that this changes no answer
	case n < 92:
		return "LeaseLeases", &etcdserverpb.LeaseLeasesRequest{}
	case n < 94:
		return "Alarm", &etcdserverpb.AlarmRequest{Alarm: etcdserverpb.AlarmType(g.rand.IntN(3))}
	case n < 96:
		return "MemberList", &etcdserverpb.MemberListRequest{Linearizable: g.chance(50)}
	default:
		return "HashKV", &etcdserverpb.HashKVRequest{Revision: g.hashRevision()}
	}
}

// Write makes a request that may change something; compactions are made by Compaction.
func (g *Generator) Write() (string, proto.Message) {
	switch n := g.rand.IntN(100); {
	case n < 45:
		return "Put", g.put()
	case n < 60:
		return "DeleteRange", g.deleteRange()
	case n < 90:
		return "Txn", g.txn(0, false)
	case n < 96:
		return "LeaseGrant", g.grant()
	default:
		return "LeaseRevoke", &etcdserverpb.LeaseRevokeRequest{ID: g.lease()}
	}
}

// Compaction makes a request to compact.
func (g *Generator) Compaction() *etcdserverpb.CompactionRequest {
	return &etcdserverpb.CompactionRequest{Revision: g.revision(10, 10, 10, 50, 10, 10), Physical: g.chance(50)}
}

func (g *Generator) chance(percent int) bool { return g.rand.IntN(100) < percent }

var keyParts = []string{"a", "b", "c", "k", "\x00", "\xff"}

// key is one of 258, the short ones most often.
func (g *Generator) key() []byte {
	if g.chance(1) {
		return nil
	}
	var b strings.Builder
	for n := 1 + min(g.rand.IntN(3), g.rand.IntN(3)); n > 0; n-- {
		b.WriteString(keyParts[g.rand.IntN(len(keyParts))])
	}
	return []byte(b.String())
}

func (g *Generator) rangeEnd(key []byte) []byte {
	switch n := g.rand.IntN(100); {
	case n < 30:
		return nil
	case n < 40:
		return []byte{0}
	case n < 60 && len(key) > 0 && key[len(key)-1] < 0xff: // all with this prefix
		end := append([]byte(nil), key...)
		end[len(end)-1]++
		return end
	case n < 65:
		return append(append([]byte(nil), key...), 0)
	case n < 67:
		return key
	default:
		return g.key() // often below key
	}
}

func (g *Generator) value() []byte {
	switch n := g.rand.IntN(100); {
	case n < 15:
		return nil
	case n < 60: // few, so that compares hit
		return []byte{"012\x00\xff"[g.rand.IntN(5)]}
	case n < 98:
		v := make([]byte, g.rand.IntN(40))
		for i := range v {
			v[i] = byte(g.rand.Uint32())
		}
		return v
	default:
		return []byte(strings.Repeat("v", g.rand.IntN(4000)))
	}
}

// lease is mostly one that is there.
func (g *Generator) lease() int64 {
	if g.chance(10) {
		return 1000 + g.rand.Int64N(3)
	}
	return g.leaseID()
}

func (g *Generator) leaseID() int64 {
	id := 1 + g.rand.Int64N(30)
	if g.chance(10) {
		return -id
	}
	return id
}

// revision picks by weights: the latest (0), one below zero, compacted, past, current, future.
func (g *Generator) revision(latest, negative, compacted, past, current, future int) int64 {
	c, k := g.State.Revision, max(g.State.Compact, 0)
	n := g.rand.IntN(latest + negative + compacted + past + current + future)
	for _, choice := range []struct {
		weight int
		pick   func() int64
	}{
		{latest, func() int64 { return 0 }},
		{negative, func() int64 { return -1 - g.rand.Int64N(5) }},
		{compacted, func() int64 { return min(max(k-g.rand.Int64N(20), 1), max(k, 1)) }},
		{past, func() int64 { return max(k, c-1-g.rand.Int64N(min(max(c-k, 1), 500))) }},
		{current, func() int64 { return c }},
	} {
		if n < choice.weight {
			return choice.pick()
		}
		n -= choice.weight
	}
	return c + 1 + g.rand.Int64N(20)
}

func (g *Generator) hashRevision() int64 {
	if g.chance(20) && g.State.Compact > 0 && !g.State.HashOpen {
		return g.State.Compact // from the cache, if that compaction ended since the start
	}
	r := g.revision(40, 1, 8, 35, 8, 8)
	if r == g.State.Compact && g.State.HashOpen {
		r = 0
	}
	return r
}

func (g *Generator) rangeRequest(outside bool) *etcdserverpb.RangeRequest {
	r := &etcdserverpb.RangeRequest{Key: g.key()}
	r.RangeEnd = g.rangeEnd(r.Key)
	if g.chance(30) {
		if outside {
			r.Revision = g.revision(0, 5, 10, 60, 15, 10)
		} else {
			r.Revision = g.revision(0, 1, 2, 60, 35, 2) // one that fails takes the whole transaction with it
		}
	}
	if g.chance(30) {
		r.Limit = g.rand.Int64N(8) - 1
	}
	if g.chance(35) {
		r.SortOrder = etcdserverpb.RangeRequest_SortOrder(g.rand.IntN(3))
		r.SortTarget = etcdserverpb.RangeRequest_SortTarget(g.rand.IntN(5))
		if g.chance(2) {
			r.SortOrder = 3
		}
		if g.chance(2) {
			r.SortTarget = 5
		}
	}
	r.Serializable, r.KeysOnly, r.CountOnly = g.chance(20), g.chance(15), g.chance(10)
	for _, filter := range []*int64{&r.MinModRevision, &r.MaxModRevision, &r.MinCreateRevision, &r.MaxCreateRevision} {
		if g.chance(6) {
			*filter = g.State.Revision - g.rand.Int64N(min(g.State.Revision, 300)+5) + 2
		}
	}
	return r
}

// streamRequest is a Range without most of what a stream refuses.
func (g *Generator) streamRequest() *etcdserverpb.RangeRequest {
	r := g.rangeRequest(true)
	if g.chance(90) {
		// Without an order etcd sorts each chunk by the target, which leaves no order at all.
		r.SortOrder, r.SortTarget = min(r.SortOrder, etcdserverpb.RangeRequest_ASCEND), etcdserverpb.RangeRequest_KEY
		r.MinModRevision, r.MaxModRevision, r.MinCreateRevision, r.MaxCreateRevision = 0, 0, 0, 0
	} else if r.SortTarget != etcdserverpb.RangeRequest_KEY {
		r.SortOrder = max(r.SortOrder, etcdserverpb.RangeRequest_DESCEND)
	}
	return r
}

func (g *Generator) put() *etcdserverpb.PutRequest {
	r := &etcdserverpb.PutRequest{Key: g.key(), Value: g.value(), PrevKv: g.chance(20)}
	if g.chance(25) {
		r.Lease = g.lease()
	}
	if g.chance(8) {
		r.IgnoreValue = true
		if g.chance(90) {
			r.Value = nil
		}
	}
	if g.chance(8) {
		r.IgnoreLease = true
		if g.chance(90) {
			r.Lease = 0
		}
	}
	return r
}

// deleteRange deletes much only now and then, so that there is something to delete.
func (g *Generator) deleteRange() *etcdserverpb.DeleteRangeRequest {
	r := &etcdserverpb.DeleteRangeRequest{Key: g.key(), PrevKv: g.chance(30)}
	if g.chance(40) {
		r.RangeEnd = g.rangeEnd(r.Key)
		if len(r.Key) < 2 && g.chance(80) {
			r.RangeEnd = append(append([]byte(nil), r.Key...), 'b')
		}
	}
	return r
}

func (g *Generator) grant() *etcdserverpb.LeaseGrantRequest {
	r := &etcdserverpb.LeaseGrantRequest{ID: g.leaseID(), TTL: 3600 + g.rand.Int64N(3600)}
	if g.chance(3) {
		r.TTL = 9000000000 + g.rand.Int64N(2)*int64(1+g.rand.IntN(1000))
	}
	return r
}

// txn makes a transaction; reads only makes one that the servers answer without consensus.
func (g *Generator) txn(depth int, reads bool) *etcdserverpb.TxnRequest {
	r := &etcdserverpb.TxnRequest{}
	for range g.rand.IntN(3) {
		r.Compare = append(r.Compare, g.compare())
	}
	if depth == 0 && g.rand.IntN(400) == 0 { // more than is allowed, or just as many
		for i := range 128 + g.rand.IntN(2) {
			key := fmt.Appendf(nil, "many%d", i)
			r.Success = append(r.Success, &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestRange{
				RequestRange: &etcdserverpb.RangeRequest{Key: key, CountOnly: true}}})
		}
		return r
	}
	used := make(map[string]bool)
	r.Success = g.ops(depth, reads, used)
	r.Failure = g.ops(depth, reads, used)
	return r
}

// fromKey marks that a transaction deletes all keys from some key on. etcd does not hold that against a put of such a key, and
// dies if the put then finds nothing to keep the value or the lease of.
const fromKey = "from a key on"

func (g *Generator) ops(depth int, reads bool, used map[string]bool) []*etcdserverpb.RequestOp {
	var ops []*etcdserverpb.RequestOp
	for range g.rand.IntN(4) {
		op := &etcdserverpb.RequestOp{}
		n := g.rand.IntN(100)
		switch {
		case reads || n < 30:
			op.Request = &etcdserverpb.RequestOp_RequestRange{RequestRange: g.rangeRequest(false)}
		case n < 70:
			put := g.put()
			if used[string(put.Key)] && !g.chance(5) {
				continue
			}
			used[string(put.Key)] = true
			if used[fromKey] {
				put.IgnoreValue, put.IgnoreLease = false, false
			}
			op.Request = &etcdserverpb.RequestOp_RequestPut{RequestPut: put}
		case n < 85:
			del := g.deleteRange()
			if g.chance(90) {
				if used[string(del.Key)] {
					continue
				}
				del.RangeEnd = nil
				used[string(del.Key)] = true
			} else if bytes.Equal(del.RangeEnd, []byte{0}) {
				used[fromKey] = true
			}
			op.Request = &etcdserverpb.RequestOp_RequestDeleteRange{RequestDeleteRange: del}
		case n < 98 && depth < 3:
			op.Request = &etcdserverpb.RequestOp_RequestTxn{RequestTxn: g.nested(depth+1, used)}
		case n == 99 && g.chance(30): // an operation that is not set
		default:
			continue
		}
		ops = append(ops, op)
	}
	return ops
}

func (g *Generator) nested(depth int, used map[string]bool) *etcdserverpb.TxnRequest {
	r := &etcdserverpb.TxnRequest{}
	for range g.rand.IntN(3) {
		r.Compare = append(r.Compare, g.compare())
	}
	r.Success = g.ops(depth, false, used)
	r.Failure = g.ops(depth, false, used)
	return r
}

func (g *Generator) compare() *etcdserverpb.Compare {
	c := &etcdserverpb.Compare{
		Key:    g.key(),
		Result: etcdserverpb.Compare_CompareResult(g.rand.IntN(4)),
		Target: etcdserverpb.Compare_CompareTarget(g.rand.IntN(5)),
	}
	if g.chance(30) {
		c.RangeEnd = g.rangeEnd(c.Key)
	}
	switch union := c.Target; {
	case g.chance(3): // left out
	case union == etcdserverpb.Compare_VERSION:
		c.TargetUnion = &etcdserverpb.Compare_Version{Version: g.rand.Int64N(4)}
	case union == etcdserverpb.Compare_CREATE:
		c.TargetUnion = &etcdserverpb.Compare_CreateRevision{CreateRevision: g.near()}
	case union == etcdserverpb.Compare_MOD:
		c.TargetUnion = &etcdserverpb.Compare_ModRevision{ModRevision: g.near()}
	case union == etcdserverpb.Compare_VALUE:
		c.TargetUnion = &etcdserverpb.Compare_Value{Value: g.value()}
	case union == etcdserverpb.Compare_LEASE:
		c.TargetUnion = &etcdserverpb.Compare_Lease{Lease: g.leaseID() * int64(g.rand.IntN(2))}
	}
	return c
}

// near is a revision that keys may well have, or zero.
func (g *Generator) near() int64 {
	if g.chance(30) {
		return 0
	}
	return g.State.Revision - g.rand.Int64N(min(g.State.Revision, 200))
}
