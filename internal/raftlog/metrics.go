package raftlog

import "github.com/prometheus/client_golang/prometheus"

// Metrics are what a Log measures, under etcd's names. NewMetrics makes them; the
// server registers them.
type Metrics struct {
	// FsyncDuration observes each sync of a segment, in seconds.
	FsyncDuration prometheus.Histogram
	// WriteDuration observes each write to a segment, in seconds.
	WriteDuration prometheus.Histogram
	// WriteBytes counts the bytes written. etcd calls it a gauge.
	WriteBytes prometheus.Gauge
}

// NewMetrics makes metrics that are not registered anywhere.
func NewMetrics() *Metrics {
	buckets := prometheus.ExponentialBuckets(0.001, 2, 14) // 1 ms to 8.192 s
	return &Metrics{
		FsyncDuration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "etcd_disk_wal_fsync_duration_seconds",
			Help:    "The latency distributions of fsync called by WAL.",
			Buckets: buckets,
		}),
		WriteDuration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "etcd_disk_wal_write_duration_seconds",
			Help:    "The latency distributions of write called by WAL.",
			Buckets: buckets,
		}),
		WriteBytes: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "etcd_disk_wal_write_bytes_total",
			Help: "Total number of bytes written in WAL.",
		}),
	}
}

// Collectors lists the metrics for registration.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.FsyncDuration, m.WriteDuration, m.WriteBytes}
}
