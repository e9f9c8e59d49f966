package peer

import "github.com/prometheus/client_golang/prometheus"

// Metrics are what a Transport measures, under etcd's names and labels. NewMetrics makes them; the server registers them.
type Metrics struct {
	// By {To}.
	SentBytes, SentFailures            *prometheus.CounterVec
	RoundTrip                          *prometheus.HistogramVec
	SnapshotSent, SnapshotSendFailures *prometheus.CounterVec
	SnapshotSending                    *prometheus.GaugeVec
	SnapshotSendDuration               *prometheus.HistogramVec
	// By {From}.
	ReceivedBytes, ReceivedFailures           *prometheus.CounterVec
	SnapshotReceived, SnapshotReceiveFailures *prometheus.CounterVec
	SnapshotReceiving                         *prometheus.GaugeVec
	SnapshotReceiveDuration                   *prometheus.HistogramVec
	// By {Local,Remote}.
	KnownPeers, ActivePeers *prometheus.GaugeVec
	DisconnectedPeers       *prometheus.CounterVec
}

// NewMetrics makes metrics that are not registered anywhere.
func NewMetrics() *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "etcd", Subsystem: "network", Name: name, Help: help}, labels)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "etcd", Subsystem: "network", Name: name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "etcd", Subsystem: "network", Name: name, Help: help, Buckets: buckets,
		}, labels)
	}
	snapshotBuckets := prometheus.ExponentialBuckets(0.1, 2, 10) // 100 ms to 51.2 s
	return &Metrics{
		SentBytes:    counter("peer_sent_bytes_total", "The total number of bytes sent to peers.", "To"),
		SentFailures: counter("peer_sent_failures_total", "The total number of send failures from peers.", "To"),
		RoundTrip: histogram("peer_round_trip_time_seconds", "Round-Trip-Time histogram between peers.",
			prometheus.ExponentialBuckets(0.0001, 2, 16), "To"), // 0.1 ms to 3.2768 s
		SnapshotSent:         counter("snapshot_send_success", "Total number of successful snapshot sends.", "To"),
		SnapshotSendFailures: counter("snapshot_send_failures", "Total number of snapshot send failures.", "To"),
		SnapshotSending:      gauge("snapshot_send_inflights_total", "Total number of inflight snapshot sends.", "To"),
		SnapshotSendDuration: histogram("snapshot_send_total_duration_seconds", "Total latency distributions of v3 snapshot sends.",
			snapshotBuckets, "To"),
		ReceivedBytes:           counter("peer_received_bytes_total", "The total number of bytes received from peers.", "From"),
		ReceivedFailures:        counter("peer_received_failures_total", "The total number of receive failures from peers.", "From"),
		SnapshotReceived:        counter("snapshot_receive_success", "Total number of successful snapshot receives.", "From"),
		SnapshotReceiveFailures: counter("snapshot_receive_failures", "Total number of snapshot receive failures.", "From"),
		SnapshotReceiving:       gauge("snapshot_receive_inflights_total", "Total number of inflight snapshot receives.", "From"),
		SnapshotReceiveDuration: histogram("snapshot_receive_total_duration_seconds",
			"Total latency distributions of v3 snapshot receives.", snapshotBuckets, "From"),
		KnownPeers:        gauge("known_peers", "The current number of known peers.", "Local", "Remote"),
		ActivePeers:       gauge("active_peers", "The current number of active peer connections.", "Local", "Remote"),
		DisconnectedPeers: counter("disconnected_peers_total", "The total number of disconnected peers.", "Local", "Remote"),
	}
}

// Collectors lists the metrics for registration.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		m.SentBytes, m.SentFailures, m.RoundTrip, m.SnapshotSent, m.SnapshotSendFailures, m.SnapshotSending, m.SnapshotSendDuration,
		m.ReceivedBytes, m.ReceivedFailures, m.SnapshotReceived, m.SnapshotReceiveFailures, m.SnapshotReceiving,
		m.SnapshotReceiveDuration, m.KnownPeers, m.ActivePeers, m.DisconnectedPeers,
	}
}

// forget drops the series of a peer that is gone.
func (m *Metrics) forget(local, remote string) {
	m.KnownPeers.DeleteLabelValues(local, remote)
	m.ActivePeers.DeleteLabelValues(local, remote)
}
