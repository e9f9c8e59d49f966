// Command engram is the whole product in one binary: the server, the client
// tool and the offline tool. The name it is called by, or the first argument,
// chooses:
//
//	engram, etcd          the server, with etcd's flags
//	engram ctl, etcdctl   the client tool
//	engram util, etcdutl  the offline tool, for backups and data directories
//	engram play           a cluster on this machine, to try out failures
//	engram bench          a load generator
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/engram-kv/engram/bench"
	"github.com/engram-kv/engram/ctl"
	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/logging"
	"github.com/engram-kv/engram/internal/processors"
	"github.com/engram-kv/engram/internal/server"
	"github.com/engram-kv/engram/play"
	"github.com/engram-kv/engram/util"
)

func main() {
	os.Exit(run(filepath.Base(os.Args[0]), os.Args[1:]))
}

// run returns the exit status.
func run(name string, args []string) int {
	switch name {
	case "etcdctl":
		return ctl.Main(name, args)
	case "etcdutl":
		return util.Main(name, args)
	}
	if len(args) > 0 && args[0] == "ctl" {
		return ctl.Main("engram ctl", args[1:])
	}
	if name != "etcd" && len(args) > 0 && args[0] == "util" {
		return util.Main("engram util", args[1:])
	}
	if name != "etcd" && len(args) > 0 && args[0] == "play" {
		return play.Main(args[1:])
	}
	if name != "etcd" && len(args) > 0 && args[0] == "bench" {
		return bench.Main(args[1:])
	}
	// Shells ask for completions of "engram ctl …" in this way.
	if len(args) > 1 && (args[0] == cobra.ShellCompRequestCmd || args[0] == cobra.ShellCompNoDescRequestCmd) {
		switch args[1] {
		case "ctl":
			return ctl.Main("engram ctl", append([]string{args[0]}, args[2:]...))
		case "util":
			return util.Main("engram util", append([]string{args[0]}, args[2:]...))
		}
	}
	calledAs := "engram"
	if name == "etcd" {
		calledAs = name
	}
	return serve(calledAs, args)
}

func serve(calledAs string, args []string) int {
	if calledAs == "engram" && len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		switch args[0] {
		case "help":
			args = []string{"--help"}
		case "version":
			args = []string{"--version"}
		default:
			tool := "ctl"
			if slices.Contains([]string{"verify", "hashkv", "migrate"}, args[0]) {
				tool = "util"
			}
			fmt.Fprintf(os.Stderr, "%q is not a valid flag: engram itself starts a member. Did you mean 'engram %s %s'? See 'engram --help'.\n", args[0], tool, strings.Join(args, " "))
			return 1
		}
	}
	cfg, err := config.Parse(calledAs, args, os.Environ())
	switch {
	case errors.Is(err, config.ErrHelp):
		config.WriteHelp(os.Stdout, calledAs)
		return 0
	case errors.Is(err, config.ErrVersion):
		config.WriteVersion(os.Stdout, calledAs)
		return 0
	case errors.Is(err, config.ErrUsage):
		fmt.Fprintf(os.Stderr, "%v\nRun '%s --help' for the list of flags.\n", err, calledAs)
		return 2
	case err != nil:
		fmt.Fprintf(os.Stderr, "error verifying flags, %v. See '%s --help'.\n", err, calledAs)
		return 1
	}
	if err := cfg.Validate(); err != nil {
		fmt.Fprintf(os.Stderr, "error verifying flags, %v. See '%s --help'.\n", err, calledAs)
		return 1
	}
	if calledAs == "engram" && !cfg.IsSet("log-format") && isTerminal(os.Stderr) {
		cfg.LogFormat = "console"
	}
	log, logFiles, err := logging.Open(logging.Options{
		Level: cfg.LogLevel, Format: cfg.LogFormat, Outputs: cfg.LogOutputs,
		Rotate: cfg.LogRotation, RotateJSON: cfg.LogRotationJSON,
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = logFiles.Close() }()
	for _, w := range cfg.Warnings {
		log.Warn(w)
	}
	if err := runMember(cfg, log); err != nil {
		log.Error("member stopped", "error", err)
		if isTerminal(os.Stderr) || cfg.LogFormat == "console" {
			fmt.Fprintf(os.Stderr, "%s: %v\n", calledAs, err)
		}
		return 1
	}
	return 0
}

// runMember serves until a signal or a failure. A second signal does not wait for what the first one has begun.
func runMember(cfg *config.Config, log *slog.Logger) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	processors.Follow(ctx)
	m, err := server.Start(ctx, cfg, log)
	if err != nil {
		return err
	}
	if cfg.CalledAs == "engram" {
		writeGreeting(os.Stdout, m, cfg)
	}
	err = m.Wait(ctx)
	if errors.Is(err, server.ErrRemoved) {
		log.Warn("member stopped", "reason", err)
		return nil // it has served to its end: etcd's process exits with 0 too
	}
	return err
}

// writeGreeting says where the member is and what to type next.
func writeGreeting(w io.Writer, m *server.Member, cfg *config.Config) {
	tool := "ctl" + endpointFlags(&cfg.ListenClient[0], m.ClientAddrs()[0])
	fmt.Fprintf(w, "Engram %s (compatible with etcd %s) is ready.\n", config.Version, config.EtcdVersion)
	fmt.Fprintf(w, "  clients  %s\n", strings.Join(m.ClientAddrs(), ","))
	fmt.Fprintf(w, "  peers    %s\n", strings.Join(m.PeerAddrs(), ","))
	fmt.Fprintf(w, "  data     %s\n", cfg.DataDir)
	fmt.Fprintf(w, "  try      engram %s put greeting hello     (or: go run ./cmd/engram %s put greeting hello)\n", tool, tool)
	fmt.Fprintf(w, "           engram %s get greeting\n", tool)
	fmt.Fprintf(w, "  stop     Ctrl-C\n")
}

// endpointFlags are what the client tool on this machine must be given to find
// who listens at a URL, bound to an address: nothing if that is where it looks.
func endpointFlags(u *url.URL, bound string) string {
	host, port, err := net.SplitHostPort(bound)
	if err != nil {
		return fmt.Sprintf(" --endpoints=%s://%s", u.Scheme, bound) // a socket's path
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	endpoint := net.JoinHostPort(host, port)
	switch {
	case u.Scheme == "https":
		return fmt.Sprintf(" --endpoints=https://%s --cacert=FILE", endpoint)
	case endpoint != "127.0.0.1:2379":
		return " --endpoints=" + endpoint
	}
	return ""
}

func isTerminal(f *os.File) bool {
	fi, err := f.Stat()
	return err == nil && fi.Mode()&os.ModeCharDevice != 0
}
