package lease

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what happens to leases, under etcd's names. Grants and
// revocations count on every member, renewals and expiries on the primary.
type Metrics struct {
	granted, revoked, renewed, expired prometheus.Counter
	ttls                               prometheus.Histogram
}

// NewMetrics makes metrics that start at 0.
func NewMetrics() *Metrics {
	counter := func(subsystem, name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: "etcd_debugging", Subsystem: subsystem, Name: name, Help: help,
		})
	}
	return &Metrics{
		granted: counter("lease", "granted_total", "The total number of granted leases."),
		revoked: counter("lease", "revoked_total", "The total number of revoked leases."),
		renewed: counter("lease", "renewed_total", "The number of renewed leases seen by the leader."),
		expired: counter("server", "lease_expired_total", "The total number of expired leases."),
		ttls: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "etcd_debugging", Subsystem: "lease", Name: "ttl_total",
			Help: "Bucketed histogram of lease TTLs, in seconds.",
			// 1 s to 3 months.
			Buckets: prometheus.ExponentialBuckets(1, 2, 24),
		}),
	}
}

// Register makes the metrics visible. It fails if another Metrics is registered.
func (m *Metrics) Register(r prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{m.granted, m.revoked, m.renewed, m.expired, m.ttls} {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}
