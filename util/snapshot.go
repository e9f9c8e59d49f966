package util

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/engram-kv/engram/internal/backup"
	"github.com/engram-kv/engram/internal/terminal"
)

func newSnapshotCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "snapshot <subcommand>",
		Short: "Looks at backups and makes data directories of them",
		Long: `Looks at backups and makes data directories of them. A backup is taken from a running member by "ctl snapshot save", of Engram's or of
etcd's; both restore both.`,
	}
	hash := newHashKVCommand()
	hash.Use = "hashkv <filename>"
	c.AddCommand(newSnapshotStatusCommand(), newSnapshotRestoreCommand(), hash)
	return c
}

func newSnapshotStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status <filename>",
		Short: "Checks a backup and tells what is in it",
		Long: `Reads and checks all of a backup and prints hash, revision, total keys, total size and version. The file is left as it is. The hash is that of
all of the database's rows; it differs from that of "endpoint hashkv", which "snapshot hashkv" prints.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("snapshot status requires exactly one argument")
			}
			return toolOf(c).snapshotStatus(c.Context(), args[0])
		},
	}
}

func (t *tool) snapshotStatus(ctx context.Context, path string) (err error) {
	b, err := t.openBackup(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	if b.HasSum() {
		if err := b.CheckSum(ctx); err != nil {
			if !t.asEtcd() || !errors.Is(err, backup.ErrSum) {
				return err
			}
			t.say("Warning: %v. It cannot be restored; what follows is what the rest of it says.", err)
		}
	} else if !t.asEtcd() {
		t.say("Note: no checksum stands behind the database in %s, so nobody can tell whether it is what was saved; restore takes it with --skip-hash-check.", path)
	}
	info, err := b.Inspect(ctx)
	if err != nil {
		return err
	}
	hash := strconv.FormatUint(uint64(info.Hash), 16)
	row := []string{hash, strconv.FormatInt(info.Revision, 10), strconv.FormatInt(info.Keys, 10), terminal.Bytes(info.Bytes), info.Version}
	return t.print(answer{
		simple: fmt.Sprintf("%s, %s, %s, %s, %s", row[0], row[1], row[2], row[3], row[4]),
		json: struct {
			Hash      uint32 `json:"hash"`
			Revision  int64  `json:"revision"`
			TotalKey  int64  `json:"totalKey"`
			TotalSize int64  `json:"totalSize"`
			Version   string `json:"version"`
		}{info.Hash, info.Revision, info.Keys, info.Bytes, info.Version},
		columns: []string{"hash", "revision", "total keys", "total size", "version"},
		row:     row,
		fields: []field{
			{"Hash", info.Hash}, {"Revision", info.Revision}, {"Keys", info.Keys}, {"Size", info.Bytes}, {"Version", info.Version},
		},
	})
}

// openBackup opens a file. That there is none is said in etcd's words.
func (t *tool) openBackup(path string) (*backup.File, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, err
	}
	return backup.Open(path)
}

// newHashKVCommand is "snapshot hashkv", and "hashkv", as etcdutl calls it.
func newHashKVCommand() *cobra.Command {
	var rev int64
	c := &cobra.Command{
		Use:   "hashkv <filename>",
		Short: "Prints the KV history hash of a backup",
		Long: `Prints hash, hash revision and compact revision: what a member restored from the file answers to "endpoint hashkv --rev". The file is left as it
is, unlike by etcdutl, which writes to it.`,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return exit(exitFailed, fmt.Errorf("accepts 1 arg(s), received %d", len(args)))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error { return toolOf(c).hashKV(c.Context(), args[0], rev) },
	}
	c.Flags().Int64Var(&rev, "rev", 0, "maximum revision to hash (default: latest revision)")
	return c
}

func (t *tool) hashKV(ctx context.Context, path string, rev int64) (err error) {
	if rev < 0 {
		return badArguments("--rev=%d: give a revision, or 0 for the last", rev)
	}
	b, err := t.openBackup(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	h, err := b.HashKV(ctx, rev)
	if err != nil {
		return err
	}
	row := []string{strconv.FormatUint(uint64(h.Hash), 10), strconv.FormatInt(h.Revision, 10), strconv.FormatInt(h.CompactRevision, 10)}
	return t.print(answer{
		simple: fmt.Sprintf("%s, %s, %s", row[0], row[1], row[2]),
		json: struct {
			Hash            uint32 `json:"hash"`
			HashRevision    int64  `json:"hashRevision"`
			CompactRevision int64  `json:"compactRevision"`
		}{h.Hash, h.Revision, h.CompactRevision},
		columns: []string{"hash", "hash revision", "compact revision"},
		row:     row,
		fields:  []field{{"Hash", h.Hash}, {"Hash revision", h.Revision}, {"Compact revision", h.CompactRevision}},
	})
}
