package main

import (
	"time"

	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const bytesPerMB = 1e6

// startup is the time from exec to the first linearizable read, on a store that was left in two ways.
var startup = scenario{
	name:  "startup",
	about: "from exec to the first linearizable get, after a graceful stop and after kill -9 amid heavy writing",
	figures: []figure{
		{name: "after graceful stop", unit: "ms", target: 2000},
		{name: "resident after graceful stop", unit: "MB", target: 900, sized: true},
		{name: "after kill -9", unit: "ms", target: 2000},
		{name: "resident after kill -9", unit: "MB", target: 900, sized: true},
	},
	prepare: fillLarge,
	measure: measureStartup,
}

// fillLarge makes the large store.
func fillLarge(e *env) error {
	return e.with(4, func(c member.Conns) error { return load.Fill(c, e.keys, e.valueBytes) })
}

func measureStartup(e *env) (sample, error) {
	out := sample{}
	start := func(how string, end func() error) error {
		if err := end(); err != nil {
			return err
		}
		took, err := e.Start()
		if err != nil {
			return err
		}
		if err := settle([]*env{e}, e.settle); err != nil {
			return err
		}
		resident, err := e.Resident()
		out["after "+how], out["resident after "+how] = millis(took), float64(resident)/bytesPerMB
		return err
	}
	if err := start("graceful stop", e.Stop); err != nil {
		return nil, err
	}
	return out, start("kill -9", e.killAmidWrites)
}

// killAmidWrites ends the member while it takes as many writes as it can.
func (e *env) killAmidWrites() error {
	return e.with(8, func(c member.Conns) error {
		ended := make(chan error, 1)
		go func() {
			_, err := load.Closed{Conns: c, Streams: 32, For: e.window + time.Minute, Next: load.RandomPut(e.keys, e.valueBytes)}.Run()
			ended <- err
		}()
		select {
		case err := <-ended:
			return err // before it was killed
		case <-time.After(e.window):
		}
		if err := e.Kill(); err != nil {
			return err
		}
		<-ended // calls in flight fail: that is what a kill does
		return nil
	})
}
