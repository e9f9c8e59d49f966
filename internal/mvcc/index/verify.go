package index

import (
	"bytes"
	"fmt"
	"math"
)

// Verify checks every node against the invariants of the package and returns
// the first that does not hold. It takes time in proportion to the contents
// and is meant for tests.
func (r Root) Verify() error {
	if r.top == nil {
		return nil
	}
	v := verifier{}
	if err := v.inner(r.top, nil, nil); err != nil {
		return err
	}
	if v.newest > r.newest {
		return fmt.Errorf("revision %d is newer than the newest, %d", v.newest, r.newest)
	}
	var err error
	r.Walk(nil, func(rec *Record) bool {
		err = rec.Validate()
		return err == nil
	})
	return err
}

type verifier struct{ newest int64 }

// inner checks n, whose keys lie in [lo, hi); nil means no bound.
func (v *verifier) inner(n *inner, lo, hi []byte) error {
	if n.len() > fanout || n.seps.count != n.len() {
		return fmt.Errorf("node of height %d has %d children and %d separators", n.height, n.len(), n.seps.count)
	}
	for i := range n.len() {
		from, to := lo, hi
		if i > 0 {
			from = n.seps.at(i)
		}
		if i+1 < n.len() {
			to = n.seps.at(i + 1)
		}
		if from != nil && to != nil && bytes.Compare(from, to) >= 0 {
			return fmt.Errorf("separators %q and %q", from, to)
		}
		want, err := v.child(n, i, from, to)
		if err != nil {
			return err
		}
		if have := *n.sumOf(i); have.live != want.live || have.bytes != want.bytes || have.history != want.history || have.historyBytes != want.historyBytes || have.prune > want.prune {
			return fmt.Errorf("child at %q of height %d: sum %+v, want %+v", from, n.height-1, have, want)
		}
	}
	return nil
}

func (v *verifier) child(n *inner, i int, lo, hi []byte) (sum, error) {
	if n.height == 1 {
		l := n.leaves[i]
		return l.sum(l.historyBytes(0, l.len())), v.leaf(l, lo, hi)
	}
	kid := n.kids[i].inner
	if kid.height != n.height-1 || kid.len() == 0 {
		return sum{}, fmt.Errorf("child of height %d with %d children under height %d", kid.height, kid.len(), n.height)
	}
	return kid.sum(), v.inner(kid, lo, hi)
}

func (v *verifier) leaf(l *leaf, lo, hi []byte) error {
	n := l.len()
	if n == 0 || n > leafRows || l.leases != nil && len(l.leases) != n {
		return fmt.Errorf("leaf at %q: %d rows, %d leases", lo, n, len(l.leases))
	}
	if len(l.slots) > math.MaxUint8 || int(l.shared) > len(l.slots) {
		return fmt.Errorf("leaf at %q: %d slots, %d of them shared", lo, len(l.slots), l.shared)
	}
	var taken [math.MaxUint8 + 1]bool
	for i := range n {
		if s := l.at[i]; int(s) >= len(l.slots) || taken[s] {
			return fmt.Errorf("leaf at %q: row %d in slot %d of %d is not there, or another's too", lo, i, s, len(l.slots))
		}
		taken[l.at[i]] = true
		key := l.key(i)
		if i > 0 && bytes.Compare(l.key(i-1), key) >= 0 {
			return fmt.Errorf("key %q before key %q", l.key(i-1), key)
		}
		if lo != nil && bytes.Compare(key, lo) < 0 || hi != nil && bytes.Compare(key, hi) >= 0 {
			return fmt.Errorf("key %q outside of [%q, %q)", key, lo, hi)
		}
		if len(key) < int(l.prefix) || !bytes.Equal(key[:l.prefix], l.key(0)[:l.prefix]) || l.hints[i] != leafHint(key[l.prefix:]) {
			return fmt.Errorf("key %q: prefix %d, hint %x", key, l.prefix, l.hints[i])
		}
		r := l.row(i)
		if !r.live() && (r.create != 0 || r.ref != 0 || l.lease(i) != 0) {
			return fmt.Errorf("tombstone of key %q: %+v, lease %d", key, *r, l.lease(i))
		}
		if got := int64(len(l.hist.places(r.hist, 0, nil))); got != l.hist.len(r.hist) {
			return fmt.Errorf("key %q: history of %d entries counts %d", key, got, l.hist.len(r.hist))
		}
		v.newest = max(v.newest, r.mod)
	}
	return nil
}
