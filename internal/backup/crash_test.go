package backup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/raftlog"
)

// TestRestoreCrashes cuts the power at each step: afterwards each directory is
// whole, or not there, or one that a member refuses to start on. Then a restore
// into another place, and into the same if nothing is there, works.
func TestRestoreCrashes(t *testing.T) {
	b := open(t, saved(t))
	for _, c := range []struct {
		name         string
		inside, bare bool   // the target is there; not even what it is to be made in is
		logs         string // where logs are, if not in their places
	}{
		{name: "beside"}, {name: "inside", inside: true}, {name: "log elsewhere", logs: "logs/m%d"}, {name: "inside, log elsewhere", inside: true, logs: "logs/m%d"},
		{name: "nothing there", bare: true}, {name: "log within", logs: "data/m%d/raft/log"}, {name: "inside, log within", inside: true, logs: "data/m%d/wal"},
	} {
		t.Run(c.name, func(t *testing.T) {
			mem := vfs.NewCrashableMem()
			topo := func(fs vfs.FS) Restore {
				r := topology(fs, 2)
				for i := range r.Targets {
					if c.logs != "" {
						r.Targets[i].LogDir = fmt.Sprintf(c.logs, i)
					}
				}
				return r
			}
			for _, target := range topo(mem).Targets {
				dir := "data"
				if c.inside {
					dir = target.DataDir
				}
				if c.bare {
					continue
				}
				if err := datadir.Make(mem, dir); err != nil {
					t.Fatal(err)
				}
			}
			var mu sync.Mutex
			outcomes := map[string]int{}
			rng := rand.New(rand.NewPCG(3, 4))
			steps := 0
			look := func() {
				mu.Lock()
				defer mu.Unlock()
				steps++
				for _, percent := range []int{0, 50} {
					clone := mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rng})
					r := topo(clone)
					for _, target := range r.Targets {
						what := outcome(t, clone, r, target)
						if outcomes[what]++; what == "silently empty" || what == "damaged" {
							t.Errorf("step %d, %d%% of what was not synced: %s is %s", steps, percent, target.DataDir, what)
						}
					}
				}
			}
			fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
				if op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
					look()
				}
				return nil
			}))
			if _, err := b.Restore(context.Background(), topo(fs)); err != nil {
				t.Fatal(err)
			}
			look()
			t.Logf("%d steps: %v", steps, outcomes)
			if outcomes["absent"] == 0 || outcomes["whole"] == 0 || c.inside && outcomes["refused"] == 0 {
				t.Errorf("%d steps did not reach all outcomes: %v", steps, outcomes)
			}
			// What is there now survives a crash that loses all that was not synced.
			clone := mem.CrashClone(vfs.CrashCloneCfg{})
			for _, target := range topo(clone).Targets {
				check(t, clone, topo(clone), target, keys+1, -1)
			}
		})
	}
}

