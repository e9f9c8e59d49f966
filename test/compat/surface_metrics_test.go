package compat

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// family is one metric as a page of metrics shows it.
type family struct {
	kind    string              // counter, gauge, histogram
	labels  map[string][]string // label to its values, sorted
	buckets []string            // bounds of a histogram
}

func (f *family) String() string {
	names := make([]string, 0, len(f.labels))
	for name := range f.labels {
		names = append(names, name)
	}
	slices.Sort(names)
	return fmt.Sprintf("%s {%s} %s", f.kind, strings.Join(names, ","), strings.Join(f.buckets, " "))
}

var labelPair = regexp.MustCompile(`([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"`)

// scrape reads the metrics of a member.
func scrape(ctx context.Context, t *testing.T, url string) map[string]*family {
	t.Helper()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	families := make(map[string]*family)
	var f *family
	s := bufio.NewScanner(answer.Body)
	for s.Scan() {
		if typed, ok := strings.CutPrefix(s.Text(), "# TYPE "); ok {
			name, kind, _ := strings.Cut(typed, " ")
			f = &family{kind: kind, labels: make(map[string][]string)}
			families[name] = f
			continue
		}
		if strings.HasPrefix(s.Text(), "#") || f == nil {
			continue
		}
		for _, pair := range labelPair.FindAllStringSubmatch(s.Text(), -1) {
			into := f.labels[pair[1]]
			if pair[1] == "le" {
				into = f.buckets
			}
			if !slices.Contains(into, pair[2]) {
				into = append(into, pair[2])
			}
			if pair[1] == "le" {
				f.buckets = into
			} else {
				slices.Sort(into)
				f.labels[pair[1]] = into
			}
		}
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return families
}

// unprovoked have no series, and so no line at all, until a stream breaks or a snapshot fails.
var unprovoked = []string{
	"etcd_network_server_stream_failures_total",
	"etcd_network_snapshot_send_failures", "etcd_network_snapshot_receive_failures",
}

// TestMetricNames has both programs do some of everything, alone and as members of a cluster, then compares their metrics: names,
// types, labels and buckets. The page says which ones are not here. A metric with labels is on no page of metrics before it has a
// series, so those of what only members of a cluster do are not there without one.
func TestMetricNames(t *testing.T) {
	pair, ctx := surfacePair(t, "--metrics=extensive"), surfaceContext(t)
	var pages [2]map[string]*family
	if err := pair.Each(func(i int, s *process.Side) error { return someOfEverything(ctx, s) }); err != nil {
		t.Fatal(err)
	}
	for i, s := range pair {
		pages[i] = scrape(ctx, t, s.ClientURL)
	}
	for i, p := range []cluster.Program{{Name: "etcd", Path: programs.Etcd}, {Name: "subject", Path: subject}} {
		for _, page := range clusterMetrics(ctx, t, p) {
			add(pages[i], page)
		}
	}
	if programs.Engram == "" {
		return // etcd has no page
	}
	lines := areaOf(t, "metric")
	for name, theirs := range pages[0] {
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "promhttp_") {
			continue // of the libraries, which differ in version
		}
		line, named := lines[name]
		ours := pages[1][name]
		switch {
		case !named:
			t.Errorf("%s: etcd has it, and it is not on the page", name)
		case line.status == absent && ours != nil:
			t.Errorf("%s is absent by the page, and is here", name)
		case line.status != absent && ours == nil && !slices.Contains(unprovoked, name):
			t.Errorf("%s is here by the page, and is absent", name)
		case line.status == passes && ours != nil && theirs.String() != ours.String():
			t.Errorf("%s\netcd:    %s\nsubject: %s", name, theirs, ours)
		}
	}
	for name, line := range lines {
		if pages[0][name] == nil && line.status != absent && pages[1][name] == nil && !slices.Contains(unprovoked, name) {
			t.Errorf("%s is here by the page, and neither program has it", name)
		}
		if line.status == absent && pages[1][name] != nil {
			t.Errorf("%s is absent by the page, and is here", name)
		}
	}
	// An alert on the rate of a method's failures needs its series from the start.
	for _, name := range []string{"grpc_server_started_total", "grpc_server_handled_total", "grpc_server_handling_seconds"} {
		for _, label := range []string{"grpc_service", "grpc_method", "grpc_code"} {
			for _, value := range pages[0][name].labels[label] {
				if !slices.Contains(pages[1][name].labels[label], value) {
					t.Errorf("%s has no series with %s=%q", name, label, value)
				}
			}
		}
	}
}

