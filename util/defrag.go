package util

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/internal/terminal"
)

func newDefragCommand() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:   "defrag",
		Short: "Gives back the space of deleted revisions in the data directory of a member that does not run",
		Long: `Gives back the space of deleted revisions in the data directory of a member that does not run. Nobody needs it: a member does that by itself
while it runs. It is there for scripts written for etcd.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := toolOf(c).defrag(c.Context(), filepath.Clean(dir)); err != nil {
				//lint:ignore ST1005 etcd's words
				return fmt.Errorf("Failed to defragment etcd data[%s] (%w)", dir, err)
			}
			return nil
		},
	}
	c.Flags().StringVar(&dir, "data-dir", "", "Required. The data directory of a member that does not run.")
	if err := c.MarkFlagRequired("data-dir"); err != nil {
		panic(err) // the flag is there
	}
	return c
}

func (t *tool) defrag(ctx context.Context, dir string) (err error) {
	release, err := t.lockDataDir(ctx, storage.DefaultFS, dir, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	path, err := presentStore(dir)
	if err != nil {
		return err
	}
	if _, err := storage.DefaultFS.Stat(path); err != nil {
		return err
	}
	store, err := storage.Open(storage.Options{Dir: path, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	before := store.DiskBytes()
	lower, upper := storage.RevisionBounds(0, 0)
	err = store.Reclaim(ctx, lower, upper)
	after := store.DiskBytes()
	if err := errors.Join(err, store.Close()); err != nil {
		return err
	}
	t.say("finished defragmenting directory %s: %s, it was %s", dir, terminal.Bytes(int64(after)), terminal.Bytes(int64(before)))
	return nil
}

// presentStore returns the directory of the store that a member with its log in place would open.
func presentStore(dir string) (string, error) {
	fs := storage.DefaultFS
	log := filepath.Join(dir, datadir.Log)
	if exists, err := raftlog.Exists(fs, log); err == nil && exists {
		s, err := raftlog.Scan(fs, log, nil)
		if err != nil {
			return "", err
		}
		if s.Installed != nil && s.Installed.Dir != "" {
			return filepath.Join(dir, s.Installed.Dir, datadir.Store), nil
		}
		return filepath.Join(dir, datadir.Store), nil
	}
	// The log lies elsewhere, and with it what says which store is the present one.
	names, err := fs.List(dir)
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if datadir.IsWholeSnapshot(name) {
			return "", fmt.Errorf("%s holds %s beside its store, and no log to say which one is the present: start the member instead, it needs no defragmentation", dir, name)
		}
	}
	return filepath.Join(dir, datadir.Store), nil
}
