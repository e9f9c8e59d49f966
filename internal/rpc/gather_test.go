package rpc

import (
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metricFamily is a metric with its values by labels, "name=value" with spaces
// between them; a histogram has its count as value.
type metricFamily struct {
	name   string
	values map[string]float64
}

func gather(g prometheus.Gatherer) (out []*metricFamily, err error) {
	families, err := g.Gather()
	for _, f := range families {
		mf := &metricFamily{name: f.GetName(), values: map[string]float64{}}
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%s", l.GetName(), l.GetValue()))
			}
			v := m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			mf.values[strings.Join(labels, " ")] = v
		}
		out = append(out, mf)
	}
	return out, err
}
