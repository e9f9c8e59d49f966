package ctl

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/inspectpb"
)

// wellSurvey is what is learned of a well cluster of Engrams a, b, ... of which a leads.
func wellSurvey(members int) *survey {
	s := &survey{now: time.Unix(1_800_000_000, 0), tool: "engram ctl", authOn: new(true), total: &inspectpb.Measure{Keys: 10, Bytes: 1000}}
	for i := range members {
		id := uint64(0x11 + i)
		name := string(rune('a' + i))
		r := &reach{endpoint: "http://" + name + ":2379", address: name + ":2379", host: name, usable: true}
		s.reached = append(s.reached, r)
		s.members = append(s.members, &memberReport{
			member: &pb.Member{ID: id, Name: name, ClientURLs: []string{r.endpoint}, PeerURLs: []string{"http://" + name + ":2380"}}, id: id, name: name, endpoint: r.endpoint, reach: r,
			client: &clientv3.Client{}, engram: true, metrics: metricSet{}, clock: &clockReading{0, time.Millisecond},
			hash: &pb.HashKVResponse{Hash: 7, CompactRevision: 5, HashRevision: 50},
			status: &pb.StatusResponse{
				Header:  &pb.ResponseHeader{ClusterId: 0xc1, MemberId: id, Revision: 50, RaftTerm: 3},
				Version: "3.7.3", Leader: 0x11, RaftIndex: 10_000, RaftAppliedIndex: 10_000, DbSize: 2 << 20, DbSizeInUse: 1 << 20, DbSizeQuota: 8 << 30,
			},
		})
	}
	return s
}

// away takes the last n members off the network.
func (s *survey) away(n int) {
	for _, m := range s.members[len(s.members)-n:] {
		m.client, m.status, m.metrics, m.clock, m.hash = nil, nil, nil, nil, nil
		m.reach.usable = false
		m.reach.found(failure, "refused", "nothing listens at "+m.reach.address, "connection refused", "start it")
	}
}

// metricsOf parses what a member would show.
func metricsOf(t *testing.T, text string) metricSet {
	t.Helper()
	f := newFake()
	f.metrics = text
	p := &prober{flags: &globalFlags{}, timeout: 5 * time.Second, now: time.Now}
	r := p.look(t.Context(), f.serve(t, nil))
	m, err := p.scrape(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// TestMetricsElsewhere has a member that serves metrics at a port of their own, beside that of another member.
func TestMetricsElsewhere(t *testing.T) {
	serve := func(id string) string {
		return "http://" + serveHTTP(t, nil, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/metrics" {
				fmt.Fprintf(w, "# TYPE etcd_server_id gauge\netcd_server_id{server_id=%q} 1\n", id)
			}
		})
	}
	other, own := serve("12"), serve("11")
	client := serveHTTP(t, nil, func(w http.ResponseWriter, r *http.Request) { http.NotFound(w, r) })
	p := &prober{flags: &globalFlags{}, timeout: 5 * time.Second, now: time.Now}
	m := &memberReport{id: 0x11, reach: &reach{endpoint: client, network: "tcp", address: client}}
	m.reach.setBase()
	found, err := p.memberMetrics(t.Context(), m, []string{other, "http://" + deadAddress(t), own})
	if err != nil || found.label("etcd_server_id", "server_id") != "11" {
		t.Errorf("%v, %v", found, err)
	}
	if found, err := p.memberMetrics(t.Context(), m, []string{other}); err == nil || found != nil || !strings.Contains(err.Error(), "status 404") {
		t.Errorf("another member's: %v, %v", found, err)
	}
}

// histogram is one in the text form of metrics, with n observations below a bound.
func histogram(name string, bound string, n int) string {
	return fmt.Sprintf("# TYPE %[1]s histogram\n%[1]s_bucket{le=\"0.001\"} 0\n%[1]s_bucket{le=\"%[2]s\"} %[3]d\n%[1]s_bucket{le=\"+Inf\"} %[3]d\n%[1]s_sum 1\n%[1]s_count %[3]d\n", name, bound, n)
}

