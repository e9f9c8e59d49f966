package raftlog

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// crasher drives a log on a memory file system and takes, before a chosen file
// operation, a clone of what a power cut at that moment would leave.
type crasher struct {
	g    *generator
	mem  *vfs.MemFS
	wrap func(vfs.FS) vfs.FS // mutants come in here
	log  *Log
	m    model

	// What a crash now may leave: states[0] is what was acknowledged, each
	// next one has one record more.
	states []model

	countdown int // file operations until the crash
	clone     *vfs.MemFS
	allowed   []model
	where     string // the operation before which the crash was
}

func (c *crasher) maybeCrash(op errorfs.Op) error {
	if c.countdown--; c.countdown == 0 && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
		c.crash(fmt.Sprintf("before %v of %s", op.Kind, op.Path))
	} else if c.countdown == 0 {
		c.countdown = 1 // reads change nothing
	}
	return nil
}

func (c *crasher) crash(where string) {
	percent := []int{0, 20, 50, 80, 100}[c.g.IntN(5)]
	c.clone = c.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: c.g.Rand})
	c.allowed = append([]model(nil), c.states...)
	c.where = fmt.Sprintf("%s, %d%% of the unsynced blocks kept", where, percent)
}

func (c *crasher) options() Options {
	o := testOptions(c.wrap(errorfs.Wrap(c.mem, errorfs.InjectorFunc(c.maybeCrash))))
	o.SegmentBytes = 32 << 10
	o.Rand = c.g.Uint64
	return o
}

// note adds one state for each record of a, in the order they are written.
func (c *crasher) note(a Append) {
	one := func(a Append) {
		c.m.append(a)
		c.states = append(c.states, c.m.clone())
	}
	if a.Snapshot != nil {
		one(Append{Snapshot: a.Snapshot})
	}
	for i := range a.Entries {
		one(Append{Entries: a.Entries[i : i+1]})
	}
	if a.HardState != nil {
		one(Append{HardState: a.HardState})
	}
}

func (c *crasher) acknowledged() { c.states = []model{c.m.clone()} }

// step does one thing a driver does.
func (c *crasher) step() error {
	switch c.g.IntN(12) {
	case 0:
		if i := c.m.hard.commit; i > c.m.compacted.index {
			i = c.m.compacted.index + 1 + c.g.Uint64N(i-c.m.compacted.index)
			c.m.compact(i)
			c.states = append(c.states, c.m.clone())
			c.g.seen["compact"]++
			return c.log.Compact(i)
		}
		return nil
	case 1:
		if err := c.log.Mark(); err != nil {
			return err
		}
		c.acknowledged()
		return nil
	case 2:
		return c.log.Prepare()
	}
	as := c.g.appends(&c.m)
	for i := range as { // large entries, so that a batch spans blocks
		if c.g.IntN(3) == 0 {
			for _, e := range as[i].Entries {
				e.Data = make([]byte, c.g.IntN(3000))
				for j := range e.Data {
					e.Data[j] = byte(*e.Index + *e.Term + uint64(j))
				}
			}
		}
		c.note(as[i])
	}
	must, err := c.log.Write(as)
	if err != nil || !must {
		return err
	}
	if c.g.IntN(8) == 0 {
		return nil // the next Sync covers it
	}
	if err := c.log.Sync(); err != nil {
		return err
	}
	c.acknowledged()
	return nil
}

// life opens what the last crash left, checks it, and works until the next crash.
// It returns an error if something was lost or made up.
func (c *crasher) life() error {
	c.countdown = 0
	l, err := Open(c.options())
	if err != nil {
		return fmt.Errorf("open after a crash %s: %w", c.where, err)
	}
	got, err := read(l)
	if err != nil {
		return fmt.Errorf("read after a crash %s: %w", c.where, err)
	}
	c.log = l
	defer func() { _ = l.Abandon() }()
	found := false
	for i := range c.allowed {
		want := c.allowed[i].contents
		want.hard.commit = max(want.hard.commit, want.compacted.index)
		if found = got.equal(want); found {
			c.m = c.allowed[i].clone()
			c.m.hard = want.hard
			c.g.seen[map[bool]string{true: "nothing more", false: "a prefix more"}[i == 0]]++
			break
		}
	}
	if !found {
		return fmt.Errorf("after a crash %s the log has\n%v\nacknowledged was\n%v",
			c.where, got, c.allowed[0].contents)
	}
	c.acknowledged()
	c.clone, c.countdown = nil, 1+c.g.IntN(120)
	for c.clone == nil {
		if err := c.step(); err != nil {
			return err
		}
		if c.clone == nil && c.g.IntN(60) == 0 {
			c.crash("between operations")
		}
	}
	return nil
}

