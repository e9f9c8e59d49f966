package main

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/bench/histogram"
	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
)

const (
	aliveConns   = 10
	aliveStreams = 10 // on each
	aliveTTL     = 3600
)

// keepAlive is many streams that renew leases, each the next one once the last was answered.
var keepAlive = scenario{
	name:  "keepalive",
	about: fmt.Sprintf("renewals of leases, closed loop, %d connections x %d streams", aliveConns, aliveStreams),
	figures: []figure{
		{name: "server CPU per renewal", unit: "us"},
		{name: "rate", unit: "renewals/s", more: true},
		{name: "p50", unit: "ms"},
		{name: "p99", unit: "ms"},
	},
	prepare: func(e *env) error {
		return e.with(4, func(c member.Conns) error { return load.Grant(c, e.leases, aliveTTL) })
	},
	measure: func(e *env) (out sample, err error) {
		err = e.with(aliveConns, func(c member.Conns) error {
			out, err = e.renewAll(c)
			return err
		})
		return out, err
	},
}

// renewing is the streams of one measurement.
type renewing struct {
	leases  int
	until   time.Time
	latency []histogram.Histogram // by connection; callbacks of one run one after another
	streams sync.WaitGroup
	closing atomic.Bool
	failed  chan error // capacity 1
}

func (e *env) renewAll(conns member.Conns) (sample, error) {
	r := &renewing{leases: e.leases, latency: make([]histogram.Histogram, len(conns)), failed: make(chan error, 1)}
	began := time.Now()
	r.until = began.Add(e.window)
	spent, err := e.spend("keepalive", func() error {
		r.streams.Add(len(conns) * aliveStreams)
		for at, c := range conns {
			for i := range aliveStreams {
				r.open(c, at, (at*aliveStreams+i)*e.leases/(len(conns)*aliveStreams))
			}
		}
		done := make(chan struct{})
		go func() {
			r.streams.Wait()
			close(done)
		}()
		select {
		case <-done:
			return nil
		case err := <-r.failed:
			return err
		}
	})
	took := time.Since(began)
	r.closing.Store(true)
	conns.Close()
	if err != nil {
		return nil, err
	}
	var latency histogram.Histogram
	for i := range r.latency {
		latency.Merge(&r.latency[i])
	}
	return sample{
		"server CPU per renewal": microsPer(spent, latency.Count()), "rate": float64(latency.Count()) / took.Seconds(),
		"p50": millis(latency.Quantile(0.5)), "p99": millis(latency.Quantile(0.99)),
	}, nil
}

// open begins a stream that renews the leases from next on, one after another.
func (r *renewing) open(c *load.Conn, at, next int) {
	id := func() int64 { return load.LeaseID(next % r.leases) }
	var stream *load.Stream
	opened := make(chan struct{}) // an answer may come before Open has returned
	sent := time.Now()
	stream = c.Open(api.KeepAlive, api.AppendLease(nil, id()), func(answer []byte) {
		<-opened
		now := time.Now()
		r.latency[at].Add(now.Sub(sent))
		if got, ttl, err := api.Renewed(answer); err != nil || got != id() || ttl != aliveTTL {
			r.fail(fmt.Errorf("lease %d was renewed as %d for %d s: %w", id(), got, ttl, err))
			return
		}
		next++
		if !now.Before(r.until) {
			r.streams.Done()
			return
		}
		sent = now
		stream.Send(api.AppendLease(nil, id()))
	}, func(err error) {
		if !r.closing.Load() {
			r.fail(err)
		}
	})
	close(opened)
}

func (r *renewing) fail(err error) {
	if err == nil {
		err = errors.New("the stream ended")
	}
	select {
	case r.failed <- fmt.Errorf("keep alive: %w", err):
	default:
	}
}
