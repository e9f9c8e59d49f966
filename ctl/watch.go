package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"
)

// Variables that name what to watch, for command lines that cannot.
const (
	envWatchKey      = "ETCDCTL_WATCH_KEY"
	envWatchRangeEnd = "ETCDCTL_WATCH_RANGE_END"
)

// watchFlags are the flags of one watch, on the command line and in a line of interactive mode.
type watchFlags struct {
	rev            int64
	prefix         bool
	prevKV         bool
	progressNotify bool
}

func (f *watchFlags) register(fs *pflag.FlagSet) {
	fs.BoolVar(&f.prefix, "prefix", false, "watch all keys that begin with the given key")
	fs.Int64Var(&f.rev, "rev", 0, "revision to begin with; 0 is the next one")
	fs.BoolVar(&f.prevKV, "prev-kv", false, "print the key and value as they were before, too")
	fs.BoolVar(&f.progressNotify, "progress-notify", false, "print the revision reached from time to time when nothing happens")
}

// watchRequest is what to watch, and a program to run for each event.
type watchRequest struct {
	key, end string
	ranged   bool // end was given
	command  []string
	flags    watchFlags
}

func (t *tool) watchCommand() *cobra.Command {
	var flags watchFlags
	var interactive, decode bool
	c := &cobra.Command{
		Use:   "watch [options] [key or prefix] [range_end] [--] [exec-command arg1 arg2 ...]",
		Short: "Watches events stream on keys or prefixes",
		Long: `Prints events as they happen. What to watch can also be in ` + envWatchKey + ` and ` + envWatchRangeEnd + `.

A command after -- runs for each event, with ETCD_WATCH_REVISION, ETCD_WATCH_EVENT_TYPE, ETCD_WATCH_KEY and ETCD_WATCH_VALUE
(the last three quoted) in its environment.

In interactive mode every line of standard input is a watch, "watch [options] key ...", or "progress".

If no member is connected within --command-timeout it fails. A watch that is under way and loses its members waits for one to come back, says so, and
goes on where it was.` + decodeHelp,
		RunE: func(c *cobra.Command, args []string) error {
			var request watchRequest
			if !interactive {
				var err error
				if request, err = t.parseWatch(args, c.ArgsLenAtDash(), flags); err != nil {
					return err
				}
			}
			options, err := request.options()
			if err != nil {
				return exit(exitArguments, err)
			}
			client, p, err := t.connectLasting(c, envWatchKey, envWatchRangeEnd)
			if err != nil {
				return err
			}
			defer closeClient(client)
			if err := setDecode(p, decode); err != nil {
				return err
			}
			w := &watchPrinter{tool: t, printer: p}
			defer w.tellLoss(client)()
			if interactive {
				return w.interactive(client)
			}
			return w.follow(client.Watch(t.ctx, request.key, options...), request.command, true)
		},
	}
	flags.register(c.Flags())
	registerDecode(c.Flags(), &decode)
	c.Flags().BoolVarP(&interactive, "interactive", "i", false, "read watches from standard input")
	return c
}

// parseWatch makes a watch of arguments; dash is how many of them are before a "--", -1 if there is none.
func (t *tool) parseWatch(args []string, dash int, flags watchFlags) (watchRequest, error) {
	r := watchRequest{flags: flags}
	if dash >= 0 {
		if dash == len(args) {
			return r, badArguments("bad number of arguments (found separator --, but no commands)")
		}
		args, r.command = args[:dash], args[dash:]
	}
	key, _ := t.getenv(envWatchKey)
	end, _ := t.getenv(envWatchRangeEnd)
	switch {
	case key == "" && end != "":
		return r, badArguments("%s is empty but got %s=%q", envWatchKey, envWatchRangeEnd, end)
	case key != "" && len(args) > 0:
		return r, badArguments("bad number of arguments (found conflicting environment key)")
	case key != "":
		r.key, r.end, r.ranged = key, end, end != ""
	case len(args) == 0:
		return r, badArguments("bad number of arguments")
	case len(args) == 2:
		r.key, r.end, r.ranged = args[0], args[1], true
	default:
		r.key = args[0]
	}
	return r, nil
}

var errWatchRange = errors.New("`range_end` and `--prefix` are mutually exclusive")

func (r *watchRequest) options() ([]clientv3.OpOption, error) {
	if r.ranged && r.flags.prefix {
		return nil, errWatchRange
	}
	options := []clientv3.OpOption{clientv3.WithRev(r.flags.rev)}
	if r.ranged {
		options = append(options, clientv3.WithRange(r.end))
	}
	if r.flags.prefix {
		options = append(options, clientv3.WithPrefix())
	}
	if r.flags.prevKV {
		options = append(options, clientv3.WithPrevKV())
	}
	if r.flags.progressNotify {
		options = append(options, clientv3.WithProgressNotify())
	}
	return options, nil
}

// watchPrinter prints what watches bring.
type watchPrinter struct {
	tool    *tool
	mu      sync.Mutex // one answer, with the programs it starts, or one word about the connection is printed at a time
	printer printer
}

// tellLoss has it told when no member is connected any more, and when one is again, until end is called: etcd's client tries
// again without a word.
func (w *watchPrinter) tellLoss(client *clientv3.Client) (end func()) {
	ctx, cancel := context.WithCancel(w.tool.ctx)
	tell := func(format string, args ...any) {
		w.mu.Lock()
		defer w.mu.Unlock()
		fmt.Fprintf(w.tool.err, format+"\n", args...)
	}
	var telling sync.WaitGroup
	telling.Go(func() {
		conn, lost := client.ActiveConnection(), false
		for state := conn.GetState(); ; state = conn.GetState() {
			switch {
			case state == connectivity.TransientFailure && !lost:
				lost = true
				tell("The connection is lost: trying again until a member answers.")
				if d := w.tool.lookBehind(ctx, w.tool.dialed); d.what != "" && ctx.Err() == nil {
					tell("Hint: %s: %s", d.what, d.hint)
				}
			case state == connectivity.Ready && lost:
				lost = false
				tell("The connection is back.")
			}
			if !conn.WaitForStateChange(ctx, state) {
				return
			}
		}
	})
	return func() {
		cancel()
		telling.Wait()
	}
}