// add puts the families of a page to those that are there, or their labels' values.
func add(all, page map[string]*family) {
	for name, f := range page {
		have := all[name]
		if have == nil || len(have.labels) == 0 && len(have.buckets) == 0 {
			all[name] = f
			continue
		}
		for label, values := range f.labels {
			have.labels[label] = append(have.labels[label], values...)
			slices.Sort(have.labels[label])
			have.labels[label] = slices.Compact(have.labels[label])
		}
	}
}

// clusterMetrics has a cluster of three do what only clusters do: one that begins alone sends the others snapshots, all measure the way
// to one another, and the last one goes away. It returns the metrics of each member.
func clusterMetrics(ctx context.Context, t *testing.T, p cluster.Program) (pages []map[string]*family) {
	t.Helper()
	c := newCluster(t, "--snapshot-count=100", "--snapshot-catchup-entries=10", "--unsafe-no-fsync")
	check(t, c.Start(ctx, p))
	first := c.Members()[0]
	put := func() {
		t.Helper()
		client, err := first.Client()
		check(t, err)
		for range 300 {
			_, err := client.Put(ctx, "k", "v")
			check(t, err)
		}
	}
	put()
	check(t, first.Stop()) // so that all of that is durable in the store, and the log can be cut
	check(t, first.Restart(ctx))
	put()
	second, err := c.Add(ctx, p, true)
	check(t, err)
	check(t, c.Promote(ctx, second))
	client, err := first.Client()
	check(t, err)
	if _, err := client.MemberPromote(ctx, second.ID); err == nil {
		t.Fatal("a voter is promoted")
	}
	third, err := c.Add(ctx, p, false)
	check(t, err)
	wasSnapshot(t, second)

	has := func(m *cluster.Member, names ...string) {
		t.Helper()
		check(t, eventually(ctx, "metrics of "+m.Name, func() error {
			page := scrape(ctx, t, m.ClientURL)
			for _, name := range names {
				if page[name] == nil {
					return fmt.Errorf("there is no %s", name)
				}
			}
			return nil
		}))
	}
	for _, m := range c.Members() {
		has(m, "etcd_network_active_peers", "etcd_network_peer_round_trip_time_seconds", "etcd_network_peer_sent_bytes_total", "etcd_network_peer_received_bytes_total")
	}
	pages = append(pages, scrape(ctx, t, third.ClientURL))
	check(t, third.Kill())
	leader, err := c.LeaderOf(ctx, first, second)
	check(t, err)
	has(leader, "etcd_network_peer_sent_failures_total") // it alone has anything to say to the one that is gone
	for _, m := range []*cluster.Member{first, second} {
		has(m, "etcd_network_disconnected_peers_total")
		pages = append(pages, scrape(ctx, t, m.ClientURL))
	}
	return pages
}

// TestLateHeartbeats has leaders stand still for less than an election takes. Their next heartbeats are late, and counted by both programs.
func TestLateHeartbeats(t *testing.T) {
	const name = "etcd_server_heartbeat_send_failures_total"
	for _, p := range []cluster.Program{{Name: "etcd", Path: programs.Etcd}, {Name: "subject", Path: subject}} {
		t.Run(p.Name, func(t *testing.T) {
			ctx := surfaceContext(t)
			c := newCluster(t, "--election-timeout=5000")
			check(t, c.Start(ctx, p, p, p))
			leader, err := c.Leader(ctx)
			check(t, err)
			late := func() float64 {
				t.Helper()
				value, err := sample(ctx, leader.ClientURL, name)
				check(t, err)
				return value
			}
			before := late()
			check(t, leader.Pause())
			<-time.After(time.Second) // the time is what is tested
			check(t, leader.Continue())
			check(t, eventually(ctx, "late heartbeat counted", func() error {
				if now := late(); now == before {
					return fmt.Errorf("%s is still %v", name, now)
				}
				return nil
			}))
			if still, err := c.Leader(ctx); err != nil || still != leader {
				t.Errorf("%v leads, %v: want %v, or nobody knows whose heartbeats were late", still, err, leader)
			}
		})
	}
}

