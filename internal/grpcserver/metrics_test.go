package grpcserver

import (
	"maps"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestMetrics(t *testing.T) {
	s := start(t, rig{methods: []Method{{Name: "/s/echo", Unary: echo}}})
	f := s.speak(t)
	f.await(f.call("/s/echo", "x"))
	f.await(f.call("/s/none", "x"))
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(s.metrics); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	reasons := 0
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if len(m.GetLabel()) > 0 {
				reasons++
				continue
			}
			got[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	if reasons != len(limitReasons) {
		t.Errorf("%d limits are counted, not %d", reasons, len(limitReasons))
	}
	for _, bytes := range []string{"engram_grpc_received_bytes_total", "engram_grpc_sent_bytes_total", "engram_grpc_reads_total", "engram_grpc_writes_total"} {
		if got[bytes] < 1 {
			t.Errorf("%s is %v", bytes, got[bytes])
		}
		delete(got, bytes)
	}
	want := map[string]float64{
		"engram_grpc_connections": 1, "engram_grpc_connections_total": 1,
		"engram_grpc_calls_held_back": 0, "engram_grpc_streams": 0, "engram_grpc_streams_total": 2, "engram_grpc_streams_refused_total": 1,
	}
	if !maps.Equal(got, want) {
		t.Errorf("%v, not %v", got, want)
	}
}
