package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/engram-kv/engram/bench/api"
	"github.com/engram-kv/engram/test/bench/internal/load"
	"github.com/engram-kv/engram/test/bench/internal/member"
	"github.com/engram-kv/engram/test/internal/cluster"
)

const (
	votersOfCluster = 3
	clusterStreams  = 20
	failovers       = 3 // in each round
	probeEvery      = 2 * time.Millisecond
	clusterWithin   = 10 * time.Minute // what is waited for in a cluster
	catchingUp      = "catching up"
)

// clusterEnv is what a scenario of a cluster sees.
type clusterEnv struct {
	sizes
	*cluster.Cluster
	b       *bench
	program cluster.Program
}

// clusterPuts is throughput and server CPU of puts in a cluster of three.
var clusterPuts = scenario{
	name:  "cluster",
	about: fmt.Sprintf("puts at 3 members, closed loop, %d connections x %d streams spread over the members, %d-byte values", callConns, clusterStreams, smallValue),
	figures: []figure{
		{name: "put: server CPU, sum of members", unit: "us", ratio: 1.0 / 3},
		{name: "put: rate", unit: "ops/s", more: true, ratio: 5},
		{name: "put: p50", unit: "ms"},
		{name: "put: p99", unit: "ms"},
	},
	prepareCluster: func(e *clusterEnv) error {
		return e.with(votersOfCluster, func(c member.Conns) error { return load.Fill(c, e.someKeys, smallValue) })
	},
	measureCluster: func(e *clusterEnv) (out sample, err error) {
		err = e.with(callConns, func(c member.Conns) error {
			before, err := e.cpu()
			if err != nil {
				return err
			}
			r, err := load.Closed{Conns: c, Streams: clusterStreams, For: e.window, Next: load.RandomPut(e.someKeys, smallValue)}.Run()
			if err != nil {
				return err
			}
			after, err := e.cpu()
			out = sample{
				"put: server CPU, sum of members": microsPer(after-before, r.Ops),
				"put: rate":                       float64(r.Ops) / max(r.Elapsed.Seconds(), 1e-9),
				"put: p50":                        millis(r.Latency.Quantile(0.5)),
				"put: p99":                        millis(r.Latency.Quantile(0.99)),
			}
			return err
		})
		return out, err
	},
}

// failover is how long a cluster acknowledges no write after its leader was killed.
var failover = scenario{
	name:  "failover",
	about: fmt.Sprintf("3 members, kill -9 of the leader: until a put sent after it is acknowledged, a put each %v at both others; median and worst of %d", probeEvery, failovers),
	figures: []figure{
		{name: "first put after the leader's death", unit: "ms", ratio: 1},
		{name: "the worst", unit: "ms"},
	},
	measureCluster: func(e *clusterEnv) (sample, error) {
		var all []time.Duration
		for range failovers {
			took, err := e.killLeader()
			if err != nil {
				return nil, err
			}
			all = append(all, took)
		}
		slices.Sort(all)
		return sample{
			"first put after the leader's death": millis(all[len(all)/2]), "the worst": millis(all[len(all)-1]),
		}, nil
	},
}

// catchUp is how long an empty member takes to catch up, and what puts feel of it.
var catchUp = scenario{
	name:    "catchup",
	about:   fmt.Sprintf("an empty learner joins 3 members that hold -size bytes, beside puts at %d/s, open loop", steadyPuts),
	figures: append([]figure{{name: catchingUp, unit: "ms", ratio: 1.0 / 3, sized: true}}, besideFigures(catchingUp, true)...),
	prepareCluster: func(e *clusterEnv) error {
		return e.with(votersOfCluster, func(c member.Conns) error {
			return load.Fill(c, int(e.storeBytes)/e.valueBytes, e.valueBytes)
		})
	},
	measureCluster: func(e *clusterEnv) (out sample, err error) {
		err = e.with(2*votersOfCluster, func(c member.Conns) error {
			out, err = e.joinBesidePuts(c)
			return err
		})
		return out, err
	},
}

// runCluster prepares a cluster of each system and measures them in turn.
func (b *bench) runCluster(s scenario) (_ map[string][]sample, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	var envs []*clusterEnv
	defer func() {
		for _, e := range envs {
			err = errors.Join(err, e.Close())
		}
	}()
	for _, sys := range b.systems {
		if sys.name == engramName && cluster.Chosen() != engramName {
			fmt.Fprintf(b.progress, "  %s is left out: %s=%s measures its clusters\n", sys.name, cluster.ProgramVariable, engramName)
			continue
		}
		e := &clusterEnv{sizes: b.sizes, b: b, program: cluster.Program{Name: sys.name, Path: sys.program}, Cluster: cluster.New(b.dir + "/" + s.name + "-" + sys.name)}
		e.Flags = append(e.Flags, fmt.Sprintf("--quota-backend-bytes=%d", int64(8<<30)))
		if e.storeBytes < fullSizes.storeBytes { // or a small store would come as log entries
			e.Flags = append(e.Flags, "--snapshot-count=100", "--snapshot-catchup-entries=50")
		}
		envs = append(envs, e)
		if err := e.Start(ctx, e.program, e.program, e.program); err != nil {
			return nil, err
		}
		if s.prepareCluster != nil {
			began := time.Now()
			if err := s.prepareCluster(e); err != nil {
				return nil, fmt.Errorf("preparing at %s: %w\n%s", sys.name, err, e.Logs())
			}
			fmt.Fprintf(b.progress, "  %s prepared in %v\n", sys.name, time.Since(began).Round(time.Millisecond))
		}
	}
	out := make(map[string][]sample)
	for round := range b.rounds {
		for _, e := range envs {
			if err := atRest(envs, b.settle); err != nil {
				return nil, err
			}
			began := time.Now()
			got, err := s.measureCluster(e)
			if err != nil {
				return nil, fmt.Errorf("round %d at %s: %w\n%s", round+1, e.program.Name, err, e.Logs())
			}
			out[e.program.Name] = append(out[e.program.Name], got)
			fmt.Fprintf(b.progress, "  %s round %d of %d in %v\n", e.program.Name, round+1, b.rounds, time.Since(began).Round(time.Millisecond))
		}
	}
	return out, nil
}