// follow prints answers until the watch ends. If it is the only one, its end by the server ends the command. So does an answer that
// is none: what is connected speaks HTTP/2, and is no member.
func (w *watchPrinter) follow(answers clientv3.WatchChan, command []string, only bool) error {
	for r := range answers {
		if r.Canceled && nobodyAnswered(r.Err()) {
			return exit(exitConnection, r.Err())
		}
		if err := w.print(&r, command); err != nil {
			return err
		}
	}
	if !only || w.tool.ctx.Err() != nil {
		return nil
	}
	return exit(exitInterrupted, errors.New("watch is canceled by the server"))
}

func (w *watchPrinter) print(r *clientv3.WatchResponse, command []string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.tool
	if r.Canceled {
		if errors.Is(r.Err(), context.Canceled) && t.ctx.Err() != nil {
			return nil // by ourselves
		}
		fmt.Fprintf(t.err, "watch was canceled (%v)\n", r.Err())
	}
	if r.IsProgressNotify() {
		fmt.Fprintf(t.out, "progress notify: %d\n", r.Header.GetRevision())
	}
	if err := w.printer.watch(r); err != nil {
		return err
	}
	if err := t.out.Flush(); err != nil {
		return err
	}
	if len(command) == 0 {
		return nil
	}
	for _, e := range r.Events {
		c := exec.CommandContext(t.ctx, command[0], command[1:]...)
		c.Stdout, c.Stderr = t.stdout, t.err
		c.Env = append(slices.Clone(t.env),
			"ETCD_WATCH_REVISION="+strconv.FormatInt(r.Header.GetRevision(), 10),
			"ETCD_WATCH_EVENT_TYPE="+strconv.Quote(e.Type.String()),
			"ETCD_WATCH_KEY="+strconv.Quote(string(e.Kv.GetKey())),
			"ETCD_WATCH_VALUE="+strconv.Quote(string(e.Kv.GetValue())))
		if err := c.Run(); err != nil && t.ctx.Err() == nil {
			fmt.Fprintf(t.err, "command %q error (%v)\n", command, err)
			return exit(exitFailed, nil)
		}
	}
	return nil
}

// interactive takes watches from standard input until it ends, or one of them fails.
func (w *watchPrinter) interactive(client *clientv3.Client) error {
	t := w.tool
	// The end of this context ends all watches, and the reader below unless it is blocked on a terminal.
	ctx, cancel := context.WithCancel(t.ctx)
	defer cancel()
	lines := make(chan string)
	failures := make(chan error, 1) // the first is what the command ends with
	fail := func(err error) {
		select {
		case failures <- err:
		default:
		}
	}
	go func() {
		for {
			line, err := t.in.ReadString('\n')
			if err != nil {
				fail(exit(exitInput, fmt.Errorf("error reading watch request line: %w", err)))
				return
			}
			select {
			case lines <- strings.TrimSuffix(line, "\n"):
			case <-ctx.Done():
				return
			}
		}
	}()
	var watches sync.WaitGroup
	defer watches.Wait()
	defer cancel()
	for {
		select {
		case err := <-failures:
			return err
		case <-ctx.Done():
			return nil
		case line := <-lines:
			request, options, err := w.parseLine(ctx, client, line)
			switch {
			case err != nil:
				return err
			case request == nil:
				continue
			}
			answers := client.Watch(ctx, request.key, options...)
			watches.Go(func() {
				if err := w.follow(answers, request.command, false); err != nil {
					fail(err)
				}
			})
		}
	}
}

// parseLine makes a watch of a line. It returns nil for one that is none; an error ends the command.
func (w *watchPrinter) parseLine(ctx context.Context, client *clientv3.Client, line string) (*watchRequest, []clientv3.OpOption, error) {
	t := w.tool
	invalid := func(format string, args ...any) (*watchRequest, []clientv3.OpOption, error) {
		fmt.Fprintf(t.err, "Invalid command "+format+"\n", args...)
		return nil, nil, nil
	}
	words, err := splitWords(line)
	if err != nil {
		return invalid("%s (%v)", line, err)
	}
	envKey, _ := t.getenv(envWatchKey)
	switch {
	case len(words) == 0:
		fmt.Fprintf(t.err, "Invalid command: %s (watch and progress supported)\n", line)
		return nil, nil, nil
	case words[0] == "progress":
		if err := client.RequestProgress(ctx); err != nil {
			return nil, nil, err
		}
		return nil, nil, nil
	case words[0] != "watch":
		return invalid("%s (only support watch)", line)
	case len(words) < 2 && envKey == "":
		return invalid("%s (command type or key is not provided)", line)
	}
	fs := pflag.NewFlagSet("watch", pflag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	var flags watchFlags
	flags.register(fs)
	if err := fs.Parse(words[1:]); err != nil {
		return nil, nil, exit(exitArguments, err)
	}
	request, err := t.parseWatch(fs.Args(), fs.ArgsLenAtDash(), flags)
	if err != nil {
		return nil, nil, err
	}
	options, err := request.options()
	if err != nil {
		return invalid("%s (%v)", line, err)
	}
	return &request, options, nil
}