// sample reads the value of a metric without labels.
func sample(ctx context.Context, url, name string) (float64, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	for s := bufio.NewScanner(answer.Body); s.Scan(); {
		if value, ok := strings.CutPrefix(s.Text(), name+" "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, fmt.Errorf("%s/metrics has no %s", url, name)
}

// someOfEverything makes requests of every kind that both programs serve, so that the series they leave are there.
func someOfEverything(ctx context.Context, s *process.Side) error {
	kv, leases := etcdserverpb.NewKVClient(s.Conn()), etcdserverpb.NewLeaseClient(s.Conn())
	maintenance := etcdserverpb.NewMaintenanceClient(s.Conn())
	w, err := etcdserverpb.NewWatchClient(s.Conn()).Watch(ctx)
	if err != nil {
		return err
	}
	if err := w.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{
		CreateRequest: &etcdserverpb.WatchCreateRequest{Key: []byte("a")}}}); err != nil {
		return err
	}
	if _, err := w.Recv(); err != nil {
		return err
	}
	granted, err := leases.LeaseGrant(ctx, &etcdserverpb.LeaseGrantRequest{TTL: 60})
	if err != nil {
		return err
	}
	a := []byte("a")
	put := &etcdserverpb.PutRequest{Key: a, Value: a, Lease: granted.ID}
	if _, err := kv.Put(ctx, put); err != nil {
		return err
	}
	if _, err := w.Recv(); err != nil { // its event
		return err
	}
	alive, err := leases.LeaseKeepAlive(ctx)
	if err != nil {
		return err
	}
	if err := alive.Send(&etcdserverpb.LeaseKeepAliveRequest{ID: granted.ID}); err != nil {
		return err
	}
	if _, err := alive.Recv(); err != nil {
		return err
	}
	read := &etcdserverpb.RangeRequest{Key: a}
	if _, err := kv.Range(ctx, read); err != nil {
		return err
	}
	if _, err := kv.Range(ctx, &etcdserverpb.RangeRequest{Key: a, Revision: 999}); err == nil {
		return fmt.Errorf("a future revision can be read")
	}
	chunks, err := kv.RangeStream(ctx, read)
	if err != nil {
		return err
	}
	if _, err := chunks.Recv(); err != nil {
		return err
	}
	for _, op := range []*etcdserverpb.RequestOp{
		{Request: &etcdserverpb.RequestOp_RequestRange{RequestRange: read}},
		{Request: &etcdserverpb.RequestOp_RequestPut{RequestPut: put}},
	} {
		if _, err := kv.Txn(ctx, &etcdserverpb.TxnRequest{Success: []*etcdserverpb.RequestOp{op}}); err != nil {
			return err
		}
	}
	if _, err := leases.LeaseRevoke(ctx, &etcdserverpb.LeaseRevokeRequest{ID: granted.ID}); err != nil {
		return err
	}
	d, err := kv.DeleteRange(ctx, &etcdserverpb.DeleteRangeRequest{Key: a})
	if err != nil {
		return err
	}
	if _, err := kv.Compact(ctx, &etcdserverpb.CompactionRequest{Revision: d.Header.Revision, Physical: true}); err != nil {
		return err
	}
	if _, err := maintenance.HashKV(ctx, &etcdserverpb.HashKVRequest{}); err != nil {
		return err
	}
	if _, err := maintenance.Hash(ctx, &etcdserverpb.HashRequest{}); err != nil {
		return err
	}
	if _, err := maintenance.Defragment(ctx, &etcdserverpb.DefragmentRequest{}); err != nil {
		return err
	}
	alarm := &etcdserverpb.AlarmRequest{Action: etcdserverpb.AlarmRequest_ACTIVATE, MemberID: s.Names.Member, Alarm: etcdserverpb.AlarmType_NOSPACE}
	if _, err := maintenance.Alarm(ctx, alarm); err != nil {
		return err
	}
	for _, path := range []string{"/health", "/livez", "/readyz"} {
		r, err := http.Get(s.ClientURL + path)
		if err != nil {
			return err
		}
		r.Body.Close()
	}
	return nil
}
