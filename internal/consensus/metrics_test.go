package consensus

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestMetricsBearEtcdsNames(t *testing.T) {
	reg := prometheus.NewRegistry()
	if err := reg.Register(NewMetrics()); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range families {
		got[f.GetName()] = f.GetType().String()
	}
	want := map[string]string{
		"etcd_server_has_leader": "GAUGE", "etcd_server_is_leader": "GAUGE", "etcd_server_is_learner": "GAUGE",
		"etcd_server_leader_changes_seen_total": "COUNTER", "etcd_server_proposals_committed_total": "GAUGE",
		"etcd_server_proposals_applied_total": "GAUGE", "etcd_server_proposals_pending": "GAUGE",
		"etcd_server_proposals_failed_total": "COUNTER", "etcd_server_slow_read_indexes_total": "COUNTER",
		"etcd_server_read_indexes_failed_total": "COUNTER", "etcd_server_heartbeat_send_failures_total": "COUNTER",
		"etcd_server_snapshot_apply_in_progress_total": "GAUGE", "engram_raft_persist_latency_seconds": "GAUGE",
	}
	for name, typ := range want {
		if got[name] != typ {
			t.Errorf("%s is %q, want %s", name, got[name], typ)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d series, want %d: %v", len(got), len(want), got)
	}
}

func TestRaftLogger(t *testing.T) {
	var b bytes.Buffer
	l := raftLogger{slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelInfo}))}
	l.Infof("election %d", 1)
	if b.Len() != 0 {
		t.Fatalf("an Info of raft is shown: %s", &b)
	}
	l.Warningf("quorum %s", "lost")
	l.Error("a", "b")
	for _, want := range []string{"level=WARN", "quorum lost", "level=ERROR", "ab"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in %q", want, &b)
		}
	}
	for name, f := range map[string]func(){
		"Panic": func() { l.Panic("x") }, "Panicf": func() { l.Panicf("%d", 1) },
		"Fatal": func() { l.Fatal("x") }, "Fatalf": func() { l.Fatalf("%d", 1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s returned", name)
				}
			}()
			f()
		}()
	}
}
