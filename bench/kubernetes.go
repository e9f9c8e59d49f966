package bench

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/bench/wire"
)

// What a Kubernetes cluster asks of its store, for each node and in operations a second, as kubelets, controllers and the API server
// do by default: a node renews its lease each 10 s and reports its status each 5 min; of 30 pods on a node each lives for an
// hour on average, is written six times in its life (created, bound, started, ready, marked for deletion, deleted), makes five
// events, and two changes of endpoint slices. Reads mostly come from the API server's cache: what comes here are single
// gets and relists in pages of 500.
const (
	podsPerNode  = 30
	podLife      = 3600.0 // seconds
	stepsOfPod   = 6
	relistEvery  = 60.0 // seconds, of all pods, by somebody
	kubePage     = 500
	electionRate = 5.0 // leader elections of controllers: a number of leases each few seconds, whatever the size
)

// The kinds of operations; the first in the list of names stands for all calls together.
const (
	kubeLease = iota
	kubeStatus
	kubePod
	kubeEvent
	kubeSlice
	kubeGet
	kubeList
	kubeWatch
)

var kubeKinds = []string{"call", "lease update", "node status", "pod write", "event create", "slice update", "get", "list page", "watch event"}

// kubeSizes are bytes of values.
var kubeSizes = [...]int{kubeLease: 400, kubeStatus: 8 << 10, kubePod: 3 << 10, kubeEvent: 900, kubeSlice: 1500}

// kubeRates are operations a second for a number of nodes.
func kubeRates(nodes int) [kubeWatch]float64 {
	n := float64(nodes)
	pods := n * podsPerNode / podLife // that end, and begin, each second
	return [kubeWatch]float64{
		kubeLease:  n/10 + electionRate,
		kubeStatus: n / 300,
		kubePod:    pods * stepsOfPod,
		kubeEvent:  pods * 5,
		kubeSlice:  pods * 2,
		kubeGet:    n / 50,
		kubeList:   math.Ceil(n*podsPerNode/kubePage) / relistEvery, // pages
	}
}

// kube is a Kubernetes cluster's load in realistic shares.
type kube struct {
	r      *runner
	shares [kubeWatch]float64 // of what is begun; cumulative, the last is 1
	nodes  int
	slots  int
	lease  int64 // of events, which expire
	dirs   [kubeGet][]byte
	values [kubeGet][]byte
	events atomic.Int64
	pools  [kubeGet]*pool // nil for events
	all    []kubeSlot     // by slot
	conns  []*kubeWatcher
}

// object is a key and when it was last changed; 0: it is not there. In a cluster an object mostly has one writer at a time, so here.
type object struct {
	id      int
	changed int64
	step    int // of a pod: what comes next in its life
}

// pool has the objects of one kind that nobody writes now, the longest idle first.
type pool struct {
	mu   sync.Mutex
	idle []*object // a ring
	at   int       // of the first
	n    int
}

func newPool(n int) *pool {
	p := &pool{idle: make([]*object, n), n: n}
	for i := range p.idle {
		p.idle[i] = &object{id: i}
	}
	return p
}

// take returns nil if all are in use.
func (p *pool) take() *object {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.n == 0 {
		return nil
	}
	o := p.idle[p.at]
	p.at, p.n = (p.at+1)%len(p.idle), p.n-1
	return o
}

func (p *pool) give(o *object) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle[(p.at+p.n)%len(p.idle)] = o
	p.n++
}

// kubeSlot is what one slot is at.
type kubeSlot struct {
	running  *object // nil: its operation is on none
	pool     *pool   // where that came from
	deletes  bool
	list     api.Pages
	listing  bool
	from     []byte // of the list's next page
	revision int64  // of the list
}

var kubeDirs = [kubeGet]string{
	kubeLease: "leases/kube-node-lease/", kubeStatus: "minions/", kubePod: "pods/default/", kubeEvent: "events/default/", kubeSlice: "endpointslices/default/",
}

