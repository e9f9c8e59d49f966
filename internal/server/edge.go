package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/web"
)

// edge is the listeners of a member and what serves on them.
type edge struct {
	client, clientHTTP, metrics, peer []*listener
	tls                               *tls.Config // of the listeners for clients; nil if none is secure
	grpc                              *grpcserver.Server
	http, metricsHTTP, peerHTTP       *http.Server
	serving                           sync.WaitGroup
}

// listener is a bound address.
type listener struct {
	net.Listener
	secure bool // what comes is to be TLS; that of peers is put on already
}

const (
	// readHeaderTimeout is etcd's (surface.md, section 2.1).
	readHeaderTimeout = 5 * time.Minute
	// peerSilence ends a connection of a peer that asks nothing, as in etcd
	// (peer-protocol.md, section 1.1). It is longer than peers keep idle ones.
	peerSilence = 5 * time.Second
)

// bind binds every address, so that a clash is found before anything starts.
func bind(cfg *config.Config, log *slog.Logger, c clock.Clock) (_ *edge, err error) {
	e := &edge{}
	refused := &seldom{log: log, clock: c, message: "refused a peer's connection"}
	clients, overHTTP, metrics := newSeats(fileLimit(), len(cfg.ListenClientHTTP) > 0)
	defer func() {
		if err != nil {
			e.closeListeners()
		}
	}()
	for _, l := range []struct {
		urls  []url.URL
		into  *[]*listener
		flag  string
		seats seats // nil for peers
	}{
		{cfg.ListenClient, &e.client, "listen-client-urls", clients},
		{cfg.ListenClientHTTP, &e.clientHTTP, "listen-client-http-urls", overHTTP},
		{cfg.ListenMetrics, &e.metrics, "listen-metrics-urls", metrics},
		{cfg.ListenPeer, &e.peer, "listen-peer-urls", nil},
	} {
		for i := range l.urls {
			lis, err := listen(&l.urls[i], cfg)
			if err != nil {
				return nil, fmt.Errorf("--%s=%s: %w: stop what uses it, or give another address", l.flag, l.urls[i].String(), err)
			}
			bound := &listener{lis, isSecure(&l.urls[i])}
			*l.into = append(*l.into, bound)
			if l.seats != nil {
				bound.Listener = l.seats.on(lis, &seldom{log: log, clock: c, message: "as many connections are open as may be: who comes waits until one ends; let the process open more files (ulimit -n)"})
				continue
			}
			wrapped, err := wrapPeers(lis, &l.urls[i], cfg, func(from net.Addr, err error) { refused.warn("from", from.String(), "error", err) })
			if err != nil {
				return nil, err
			}
			bound.Listener = wrapped
		}
	}
	if e.tls, err = clientTLSConfig(cfg); err != nil {
		return nil, err
	}
	return e, nil
}

// openEdge builds the services. Nothing is served yet.
func (m *Member) openEdge(metrics *metrics) {
	e := m.edge
	m.rpc = rpc.New(rpc.Options{
		ClusterID: m.id.cluster, MemberID: m.id.member,
		Consensus: proposer{m.node, m.ids, quota{m}}, Views: views{m}, Auth: authenticator{m}, Quota: quota{m},
		Leases: m.leases, Cluster: cluster{m.membership, m}, Maintenance: m, Watches: m.hub,
		Metrics: metrics.rpc, WatchMetrics: metrics.watch, Hot: m.hot, Version: config.Version,
		MaxRequestBytes: int(m.cfg.MaxRequestBytes), MaxTxnOps: int(m.cfg.MaxTxnOps),
		BcryptCost: m.bcryptCost(), SlowCall: m.cfg.WarningUnary, RequestTimeout: m.cfg.RequestTimeout(), ElectionTimeout: time.Duration(m.cfg.ElectionMillis) * time.Millisecond,
		ResponseBytes: m.budgets().responses, StreamsBytes: int(m.budgets().streams), Clock: m.clock, Logger: m.log,
	})
	o := web.Options{
		Member: webMember{m}, Metrics: metrics.web, Gatherer: metrics.registry, Registerer: metrics.registry,
		ReadTimeout: m.cfg.RequestTimeout(), Profiling: m.cfg.Pprof || m.cfg.LogLevel == "debug", Origins: m.cfg.CORS, Hosts: m.cfg.HostWhitelist, Logger: m.log,
	}
	all := web.Handler(o)
	e.http, e.metricsHTTP = newHTTP(all), newHTTP(web.MetricsHandler(o))
	// A stream of a peer asks once and is silent from then on, which is neither of these.
	e.peerHTTP = newHTTP(m.transport.Handler())
	e.peerHTTP.ReadHeaderTimeout, e.peerHTTP.IdleTimeout = peerSilence, peerSilence
	if len(e.clientHTTP) > 0 {
		all = nil // it has listeners of its own
	}
	e.grpc = grpcserver.New(m.rpc.ServerOptions(grpcserver.Options{
		TLS: e.tls, HTTP: all, MaxStreams: m.cfg.MaxConcurrentStreams,
		KeepaliveMinTime: m.cfg.KeepaliveMinTime, KeepaliveTime: m.cfg.KeepaliveInterval, KeepaliveTimeout: m.cfg.KeepaliveTimeout,
		HeldBytes: int(m.budgets().requests), Metrics: metrics.grpc,
	}))
	m.rpc.Register(e.grpc)
}

