package grpcserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/clock"
)

// Server serves gRPC on any number of listeners. Methods are registered before
// the first Serve.
type Server struct {
	o         Options
	metrics   *Metrics
	methods   map[string]*method
	services  map[string]*service
	timers    *timers
	flushers  *flushers
	budget    *outboxBudget // of all bidirectional streams
	recheck   *timer        // of budget
	http      *http.Server  // nil without Options.HTTP
	httpConns *handedOver

	calls      atomic.Int64 // unary calls that are served from raw bytes
	goroutines atomic.Int64 // that serve calls
	held       atomic.Int64 // bytes of open streams and of requests, of all connections
	queued     atomic.Int64 // bytes of answers that wait in streams, of all connections
	handshakes atomic.Int64 // connections that have not begun to speak
	handlers   sync.WaitGroup
	stopOnce   sync.Once
	sweeping   atomic.Int64 // when CloseStalled last looked, Unix ns

	mu        sync.Mutex
	none      sync.Cond // conns and raw became empty
	listeners map[net.Listener]struct{}
	raw       map[net.Conn]struct{} // that do not speak HTTP/2 yet
	conns     map[*conn]struct{}
	serving   sync.WaitGroup // calls of Serve
	draining  bool           // GracefulStop was called
	stopped   bool           // Stop was called
	halt      chan struct{}  // closed by Stop
}

// method is one method that is served.
type method struct {
	name    string // "/etcdserverpb.KV/Put"
	unary   Handler
	sender  SenderHandler
	stream  StreamHandler
	watch   func(call *Call, end func(error)) (forget func())
	stats   MethodStats
	impl    any // of generated services
	goUnary func(srv any, ctx context.Context, dec func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error)
	// goStream describes a stream of a generated service.
	goStream *grpc.StreamDesc
}

// service is what GetServiceInfo tells of a service.
type service struct {
	metadata any
	methods  []grpc.MethodInfo
}

// Defaults of Options.
const (
	defaultReceiveBytes     = 4 << 20
	defaultHeaderBytes      = 64 << 10
	defaultHeldBytes        = 512 << 20
	defaultOutputBytes      = 64 << 20
	defaultStreamMessages   = 128
	defaultStreamBytes      = 4 << 20
	defaultStreamsBytes     = 128 << 20
	defaultStreamStall      = 10 * time.Second
	defaultKeepaliveMin     = 5 * time.Second
	defaultKeepaliveTime    = 2 * time.Hour
	defaultKeepaliveTimeout = 20 * time.Second
	defaultHandshake        = 20 * time.Second
)

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// New returns a server that serves nothing yet.
func New(o Options) *Server {
	orDefault(&o.MaxReceiveBytes, defaultReceiveBytes)
	orDefault(&o.MaxSendBytes, math.MaxInt32)
	orDefault(&o.MaxStreams, math.MaxUint32)
	orDefault(&o.MaxHeaderBytes, defaultHeaderBytes)
	orDefault(&o.HeldBytes, defaultHeldBytes)
	orDefault(&o.OutputBytes, defaultOutputBytes)
	orDefault(&o.StreamMessages, defaultStreamMessages)
	orDefault(&o.StreamBytes, defaultStreamBytes)
	orDefault(&o.StreamsBytes, defaultStreamsBytes)
	orDefault(&o.StreamStall, defaultStreamStall)
	orDefault(&o.KeepaliveMinTime, defaultKeepaliveMin)
	orDefault(&o.KeepaliveTime, defaultKeepaliveTime)
	orDefault(&o.KeepaliveTimeout, defaultKeepaliveTimeout)
	orDefault(&o.HandshakeTimeout, defaultHandshake)
	if o.Clock == nil {
		o.Clock = clock.Real()
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics()
	}
	if o.TLS != nil && len(o.TLS.NextProtos) == 0 {
		o.TLS = o.TLS.Clone()
		o.TLS.NextProtos = []string{"h2", "http/1.1"}
	}
	s := &Server{
		o: o, metrics: o.Metrics,
		methods: map[string]*method{}, services: map[string]*service{},
		timers:    newTimers(o.Clock),
		flushers:  newFlushers(min(4, runtime.GOMAXPROCS(0))),
		halt:      make(chan struct{}),
		listeners: map[net.Listener]struct{}{}, raw: map[net.Conn]struct{}{}, conns: map[*conn]struct{}{},
	}
	s.none.L = &s.mu
	s.budget = newOutboxBudget(o.StreamsBytes, o.StreamStall, o.Clock.Now, func(d time.Duration) {
		s.timers.set(s.recheck, o.Clock.Now().Add(d))
	})
	s.recheck = newTimer(func() { s.budget.again() })
	if o.HTTP != nil {
		s.serveHTTP()
	}
	return s
}

