package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/internal/broken"
)

// auditTime is how long a healthy member may take to answer all of an audit.
const auditTime = 30 * time.Second

// audit compares a member that just came back, or whose writers have ended, with
// what clients were told before.
func (l *life) audit() error {
	ctx, cancel := context.WithTimeout(l.ctx, auditTime)
	defer cancel()
	g := l.w.ledger
	all, err := l.client.Get(ctx, "", clientv3.WithPrefix())
	if err != nil {
		return fmt.Errorf("reading everything: %w", err)
	}
	now := all.Header.Revision
	g.mu.Lock()
	top, seen := g.top, g.seenLocked()
	g.mu.Unlock()
	if now < max(top, seen) {
		return broken.Errorf("revisions went back: the member is at %d, clients were told of %d and the watcher saw %d", now, top, seen)
	}
	if err := l.catchUp(ctx, now); err != nil {
		return err
	}
	for _, check := range []func() error{
		g.reconcile,
		func() error { return g.compare(all.Kvs) },
		func() error { return l.auditHash(ctx) },
		func() error { return l.auditHistory(ctx, now) },
		func() error { return l.auditLeases(ctx) },
		l.w.failed,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

// catchUp waits until the resumed watcher has seen a revision.
func (l *life) catchUp(ctx context.Context, revision int64) error {
	g := l.w.ledger
	for g.seen() < revision {
		select {
		case <-g.wake:
		case <-ctx.Done():
			return fmt.Errorf("the resumed watcher has seen revision %d of %d: %w", g.seen(), revision, errors.Join(ctx.Err(), l.w.failed()))
		case <-time.After(20 * time.Millisecond):
			if err := l.w.failed(); err != nil {
				return err
			}
		}
	}
	return nil
}

// auditHash asks for HashKV and computes it from the events.
func (l *life) auditHash(ctx context.Context) error {
	r, err := l.client.HashKV(ctx, l.client.Endpoints()[0], 0)
	if err != nil {
		return fmt.Errorf("HashKV: %w", err)
	}
	g := l.w.ledger
	g.mu.Lock()
	compacted, live := g.compacted, len(g.live)
	g.mu.Unlock()
	if r.CompactRevision < compacted && compacted > 0 {
		return broken.Errorf("compaction at %d was acknowledged, the member is compacted at %d", compacted, r.CompactRevision)
	}
	if live == 0 {
		return nil // then it may depend on how far the compaction is
	}
	if want := g.hashKV(r.CompactRevision); r.Hash != want {
		return broken.Errorf("HashKV at revision %d compacted at %d is %d, of the events it is %d", r.HashRevision, r.CompactRevision, r.Hash, want)
	}
	return nil
}

// auditHistory reads some of the past: a watcher that begins there gets the same
// events again, and reads at a revision find what was put then.
func (l *life) auditHistory(ctx context.Context, now int64) error {
	g := l.w.ledger
	h, err := l.client.HashKV(ctx, l.client.Endpoints()[0], 0)
	if err != nil {
		return err
	}
	oldest := max(h.CompactRevision, 1)
	if now <= oldest+1 {
		return nil
	}
	rnd := rand.New(rand.NewPCG(l.w.seed, uint64(now)))
	begin := max(oldest+1, now-rnd.Int64N(300))
	want := g.from(begin)
	watchCtx, stop := context.WithCancel(ctx)
	defer stop()
	n := 0
	for r := range l.client.Watch(watchCtx, "", clientv3.WithPrefix(), clientv3.WithRev(begin)) {
		if err := r.Err(); err != nil {
			return fmt.Errorf("second watch from %d: %w", begin, err)
		}
		for _, e := range r.Events {
			if n >= len(want) || !want[n].equal(e) {
				return broken.Errorf("second watch from %d: event %d is %v, before it was %v", begin, n, e, want[min(n, len(want)-1)].kv)
			}
			n++
		}
		if n == len(want) {
			break
		}
	}
	if n < len(want) {
		return fmt.Errorf("second watch from %d got %d of %d events: %w", begin, n, len(want), ctx.Err())
	}
	for range min(5, len(want)) {
		r := want[rnd.IntN(len(want))]
		got, err := l.client.Get(ctx, string(r.kv.Key), clientv3.WithRev(r.main))
		switch {
		case err != nil:
			return fmt.Errorf("get of %q at %d: %w", r.kv.Key, r.main, err)
		case r.deleted && len(got.Kvs) != 0, !r.deleted && (len(got.Kvs) != 1 || got.Kvs[0].ModRevision != r.main || string(got.Kvs[0].Value) != string(r.kv.Value)):
			return broken.Errorf("get of %q at %d is %v, its event was %v", r.kv.Key, r.main, got.Kvs, r.kv)
		}
	}
	if oldest > 1 {
		switch got, err := l.client.Get(ctx, "p/0", clientv3.WithRev(oldest-1)); {
		case err == nil:
			return broken.Errorf("get at %d, compacted at %d, answers %v", oldest-1, oldest, got.Kvs)
		case !errors.Is(err, rpctypes.ErrCompacted):
			return fmt.Errorf("get at %d, compacted at %d: %w", oldest-1, oldest, err)
		}
	}
	return nil
}

// auditLeases compares a handful of leases with what was granted and revoked.
func (l *life) auditLeases(ctx context.Context) error {
	g := l.w.ledger
	g.mu.Lock()
	var ids []int64
	for id := range g.leases {
		ids = append(ids, id)
	}
	g.mu.Unlock()
	slices.SortFunc(ids, func(a, b int64) int { return int(b - a) })
	for _, id := range ids[:min(len(ids), 20)] {
		g.mu.Lock()
		want := g.leases[id]
		g.mu.Unlock()
		got, err := l.client.TimeToLive(ctx, clientv3.LeaseID(id), clientv3.WithAttachedKeys())
		if err != nil {
			return fmt.Errorf("lease %d: %w", id, err)
		}
		if got.TTL == -1 && (want.revoked || want.doubt || want.ttl == 0) {
			g.mu.Lock()
			delete(g.leases, id)
			g.mu.Unlock()
			continue
		}
		if want.revoked && got.TTL != -1 {
			return broken.Errorf("lease %d was revoked and has %d s left", id, got.TTL)
		}
		// The time spent in tests is minutes at most; a restart may lengthen a
		// lease to its full time, and must never shorten it.
		if want.ttl != 0 && (got.GrantedTTL != want.ttl || got.TTL > want.ttl || got.TTL < want.ttl-600) {
			return broken.Errorf("lease %d was granted for %d s, now it is %d s of %d s", id, want.ttl, got.TTL, got.GrantedTTL)
		}
		var keys []string
		for _, k := range got.Keys {
			keys = append(keys, string(k))
		}
		slices.Sort(keys)
		if attached := g.attached(id); !slices.Equal(keys, attached) {
			return broken.Errorf("lease %d has keys %q, by the events %q", id, keys, attached)
		}
		g.noteLease(id, func(g *grant) { g.doubt = false })
	}
	return nil
}
