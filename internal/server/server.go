// Package server builds, starts and stops one member. It is the only package
// that knows all the others; it decides nothing about keys, and hands each
// package its own Options.
//
// Member is the main type. Invariants:
//
//	B1: two processes never use one data directory.
//	B2: nothing is served before everything committed at the last stop is applied.
//	B3: at a graceful stop no request is taken any more, those in hand are
//	    answered, and then the store is flushed.
package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/hot"
	"github.com/engram-kv/engram/internal/leader"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/pace"
	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/internal/watch"
)

// Member is one running member.
type Member struct {
	cfg     *config.Config
	log     *slog.Logger
	clock   clock.Clock
	pace    *pace.Pace // of all long work
	timed   *storeMetrics
	id      identity
	remotes []peer.Member // whom a member that joins knew at first
	seams   Seams

	dir       *dataDir
	logDir    io.Closer  // the lock of the log's directory
	guard     *diskGuard // of the store's disk
	guards    diskGuards // that one and, if the log lies elsewhere, its own
	raftLog   *raftlog.Log
	gen       atomic.Pointer[generation]
	hub       *watch.Hub
	node      *consensus.Node
	transport *peer.Transport
	client    *peer.Client // asks other members
	dialTLS   *tls.Config  // of connections to other members
	ids       *consensus.IDs
	tokens    *auth.Tokens
	lessor    *lease.Lessor
	keeper    *leader.Keeper
	leading   atomic.Bool // it leads, and has applied the first entry of its term
	hot       *hot.Sampler
	rpc       *rpc.Server
	edge      *edge

	membership *membership
	versions   *versions
	leases     *leases
	departure  *departure

	durable   atomic.Uint64 // index that the store has made durable
	flushed   chan struct{} // capacity 1: a flush ended
	flushNow  chan struct{} // capacity 1: consensus wants a flush
	compacted chan struct{} // capacity 1: a compaction was applied
	cleared   chan struct{} // capacity 1: compactions have deleted what they free
	overQuota chan struct{} // capacity 1: a request passed the quota
	reclaim   chan struct{} // capacity 1: space is to come back
	failed    chan error    // capacity 1: why the member must stop

	hashing, hashingForPeers hashSlots

	stop      context.CancelFunc
	workers   sync.WaitGroup
	receiving sync.Mutex     // held while a snapshot comes in
	sendings  atomic.Int64   // counts snapshots in Engram's form that were begun to be sent
	retiring  sync.WaitGroup // generations that are being deleted
	held      sync.Map       // directories of old generations that somebody still reads
}

// Seams are where tests reach in. Each function gets the Options that a package
// is about to be opened with and may change them. The zero value, with which a
// process runs, changes nothing.
type Seams struct {
	FS        vfs.FS // holds every file of the member; nil is the operating system's
	Storage   func(*storage.Options)
	Machine   func(*state.Options)
	RaftLog   func(*raftlog.Options)
	Consensus func(*consensus.Options)
	Clock     clock.Clock // nil is the operating system's
	// InitialHashBytes replaces the constant initialHashBytes; 0 leaves it.
	InitialHashBytes int64
}

// through lets a seam change what a package is opened with.
func through[T any](seam func(*T), o T) T {
	if seam != nil {
		seam(&o)
	}
	return o
}

// Start opens the data directory and returns when the member serves. Wait ends
// it. On an error everything that was opened is closed again.
func Start(ctx context.Context, cfg *config.Config, log *slog.Logger) (*Member, error) {
	return StartWith(ctx, cfg, log, Seams{})
}

