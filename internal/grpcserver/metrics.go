package grpcserver

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are what a server counts about its connections. It is a
// prometheus.Collector.
type Metrics struct {
	open, accepted            atomic.Int64
	streams, started, refused atomic.Int64
	heldBack                  atomic.Int64
	received, sent            atomic.Int64
	writes, reads             atomic.Int64
	limits                    map[string]*atomic.Int64

	descs []metricDesc
	limit *prometheus.Desc
}

type metricDesc struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value *atomic.Int64
}

// NewMetrics returns metrics at zero.
func NewMetrics() *Metrics {
	m := &Metrics{limits: map[string]*atomic.Int64{}}
	for _, r := range limitReasons {
		m.limits[r] = new(atomic.Int64)
	}
	add := func(name, help string, kind prometheus.ValueType, v *atomic.Int64) {
		m.descs = append(m.descs, metricDesc{prometheus.NewDesc("engram_grpc_"+name, help, nil, nil), kind, v})
	}
	add("connections", "HTTP/2 connections of clients that are open.", prometheus.GaugeValue, &m.open)
	add("connections_total", "Connections that were accepted, of any protocol.", prometheus.CounterValue, &m.accepted)
	add("streams", "Calls and streams that are open.", prometheus.GaugeValue, &m.streams)
	add("calls_held_back", "Calls whose messages wait until their connection has less in hand.", prometheus.GaugeValue, &m.heldBack)
	add("streams_total", "Calls and streams that were begun.", prometheus.CounterValue, &m.started)
	add("streams_refused_total", "Calls that no handler saw: malformed, not gRPC, of no method that is served, or too many.", prometheus.CounterValue, &m.refused)
	add("received_bytes_total", "Bytes that were read from HTTP/2 connections, decrypted.", prometheus.CounterValue, &m.received)
	add("sent_bytes_total", "Bytes that were written to HTTP/2 connections, before encryption.", prometheus.CounterValue, &m.sent)
	add("reads_total", "Reads from HTTP/2 connections; each may hold many calls.", prometheus.CounterValue, &m.reads)
	add("writes_total", "Writes to HTTP/2 connections; each may hold many answers.", prometheus.CounterValue, &m.writes)
	m.limit = prometheus.NewDesc("engram_grpc_limits_total", "How often a client met a limit, by its name.", []string{"reason"}, nil)
	return m
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range m.descs {
		ch <- d.desc
	}
	ch <- m.limit
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, d := range m.descs {
		ch <- prometheus.MustNewConstMetric(d.desc, d.kind, float64(d.value.Load()))
	}
	for reason, n := range m.limits {
		ch <- prometheus.MustNewConstMetric(m.limit, prometheus.CounterValue, float64(n.Load()), reason)
	}
}

// Limited is how often a limit was met; for tests.
func (m *Metrics) Limited(reason string) int64 {
	if n := m.limits[reason]; n != nil {
		return n.Load()
	}
	return 0
}
