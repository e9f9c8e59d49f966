package mvcc

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are what a Store counts, under etcd's names. NewMetrics makes them; the
// server registers them, and gives the same ones to every Store of its life.
type Metrics struct {
	// Ranges counts the ranges that were read through views. A stream of chunks is
	// one; a transaction that turns out to need the disk is read, and counted, anew.
	Ranges prometheus.Counter
	// CompactedKeys counts the records that compactions deleted.
	CompactedKeys prometheus.Counter
	// LastCompaction is when the last compaction had deleted all it frees, in
	// seconds since 1970; 0 if none has since the start.
	LastCompaction prometheus.Gauge
	// IndexPause and DeletePause observe each step of a compaction in the index and
	// in the records: the applier waits so long. CompactionTotal observes a whole
	// one, from its first step to its last with all that it waits for between them.
	// All are in milliseconds.
	IndexPause, DeletePause, CompactionTotal prometheus.Histogram
}

// NewMetrics makes metrics that are not registered anywhere.
func NewMetrics() *Metrics {
	histogram := func(name, help string, first float64, buckets int) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "etcd_debugging", Subsystem: "mvcc", Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(first, 2, buckets),
		})
	}
	return &Metrics{
		Ranges: prometheus.NewCounter(prometheus.CounterOpts{Name: "etcd_mvcc_range_total", Help: "The number of ranges read."}),
		CompactedKeys: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "etcd_debugging_mvcc_db_compaction_keys_total", Help: "The number of records that compactions deleted."}),
		LastCompaction: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "etcd_debugging_mvcc_db_compaction_last", Help: "The unix time of the last compaction's end, 0 if there was none since the start."}),
		IndexPause: histogram("index_compaction_pause_duration_milliseconds",
			"How long one step of a compaction in the index keeps entries from being applied.", 0.5, 14), // to 4096 ms
		DeletePause: histogram("db_compaction_pause_duration_milliseconds",
			"How long one step of a compaction in the records keeps entries from being applied.", 1, 13), // to 4096 ms
		CompactionTotal: histogram("db_compaction_total_duration_milliseconds",
			"The time from a compaction's first step to its last.", 100, 14), // to 819200 ms
	}
}

// Collectors lists the metrics for registration.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.Ranges, m.CompactedKeys, m.LastCompaction, m.IndexPause, m.DeletePause, m.CompactionTotal}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
