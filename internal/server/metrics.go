package server

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/peer"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/watch"
	"github.com/engram-kv/engram/internal/web"
)

// metrics holds every package's metrics and the registry that shows them.
type metrics struct {
	registry  *prometheus.Registry
	raftlog   *raftlog.Metrics
	peer      *peer.Metrics
	consensus *consensus.Metrics
	lease     *lease.Metrics
	watch     *watch.Metrics
	rpc       *rpc.Metrics
	grpc      *grpcserver.Metrics
	web       *web.Metrics
	store     *storeMetrics

	promotions *promotionMetrics
}

// storeMetrics time what is done to the store. The names are of etcd's bbolt;
// what is timed is its like here.
type storeMetrics struct {
	commit, defrag, hash, hashRevision prometheus.Histogram
	slowApplies                        prometheus.Counter
	defragging                         prometheus.Gauge
	snapshot                           prometheus.Histogram
	quota                              *quotaMetrics
	check                              *checkMetrics
	apply                              *applyMetrics
	keys                               *mvcc.Metrics
}

func newStoreMetrics() *storeMetrics {
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
	}
	hundredths := prometheus.ExponentialBuckets(0.01, 2, 15)
	return &storeMetrics{
		commit:       histogram("etcd_disk_backend_commit_duration_seconds", "The time that one batch of log entries takes to be run and committed to the store.", prometheus.ExponentialBuckets(0.001, 2, 14)),
		defrag:       histogram("etcd_disk_backend_defrag_duration_seconds", "The time that giving space back to the disk takes. Nothing waits for it.", prometheus.ExponentialBuckets(0.1, 2, 13)),
		hash:         histogram("etcd_mvcc_hash_duration_seconds", "The latency distribution of storage hash operation.", hundredths),
		hashRevision: histogram("etcd_mvcc_hash_rev_duration_seconds", "The latency distribution of storage hash by revision operation.", hundredths),
		slowApplies:  prometheus.NewCounter(prometheus.CounterOpts{Name: "etcd_server_slow_apply_total", Help: "The number of batches of log entries that took longer to run than --warning-apply-duration."}),
		defragging:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "etcd_disk_defrag_inflight", Help: "1 while space is given back to the disk."}),
		snapshot:     histogram("etcd_disk_backend_snapshot_duration_seconds", "The time that a backup takes until its last byte was handed to the client's connection.", prometheus.ExponentialBuckets(0.01, 2, 17)),
		quota:        newQuotaMetrics(), check: newCheckMetrics(), apply: newApplyMetrics(), keys: mvcc.NewMetrics(),
	}
}

func (s *storeMetrics) collectors() []prometheus.Collector {
	return append(s.keys.Collectors(), s.commit, s.defrag, s.hash, s.hashRevision, s.slowApplies, s.defragging, s.snapshot, s.quota.warnings, s.check.checks, s.apply)
}

func newMetrics(cfg *config.Config) *metrics {
	return &metrics{
		registry: prometheus.NewRegistry(),
		raftlog:  raftlog.NewMetrics(), peer: peer.NewMetrics(), consensus: consensus.NewMetrics(), lease: lease.NewMetrics(),
		watch: watch.NewMetrics(), rpc: rpc.NewMetrics(cfg.Metrics == "extensive"), grpc: grpcserver.NewMetrics(), web: web.NewMetrics(),
		store: newStoreMetrics(), promotions: newPromotionMetrics(),
	}
}

// register makes all metrics visible, those of the member itself included.
func (m *metrics) register(member *Member) error {
	for _, r := range []interface {
		Register(prometheus.Registerer) error
	}{m.lease, m.rpc, m.web} {
		if err := r.Register(m.registry); err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
	}
	all := []prometheus.Collector{
		m.consensus, m.grpc, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	}
	all = append(all, m.raftlog.Collectors()...)
	all = append(all, m.peer.Collectors()...)
	all = append(all, m.watch.Collectors()...)
	all = append(all, m.store.collectors()...)
	all = append(all, m.promotions.collectors()...)
	all = append(all, member.collectors()...)
	for _, c := range all {
		if err := m.registry.Register(c); err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
	}
	return nil
}

