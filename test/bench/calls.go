package main

import (
	"fmt"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const (
	callConns   = 50
	callStreams = 20 // on each
	listConns   = 8
)

// kind is one kind of call, driven closed loop.
type kind struct {
	name           string
	conns, streams int
	target         float64 // server CPU per call in microseconds
	next           func(e *env) func(*load.Source) (string, []byte)
	answer         func(*load.Source, []byte) error
}

var callKinds = []kind{
	{name: "put", conns: callConns, streams: callStreams, target: 12, next: puts},
	{name: "get", conns: callConns, streams: callStreams, target: 6, next: gets(false)},
	{name: "serializable get", conns: callConns, streams: callStreams, target: 6, next: gets(true)},
	{name: "txn", conns: callConns, streams: callStreams, target: 14, next: updates, answer: updated},
	{name: "put, one stream", conns: 1, streams: 1, next: puts},
	{name: "get, one stream", conns: 1, streams: 1, next: gets(false)},
}

var listKinds = []kind{
	{name: "list of 1,000", conns: listConns, streams: 1, target: 1500, next: list(1_000), answer: listed(1_000)},
	{name: "list of 10,000", conns: listConns, streams: 1, target: 8000, next: list(10_000), answer: listed(10_000)},
}

// calls is throughput and server CPU of single calls.
var calls = scenario{
	name:    "calls",
	about:   fmt.Sprintf("single calls, closed loop, %d connections x %d streams, %d-byte values; and one stream alone", callConns, callStreams, smallValue),
	figures: figuresOf(callKinds),
	prepare: func(e *env) error {
		return e.with(4, func(c member.Conns) error { return load.Fill(c, e.someKeys, smallValue) })
	},
	measure: measureKinds(callKinds),
}

// lists is throughput and server CPU of lists that a limit ends.
var lists = scenario{
	name:    "lists",
	about:   fmt.Sprintf("lists with a limit over many keys of 1 KiB, closed loop, %d connections", listConns),
	figures: figuresOf(listKinds),
	prepare: func(e *env) error {
		return e.with(4, func(c member.Conns) error { return load.Fill(c, e.someKeys, e.valueBytes) })
	},
	measure: measureKinds(listKinds),
}

func figuresOf(kinds []kind) []figure {
	var out []figure
	for _, k := range kinds {
		out = append(out,
			figure{name: k.name + ": server CPU", unit: "us", target: k.target},
			figure{name: k.name + ": rate", unit: "ops/s", more: true},
			figure{name: k.name + ": p50", unit: "ms"},
			figure{name: k.name + ": p99", unit: "ms"})
	}
	return out
}

func measureKinds(kinds []kind) func(*env) (sample, error) {
	return func(e *env) (sample, error) {
		out := sample{}
		for i, k := range kinds {
			if err := e.with(k.conns, func(c member.Conns) error {
				var r load.Result
				spent, err := e.spend(fmt.Sprint(i, k.name), func() (err error) {
					r, err = load.Closed{Conns: c, Streams: k.streams, For: e.window, Next: k.next(e), Answer: k.answer}.Run()
					return err
				})
				out[k.name+": server CPU"] = microsPer(spent, r.Ops)
				out[k.name+": rate"] = float64(r.Ops) / max(r.Elapsed.Seconds(), 1e-9)
				out[k.name+": p50"], out[k.name+": p99"] = millis(r.Latency.Quantile(0.5)), millis(r.Latency.Quantile(0.99))
				return err
			}); err != nil {
				return nil, fmt.Errorf("%s: %w", k.name, err)
			}
			if err := settle([]*env{e}, e.settle); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
}

func puts(e *env) func(*load.Source) (string, []byte) { return load.RandomPut(e.someKeys, smallValue) }

func gets(serializable bool) func(*env) func(*load.Source) (string, []byte) {
	return func(e *env) func(*load.Source) (string, []byte) {
		return func(s *load.Source) (string, []byte) {
			s.Buf = api.AppendRange(s.Buf[:0], load.Key(s.Rand.IntN(e.someKeys)), api.RangeOptions{Serializable: serializable})
			return api.Range, s.Buf
		}
	}
}

// updates gives each stream a key of its own, which it first puts and then updates as Kubernetes does; State is the key's
// mod revision.
func updates(e *env) func(*load.Source) (string, []byte) {
	value := api.Value(smallValue)
	apart := max(1, e.someKeys/(callConns*callStreams))
	return func(s *load.Source) (string, []byte) {
		key := load.Key(s.ID * apart)
		if s.State == 0 {
			s.Buf = api.AppendPut(s.Buf[:0], key, value, 0)
			return api.Put, s.Buf
		}
		s.Buf = api.AppendUpdate(s.Buf[:0], key, value, 0, s.State)
		return api.Txn, s.Buf
	}
}

func updated(s *load.Source, answer []byte) (err error) {
	if s.State != 0 {
		t, err := api.TxnOf(answer)
		if err != nil {
			return err
		}
		if !t.Succeeded {
			return fmt.Errorf("update of stream %d's own key at revision %d did not succeed", s.ID, s.State)
		}
	}
	s.State, err = api.Revision(answer)
	return err
}

// list begins at a random one of the first tenth of the keys.
func list(n int64) func(*env) func(*load.Source) (string, []byte) {
	return func(e *env) func(*load.Source) (string, []byte) {
		end := load.KeysEnd()
		return func(s *load.Source) (string, []byte) {
			from := load.Key(s.Rand.IntN(e.someKeys / 10))
			s.Buf = api.AppendRange(s.Buf[:0], from, api.RangeOptions{End: end, Limit: n})
			return api.Range, s.Buf
		}
	}
}

func listed(n int) func(*load.Source, []byte) error {
	return func(_ *load.Source, answer []byte) error {
		p, err := load.PageOf(answer)
		if err == nil && (p.Keys != n || !p.More) {
			err = fmt.Errorf("list answered %d keys, more %t: want %d, more true", p.Keys, p.More, n)
		}
		return err
	}
}
