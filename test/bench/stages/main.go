// Command stages tells what of the server's CPU goes to which stage of a request, from a CPU profile of a member.
//
//	go run ./test/bench/compare -workload put -rounds 1 -profile DIR
//	go run ./test/bench/stages -cpu 12.9 DIR/engram-put-0.pprof
//
// -cpu is the server CPU of one operation in microseconds, as compare prints it; the profile says how it is divided. A sample belongs
// to the stage of the innermost function that has one: what the runtime does for a caller (allocating, copying) is the caller's.
package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

const module = "github.com/engram-kv/engram/internal/"

// rules are looked through in order; the first prefix of a function's name decides. An empty stage passes to the caller.
var rules = []struct{ prefix, stage string }{
	{"github.com/cockroachdb/pebble/v2/vfs.", ""},
	{"github.com/cockroachdb/pebble/v2/record.", ""},
	{"github.com/cockroachdb/", apply},
	{module + "raftlog.", persist},
	{module + "consensus.(*LogWriter)", persist},
	{module + "consensus.(*Node).write", persist},
	{module + "consensus.(*Node).c", answer}, // complete, callBack, callBackReads
	{module + "consensus.", order},
	{"go.etcd.io/raft/", order},
	{module + "state.", apply},
	{module + "mvcc", apply},
	{module + "storage.", apply},
	{module + "lease.", apply},
	{module + "grpcserver.(*conn).flush", answer},
	{module + "grpcserver.(*flushers)", answer},
	{module + "grpcserver.(*stream).reply", answer},
	{module + "grpcserver.(*stream).settle", answer},
	{module + "grpcserver.(*socket).tryWrite", answer},
	{module + "grpcserver.(*outbox)", answer},
	{module + "rpc.(*request).done", answer},
	{module + "watch.", answer},
	{module + "grpcserver.", read},
	{module + "rpc.", read},
	{module + "command.", read},
	{module + "hot.", read},
}

const (
	read    = "read frames, decode"
	order   = "order"
	persist = "persist"
	apply   = "apply, or read from memory"
	answer  = "answer, watch"
	beside  = "beside all stages: scheduling, garbage collection"
)

var stages = []string{read, order, persist, apply, answer, beside}

func main() {
	cpu := flag.Float64("cpu", 0, "server CPU of one operation, in microseconds; 0 prints shares alone")
	flag.Parse()
	if err := run(*cpu, flag.Args(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "stages:", err)
		os.Exit(1)
	}
}

func run(cpu float64, args []string, out io.Writer) error {
	if len(args) != 1 {
		return fmt.Errorf("%d files given: name one CPU profile", len(args))
	}
	traces, err := exec.Command("go", "tool", "pprof", "-traces", args[0]).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return fmt.Errorf("go tool pprof -traces %s: %w: %s", args[0], err, exit.Stderr)
		}
		return err
	}
	by, err := divide(strings.NewReader(string(traces)))
	if err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	var all time.Duration
	for _, d := range by {
		all += d
	}
	if all == 0 {
		return fmt.Errorf("%s holds no samples: was the server idle?", args[0])
	}
	fmt.Fprintln(out, "| stage | share | us an operation |\n|---|---|---|")
	for _, s := range stages {
		share := float64(by[s]) / float64(all)
		fmt.Fprintf(out, "| %s | %.0f %% | %.2f |\n", s, 100*share, cpu*share)
	}
	return nil
}

// divide reads what `go tool pprof -traces` prints: stacks between lines of dashes, the innermost function first, after its time.
func divide(traces io.Reader) (map[string]time.Duration, error) {
	by := map[string]time.Duration{}
	var stack []string
	var took time.Duration
	end := func() {
		if len(stack) > 0 {
			by[stageOf(stack)] += took
		}
		stack, took = stack[:0], 0
	}
	begun := false
	lines := bufio.NewScanner(traces)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "-----------+") {
			begun = true
			end()
			continue
		}
		fields := strings.Fields(line)
		if !begun || len(fields) == 0 || strings.HasSuffix(fields[0], ":") { // a heading, or a label
			continue
		}
		if len(stack) == 0 {
			d, err := time.ParseDuration(fields[0])
			if err != nil || len(fields) < 2 {
				return nil, fmt.Errorf("a stack begins with %q, which is no time and function", line)
			}
			took, fields = d, fields[1:]
		}
		stack = append(stack, fields[0])
	}
	end()
	return by, lines.Err()
}

func stageOf(stack []string) string {
	for _, f := range stack {
		i := slices.IndexFunc(rules, func(r struct{ prefix, stage string }) bool { return strings.HasPrefix(f, r.prefix) })
		if i >= 0 && rules[i].stage != "" {
			return rules[i].stage
		}
	}
	return beside
}
