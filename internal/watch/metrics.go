package watch

import "github.com/prometheus/client_golang/prometheus"

// Metrics are etcd's watch metrics. The server registers them; the send loop
// histograms are fed by whoever writes to clients.
type Metrics struct {
	Streams  prometheus.Gauge
	Watchers prometheus.Gauge
	// Slow is how many watchers catch up.
	Slow prometheus.Gauge
	// Events counts events handed to sinks, once per watcher.
	Events prometheus.Counter
	// Pending is how many of them have not been written to their client.
	Pending prometheus.Gauge

	// How long it took to write a response with events, the same divided by
	// their number, a created or canceled response, and a progress notice.
	SendEvents, SendPerEvent, SendControl, SendProgress prometheus.Histogram
}

// NewMetrics returns metrics that are not registered.
func NewMetrics() *Metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "etcd_debugging", Subsystem: "mvcc", Name: name, Help: help})
	}
	histogram := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "etcd_debugging", Subsystem: "server", Name: "watch_send_loop_" + name, Help: help,
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		})
	}
	return &Metrics{
		Streams:  gauge("watch_stream_total", "Total number of watch streams."),
		Watchers: gauge("watcher_total", "Total number of watchers."),
		Slow:     gauge("slow_watcher_total", "Total number of watchers that are catching up."),
		Events: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "etcd_debugging", Subsystem: "mvcc", Name: "events_total", Help: "Total number of events sent to watchers.",
		}),
		Pending:      gauge("pending_events_total", "Total number of events queued and not yet written."),
		SendEvents:   histogram("watch_stream_duration_seconds", "The time to write a watch response with events."),
		SendPerEvent: histogram("watch_stream_duration_per_event_seconds", "The time to write a watch response, per event in it."),
		SendControl:  histogram("control_stream_duration_seconds", "The time to write a created or canceled response."),
		SendProgress: histogram("progress_duration_seconds", "The time to write a progress notice."),
	}
}

// Collectors returns all metrics, to be registered.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		m.Streams, m.Watchers, m.Slow, m.Events, m.Pending,
		m.SendEvents, m.SendPerEvent, m.SendControl, m.SendProgress,
	}
}

// observe sets what is cheaper to set now and then than to count.
func (h *Hub) observe() {
	h.opts.Metrics.Slow.Set(float64(h.count - h.live.count))
}
