// Package history asks a cluster for reads and writes, through all of its members and through whatever happens to it, and
// judges afterwards what clients were told.
//
// Load is the main type. Its clients are writers with keys of their own, fighters over a few keys, a watcher pinned to each
// member, and one that compacts. What its report vouches for:
//
//	H1: every acknowledged write is there, at the revision it was acknowledged at, and nothing that nobody asked for.
//	H2: the history of the keys that are fought over is linearizable.
//	H3: each watcher got every event once, in order, and no progress notice too early; all got the same.
//	H4: the hash of every member is that of the events.
//	H5: no request failed but while the cluster was disturbed, by the test or by a machine that stood still for half an election timeout,
//	    and then only as requests may.
package history

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
	"github.com/engram-kv/engram/test/internal/stall"
)

const (
	leaseTTL = 3600 // seconds: none expires meanwhile

	// A client stays with a member until a request fails, and for no more than so many.
	stayWith = 200

	// A machine that gives nothing for so long may cost a leader its place: members elect another after a second without a word.
	longStall = 500 * time.Millisecond
)

// Options say how much is asked.
type Options struct {
	Seed              uint64
	Writers, Fighters int           // 0: 3 and 3
	Every             time.Duration // each client begins no request sooner after the last; 0: 5ms
	Padding           int           // bytes that a value may be longer; 0: 300
	Compact           bool
	Within            time.Duration // each request; 0: 8s, which is just longer than a member gives itself
	// Grace is how long after a disturbance requests may still fail; 0: 4s.
	Grace    time.Duration
	Refusals bool // writes may be refused for want of space while the cluster is disturbed
}

// Report is what a load came to.
type Report struct {
	Answers, Failures    int
	Judged, Kept, Lost   int // operations porcupine judged; writes without an answer that took place, and that did not
	Events, Notices      int // of each watcher, and of all
	Resumed              int // watches begun again
	LongestGap           time.Duration
	Disturbed            time.Duration // altogether, by the test
	LongestStall         time.Duration // of the machine
	FailuresByText       map[string]int
	Revision, Compaction int64
}

// Load is the clients of one cluster.
type Load struct {
	o        Options
	c        *cluster.Cluster
	ledger   *ledger
	journal  *journal
	stalls   *stall.Watch
	watchers []*watcher
	pins     []*clientv3.Client // of the watchers

	ctx     context.Context // of requests
	cancel  context.CancelFunc
	work    sync.WaitGroup // clients that stop at stopped
	watches sync.WaitGroup
	stopped chan struct{}

	began     time.Time
	endStalls func()

	mu        sync.Mutex
	seq       int // of values, so that each is another
	lease     int64
	failure   error
	failures  []failed
	windows   []window // disturbances
	acked     time.Time
	gap       time.Duration
	compacted int64
	silent    time.Time // since when no write may be acknowledged that was sent later
}

type failed struct {
	call, end time.Time
	err       error
	member    string
}

type window struct{ begin, end time.Time } // end is zero while it lasts

// Start lets the clients loose on a fresh cluster.
func Start(c *cluster.Cluster, o Options) (*Load, error) {
	for _, d := range []struct {
		field *int
		value int
	}{{&o.Writers, 3}, {&o.Fighters, 3}, {&o.Padding, 300}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if o.Every == 0 {
		o.Every = 5 * time.Millisecond
	}
	if o.Within == 0 {
		o.Within = 8 * time.Second
	}
	if o.Grace == 0 {
		o.Grace = 4 * time.Second
	}
	l := &Load{o: o, c: c, ledger: newLedger(), journal: newJournal(), stopped: make(chan struct{}), acked: time.Now(), lease: 1 << 32}
	var err error
	if l.stalls, err = stall.Begin(); err != nil {
		return nil, err
	}
	l.began, l.endStalls = time.Now(), sync.OnceFunc(func() { _ = l.stalls.Close() }) // one that could not write has excused nobody
	l.ctx, l.cancel = context.WithCancel(context.Background())
	for i, m := range c.Serving() {
		client, err := c.Dial(m.ClientURL)
		if err != nil {
			l.close()
			return nil, err
		}
		w := newWatcher(fmt.Sprint(i))
		l.watchers, l.pins = append(l.watchers, w), append(l.pins, client)
		l.watches.Go(func() { w.follow(l.ctx, client) })
	}
	for i := range o.Writers {
		l.work.Go(func() { l.write(i) })
	}
	for i := range o.Fighters {
		l.work.Go(func() { l.fight(i) })
	}
	if o.Compact {
		l.work.Go(l.compact)
	}
	return l, nil
}

// Refresh pins the watchers to the members that serve now.
func (l *Load) Refresh() {
	members := l.c.Serving()
	for i, client := range l.pins {
		if len(members) > 0 {
			client.SetEndpoints(members[i%len(members)].ClientURL)
		}
	}
}

// Disturb runs f, during which requests may fail.
func (l *Load) Disturb(f func() error) error {
	l.mu.Lock()
	at := len(l.windows)
	l.windows = append(l.windows, window{begin: time.Now()})
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		l.windows[at].end = time.Now()
		l.mu.Unlock()
	}()
	return f()
}

