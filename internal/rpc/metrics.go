package rpc

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/internal/command"
)

// maxClientVersions bounds the series that clients can make by what they send.
const maxClientVersions = 64

// methodType is the grpc_type of a method.
type methodType string

// The types of a method, as grpc's own metrics name them.
const (
	typeUnary        methodType = "unary"
	typeServerStream methodType = "server_stream"
	typeBidiStream   methodType = "bidi_stream"
)

// Metrics counts what this package does. Series of methods exist from the
// start, so that an alert on their rate sees the first failure.
type Metrics struct {
	extensive bool

	started, handled, received, sent *prometheus.CounterVec
	handling                         *prometheus.HistogramVec

	receivedBytes, sentBytes prometheus.Counter
	requestsByVersion        *prometheus.CounterVec
	streamFailures           *prometheus.CounterVec
	requestSeconds           *prometheus.HistogramVec
	rangeSeconds             *prometheus.HistogramVec

	rangeOK, rangeFailed prometheus.Observer

	// requests holds the series of requestSeconds that were needed so far, by
	// kind and success.
	requests [requestKinds][2]atomic.Pointer[prometheus.Observer]

	mu       sync.Mutex
	methods  map[string]*methodMetrics
	versions map[versionKey]prometheus.Counter
}

type versionKey struct {
	kind    callKind
	version string
}

// callKind is a type in etcd_server_client_requests_total.
type callKind uint8

const (
	kindUnary callKind = iota
	kindStream
	callKinds
)

var callKindNames = [callKinds]string{"unary", "stream"}

// requestKind is a type in etcd_server_request_duration_seconds.
type requestKind uint8

const (
	requestRange requestKind = iota
	requestRangeStream
	requestPut
	requestDeleteRange
	requestTxn
	requestReadonlyTxn
	requestCompaction
	requestLeaseGrant
	requestLeaseRevoke
	requestAlarm
	// From here on they are package command's, in its order.
	requestAuthEnable
	requestAuthDisable
	requestAuthenticate
	requestAuthStatus
	requestAuthUserAdd
	requestAuthUserDelete
	requestAuthUserGet
	requestAuthUserChangePassword
	requestAuthUserGrantRole
	requestAuthUserRevokeRole
	requestAuthUserList
	requestAuthRoleList
	requestAuthRoleAdd
	requestAuthRoleDelete
	requestAuthRoleGet
	requestAuthRoleGrantPermission
	requestAuthRoleRevokePermission
	requestKinds
)

// requestOf returns the type of a request of the auth service.
func requestOf(kind command.Kind) requestKind {
	return requestAuthEnable + requestKind(kind-command.KindAuthEnable)
}

var requestNames = [requestKinds]string{
	"Range", "RangeStream", "Put", "DeleteRange", "Txn", "ReadonlyTxn",
	"Compaction", "LeaseGrant", "LeaseRevoke", "Alarm",
	"AuthEnable", "AuthDisable", "Authenticate", "AuthStatus",
	"AuthUserAdd", "AuthUserDelete", "AuthUserGet", "AuthUserChangePassword", "AuthUserGrantRole", "AuthUserRevokeRole", "AuthUserList",
	"AuthRoleList", "AuthRoleAdd", "AuthRoleDelete", "AuthRoleGet", "AuthRoleGrantPermission", "AuthRoleRevokePermission",
}

// methodMetrics are the series of one method.
type methodMetrics struct {
	started, received, sent prometheus.Counter
	handled                 [codes.Unauthenticated + 1]prometheus.Counter
	handling                prometheus.Observer // nil unless extensive
}

