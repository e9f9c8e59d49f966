package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/engram-kv/engram/bench"
	"github.com/engram-kv/engram/bench/process"
	"github.com/engram-kv/engram/test/bench/internal/member"
	"github.com/engram-kv/engram/test/internal/cluster"
)

const (
	etcdName   = "etcd"
	engramName = "engram"
	quotaBytes = 8 << 30
	runWithin  = 30 * time.Minute // of one command
)

type system struct{ name, program string }

// comparison runs workloads.
type comparison struct {
	sizes
	systems   []system
	generator string
	dir       string
	profiles  string
	progress  io.Writer
}

// target is what is loaded: one member or several, of one system.
type target struct {
	name      string
	endpoints []string
	pids      func() []int
	logs      func() string
	profile   func(file string, seconds int) error // nil: not of this one
	close     func() error
}

// run measures each workload on both systems. Those of one number of members share their servers.
func (c *comparison) run(chosen []workload) (_ *report, err error) {
	r := newReport(c)
	for _, members := range []int{1, 3} {
		var some []workload
		for _, w := range chosen {
			if w.members == members {
				some = append(some, w)
			}
		}
		if len(some) == 0 {
			continue
		}
		if err := c.runOn(members, some, r); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (c *comparison) runOn(members int, some []workload, r *report) (err error) {
	var targets []*target
	defer func() {
		for _, t := range targets {
			err = errors.Join(err, t.close())
		}
	}()
	for _, sys := range c.systems {
		t, err := c.start(sys, members)
		if err != nil {
			return err
		}
		targets = append(targets, t)
		for _, large := range []bool{false, true} {
			i := slices.IndexFunc(some, func(w workload) bool { return w.filled && w.large == large })
			if i < 0 {
				continue
			}
			began := time.Now()
			if _, err := c.bench(t, append([]string{"fill"}, some[i].store(c.sizes)...)); err != nil {
				return err
			}
			fmt.Fprintf(c.progress, "%s: filled below %s in %v\n", t.name, some[i].store(c.sizes)[0], time.Since(began).Round(time.Millisecond))
		}
	}
	for _, w := range some {
		found := make(map[string][]*bench.Result)
		for round := range c.rounds {
			order := slices.Clone(targets)
			if round%2 == 1 {
				slices.Reverse(order)
			}
			for _, t := range order {
				res, err := c.measure(w, targets, t, round)
				if err != nil {
					return fmt.Errorf("%s at %s: %w; its log ends:\n%s", w.name, t.name, err, t.logs())
				}
				found[t.name] = append(found[t.name], res)
				fmt.Fprintf(c.progress, "%s: %s round %d of %d: %.0f/s, p99 %.0f us\n", w.name, t.name, round+1, c.rounds, res.Throughput, res.Latency.P99)
			}
		}
		r.add(w, found[etcdName], found[engramName])
	}
	return nil
}

func (c *comparison) start(sys system, members int) (*target, error) {
	if members == 1 {
		m, err := member.New(sys.name, sys.program, c.dir)
		if err != nil {
			return nil, err
		}
		if _, err := m.Start(); err != nil {
			return nil, errors.Join(err, m.Close())
		}
		return &target{
			name: sys.name, endpoints: []string{m.Address}, pids: func() []int { return []int{m.PID()} }, logs: m.LogTail, profile: m.Profile, close: m.Close,
		}, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), runWithin)
	defer cancel()
	dir := filepath.Join(c.dir, "cluster-"+sys.name)
	cl := cluster.New(dir)
	cl.Flags = append(cl.Flags, fmt.Sprintf("--quota-backend-bytes=%d", int64(quotaBytes)))
	p := cluster.Program{Name: sys.name, Path: sys.program}
	if err := cl.Start(ctx, slices.Repeat([]cluster.Program{p}, members)...); err != nil {
		return nil, errors.Join(err, cl.Close())
	}
	t := &target{name: sys.name, logs: cl.Logs, close: func() error { return errors.Join(cl.Close(), os.RemoveAll(dir)) }}
	for _, m := range cl.Members() {
		t.endpoints = append(t.endpoints, m.Endpoint())
	}
	t.pids = func() (pids []int) {
		for _, m := range cl.Members() {
			pids = append(pids, m.PID())
		}
		return pids
	}
	return t, nil
}

// measure takes one measurement, with all servers at rest.
func (c *comparison) measure(w workload, all []*target, t *target, round int) (*bench.Result, error) {
	const quiet = 60 * time.Millisecond // heartbeats go on
	if err := member.Settle(func() (sum time.Duration, err error) {
		for _, t := range all {
			for _, pid := range t.pids() {
				cpu, err := process.CPU(pid)
				if err != nil {
					return 0, err
				}
				sum += cpu
			}
		}
		return sum, nil
	}, quiet, c.settle); err != nil {
		return nil, err
	}
	args := append(w.args(c.sizes), fmt.Sprint("--duration=", c.duration), fmt.Sprint("--warmup=", c.warmup), fmt.Sprint("--seed=", round+1), "--json")
	for _, pid := range t.pids() {
		args = append(args, fmt.Sprint("--server-pid=", pid))
	}
	if w.filled {
		args = append(append(args, w.store(c.sizes)...), "--keep")
	}
	profiled := make(chan error, 1)
	if c.profiles == "" || t.profile == nil {
		profiled <- nil
	} else {
		if err := os.MkdirAll(c.profiles, 0o700); err != nil {
			return nil, err
		}
		go func() {
			profiled <- t.profile(filepath.Join(c.profiles, fmt.Sprintf("%s-%s-%d.pprof", t.name, w.name, round)), max(1, int((c.warmup+c.duration)/time.Second)))
		}()
	}
	out, err := c.bench(t, args)
	if err := errors.Join(err, <-profiled); err != nil {
		return nil, err
	}
	var res bench.Result
	if err := json.Unmarshal(out, &res); err != nil {
		return nil, fmt.Errorf("the figures cannot be read: %w\n%s", err, out)
	}
	if res.Operations == 0 || res.Latency == nil || res.Server == nil {
		return nil, fmt.Errorf("no figures came of it:\n%s", out)
	}
	return &res, nil
}

// bench runs one line of `engram bench`.
func (c *comparison) bench(t *target, args []string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), runWithin)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.generator, append([]string{"bench"}, append(args, "--endpoints="+strings.Join(t.endpoints, ","), "--timeout=1m")...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("engram bench %s: %w\n%s", strings.Join(args, " "), err, errs.String())
	}
	return out.Bytes(), nil
}