// Answers waits until so many more requests were answered.
func (l *Load) Answers(ctx context.Context, more int) error {
	for goal := l.ledger.answers() + more; l.ledger.answers() < goal; {
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d answers are missing: %w", goal-l.ledger.answers(), errors.Join(ctx.Err(), l.failed()))
		case <-time.After(l.o.Every):
		}
		if err := l.failed(); err != nil {
			return err
		}
	}
	return nil
}

// Silence waits and is an error if a write is acknowledged that was sent meanwhile: there is no majority. What was under way
// before may still be.
func (l *Load) Silence(ctx context.Context, d time.Duration) error {
	l.mu.Lock()
	l.silent = time.Now()
	l.mu.Unlock()
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.silent = time.Time{}
	return errors.Join(ctx.Err(), l.failure)
}

// close ends all clients at once.
func (l *Load) close() {
	l.stop()
	l.cancel()
	l.work.Wait()
	l.watches.Wait()
	for _, client := range l.pins {
		client.Close()
	}
	l.endStalls()
}

// Abandon ends the load without a judgement.
func (l *Load) Abandon() { l.close() }

func (l *Load) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.stopped:
	default:
		close(l.stopped)
	}
}

// Judge ends the clients and judges all that was seen. Every member must run, and nobody else may write.
func (l *Load) Judge(ctx context.Context) (Report, error) {
	defer l.close()
	l.stop()
	l.work.Wait()
	l.Refresh()
	if err := l.failed(); err != nil {
		return Report{}, err
	}
	if _, err := l.c.Settle(ctx); err != nil {
		return Report{}, err
	}
	client, err := l.c.Serving()[0].Client()
	if err != nil {
		return Report{}, err
	}
	all, err := client.Get(ctx, "", clientv3.WithPrefix())
	if err != nil {
		return Report{}, fmt.Errorf("reading all keys: %w", err)
	}
	r := Report{Revision: all.Header.Revision, FailuresByText: make(map[string]int)}
	var events []*mvccpb.Event
	for _, w := range l.watchers {
		if err := w.reach(ctx, r.Revision); err != nil {
			return r, err
		}
		got := w.all()
		for len(got) > 0 && got[len(got)-1].Kv.ModRevision > r.Revision { // of a request that was under way for long
			got = got[:len(got)-1]
		}
		if events == nil {
			events = got
		}
		if !slices.EqualFunc(events, got, func(a, b *mvccpb.Event) bool { return proto.Equal(a, b) }) {
			return r, broken.Errorf("watchers %s and %s saw different events", l.watchers[0].name, w.name)
		}
		w.mu.Lock()
		r.Notices, r.Resumed = r.Notices+w.notices, r.Resumed+w.resumed-1
		w.mu.Unlock()
	}
	r.Events = len(events)
	if r.Kept, r.Lost, err = l.ledger.reconcile(events); err != nil {
		return r, err
	}
	if err := sameKeys(all.Kvs, events); err != nil {
		return r, err
	}
	put := make(map[string]bool)
	for _, e := range events {
		put[string(e.Kv.Key)+"="+string(e.Kv.Value)] = true
	}
	if r.Judged, err = l.journal.check(func(key, value string) bool { return put[key+"="+value] }); err != nil {
		return r, err
	}
	hash, err := l.c.CheckHashAt(ctx, r.Revision)
	if err != nil {
		return r, err
	}
	if want := hashKV(events, hash.CompactedRev); hash.Hash != want {
		return r, broken.Errorf("the hash at revision %d compacted at %d is %d, of the events it is %d", r.Revision, hash.CompactedRev, hash.Hash, want)
	}
	r.Compaction = hash.CompactedRev
	return r, l.judgeFailures(&r)
}

