// Command compare runs `engram bench` on Engram and on real etcd in alternation, with the same settings on the same disk, and
// prints how they compare.
//
//	go run ./test/bench/compare                       # everything: about three quarters of an hour
//	go run ./test/bench/compare -workload put,get     # some of it
//	go run ./test/bench/compare -short                # small stores, one round: under a minute
//
// A ratio is of two measurements that followed each other. Which of the two systems goes first changes from round to round; how far
// etcd's own figures lie apart shows how quiet the machine is. Server CPU is read from Linux. Missed targets are printed
// as MISSED, and the exit code is 0 all the same: a target is a statement about one machine.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/engram-kv/engram/test/bench/internal/member"
)

// sizes are the extents of a run.
type sizes struct {
	rounds   int
	duration time.Duration // of one measurement
	warmup   time.Duration
	settle   time.Duration // bound of the wait for background work to end
	small    int           // keys of the store of small values
	large    int           // keys of the store that is listed
	watchers int
	leases   int
	nodes    int // of the Kubernetes cluster, with 30 pods on each
}

var (
	fullSizes  = sizes{rounds: 5, duration: 10 * time.Second, warmup: 2 * time.Second, settle: 20 * time.Second, small: 100_000, large: 100_000, watchers: 1000, leases: 10_000, nodes: 500}
	shortSizes = sizes{rounds: 1, duration: 600 * time.Millisecond, warmup: 100 * time.Millisecond, settle: 0, small: 5_000, large: 12_000, watchers: 1000, leases: 1000, nodes: 20}
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "compare:", err)
		os.Exit(1)
	}
}

func run(args []string, out, progress io.Writer) (err error) {
	flags := flag.NewFlagSet("compare", flag.ContinueOnError)
	flags.SetOutput(progress)
	names := flags.String("workload", "all", "comma-separated: "+strings.Join(workloadNames(), ", "))
	short := flags.Bool("short", false, "small stores, short measurements, one round: shows that all of it works, and little else")
	rounds := flags.Int("rounds", 0, "alternations; 0 means 5, or 1 with -short")
	duration := flags.Duration("duration", 0, "length of one measurement; 0 means 10s, or 0.6s with -short")
	asJSON := flags.Bool("json", false, "print JSON instead of the table")
	etcd := flags.String("etcd", "", "etcd program; empty means the one from the cache directory, built if missing")
	engram := flags.String("engram", "", "engram program, which also makes the load; empty means one built now")
	dir := flags.String("dir", "", "parent of the data directories, on the disk to be measured; empty means the system's temporary directory")
	profiles := flags.String("profile", "", "directory for CPU profiles of single members, one for each measurement")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	chosen, err := choose(*names)
	if err != nil {
		return err
	}
	c := &comparison{sizes: fullSizes, progress: progress, profiles: *profiles}
	if *short {
		c.sizes = shortSizes
	}
	if *rounds > 0 {
		c.rounds = *rounds
	}
	if *duration > 0 {
		c.duration = *duration
	}
	if c.dir, err = os.MkdirTemp(*dir, "engram-compare-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(c.dir)) }()
	if *etcd == "" {
		if *etcd, err = member.FindEtcd(); err != nil {
			return err
		}
	}
	if *engram == "" {
		if *engram, err = member.BuildEngram(c.dir); err != nil {
			return err
		}
	}
	c.generator = *engram
	// Etcd is first, as the one to compare with.
	c.systems = []system{{etcdName, *etcd}, {engramName, *engram}}
	r, err := c.run(chosen)
	if err != nil {
		return err
	}
	r.Short = *short
	if *asJSON {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	return r.print(out)
}

func choose(names string) ([]workload, error) {
	if names == "all" {
		return workloads, nil
	}
	var out []workload
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(workloads, func(w workload) bool { return w.name == name })
		if i < 0 {
			return nil, fmt.Errorf("-workload=%s: there is no %q: choose from %s", names, name, strings.Join(workloadNames(), ", "))
		}
		out = append(out, workloads[i])
	}
	return out, nil
}

func workloadNames() []string {
	var out []string
	for _, w := range workloads {
		out = append(out, w.name)
	}
	return out
}