// NewMetrics returns the metrics. Extensive adds a histogram per method.
func NewMetrics(extensive bool) *Metrics {
	method := []string{"grpc_type", "grpc_service", "grpc_method"}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	}
	m := &Metrics{
		extensive: extensive,
		started:   counter("grpc_server_started_total", "Total number of RPCs started on the server.", method...),
		handled:   counter("grpc_server_handled_total", "Total number of RPCs completed on the server, regardless of success or failure.", append(method, "grpc_code")...),
		received:  counter("grpc_server_msg_received_total", "Total number of RPC stream messages received on the server.", method...),
		sent:      counter("grpc_server_msg_sent_total", "Total number of gRPC stream messages sent by the server.", method...),
		handling:  histogram("grpc_server_handling_seconds", "Histogram of response latency (seconds) of gRPC that had been application-level handled by the server.", prometheus.DefBuckets, method...),
		receivedBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "etcd_network_client_grpc_received_bytes_total", Help: "The total number of bytes received from grpc clients."}),
		sentBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "etcd_network_client_grpc_sent_bytes_total", Help: "The total number of bytes sent to grpc clients."}),
		requestsByVersion: counter("etcd_server_client_requests_total", "The total number of client requests per client version.", "type", "client_api_version"),
		streamFailures:    counter("etcd_network_server_stream_failures_total", "The total number of stream failures from the local server.", "Type", "API"),
		requestSeconds:    histogram("etcd_server_request_duration_seconds", "Response latency in seconds of the requests of each type.", prometheus.ExponentialBuckets(0.001, 2, 14), "type", "success"),
		rangeSeconds:      histogram("etcd_server_range_duration_seconds", "The latency distributions of txn->Range.", prometheus.ExponentialBuckets(0.0001, 2, 20), "success"),
		methods:           map[string]*methodMetrics{},
		versions:          map[versionKey]prometheus.Counter{},
	}
	m.rangeOK = m.rangeSeconds.WithLabelValues("true")
	m.rangeFailed = m.rangeSeconds.WithLabelValues("false")
	return m
}

// Register adds the metrics to a registry.
func (m *Metrics) Register(r prometheus.Registerer) error {
	all := []prometheus.Collector{m.started, m.handled, m.received, m.sent, m.receivedBytes, m.sentBytes,
		m.requestsByVersion, m.streamFailures, m.requestSeconds, m.rangeSeconds}
	if m.extensive {
		all = append(all, m.handling)
	}
	for _, c := range all {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}

// method returns the series of a method, which exist at 0 from then on.
func (m *Metrics) method(kind methodType, service, name string) *methodMetrics {
	key := "/" + service + "/" + name
	m.mu.Lock()
	defer m.mu.Unlock()
	if have := m.methods[key]; have != nil {
		return have
	}
	mm := &methodMetrics{
		started:  m.started.WithLabelValues(string(kind), service, name),
		received: m.received.WithLabelValues(string(kind), service, name),
		sent:     m.sent.WithLabelValues(string(kind), service, name),
	}
	for code := range mm.handled {
		mm.handled[code] = m.handled.WithLabelValues(string(kind), service, name, codes.Code(code).String())
	}
	if m.extensive {
		mm.handling = m.handling.WithLabelValues(string(kind), service, name)
	}
	m.methods[key] = mm
	return mm
}

// lookup returns the series of a method known to method, else nil.
func (m *Metrics) lookup(fullMethod string) *methodMetrics {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.methods[fullMethod]
}

// finish counts the end of a call.
func (mm *methodMetrics) finish(code codes.Code, took time.Duration) {
	if int(code) >= len(mm.handled) {
		code = codes.Unknown
	}
	mm.handled[code].Inc()
	if mm.handling != nil {
		mm.handling.Observe(took.Seconds())
	}
}

// clientRequest counts a call by what its client says of itself.
func (m *Metrics) clientRequest(f *facts, kind callKind) {
	c := f.requests[kind].Load()
	if c == nil {
		made := m.clientRequests(kind, f.version)
		c = &made
		f.requests[kind].Store(c)
	}
	(*c).Inc()
}

// clientRequests returns what counts the calls of a kind by clients of a version.
func (m *Metrics) clientRequests(kind callKind, version string) prometheus.Counter {
	key := versionKey{kind, version}
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.versions[key]; c != nil {
		return c
	}
	if len(m.versions) >= maxClientVersions {
		key.version = "other"
	}
	c := m.versions[key]
	if c == nil {
		c = m.requestsByVersion.WithLabelValues(callKindNames[kind], key.version)
		m.versions[key] = c
	}
	return c
}

// request observes how long a request of a kind took.
func (m *Metrics) request(kind requestKind, err error, took time.Duration) {
	success, label := 1, "true"
	if err != nil {
		success, label = 0, "false"
	}
	o := m.requests[kind][success].Load()
	if o == nil {
		made := m.requestSeconds.WithLabelValues(requestNames[kind], label)
		o = &made
		m.requests[kind][success].Store(o)
	}
	(*o).Observe(took.Seconds())
}

// rangeTook observes how long the reading for one range took.
func (m *Metrics) rangeTook(err error, took time.Duration) {
	o := m.rangeOK
	if err != nil {
		o = m.rangeFailed
	}
	o.Observe(took.Seconds())
}

// streamFailed counts a "receive" that failed on a stream of an API,
// "watch" or "lease-keepalive".
func (m *Metrics) streamFailed(kind, api string) {
	m.streamFailures.WithLabelValues(kind, api).Inc()
}