func newKube(r *runner, slots int) *kube {
	k := &kube{r: r, nodes: r.o.nodes, slots: slots, all: make([]kubeSlot, slots)}
	// What is chosen is a whole list, whose pages follow one another.
	begun := kubeRates(k.nodes)
	begun[kubeList] = 1 / relistEvery
	var sum, upTo float64
	for _, v := range begun {
		sum += v
	}
	for i, v := range begun {
		upTo += v / sum
		k.shares[i] = upTo
	}
	for kind := range kubeDirs {
		k.dirs[kind] = []byte(r.o.prefix + kubeDirs[kind])
		k.values[kind] = api.Value(kubeSizes[kind])
	}
	pods := k.nodes * podsPerNode
	k.pools[kubeLease], k.pools[kubeStatus] = newPool(k.nodes), newPool(k.nodes)
	k.pools[kubePod], k.pools[kubeSlice] = newPool(pods), newPool(max(1, pods/10))
	return k
}

func (k *kube) kinds() []string { return kubeKinds }

// sums says that the first kind stands for all.
func (k *kube) sums() {}

func (k *kube) key(b []byte, kind, id int) []byte {
	return fmt.Appendf(append(b, k.dirs[kind]...), "%08d", id)
}

// kubeCreate makes the cluster's objects.
type kubeCreate struct {
	plain
	k  *kube
	at atomic.Int64
}

func (c *kubeCreate) kinds() []string                 { return []string{"create"} }
func (c *kubeCreate) message(s *slot, m []byte) error { return c.k.message(s, m) }
func (c *kubeCreate) over(s *slot)                    { c.k.over(s) }

func (c *kubeCreate) next(s *slot) (op, bool) {
	i := int(c.at.Add(1) - 1)
	for kind, p := range c.k.pools {
		if p == nil {
			continue
		}
		if i < len(p.idle) {
			o := c.k.update(s, kind, p.take())
			o.kind = 0
			return o, true
		}
		i -= len(p.idle)
	}
	return op{}, false
}

// open creates the objects, a lease for events, and as many watches as two API servers have on these kinds.
func (k *kube) open(ctx context.Context) error {
	k.r.progress.say("creating %d nodes and %d pods below %q", k.nodes, k.nodes*podsPerNode, k.r.o.prefix)
	_, all, _, err := k.r.run(ctx, &kubeCreate{k: k}, extent{streams: k.slots / len(k.r.lanes)}, nil)
	if err != nil {
		return err
	}
	for code, e := range all.kinds[0].failures {
		return fmt.Errorf("%w: %d calls, with %s: %s", errFill, e.count, codeName(code), e.first)
	}
	leases, err := k.r.grant(ctx, 1)
	if err != nil {
		return err
	}
	k.lease = leases[0]
	return k.watch(ctx)
}

const apiServers = 2

func (k *kube) watch(ctx context.Context) error {
	for i := range apiServers {
		c, err := k.r.dial(ctx, k.r.endpoints[i%len(k.r.endpoints)], nil)
		if err != nil {
			return err
		}
		w := &kubeWatcher{k: k, conn: c, stats: newStats(len(kubeKinds))}
		w.call.Handler = w
		k.conns = append(k.conns, w)
		for kind, dir := range k.dirs {
			request := api.AppendWatch(nil, dir, api.PrefixEnd(dir), 0, 0)
			var err *wire.Error
			if kind == 0 {
				err = c.Start(&w.call, api.Watch, request, false)
			} else {
				err = c.Send(&w.call, request)
			}
			if err != nil {
				return explain(err)
			}
		}
	}
	return nil
}

func (k *kube) close() {
	for _, w := range k.conns {
		w.closing.Store(true)
		w.conn.Close()
	}
}

func (k *kube) counters() []*stats {
	var all []*stats
	for _, w := range k.conns {
		all = append(all, w.stats)
	}
	return all
}

func (k *kube) next(s *slot) (op, bool) {
	own := &k.all[s.id]
	if own.listing {
		return k.page(s, own), true
	}
	chance := s.rng.Float64()
	kind := 0
	for kind < kubeList && chance >= k.shares[kind] {
		kind++
	}
	var room [maxKeySize]byte
	switch kind {
	case kubeEvent:
		key := k.key(room[:0], kubeEvent, int(k.events.Add(1)))
		s.buf = api.AppendUpdate(s.buf[:0], key, k.values[kubeEvent], k.lease, 0)
		return op{kind: 1 + kubeEvent, method: api.Txn, request: s.buf}, true
	case kubeList:
		own.listing, own.revision = true, 0
		own.from = append(own.from[:0], k.dirs[kubePod]...)
		return k.page(s, own), true
	case kubeGet:
	default:
		if o := k.pools[kind].take(); o != nil {
			if kind == kubePod {
				return k.churn(s, o), true
			}
			return k.update(s, kind, o), true
		}
		// All of that kind are being written: more calls are open than the cluster has objects.
	}
	key := k.key(room[:0], kubePod, s.rng.IntN(k.nodes*podsPerNode))
	s.buf = api.AppendRange(s.buf[:0], key, api.RangeOptions{})
	return op{kind: 1 + kubeGet, method: api.Range, request: s.buf}, true
}