func (l *Load) judgeFailures(r *Report) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.Answers, r.Failures, r.LongestGap = l.ledger.answers(), len(l.failures), l.gap
	for _, w := range l.windows {
		r.Disturbed += w.end.Sub(w.begin)
	}
	windows := slices.Clone(l.windows)
	for _, s := range l.stalls.Since(l.began) {
		r.LongestStall = max(r.LongestStall, s.Length())
		if s.Length() >= longStall {
			windows = append(windows, window{s.Begin, s.End})
		}
	}
	for _, f := range l.failures {
		r.FailuresByText[f.err.Error()]++
		if !slices.ContainsFunc(windows, func(w window) bool {
			return f.end.After(w.begin) && f.call.Before(w.end.Add(l.o.Grace))
		}) {
			return fmt.Errorf("a request through %s failed after %v while nothing disturbed the cluster: %w", f.member, f.end.Sub(f.call), f.err)
		}
	}
	return nil
}

// sameKeys compares a read of all keys with what the events left.
func sameKeys(kvs []*mvccpb.KeyValue, events []*mvccpb.Event) error {
	live := make(map[string]*mvccpb.KeyValue)
	for _, e := range events {
		if e.Type == mvccpb.DELETE {
			delete(live, string(e.Kv.Key))
		} else {
			live[string(e.Kv.Key)] = e.Kv
		}
	}
	for _, kv := range kvs {
		if want := live[string(kv.Key)]; !proto.Equal(kv, want) {
			return broken.Errorf("read: %v, by its events %v", kv, want)
		}
		delete(live, string(kv.Key))
	}
	for _, kv := range live {
		return broken.Errorf("read: %q is not there, by its events %v", kv.Key, kv)
	}
	return nil
}

func (l *Load) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failure == nil && err != nil {
		l.failure = err
	}
}

// failed is what a client saw that must never be.
func (l *Load) failed() error {
	l.mu.Lock()
	err := l.failure
	l.mu.Unlock()
	for _, w := range l.watchers {
		err = errors.Join(err, w.failed())
	}
	return err
}

// value is one that no other request puts.
func (l *Load) value(rnd *rand.Rand) string {
	l.mu.Lock()
	l.seq++
	n := l.seq
	l.mu.Unlock()
	return fmt.Sprintf("%d %s", n, strings.Repeat("x", rnd.IntN(l.o.Padding)))
}

// turns are those of one client.
type turns struct {
	rnd  *rand.Rand
	tick *time.Ticker
	at   string // the member it stays with
	left int    // turns until it goes to another
}

func (l *Load) turns(client int) *turns {
	return &turns{rnd: rand.New(rand.NewPCG(l.o.Seed, uint64(client))), tick: time.NewTicker(l.o.Every)}
}

// next waits for a client's next turn and chooses the member to ask; nil at the end.
func (l *Load) next(t *turns) *clientv3.Client {
	for {
		select {
		case <-l.stopped:
			return nil
		case <-t.tick.C:
		}
		if l.failed() != nil {
			return nil
		}
		members := l.c.Serving()
		if len(members) == 0 {
			continue
		}
		i := slices.IndexFunc(members, func(m *cluster.Member) bool { return m.Name == t.at })
		if i < 0 || t.left == 0 {
			i, t.left = t.rnd.IntN(len(members)), stayWith
		}
		t.at, t.left = members[i].Name, t.left-1
		if client, err := members[i].Client(); err == nil {
			return client
		}
	}
}

