package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/engram-kv/engram/bench/api"
)

// scenario is one subcommand.
type scenario struct {
	name, about string
	defaults    map[string]string // of flags, where they differ
	flags       func(o *options, c *cobra.Command)
	check       func(o *options) error
	dirties     bool // it writes numbered keys
	// prepare makes the workload on r's connections, and what it needs. undo is called in the end, also after an error; keys and leases are not its concern.
	prepare func(ctx context.Context, r *runner, filled bool) (w workload, undo func(), err error)
	// rate is the one of an open loop; 0 is a closed one.
	rate func(o *options) float64
}

func (sc *scenario) checked(o *options) error {
	if sc.check == nil {
		return nil
	}
	return sc.check(o)
}

// atLeast reports numbers below a bound.
func atLeast(flag string, v, least int) error {
	if v < least {
		return fmt.Errorf("--%s=%d: give a number of %d or more", flag, v, least)
	}
	return nil
}

func limitFlag(o *options, c *cobra.Command) {
	c.Flags().Int64Var(&o.limit, "limit", 1000, "keys of a page; 0 lists all")
	c.Flags().BoolVar(&o.serializable, "serializable", false, "let the member answer from what it knows, without asking the others")
}

func checkLimit(o *options) error {
	if o.limit < 0 {
		return fmt.Errorf("--limit=%d: give a number of keys, or 0 for all", o.limit)
	}
	return nil
}

var scenarios = []*scenario{
	{
		name: "put", about: "Puts random ones of --keys keys", dirties: true,
		prepare: func(_ context.Context, r *runner, _ bool) (workload, func(), error) {
			return &putting{o: r.o, value: api.Value(r.o.valueSize)}, nil, nil
		},
	},
	{
		name: "get", about: "Gets random ones of --keys keys, which are made first",
		flags: func(o *options, c *cobra.Command) {
			c.Flags().BoolVar(&o.serializable, "serializable", false, "let the member answer from what it knows, without asking the others")
		},
		prepare: func(ctx context.Context, r *runner, filled bool) (workload, func(), error) {
			return &getting{o: r.o}, nil, r.fill(ctx, filled, nil)
		},
	},
	{
		name: "txn", about: "Updates random ones of --keys keys as Kubernetes does: put if the key is unchanged, else get",
		flags: func(o *options, c *cobra.Command) {
			c.Flags().BoolVar(&o.lease, "lease", false, "attach what is put to a lease, as Kubernetes does with events")
		},
		prepare: prepareTxn,
	},
	{
		name: "list", about: "Lists pages of --limit keys from among --keys, which are made first",
		defaults: map[string]string{"connections": "8", "streams": "1", "keys": "100000", "value-size": "1024"}, flags: limitFlag, check: checkLimit,
		prepare: func(ctx context.Context, r *runner, filled bool) (workload, func(), error) {
			_, end := r.o.numbered()
			return &listing{o: r.o, keysEnd: end}, nil, r.fill(ctx, filled, nil)
		},
	},
	{
		name: "list-stream", about: "Lists as list does, with RangeStream, which servers have from 3.7 on",
		defaults: map[string]string{"connections": "8", "streams": "1", "keys": "100000", "value-size": "1024"}, flags: limitFlag, check: checkLimit,
		prepare: prepareListStream,
	},
	{
		name: "watch", about: "Puts keys that --watchers watch; a put is over when each of them has its event", dirties: true,
		defaults: map[string]string{"streams": "4"},
		flags: func(o *options, c *cobra.Command) {
			c.Flags().IntVar(&o.watchers, "watchers", 1000, "watchers, spread over --connections, each with one stream")
			c.Flags().IntVar(&o.writers, "writers", 2, "connections that put, --streams puts at a time on each")
		},
		check: func(o *options) error {
			return errors.Join(atLeast("watchers", o.watchers, 1), atLeast("writers", o.writers, 1), atLeast("value-size", o.valueSize, stampBytes))
		},
		prepare: func(ctx context.Context, r *runner, _ bool) (workload, func(), error) {
			w := newFanout(r, len(r.lanes)*r.o.streams)
			return w, w.close, w.open(ctx, r.o.connections)
		},
	},
	{
		name: "keep-alive", about: "Keeps --leases leases alive, over streams that stay open",
		flags: func(o *options, c *cobra.Command) {
			c.Flags().IntVar(&o.leases, "leases", 1000, "leases, which are granted first and revoked in the end")
		},
		check: func(o *options) error { return atLeast("leases", o.leases, 1) },
		prepare: func(ctx context.Context, r *runner, _ bool) (workload, func(), error) {
			leases, err := r.grant(ctx, r.o.leases)
			return &renewing{slots: len(r.lanes) * r.o.streams, leases: leases}, nil, err
		},
	},
	{
		name: "kubernetes", about: "What a Kubernetes cluster of --nodes nodes asks of its store, in its usual shares and at --speed times its usual rate",
		defaults: map[string]string{"connections": "4", "streams": "50"},
		flags: func(o *options, c *cobra.Command) {
			c.Flags().IntVar(&o.nodes, "nodes", 100, "nodes of the cluster, with 30 pods on each")
			c.Flags().Float64Var(&o.speed, "speed", 1, "how many times faster than a cluster's own rate; 0 is as fast as answers come. --rate overrules it")
		},
		check: func(o *options) error {
			var err error
			if o.speed < 0 {
				err = fmt.Errorf("--speed=%v: give a factor, or 0 for as fast as answers come", o.speed)
			}
			if o.nodes > maxNodes {
				err = errors.Join(err, fmt.Errorf("--nodes=%d: at most %d", o.nodes, maxNodes))
			}
			return errors.Join(err, atLeast("nodes", o.nodes, 1))
		},
		prepare: func(ctx context.Context, r *runner, _ bool) (workload, func(), error) {
			k := newKube(r, len(r.lanes)*r.o.streams)
			return k, k.close, k.open(ctx)
		},
		rate: func(o *options) float64 {
			var sum float64
			for _, v := range kubeRates(o.nodes) {
				sum += v
			}
			return sum * o.speed
		},
	},
	{
		name: "fill", about: "Makes --keys keys and keeps them, for later runs with the same --prefix, --keys and sizes",
		defaults: map[string]string{"keep": strconv.FormatBool(true)},
		prepare:  nil, // filling is all
	},
}

