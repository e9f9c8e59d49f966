package sim

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// disk is what a member's files are on. When the power goes it forgets more or
// less of what was not synced.
type disk struct {
	m *member
	*diskState
}

type diskState struct {
	mu        sync.Mutex // Pebble's goroutines do operations too
	mem       *vfs.MemFS
	countdown int // operations until the power goes, 0 for never
	percent   int // of what is not synced survives
	seed      uint64
	left      *vfs.MemFS // what the power cut left; nil while there is power
	where     string
}

func newDisk(m *member) disk {
	d := disk{m, &diskState{mem: vfs.NewCrashableMem()}}
	for _, err := range []error{d.mem.MkdirAll(dataDir, 0o700), syncDir(d.mem, "/")} {
		if err != nil {
			panic(err)
		}
	}
	return d
}

func syncDir(fs vfs.FS, path string) error {
	d, err := fs.OpenDir(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// arm has the power go before the n-th file operation from now.
func (d disk) arm(n int) {
	w := d.m.w
	percent, seed := []int{0, 30, 70, 100}[w.rng.IntN(4)], w.rng.Uint64()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.countdown, d.percent, d.seed = n, percent, seed
}

func (d disk) disarm() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.countdown = 0
}

func (d disk) dead() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.left != nil
}

// onOperation hears of each file operation. What Pebble does in the background, some
// time, is not counted: it removes files, closes them, and syncs the directory once
// more if it has just done so.
func (d disk) onOperation(op errorfs.Op) error {
	switch op.Kind {
	case errorfs.OpCreate, errorfs.OpLink, errorfs.OpRename, errorfs.OpReuseForWrite, errorfs.OpMkdirAll,
		errorfs.OpFileWrite, errorfs.OpFileWriteAt, errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo:
	default:
		return nil
	}
	if op.Kind == errorfs.OpFileSync && d.mem.PathBase(op.Path) == storeDir {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.countdown == 0 || d.left != nil {
		return nil
	}
	if d.countdown--; d.countdown == 0 {
		d.left = survivors(d.mem, d.percent, d.seed)
		d.where = fmt.Sprintf("before an operation on %s, %d%% of what is not synced survives", op.Path, d.percent)
	}
	return nil
}

// cut takes the power away now, if it is not gone yet.
func (d disk) cut() {
	if d.dead() {
		return
	}
	d.arm(0)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.left = survivors(d.mem, d.percent, d.seed)
	d.where = fmt.Sprintf("between operations, %d%% of what is not synced survives", d.percent)
}

// restore is after the member has let go of its files.
func (d disk) restore() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mem, d.left, d.countdown = d.left, nil, 0
}

// survivors returns what a power cut leaves. The file system's own CrashClone
// does nearly that, but in an order that no seed decides, and without ever losing a
// removed file. So it is asked for the two extremes, and which of the two is
// taken is drawn by name: for directory entries, and within files for each block.
func survivors(mem *vfs.MemFS, percent int, seed uint64) *vfs.MemFS {
	synced := mem.CrashClone(vfs.CrashCloneCfg{})
	if percent == 0 {
		return synced
	}
	all := mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(seed, 0))})
	c := merge{mem: mem, synced: synced, all: all, to: vfs.NewCrashableMem(), percent: percent, seed: seed}
	if err := c.dir("/", true, true); err != nil {
		panic(fmt.Sprintf("sim: merging what survives: %v", err))
	}
	return c.to
}

// merge makes one file system of what is synced and what is there.
type merge struct {
	mem         *vfs.MemFS // tells what is there: all has removed files too
	synced, all *vfs.MemFS
	to          *vfs.MemFS
	percent     int
	seed        uint64
}

// draw gives a source of chance that depends on the path alone.
func (c *merge) draw(path string) *rand.Rand {
	h := fnv.New64a()
	_, _ = io.WriteString(h, path)
	return rand.New(rand.NewPCG(c.seed, h.Sum64()))
}

// dir makes a directory, which is synced, or there, or both.
func (c *merge) dir(path string, synced, there bool) error {
	if err := c.to.MkdirAll(path, 0o700); err != nil {
		return err
	}
	var names []string
	if synced {
		names = append(names, list(c.synced, path)...)
	}
	if there {
		names = append(names, list(c.mem, path)...)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	// A journal keeps the order within a directory, on which Pebble relies: a
	// removal is not remembered if something made before it is forgotten.
	ordered := true
	if synced && there {
		names = slices.DeleteFunc(names, func(name string) bool {
			path := c.to.PathJoin(path, name)
			lost := !exists(c.synced, path) && exists(c.mem, path) && c.draw(path).IntN(100) >= c.percent
			ordered = ordered && !lost
			return lost
		})
	}
	for _, name := range names {
		if err := c.entry(c.to.PathJoin(path, name), name, synced, there, ordered); err != nil {
			return err
		}
	}
	return syncDir(c.to, path)
}

func list(fs *vfs.MemFS, path string) []string {
	names, err := fs.List(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) { // Pebble may be removing it
		panic(err)
	}
	return names
}

// entry makes what is in a directory that is synced, or there, or both. Only if
// removals may be remembered can it be lost.
func (c *merge) entry(path, name string, dirSynced, dirThere, removals bool) error {
	rnd := c.draw(path)
	synced, there := dirSynced && exists(c.synced, path), dirThere && exists(c.mem, path)
	if dirSynced && dirThere && !there && removals && rnd.IntN(100) < c.percent || !synced && !exists(c.all, path) {
		return nil
	}
	from := c.all
	if !exists(c.all, path) {
		from = c.synced
	}
	if info, err := from.Stat(path); err != nil {
		return err
	} else if info.IsDir() {
		return c.dir(path, synced, there)
	}
	b := read(from, path)
	switch {
	case !synced || !there:
	case replaced(name):
		// Another file may have been renamed over it: all or nothing.
		if rnd.IntN(100) >= c.percent {
			b = read(c.synced, path)
		}
	default:
		b = blocks(read(c.synced, path), b, c.percent, rnd)
	}
	f, err := c.to.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

func exists(fs *vfs.MemFS, path string) bool {
	_, err := fs.Stat(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		panic(err)
	}
	return err == nil
}

// replaced says whether a name may have come to stand for another file.
func replaced(name string) bool { return name == "index.checkpoint" }

// blocks takes each block that differs from either version of a file.
func blocks(synced, all []byte, percent int, rnd *rand.Rand) []byte {
	const size = 4096
	out := slices.Clone(synced)
	for i := 0; i < len(all); i += size {
		if rnd.IntN(100) >= percent {
			continue
		}
		block := all[i:min(i+size, len(all))]
		if grow := i + len(block) - len(out); grow > 0 {
			out = append(out, make([]byte, grow)...)
		}
		copy(out[i:], block)
	}
	return out
}

func read(fs *vfs.MemFS, path string) []byte {
	f, err := fs.Open(path)
	if err != nil {
		panic(err)
	}
	b, err := io.ReadAll(f)
	if err = errors.Join(err, f.Close()); err != nil {
		panic(err)
	}
	return b
}
