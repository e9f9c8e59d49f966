package compat

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/test/compat/internal/process"
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

// unprovoked has no series until a stream breaks.
const unprovoked = "etcd_network_server_stream_failures_total"

// TestMetricNames has both programs do some of everything, then compares their metrics: names, types, labels and buckets. The
// page says which ones are not here.
func TestMetricNames(t *testing.T) {
	pair, ctx := surfacePair(t, "--metrics=extensive"), surfaceContext(t)
	var pages [2]map[string]*family
	if err := pair.Each(func(i int, s *process.Side) error { return someOfEverything(ctx, s) }); err != nil {
		t.Fatal(err)
	}
	for i, s := range pair {
		pages[i] = scrape(ctx, t, s.ClientURL)
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
		case line.status != absent && ours == nil:
			t.Errorf("%s is here by the page, and is absent", name)
		case line.status == passes && theirs.String() != ours.String():
			t.Errorf("%s\netcd:    %s\nsubject: %s", name, theirs, ours)
		}
	}
	for name, line := range lines {
		if pages[0][name] == nil && line.status != absent && pages[1][name] == nil && name != unprovoked {
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