// Handle adds a method that is served from raw bytes. It stands for one of the
// same name of a generated service, whichever comes first.
func (s *Server) Handle(m Method) {
	name, short, ok := splitMethod(m.Name)
	if !ok {
		panic(fmt.Sprintf("grpcserver: method %q is not /service/method", m.Name))
	}
	s.methods[m.Name] = &method{name: m.Name, unary: m.Unary, sender: m.Sender, stream: m.Stream, watch: m.Watch, stats: m.Stats}
	s.service(name).add(grpc.MethodInfo{Name: short, IsClientStream: m.Stream != nil, IsServerStream: m.Stream != nil || m.Sender != nil})
}

// RegisterService implements grpc.ServiceRegistrar. Each call of its methods gets
// a goroutine.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	svc := s.service(desc.ServiceName)
	svc.metadata = desc.Metadata
	add := func(short string, m *method, info grpc.MethodInfo) {
		m.name = "/" + desc.ServiceName + "/" + short
		m.impl = impl
		if s.methods[m.name] == nil {
			s.methods[m.name] = m
			info.Name = short
			svc.add(info)
		}
	}
	for i := range desc.Methods {
		add(desc.Methods[i].MethodName, &method{goUnary: desc.Methods[i].Handler}, grpc.MethodInfo{})
	}
	for i := range desc.Streams {
		d := &desc.Streams[i]
		add(d.StreamName, &method{goStream: d}, grpc.MethodInfo{IsClientStream: d.ClientStreams, IsServerStream: d.ServerStreams})
	}
}

func (s *Server) service(name string) *service {
	if s.services[name] == nil {
		s.services[name] = &service{}
	}
	return s.services[name]
}

// add adds or replaces what is told of a method.
func (svc *service) add(info grpc.MethodInfo) {
	for i := range svc.methods {
		if svc.methods[i].Name == info.Name {
			svc.methods[i] = info
			return
		}
	}
	svc.methods = append(svc.methods, info)
}

// GetServiceInfo lists what is served, as grpc's server does.
func (s *Server) GetServiceInfo() map[string]grpc.ServiceInfo {
	out := make(map[string]grpc.ServiceInfo, len(s.services))
	for name, svc := range s.services {
		out[name] = grpc.ServiceInfo{Methods: append([]grpc.MethodInfo(nil), svc.methods...), Metadata: svc.metadata}
	}
	return out
}

// splitMethod splits "/service/method".
func splitMethod(path string) (service, method string, ok bool) {
	rest, ok := strings.CutPrefix(path, "/")
	i := strings.LastIndexByte(rest, '/')
	if !ok || i < 0 {
		return "", "", false
	}
	return rest[:i], rest[i+1:], true
}

// find returns the method of a path, or why there is none.
func (s *Server) find(path string) (*method, *status.Status) {
	if m := s.methods[path]; m != nil {
		return m, nil
	}
	service, method, ok := splitMethod(path)
	switch {
	case !ok:
		return nil, status.Newf(codes.Unimplemented, "malformed method name: %q", path)
	case s.services[service] == nil:
		return nil, status.Newf(codes.Unimplemented, "unknown service %v", service)
	}
	return nil, status.Newf(codes.Unimplemented, "unknown method %v for service %v", method, service)
}

// StreamBytes is how many bytes of answers all bidirectional streams hold.
func (s *Server) StreamBytes() int { return s.budget.held() }

// alone says that hardly anybody else is being served, so that a goroutine which
// replies may as well write: nothing would gather.
func (s *Server) alone() bool { return s.calls.Load() < 4 }

// limited counts and logs that a client met a limit.
func (s *Server) limited(reason string, args ...any) {
	s.metrics.limits[reason].Add(1)
	s.o.Logger.Debug("a client met a limit", append([]any{"limit", reason}, args...)...)
}

// Serve serves a listener in cleartext until it fails or the server stops, which
// returns grpc.ErrServerStopped. HTTP/2 and HTTP/1.1 are told apart by the first
// bytes of a connection.
func (s *Server) Serve(l net.Listener) error { return s.serve(l, false) }

