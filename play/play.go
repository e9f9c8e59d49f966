// Package play is `engram play`: a cluster on this machine that can be hurt and healed by commands, to see what a quorum is.
//
// Each member is a process of its own, started from the program's own file, with its own ports and data directory. Package play
// knows them from outside alone: processes, and etcd's client. The types to know are cluster, which owns members and links, and
// console, which reads commands and shows what happened. Invariants:
//
//	P1: no member outlives play (on Linux not even when play is killed), and only processes that play started get signals.
//	P2: all that passes between two members passes the link of this pair and direction, so a cut is a cut both ways.
//	P3: a command ends by itself: whatever it waits for has a limit, and the text then says what is missing.
package play

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
)

// maxMembers is how many members there may be at a time: etcd advises against more than seven.
const maxMembers = 9

// options are the command line, and the world of one run.
type options struct {
	members    int
	membersSet bool
	dir        string // "" is a new temporary directory
	keep       bool

	executable string
	in         io.Reader
	out, err   io.Writer
}

// Main runs `engram play` on the process's own streams and returns the exit code.
func Main(args []string) int {
	o := options{in: os.Stdin, out: os.Stdout, err: os.Stderr}
	c := &cobra.Command{
		Use:   "engram play",
		Short: "Runs a cluster on this machine, to see a quorum at work",
		Long: `Runs a cluster on this machine, each member a process of its own, and reads commands that stop, kill, pause, cut off, heal, add and
remove members. On a terminal a table above the prompt shows how each member is; with input from a pipe or file play writes
plain lines. "help" at the prompt lists the commands; Ctrl-C, Ctrl-D or "quit" ends all of it.`,
		Args: cobra.NoArgs, SilenceErrors: true, SilenceUsage: true, CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		RunE: func(c *cobra.Command, _ []string) error {
			o.membersSet = c.Flags().Changed("members")
			return o.run(c.Context())
		},
	}
	c.Flags().IntVar(&o.members, "members", 3, fmt.Sprintf("how many members to begin with, 1 to %d", maxMembers))
	c.Flags().StringVar(&o.dir, "dir", "", "directory for data and logs; what an earlier play left there goes on (default a new temporary one)")
	c.Flags().BoolVar(&o.keep, "keep", false, "keep the temporary directory at the end")
	c.SetArgs(args)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := c.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(o.err, "Error:", err)
		return 1
	}
	return 0
}

func (o *options) run(ctx context.Context) (err error) {
	if o.members < 1 || o.members > maxMembers {
		return fmt.Errorf("--members=%d: give a number from 1 to %d", o.members, maxMembers)
	}
	if o.executable, err = os.Executable(); err != nil {
		return fmt.Errorf("cannot tell which file this program is, which the members are started from: %w", err)
	}
	scratch, err := os.MkdirTemp("", "engram-play-")
	if err != nil {
		return fmt.Errorf("no temporary directory: %w; TMPDIR names another place for it", err)
	}
	home := filepath.Join(scratch, "members")
	if o.dir != "" {
		if home, err = filepath.Abs(o.dir); err != nil {
			return errors.Join(err, os.RemoveAll(scratch))
		}
	}
	console := newConsole(o.in, o.out)
	c, err := newCluster(o.executable, home, scratch, console.happened)
	if err != nil {
		return errors.Join(err, os.RemoveAll(scratch))
	}
	err = c.found(o)
	if err == nil {
		err = console.run(ctx, c)
	}
	console.restore()
	return errors.Join(err, o.end(c, scratch, console))
}

// end stops what runs and removes what is not to stay.
func (o *options) end(c *cluster, scratch string, console *console) error {
	if n := c.alive(); n > 0 {
		console.say("Stopping %s; Ctrl-C again kills.", count(n, "member"))
	}
	// The first interrupt has ended the commands; another one makes short work of members that take their time.
	hasty, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	c.close(hasty)
	switch {
	case o.dir != "":
		console.say("Data and logs are in %s; engram play --dir %s goes on with them.", c.home, shellWord(o.dir))
	case o.keep:
		console.say("Data and logs are in %s; engram play --dir %s goes on with them.", c.home, shellWord(c.home))
		return os.RemoveAll(filepath.Join(scratch, linkDir))
	}
	return os.RemoveAll(scratch)
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