// ended notes a request that failed: what it was to change is in doubt, and the client goes to another member.
func (l *Load) ended(t *turns, call time.Time, err error, effects ...effect) {
	member := t.at
	t.left = 0
	l.ledger.doubt(effects...)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures = append(l.failures, failed{call, time.Now(), err, member})
	switch code := codeOf(err); {
	case code == codes.Unavailable, code == codes.DeadlineExceeded, errors.Is(err, context.DeadlineExceeded), code == codes.Canceled:
	case l.o.Refusals && code == codes.ResourceExhausted:
	case errors.Is(err, rpctypes.ErrTooManyRequests):
	case strings.HasSuffix(err.Error(), "raft proposal dropped"): // without a leader; etcd gives it the code Unknown
	default:
		if l.failure == nil {
			l.failure = broken.Errorf("a request through %s failed as none may: %w", member, err)
		}
	}
}

// codeOf is the code of an error, which the client library may have made one of its own.
func codeOf(err error) codes.Code {
	if own := (rpctypes.EtcdError{}); errors.As(err, &own) {
		return own.Code()
	}
	return status.Code(err)
}

// tell notes an acknowledged request.
func (l *Load) tell(call time.Time, revision int64, effects ...effect) {
	l.fail(l.ledger.tell(revision, effects...))
	if len(effects) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.silent.IsZero() && call.After(l.silent) && l.failure == nil {
		l.failure = broken.Errorf("revision %d, %v, was acknowledged without a majority", revision, effects)
	}
	now := time.Now()
	l.gap = max(l.gap, now.Sub(l.acked))
	l.acked = now
}

// write is one writer with keys of its own.
func (l *Load) write(id int) {
	turns := l.turns(id)
	defer turns.tick.Stop()
	rnd := turns.rnd
	prefix := fmt.Sprintf("w%d/", id)
	leased := map[string]int64{} // keys and their leases
	for {
		client := l.next(turns)
		if client == nil {
			return
		}
		ctx, cancel := context.WithTimeout(l.ctx, l.o.Within)
		call := time.Now()
		key := fmt.Sprintf("%s%d", prefix, rnd.IntN(8))
		switch n := rnd.IntN(100); {
		case n < 60:
			put := effect{key: key, value: l.value(rnd)}
			if r, err := client.Put(ctx, key, put.value); err != nil {
				l.ended(turns, call, err, put)
			} else {
				l.tell(call, r.Header.Revision, put)
			}
		case n < 70:
			gone := effect{key: key, deleted: true}
			if r, err := client.Delete(ctx, key); err != nil {
				l.ended(turns, call, err, gone)
			} else if r.Deleted == 0 {
				l.tell(call, r.Header.Revision)
			} else {
				l.tell(call, r.Header.Revision, gone)
			}
		case n < 90:
			v := l.value(rnd)
			both := []effect{{key: prefix + "a", value: v}, {key: prefix + "b", value: v}}
			if r, err := client.Txn(ctx).Then(clientv3.OpPut(prefix+"a", v), clientv3.OpPut(prefix+"b", v)).Commit(); err != nil {
				l.ended(turns, call, err, both...)
			} else {
				l.tell(call, r.Header.Revision, both...)
			}
		case n < 97:
			l.attach(ctx, client, turns, prefix, l.value(rnd), leased)
		default:
			l.revoke(ctx, client, turns, leased)
		}
		cancel()
	}
}

// attach grants a lease and puts a key of its own with it.
func (l *Load) attach(ctx context.Context, client *clientv3.Client, turns *turns, prefix, value string, leased map[string]int64) {
	call := time.Now()
	granted, err := client.Grant(ctx, leaseTTL)
	if err != nil {
		l.ended(turns, call, err)
		return
	}
	put := effect{key: fmt.Sprintf("%sl%x", prefix, granted.ID), value: value}
	r, err := client.Put(ctx, put.key, value, clientv3.WithLease(granted.ID))
	if err != nil {
		l.ended(turns, call, err, put)
		return
	}
	l.tell(call, r.Header.Revision, put)
	leased[put.key] = int64(granted.ID)
}

