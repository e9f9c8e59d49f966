package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/backup"
	"github.com/engram-kv/engram/internal/terminal"
	"github.com/engram-kv/engram/util"
)

func (t *tool) snapshotCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "snapshot <subcommand>",
		Short: "Manages etcd node snapshots",
		Long:  "Takes backups from a running member. \"status\" and \"restore\" are those of engram util, which works on files.",
	}
	c.AddCommand(t.snapshotSaveCommand(), t.snapshotFileCommand("status", "Checks a backup and tells what is in it"),
		t.snapshotFileCommand("restore", "Makes a data directory of a backup"))
	return c
}

func (t *tool) snapshotSaveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "save <filename>",
		Short: "Stores an etcd node backend snapshot to a given file",
		Long: `Saves what a member holds at this moment to a file: etcd's database, and a checksum behind it. Writes go on meanwhile. The file is there only
once all of it has come, was read back and checked, and is on the disk; a file of that name is replaced then. It needs the role root if
authentication is on, and exactly one endpoint.`,
		Example: "  " + t.name + " snapshot save backup.db\n  " + t.name + " snapshot status backup.db",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("snapshot save expects one argument <filename>")
			}
			return t.snapshotSave(c, args[0])
		},
	}
}

func (t *tool) snapshotSave(c *cobra.Command, path string) error {
	if _, err := t.setup(c); err != nil {
		return err
	}
	if len(t.global.endpoints) != 1 { // each member has a moment of its own
		return exit(exitInterrupted, fmt.Errorf("snapshot must be requested to one selected node, not multiple %v", t.global.endpoints))
	}
	cfg, err := t.clientConfig(c)
	if err != nil {
		return err
	}
	client, err := dial(cfg)
	if err != nil {
		return err
	}
	defer closeClient(client)
	ctx, stop := signal.NotifyContext(t.ctx, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	stream, err := etcdserverpb.NewMaintenanceClient(client.ActiveConnection()).Snapshot(ctx, &etcdserverpb.SnapshotRequest{})
	if err != nil {
		return exit(exitInterrupted, err)
	}
	var version string
	next := func() (backup.Piece, error) {
		r, err := stream.Recv()
		if err != nil && !errors.Is(err, io.EOF) && ctx.Err() == nil {
			err = plainError{err}
		}
		if r.GetVersion() != "" {
			version = r.GetVersion()
		}
		return backup.Piece{Bytes: r.GetBlob(), Remaining: int64(r.GetRemainingBytes())}, err
	}
	var progress func(done, of int64)
	if meter := terminal.NewMeter(t.err, "saving "+path); meter != nil {
		progress = meter.At
		defer meter.End()
	}
	info, err := backup.Save(ctx, path, next, progress)
	if err != nil && ctx.Err() != nil && t.ctx.Err() == nil {
		err = fmt.Errorf("interrupted: %s was not saved", path)
	}
	if err != nil {
		return exit(exitInterrupted, err)
	}
	fmt.Fprintln(t.out, "Snapshot saved at", path)
	if version != "" {
		fmt.Fprintln(t.out, "Server version", version)
	}
	if !t.asEtcdctl() {
		fmt.Fprintf(t.out, "Checked: %d keys at revision %d, %s\n", info.Keys, info.Revision, terminal.Bytes(info.Bytes))
	}
	return nil
}

// plainError is an error of a call with the text alone that the server gave, which is what etcdctl tells.
type plainError struct{ err error }

func (e plainError) Error() string {
	if s, ok := status.FromError(e.err); ok {
		return s.Message()
	}
	return e.err.Error()
}

func (e plainError) Unwrap() error { return e.err }

// snapshotFileCommand is a command of the offline tool, which etcdctl had once, and which is still typed. All but the output
// format is left to it.
func (t *tool) snapshotFileCommand(name, short string) *cobra.Command {
	return &cobra.Command{
		Use:                name + " <filename>",
		Short:              short,
		DisableFlagParsing: true,
		RunE: func(c *cobra.Command, args []string) error {
			return t.runUtil(c.Context(), append([]string{"snapshot", name}, withoutGlobals(c, args)...))
		},
	}
}

// withoutGlobals takes out of a command line the flags about endpoints and connections, which mean nothing to a command on files,
// and which scripts give to every command.
func withoutGlobals(c *cobra.Command, args []string) (left []string) {
	flags := c.Root().PersistentFlags()
	for i := 0; i < len(args); i++ {
		name, _, whole := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		var f *pflag.Flag
		switch {
		case strings.HasPrefix(args[i], "--"):
			f = flags.Lookup(name)
		case strings.HasPrefix(args[i], "-") && len(name) == 1:
			f = flags.ShorthandLookup(name)
		}
		if f == nil || f.Name == "write-out" {
			left = append(left, args[i])
			continue
		}
		if !whole && f.NoOptDefVal == "" {
			i++ // its value
		}
	}
	return left
}

// runUtil runs a command line of the offline tool, which tells its errors by itself.
func (t *tool) runUtil(ctx context.Context, args []string) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	name := strings.TrimSuffix(t.name, " ctl") // "engram ctl" is "engram util" there
	if name != t.name {
		name += " util"
	}
	if code := util.Run(ctx, name, args, util.Streams{Out: t.out, Err: t.err}); code != 0 {
		return exit(code, nil)
	}
	return nil
}
