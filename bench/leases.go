package bench

import (
	"errors"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/engram-kv/engram/bench/api"
)

// granting grants leases. It chooses their IDs, so that also those can be revoked whose answer was lost.
type granting struct {
	plain
	ttl    int64 // seconds
	mu     sync.Mutex
	leases []int64 // asked for
}

func (w *granting) kinds() []string { return []string{"grant"} }

func (w *granting) next(s *slot) (op, bool) {
	id := 1 + rand.Int64N(math.MaxInt64-1) // not of the seed: a run before this one may not have revoked its own
	w.mu.Lock()
	w.leases = append(w.leases, id)
	w.mu.Unlock()
	s.buf = api.AppendGrant(s.buf[:0], id, w.ttl)
	return op{method: api.LeaseGrant, request: s.buf}, true
}

func (w *granting) message(_ *slot, m []byte) error {
	if api.Granted(m) == 0 {
		return errors.New("a lease without an ID was granted")
	}
	return nil
}

func (w *granting) asked() []int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.leases
}

// revoking revokes leases.
type revoking struct {
	plain
	leases []int64
	at     atomic.Int64
}

func (w *revoking) kinds() []string { return []string{"revoke"} }

func (w *revoking) next(s *slot) (op, bool) {
	i := int(w.at.Add(1) - 1)
	if i >= len(w.leases) {
		return op{}, false
	}
	s.buf = api.AppendLease(s.buf[:0], w.leases[i])
	return op{method: api.LeaseRevoke, request: s.buf}, true
}

func (w *revoking) message(*slot, []byte) error { return nil }
