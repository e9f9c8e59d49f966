package state

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/alarm"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/mvcc/index"
)

// Space that a request is reckoned to take beyond its keys and values, in bytes
// (state-machine.md, section 2.8).
const (
	putOverhead    = 256
	leaseGrantCost = 64
)

// Cost is the space that a request may take, 0 if it takes none. Of a
// transaction it is the greater of its branches.
func Cost(c *command.Command) int64 {
	switch c.Kind {
	case command.KindPut:
		return PutCost(&c.Put)
	case command.KindTxn:
		return TxnCost(&c.Txn)
	case command.KindLeaseGrant:
		return leaseGrantCost
	}
	return 0
}

// PutCost is the Cost of a Put.
func PutCost(r *command.PutRequest) int64 {
	return putOverhead + int64(len(r.Key)+len(r.Value))
}

// TxnCost is the Cost of a Txn.
func TxnCost(t *command.TxnRequest) int64 {
	return max(opsCost(t.Success), opsCost(t.Failure))
}

func opsCost(ops []command.Op) (cost int64) {
	for i := range ops {
		switch ops[i].Kind {
		case command.OpPut:
			cost += PutCost(ops[i].Put)
		case command.OpTxn:
			cost += TxnCost(ops[i].Txn)
		}
	}
	return cost
}

// overQuota says whether a request about to be made passes the quota. As in etcd
// it is made all the same; only its answer says that it was one too many, and the
// alarm will refuse the next.
func (b *batch) overQuota(c *command.Command, cost int64) bool {
	limit := b.m.o.QuotaBytes
	if cost == 0 || limit == 0 || b.kv.UsageBytes()+cost < limit {
		return false
	}
	// What the reserve is for gets its answer.
	reserve := b.m.members.Root().FeatureLevel() >= reserveLevel && roomAbove(limit, b.kv.UsageBytes(), cost) && overwrites(b.kv, c)
	return !reserve
}

// The reserve of a full store. While the NOSPACE alarm stands, small overwrites
// of keys that exist still pass, until they have taken so much. They are how
// programs get out of it: Kubernetes' compactor overwrites compact_rev_key before
// it compacts, and its nodes stay alive by overwriting a lease. What such requests
// write is history, which a compaction gives back.
//
// Whether a request passes decides what the store holds, so it must be the same
// on all members: it depends on the feature level, and on the usage at the entry
// that raised the alarm, but not on the quota, which is a flag of each member.
const (
	// reserveLevel is the feature level from which on there is one.
	reserveLevel = 1
	reserveBytes = 16 << 20
	// reserveCost is the highest Cost of a request that may come out of it. Those
	// up to ReserveLastCost may take all of it, the others half, so that a
	// compactor is not kept out by what is more frequent.
	reserveCost     = 4 << 10
	ReserveLastCost = 512
)

// reserveFor is how far above the mark a request of that cost may go.
func reserveFor(cost int64) int64 {
	switch {
	case cost <= ReserveLastCost:
		return reserveBytes
	case cost <= reserveCost:
		return reserveBytes / 2
	}
	return 0
}

// ReserveHas says whether there is room in the reserve for a request of that cost.
func ReserveHas(alarms *alarm.Root, usageBytes, cost int64) bool {
	fullAt, known := alarms.FullAt()
	return known && roomAbove(fullAt, usageBytes, cost)
}

func roomAbove(fullAt, usageBytes, cost int64) bool {
	room := reserveFor(cost)
	return room > 0 && usageBytes+cost <= fullAt+room
}

// fitsReserve says whether a request passes the NOSPACE alarm.
func (b *batch) fitsReserve(c *command.Command, cost int64) bool {
	return ReserveHas(b.m.alarms.Root(), b.kv.UsageBytes(), cost) && overwrites(b.kv, c)
}

// noteFull begins or ends the reserve: it is called after each entry that may
// change alarms or feature level.
func (b *batch) noteFull() {
	full := b.m.members.Root().FeatureLevel() >= reserveLevel && b.m.alarms.Root().Has(pb.AlarmType_NOSPACE)
	b.m.alarms.SetFull(b.store, full, b.kv.UsageBytes())
}

// keys is a moment of the keys: mvcc.Writer and mvcc.View.
type keys interface {
	Item(key []byte) (index.Item, bool)
}

// overwrites says whether a request, a Put or a Txn, puts nothing but keys that
// exist.
func overwrites(k keys, c *command.Command) bool {
	switch c.Kind {
	case command.KindPut:
		_, ok := k.Item(c.Put.Key)
		return ok
	case command.KindTxn:
		return txnOverwrites(k, &c.Txn)
	}
	return false
}

func txnOverwrites(k keys, t *command.TxnRequest) bool {
	return opsOverwrite(k, t.Success) && opsOverwrite(k, t.Failure)
}

func opsOverwrite(k keys, ops []command.Op) bool {
	for i := range ops {
		switch ops[i].Kind {
		case command.OpPut:
			if _, ok := k.Item(ops[i].Put.Key); !ok {
				return false
			}
		case command.OpTxn:
			if !txnOverwrites(k, ops[i].Txn) {
				return false
			}
		}
	}
	return true
}
