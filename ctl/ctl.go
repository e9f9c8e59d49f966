// Package ctl is the client tool: `engram ctl`, which is also `etcdctl` when it is called by that name. It takes etcdctl 3.7's
// command lines and answers with the same output, error texts and exit codes.
//
// It knows the server by its gRPC interface alone, through etcd's own client. It is not a library: Main is the entry point, and
// the other type to know is tool, one run of the program. Invariants:
//
//	T1: nothing outside a tool is read or written: input, output, environment and signals come in with Streams.
//	T2: what a command was asked for goes to Out; all else, progress and warnings included, goes to Err.
//	T3: a failed run ends with one line `Error: ...` on Err, unless every failure was already told there by itself.
package ctl

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// Exit codes, which scripts rely on.
const (
	exitFailed      = 1   // a request failed, an endpoint is unhealthy, or the command line has an unknown command or flag
	exitConnection  = 2   // connecting or logging in failed, or a request about one lease
	exitInput       = 3   // what was typed or piped in is not understood
	exitFormat      = 4   // the output format, sort order, sort target or consistency does not exist
	exitInterrupted = 5   // the server ended a watch
	exitArguments   = 128 // the arguments do not fit the command
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

// Streams is the world of one run.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
	Env      []string // name=value
}

// Main runs the tool on the process's own streams and returns the exit code. name is how it was called, for usage texts.
func Main(name string, args []string) int {
	// net/http writes there what it thinks of a server that speaks first, as gRPC's do. What users need to know of that the
	// diagnosis tells.
	log.SetOutput(io.Discard)
	return Run(context.Background(), name, args, Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Env: os.Environ()})
}

// Run runs one command line and returns the exit code. It blocks until the command is done or ctx ends, which some commands
// (watch, lock, elect -l, lease keep-alive) wait for.
func Run(ctx context.Context, name string, args []string, s Streams) int {
	out := bufio.NewWriter(s.Out)
	t := &tool{ctx: ctx, name: name, in: bufio.NewReader(s.In), out: out, err: s.Err, stdin: s.In, stdout: s.Out, env: s.Env}
	root := t.root()
	root.SetArgs(args)
	t.dashed = dashedArgs(args)
	err := root.ExecuteContext(ctx)
	if flushErr := out.Flush(); err == nil && flushErr != nil {
		err = fmt.Errorf("standard output: %w", flushErr)
	}
	if err == nil {
		return 0
	}
	if e, ok := errors.AsType[*exitError](err); ok {
		if e.err != nil {
			t.tellError(e.err)
		}
		return e.code
	}
	t.tellError(err)
	if hint := laterHint(args); hint != "" {
		fmt.Fprintln(s.Err, "Hint:", hint)
	}
	if e, ok := errors.AsType[*usageError](err); ok {
		e.print(s.Err)
	}
	if _, _, err := root.Find(args); err != nil { // there is no such command
		fmt.Fprintf(s.Err, "Run '%s --help' for usage.\n", name)
	}
	return exitFailed
}

// tool is one run. Its methods are the commands.
type tool struct {
	ctx    context.Context
	name   string
	in     *bufio.Reader
	out    *bufio.Writer // flushed at the end, and after each answer of a command that goes on
	err    io.Writer
	stdin  io.Reader // what in reads and out writes, for programs that a command starts
	stdout io.Writer
	env    []string
	global globalFlags
	dialed []string // endpoints that a client was made for
	dashed []string // arguments after the first --; nil if there is no --
}

// dashedArgs returns a copy of what follows the first "--", which is not nil if there is one.
func dashedArgs(args []string) []string {
	for i, a := range args {
		if a == "--" {
			return append([]string{}, args[i+1:]...)
		}
	}
	return nil
}

// getenv returns the last value of an environment variable.
func (t *tool) getenv(name string) (value string, ok bool) {
	for _, e := range t.env {
		if k, v, found := strings.Cut(e, "="); found && k == name {
			value, ok = v, true
		}
	}
	return value, ok
}

