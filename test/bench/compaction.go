package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const (
	steadyPuts    = 1000 // a second
	smallValue    = 300  // bytes
	compactWithin = 5 * time.Minute
	// A compaction shorter than this is judged with what follows it, or too few puts would fall into it for a p99.
	compactAtLeast = time.Second
)

// compaction is the p99 of puts at a fixed rate, in quiet and while a history is compacted.
var compaction = scenario{
	name:  "compaction",
	about: fmt.Sprintf("puts at %d/s, open loop, in quiet and while a history is compacted", steadyPuts),
	figures: []figure{
		{name: "put p99, quiet", unit: "ms"},
		{name: "put p99, compacting", unit: "ms"},
		{name: "compacting by quiet", unit: "ratio", target: 2},
		{name: "compaction", unit: "ms"},
		{name: "server CPU of puts and compaction", unit: "ms"},
		{name: "generator late p99", unit: "ms"},
	},
	prepare: func(e *env) error {
		return e.with(4, func(c member.Conns) error { return load.Fill(c, e.someKeys, smallValue) })
	},
	measure: measureCompaction,
}

func measureCompaction(e *env) (out sample, err error) {
	err = e.with(9, func(c member.Conns) error {
		if err := load.Overwrite(c[:8], e.revisions, e.someKeys, smallValue); err != nil {
			return err
		}
		if err := settle([]*env{e}, e.settle); err != nil {
			return err
		}
		out, err = e.compactBesidePuts(c)
		return err
	})
	return out, err
}

func (e *env) compactBesidePuts(c member.Conns) (sample, error) {
	var (
		mu     sync.Mutex
		timed  []timedPut
		late   load.Histogram
		ended  = make(chan error, 1)
		window [2]time.Time // of the compaction
		out    = sample{}
	)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	began := time.Now()
	go func() {
		r, err := load.Open{
			Conns: c[:8], Rate: steadyPuts, Next: load.RandomPut(e.someKeys, smallValue),
			Done: func(due time.Time, latency time.Duration) {
				mu.Lock()
				defer mu.Unlock()
				timed = append(timed, timedPut{due, latency})
			},
		}.Run(ctx)
		late = r.Late
		ended <- err
	}()
	time.Sleep(e.window) // the quiet part
	window[0] = time.Now()
	spent, err := e.spend("compaction", func() error {
		answer, err := c[8].Do(load.Range, load.AppendRange(nil, load.Key(0), load.RangeOptions{}), pageIn)
		if err != nil {
			return err
		}
		revision, err := load.Revision(answer)
		if err != nil {
			return err
		}
		_, err = c[8].Do(load.Compact, load.AppendCompaction(nil, revision), compactWithin)
		out["compaction"] = millis(time.Since(window[0]))
		time.Sleep(compactAtLeast - time.Since(window[0])) // not at all, if that is past
		return err
	})
	window[1] = time.Now()
	stop()
	if err != nil {
		return nil, err
	}
	if err := <-ended; err != nil {
		return nil, err
	}
	quiet, compacting := p99(timed, began, window[0]), p99(timed, window[0], window[1])
	out["put p99, quiet"], out["put p99, compacting"] = millis(quiet), millis(compacting)
	out["compacting by quiet"] = float64(compacting) / float64(max(quiet, 1))
	out["server CPU of puts and compaction"] = millis(spent)
	out["generator late p99"] = millis(late.Quantile(0.99))
	return out, nil
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
