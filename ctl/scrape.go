package ctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"slices"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// metricSet is what a member's /metrics tells, by name.
type metricSet map[string]*dto.MetricFamily

// usualMetricsPort is where members that kubeadm has set up serve metrics: in clear text, to the machine they run on.
const usualMetricsPort = "2381"

var errNoHTTP = errors.New("it serves no HTTP")

// memberMetrics reads a member's metrics: at its client port, or where one that has listeners for metrics alone serves them. Which
// of the places is the member's, its ID tells.
func (p *prober) memberMetrics(ctx context.Context, m *memberReport, places []string) (metricSet, error) {
	found, firstErr := p.scrape(ctx, m.reach)
	if firstErr == nil {
		return found, nil
	}
	if m.reach.network == "tcp" {
		if host, _, err := net.SplitHostPort(m.reach.address); err == nil {
			places = append(slices.Clone(places), "http://"+net.JoinHostPort(host, usualMetricsPort))
		}
	}
	for _, place := range places {
		r := &reach{endpoint: place}
		if !p.parse(r) {
			continue
		}
		r.setBase()
		if found, err := p.scrape(ctx, r); err == nil && found.label("etcd_server_id", "server_id") == hexID(m.id) {
			return found, nil
		}
	}
	return nil, firstErr
}

// scrape reads the metrics at an endpoint.
func (p *prober) scrape(ctx context.Context, r *reach) (metricSet, error) {
	if r.base == "" {
		return nil, fmt.Errorf("%s serves no HTTP", r.endpoint)
	}
	code, _, body, err := p.get(ctx, r, "/metrics")
	if err != nil {
		return nil, err
	}
	if code != http.StatusOK {
		return nil, fmt.Errorf("%s/metrics answers with status %d", r.base, code)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("%s/metrics: %w", r.base, err)
	}
	return families, nil
}

// label returns the value of a label of a metric that has one series, "" if there is none.
func (m metricSet) label(name, label string) string {
	for _, s := range m[name].GetMetric() {
		for _, l := range s.Label {
			if l.GetName() == label {
				return l.GetValue()
			}
		}
	}
	return ""
}

// value sums up the values of a gauge or counter over its labels; ok is false if it is not there.
func (m metricSet) value(name string) (sum float64, ok bool) {
	f := m[name]
	if f == nil {
		return 0, false
	}
	for _, s := range f.Metric {
		switch {
		case s.Gauge != nil:
			sum += s.Gauge.GetValue()
		case s.Counter != nil:
			sum += s.Counter.GetValue()
		case s.Untyped != nil:
			sum += s.Untyped.GetValue()
		}
	}
	return sum, true
}

// quantile returns the bound in seconds below which that part of a histogram's observations lie, and how many there are. The
// bound is that of a bucket: the answer is "at most".
func (m metricSet) quantile(name string, q float64) (seconds float64, count uint64) {
	f := m[name]
	if f == nil {
		return 0, 0
	}
	upTo := map[float64]uint64{}
	for _, s := range f.Metric {
		count += s.Histogram.GetSampleCount()
		for _, b := range s.Histogram.GetBucket() {
			upTo[b.GetUpperBound()] += b.GetCumulativeCount()
		}
	}
	seconds = math.Inf(1)
	for bound, n := range upTo {
		if float64(n) >= q*float64(count) {
			seconds = min(seconds, bound)
		}
	}
	return seconds, count
}