// collectors are the figures that are read off the member when asked for.
func (m *Member) collectors() []prometheus.Collector {
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	one := func(name, help, label, value string) prometheus.Collector {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, []string{label})
		g.WithLabelValues(value).Set(1)
		return g
	}
	counter := func(name, help string, f func(state.Counts) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(f(m.machine().Counts())) })
	}
	usage := func() float64 { return float64(m.Status().UsageBytes) }
	out := []prometheus.Collector{
		one("etcd_server_version", "Which version is running: etcd's that this member is compatible with.", "server_version", config.EtcdVersion),
		one("engram_server_version", "Which version of Engram is running.", "server_version", config.Version),
		one("etcd_server_go_version", "Which Go version the server was built with.", "server_go_version", runtime.Version()),
		one("etcd_server_id", "The member's id in hexadecimal.", "server_id", fmt.Sprintf("%x", m.id.member)),
		gauge("etcd_server_quota_backend_bytes", "The quota in force, in bytes.", func() float64 { return float64(m.cfg.Quota()) }),
		gauge("engram_quota_used_ratio", "The share of the quota that is used; 0 without a quota.", m.quotaUsed),
		gauge("etcd_mvcc_db_total_size_in_bytes", "What the store's files occupy on disk, or what is in use if that is more and not flushed yet.", func() float64 { return float64(m.Status().SizeBytes) }),
		gauge("etcd_mvcc_db_total_size_in_use_in_bytes", "What lives in the store: values and the history that is kept.", usage),
		gauge("etcd_debugging_mvcc_keys_total", "The number of live keys.", func() float64 { return float64(m.machine().Root().Keys()) }),
		gauge("etcd_debugging_mvcc_current_revision", "The store's newest revision.", func() float64 { return float64(m.machine().Root().Revision()) }),
		gauge("etcd_debugging_mvcc_compact_revision", "The revision below which history is gone.", func() float64 { return float64(m.machine().Root().CompactRevision()) }),
		counter("etcd_mvcc_put_total", "The number of keys put.", func(c state.Counts) int64 { return c.Puts }),
		counter("etcd_mvcc_delete_total", "The number of keys deleted.", func(c state.Counts) int64 { return c.Deletes }),
		counter("etcd_mvcc_txn_total", "The number of write transactions.", func(c state.Counts) int64 { return c.Txns }),
		gauge("etcd_debugging_mvcc_total_put_size_in_bytes", "The size of all puts since the start.", func() float64 { return float64(m.machine().Counts().PutBytes) }),
		gauge("etcd_debugging_auth_revision", "The revision of the auth tables.", func() float64 {
			a, _, _ := m.machine().Tables()
			return float64(a.Revision())
		}),
		gauge("engram_cluster_feature_level", "From 1 on every member is an Engram, and the cluster may do what etcd does not.", func() float64 { return float64(m.root().FeatureLevel()) }),
		gauge("engram_disk_writes_refused", "1 while writes are refused because the disk is nearly full.", func() float64 {
			if m.guards.Gate() != nil {
				return 1
			}
			return 0
		}),
		gauge("engram_pace_share", "The share of their full pace that backups, snapshots for members and giving space back have now: below 1 they wait for the syncs of the raft log.", m.pace.Share),
		gauge("os_fd_used", "Open file descriptors.", openFiles),
		gauge("os_fd_limit", "Limit of open file descriptors.", fileLimit),
		alarmCollector{m}, versionCollector{m},
	}
	features := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "etcd_server_feature_enabled", Help: "Whether a feature gate is on."}, []string{"name", "stage"})
	for _, g := range m.cfg.FeatureGates.List() {
		on := 0.0
		if g.On {
			on = 1
		}
		features.WithLabelValues(g.Name, strings.ToUpper(g.Stage)).Set(on)
	}
	return append(out, features)
}

func openFiles() float64 {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return float64(len(names))
}

func fileLimit() float64 {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return 0
	}
	return float64(r.Cur)
}

// versionCollector shows the version that the cluster agreed on.
type versionCollector struct{ m *Member }

var versionDesc = prometheus.NewDesc("etcd_cluster_version", "Which version the cluster agreed on.", []string{"cluster_version"}, nil)

// Describe implements prometheus.Collector.
func (versionCollector) Describe(c chan<- *prometheus.Desc) { c <- versionDesc }

// Collect implements prometheus.Collector.
func (v versionCollector) Collect(c chan<- prometheus.Metric) {
	if version := v.m.root().Version(); version != "" {
		c <- prometheus.MustNewConstMetric(versionDesc, prometheus.GaugeValue, 1, minorOf(version))
	}
}

// alarmCollector shows the alarms that are on.
type alarmCollector struct{ m *Member }

var alarmDesc = prometheus.NewDesc("etcd_debugging_server_alarms", "Alarms by member and type.", []string{"server_id", "alarm_type"}, nil)

// Describe implements prometheus.Collector.
func (alarmCollector) Describe(c chan<- *prometheus.Desc) { c <- alarmDesc }

// Collect implements prometheus.Collector.
func (a alarmCollector) Collect(c chan<- prometheus.Metric) {
	_, _, alarms := a.m.machine().Tables()
	for _, al := range alarms.List(pb.AlarmType_NONE) {
		c <- prometheus.MustNewConstMetric(alarmDesc, prometheus.GaugeValue, 1, fmt.Sprintf("%x", al.Member), al.Type.String())
	}
}
