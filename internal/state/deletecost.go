package state

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
)

// tombstoneCost is the most that the record of a deleted key is reckoned to take
// on the disk, in bytes: its name, of which neighbours share the beginning, and
// some numbers (measured: 18 to 28 for names of 42).
const tombstoneCost = 128

// DeleteCost is about the most that the records of the keys which a request would
// delete now take on the disk until a compaction removes them. Of a transaction
// it is the greater of its branches. It looks at the index alone, in logarithmic
// time for each range, and may be called from any goroutine.
func (m *Machine) DeleteCost(c *command.Command) int64 {
	switch c.Kind {
	case command.KindDeleteRange, command.KindTxn:
	case command.KindLeaseRevoke:
		r, _ := c.Msg.(*pb.LeaseRevokeRequest)
		return int64(m.leases.KeyCount(r.GetID())) * tombstoneCost
	default:
		return 0
	}
	v := m.View()
	defer v.Release()
	if c.Kind == command.KindDeleteRange {
		return rangeDeleteCost(v, &c.DeleteRange)
	}
	return txnDeleteCost(v, &c.Txn)
}

func rangeDeleteCost(v *View, r *command.DeleteRangeRequest) int64 {
	keys, bytes := v.Count(r.Key, r.RangeEnd)
	return min(bytes, keys*tombstoneCost) // a record with its value has the name in it, too
}

func txnDeleteCost(v *View, t *command.TxnRequest) int64 {
	return max(opsDeleteCost(v, t.Success), opsDeleteCost(v, t.Failure))
}

func opsDeleteCost(v *View, ops []command.Op) (cost int64) {
	for i := range ops {
		switch ops[i].Kind {
		case command.OpDeleteRange:
			cost += rangeDeleteCost(v, ops[i].DeleteRange)
		case command.OpTxn:
			cost += txnDeleteCost(v, ops[i].Txn)
		}
	}
	return cost
}

// Overwrites says whether a request, a Put or a Txn, would put now nothing but
// keys that exist. It may be called from any goroutine.
func (m *Machine) Overwrites(c *command.Command) bool {
	v := m.View()
	defer v.Release()
	return overwrites(v, c)
}