// runCrashes lives several lives, each on what the one before left.
func runCrashes(seed uint64, seen map[string]int, wrap func(vfs.FS) vfs.FS) error {
	c := &crasher{
		g: &generator{rand.New(rand.NewPCG(seed, 7)), seen}, wrap: wrap,
		clone: vfs.NewCrashableMem(), allowed: []model{{}},
	}
	for n := range 8 {
		c.mem = crashable(c.clone)
		if err := c.life(); err != nil {
			return fmt.Errorf("life %d: %w", n, err)
		}
	}
	return nil
}

// crashable makes the result of a crash one that can crash again.
func crashable(from *vfs.MemFS) *vfs.MemFS {
	to := vfs.NewCrashableMem()
	if ok, err := vfs.Clone(from, to, "", "", vfs.CloneSync); err != nil {
		panic(err)
	} else if !ok {
		panic("nothing to clone")
	}
	return to
}

func keepFS(fs vfs.FS) vfs.FS { return fs }

func TestCrash(t *testing.T) {
	seen := map[string]int{}
	for seed := range uint64(40) {
		if err := runCrashes(seed, seen, keepFS); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	for _, k := range []string{"append", "replace", "snapshot", "compact", "nothing more", "a prefix more"} {
		if seen[k] == 0 {
			t.Errorf("no run saw %s: %v", k, seen)
		}
	}
	t.Log(seen)
}

// forgetful is a file system on which syncs of the chosen kind do nothing, but
// for the first one of each file that is opened.
type forgetful struct {
	vfs.FS
	files, dirs bool
}

type forgetfulFile struct {
	vfs.File
	syncs *int
}

func (f forgetfulFile) forget(sync func() error) error {
	if *f.syncs++; *f.syncs > 1 {
		return nil
	}
	return sync()
}

func (f forgetfulFile) Sync() error     { return f.forget(f.File.Sync) }
func (f forgetfulFile) SyncData() error { return f.forget(f.File.SyncData) }

func (f forgetful) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	file, err := f.FS.OpenReadWrite(name, c, o...)
	if err != nil || !f.files {
		return file, err
	}
	return forgetfulFile{file, new(int)}, nil
}

func (f forgetful) OpenDir(name string) (vfs.File, error) {
	file, err := f.FS.OpenDir(name)
	if err != nil || !f.dirs {
		return file, err
	}
	return forgetfulFile{file, new(int)}, nil
}

// TestCrashMutants shows that TestCrash fails when syncs are left out.
func TestCrashMutants(t *testing.T) {
	for _, mutant := range []forgetful{{files: true}, {dirs: true}} {
		lost := 0
		for seed := range uint64(15) {
			err := runCrashes(seed, map[string]int{}, func(fs vfs.FS) vfs.FS {
				return forgetful{fs, mutant.files, mutant.dirs}
			})
			if err != nil {
				lost++
			}
		}
		if lost == 0 {
			t.Errorf("syncs of files %v and of directories %v were left out and no crash lost anything", mutant.files, mutant.dirs)
		}
		t.Logf("without syncs of files %v, directories %v: %d of 15 runs lost something", mutant.files, mutant.dirs, lost)
	}
}

// TestStaleRecordNotRevived crashes twice at the same place. The first crash
// leaves a whole record beyond a torn one; the second life writes records that
// end just where it begins, and it must not come back.
func TestStaleRecordNotRevived(t *testing.T) {
	fs := vfs.NewMem()
	o := testOptions(fs)
	l := mustOpen(t, o)
	write(t, l, Append{Entries: entries(1, 1, 1, 40)})
	if err := l.Mark(); err != nil {
		t.Fatal(err)
	}
	seg := l.st.lastSegment()
	torn := int64(l.end - seg.base)
	if _, err := l.Write([]Append{{Entries: entries(2, 3, 1, 40)}}); err != nil {
		t.Fatal(err)
	}
	stale := torn + recordSize(entryPrefix+40)
	if err := l.Abandon(); err != nil {
		t.Fatal(err)
	}
	flipByte(t, fs, seg.path, torn+frameBytes, 0xff)

	l = mustOpen(t, o)
	if last, _ := l.LastIndex(); last != 1 {
		t.Fatalf("last is %d after the first crash", last)
	}
	write(t, l, Append{Entries: entries(2, 2, 1, 8)})
	if end := int64(l.end - seg.base); end != stale {
		t.Fatalf("the second life ends at %d, the stale record lies at %d", end, stale)
	}
	s, err := openScanner(fs, testDir, seg.name)
	if err != nil {
		t.Fatal(err)
	}
	if f, payload, err := s.valid(stale); err != nil || payload == nil || f.kind != KindEntry {
		t.Fatalf("there is no stale record: %v", err)
	}
	if err := errors.Join(s.close(), l.Abandon()); err != nil {
		t.Fatal(err)
	}

	l = closeAtEnd(t, mustOpen(t, o))
	if last, _ := l.LastIndex(); last != 2 {
		t.Fatalf("an entry of the life before the crash came back: last is %d", last)
	}
}
