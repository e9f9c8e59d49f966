package compat

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// stage is how far an import is, by what a kill left on the disk.
type stage string

const (
	untouched stage = "nothing is built"
	building  stage = "something is built"
	decided   stage = "etcd's directory has its other name, the rest has not"
	ended     stage = "all has its name"
)

// importMoments are what the process of an import is killed at, in the order in which they come: a line that it logs, or a
// file that appears. Some are followed by the next within microseconds, so a kill may come late: attempts are made until it
// has hit the stage, as often as attempts says.
var importMoments = []struct {
	name   string
	hits   stage
	logs   string
	exists string // a pattern below the data directory
}{
	{name: "it has begun", hits: untouched, logs: "importing it"},
	{name: "part of the database is read", hits: building, exists: "import.tmp/store/*.sst"},
	{name: "the log is begun", hits: building, exists: "import.tmp/log/*.log"},
	{name: "the index is written", hits: building, exists: "import.tmp/index/*"},
	{name: "all is built", hits: building, exists: "import.tmp/MARKER"},
	{name: "it is written down how to end", hits: building, exists: "IMPORT*"},
	{name: "etcd's directory is moved", hits: decided, exists: "member.etcd-*/snap/db"},
	{name: "the store has its name", hits: decided, exists: "store"},
	{name: "the log has its name", hits: decided, exists: "log"},
	{name: "the identity has its name", hits: ended, exists: "IDENTITY"},
}

const killAttempts = 15

// TestImportKilled ends the process with SIGKILL in the midst of an import, and once more in the midst of the start after that: what etcd
// wrote is not changed by a byte, until its directory has its other name etcd itself can go on, and the next start begins
// anew or ends what is left, with all that etcd has.
func TestImportKilled(t *testing.T) {
	k := leaveForImport(t, reference(t))
	for i, moment := range importMoments {
		t.Run(moment.name, func(t *testing.T) {
			var late []stage
			for range killAttempts {
				k.lay(t)
				got := k.killAt(t, moment.logs, moment.exists)
				if got != moment.hits {
					late = append(late, got)
					k.end(t, got) // what it hit instead must be sound, too
					continue
				}
				if i%2 == 1 { // killed again, wherever that start is then
					got = k.killAt(t, "", importMoments[(i+3)%len(importMoments)].exists)
				}
				k.end(t, got)
				t.Logf("attempt %d, which left: %s", len(late)+1, got)
				return
			}
			t.Fatalf("%d kills came too late: they found %q", killAttempts, late)
		})
	}
}

// killed is a member whose process is killed, on copies of what etcd left.
type killed struct {
	ctx    context.Context
	c      *cluster.Cluster
	m      *cluster.Member
	etcd   cluster.Program
	engram cluster.Program
	left   string            // the directory that etcd left
	files  map[string]string // of it
	want   []string          // what etcd has on it
}

// leaveForImport has etcd leave a directory that takes some time to import.
func leaveForImport(t *testing.T, p cluster.Program) *killed {
	t.Helper()
	ctx := mixedContext(t)
	c := newCluster(t, "--snapshot-count=100")
	check(t, c.Start(ctx, p))
	k := &killed{ctx: ctx, c: c, m: c.Members()[0], etcd: p, engram: seat(t, "engram")}
	k.engram.Flags = []string{"--log-level=info"}
	client, err := k.m.Client()
	check(t, err)
	for i := range 60 {
		_, err := client.Put(ctx, fmt.Sprintf("large-%02d", i%30), strings.Repeat("0123456789abcdef", 1<<14)) // 256 KiB
		check(t, err)
	}
	check(t, fillImport(ctx, c, k.m))
	check(t, k.m.Kill())
	k.left = k.m.DataDir + ".left"
	check(t, os.Rename(k.m.DataDir, k.left))
	k.files = digests(t, filepath.Join(k.left, "member"))
	k.lay(t)
	k.want = k.etcdHas(t)
	return k
}

// lay puts what etcd left where the member looks.
func (k *killed) lay(t *testing.T) {
	t.Helper()
	check(t, os.RemoveAll(k.m.DataDir))
	check(t, copyDir(k.left, k.m.DataDir))
}

// etcdHas is what etcd has on the member's directory.
func (k *killed) etcdHas(t *testing.T) []string {
	t.Helper()
	k.m.Program = k.etcd
	check(t, forgetToken(k.c, k.m))
	check(t, k.m.Restart(k.ctx))
	content, err := contentOf(k.ctx, k.m)
	check(t, err)
	check(t, k.m.Stop())
	return content
}

