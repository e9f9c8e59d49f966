package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/engram-kv/engram/bench/histogram"
	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const (
	steadyPuts = 1000 // a second
	smallValue = 300  // bytes
	// Work shorter than this is judged with what follows it, or too few puts would fall into it for a p99.
	workAtLeast = time.Second
	workWithin  = 10 * time.Minute
)

// beside is puts at a fixed rate, in quiet and then while something goes on.
type beside struct {
	conns  member.Conns
	window time.Duration // of the quiet part
	next   func(*load.Source) (string, []byte)
	// members are the client addresses, host:port, of those whose logs the puts go to, and cpu is what they have spent.
	members []string
	cpu     func() (time.Duration, error)
}

// stretch is what was measured in one part.
type stretch struct {
	puts  time.Duration // p99
	sync  time.Duration // p99 of the syncs of the members' raft logs
	cores float64       // that the members kept busy
}

// reading is what the members count, at one moment.
type reading struct {
	at    time.Time
	cpu   time.Duration
	syncs buckets
}

// besideFigures are the figures of puts while a member is doing something, with the target of the ratio.
func besideFigures(doing string, sized bool) []figure {
	return []figure{
		{name: "put p99, quiet before " + doing, unit: "ms"},
		{name: "put p99, " + doing, unit: "ms"},
		{name: doing + " by quiet", unit: "ratio", target: 2, sized: sized},
		{name: "log sync p99, quiet before " + doing, unit: "ms"},
		{name: "log sync p99, " + doing, unit: "ms"},
		{name: "server CPU, quiet before " + doing, unit: "cores"},
		{name: "server CPU, " + doing, unit: "cores"},
		{name: "generator late p99, " + doing, unit: "ms"},
	}
}

// besidePuts has a member do something beside puts.
func (e *env) besidePuts(doing string, next func(*load.Source) (string, []byte), work func(context.Context) error) (out sample, err error) {
	err = e.with(8, func(c member.Conns) error {
		ctx, cancel := context.WithTimeout(context.Background(), workWithin)
		defer cancel()
		_, err := e.spend(doing, func() (err error) {
			out, err = beside{conns: c, window: e.window, next: next, members: []string{e.Address}, cpu: e.CPU}.run(ctx, doing, work)
			return err
		})
		return err
	})
	return out, err
}

// run puts, and has the work done after the quiet part. The result has the besideFigures.
func (b beside) run(ctx context.Context, doing string, work func(context.Context) error) (sample, error) {
	var (
		mu    sync.Mutex
		timed []timedPut
		late  histogram.Histogram
		ended = make(chan error, 1)
	)
	putting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		r, err := load.Open{Conns: b.conns, Rate: steadyPuts, Next: b.next, Done: func(due time.Time, latency time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			timed = append(timed, timedPut{due, latency})
		}}.Run(putting)
		late = r.Late
		ended <- err
	}()
	first, err := b.read()
	if err != nil {
		return nil, err
	}
	time.Sleep(b.window) // the quiet part
	second, err := b.read()
	if err != nil {
		return nil, err
	}
	err = work(ctx)
	time.Sleep(workAtLeast - time.Since(second.at)) // not at all, if that is past
	third, readErr := b.read()
	stop()
	if err := errors.Join(err, readErr, <-ended); err != nil {
		return nil, err
	}
	quiet, busy := between(first, second, timed), between(second, third, timed)
	before := "quiet before " + doing
	return sample{
		"put p99, " + before: millis(quiet.puts), "put p99, " + doing: millis(busy.puts),
		doing + " by quiet":       float64(busy.puts) / float64(max(quiet.puts, 1)),
		"log sync p99, " + before: millis(quiet.sync), "log sync p99, " + doing: millis(busy.sync),
		"server CPU, " + before: quiet.cores, "server CPU, " + doing: busy.cores,
		"generator late p99, " + doing: millis(late.Quantile(0.99)),
	}, nil
}