// outcome is what a member that is started on a directory finds.
func outcome(t *testing.T, fs vfs.FS, r Restore, target Target) string {
	logDir := target.LogDir
	if logDir == "" {
		logDir = fs.PathJoin(target.DataDir, datadir.Log)
	}
	exists, err := raftlog.Exists(fs, logDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	_, known, err := datadir.ReadIdentity(fs, target.DataDir)
	switch {
	case err != nil:
		return "damaged"
	case exists:
		check(t, fs, r, target, keys+1, -1)
		return "whole"
	case known:
		return "refused"
	}
	if names, err := fs.List(target.DataDir); err == nil && len(names) > 0 {
		for _, name := range names {
			if name != datadir.IdentityFile+".tmp" { // the beginning of a restore
				return "silently empty"
			}
		}
	}
	return "absent"
}

// TestRestoreAfterCrash restores where an earlier restore was interrupted.
func TestRestoreAfterCrash(t *testing.T) {
	b := open(t, saved(t))
	mem := vfs.NewMem()
	r := topology(mem, 1)
	for _, path := range []string{"data/m0.restoring/store", "data/m0.restoring/log"} {
		if err := mem.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		f, err := mem.Create(mem.PathJoin(path, "junk"), vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Restore(context.Background(), r); err != nil {
		t.Fatal(err)
	}
	check(t, mem, r, r.Targets[0], keys+1, -1)
}

// TestRestoreAfterAnother restores where an earlier restore with its log in other places was interrupted: none of that becomes part of the directory.
func TestRestoreAfterAnother(t *testing.T) {
	b := open(t, saved(t))
	mem := vfs.NewMem()
	r := topology(mem, 1)
	r.Targets[0].LogDir = "logs/m0"
	for _, path := range []string{"data/m0.restoring/log/junk", "data/m0.restoring/raft/wal/junk", "data/m0.restoring/LOCK", "data/m0.restoring/IDENTITY.tmp", "logs/m0.restoring/junk"} {
		if err := mem.MkdirAll(mem.PathDir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		f, err := mem.Create(path, vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Restore(context.Background(), r); err != nil {
		t.Fatal(err)
	}
	check(t, mem, r, r.Targets[0], keys+1, -1)
	names, err := mem.List("data/m0")
	slices.Sort(names)
	if want := []string{datadir.IdentityFile, datadir.Lock, datadir.Index, datadir.Store}; err != nil || !slices.Equal(names, want) {
		t.Errorf("the directory holds %v, want %v; %v", names, want, err)
	}
	if names, err := mem.List("logs/m0"); err != nil || slices.Contains(names, "junk") {
		t.Errorf("the log's directory holds %v, %v", names, err)
	}
}

// TestRestoreFails lets each step fail: nothing is left then, and the error is told.
func TestRestoreFails(t *testing.T) {
	b := open(t, saved(t))
	failed := errors.New("the disk says no")
	for _, inside := range []bool{false, true} {
		for step := 0; ; step += 1 + step/12 {
			mem := vfs.NewMem()
			r := topology(mem, 2)
			if inside {
				for _, target := range r.Targets {
					if err := mem.MkdirAll(target.DataDir, 0o700); err != nil {
						t.Fatal(err)
					}
				}
			}
			var mu sync.Mutex
			n, hit := 0, ""
			r.FS = errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
				mu.Lock()
				defer mu.Unlock()
				// Pebble tries again for ever what fails in its tables, and ends the process
				// when its MANIFEST fails. A lock that cannot be had is another process's.
				if kindOf(op.Path) == "store" || mem.PathBase(op.Path) == datadir.Lock || op.Kind.ReadOrWrite() != errorfs.OpIsWrite || hit != "" {
					return nil
				}
				if n++; n == step+1 {
					hit = op.Path
					return failed
				}
				return nil
			}))
			_, err := b.Restore(context.Background(), r)
			if hit == "" {
				if err != nil || step < 20 {
					t.Errorf("after %d steps: %v", step, err)
				}
				break
			}
			if err == nil {
				// What cannot be done about it: a lock, or a file that is only for speed.
				for _, target := range r.Targets {
					check(t, mem, r, target, keys+1, -1)
				}
				continue
			}
			if !errors.Is(err, failed) {
				t.Errorf("step %d, %s: %v", step, hit, err)
			}
			for _, target := range r.Targets {
				if names, err := mem.List(target.DataDir); err == nil && len(names) > 0 {
					t.Errorf("step %d, %s: %v is left in %s", step, hit, names, target.DataDir)
				}
				if _, err := mem.Stat(target.DataDir + stagingSuffix); err == nil {
					t.Errorf("step %d, %s: %s%s is left", step, hit, target.DataDir, stagingSuffix)
				}
			}
		}
	}
}

// stuckLocks is a file system whose locks cannot be let go of.
type stuckLocks struct {
	vfs.FS
	err error
}

type stuckLock struct {
	io.Closer
	err error
}

func (f stuckLocks) Lock(path string) (io.Closer, error) {
	lock, err := f.FS.Lock(path)
	if err != nil || f.PathBase(f.PathDir(path)) == datadir.Store { // the storage's
		return lock, err
	}
	return stuckLock{lock, f.err}, nil
}

func (l stuckLock) Close() error { return errors.Join(l.Closer.Close(), l.err) }

// TestRestoreUnlockFails: what was made stays when all of it is whole, and only a lock cannot be let go of.
func TestRestoreUnlockFails(t *testing.T) {
	mem := vfs.NewMem()
	r := topology(stuckLocks{mem, errors.New("it is stuck")}, 3)
	if _, err := open(t, saved(t)).Restore(context.Background(), r); err != nil {
		t.Error(err)
	}
	for _, target := range r.Targets {
		check(t, mem, r, target, keys+1, -1)
	}
}

// kindOf returns "store" for a path in a store.
func kindOf(path string) string {
	fs := vfs.NewMem()
	for dir := path; dir != fs.PathDir(dir); dir = fs.PathDir(dir) {
		if fs.PathBase(dir) == datadir.Store {
			return datadir.Store
		}
	}
	return ""
}
