package bench

import (
	"cmp"
	"slices"
	"time"

	"github.com/engram-kv/engram/bench/histogram"
)

// Result is what a run found; its JSON names are kept from version to version. Times are in microseconds, if their name does not say
// otherwise.
type Result struct {
	Workload  string   `json:"workload"`
	Endpoints []string `json:"endpoints"`
	Version   string   `json:"server_version,omitempty"`
	Prefix    string   `json:"prefix"`
	Settings  Settings `json:"settings"`

	ElapsedSeconds float64 `json:"elapsed_seconds"`
	Counts                 // of the first kind
	Errors         int64   `json:"errors"` // of all kinds
	BytesSent      int64   `json:"bytes_sent"`
	BytesReceived  int64   `json:"bytes_received"`
	Server         *Usage  `json:"server,omitempty"` // nil if it is not on this machine
	Client         Usage   `json:"client"`
	// LateP99 is how late the generator itself was, in an open loop.
	LateP99 float64 `json:"generator_late_p99_us,omitempty"`

	Kinds      []Kind    `json:"kinds"`
	ErrorCodes []Failure `json:"error_codes,omitempty"`
	// Interrupted says that the run ended before its time.
	Interrupted bool `json:"interrupted,omitempty"`
}

// Settings are the flags that shape the load.
type Settings struct {
	Connections     int     `json:"connections"`
	Streams         int     `json:"streams"`
	DurationSeconds float64 `json:"duration_seconds,omitempty"`
	Total           int64   `json:"total,omitempty"`
	WarmupSeconds   float64 `json:"warmup_seconds,omitempty"`
	Rate            float64 `json:"rate,omitempty"`
	Keys            int     `json:"keys,omitempty"`
	KeySize         int     `json:"key_size,omitempty"`
	ValueSize       int     `json:"value_size,omitempty"`
	Limit           int64   `json:"limit,omitempty"`
	Serializable    bool    `json:"serializable,omitempty"`
	Watchers        int     `json:"watchers,omitempty"`
	Leases          int     `json:"leases,omitempty"`
	Nodes           int     `json:"nodes,omitempty"`
	Seed            uint64  `json:"seed"`
}

// Counts are operations that succeeded.
type Counts struct {
	Operations int64    `json:"operations"`
	Throughput float64  `json:"throughput_per_second"`
	Latency    *Latency `json:"latency_us,omitempty"` // nil if none was measured
}

// Latency is in microseconds.
type Latency struct {
	Min  float64 `json:"min"`
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p99_9"`
	Max  float64 `json:"max"`
}

// Usage is what processes spent while it was measured. Per operation means per one of the first kind.
type Usage struct {
	PIDs            []int   `json:"pids,omitempty"`
	CPUSeconds      float64 `json:"cpu_seconds"`
	CPUPerOperation float64 `json:"cpu_us_per_operation"`
	ResidentBytes   int64   `json:"resident_bytes"` // at the end
}

// Kind is one kind of operation.
type Kind struct {
	Name string `json:"name"`
	Counts
	Errors int64 `json:"errors"`
}

// Failure is how often calls of a kind ended with a code.
type Failure struct {
	Kind  string `json:"kind"`
	Code  string `json:"code"`
	Count int64  `json:"count"`
	First string `json:"first"` // text of the first one
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func countsOf(k *kindStats, elapsed time.Duration) Counts {
	c := Counts{Operations: k.count()}
	if elapsed > 0 {
		c.Throughput = float64(c.Operations) / elapsed.Seconds()
	}
	if h := &k.latency; h.Count() > 0 {
		c.Latency = latencyOf(h)
	}
	return c
}

func latencyOf(h *histogram.Histogram) *Latency {
	return &Latency{
		Min: micros(h.Min()), Mean: micros(h.Mean()), Max: micros(h.Max()),
		P50: micros(h.Quantile(0.5)), P90: micros(h.Quantile(0.9)), P99: micros(h.Quantile(0.99)), P999: micros(h.Quantile(0.999)),
	}
}

// add takes over what was counted.
func (r *Result) add(names []string, all *stats, elapsed time.Duration) {
	r.ElapsedSeconds = elapsed.Seconds()
	r.Counts = countsOf(&all.kinds[0], elapsed)
	for i := range all.kinds {
		k := &all.kinds[i]
		n := k.failures.count()
		r.Kinds = append(r.Kinds, Kind{Name: names[i], Counts: countsOf(k, elapsed), Errors: n})
		r.Errors += n
		if all.sums && i > 0 {
			r.Kinds[0].Errors += n
		}
		for code, e := range k.failures {
			r.ErrorCodes = append(r.ErrorCodes, Failure{Kind: names[i], Code: codeName(code), Count: e.count, First: e.first})
		}
	}
	slices.SortFunc(r.ErrorCodes, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Code, b.Code))
	})
}
