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
		if f.target != 0 {
			m.Target = &f.target
		}
		if f.target != 0 && m.Engram != nil && !(short && f.sized) {
			m.Verdict = "met"
			if m.Engram.Median > f.target {
				m.Verdict = "MISSED"
			}
		}
		if f.ratio != 0 {
			m.RatioTarget = &f.ratio
		}
		if f.ratio != 0 && m.Ratio != nil && !(short && f.sized) {
			m.Verdict = "met"
			if *m.Ratio > f.ratio {
				m.Verdict = "MISSED"
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
		ratio, target := "-", "-"
		if m.Ratio != nil {
			ratio = fmt.Sprintf("%.3f", *m.Ratio)
		}
		if m.Target != nil {
			target = spread.Number(*m.Target)
		}
		if m.RatioTarget != nil {
			target = "x" + spread.Number(*m.RatioTarget)
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
