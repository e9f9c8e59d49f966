package crash

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/test/internal/broken"
)

// load is the clients of one data directory, over all lives of its member.
type load struct {
	seed    uint64
	writers int
	padding int // bytes that a value may be longer
	ledger  *ledger
	journal *journal
	// refusals counts requests refused for want of space; they are expected if
	// mayRefuse is set.
	mayRefuse bool

	mu       sync.Mutex
	failure  error // what a client saw that must not be
	refusals []error
	seq      int // of values, so that each is another
	lease    int64
}

func newLoad(seed uint64) *load {
	return &load{seed: seed, writers: 3, padding: 300, ledger: newLedger(), journal: newJournal(), lease: 1000}
}

func (w *load) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failure == nil {
		w.failure = err
	}
}

func (w *load) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failure
}

func (w *load) next() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seq++
	return w.seq
}

// life is the clients during one life of the member.
type life struct {
	w       *load
	client  *clientv3.Client
	ctx     context.Context
	cancel  context.CancelFunc
	work    sync.WaitGroup
	stopped chan struct{} // closed when writers are to end; the watcher stays
	enough  chan struct{} // closed once goal answers are there
	goal    int
	once    sync.Once
}

// begin connects to a member, audits it, and when that went well lets the
// clients loose until a crash or end.
func (w *load) begin(addr string, goal int) (*life, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	l := &life{w: w, client: c, stopped: make(chan struct{}), enough: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	w.ledger.thaw()
	l.work.Go(l.watch)
	if err := l.audit(); err != nil {
		l.gone()
		return nil, err
	}
	w.ledger.mu.Lock()
	l.goal = w.ledger.count + goal
	w.ledger.mu.Unlock()
	for i := range w.writers {
		l.work.Go(func() { l.write(i) })
	}
	for i := range 2 {
		l.work.Go(func() { l.fight(i) })
	}
	l.work.Go(l.compact)
	return l, nil
}

// wait waits until goal answers are there, which a member that ends does not give.
func (l *life) wait(t testing.TB, ended <-chan struct{}) {
	t.Helper()
	select {
	case <-l.enough:
	case <-ended:
		t.Fatalf("the member ended by itself: %v", l.w.failed())
	case <-time.After(patience):
		t.Fatalf("too few answers within %v: %v", patience, l.w.failed())
	}
}

// gone ends the clients of a member that is no more.
func (l *life) gone() {
	l.cancel()
	l.w.journal.bury()
	l.stop()
	l.work.Wait()
	l.w.journal.bury() // of those that were still noting it
	_ = l.client.Close()
}

func (l *life) stop() { l.once.Do(func() { close(l.stopped) }) }

func (l *life) ending() bool {
	select {
	case <-l.stopped:
		return true
	default:
		return l.ctx.Err() != nil || l.w.failed() != nil
	}
}

// noted closes enough when the goal is reached.
func (l *life) noted() {
	g := l.w.ledger
	g.mu.Lock()
	reached := g.count >= l.goal
	if reached && l.enough != nil {
		select {
		case <-l.enough:
		default:
			close(l.enough)
		}
	}
	g.mu.Unlock()
}

// watch follows all keys from the last revision seen.
func (l *life) watch() {
	g := l.w.ledger
	for r := range l.client.Watch(l.ctx, "", clientv3.WithPrefix(), clientv3.WithRev(g.seen()+1)) {
		if err := r.Err(); err != nil {
			if l.ctx.Err() == nil && status.Code(err) != codes.Unavailable && !errors.Is(err, context.Canceled) {
				l.w.fail(fmt.Errorf("watch from revision %d: %w", g.seen()+1, err))
			}
			return
		}
		if err := g.observe(r); err != nil {
			l.w.fail(err)
			return
		}
	}
}

// ended judges the error of a request with these effects: in doubt when the
// member went away, and a failure of the test if it should not have come.
// It reports whether the client may go on.
func (l *life) ended(err error, effects ...effect) bool {
	if l.w.mayRefuse && status.Code(err) == codes.ResourceExhausted || errors.Is(err, rpctypes.ErrNoSpace) && l.w.mayRefuse {
		l.w.mu.Lock()
		l.w.refusals = append(l.w.refusals, err)
		l.w.mu.Unlock()
		select {
		case <-l.ctx.Done():
		case <-time.After(5 * time.Millisecond): // no haste while the disk is full
		}
		return true
	}
	l.w.ledger.doubt(effects...)
	return false
}

// write is one writer with keys of its own.
func (l *life) write(id int) {
	w, g := l.w, l.w.ledger
	rnd := rand.New(rand.NewPCG(w.seed, uint64(id)<<32|uint64(w.next())))
	prefix := fmt.Sprintf("w%d/", id)
	own := map[string]int64{} // live keys and their leases
	g.mu.Lock()
	for k, kv := range g.live {
		if strings.HasPrefix(k, prefix) {
			own[k] = kv.Lease
		}
	}
	g.mu.Unlock()
	value := func() string {
		return fmt.Sprintf("%d %s", w.next(), strings.Repeat("x", rnd.IntN(w.padding)))
	}
	for !l.ending() {
		key := fmt.Sprintf("%s%d", prefix, rnd.IntN(8))
		switch n := rnd.IntN(100); {
		case n < 55:
			put := effect{key: key, value: value()}
			r, err := l.client.Put(l.ctx, key, put.value)
			if err != nil {
				if l.ended(err, put) {
					continue
				}
				return
			}
			g.tell(r.Header.Revision, put)
			own[key] = 0
		case n < 65:
			var gone []effect
			if _, ok := own[key]; ok {
				gone = []effect{{key: key, deleted: true}}
			}
			r, err := l.client.Delete(l.ctx, key)
			if err != nil {
				if l.ended(err, gone...) {
					continue
				}
				return
			}
			if r.Deleted != int64(len(gone)) {
				w.fail(broken.Errorf("delete of %q at revision %d deleted %d, should be %d", key, r.Header.Revision, r.Deleted, len(gone)))
				return
			}
			g.tell(r.Header.Revision, gone...)
			delete(own, key)
		case n < 69:
			gone := deletes(slices.Collect(maps.Keys(own)), prefix+"0", prefix+"9")
			r, err := l.client.Delete(l.ctx, prefix+"0", clientv3.WithRange(prefix+"9"))
			if err != nil {
				if l.ended(err, gone...) {
					continue
				}
				return
			}
			if r.Deleted != int64(len(gone)) {
				w.fail(broken.Errorf("range delete at revision %d deleted %d, should be %d: %v", r.Header.Revision, r.Deleted, len(gone), gone))
				return
			}
			g.tell(r.Header.Revision, gone...)
			for _, e := range gone {
				delete(own, e.key)
			}
		case n < 90:
			v := value()
			both := []effect{{key: prefix + "a", value: v}, {key: prefix + "b", value: v}}
			r, err := l.client.Txn(l.ctx).Then(clientv3.OpPut(prefix+"a", v), clientv3.OpPut(prefix+"b", v)).Commit()
			if err != nil {
				if l.ended(err, both...) {
					continue
				}
				return
			}
			g.tell(r.Header.Revision, both...)
			own[prefix+"a"], own[prefix+"b"] = 0, 0
		case n < 96:
			if !l.grantAndAttach(own, key, value()) {
				return
			}
		default:
			if !l.revoke(own) {
				return
			}
		}
		l.noted()
	}
}

// deletes is what a range delete of [from, to) does to keys.
func deletes(keys []string, from, to string) (out []effect) {
	slices.Sort(keys)
	for _, k := range keys {
		if k >= from && k < to {
			out = append(out, effect{key: k, deleted: true})
		}
	}
	return out
}

func (l *life) grantAndAttach(own map[string]int64, key, value string) bool {
	l.w.mu.Lock()
	l.w.lease++
	id := l.w.lease
	l.w.mu.Unlock()
	const ttl = 3600
	r, err := etcdserverpb.NewLeaseClient(l.client.ActiveConnection()).LeaseGrant(l.ctx, &etcdserverpb.LeaseGrantRequest{ID: id, TTL: ttl})
	if err != nil {
		return l.ended(err)
	}
	if r.ID != id || r.TTL != ttl {
		l.w.fail(broken.Errorf("lease %d for %d s was granted as %d for %d s", id, ttl, r.ID, r.TTL))
		return false
	}
	l.w.ledger.noteLease(id, func(g *grant) { g.ttl = ttl })
	put := effect{key: key, value: value}
	p, err := l.client.Put(l.ctx, key, value, clientv3.WithLease(clientv3.LeaseID(id)))
	if err != nil {
		return l.ended(err, put)
	}
	l.w.ledger.tell(p.Header.Revision, put)
	own[key] = id
	return true
}

// revoke takes a lease that one of the keys is attached to.
func (l *life) revoke(own map[string]int64) bool {
	var id int64
	for _, lease := range own {
		id = max(id, lease)
	}
	if id == 0 {
		return true
	}
	var gone []effect
	for k, lease := range own {
		if lease == id {
			gone = append(gone, effect{key: k, deleted: true})
		}
	}
	l.w.ledger.noteLease(id, func(g *grant) { g.doubt = true })
	r, err := l.client.Revoke(l.ctx, clientv3.LeaseID(id))
	if err != nil {
		return l.ended(err, gone...)
	}
	l.w.ledger.tell(r.Header.Revision, gone...)
	l.w.ledger.noteLease(id, func(g *grant) { g.revoked = true })
	for _, e := range gone {
		delete(own, e.key)
	}
	return true
}

// fight is a client that uses keys which others use at the same time.
func (l *life) fight(id int) {
	w, g := l.w, l.w.ledger
	rnd := rand.New(rand.NewPCG(w.seed, uint64(100+id)<<32|uint64(w.next())))
	last := map[string]string{}
	for !l.ending() {
		in := registerInput{op: "ggppcd"[rnd.IntN(6)], key: fmt.Sprintf("p/%d", rnd.IntN(3))}
		if in.op == 'p' || in.op == 'c' {
			in.value = fmt.Sprintf("v%d", w.next())
		}
		in.expected = last[in.key]
		var (
			out      registerOutput
			effects  []effect
			revision int64
			err      error
		)
		possible := []effect{{key: in.key, value: in.value, deleted: in.op == 'd'}}
		call := w.journal.now()
		switch in.op {
		case 'g':
			possible = nil
			var r *clientv3.GetResponse
			if r, err = l.client.Get(l.ctx, in.key); err == nil {
				revision = r.Header.Revision
				if len(r.Kvs) > 0 {
					out.value = string(r.Kvs[0].Value)
				}
				last[in.key] = out.value
			}
		case 'p':
			var r *clientv3.PutResponse
			if r, err = l.client.Put(l.ctx, in.key, in.value); err == nil {
				revision, effects = r.Header.Revision, possible
				last[in.key] = in.value
			}
		case 'd':
			var r *clientv3.DeleteResponse
			if r, err = l.client.Delete(l.ctx, in.key); err == nil {
				revision, out.done = r.Header.Revision, r.Deleted == 1
				last[in.key] = ""
			}
		case 'c':
			is := clientv3.Compare(clientv3.Value(in.key), "=", in.expected)
			if in.expected == "" {
				is = clientv3.Compare(clientv3.CreateRevision(in.key), "=", 0)
			}
			var r *clientv3.TxnResponse
			if r, err = l.client.Txn(l.ctx).If(is).Then(clientv3.OpPut(in.key, in.value)).Commit(); err == nil {
				revision, out.done = r.Header.Revision, r.Succeeded
				if r.Succeeded {
					last[in.key] = in.value
				}
			}
		}
		if out.done {
			effects = possible
		}
		if err != nil {
			goOn := l.ended(err, possible...)
			if !goOn || in.op == 'g' {
				w.journal.note(id, call, in, registerOutput{unknown: true})
			}
			if !goOn {
				return
			}
			continue
		}
		if !g.tell(revision, effects...) {
			out = registerOutput{unknown: true}
		}
		w.journal.note(id, call, in, out)
		l.noted()
	}
}

// compact compacts what the watcher has seen, now and then.
func (l *life) compact() {
	w, g := l.w, l.w.ledger
	rnd := rand.New(rand.NewPCG(w.seed, uint64(200)<<32|uint64(w.next())))
	at := g.seen() + 30 + rnd.Int64N(200)
	for !l.ending() {
		seen := g.seen()
		if seen < at {
			select {
			case <-l.stopped:
			case <-l.ctx.Done():
			case <-g.wake:
			}
			continue
		}
		at = seen + 30 + rnd.Int64N(200)
		to := seen - rnd.Int64N(40)
		g.mu.Lock()
		done := g.compacted
		g.mu.Unlock()
		if to <= max(done, 1) {
			continue
		}
		var o []clientv3.CompactOption
		if rnd.IntN(3) == 0 {
			o = append(o, clientv3.WithCompactPhysical())
		}
		if _, err := l.client.Compact(l.ctx, to, o...); err == nil {
			g.noteCompaction(to)
		} else if !errors.Is(err, rpctypes.ErrCompacted) && !l.ended(err) {
			return
		}
	}
}