func newHTTP(h http.Handler) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: readHeaderTimeout}
}

// seldom logs a warning of what anybody may cause, at most once in a while.
type seldom struct {
	log     *slog.Logger
	clock   clock.Clock
	message string

	mu    sync.Mutex // covers all below
	at    time.Time  // of the last line
	count int        // since then
}

// seldomPause is the time between two lines of a seldom.
const seldomPause = 10 * time.Second

// warn logs the warning with the number of those since the last line.
func (s *seldom) warn(args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.count++
	now := s.clock.Now()
	if !s.at.IsZero() && now.Sub(s.at) < seldomPause {
		return
	}
	s.log.Warn(s.message, append(args, "count", s.count)...)
	s.at, s.count = now, 0
}

// listen binds a URL. A unix socket's path is host and path together, as in etcd
// (surface.md, section 8); a socket file that a crash left is replaced.
func listen(u *url.URL, cfg *config.Config) (net.Listener, error) {
	if u.Scheme == "unix" || u.Scheme == "unixs" {
		path := u.Host + u.Path
		if c, err := net.Dial("unix", path); err == nil {
			_ = c.Close()
			return nil, fmt.Errorf("socket %s: %w", path, syscall.EADDRINUSE)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		return net.Listen("unix", path)
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		ctl := c.Control(func(fd uintptr) {
			if cfg.SocketReusePort {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
			}
			if cfg.SocketReuseAddress {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
			}
		})
		return errors.Join(ctl, err)
	}}
	return lc.Listen(context.Background(), "tcp", u.Host)
}

// servePeers lets the other members in. It comes before clients: a member is
// ready for those only once it has found its cluster.
func (e *edge) servePeers(m *Member) {
	for _, l := range e.peer {
		e.run(m, func() error { return e.peerHTTP.Serve(l) })
	}
}

// serve starts serving on the other listeners. On client listeners gRPC and HTTP
// share a port, told apart by the first bytes of a connection or of TLS, unless
// HTTP has listeners of its own.
func (e *edge) serve(m *Member) {
	for _, l := range e.client {
		serve := e.grpc.Serve
		if l.secure {
			serve = e.grpc.ServeTLS
		}
		e.run(m, func() error { return serve(l) })
	}
	e.serveHTTP(m, e.http, e.clientHTTP)
	e.serveHTTP(m, e.metricsHTTP, e.metrics)
}

func (e *edge) serveHTTP(m *Member, s *http.Server, ls []*listener) {
	for _, l := range ls {
		on := net.Listener(l)
		if l.secure {
			on = tls.NewListener(l, e.tls)
		}
		e.run(m, func() error { return s.Serve(on) })
	}
}

func (e *edge) run(m *Member, serve func() error) {
	e.serving.Go(func() {
		err := serve()
		if err == nil || errors.Is(err, http.ErrServerClosed) || errors.Is(err, grpc.ErrServerStopped) || errors.Is(err, net.ErrClosed) {
			return
		}
		m.fail(fmt.Errorf("serving: %w", err))
	})
}

func addrs(listeners []*listener) []string {
	var out []string
	for _, l := range listeners {
		out = append(out, l.Addr().String())
	}
	return out
}

func (e *edge) closeListeners() {
	for _, ls := range [][]*listener{e.client, e.clientHTTP, e.metrics, e.peer} {
		closeAll(ls)
	}
}

// close takes no call of clients any more and gives those in hand some time.
// Peers are served until closePeers.
func (e *edge) close(grace time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	for _, ls := range [][]*listener{e.client, e.clientHTTP, e.metrics} {
		closeAll(ls)
	}
	if e.grpc == nil {
		return // it was never built
	}
	done := make(chan struct{})
	go func() {
		e.grpc.GracefulStop()
		close(done)
	}()
	for _, s := range []*http.Server{e.http, e.metricsHTTP} {
		_ = s.Shutdown(ctx)
		_ = s.Close()
	}
	select {
	case <-done:
	case <-ctx.Done():
		e.grpc.Stop() // streams that clients hold open
		<-done
	}
}

// closePeers ends what is left.
func (e *edge) closePeers() {
	closeAll(e.peer)
	if e.peerHTTP != nil {
		_ = e.peerHTTP.Close()
	}
	e.serving.Wait()
}

func closeAll(ls []*listener) {
	for _, l := range ls {
		_ = l.Close()
	}
}

// webMember is web.Member.
type webMember struct{ *Member }

// Leader implements web.Member.
func (w webMember) Leader() uint64 { return w.node.Leader() }

// Learner implements web.Member.
func (w webMember) Learner() bool { return w.node.Learner() }

// Alarms implements web.Member.
func (w webMember) Alarms() []*pb.AlarmMember { return w.Member.Alarms() }

// Read implements web.Member.
func (w webMember) Read(ctx context.Context, linearizable bool) error {
	if linearizable {
		if err := w.caughtUp(ctx); err != nil {
			return rpc.WireError(err)
		}
	}
	v := views{w.Member}.View()
	defer v.Release()
	_, _ = v.KV().Item([]byte("health"))
	return nil
}

// Versions implements web.Member.
func (w webMember) Versions() web.Versions {
	v := tellVersions(w.root())
	return web.Versions{Server: v.Server, Cluster: v.Cluster, Storage: v.Storage, Engram: v.Engram}
}
