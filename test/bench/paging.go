package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const (
	pageKeys  = 500
	pagePuts  = 1000 // a second, meanwhile
	edgePages = 5    // whose median stands for the first and the last page
	pageIn    = time.Minute
	walkFor   = 4 // windows that a walk may take
	pageCPU   = "server CPU per page"
	// An upper bound of the above, which is a small difference of large numbers where puts cost more than pages.
	pageAndPutsCPU = "server CPU per page and its share of puts"
)

// paging walks all keys as Kubernetes does: a limit, the revision of the first page, and the key after the last one.
var paging = scenario{
	name:  "paging",
	about: fmt.Sprintf("pages of %d keys at a fixed revision through all keys, while %d puts/s run", pageKeys, pagePuts),
	figures: []figure{
		{name: pageCPU, unit: "ms", target: 1},
		{name: pageAndPutsCPU, unit: "ms"},
		{name: "first pages, median", unit: "ms"},
		{name: "last pages, median", unit: "ms"},
		{name: "slowest of first and last by fastest", unit: "ratio", target: 2},
		{name: "pages walked", unit: "pages", more: true},
	},
	prepare: fillLarge,
	measure: measurePaging,
}

func measurePaging(e *env) (out sample, err error) {
	err = e.with(5, func(c member.Conns) error {
		out, err = e.walkBesidePuts(c[0], c[1:])
		return err
	})
	return out, err
}

func (e *env) walkBesidePuts(reader *load.Conn, writers member.Conns) (sample, error) {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ended := make(chan error, 1)
	go func() {
		_, err := load.Open{Conns: writers, Rate: pagePuts, Next: load.RandomPut(e.keys, e.valueBytes)}.Run(ctx)
		ended <- err
	}()
	// The puts alone, before and after the walk: what they cost is taken off what both cost.
	alone := func() (time.Duration, error) {
		return e.cpuOf(func() error { time.Sleep(e.window); return nil })
	}
	before, err := alone()
	if err != nil {
		return nil, err
	}
	var pages []time.Duration
	began := time.Now()
	spent, err := e.spend("pages", func() error {
		pages, err = e.walk(reader)
		return err
	})
	took := time.Since(began)
	if err != nil {
		return nil, err
	}
	after, err := alone()
	stop()
	if err != nil {
		return nil, err
	}
	if err := <-ended; err != nil {
		return nil, fmt.Errorf("puts beside the pages: %w", err)
	}
	own := spent - time.Duration(float64(before+after)*took.Seconds()/(2*e.window.Seconds()))
	n := min(edgePages, len(pages))
	first, last := median(pages[:n]), median(pages[len(pages)-n:])
	out := sample{
		pageAndPutsCPU:        millis(spent) / float64(len(pages)),
		"first pages, median": millis(first), "last pages, median": millis(last),
		"slowest of first and last by fastest": float64(max(first, last)) / float64(max(min(first, last), 1)),
		"pages walked":                         float64(len(pages)),
	}
	if own > 0 { // else the pages cost less than the puts' own cost varied: there is no figure
		out[pageCPU] = millis(own) / float64(len(pages))
	}
	return out, nil
}

// walk goes through all pages, again and again until a window is over, and returns the time of each page. A server so
// slow that one walk would take many windows is asked for every n-th page only, spread evenly.
func (e *env) walk(c *load.Conn) (times []time.Duration, err error) {
	began := time.Now()
	var whole []time.Duration
	for {
		if whole, err = e.walkOnce(c); err != nil {
			return nil, err
		}
		// First and last pages stay at the ends of what is returned.
		half := len(times) / 2
		times = slices.Concat(times[:half], whole, times[half:])
		if half == 0 {
			times = whole
		}
		if time.Since(began) >= e.window {
			return times, nil
		}
	}
}

func (e *env) walkOnce(c *load.Conn) (times []time.Duration, err error) {
	var (
		revision int64
		stride   = 1
		total    = (e.keys + pageKeys - 1) / pageKeys
		from     = load.Key(0)
		request  []byte
	)
	for page := 0; page < total; page += stride {
		if stride > 1 {
			from = load.Key(page * pageKeys)
		}
		request = api.AppendRange(request[:0], from, api.RangeOptions{End: load.KeysEnd(), Limit: pageKeys, Revision: revision})
		began := time.Now()
		answer, err := c.Do(api.Range, request, pageIn)
		took := time.Since(began)
		if err != nil {
			return nil, err
		}
		times = append(times, took)
		if page == 0 {
			if revision, err = api.Revision(answer); err != nil {
				return nil, err
			}
			stride = max(1, int(time.Duration(total)*took/(walkFor*e.window)))
		}
		p, err := load.PageOf(answer)
		if err != nil {
			return nil, err
		}
		if want := min(pageKeys, e.keys-page*pageKeys); p.Keys != want || p.More != (page < total-1) {
			return nil, fmt.Errorf("page %d at revision %d: %d keys, more %t: want %d keys, more %t", page, revision, p.Keys, p.More, want, page < total-1)
		}
		from = append(slices.Clone(p.Last()), 0)
	}
	return times, nil
}

func median(d []time.Duration) time.Duration {
	s := slices.Sorted(slices.Values(d))
	return s[len(s)/2]
}