// revoke takes any of the leases that have a key.
func (l *Load) revoke(ctx context.Context, client *clientv3.Client, turns *turns, leased map[string]int64) {
	for key, id := range leased {
		delete(leased, key)
		gone := effect{key: key, deleted: true}
		call := time.Now()
		r, err := client.Revoke(ctx, clientv3.LeaseID(id))
		switch {
		case errors.Is(err, rpctypes.ErrLeaseNotFound): // the client library asked again after an answer was lost
			l.ledger.doubt(gone)
		case err != nil:
			l.ended(turns, call, err, gone)
		default:
			l.tell(call, r.Header.Revision, gone)
		}
		return
	}
}

// fight is a client of keys that others use at the same time.
func (l *Load) fight(id int) {
	turns := l.turns(1000 + id)
	defer turns.tick.Stop()
	rnd := turns.rnd
	last := map[string]string{}
	for {
		client := l.next(turns)
		if client == nil {
			return
		}
		in := register{op: "gggppcd"[rnd.IntN(7)], key: fmt.Sprintf("p/%d", rnd.IntN(3))}
		if in.op == 'p' || in.op == 'c' {
			in.value = l.value(rnd)
		}
		in.expected = last[in.key]
		ctx, cancel := context.WithTimeout(l.ctx, l.o.Within)
		call, began := l.journal.now(), time.Now()
		revision, out, err := ask(ctx, client, in)
		cancel()
		possible := []effect{{key: in.key, value: in.value, deleted: in.op == 'd'}}
		switch {
		case err != nil && in.op == 'g':
			l.ended(turns, began, err)
		case err != nil:
			out = answer{unknown: true}
			l.ended(turns, began, err, possible...)
			delete(last, in.key)
		case in.op == 'g':
			last[in.key] = out.value
			l.tell(began, revision)
		case in.op == 'p' || out.done:
			last[in.key] = in.value
			l.tell(began, revision, possible...)
		default:
			l.tell(began, revision)
		}
		if err == nil || in.op != 'g' {
			l.journal.note(id, call, in, out)
		}
	}
}

func ask(ctx context.Context, client *clientv3.Client, in register) (revision int64, out answer, err error) {
	switch in.op {
	case 'g':
		r, err := client.Get(ctx, in.key)
		if err != nil {
			return 0, out, err
		}
		if len(r.Kvs) > 0 {
			out.value = string(r.Kvs[0].Value)
		}
		return r.Header.Revision, out, nil
	case 'p':
		r, err := client.Put(ctx, in.key, in.value)
		if err != nil {
			return 0, out, err
		}
		return r.Header.Revision, out, nil
	case 'd':
		r, err := client.Delete(ctx, in.key)
		if err != nil {
			return 0, out, err
		}
		return r.Header.Revision, answer{done: r.Deleted == 1}, nil
	}
	is := clientv3.Compare(clientv3.Value(in.key), "=", in.expected)
	if in.expected == "" {
		is = clientv3.Compare(clientv3.CreateRevision(in.key), "=", 0)
	}
	r, err := client.Txn(ctx).If(is).Then(clientv3.OpPut(in.key, in.value)).Commit()
	if err != nil {
		return 0, out, err
	}
	return r.Header.Revision, answer{done: r.Succeeded}, nil
}

// compact compacts what every watcher has seen, now and then.
func (l *Load) compact() {
	turns := l.turns(2000)
	defer turns.tick.Stop()
	turns.tick.Reset(20 * l.o.Every)
	rnd := turns.rnd
	for {
		client := l.next(turns)
		if client == nil {
			return
		}
		to := l.watchers[0].seen()
		for _, w := range l.watchers {
			to = min(to, w.seen())
		}
		if to -= rnd.Int64N(40); to < l.compacted+50 {
			continue
		}
		var o []clientv3.CompactOption
		if rnd.IntN(3) == 0 {
			o = append(o, clientv3.WithCompactPhysical())
		}
		ctx, cancel := context.WithTimeout(l.ctx, l.o.Within)
		call := time.Now()
		_, err := client.Compact(ctx, to, o...)
		cancel()
		if err == nil || errors.Is(err, rpctypes.ErrCompacted) {
			l.compacted = to
		} else {
			l.ended(turns, call, err)
		}
	}
}
