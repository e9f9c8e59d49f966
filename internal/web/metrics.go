package web

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what probes were told.
type Metrics struct {
	healthOK, healthFailed prometheus.Counter
	last                   *prometheus.GaugeVec
	checks                 *prometheus.CounterVec
}

// NewMetrics returns the metrics.
func NewMetrics() *Metrics {
	return &Metrics{
		healthOK: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "etcd_server_health_success", Help: "The total number of successful health checks"}),
		healthFailed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "etcd_server_health_failures", Help: "The total number of failed health checks"}),
		last: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "etcd_server_healthcheck", Help: "The result of each kind of healthcheck."}, []string{"type", "name"}),
		checks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "etcd_server_healthchecks_total", Help: "The total number of each kind of healthcheck."}, []string{"type", "name", "status"}),
	}
}

// Register adds the metrics to a registry.
func (m *Metrics) Register(r prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{m.healthOK, m.healthFailed, m.last, m.checks} {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}

// checked counts the result of one check of a probe.
func (m *Metrics) checked(probe, name string, err error) {
	result, status := 1.0, "success"
	if err != nil {
		result, status = 0, "error"
	}
	m.last.WithLabelValues(probe, name).Set(result)
	m.checks.WithLabelValues(probe, name, status).Inc()
}