const (
	groupKV          = "kv"
	groupMaintenance = "maintenance"
	groupConcurrency = "concurrency"
	groupAuth        = "auth"
	groupUtility     = "utility"
)

// root builds the tree of commands.
func (t *tool) root() *cobra.Command {
	root := &cobra.Command{
		Use:               t.name,
		Short:             "The command line client of an Engram or etcd cluster.",
		SilenceErrors:     true,
		SilenceUsage:      true,
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: t.name},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetIn(t.in)
	root.SetOut(t.out)
	root.SetErr(t.err)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return &usageError{command: c, err: err} })
	root.SetUsageTemplate(usageTemplate)
	root.SetHelpTemplate(helpTemplate)
	t.global.register(root.PersistentFlags())
	root.AddGroup(
		&cobra.Group{ID: groupKV, Title: "Key-value commands"},
		&cobra.Group{ID: groupMaintenance, Title: "Cluster maintenance commands"},
		&cobra.Group{ID: groupConcurrency, Title: "Concurrency commands"},
		&cobra.Group{ID: groupAuth, Title: "Authentication commands"},
		&cobra.Group{ID: groupUtility, Title: "Utility commands"},
	)
	root.SetHelpCommandGroupID(groupUtility)
	for group, commands := range map[string][]*cobra.Command{
		groupKV: {t.putCommand(), t.getCommand(), t.delCommand(), t.txnCommand(), t.watchCommand(), t.compactionCommand(),
			t.leaseCommand()},
		groupMaintenance: {t.memberCommand(), t.endpointCommand(), t.alarmCommand(), t.defragCommand(), t.moveLeaderCommand(),
			t.downgradeCommand(), t.snapshotCommand(), t.doctorCommand(), t.duCommand(), t.topCommand()},
		groupConcurrency: {t.lockCommand(), t.electCommand()},
		groupAuth:        {t.authCommand(), t.userCommand(), t.roleCommand()},
		groupUtility:     {t.versionCommand(), t.optionsCommand(), t.completionCommand()},
	} {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	if !t.asEtcdctl() {
		rebuild := t.rebuildCommand()
		rebuild.GroupID = groupMaintenance
		root.AddCommand(rebuild)
	}
	return root
}

// group is a command that only holds others.
func (t *tool) group(name, title string) *cobra.Command {
	return &cobra.Command{
		Use:   name,
		Short: fmt.Sprintf("%s. Use `%s %s --help` to see subcommands", title, t.name, name),
		Long:  title,
	}
}

// usageError is a command line that cannot be parsed; the usage of its command follows the error.
type usageError struct {
	command *cobra.Command
	err     error
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func (e *usageError) print(w io.Writer) {
	fmt.Fprintln(w, strings.TrimSuffix(e.command.UsageString(), "\n"))
}

// The global flags are the same for all commands, so the help of a command leaves them to `options`.
const (
	usageTemplate = `Usage:{{if .Runnable}}
  {{.UseLine}}{{end}}{{if .HasAvailableSubCommands}}
  {{.CommandPath}} [command]{{end}}{{if .HasAvailableSubCommands}}{{$commands := .Commands}}{{if eq (len .Groups) 0}}

Available Commands:{{range $commands}}{{if .IsAvailableCommand}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{else}}{{range $group := .Groups}}

{{.Title}}{{range $commands}}{{if (and (eq .GroupID $group.ID) (or .IsAvailableCommand (eq .Name "help")))}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}{{end}}{{end}}{{if and .HasParent .HasAvailableLocalFlags}}

Flags:
{{.LocalFlags.FlagUsages | trimTrailingWhitespaces}}{{end}}{{if .HasAvailableSubCommands}}

Use "{{.CommandPath}} [command] --help" for more information about a command.{{else}}
{{end}}
Use "{{.Root.CommandPath}} options" for a list of global command-line options (applies to all commands).
`
	helpTemplate = `{{with (or .Long .Short)}}{{. | trimTrailingWhitespaces}}

{{end}}{{if or .Runnable .HasSubCommands}}{{.UsageString}}{{end}}`
)
