package main

import (
	"fmt"
	"io"
	"runtime"

	"github.com/engram-kv/engram/bench"
	"github.com/engram-kv/engram/test/bench/internal/spread"
)

// report is what a run found.
type report struct {
	Short     bool
	CPUs      int
	GoVersion string
	Rounds    int
	Seconds   float64 // of one measurement
	Figures   []figure
}

// figure is one number of both systems. Ratio is Engram's by etcd's of the same round.
type figure struct {
	Workload, Name, Unit string
	MoreIsBetter         bool
	Etcd, Engram, Ratio  *spread.Spread
	Target               *float64 // of Engram's median
	RatioTarget          *float64 // of the median ratio
	Verdict              string   // met, MISSED, or empty where no target is stated
}

func newReport(c *comparison) *report {
	return &report{CPUs: runtime.NumCPU(), GoVersion: runtime.Version(), Rounds: c.rounds, Seconds: c.duration.Seconds()}
}

// kinds are the figures of each workload.
var kinds = []struct {
	name, unit string
	more       bool
	of         func(*bench.Result) float64
	target     func(workload) (absolute, ratio float64)
}{
	{"throughput", "/s", true, func(r *bench.Result) float64 { return r.Throughput }, func(w workload) (float64, float64) { return 0, w.throughput }},
	{"server CPU per operation", "us", false, func(r *bench.Result) float64 { return r.Server.CPUPerOperation }, func(w workload) (float64, float64) { return w.cpu, w.cpuRatio }},
	{"p50", "us", false, func(r *bench.Result) float64 { return r.Latency.P50 }, func(w workload) (float64, float64) { return 0, w.latency }},
	{"p99", "us", false, func(r *bench.Result) float64 { return r.Latency.P99 }, func(w workload) (float64, float64) { return 0, w.latency }},
	// What the load generator itself took, of the machine that it shares with the server.
	{"generator CPU per operation", "us", false, func(r *bench.Result) float64 { return r.Client.CPUPerOperation }, func(workload) (float64, float64) { return 0, 0 }},
}

// add takes the rounds of a workload, in order.
func (r *report) add(w workload, etcd, engram []*bench.Result) {
	all := func(results []*bench.Result, of func(*bench.Result) float64) (out []float64) {
		for _, res := range results {
			out = append(out, of(res))
		}
		return out
	}
	for _, k := range kinds {
		theirs, ours := all(etcd, k.of), all(engram, k.of)
		var ratios []float64
		for i := range ours {
			if theirs[i] > 0 {
				ratios = append(ratios, ours[i]/theirs[i])
			}
		}
		f := figure{Workload: w.name, Name: k.name, Unit: k.unit, MoreIsBetter: k.more, Etcd: spread.Of(theirs), Engram: spread.Of(ours), Ratio: spread.Of(ratios)}
		absolute, ratio := k.target(w)
		judge := func(value, target float64, to **float64) {
			if target == 0 {
				return
			}
			*to = &target
			if f.Verdict == "" {
				f.Verdict = "met"
			}
			if k.more && value < target || !k.more && value > target {
				f.Verdict = "MISSED"
			}
		}
		judge(f.Engram.Median, absolute, &f.Target)
		if f.Ratio != nil {
			judge(f.Ratio.Median, ratio, &f.RatioTarget)
		}
		r.Figures = append(r.Figures, f)
	}
}

// print writes a Markdown table, and what a reader must know of it.
func (r *report) print(out io.Writer) error {
	fmt.Fprintln(out, "| workload | figure | etcd (min, median, max) | Engram | Engram by etcd | target | |")
	fmt.Fprintln(out, "|---|---|---|---|---|---|---|")
	missed := 0
	for _, f := range r.Figures {
		target := ""
		if f.Target != nil {
			target = spread.Number(*f.Target) + " " + f.Unit
		}
		if f.RatioTarget != nil {
			if target != "" {
				target += ", "
			}
			target += "x" + spread.Number(*f.RatioTarget)
		}
		if f.Verdict == "MISSED" {
			missed++
		}
		fmt.Fprintf(out, "| %s | %s, %s | %v | %v | %v | %s | %s |\n", f.Workload, f.Name, f.Unit, f.Etcd, f.Engram, f.Ratio, target, f.Verdict)
	}
	fmt.Fprintf(out, "\n%d CPUs, %s; %d alternations of %v s; %d figures MISSED their target.", r.CPUs, r.GoVersion, r.Rounds, r.Seconds, missed)
	if name, most := r.noise(); r.Rounds > 1 {
		fmt.Fprintf(out, " Etcd's own throughput varied by up to x%.2f (%s).", most, name)
	}
	if r.Short {
		fmt.Fprint(out, " Short: the figures say little.")
	}
	_, err := fmt.Fprintln(out)
	return err
}

// noise is the workload whose throughput at etcd lay farthest apart, and by which factor.
func (r *report) noise() (name string, most float64) {
	for _, f := range r.Figures {
		if f.Name == kinds[0].name && f.Etcd.Min > 0 && f.Etcd.Max/f.Etcd.Min > most {
			name, most = f.Workload, f.Etcd.Max/f.Etcd.Min
		}
	}
	return name, most
}