func (k *kube) update(s *slot, kind int, o *object) op {
	var room [maxKeySize]byte
	key := k.key(room[:0], kind, o.id)
	own := &k.all[s.id]
	own.running, own.pool, own.deletes = o, k.pools[kind], false
	s.buf = api.AppendUpdate(s.buf[:0], key, k.values[kind], 0, o.changed)
	return op{kind: 1 + kind, method: api.Txn, request: s.buf}
}

// churn is the next step of a pod's life: marked for deletion, deleted, made again, bound, started and ready. Then it goes back
// to the others, and waits until it is its turn.
func (k *kube) churn(s *slot, pod *object) op {
	const deletion = 1
	step := pod.step
	pod.step = (step + 1) % stepsOfPod
	o := k.update(s, kubePod, pod)
	if step == deletion && pod.changed != 0 {
		var room [maxKeySize]byte
		k.all[s.id].deletes = true
		s.buf = api.AppendDelete(s.buf[:0], k.key(room[:0], kubePod, pod.id), pod.changed)
		o.request = s.buf
	}
	return o
}

// over gives the operation's object back.
func (k *kube) over(s *slot) {
	if own := &k.all[s.id]; own.running != nil {
		own.pool.give(own.running)
		own.running = nil
	}
}

// page asks for the next page of the list that the slot is at, all of them at the first one's revision.
func (k *kube) page(s *slot, own *kubeSlot) op {
	own.list.Reset()
	own.listing = false // until the answer says that there is more
	s.buf = api.AppendRange(s.buf[:0], own.from, api.RangeOptions{End: api.PrefixEnd(k.dirs[kubePod]), Limit: kubePage, Revision: own.revision})
	return op{kind: 1 + kubeList, method: api.Range, request: s.buf, pieces: true}
}

func (k *kube) piece(s *slot, p []byte, _ bool) error {
	k.all[s.id].list.Add(p)
	return nil
}

func (k *kube) end(s *slot) error {
	own := &k.all[s.id]
	if !s.op.pieces {
		return nil
	}
	p := &own.list
	if err := p.Err(); err != nil || !p.More {
		return err
	}
	last := p.Last()
	if last == nil {
		return fmt.Errorf("a list says that there is more, and has %d keys", p.Keys)
	}
	own.listing = true
	own.from = append(append(own.from[:0], last...), 0)
	if own.revision == 0 {
		own.revision = p.Revision()
	}
	return nil
}

func (k *kube) message(s *slot, m []byte) error {
	if s.op.method == api.Range {
		_, err := api.KvsOf(m)
		return err
	}
	t, err := api.TxnOf(m)
	if err != nil {
		return err
	}
	o := k.all[s.id].running
	switch {
	case !t.Succeeded:
		if o != nil {
			o.changed = t.Changed
		}
		return conflict(t.Changed)
	case o == nil:
	case k.all[s.id].deletes:
		o.changed = 0
	default:
		o.changed = t.Revision
	}
	return nil
}

// kubeWatcher is one API server's connection with its watches.
type kubeWatcher struct {
	k       *kube
	conn    *wire.Conn
	call    wire.Call
	stats   *stats
	closing atomic.Bool
}

func (w *kubeWatcher) Piece(*wire.Call, []byte, bool) {}

func (w *kubeWatcher) End(_ *wire.Call, err *wire.Error) {
	if !w.closing.Load() {
		w.k.r.fail(fmt.Errorf("a watch stream ended: %v", err))
	}
}

// Message counts events. There is no telling when each was due, so their latency is not measured.
func (w *kubeWatcher) Message(_ *wire.Call, m []byte) {
	e, err := api.EventsOf(m, nil)
	switch {
	case err != nil:
		w.k.r.fail(fmt.Errorf("a watch answer cannot be read: %w", err))
	case e.Canceled:
		w.k.r.fail(fmt.Errorf("the server cancelled a watch: %s", e.Reason))
	}
	w.stats.mu.Lock()
	w.stats.kinds[1+kubeWatch].events += int64(e.Count)
	w.stats.mu.Unlock()
}
