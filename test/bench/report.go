package main

import (
	"fmt"
	"io"
	"runtime"
	"text/tabwriter"

	"github.com/engram-kv/engram/test/bench/internal/spread"
)

// report is what a run found.
type report struct {
	Short     bool
	CPUs      int
	GoVersion string
	Figures   []measured
}

// measured is one figure of both systems. Ratio is ours by etcd's, of the medians.
type measured struct {
	Scenario, Figure, Unit string
	MoreIsBetter           bool           `json:",omitempty"`
	Etcd, Engram           *spread.Spread `json:",omitempty"`
	Ratio                  *float64       `json:",omitempty"`
	Target                 *float64       `json:",omitempty"`
	RatioTarget            *float64       `json:",omitempty"`
	Verdict                string         // met, MISSED, or empty where no target applies
}

func newReport(short bool) *report {
	return &report{Short: short, CPUs: runtime.NumCPU(), GoVersion: runtime.Version()}
}

// add takes the samples of a scenario, by system.
func (r *report) add(s scenario, samples map[string][]sample, short bool) {
	for _, f := range s.figures {
		m := measured{
			Scenario: s.name, Figure: f.name, Unit: f.unit, MoreIsBetter: f.more,
			Etcd: spreadOf(samples[etcdName], f.name), Engram: spreadOf(samples[engramName], f.name),
		}
		if m.Etcd != nil && m.Engram != nil && m.Etcd.Median != 0 {
			ratio := m.Engram.Median / m.Etcd.Median
			m.Ratio = &ratio
		}
		judge := func(value, target float64) {
			switch {
			case short && f.sized:
			case f.more && value < target, !f.more && value > target:
				m.Verdict = "MISSED"
			case m.Verdict == "":
				m.Verdict = "met"
			}
		}
		if f.target != 0 {
			m.Target = &f.target
			if m.Engram != nil {
				judge(m.Engram.Median, f.target)
			}
		}
		if f.ratio != 0 {
			m.RatioTarget = &f.ratio
			if m.Ratio != nil {
				judge(*m.Ratio, f.ratio)
			}
		}
		r.Figures = append(r.Figures, m)
	}
}

// spreadOf returns nil if no sample has the figure.
func spreadOf(samples []sample, name string) *spread.Spread {
	var all []float64
	for _, s := range samples {
		if v, ok := s[name]; ok {
			all = append(all, v)
		}
	}
	return spread.Of(all)
}

// print writes the table.
func (r *report) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "scenario\tfigure\tunit\tetcd (min median max)\tengram (min median max)\tengram/etcd\ttarget\t")
	missed := 0
	for _, m := range r.Figures {
		ratio, target, least := "-", "-", ""
		if m.MoreIsBetter {
			least = "at least "
		}
		if m.Ratio != nil {
			ratio = fmt.Sprintf("%.3f", *m.Ratio)
		}
		if m.Target != nil {
			target = least + spread.Number(*m.Target)
		}
		if m.RatioTarget != nil {
			target = least + "x" + spread.Number(*m.RatioTarget)
		}
		if m.Verdict == "MISSED" {
			missed++
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%v\t%v\t%s\t%s\t%s\n", m.Scenario, m.Figure, m.Unit, m.Etcd, m.Engram, ratio, target, m.Verdict)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	extent := "full size"
	if r.Short {
		extent = "short: targets stated for a full store are not judged"
	}
	_, err := fmt.Fprintf(out, "%d CPUs, %s, %s; %d figures MISSED their target\n", r.CPUs, r.GoVersion, extent, missed)
	return err
}
