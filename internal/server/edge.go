package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/soheilhy/cmux"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/web"
)

// edge is the listeners of a member and what serves on them.
type edge struct {
	client, clientHTTP, metrics, peer []net.Listener
	grpc                              *grpc.Server
	http, peerHTTP                    []*http.Server
	serving                           sync.WaitGroup
}

// streamWorkers is how many goroutines take calls again and again: their stacks
// have grown already. More calls than that in hand get a goroutine each.
const streamWorkers = 256

// readHeaderTimeout is etcd's (surface.md, section 2.1).
const readHeaderTimeout = 5 * time.Minute

// bind binds every address, so that a clash is found before anything starts.
func bind(cfg *config.Config) (_ *edge, err error) {
	e := &edge{}
	defer func() {
		if err != nil {
			e.closeListeners()
		}
	}()
	for _, l := range []struct {
		urls []url.URL
		into *[]net.Listener
		flag string
	}{
		{cfg.ListenClient, &e.client, "listen-client-urls"},
		{cfg.ListenClientHTTP, &e.clientHTTP, "listen-client-http-urls"},
		{cfg.ListenMetrics, &e.metrics, "listen-metrics-urls"},
		{cfg.ListenPeer, &e.peer, "listen-peer-urls"},
	} {
		for i := range l.urls {
			lis, err := listen(&l.urls[i], cfg)
			if err != nil {
				return nil, fmt.Errorf("--%s=%s: %w: stop what uses it, or give another address", l.flag, l.urls[i].String(), err)
			}
			if l.into == &e.peer {
				inner := lis
				if lis, err = secured(inner, &l.urls[i], cfg); err != nil {
					_ = inner.Close()
					return nil, err
				}
			}
			*l.into = append(*l.into, lis)
		}
	}
	return e, nil
}

// openEdge builds the services. Nothing is served yet.
func (m *Member) openEdge(metrics *metrics) {
	e := m.edge
	m.rpc = rpc.New(rpc.Options{
		ClusterID: m.id.cluster, MemberID: m.id.member,
		Consensus: proposer{m.node, m.ids}, Views: views{m}, Auth: authenticator{m}, Quota: quota{m},
		Leases: m.leases, Cluster: cluster{m.membership, m}, Maintenance: m, Watches: m.hub,
		Metrics: metrics.rpc, WatchMetrics: metrics.watch,
		MaxRequestBytes: int(m.cfg.MaxRequestBytes), MaxTxnOps: int(m.cfg.MaxTxnOps),
		BcryptCost: m.bcryptCost(), SlowCall: m.cfg.WarningUnary, RequestTimeout: m.cfg.RequestTimeout(), ElectionTimeout: time.Duration(m.cfg.ElectionMillis) * time.Millisecond,
		ResponseBytes: m.budgets().responses, Clock: m.clock, Logger: m.log,
	})
	e.grpc = m.rpc.NewGRPC(
		grpc.NumStreamWorkers(streamWorkers),
		grpc.MaxConcurrentStreams(m.cfg.MaxConcurrentStreams),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: m.cfg.KeepaliveMinTime}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: m.cfg.KeepaliveInterval, Timeout: m.cfg.KeepaliveTimeout}),
	)
	o := web.Options{
		Member: webMember{m}, Metrics: metrics.web, Gatherer: metrics.registry, Registerer: metrics.registry,
		ReadTimeout: m.cfg.RequestTimeout(), Profiling: m.cfg.Pprof || m.cfg.LogLevel == "debug", Origins: m.cfg.CORS, Hosts: m.cfg.HostWhitelist, Logger: m.log,
	}
	all, probes := web.Handler(o), web.MetricsHandler(o)
	for range e.client {
		e.http = append(e.http, newHTTP(all))
	}
	for range e.clientHTTP {
		e.http = append(e.http, newHTTP(all))
	}
	for range e.metrics {
		e.http = append(e.http, newHTTP(probes))
	}
	for range e.peer {
		// A stream of a peer asks once and is silent from then on.
		e.peerHTTP = append(e.peerHTTP, newHTTP(m.transport.Handler()))
	}
}

func newHTTP(h http.Handler) *http.Server {
	return &http.Server{Handler: h, ReadHeaderTimeout: readHeaderTimeout}
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
	for i, l := range e.peer {
		e.run(m, func() error { return e.peerHTTP[i].Serve(l) })
	}
}

// serve starts serving on the other listeners. On client listeners gRPC and HTTP
// share a port, told apart by the first bytes of a connection, unless HTTP has
// listeners of its own.
func (e *edge) serve(m *Member) {
	servers := e.http
	next := func() *http.Server { s := servers[0]; servers = servers[1:]; return s }
	for _, l := range e.client {
		s := next()
		if len(e.clientHTTP) > 0 {
			e.run(m, func() error { return e.grpc.Serve(rpc.Listen(l)) })
			continue
		}
		mux := cmux.New(l)
		grpcL, httpL := mux.Match(cmux.HTTP2()), mux.Match(cmux.Any())
		e.run(m, func() error { return e.grpc.Serve(rpc.Listen(grpcL)) })
		e.run(m, func() error { return s.Serve(httpL) })
		e.run(m, mux.Serve)
	}
	for _, ls := range [][]net.Listener{e.clientHTTP, e.metrics} {
		for _, l := range ls {
			s := next()
			e.run(m, func() error { return s.Serve(l) })
		}
	}
}

func (e *edge) run(m *Member, serve func() error) {
	e.serving.Go(func() {
		err := serve()
		if err == nil || errors.Is(err, http.ErrServerClosed) || errors.Is(err, grpc.ErrServerStopped) ||
			errors.Is(err, cmux.ErrServerClosed) || errors.Is(err, cmux.ErrListenerClosed) || errors.Is(err, net.ErrClosed) {
			return
		}
		m.fail(fmt.Errorf("serving: %w", err))
	})
}

func (e *edge) clientAddrs() []string {
	var out []string
	for _, l := range e.client {
		out = append(out, l.Addr().String())
	}
	return out
}

func (e *edge) closeListeners() {
	for _, ls := range [][]net.Listener{e.client, e.clientHTTP, e.metrics, e.peer} {
		closeAll(ls)
	}
}

// close takes no call of clients any more and gives those in hand some time.
// Peers are served until closePeers.
func (e *edge) close(grace time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	for _, ls := range [][]net.Listener{e.client, e.clientHTTP, e.metrics} {
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
	for _, s := range e.http {
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
	for _, s := range e.peerHTTP {
		_ = s.Close()
	}
	e.serving.Wait()
}

func closeAll(ls []net.Listener) {
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