const maxNodes = 100_000

func prepareTxn(ctx context.Context, r *runner, filled bool) (workload, func(), error) {
	w := &updating{o: r.o, value: api.Value(r.o.valueSize), slots: len(r.lanes) * r.o.streams, changed: make([]int64, r.o.keys)}
	if err := r.fill(ctx, filled, func(i int, rev int64) { w.changed[i] = rev }); err != nil {
		return nil, nil, err
	}
	if !r.o.lease {
		return w, nil, nil
	}
	leases, err := r.grant(ctx, 1)
	if err == nil {
		w.lease = leases[0]
	}
	return w, nil, err
}

// prepareListStream asks first whether the server has the method: to fill a store in vain would take long.
func prepareListStream(ctx context.Context, r *runner, filled bool) (workload, func(), error) {
	_, end := r.o.numbered()
	w := &listing{o: r.o, keysEnd: end, stream: true}
	if err := r.hasRangeStream(ctx); err != nil {
		return nil, nil, err
	}
	return w, nil, r.fill(ctx, filled, nil)
}

// measure prepares, loads and tells what it found. The result is nil if it did not come to that.
func (sc *scenario) measure(ctx context.Context, r *runner, filled bool) (res *Result, err error) {
	if sc.prepare == nil {
		return nil, r.fill(ctx, filled, nil)
	}
	w, undo, err := sc.prepare(ctx, r, filled)
	if undo != nil {
		defer undo()
	}
	if err != nil {
		return nil, err
	}
	o := r.o
	e := extent{streams: o.streams, total: o.total, warmup: o.warmup, duration: o.duration, rate: o.rate}
	if e.rate == 0 && sc.rate != nil {
		e.rate = sc.rate(o)
	}
	res = &Result{Workload: sc.name, Endpoints: o.endpoints, Version: r.version, Prefix: o.prefix, Settings: Settings{
		Connections: o.connections, Streams: o.streams, DurationSeconds: o.duration.Seconds(), Total: o.total, WarmupSeconds: o.warmup.Seconds(),
		Rate: e.rate, Keys: o.keys, KeySize: o.keySize, ValueSize: o.valueSize, Limit: o.limit, Serializable: o.serializable,
		Watchers: o.watchers, Leases: o.leases, Nodes: o.nodes, Seed: o.seed,
	}}
	if o.total > 0 {
		res.Settings.DurationSeconds = 0
	}
	m := newMeter(r)
	d, all, elapsed, err := r.run(ctx, w, e, func() { m.begin(r) })
	if m.before == nil { // it ended while it warmed up
		m.begin(r)
	}
	res.add(w.kinds(), all, elapsed)
	m.end(r, res)
	res.LateP99 = d.lateP99()
	res.Interrupted = ctx.Err() != nil
	return res, err
}