func (b beside) read() (r reading, err error) {
	if r.syncs, err = logSyncs(b.members); err == nil {
		r.cpu, err = b.cpu()
	}
	r.at = time.Now()
	return r, err
}

func between(a, b reading, timed []timedPut) stretch {
	return stretch{
		puts: p99(timed, a.at, b.at), sync: b.syncs.minus(a.syncs).p99(),
		cores: float64(b.cpu-a.cpu) / float64(b.at.Sub(a.at)),
	}
}

type timedPut struct {
	due     time.Time
	latency time.Duration
}

// p99 is that of the puts due in [from, to).
func p99(all []timedPut, from, to time.Time) time.Duration {
	var in []time.Duration
	for _, t := range all {
		if !t.due.Before(from) && t.due.Before(to) {
			in = append(in, t.latency)
		}
	}
	if len(in) == 0 {
		return 0
	}
	slices.Sort(in)
	return in[len(in)*99/100]
}

// buckets is a histogram as a server shows it: how many samples lie at or below each bound, in seconds, ascending.
type buckets []bucket

type bucket struct {
	bound float64
	count float64
}

// logSyncs adds up what the members have counted of the syncs of their raft logs.
func logSyncs(members []string) (sum buckets, err error) {
	for _, address := range members {
		b, err := histogramOf(address, "etcd_disk_wal_fsync_duration_seconds")
		if err != nil {
			return nil, err
		}
		if sum == nil {
			sum = b
			continue
		}
		if len(b) != len(sum) {
			return nil, fmt.Errorf("%s has %d buckets of its log's syncs, another member %d", address, len(b), len(sum))
		}
		for i := range b {
			sum[i].count += b[i].count
		}
	}
	return sum, nil
}

// histogramOf reads a histogram without labels.
func histogramOf(address, name string) (b buckets, err error) {
	err = eachMetric(address, func(series string, value float64) error {
		bound, ok := strings.CutPrefix(series, name+`_bucket{le="`)
		if !ok {
			return nil
		}
		at, err := strconv.ParseFloat(strings.TrimSuffix(bound, `"}`), 64)
		b = append(b, bucket{at, value})
		return err
	})
	if err == nil && len(b) == 0 {
		err = fmt.Errorf("%s shows no histogram %s", address, name)
	}
	return b, err
}

// metricOf reads one series.
func metricOf(address, name string) (value float64, err error) {
	found := false
	err = eachMetric(address, func(series string, v float64) error {
		if series == name {
			value, found = v, true
		}
		return nil
	})
	if err == nil && !found {
		err = fmt.Errorf("%s shows no metric %s", address, name)
	}
	return value, err
}

func eachMetric(address string, each func(series string, value float64) error) error {
	resp, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("metrics of %s: %s", address, resp.Status)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		series, text, ok := strings.Cut(lines.Text(), " ")
		if !ok || series == "#" {
			continue
		}
		value, err := strconv.ParseFloat(text, 64)
		if err == nil {
			err = each(series, value)
		}
		if err != nil {
			return fmt.Errorf("metrics of %s: %q: %w", address, lines.Text(), err)
		}
	}
	return lines.Err()
}

func (b buckets) minus(earlier buckets) buckets {
	out := slices.Clone(b)
	for i := range out {
		out[i].count -= earlier[i].count
	}
	return out
}

// p99 takes samples to be spread evenly within a bucket. Of what lies above the last bound it knows only that.
func (b buckets) p99() time.Duration {
	const share = 0.99
	if len(b) == 0 || b[len(b)-1].count == 0 {
		return 0
	}
	rank, low, below := share*b[len(b)-1].count, 0.0, 0.0
	for _, one := range b[:len(b)-1] { // the last is +Inf
		if one.count >= rank {
			return time.Duration((low + (one.bound-low)*(rank-below)/(one.count-below)) * float64(time.Second))
		}
		low, below = one.bound, one.count
	}
	return time.Duration(low * float64(time.Second))
}
