// Command bench measures Engram beside real etcd: the same load at each in turn, in the same run, reported as ratios.
//
//	go run ./test/bench                          # every scenario at full size: about an hour
//	go run ./test/bench -scenario paging,list    # some of them
//	go run ./test/bench -short                   # small stores and short windows: a few minutes
//
// Scenarios of clusters run three members of each system; CLUSTER_PROGRAM=engram measures Engram's too.
//
// Server CPU is read from /proc, so it needs Linux. A figure that misses its target is printed as MISSED; the exit code is
// 0 all the same, since a target is a statement about one machine and the run may be on another.
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

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(args []string, out, progress io.Writer) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(progress)
	names := flags.String("scenario", "all", "comma-separated: "+strings.Join(scenarioNames(), ", "))
	short := flags.Bool("short", false, "small stores and short windows; targets that are stated for a full store are not judged")
	asJSON := flags.Bool("json", false, "print JSON instead of the table")
	rounds := flags.Int("rounds", 0, "alternations between the systems; 0 means 5, or 1 with -short")
	window := flags.Duration("window", 0, "length of one measurement; 0 means 15s, or 2s with -short")
	size := flags.Int64("size", 0, "bytes of the stores of catchup, reclaim and (twice that) backup; 0 means 1 GiB, or 64 MiB with -short")
	alone := flags.Bool("alone", false, "measure Engram alone, without etcd")
	etcd := flags.String("etcd", "", "etcd program; empty means the one from the cache directory, built if missing")
	engram := flags.String("engram", "", "engram program; empty means one built now")
	dir := flags.String("dir", "", "parent of the data directories, on the disk to be measured; empty means the system's temporary directory")
	profiles := flags.String("profile", "", "directory for CPU profiles of the servers, one for each measured window")
	drop := flags.String(strings.TrimPrefix(dropFlag, "-"), "", "only take a backup from this address, drop it and print its size: what the scenario backup has a process for")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	if *drop != "" {
		return dropBackup(*drop, out)
	}
	chosen, err := choose(*names)
	if err != nil {
		return err
	}
	sizes := fullSizes
	if *short {
		sizes = shortSizes
	}
	if *rounds > 0 {
		sizes.rounds = *rounds
	}
	if *window > 0 {
		sizes.window = max(*window, time.Second)
	}
	if *size > 0 {
		sizes.storeBytes = *size
	}
	data, err := os.MkdirTemp(*dir, "engram-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(data)
	b := &bench{sizes: sizes, dir: data, profiles: *profiles, progress: progress}
	if err := b.build(*etcd, *engram, *alone); err != nil {
		return err
	}
	r := newReport(*short)
	for _, s := range chosen {
		began := time.Now()
		fmt.Fprintf(progress, "%s: %s\n", s.name, s.about)
		samples, err := b.run(s)
		if err != nil {
			return fmt.Errorf("scenario %s: %w", s.name, err)
		}
		r.add(s, samples, *short)
		fmt.Fprintf(progress, "%s: took %v\n", s.name, time.Since(began).Round(time.Second))
		if len(chosen) > 1 { // the next may take long, or fail
			own := newReport(*short)
			own.add(s, samples, *short)
			if err := own.print(progress); err != nil {
				return err
			}
		}
	}
	if *asJSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	return r.print(out)
}

// build finds or builds the programs. Etcd is first, as the one to compare with.
func (b *bench) build(etcd, engram string, alone bool) error {
	if !alone {
		if etcd == "" {
			var err error
			if etcd, err = member.FindEtcd(); err != nil {
				return fmt.Errorf("%w (or run with -alone, without etcd)", err)
			}
		}
		b.systems = append(b.systems, system{etcdName, etcd})
	}
	if engram == "" {
		var err error
		if engram, err = member.BuildEngram(b.dir); err != nil {
			return err
		}
	}
	b.systems = append(b.systems, system{engramName, engram})
	return nil
}

func choose(names string) ([]scenario, error) {
	if names == "all" {
		return scenarios, nil
	}
	var out []scenario
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == name })
		if i < 0 {
			return nil, fmt.Errorf("-scenario=%s: there is no %q: choose from %s", names, name, strings.Join(scenarioNames(), ", "))
		}
		out = append(out, scenarios[i])
	}
	return out, nil
}

func scenarioNames() []string {
	var out []string
	for _, s := range scenarios {
		out = append(out, s.name)
	}
	return out
}
