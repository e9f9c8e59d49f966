// Package bench is `engram bench`: a load generator for etcd and for Engram, or whatever else speaks etcd's API.
//
// It loads servers in an ordinary client's shapes and costs as little as it can while it does so, for it often shares their machine. It
// knows them by their gRPC interface alone. Main is the entry point; the types to know are runner, which has the connections,
// workload, which makes operations, and drive, which is one workload at work. Package wire carries the calls, package api has
// their bytes. Invariants:
//
//	B1: no key outside --prefix is written or deleted, and nothing below it that another hand has written.
//	B2: what a run made is deleted in its end, also after an error or an interrupt, unless --keep says otherwise.
//	B3: in an open loop latency counts from when an operation was due, however late it could begin.
//	B4: memory is bounded by connections, streams and keys, not by how long a run takes or how slow a server is.
package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/engram-kv/engram/internal/terminal"
)

// errFailures ends a run whose figures were printed and in which calls failed.
var errFailures = errors.New("calls failed")

// streams are the world of one run.
type streams struct {
	out, err io.Writer
}

// Main runs `engram bench` on the process's own streams and returns the exit code: 0 if all calls succeeded.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// After the first interrupt the keys are deleted; a second one ends that too.
	go func() { <-ctx.Done(); stop() }()
	return run(ctx, args, streams{out: os.Stdout, err: os.Stderr})
}

func run(ctx context.Context, args []string, s streams) int {
	c := newRoot(s)
	c.SetArgs(args)
	if err := c.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(s.err, "Error:", err)
		return 1
	}
	return 0
}

func newRoot(s streams) *cobra.Command {
	root := &cobra.Command{
		Use:         "bench",
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "engram bench"},
		Short:       "Loads a cluster, of Engram or etcd, and tells what it bears",
		Long: `Loads a cluster, of Engram or etcd, and tells what it bears. All keys lie below a prefix of their own and are deleted in the end.
Without --rate each of --connections x --streams clients makes its next call when the last was answered; with it, calls begin at that rate
whatever the server does, and latency counts from when each was due. The exit code is 0 if all calls succeeded.`,
		Example: `  engram bench put --connections 50 --streams 20          as fast as answers come
  engram bench get --rate 5000 --duration 1m --json      5000 a second, as JSON
  engram bench kubernetes --nodes 500                    what 500 nodes ask of their store
  engram bench fill --prefix /load/ --keys 100000        a store to work on; then, as often as wanted:
  engram bench list --prefix /load/ --keys 100000 --value-size 256 --limit 500 --keep`,
		SilenceErrors: true, SilenceUsage: true, CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetOut(s.out)
	root.SetErr(s.err)
	for _, sc := range scenarios {
		root.AddCommand(sc.command(s))
	}
	return root
}

func (sc *scenario) command(s streams) *cobra.Command {
	o := &options{}
	c := &cobra.Command{
		Use: sc.name, Short: sc.about, Long: sc.about + ".", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			for name, value := range sc.defaults {
				if f := c.Flags().Lookup(name); !f.Changed {
					if err := f.Value.Set(value); err != nil {
						return err
					}
				}
			}
			return sc.run(c.Context(), o, s)
		},
	}
	o.register(c.Flags())
	if sc.flags != nil {
		sc.flags(o, c)
	}
	for name, value := range sc.defaults {
		c.Flags().Lookup(name).DefValue = value
	}
	return c
}

// run is one run of a scenario.
func (sc *scenario) run(ctx context.Context, o *options, s streams) (err error) {
	if err := errors.Join(o.check(), sc.checked(o)); err != nil {
		return err
	}
	// What is cleaned up must be so after an interrupt too.
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	r, err := newRunner(background, o, &progress{out: s.err, live: isTerminal(s.err)})
	if err != nil {
		return err
	}
	defer r.close()
	if err := r.connect(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.clean(background)) }()
	filled, err := r.claim(ctx, sc.dirties)
	if err != nil {
		return err
	}
	res, err := sc.measure(ctx, r, filled)
	if res != nil {
		if err := res.write(s.out, o.json); err != nil {
			return err
		}
	}
	switch {
	case err != nil:
		return err
	case res != nil && res.Errors > 0:
		first := res.ErrorCodes[0]
		return fmt.Errorf("%w: %d of %d; the most with %s: %s", errFailures, res.Errors, res.Errors+res.succeeded(), first.Code, first.First)
	case ctx.Err() != nil:
		return errors.New("interrupted")
	}
	return nil
}

func (r *Result) succeeded() (n int64) {
	for _, k := range r.Kinds {
		n += k.Operations
	}
	return n
}

func (r *Result) write(out io.Writer, asJSON bool) error {
	if !asJSON {
		return r.print(out)
	}
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// cleanWithin bounds the deleting of a run's keys. It may be many.
const cleanWithin = 10 * time.Minute

// clean deletes what the run has made.
func (r *runner) clean(ctx context.Context) error {
	if !r.claimed {
		return nil
	}
	if r.failure() != nil { // there is no server to ask
		return fmt.Errorf("the keys below %q are still there: delete them with `engram ctl del --prefix %q`", r.o.prefix, r.o.prefix)
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, cleanWithin)
	defer cancel()
	if r.o.keep {
		r.progress.say("keys below %q are kept: --prefix=%q uses them again, `engram ctl del --prefix %q` deletes them", r.o.prefix, r.o.prefix, r.o.prefix)
		return r.revoke(ctx) // which deletes the keys that are attached to leases: the next run makes them anew
	}
	// Keys go first: to revoke a lease that many are attached to would hold up the server.
	from, end := r.o.all()
	if err := r.clear(ctx, from, end); err != nil {
		return fmt.Errorf("%w; the rest can be deleted with `engram ctl del --prefix %q`", err, r.o.prefix)
	}
	return r.revoke(ctx)
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && terminal.Is(f)
}
