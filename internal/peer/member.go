package peer

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/raft/v3/raftpb"
)

// kind is one of the two streams of each direction.
type kind int

const (
	msgAppKind  kind = iota // entries, in a compact form
	messageKind             // everything else
	kinds
)

func (k kind) String() string { return [...]string{"msgapp", "message"}[k] }

// peer is one other member, or a remote: the way to a sender that is none yet.
type peer struct {
	t           *Transport
	id          uint64
	name, local string // both IDs as labels
	remote      bool
	urls        urlPicker
	native      atomic.Bool // it said that it is an Engram
	form        atomic.Bool // and that it reads this member's own form of snapshots
	activity    activity
	pipeline    pipeline

	ctx    context.Context // ends when the peer is dropped
	cancel context.CancelFunc

	sentBytes, sentFailures, receivedBytes, receivedFailures prometheus.Counter

	mu       sync.Mutex // covers all below
	stopped  bool
	attached [kinds]*outgoing // what it reads from us
	dialed   [kinds]dialed    // what we read from it
}

// dialed is a stream that is being read.
type dialed struct {
	url    string
	cancel context.CancelFunc
}

func newPeer(t *Transport, id uint64, urls []string, remote bool) *peer {
	m := t.opts.Metrics
	p := &peer{t: t, id: id, name: hexID(id), local: hexID(t.opts.MemberID), remote: remote}
	p.sentBytes, p.sentFailures = m.SentBytes.WithLabelValues(p.name), m.SentFailures.WithLabelValues(p.name)
	p.receivedBytes, p.receivedFailures = m.ReceivedBytes.WithLabelValues(p.name), m.ReceivedFailures.WithLabelValues(p.name)
	p.urls.set(urls)
	p.activity.p = p
	p.pipeline = pipeline{p: p, urgent: lane{limit: pipelineUrgent}, bulk: lane{limit: pipelineBulk}}
	p.ctx, p.cancel = context.WithCancel(t.ctx)
	return p
}

// start begins to dial.
func (p *peer) start() {
	for k := range kinds {
		p.t.run(func() { p.readStream(k) })
	}
	p.t.run(p.probe)
}

// stop ends all that goes on with the peer, without waiting for it.
func (p *peer) stop() {
	p.cancel()
	p.pipeline.close()
	p.mu.Lock()
	p.stopped = true
	attached := p.attached
	p.attached = [kinds]*outgoing{}
	p.mu.Unlock()
	for _, o := range attached {
		if o != nil {
			o.end()
		}
	}
	p.activity.set(false, "it is no member any more")
	if !p.remote {
		p.t.opts.Metrics.forget(p.local, p.name)
	}
}

func (p *peer) setURLs(urls []string) {
	p.urls.mu.Lock()
	same := slices.Equal(p.urls.urls, urls)
	p.urls.mu.Unlock()
	if same {
		return
	}
	p.urls.set(urls)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range p.dialed {
		if d.cancel != nil && !slices.Contains(urls, d.url) {
			d.cancel()
		}
	}
}

// heard takes what the headers of a request or an answer say about the peer.
func (p *peer) heard(h http.Header) {
	p.native.Store(h.Get(engramHeader) != "")
	version, err := strconv.Atoi(h.Get(formHeader))
	p.form.Store(err == nil && version > 0 && version == p.t.opts.SnapshotVersion)
}

// send queues a message on the channel that is right for it.
func (p *peer) send(m *raftpb.Message) {
	var q *queue
	if !p.remote {
		p.mu.Lock()
		switch {
		case m.GetType() == raftpb.MsgApp && p.attached[msgAppKind] != nil:
			q = p.attached[msgAppKind].queue
		case p.attached[messageKind] != nil && (!bulk(m) || memoryOf(m) <= bulkFrame):
			q = p.attached[messageKind].queue
		}
		p.mu.Unlock()
	}
	if q != nil && q.put(m) || q == nil && p.pipeline.put(m) {
		return
	}
	p.lost()
}

// lost reports that a message will not arrive.
func (p *peer) lost() {
	p.sentFailures.Inc()
	p.t.opts.Raft.ReportUnreachable(p.id)
}

// activity knows since when a peer is connected.
type activity struct {
	p *peer

	mu      sync.Mutex
	since   time.Time    // zero if inactive
	streams int          // of either direction that stand
	logged  [2]time.Time // when it last logged turning inactive, active
}

// quietTime is how long a peer that comes and goes is not logged again.
const quietTime = 10 * time.Second

func (a *activity) activeSince() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.since
}

// set notes that the peer is connected or not, and logs a change with its reason.
func (a *activity) set(active bool, reason any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.change(active, reason)
}

// stands notes that a stream stands, until fell.
func (a *activity) stands(reason any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.streams++
	a.change(true, reason)
}

func (a *activity) fell() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.streams--
}

// failed notes that a single request failed. It says nothing of a peer whose streams stand: nobody would tell that it is connected still.
func (a *activity) failed(reason any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.streams == 0 {
		a.change(false, reason)
	}
}

func (a *activity) change(active bool, reason any) {
	if active != a.since.IsZero() || active && a.p.ctx.Err() != nil {
		return
	}
	now, way := a.p.t.opts.Clock.Now(), 0
	if a.since = (time.Time{}); active {
		a.since, way = now, 1
	}
	if a.p.remote {
		return
	}
	m := a.p.t.opts.Metrics
	m.ActivePeers.WithLabelValues(a.p.local, a.p.name).Set(float64(way))
	if !active {
		m.DisconnectedPeers.WithLabelValues(a.p.local, a.p.name).Inc()
	}
	if !a.logged[way].IsZero() && now.Sub(a.logged[way]) < quietTime {
		return
	}
	a.logged[way] = now
	if active {
		a.p.t.opts.Logger.Info("peer became active", "member", a.p.name, "reason", fmt.Sprint(reason))
	} else {
		a.p.t.opts.Logger.Warn("peer became inactive", "member", a.p.name, "reason", fmt.Sprint(reason))
	}
}
