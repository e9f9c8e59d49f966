package bench

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize"
)

// print writes the result for people.
func (r *Result) print(out io.Writer) error {
	server := strings.Join(r.Endpoints, ", ")
	if r.Version != "" {
		server += " (version " + r.Version + ")"
	}
	fmt.Fprintf(out, "%s at %s\n", r.Workload, server)
	how := "closed loop"
	if r.Settings.Rate > 0 {
		how = number(r.Settings.Rate) + "/s asked for"
	}
	fmt.Fprintf(out, "%d connections x %d streams, %s, %.1f s\n", r.Settings.Connections, r.Settings.Streams, how, r.ElapsedSeconds)
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\toperations\tper second\tmin\tmean\tp50\tp90\tp99\tp99.9\tmax\terrors\t")
	for _, k := range r.Kinds {
		fmt.Fprintf(w, "%s\t%d\t%s\t", k.Name, k.Operations, number(k.Throughput))
		if l := k.Latency; l != nil {
			for _, v := range []float64{l.Min, l.Mean, l.P50, l.P90, l.P99, l.P999, l.Max} {
				fmt.Fprintf(w, "%s\t", duration(v))
			}
		} else {
			fmt.Fprint(w, strings.Repeat("-\t", 7))
		}
		fmt.Fprintf(w, "%d\t\n", k.Errors)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "bytes: %s sent, %s received\n", humanize.IBytes(uint64(r.BytesSent)), humanize.IBytes(uint64(r.BytesReceived)))
	per := r.Kinds[0].Name
	if u := r.Server; u != nil {
		fmt.Fprintf(out, "server: %s CPU a %s, %.2f cores, %s resident (pid %s)\n", duration(u.CPUPerOperation), per, cores(u, r),
			humanize.IBytes(uint64(u.ResidentBytes)), strings.Trim(fmt.Sprint(u.PIDs), "[]"))
	} else {
		fmt.Fprintln(out, "server: CPU unknown, for it is not on this machine or its process may not be looked at (--server-pid)")
	}
	fmt.Fprintf(out, "client: %s CPU a %s, %.2f cores\n", duration(r.Client.CPUPerOperation), per, cores(&r.Client, r))
	if r.LateP99 > 0 {
		fmt.Fprintf(out, "generator: late by %s at p99\n", duration(r.LateP99))
	}
	for _, e := range r.ErrorCodes {
		fmt.Fprintf(out, "error: %d x %s in %s, first: %s\n", e.Count, e.Code, e.Kind, e.First)
	}
	if r.Interrupted {
		fmt.Fprintln(out, "interrupted: the figures are of the time until then")
	}
	return nil
}

func cores(u *Usage, r *Result) float64 { return u.CPUSeconds / max(r.ElapsedSeconds, 1e-9) }

// duration prints microseconds with three digits and a unit.
func duration(us float64) string {
	switch {
	case us >= 1e6:
		return digits(us/1e6) + "s"
	case us >= 1e3:
		return digits(us/1e3) + "ms"
	default:
		return digits(us) + "us"
	}
}

// number prints a rate.
func number(v float64) string {
	if v >= 1000 {
		return humanize.Comma(int64(v + 0.5))
	}
	return digits(v)
}

func digits(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}