// killAt starts Engram and kills it as soon as its log has a line, or a file is there; or it serves, which ends the import.
func (k *killed) killAt(t *testing.T, logs, exists string) stage {
	t.Helper()
	log := k.log(t)
	k.m.Program = k.engram
	check(t, k.m.Spawn())
	for { // without a pause: what comes next may be microseconds away
		if exists != "" {
			found, err := filepath.Glob(filepath.Join(k.m.DataDir, exists))
			check(t, err)
			if len(found) > 0 {
				break
			}
		}
		if text := log(); logs != "" && strings.Contains(text, logs) || strings.Contains(text, "ready to serve client requests") {
			break
		}
		select {
		case <-k.m.Exited():
			t.Fatalf("it ended by itself:\n%s", log())
		case <-k.ctx.Done():
			t.Fatal(k.ctx.Err())
		default:
			runtime.Gosched()
		}
	}
	check(t, k.m.Kill())
	at := stageOf(t, k.m.DataDir)
	if at == ended {
		verified, err := process.Command{Program: []string{k.engram.Path, "util"}, Args: []string{"verify", k.m.DataDir}}.Run()
		check(t, err)
		if verified.Code != 0 || strings.Contains(verified.Stdout, "none of a member's files") {
			t.Errorf("util verify ends with %d and says:\n%s%s", verified.Code, verified.Stdout, verified.Stderr)
		}
	}
	return at
}

// log returns what the member logs from now on.
func (k *killed) log(t *testing.T) func() string {
	t.Helper()
	path := filepath.Join(filepath.Dir(k.m.DataDir), k.m.Name+".log")
	before, err := os.Stat(path)
	check(t, err)
	return func() string {
		text, err := os.ReadFile(path)
		if err != nil {
			return err.Error()
		}
		return string(text[before.Size():])
	}
}

// stageOf is how far an import is that does not run.
func stageOf(t *testing.T, dir string) stage {
	t.Helper()
	there := func(name string) (is, isDir bool) {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		return err == nil, err == nil && info.IsDir()
	}
	moved, err := filepath.Glob(filepath.Join(dir, "member.etcd-*", "snap", "db"))
	check(t, err)
	if _, original := there("member"); original == (len(moved) > 0) {
		t.Fatalf("etcd's directory is called member: %t, and by its other name: %t", original, len(moved) > 0)
	}
	switch temp, _ := there("import.tmp"); {
	case len(moved) == 0 && !temp:
		return untouched
	case len(moved) == 0:
		return building
	}
	for _, name := range []string{"store", "index", "log", "IDENTITY"} {
		if is, _ := there(name); !is {
			return decided
		}
	}
	return ended
}

// end starts Engram on what a kill left, and looks at what comes of it. Etcd goes first where it still may.
func (k *killed) end(t *testing.T, at stage) {
	t.Helper()
	k.unchanged(t)
	if at == untouched || at == building {
		kept := k.m.DataDir + ".kept"
		check(t, copyDir(k.m.DataDir, kept))
		sameContent(t, k.want, k.etcdHas(t))
		check(t, os.RemoveAll(k.m.DataDir))
		check(t, os.Rename(kept, k.m.DataDir))
	}
	interrupted, err := filepath.Glob(filepath.Join(k.m.DataDir, "IMPORT"))
	check(t, err)
	log := k.log(t)
	k.m.Program = k.engram
	check(t, forgetToken(k.c, k.m))
	check(t, k.m.Restart(k.ctx))
	got, err := contentOf(k.ctx, k.m)
	check(t, err)
	sameContent(t, k.want, got)
	told := log()
	anew, ends := strings.Contains(told, "the data directory is etcd's: importing it"), strings.Contains(told, "that was interrupted")
	if fresh := at == untouched || at == building; anew != fresh || ends != (!fresh && len(interrupted) > 0) {
		t.Errorf("%s, and the next start says it begins: %t, it ends what is left: %t:\n%s", at, anew, ends, told)
	}
	client, err := k.m.Client()
	check(t, err)
	_, err = client.Put(k.ctx, "after", "import")
	check(t, err)
	check(t, k.m.Kill())
	if got := stageOf(t, k.m.DataDir); got != ended {
		t.Errorf("the member served, and %s", got)
	}
	for _, name := range []string{"import.tmp", "IMPORT", "IMPORT.tmp"} {
		if _, err := os.Stat(filepath.Join(k.m.DataDir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", name, err)
		}
	}
	k.unchanged(t)
}

// unchanged compares etcd's files, by whichever name, with what etcd left.
func (k *killed) unchanged(t *testing.T) {
	t.Helper()
	dir := filepath.Join(k.m.DataDir, "member")
	if moved, err := filepath.Glob(filepath.Join(k.m.DataDir, "member.etcd-*", "snap")); err != nil || len(moved) > 1 {
		t.Fatalf("etcd's files are in %v: %v", moved, err)
	} else if len(moved) == 1 {
		dir = filepath.Dir(moved[0])
	}
	if got := digests(t, dir); !maps.Equal(got, k.files) {
		t.Fatalf("etcd's files were changed: there are %v, there were %v", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(k.files)))
	}
}

// digests are the contents of all files below a directory.
func digests(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	check(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		out[strings.TrimPrefix(path, dir)] = fmt.Sprintf("%d bytes %x", len(b), sha256.Sum256(b))
		return err
	}))
	return out
}
