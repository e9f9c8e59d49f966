package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/bench/wire"
)

const (
	leaseTTL   = 600    // seconds that a lease outlives a run that could not revoke it
	totalTTL   = 86_400 // of leases in a run that ends by --total: nobody knows when
	grantsOpen = 32
)

// renewing keeps leases alive, each slot its own ones over a stream that stays open.
type renewing struct {
	plain
	slots  int
	leases []int64
}

// renewState is the lease of a slot's running renewal.
type renewState struct {
	round int
	lease int64
}

func (w *renewing) kinds() []string { return []string{"keep-alive"} }

func (w *renewing) next(s *slot) (op, bool) {
	at, _ := s.own.(*renewState)
	if at == nil {
		at = &renewState{}
		s.own = at
	}
	own := (len(w.leases) - s.id + w.slots - 1) / w.slots
	if own <= 0 {
		return op{}, false
	}
	at.lease = w.leases[s.id+at.round%own*w.slots]
	at.round++
	s.buf = api.AppendLease(s.buf[:0], at.lease)
	return op{method: api.KeepAlive, request: s.buf, exchange: true}, true
}

func (w *renewing) message(s *slot, m []byte) error {
	id, ttl, err := api.Renewed(m)
	if want := s.own.(*renewState).lease; err == nil && (id != want || ttl <= 0) {
		err = fmt.Errorf("the renewal of lease %x was answered with lease %x and a TTL of %d", want, id, ttl)
	}
	return err
}

// grant grants n leases, which clean revokes.
func (r *runner) grant(ctx context.Context, n int) ([]int64, error) {
	g := &granting{ttl: leaseTTL + int64((r.o.warmup+r.o.duration)/time.Second)}
	if r.o.total > 0 {
		g.ttl = totalTTL
	}
	_, all, _, err := r.run(ctx, g, extent{streams: max(1, min(n, grantsOpen)/len(r.lanes)), total: int64(n)}, nil)
	leases := g.asked()
	r.leases = append(r.leases, leases...)
	if err == nil {
		for code, e := range all.kinds[0].failures {
			err = explain(&wire.Error{Code: code, Message: "granting a lease: " + e.first})
		}
	}
	if err == nil && all.kinds[0].count() < int64(n) {
		err = errors.New("granting leases was interrupted")
	}
	return leases, err
}

// revoke gives all leases back that are there.
func (r *runner) revoke(ctx context.Context) error {
	if len(r.leases) == 0 {
		return nil
	}
	_, all, _, err := r.run(ctx, &revoking{leases: r.leases}, extent{streams: max(1, grantsOpen/len(r.lanes))}, nil)
	for code, e := range all.kinds[0].failures {
		if code != codes.NotFound { // one whose grant failed is not there
			err = &wire.Error{Code: code, Message: fmt.Sprintf("%d leases were not revoked and expire by themselves: %s", e.count, e.first)}
		}
	}
	return err
}
