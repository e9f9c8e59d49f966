package consensus

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the series of this package: etcd's under their names, and how fast the members' disks are under ours. It is a prometheus.Collector: the server registers it.
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
	HeartbeatsLate     prometheus.Counter
	SnapshotApplying   prometheus.Gauge
	PersistLatency     prometheus.Gauge
	AckLatency         *prometheus.GaugeVec
	all                []prometheus.Collector
	acks               int // series of AckLatency
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
	m.HeartbeatsLate = counter("heartbeat_send_failures_total", "The number of heartbeats that this member, leading, sent more than two intervals after the one before: it, or its disk, is overloaded.")
	m.SnapshotApplying = gauge("snapshot_apply_in_progress_total", "1 while a snapshot that came from the leader takes the place of the state, 0 otherwise.")
	m.PersistLatency = prometheus.NewGauge(prometheus.GaugeOpts{Name: "engram_raft_persist_latency_seconds",
		Help: "How long the raft log of this member takes to store entries, smoothed, and at least as long as the present write has taken."})
	m.AckLatency = prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "engram_raft_ack_latency_seconds",
		Help: "On a leader, how long a member takes to acknowledge entries, smoothed, and at least as long as it has taken for those sent to it."},
		[]string{"To"})
	m.all = append(m.all, m.PersistLatency, m.AckLatency)
	return m
}

// observe shows how fast this member's disk is, and those of the others, if it leads them.
func (m *Metrics) observe(persist time.Duration, self uint64, members []Progress) {
	m.PersistLatency.Set(persist.Seconds())
	if members == nil && m.acks == 0 {
		return
	}
	m.AckLatency.Reset()
	m.acks = 0
	for i := range members {
		if p := &members[i]; p.ID != self {
			m.AckLatency.WithLabelValues(fmt.Sprintf("%x", p.ID)).Set(p.AckLatency.Seconds())
			m.acks++
		}
	}
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