// atRest waits until no cluster works in the background, as settle does for members.
func atRest(envs []*clusterEnv, within time.Duration) error {
	const quiet = 60 * time.Millisecond // heartbeats of three members go on
	return member.Settle(func() (sum time.Duration, err error) {
		for _, e := range envs {
			cpu, err := e.cpu()
			if err != nil {
				return 0, err
			}
			sum += cpu
		}
		return sum, nil
	}, time.Duration(len(envs))*quiet, within)
}

// cpu is what the members have spent together.
func (e *clusterEnv) cpu() (sum time.Duration, err error) {
	for _, m := range e.Members() {
		cpu, err := m.CPU()
		if err != nil {
			return 0, err
		}
		sum += cpu
	}
	return sum, nil
}

// with runs f with n connections, spread over the members.
func (e *clusterEnv) with(n int, f func(member.Conns) error) error {
	conns, err := dialMembers(n, e.Serving())
	if err != nil {
		return err
	}
	defer conns.Close()
	return f(conns)
}

func dialMembers(n int, members []*cluster.Member) (member.Conns, error) {
	var all member.Conns
	for i := range n {
		m := members[i%len(members)]
		one, err := (&member.Member{Name: m.Name, Address: m.Endpoint()}).Dial(1)
		if err != nil {
			all.Close()
			return nil, err
		}
		all = append(all, one...)
	}
	return all, nil
}

// killLeader kills the leader and returns the time until the first put that was sent afterwards is acknowledged. Then the
// cluster is whole again.
func (e *clusterEnv) killLeader() (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), clusterWithin)
	defer cancel()
	leader, err := e.Leader(ctx)
	if err != nil {
		return 0, err
	}
	others := slices.DeleteFunc(e.Members(), func(m *cluster.Member) bool { return m == leader })
	conns, err := dialMembers(len(others), others)
	if err != nil {
		return 0, err
	}
	defer conns.Close()
	if err := leader.Kill(); err != nil {
		return 0, err
	}
	var (
		began = time.Now()
		first atomic.Int64 // nanoseconds
		once  sync.Once
		done  = make(chan struct{})
		put   = api.AppendPut(nil, load.Key(0), api.Value(smallValue), 0)
		tick  = time.NewTicker(probeEvery)
	)
	defer tick.Stop()
	for waiting := true; waiting; {
		for _, c := range conns {
			c.Call(api.Put, put, func(_ []byte, err error) {
				if err == nil {
					once.Do(func() { first.Store(int64(time.Since(began))); close(done) })
				}
			})
		}
		select {
		case <-done:
			waiting = false
		case <-ctx.Done():
			return 0, fmt.Errorf("no put was acknowledged within %v of the death of %v", time.Since(began), leader)
		case <-tick.C:
		}
	}
	took = time.Duration(first.Load())
	if err := leader.Restart(ctx); err != nil {
		return 0, err
	}
	_, err = e.Settle(ctx)
	return took, err
}

func (e *clusterEnv) joinBesidePuts(c member.Conns) (sample, error) {
	ctx, stop := context.WithTimeout(context.Background(), workWithin)
	defer stop()
	var (
		voters  []string
		learner *cluster.Member
		took    time.Duration
	)
	for _, m := range e.Serving() {
		voters = append(voters, m.Endpoint())
	}
	out, err := beside{
		conns: c, window: e.window, next: load.RandomPut(int(e.storeBytes)/e.valueBytes, smallValue), members: voters, cpu: e.cpu,
	}.run(ctx, catchingUp, func(ctx context.Context) (err error) {
		began := time.Now()
		learner, err = e.join(ctx)
		took = time.Since(began)
		return err
	})
	if err != nil {
		return nil, err
	}
	out[catchingUp] = millis(took)
	if _, err := e.CheckHash(ctx); err != nil {
		return nil, err
	}
	return out, e.Remove(ctx, learner)
}

// join adds a learner and waits until it has applied what the leader had when it was asked.
func (e *clusterEnv) join(ctx context.Context) (*cluster.Member, error) {
	learner, err := e.Announce(ctx, e.program, true)
	if err != nil {
		return nil, err
	}
	if err := learner.Spawn(); err != nil {
		return nil, err
	}
	leader, err := e.LeaderOf(ctx, e.Serving()...)
	if err != nil {
		return nil, err
	}
	for {
		has, err := leader.Status(ctx)
		if err != nil {
			return nil, err
		}
		got, err := learner.Status(ctx)
		if err == nil && got.RaftAppliedIndex >= has.RaftAppliedIndex {
			return learner, nil
		}
		select {
		case <-learner.Exited():
			return nil, fmt.Errorf("%v ended:\n%s", learner, learner.LogTail())
		case <-ctx.Done():
			return nil, fmt.Errorf("%v has not caught up: %+v of %+v, %w", learner, got, has, ctx.Err())
		case <-time.After(10 * time.Millisecond): // another process: there is no event to wait for
		}
	}
}
