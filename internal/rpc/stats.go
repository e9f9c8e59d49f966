package rpc

import (
	"time"

	"google.golang.org/grpc/codes"

	"github.com/engram-kv/engram/internal/grpcserver"
)

// streamAPIs are the names of streams in etcd_network_server_stream_failures_total.
var streamAPIs = map[string]string{
	"/etcdserverpb.Watch/Watch":          "watch",
	"/etcdserverpb.Lease/LeaseKeepAlive": "lease-keepalive",
}

// methodStats is grpcserver.MethodStats of one method that is served from raw
// bytes.
type methodStats struct {
	s     *Server
	m     *methodMetrics
	unary bool
	api   string // of a stream, in streamFailures
}

func (s *Server) statsOf(kind methodType, name string) *methodStats {
	service, method := splitMethod(name)
	return &methodStats{s: s, m: s.metrics.method(kind, service, method), unary: kind == typeUnary, api: streamAPIs[name]}
}

// Started implements grpcserver.MethodStats.
func (c *methodStats) Started() { c.m.started.Inc() }

// Received implements grpcserver.MethodStats.
func (c *methodStats) Received(bytes int) {
	c.m.received.Inc()
	c.s.metrics.receivedBytes.Add(float64(bytes))
}

// Sent implements grpcserver.MethodStats.
func (c *methodStats) Sent(bytes int) {
	c.m.sent.Inc()
	c.s.metrics.sentBytes.Add(float64(bytes))
}

// Finished implements grpcserver.MethodStats. Of a stream's ends only two are
// failures of receiving: a message that cannot be decoded, and one that is too
// large or asks for more than the client reads. That a client leaves is none.
func (c *methodStats) Finished(call *grpcserver.Call, code codes.Code, took time.Duration) {
	c.m.finish(code, took)
	switch {
	case c.unary:
		c.s.finished(call, code, took)
	case c.api != "" && (code == codes.Internal || code == codes.ResourceExhausted):
		c.s.metrics.streamFailed("receive", c.api)
	}
}
