// Package util is the offline tool: `engram util`, which is also `etcdutl` when it is called by that name. It works on files, not
// on running members: backups and data directories.
//
// It is not a library: Main is the entry point, and the other type to know is tool, one run of the program. Each group of commands
// has a file with a function newXCommand, whose commands find their tool by toolOf. Invariants:
//
//	U1: nothing outside a tool is read or written but the files that a command is about.
//	U2: what a command was asked for goes to out; all else, progress and warnings included, goes to err.
//	U3: what a command makes is whole or absent, whatever ends it.
//	U4: a file that is only looked at is left as it is.
package util

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/engram-kv/engram/internal/config"
)

// Exit codes, which scripts rely on.
const (
	exitFailed    = 1   // the command failed, or the command line has an unknown command or flag
	exitFormat    = 4   // the output format does not exist, or not for this command
	exitArguments = 128 // the arguments do not fit the command
)

// exitError is an error with the exit code it ends the run with.
type exitError struct {
	code int
	err  error // nil if all was told already
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// exit gives err an exit code. A nil err ends the run without another word.
func exit(code int, err error) error { return &exitError{code: code, err: err} }

// badArguments is the error of a command line whose arguments do not fit the command.
func badArguments(format string, args ...any) error {
	return exit(exitArguments, fmt.Errorf(format, args...))
}

// Streams is where one run writes to.
type Streams struct {
	Out, Err io.Writer
}

// Main runs the tool on the process's own streams and returns the exit code. calledAs is how it was called: "etcdutl" or "etcdctl"
// keep etcd's defaults where ours are safer. An interrupted command removes what it had begun; a second interrupt does not wait for that.
func Main(calledAs string, args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop)
	return Run(ctx, calledAs, args, Streams{Out: os.Stdout, Err: os.Stderr})
}

// Run runs one command line and returns the exit code.
func Run(ctx context.Context, calledAs string, args []string, s Streams) int {
	out := bufio.NewWriter(s.Out)
	t := &tool{name: calledAs, out: out, err: s.Err}
	root := t.root()
	root.SetArgs(args)
	err := root.ExecuteContext(context.WithValue(ctx, toolKey{}, t))
	if flushErr := out.Flush(); err == nil && flushErr != nil {
		err = fmt.Errorf("standard output: %w", flushErr)
	}
	if err == nil {
		return 0
	}
	code := exitFailed
	if e, ok := errors.AsType[*exitError](err); ok {
		if code = e.code; e.err == nil {
			return code
		}
	}
	fmt.Fprintln(s.Err, "Error:", err)
	if _, _, err := root.Find(args); err != nil { // there is no such command
		fmt.Fprintf(s.Err, "Run '%s --help' for usage.\n", calledAs)
	}
	if e, ok := errors.AsType[*usageError](err); ok {
		fmt.Fprintln(s.Err, strings.TrimSuffix(e.command.UsageString(), "\n"))
	}
	return code
}

// tool is one run.
type tool struct {
	name     string        // how it was called
	out      *bufio.Writer // flushed at the end
	err      io.Writer
	writeOut string
	timeout  time.Duration // of waiting for the lock of a data directory
}

type toolKey struct{}

// toolOf returns the run that a command belongs to.
func toolOf(c *cobra.Command) *tool { return c.Context().Value(toolKey{}).(*tool) }

// asEtcd says that the tool was called by etcd's name, so that scripts rely on etcd's defaults.
func (t *tool) asEtcd() bool { return t.name == "etcdutl" || strings.HasPrefix(t.name, "etcdctl") }

// say tells the operator something beside the answer.
func (t *tool) say(format string, args ...any) { fmt.Fprintf(t.err, format+"\n", args...) }

func (t *tool) root() *cobra.Command {
	root := &cobra.Command{
		Use:               t.name,
		Short:             "The offline tool: backups and data directories of Engram, and backups of etcd.",
		SilenceErrors:     true,
		SilenceUsage:      true,
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: t.name},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetOut(t.out)
	root.SetErr(t.err)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return &usageError{command: c, err: err} })
	root.PersistentFlags().StringVarP(&t.writeOut, "write-out", "w", "simple", "output format: simple, json, table or fields")
	root.PersistentFlags().DurationVar(&t.timeout, "timeout", 10*time.Second, "how long to wait for another process to let go of a data directory")
	root.AddCommand(newSnapshotCommand(), newHashKVCommand(), newVerifyCommand(), newDefragCommand(), newMigrateCommand(), newVersionCommand(), newCompletionCommand())
	return root
}

// usageError is a command line that cannot be parsed; the usage of its command follows the error.
type usageError struct {
	command *cobra.Command
	err     error
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Prints the version of etcdutl",
		Run: func(c *cobra.Command, _ []string) {
			t := toolOf(c)
			// Scripts parse the first line, so it names etcdutl whatever the tool is called.
			fmt.Fprintln(t.out, "etcdutl version:", config.EtcdVersion)
			fmt.Fprintln(t.out, "API version:", config.EtcdVersion[:strings.LastIndexByte(config.EtcdVersion, '.')])
			if !t.asEtcd() {
				fmt.Fprintln(t.out, "Engram version:", config.Version)
			}
		},
	}
}

func newCompletionCommand() *cobra.Command {
	shells := []string{"bash", "zsh", "fish", "powershell"}
	return &cobra.Command{
		Use:       "completion [bash|zsh|fish|powershell]",
		Short:     "Generate completion script",
		Long:      "Writes a script that completes this tool's command lines in a shell. For bash, in its start file: source <(engram util completion bash)",
		ValidArgs: shells,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return &usageError{command: c, err: fmt.Errorf("accepts 1 arg(s), received %d", len(args))}
			}
			if !slices.Contains(shells, args[0]) {
				return &usageError{command: c, err: fmt.Errorf("invalid argument %q for %q", args[0], c.CommandPath())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			out := toolOf(c).out
			switch args[0] {
			case "bash":
				return c.Root().GenBashCompletionV2(out, true)
			case "zsh":
				return c.Root().GenZshCompletion(out)
			case "fish":
				return c.Root().GenFishCompletion(out, true)
			}
			return c.Root().GenPowerShellCompletionWithDesc(out)
		},
	}
}
