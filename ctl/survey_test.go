package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// startMembers starts a cluster of members that speak with each other, and returns their endpoints. They end with the test.
func startMembers(t *testing.T, members int) (endpoints []string) {
	t.Helper()
	peers, cluster := make([]string, members), make([]string, members)
	for i := range peers {
		peers[i] = "http://" + deadAddress(t)
		cluster[i] = fmt.Sprintf("m%d=%s", i, peers[i])
	}
	endpoints = make([]string, members)
	stops, errs := make([]func(), members), make([]error, members)
	var starting sync.WaitGroup
	for i := range endpoints {
		dir := filepath.Join(t.TempDir(), "data")
		url := "http://" + deadAddress(t)
		starting.Go(func() {
			endpoints[i], stops[i], errs[i] = openMember(t, fmt.Sprintf("--name=m%d", i), "--data-dir="+dir, "--listen-client-urls="+url, "--advertise-client-urls="+url,
				"--listen-peer-urls="+peers[i], "--initial-advertise-peer-urls="+peers[i], "--initial-cluster="+strings.Join(cluster, ","))
		})
	}
	starting.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	t.Cleanup(func() {
		var stopping sync.WaitGroup
		for _, stop := range stops {
			if stop != nil {
				stopping.Go(stop)
			}
		}
		stopping.Wait()
	})
	return endpoints
}

// TestSurveyOfRealMembers gathers what members tell, and holds each figure that the checks read against what was done.
func TestSurveyOfRealMembers(t *testing.T) {
	endpoints := startMembers(t, 3)
	if t.Failed() {
		return
	}
	const puts = 2 * fewSamples
	client := newClient(t, endpoints[0])
	for i := range puts {
		if _, err := client.Put(t.Context(), fmt.Sprintf("/registry/pods/%d", i), "v"); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	for {
		err := judge(t, t.Context(), endpoints)
		if err == nil {
			return
		}
		if time.Since(began) > time.Minute {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond) // members apply and probe when they do
	}
}

// judge gathers a survey, and is content if every figure was read.
func judge(t *testing.T, ctx context.Context, endpoints []string) error {
	t.Helper()
	tl := &tool{ctx: ctx, name: "engram ctl", err: io.Discard, global: globalFlags{insecureTransport: true, dialTimeout: 5 * time.Second, commandTimeout: 10 * time.Second, endpoints: endpoints[:1]}}
	p, err := tl.newProber()
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := tl.clientConfig(nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &surveyor{survey: &survey{now: p.now(), tool: tl.name}, t: tl, p: p, cfg: cfg}
	defer s.close()
	s.gather(ctx)
	if len(s.members) != len(endpoints) || len(s.skipped) > 0 {
		return fmt.Errorf("%d members, not looked at: %q", len(s.members), s.skipped)
	}
	for _, m := range s.members {
		for _, h := range latencies {
			seconds, n := m.metrics.quantile(h.name, 0.99)
			want := uint64(fewSamples)
			if h.check == "round-trip" {
				want = uint64(len(endpoints) - 1) // each is probed now and then
			}
			if n < want || seconds <= 0 || math.IsNaN(seconds) {
				return fmt.Errorf("%v: %s: %d samples, up to %v s", m, h.name, n, seconds)
			}
		}
		for _, name := range []string{"etcd_server_leader_changes_seen_total", "process_start_time_seconds", "etcd_server_quota_backend_bytes", "process_open_fds", "process_max_fds", "os_fd_used", "os_fd_limit"} {
			if v, ok := m.metrics.value(name); !ok || v <= 0 {
				return fmt.Errorf("%v: %s is %v, it is there: %t", m, name, v, ok)
			}
		}
		switch {
		case m.status == nil || m.status.RaftAppliedIndex < fewSamples || m.status.DbSizeQuota == 0 || m.status.DbSizeInUse == 0:
			return fmt.Errorf("%v: status %v", m, m.status)
		case m.hash == nil || m.top == nil || m.clock == nil || m.clock.precision <= 0:
			return fmt.Errorf("%v: hash %v, top %v, clock %v", m, m.hash, m.top, m.clock)
		}
	}
	if len(s.largest) == 0 || s.total.GetKeys() < fewSamples || len(s.crowded) == 0 || s.keys < fewSamples || s.authOn == nil {
		return fmt.Errorf("largest %v, total %v, crowded %v, %d keys", s.largest, s.total, s.crowded, s.keys)
	}
	return slow(s.survey)
}

// slow is content if a survey whose members are taken for slow from 0 s on gives the findings on disks.
func slow(s *survey) error {
	before := slices.Clone(latencies)
	defer func() { latencies = before }()
	latencies = slices.Clone(latencies)
	for i := range latencies {
		latencies[i].warn = 0
	}
	found := map[string]int{}
	for _, f := range s.findings() {
		found[f.Check]++
	}
	if found["fsync"] != len(s.members) || found["apply"] != len(s.members) {
		return fmt.Errorf("found %v", found)
	}
	return nil
}
