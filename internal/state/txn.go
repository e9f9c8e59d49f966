package state

import (
	"bytes"
	"cmp"
	"fmt"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/mvcc/index"
)

// Live reads the newest values. mvcc.Writer is one inside a batch, mvcc.View one
// outside.
type Live interface {
	Item(key []byte) (index.Item, bool)
	Items(key, end []byte, fn func(index.Item) bool)
	Value(it index.Item) ([]byte, error)
	// Values is Value of many items at once.
	Values(items []index.Item) ([][]byte, error)
}

// Holds says whether all compares hold, each for every key of its range
// (state-machine.md, section 2.6). An empty list holds.
func Holds(live Live, compares []command.Compare) (bool, error) {
	for i := range compares {
		if ok, err := holds(live, &compares[i]); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

func holds(live Live, c *command.Compare) (bool, error) {
	if len(c.RangeEnd) == 0 {
		it, ok := live.Item(c.Key)
		switch {
		case !ok:
			return holdsAbsent(c), nil
		case c.Target != targetValue:
			return holdsNumber(c, it), nil
		}
		kv, err := live.Value(it)
		return err == nil && holdsValue(c, kv), err
	}
	found, all := false, true
	if c.Target != targetValue {
		live.Items(c.Key, c.RangeEnd, func(it index.Item) bool {
			found, all = true, holdsNumber(c, it)
			return all
		})
	} else {
		var err error
		if found, all, err = holdValues(live, c); err != nil {
			return false, err
		}
	}
	if !found {
		return holdsAbsent(c), nil
	}
	return all, nil
}

// A compare with the values of a range reads those of so many keys at a time: of
// few at first, for the first may decide, and then of as many as can be read well
// in bulk. It holds about compareBytes of them.
const (
	compareFirst = 16
	compareMost  = 1024
	compareBytes = 4 << 20
)

// holdValues says whether a range has any keys and whether the compare holds for
// the values of all.
func holdValues(live Live, c *command.Compare) (found, all bool, err error) {
	var items []index.Item
	size, most := 0, compareFirst
	compare := func() bool {
		var kvs [][]byte
		if kvs, err = live.Values(items); err != nil {
			return false
		}
		for _, kv := range kvs {
			if !holdsValue(c, kv) {
				return false
			}
		}
		items, size, most = items[:0], 0, min(2*most, compareMost)
		return true
	}
	all = true
	live.Items(c.Key, c.RangeEnd, func(it index.Item) bool {
		found = true
		items, size = append(items, it), size+int(it.Size)
		if len(items) == most || size >= compareBytes {
			all = compare()
		}
		return all
	})
	if all {
		all = compare()
	}
	return found, all, err
}

// holdsAbsent compares with a key that is not there: as with zeros, but a value
// that does not exist equals nothing and differs from nothing.
func holdsAbsent(c *command.Compare) bool {
	if c.Target == targetValue {
		return false
	}
	return resultOf(c.Result, cmp.Compare(0, number(c)))
}

// Numbers of etcdserverpb.Compare's enums.
const (
	targetVersion, targetCreate, targetMod, targetValue, targetLease = 0, 1, 2, 3, 4
	resultEqual, resultGreater, resultLess, resultNotEqual           = 0, 1, 2, 3
)

func number(c *command.Compare) int64 {
	if c.Target < targetVersion || c.Target > targetLease {
		return 0
	}
	return c.Number()
}

func holdsValue(c *command.Compare, kv []byte) bool {
	return resultOf(c.Result, bytes.Compare(mvcc.ValueOf(kv), c.Bytes()))
}

func holdsNumber(c *command.Compare, it index.Item) bool {
	var have int64
	switch c.Target {
	case targetVersion:
		have = it.Version
	case targetCreate:
		have = it.Create
	case targetMod:
		have = it.Mod.Main
	case targetLease:
		have = it.Lease
	default: // unknown targets count as equal
		return resultOf(c.Result, 0)
	}
	return resultOf(c.Result, cmp.Compare(have, c.Number()))
}

// resultOf says whether an ordering satisfies what was asked. An unknown
// request is satisfied.
func resultOf(result int32, order int) bool {
	switch result {
	case resultEqual:
		return order == 0
	case resultGreater:
		return order > 0
	case resultLess:
		return order < 0
	case resultNotEqual:
		return order != 0
	}
	return true
}

// Plan is the path that a transaction takes: which branch at each level. It is
// found before anything is written, so that no compare sees a write of its own
// transaction.
type Plan struct {
	Succeeded bool
	// Nested holds the plans of the taken branch's inner transactions, in order.
	Nested []Plan
}

// Ops is the branch of t that the plan takes.
func (p *Plan) Ops(t *command.TxnRequest) []command.Op {
	if p.Succeeded {
		return t.Success
	}
	return t.Failure
}

// Decide evaluates the compares of t and of the transactions nested in the
// branch that it takes.
func Decide(live Live, t *command.TxnRequest) (Plan, error) {
	var p Plan
	var err error
	if p.Succeeded, err = Holds(live, t.Compare); err != nil {
		return Plan{}, err
	}
	ops := p.Ops(t)
	for i := range ops {
		if ops[i].Kind != command.OpTxn {
			continue
		}
		nested, err := Decide(live, ops[i].Txn)
		if err != nil {
			return Plan{}, err
		}
		p.Nested = append(p.Nested, nested)
	}
	return p, nil
}

// CheckRangeRevision tells whether a range operation inside a transaction may
// read at rev. Unlike a plain Range, a negative revision below the compact
// revision fails here (state-machine.md, section 2.6).
func CheckRangeRevision(rev, current, compacted int64) error {
	switch {
	case rev > current:
		return fmt.Errorf("range in txn at %d, store is at %d: %w", rev, current, mvcc.ErrFutureRevision)
	case rev != 0 && rev < compacted:
		return fmt.Errorf("range in txn at %d, compacted at %d: %w", rev, compacted, mvcc.ErrCompacted)
	}
	return nil
}

// RangeOptionsOf translates a range request.
func RangeOptionsOf(r *command.RangeRequest) mvcc.RangeOptions {
	return mvcc.RangeOptions{
		Limit: r.Limit, Revision: r.Revision, CountOnly: r.CountOnly, KeysOnly: r.KeysOnly,
		MinMod: r.MinMod, MaxMod: r.MaxMod, MinCreate: r.MinCreate, MaxCreate: r.MaxCreate,
		Order: mvcc.SortOrder(r.SortOrder), Target: mvcc.SortTarget(r.SortTarget),
	}
}
