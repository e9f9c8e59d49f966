package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/engram-kv/engram/test/bench/internal/member"
)

const (
	etcdName   = "etcd"
	engramName = "engram"
)

// scenario is one thing to measure at both systems.
type scenario struct {
	name, about string
	figures     []figure
	alone       bool // measures this process, not a server
	// prepare fills the store of a fresh member, once.
	prepare func(e *env) error
	// measure takes each figure once. It leaves the member running and fit to be measured again.
	measure func(e *env) (sample, error)
	// The same for a scenario of three members instead of one.
	prepareCluster func(e *clusterEnv) error
	measureCluster func(e *clusterEnv) (sample, error)
}

// figure is one number that a scenario gives.
type figure struct {
	name, unit string
	target     float64 // what ours shall be at most, or at least where more is better; 0: none is stated
	ratio      float64 // the same of ours by etcd's
	sized      bool    // the target is stated for a store of full size
	more       bool    // more is better
}

// sample has a number for each figure, by its name.
type sample map[string]float64

// sizes are the extents of the scenarios.
type sizes struct {
	rounds     int
	keys       int           // of a large store
	valueBytes int           // in it
	someKeys   int           // of the stores that lists and single calls work on
	revisions  int64         // of a history
	window     time.Duration // of one measurement
	settle     time.Duration // bound of the wait for background work to end
	watchers   int
	leases     int

	storeBytes int64 // of a store that a member is to be sent, or that loses every other key; twice that is backed up
}

var (
	fullSizes = sizes{
		rounds: 5, keys: 1_000_000, valueBytes: 1024, someKeys: 100_000, revisions: 500_000,
		window: 15 * time.Second, settle: 30 * time.Second, watchers: 1000, leases: 10_000, storeBytes: 1 << 30,
	}
	shortSizes = sizes{
		rounds: 1, keys: 20_000, valueBytes: 1024, someKeys: 20_000, revisions: 20_000,
		window: 2 * time.Second, settle: 2 * time.Second, watchers: 100, leases: 1000, storeBytes: 64 << 20,
	}
)

var scenarios = []scenario{startup, paging, compaction, reclaim, backup, fanout, resume, calls, lists, keepAlive, apply, clusterPuts, failover, catchUp}

type system struct{ name, program string }

// bench runs scenarios.
type bench struct {
	sizes
	systems  []system
	dir      string
	profiles string // directory, or empty
	progress io.Writer
}

// env is what a scenario sees: one member and the sizes.
type env struct {
	sizes
	*member.Member
	b        *bench
	scenario string
	round    int
	dir      string // for files of this measurement
}

// run prepares a member of each system and measures them in turn, so that what disturbs the machine disturbs both.
func (b *bench) run(s scenario) (_ map[string][]sample, err error) {
	if s.measureCluster != nil {
		return b.runCluster(s)
	}
	out := make(map[string][]sample)
	if s.alone {
		for round := range b.rounds {
			got, err := s.measure(&env{sizes: b.sizes, b: b, scenario: s.name, round: round, dir: b.dir})
			if err != nil {
				return nil, err
			}
			out[engramName] = append(out[engramName], got)
		}
		return out, nil
	}
	var envs []*env
	defer func() {
		for _, e := range envs {
			err = errors.Join(err, e.Close())
		}
	}()
	for _, sys := range b.systems {
		m, err := member.New(sys.name, sys.program, b.dir)
		if err != nil {
			return nil, err
		}
		e := &env{sizes: b.sizes, Member: m, b: b, scenario: s.name, dir: b.dir}
		envs = append(envs, e)
		if _, err := m.Start(); err != nil {
			return nil, err
		}
		if s.prepare == nil {
			continue
		}
		began := time.Now()
		if err := s.prepare(e); err != nil {
			return nil, e.explain("preparing", err)
		}
		fmt.Fprintf(b.progress, "  %s prepared in %v\n", m.Name, time.Since(began).Round(time.Millisecond))
	}
	for round := range b.rounds {
		for _, e := range envs {
			e.round = round
			if err := settle(envs, b.settle); err != nil {
				return nil, err
			}
			began := time.Now()
			got, err := s.measure(e)
			if err != nil {
				return nil, e.explain(fmt.Sprintf("round %d", round+1), err)
			}
			out[e.Name] = append(out[e.Name], got)
			fmt.Fprintf(b.progress, "  %s round %d of %d in %v\n", e.Name, round+1, b.rounds, time.Since(began).Round(time.Millisecond))
		}
	}
	return out, nil
}

func (e *env) explain(doing string, err error) error {
	return fmt.Errorf("%s at %s: %w; its log ends:\n%s", doing, e.Name, err, e.LogTail())
}

// settle waits until no member works in the background.
func settle(envs []*env, within time.Duration) error {
	const atRest = 30 * time.Millisecond
	return member.Settle(func() (sum time.Duration, err error) {
		for _, e := range envs {
			cpu, err := e.CPU()
			if err != nil {
				return 0, err
			}
			sum += cpu
		}
		return sum, nil
	}, atRest, within)
}

// spend runs f and returns the CPU time that the server spent meanwhile.
func (e *env) spend(label string, f func() error) (time.Duration, error) {
	if e.b.profiles == "" {
		return e.cpuOf(f)
	}
	if err := os.MkdirAll(e.b.profiles, 0o700); err != nil {
		return 0, err
	}
	file := filepath.Join(e.b.profiles, fmt.Sprintf("%s-%s-%s-%d.pprof", e.Name, e.scenario, label, e.round))
	done := make(chan error, 1)
	go func() { done <- e.Profile(file, max(1, int(e.window/time.Second))) }()
	spent, err := e.cpuOf(f)
	return spent, errors.Join(err, <-done)
}

func (e *env) cpuOf(f func() error) (time.Duration, error) {
	before, err := e.CPU()
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := e.CPU()
	return after - before, err
}

// with runs f with n connections to the member.
func (e *env) with(n int, f func(member.Conns) error) error {
	conns, err := e.Dial(n)
	if err != nil {
		return err
	}
	defer conns.Close()
	return f(conns)
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// microsPer is what each of n things took.
func microsPer(d time.Duration, n int64) float64 {
	return float64(d) / float64(time.Microsecond) / float64(max(n, 1))
}