// StartWith is Start for tests that put something else in a place.
func StartWith(ctx context.Context, cfg *config.Config, log *slog.Logger, seams Seams) (_ *Member, err error) {
	began := time.Now()
	if seams.FS == nil {
		seams.FS = vfs.Default
	}
	if seams.Clock == nil {
		seams.Clock = clock.Real()
	}
	m := &Member{
		cfg: cfg, log: log, clock: seams.Clock, pace: pace.New(pace.Options{}), seams: seams,
		flushed: make(chan struct{}, 1), flushNow: make(chan struct{}, 1), compacted: make(chan struct{}, 1), cleared: make(chan struct{}, 1), overQuota: make(chan struct{}, 1),
		reclaim: make(chan struct{}, 1), failed: make(chan error, 1),
		hashing: make(hashSlots, hashesAtOnce), hashingForPeers: make(hashSlots, hashesAtOnce),
	}
	m.hot = hot.New(hot.Options{}, m.clock.Now())
	m.tokens = auth.NewTokens(time.Duration(cfg.AuthTokenTTL)*time.Second, m.clock.Now)
	run, stop := context.WithCancel(context.Background())
	m.stop = stop
	defer func() {
		if err != nil {
			select {
			case why := <-m.failed: // damage that a read came upon, by file and offset
				err = errors.Join(why, err)
			default:
			}
			err = errors.Join(err, m.close(stopGrace))
		}
	}()
	if err := m.openDisk(ctx); err != nil {
		return nil, err
	}
	metrics := newMetrics(cfg)
	m.timed = metrics.store
	if m.edge, err = bind(cfg, m.log, m.clock); err != nil {
		return nil, err
	}
	if err := m.openClient(); err != nil {
		return nil, err
	}
	if err := m.openState(ctx, metrics); err != nil {
		return nil, err
	}
	if err := m.openConsensus(metrics); err != nil {
		return nil, err
	}
	compareBeside, err := m.checkAtStart(ctx)
	if err != nil {
		return nil, err
	}
	m.hub = m.newHub(metrics)
	m.leases = m.newLeases(m.newLeaderLeases())
	m.membership, m.versions, m.departure = m.newMembership(metrics), m.newVersions(m.leading.Load), m.newDeparture(run)
	m.openEdge(metrics)
	m.startWorkers(run)
	m.edge.servePeers(m)
	m.transport.Start()
	if err := m.takePart(ctx); err != nil {
		return nil, err
	}
	if err := metrics.register(m); err != nil {
		return nil, err
	}
	m.edge.serve(m)
	m.workers.Go(func() {
		if err := compareBeside(run); err != nil {
			m.fail(err)
		}
	})
	log.Info("ready to serve client requests", "member", fmt.Sprintf("%x", m.id.member), "cluster", fmt.Sprintf("%x", m.id.cluster),
		"name", cfg.Name, "clients", m.ClientAddrs(), "revision", m.machine().Root().Revision(), "keys", m.machine().Root().Keys(), "took", time.Since(began))
	m.workers.Go(debug.FreeOSMemory) // what reading the store and the log left behind
	return m, nil
}

// ClientAddrs are the addresses that clients are served on, as bound.
func (m *Member) ClientAddrs() []string { return addrs(m.edge.client) }

// PeerAddrs are the addresses that other members are served on, as bound.
func (m *Member) PeerAddrs() []string { return addrs(m.edge.peer) }

// budgets divides --memory-budget. The in-memory index comes on top.
type budgets struct {
	values, blockCache, logCache, recentEvents, requests, responses, streams int64
}

func (m *Member) budgets() budgets {
	total := m.cfg.MemoryBudget.Of(config.MemoryLimit())
	responses, values := m.cfg.ResponseBytes, total/2
	if share := max(16<<20, total/8); !m.cfg.IsSet("response-bytes") {
		responses = min(responses, share)
	} else if more := responses - share; more > 0 {
		values = max(values-more, total/8) // whoever wants more for answers keeps fewer values in memory
	}
	return budgets{
		values:       values,
		requests:     max(32<<20, total/16),
		blockCache:   max(8<<20, total/8),
		logCache:     min(max(4<<20, total/32), 128<<20),
		recentEvents: min(max(4<<20, total/32), 128<<20),
		responses:    responses,
		streams:      min(max(8<<20, total/16), 128<<20),
	}
}

func (m *Member) openDisk(ctx context.Context) (err error) {
	fs := m.seams.FS
	if m.dir, err = openDataDir(fs, m.cfg.DataDir); err != nil {
		return err
	}
	if err := m.importEtcd(ctx); err != nil {
		return err
	}
	reserve, asked := m.cfg.DiskReserveBytes, m.cfg.IsSet("disk-reserve-bytes")
	if m.guard, err = newDiskGuard(fs, m.cfg.DataDir, reserve, asked, m.log); err != nil {
		return err
	}
	m.guards = diskGuards{m.guard}
	if m.cfg.WALDir == "" {
		return nil
	}
	ofLog, err := newLogGuard(fs, m.cfg.WALDir, reserve, asked, m.log)
	m.guards = append(m.guards, ofLog)
	return err
}

func (m *Member) newHub(metrics *metrics) *watch.Hub {
	return watch.New(watch.Options{
		Source:    m.gen.Load().source(),
		ClusterID: m.id.cluster, MemberID: m.id.member, Term: m.node.AppliedTerm,
		RecentBytes: int(m.budgets().recentEvents), FragmentBytes: int(m.cfg.MaxRequestBytes) + 512<<10,
		ProgressInterval: m.cfg.WatchProgressInterval, Metrics: metrics.watch,
	})
}

// minLeaseTTL is the lowest TTL of a lease in seconds: one and a half election
// timeouts, rounded up (state-machine.md, section 0).
func minLeaseTTL(cfg *config.Config) int64 {
	ticks := 3 * cfg.ElectionTicks() / 2
	return int64((time.Duration(ticks)*cfg.Tick() + time.Second - 1) / time.Second)
}

// publisher is state.Publisher: the one place where a batch leaves the machine.
type publisher struct{ m *Member }

// Publish implements state.Publisher.
func (p publisher) Publish(root mvcc.Root, events []mvcc.Event) { p.m.hub.Publish(root, events) }

// notify wakes whoever waits on a channel of capacity 1.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