// TestFindings judges surveys in which something is wrong; the word in the script chooses it.
func TestFindings(t *testing.T) {
	conditions := map[string]func() *survey{
		"well":  func() *survey { return wellSurvey(3) },
		"alone": func() *survey { return wellSurvey(1) },
		"even":  func() *survey { return wellSurvey(4) },
		"endangered": func() *survey {
			s := wellSurvey(3)
			s.away(1)
			return s
		},
		"one-of-five-away": func() *survey {
			s := wellSurvey(5)
			s.away(1)
			return s
		},
		"quorum-lost": func() *survey {
			s := wellSurvey(3)
			s.away(2)
			s.members[0].status.Leader, s.quorumErr = 0, rpctypes.ErrTimeout
			return s
		},
		"unstarted": func() *survey {
			s := wellSurvey(3)
			m := s.members[2]
			s.reached = s.reached[:2]
			*m = memberReport{id: m.id, member: &pb.Member{ID: m.id, PeerURLs: m.member.PeerURLs}}
			return s
		},
		"client-url": func() *survey {
			s := wellSurvey(3)
			s.members[2].stranger, s.members[2].client, s.members[2].status = 0x11, nil, nil
			return s
		},
		"leaders-differ": func() *survey {
			s := wellSurvey(3)
			s.members[2].status.Leader = 0x13
			return s
		},
		"clusters-differ": func() *survey {
			s := wellSurvey(2)
			s.members[1].status.Header.ClusterId = 0xc2
			return s
		},
		"versions": func() *survey {
			s := wellSurvey(3)
			s.members[1].status.Version, s.members[1].engram = "3.6.5", false
			s.members[1].status.DowngradeInfo = &pb.DowngradeInfo{Enabled: true, TargetVersion: "3.6"}
			return s
		},
		"nospace": func() *survey {
			s := wellSurvey(3)
			s.alarms = []*pb.AlarmMember{{MemberID: 0x12, Alarm: pb.AlarmType_NOSPACE}}
			s.members[1].status.DbSizeInUse = 8 << 30
			return s
		},
		"corrupt": func() *survey {
			s := wellSurvey(3)
			s.alarms = []*pb.AlarmMember{{MemberID: 0x12, Alarm: pb.AlarmType_CORRUPT}}
			s.members[1].hash.Hash = 8
			return s
		},
		"quota-near": func() *survey {
			s := wellSurvey(3)
			s.members[2].status.DbSizeInUse = 7 << 30
			return s
		},
		"etcd-fragmented": func() *survey {
			s := wellSurvey(3)
			m := s.members[2]
			m.engram, m.status.DbSizeQuota, m.status.DbSize, m.status.DbSizeInUse = false, 0, 1900<<20, 100<<20
			m.metrics = metricsOf(t, "# TYPE etcd_server_quota_backend_bytes gauge\netcd_server_quota_backend_bytes 2.147483648e+09\n")
			return s
		},
		"learners": func() *survey {
			s := wellSurvey(6)
			for _, m := range s.members[3:] {
				m.member.IsLearner, m.status.IsLearner = true, true
			}
			s.members[4].status.RaftAppliedIndex -= 5000
			s.away(1)
			return s
		},
		"lag": func() *survey {
			s := wellSurvey(3)
			s.members[1].status.RaftIndex, s.members[1].status.RaftAppliedIndex = 3000, 3000
			s.members[2].status.RaftAppliedIndex -= 1500
			return s
		},
		"hashes-not-alike": func() *survey {
			s := wellSurvey(3)
			s.members[1].hash.CompactRevision, s.members[1].hash.Hash = 6, 9
			return s
		},
		"clocks": func() *survey {
			s := wellSurvey(3)
			s.members[1].clock = &clockReading{-6 * time.Second, 2 * time.Millisecond}
			return s
		},
		"clock-of-this-machine": func() *survey {
			s := wellSurvey(3)
			for _, m := range s.members {
				m.clock = &clockReading{90 * time.Second, 500 * time.Millisecond}
			}
			return s
		},
		"clock-within-precision": func() *survey {
			s := wellSurvey(3)
			s.members[1].clock = &clockReading{1100 * time.Millisecond, 500 * time.Millisecond}
			return s
		},
		"slow": func() *survey {
			s := wellSurvey(3)
			s.members[0].metrics = metricsOf(t, histogram("etcd_disk_wal_fsync_duration_seconds", "0.016", 1000)+histogram("etcd_network_peer_round_trip_time_seconds", "0.2048", 1000))
			s.members[1].metrics = metricsOf(t, histogram("etcd_disk_wal_fsync_duration_seconds", "0.256", 1000)+histogram("etcd_disk_backend_commit_duration_seconds", "0.064", 1000))
			s.members[2].metrics = metricsOf(t, histogram("etcd_disk_wal_fsync_duration_seconds", "0.256", 10)) // too few to say
			return s
		},
		"leader-changes": func() *survey {
			s := wellSurvey(3)
			s.members[1].metrics = metricsOf(t, fmt.Sprintf("# TYPE etcd_server_leader_changes_seen_total counter\netcd_server_leader_changes_seen_total 13\n# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %d\n"+
				"# TYPE os_fd_used gauge\nos_fd_used 900\n# TYPE os_fd_limit gauge\nos_fd_limit 1024\n", s.now.Add(-4*time.Hour).Unix()))
			return s
		},
		"no-metrics": func() *survey {
			s := wellSurvey(3)
			s.members[1].metrics = nil
			return s
		},
		"keys": func() *survey {
			s := wellSurvey(3)
			row := func(path string, group bool, keys, bytes int64) *inspectpb.UsageRow {
				return &inspectpb.UsageRow{Path: []byte(path), Group: group, Measure: &inspectpb.Measure{Keys: keys, Bytes: bytes}}
			}
			s.largest = []*inspectpb.UsageRow{row("/registry/configmaps/a/big", false, 1, 1_200_000), row("/b", false, 1, 300_000), row("/c", false, 1, 100)}
			s.crowded = []*inspectpb.UsageRow{row("/registry/events/", true, 250_000, 1), row("/registry/pods/", true, 100, 1)}
			s.total = &inspectpb.Measure{Bytes: 50 << 20, HistoryBytes: 200 << 20}
			s.leases = 60_000
			s.members[0].top = &inspectpb.TopResponse{
				Total:    &inspectpb.TopRow{Reads: 4000},
				Prefixes: []*inspectpb.TopRow{{Name: []byte("/registry/leases/"), Reads: 3000}, {Name: []byte("x"), Reads: 1000}},
				Clients:  []*inspectpb.TopRow{{Name: []byte("10.0.0.1"), Reads: 4000}},
			}
			return s
		},
		"etcd-history": func() *survey {
			s := wellSurvey(3)
			s.total = nil
			s.members[0].metrics = metricsOf(t, "# TYPE etcd_debugging_mvcc_current_revision gauge\netcd_debugging_mvcc_current_revision 3e6\n# TYPE etcd_debugging_mvcc_compact_revision gauge\netcd_debugging_mvcc_compact_revision -1\n")
			return s
		},
		"open": func() *survey {
			s := wellSurvey(3)
			s.authOn = new(false)
			return s
		},
		"login": func() *survey {
			s := wellSurvey(3)
			for _, m := range s.members {
				m.status = nil
			}
			s.loginErr = rpctypes.ErrUserEmpty
			return s
		},
		"own-certificate": func() *survey {
			s := wellSurvey(3)
			s.ownCertificate = newAuthority(t, "x").cert
			s.now = s.ownCertificate.NotAfter.Add(-72 * time.Hour)
			return s
		},
		"read-fails": func() *survey {
			s := wellSurvey(3)
			s.quorumErr = errors.New("etcdserver: something new")
			return s
		},
	}
	seen := map[string]bool{}
	datadriven.RunTest(t, "testdata/findings.txt", func(t *testing.T, d *datadriven.TestData) string {
		make := conditions[d.Cmd]
		if make == nil {
			d.Fatalf(t, "no such condition")
		}
		seen[d.Cmd] = true
		s := make()
		findings := s.findings()
		if !slices.IsSortedFunc(findings, func(a, b finding) int { return int(b.Severity - a.Severity) }) {
			t.Errorf("%s: the worst is not first", d.Cmd)
		}
		var b strings.Builder
		for _, f := range findings {
			b.WriteString(f.text())
		}
		for _, text := range s.skipped {
			fmt.Fprintln(&b, "not looked at:", text)
		}
		return masked(b.String()) + fmt.Sprintln("exit code", int(worst(findings)))
	})
	for name := range conditions {
		if !seen[name] && !t.Failed() {
			t.Errorf("%s is not in the script", name)
		}
	}
}
