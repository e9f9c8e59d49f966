package util

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/state"
	"github.com/engram-kv/engram/internal/storage"
	"github.com/engram-kv/engram/internal/terminal"
)

func newVerifyCommand() *cobra.Command {
	var walDir string
	c := &cobra.Command{
		Use:   "verify <data-dir>",
		Short: "Checks the data directory of a member that does not run",
		Long: `Reads all of a data directory: each record of the raft log, each block of the store with its checksum, the index checkpoint beside the index that
all records make, and whether log, store and identity belong together. Nothing is changed. It prints what is there and what is wrong, with what
to do, and ends with 1 if a member must not be started on it. Memory is what a member's index takes, twice.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("verify requires exactly one argument, a data directory")
			}
			return toolOf(c).verify(c.Context(), args[0], walDir)
		},
	}
	c.Flags().StringVar(&walDir, "wal-dir", "", "The directory of the raft log, if the member has it elsewhere")
	return c
}

func (t *tool) verify(ctx context.Context, dir, walDir string) (err error) {
	fs := &unwritable{FS: storage.DefaultFS, told: func(path string) {
		t.say("Warning: %s cannot be locked on a file system that cannot be written to: see that no member runs on it elsewhere.", path)
	}}
	release, err := t.lockDataDir(ctx, fs, dir, walDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	v := datadir.Verify{FS: fs, Dir: filepath.Clean(dir), LogDir: walDir, State: state.Options{Version: config.EtcdVersion}}
	if f, ok := t.err.(*os.File); ok && terminal.Is(f) {
		v.Progress = func(what string) { t.say("reading the %s", what) }
	}
	r, err := v.Run(ctx)
	if err != nil {
		return err
	}
	if err := t.printReport(r); err != nil {
		return err
	}
	if len(r.Problems) > 0 {
		return exit(exitFailed, nil)
	}
	return nil
}

func (t *tool) printReport(r datadir.Report) error {
	switch t.writeOut {
	case "json":
		b, err := json.Marshal(struct {
			datadir.Report
			Cluster string `json:"clusterID"`
			Member  string `json:"memberID"`
			Sound   bool   `json:"sound"`
		}{r, fmt.Sprintf("%x", r.Identity.Cluster), fmt.Sprintf("%x", r.Identity.Member), len(r.Problems) == 0})
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(t.out, "%s\n", b)
		return err
	case "simple":
		writeReport(t.out, r)
		return nil
	}
	return exit(exitFormat, fmt.Errorf("%s not supported as output format", t.writeOut))
}

// writeReport writes for people. An error of w stays in it until the flush at the end.
func writeReport(w io.Writer, r datadir.Report) {
	line := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	line("%s: member %x of cluster %x", r.Dir, r.Identity.Member, r.Identity.Cluster)
	if r.Log.Segments > 0 {
		entries := "no entries"
		if r.Log.Last >= r.Log.First {
			entries = fmt.Sprintf("entries %d to %d", r.Log.First, r.Log.Last)
		}
		line("log    %d records in %d files, %s, term %d", r.Log.Records, r.Log.Segments, entries, r.Log.Term)
	}
	if s := r.Store; s.Dir != "" {
		line("store  %d records and %d rows, %s; %d keys at revision %d, compacted at %d; applied index %d of term %d",
			s.Records, s.Rows, terminal.Bytes(s.Bytes), s.Keys, s.Revision, s.CompactRevision, s.Applied, s.Term)
		if r.Index.There {
			line("index  checkpoint of revision %d", r.Index.Revision)
		} else {
			line("index  no checkpoint: the next start reads all records")
		}
	}
	for _, n := range r.Notes {
		line("note   %s", n)
	}
	for _, p := range r.Problems {
		line("\nDAMAGED: %s\n  %s\n  What to do: %s", p.Where, p.What, p.Cure)
	}
	if len(r.Problems) == 0 {
		line("sound: a member can be started on it")
	}
}

// unwritable is a file system that may be mounted without the right to write. Nothing in a data directory can be locked then, nor changed
// by a member of this machine.
type unwritable struct {
	storage.FS
	told func(dir string) // of a directory that is not locked, once
	said bool
}

func (u *unwritable) Lock(path string) (io.Closer, error) {
	lock, err := u.FS.Lock(path)
	if !errors.Is(err, unix.EROFS) {
		return lock, err
	}
	if !u.said {
		u.said = true
		u.told(filepath.Dir(path))
	}
	return io.NopCloser(nil), nil
}

// lockEvery is the time between two tries to lock a data directory.
const lockEvery = 100 * time.Millisecond

// lockDataDir keeps members off a data directory, after waiting for --timeout for the one that runs.
func (t *tool) lockDataDir(ctx context.Context, fs storage.FS, dir, walDir string) (release func() error, err error) {
	if _, err := os.Stat(dir); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	var held []io.Closer
	release = func() error {
		var errs []error
		for _, l := range held {
			errs = append(errs, l.Close())
		}
		return errors.Join(errs...)
	}
	paths := []string{filepath.Join(dir, datadir.Lock)}
	if walDir != "" {
		paths = append(paths, filepath.Join(walDir, datadir.LogLock))
	}
	for _, path := range paths {
		for {
			lock, err := fs.Lock(path)
			if err == nil {
				held = append(held, lock)
				break
			}
			if !isHeld(err) {
				return nil, errors.Join(fmt.Errorf("locking %s: %w", filepath.Dir(path), err), release())
			}
			select {
			case <-time.After(lockEvery):
			case <-ctx.Done():
				return nil, errors.Join(fmt.Errorf("%s is in use by another process (%w): stop the member first", filepath.Dir(path), err), release())
			}
		}
	}
	return release, nil
}

// isHeld says whether a lock cannot be had because somebody has it: the system says so of another process by a number, the storage of this
// one in words. All else is about the file.
func isHeld(err error) bool {
	if errors.Is(err, unix.EAGAIN) {
		return true
	}
	_, file := errors.AsType[*os.PathError](err)
	_, system := errors.AsType[unix.Errno](err)
	return !file && !system
}