// ServeTLS does the same behind TLS.
func (s *Server) ServeTLS(l net.Listener) error {
	if s.o.TLS == nil {
		_ = l.Close()
		return errors.New("grpcserver: ServeTLS without Options.TLS: set it, or call Serve")
	}
	return s.serve(l, true)
}

func (s *Server) serve(l net.Listener, secure bool) error {
	s.mu.Lock()
	if s.draining || s.stopped {
		s.mu.Unlock()
		_ = l.Close()
		return grpc.ErrServerStopped
	}
	s.listeners[l] = struct{}{}
	s.serving.Add(1)
	s.mu.Unlock()
	defer s.serving.Done()
	wait := time.Duration(0)
	for {
		nc, err := l.Accept()
		if err == nil {
			wait = 0
			s.metrics.accepted.Add(1)
			if s.greet(nc) {
				go s.handle(nc, secure)
			}
			continue
		}
		s.mu.Lock()
		over := s.draining || s.stopped
		s.mu.Unlock()
		switch {
		case over:
			return grpc.ErrServerStopped
		case !passing(err):
			s.mu.Lock()
			delete(s.listeners, l)
			s.mu.Unlock()
			_ = l.Close()
			return err
		}
		wait = min(max(5*time.Millisecond, 2*wait), time.Second)
		s.o.Logger.Warn("no connection could be accepted; trying again", "error", err, "wait", wait)
		time.Sleep(wait)
	}
}

// passing says that Accept may work again: too many files are open, say.
func passing(err error) bool {
	var ne interface{ Temporary() bool }
	return errors.As(err, &ne) && ne.Temporary()
}

// greet notes a connection that has not said anything.
func (s *Server) greet(nc net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining || s.stopped {
		_ = nc.Close()
		return false
	}
	s.raw[nc] = struct{}{}
	return true
}

// ungreet forgets a connection that is somebody else's now, or closed.
func (s *Server) ungreet(nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.raw, nc)
	s.none.Broadcast()
}

// add notes a connection that speaks HTTP/2.
func (s *Server) add(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || s.draining {
		return false
	}
	s.conns[c] = struct{}{}
	s.metrics.open.Add(1)
	return true
}

func (s *Server) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	s.metrics.open.Add(-1)
	s.none.Broadcast()
}

// closeListeners makes Serve return.
func (s *Server) closeListeners() {
	s.mu.Lock()
	for l := range s.listeners {
		_ = l.Close()
	}
	for nc := range s.raw {
		_ = nc.Close()
	}
	s.mu.Unlock()
	s.serving.Wait()
}

// GracefulStop takes no connections and calls any more and waits for those that
// are open. Stop ends its waiting.
func (s *Server) GracefulStop() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	s.closeListeners()
	s.mu.Lock()
	for c := range s.conns {
		go c.startDrain()
	}
	s.mu.Unlock()
	s.shutHTTP(false)
	s.await()
	done := make(chan struct{})
	go func() {
		s.handlers.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-s.halt: // there may be some that do not heed their call's end
	}
	s.finish()
}

// Stop ends all calls and connections.
func (s *Server) Stop() {
	s.mu.Lock()
	if !s.stopped {
		s.stopped = true
		close(s.halt)
	}
	s.mu.Unlock()
	s.closeListeners()
	s.mu.Lock()
	for c := range s.conns {
		c.hangUp()
	}
	s.mu.Unlock()
	s.shutHTTP(true)
	s.await()
	s.finish()
}

// await waits until all connections are gone.
func (s *Server) await() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.conns)+len(s.raw) > 0 {
		s.none.Wait()
	}
}

func (s *Server) finish() {
	s.stopOnce.Do(func() {
		s.flushers.close()
		s.timers.close()
	})
}

// CloseStalled ends the calls that hold answers whose senders wait till they have
// left memory, and of which the client let in nothing for that long, and the
// connections that hold some and took no byte. It is cheap to call often.
func (s *Server) CloseStalled(than time.Duration) {
	now := s.o.Clock.Now()
	last := s.sweeping.Load()
	if now.UnixNano()-last < int64(than/10) || !s.sweeping.CompareAndSwap(last, now.UnixNano()) {
		return
	}
	var holding []*conn
	s.mu.Lock()
	for c := range s.conns {
		if c.holding.Load() > 0 {
			holding = append(holding, c)
		}
	}
	s.mu.Unlock()
	for _, c := range holding {
		c.endStalled(now.Add(-than).UnixNano())
	}
}
