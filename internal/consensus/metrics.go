package consensus

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the series of this package, under etcd's names. It is a prometheus.Collector: the server registers it.
type Metrics struct {
	HasLeader          prometheus.Gauge
	IsLeader           prometheus.Gauge
	IsLearner          prometheus.Gauge
	LeaderChanges      prometheus.Counter
	ProposalsCommitted prometheus.Gauge
	ProposalsApplied   prometheus.Gauge
	ProposalsPending   prometheus.Gauge
	ProposalsFailed    prometheus.Counter
	SlowReadIndexes    prometheus.Counter
	ReadIndexesFailed  prometheus.Counter
	all                []prometheus.Collector
}

// NewMetrics returns series that stand at zero and are registered nowhere.
func NewMetrics() *Metrics {
	m := &Metrics{}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "etcd", Subsystem: "server", Name: name, Help: help})
		m.all = append(m.all, g)
		return g
	}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Namespace: "etcd", Subsystem: "server", Name: name, Help: help})
		m.all = append(m.all, c)
		return c
	}
	m.HasLeader = gauge("has_leader", "Whether or not a leader exists. 1 is existence, 0 is not.")
	m.IsLeader = gauge("is_leader", "Whether or not this member is a leader. 1 if is, 0 otherwise.")
	m.IsLearner = gauge("is_learner", "Whether or not this member is a learner. 1 if is, 0 otherwise.")
	m.LeaderChanges = counter("leader_changes_seen_total", "The number of leader changes seen.")
	m.ProposalsCommitted = gauge("proposals_committed_total", "The total number of consensus proposals committed.")
	m.ProposalsApplied = gauge("proposals_applied_total", "The total number of consensus proposals applied.")
	m.ProposalsPending = gauge("proposals_pending", "The current number of pending proposals to commit.")
	m.ProposalsFailed = counter("proposals_failed_total", "The total number of failed proposals seen.")
	m.SlowReadIndexes = counter("slow_read_indexes_total", "The total number of pending read indexes not in sync with leader's or timed out read index requests.")
	m.ReadIndexesFailed = counter("read_indexes_failed_total", "The total number of failed read indexes seen.")
	return m
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all {
		c.Collect(ch)
	}
}
