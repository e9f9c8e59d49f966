package server

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"path"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/storage"
)

var (
	flips    = flag.Int("flips", 120, "bits to flip in TestBitFlips")
	flipSeed = flag.Uint64("flipseed", 1, "seed of TestBitFlips")
)

// TestBitFlips flips a bit, or loses a piece, in a file of a member that does not
// run, of every kind and anywhere. The member then either has all that it had, or
// refuses to go on and names the file. It never serves anything else, and never
// ends without saying why.
func TestBitFlips(t *testing.T) {
	t.Parallel()
	n := *flips
	rng := rand.New(rand.NewPCG(*flipSeed, 0))
	seen := map[string]int{}
	for _, crashed := range []bool{false, true} {
		fs, want := flipBase(t, crashed)
		var files []string
		listFiles(t, fs, "data", &files)
		for i := range n / 2 {
			file := files[i%len(files)] // each of them, however small
			broken, where := breakFile(t, fs, file, rng)
			if broken == nil {
				continue
			}
			verdict := judgeFlip(t, broken, want, file)
			seen[kindOf(file)+": "+verdict]++
			if strings.HasPrefix(verdict, "WRONG") {
				t.Errorf("crashed=%t, %s: %s", crashed, where, verdict)
			}
			if t.Failed() {
				t.Fatalf("replay: go test ./internal/server -run TestBitFlips -flipseed %d -flips %d", *flipSeed, n)
			}
		}
	}
	t.Log(seen)
	for _, what := range []string{"table: refused", "MANIFEST: refused", "log: refused", "index: the same"} {
		if seen[what] == 0 {
			t.Errorf("no run saw %q", what)
		}
	}
}

// flipBase is the files of a member with all kinds of data, and what it held.
func flipBase(t *testing.T, crashed bool) (vfs.FS, string) {
	fs := vfs.NewCrashableMem()
	m, err := tryStartWith(t, "data", slog.New(slog.DiscardHandler), Seams{FS: fs, Storage: smallStore}, "--disk-reserve-bytes=0")
	if err != nil {
		t.Fatal(err)
	}
	c := client(t, m)
	ctx := t.Context()
	do := func(_ any, err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	rng := rand.New(rand.NewPCG(1, 1))
	lease, err := c.Grant(ctx, 3600)
	do(lease, err)
	for i := range 400 {
		value := make([]byte, 1000+rng.IntN(3000))
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		key := fmt.Sprintf("key/%d", rng.IntN(100))
		switch {
		case i%10 == 3:
			do(c.Delete(ctx, key))
		case i%10 == 4:
			do(c.Put(ctx, key, string(value), clientv3.WithLease(lease.ID)))
		default:
			do(c.Put(ctx, key, string(value)))
		}
		if i == 200 {
			do(c.Compact(ctx, 150, clientv3.WithCompactPhysical()))
		}
		if i == 300 {
			g := m.hold()
			do(nil, g.store.Flush())
			g.release()
		}
	}
	_, err = c.UserAdd(ctx, "u", "p")
	do(nil, err)
	want := holdings(t, m)
	if crashed {
		// The last records of a crashed log are in the window that docs/format.md states: damage there looks like a torn
		// write. So there are some that change nothing, more of them than a break is long.
		for range 100 {
			do(c.Delete(ctx, "nothing"))
		}
		clone := fs.CrashClone(vfs.CrashCloneCfg{})
		stop(t, m)
		return clone, want
	}
	stop(t, m)
	return fs.CrashClone(vfs.CrashCloneCfg{}), want
}

// smallStore has many tables of little data.
func smallStore(o *storage.Options) { o.MemTableBytes = 256 << 10 }

// holdings is all that a member answers: every revision of every key that is
// kept, and the small tables.
func holdings(t *testing.T, m *Member) string {
	t.Helper()
	text, err := tryHoldings(m)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func tryHoldings(m *Member) (string, error) {
	var b strings.Builder
	v := m.machine().View()
	defer v.Release()
	for rev := max(1, v.CompactRevision()); rev <= v.Revision(); rev += 7 {
		got, err := v.Range(context.Background(), []byte{0}, []byte{0}, mvcc.RangeOptions{Revision: rev})
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "@%d %d %x\n", rev, got.Count, bytes.Join(got.KVs, []byte{0xff}))
	}
	h, err := m.machine().Keys().HashKV(context.Background(), v.View.Root(), 0)
	if err != nil {
		return "", err
	}
	fmt.Fprintf(&b, "revision %d compacted %d keys %d usage %d hash %d\n", v.Revision(), v.CompactRevision(), v.View.Root().Keys(), v.View.Root().UsageBytes(), h.Hash)
	for _, l := range m.machine().Leases().All() {
		fmt.Fprintf(&b, "lease %x ttl %d keys %d\n", l.ID, l.TTL, len(m.machine().Leases().Keys(l.ID)))
	}
	fmt.Fprintf(&b, "users %v members %d\n", v.Auth().Revision(), len(v.Members().List()))
	return b.String(), nil
}

func listFiles(t *testing.T, fs vfs.FS, dir string, out *[]string) {
	t.Helper()
	names, err := fs.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		p := path.Join(dir, name)
		info, err := fs.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		if info.IsDir() {
			listFiles(t, fs, p, out)
		} else if info.Size() > 0 {
			*out = append(*out, p)
		}
	}
}

// kindOf is what a file is.
func kindOf(file string) string {
	name := path.Base(file)
	switch {
	case strings.HasSuffix(name, ".sst"):
		return "table"
	case strings.HasPrefix(name, "MANIFEST"):
		return "MANIFEST"
	case strings.HasPrefix(name, "OPTIONS"):
		return "OPTIONS"
	}
	return path.Base(path.Dir(file))
}

// breakFile returns a copy of the files with one of them changed.
func breakFile(t *testing.T, fs vfs.FS, file string, rng *rand.Rand) (vfs.FS, string) {
	t.Helper()
	dst := vfs.NewMem()
	if _, err := vfs.Clone(fs, dst, "data", "data"); err != nil {
		t.Fatal(err)
	}
	f, err := dst.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	content, err := io.ReadAll(f)
	_ = f.Close()
	if err != nil {
		t.Fatal(err)
	}
	// The end of a preallocated segment is nothing.
	used := len(bytes.TrimRight(content, "\x00"))
	if used == 0 {
		return nil, ""
	}
	at := rng.IntN(used)
	where := fmt.Sprintf("%s, bit flipped at %d of %d", file, at, used)
	if rng.IntN(10) == 0 {
		n := min(used-at, 1+rng.IntN(4096))
		clear(content[at : at+n])
		where = fmt.Sprintf("%s, %d bytes zeroed at %d of %d", file, n, at, used)
	} else {
		content[at] ^= 1 << rng.IntN(8)
	}
	if err := dst.Remove(file); err != nil {
		t.Fatal(err)
	}
	f, err = dst.Create(file, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return dst, where
}

// judgeFlip starts a member on broken files.
func judgeFlip(t *testing.T, fs vfs.FS, want, file string) (verdict string) {
	defer func() {
		if r := recover(); r != nil {
			verdict = fmt.Sprintf("WRONG: panic: %v\n%s", r, debug.Stack())
		}
	}()
	named := func(err error) string {
		if strings.Contains(err.Error(), path.Dir(file)) && strings.Contains(err.Error(), path.Base(file)) {
			return "refused"
		}
		return "WRONG: refused without naming the file: " + err.Error()
	}
	m, err := tryStartWith(t, "data", slog.New(slog.DiscardHandler), Seams{FS: fs, Storage: smallStore}, "--disk-reserve-bytes=0")
	if err != nil {
		return named(err)
	}
	got, readErr := tryHoldings(m)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if readErr != nil {
		// The member ends by itself.
		ctx, cancel = context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
	} else {
		cancel()
	}
	err = m.Wait(ctx)
	switch {
	case readErr != nil && ctx.Err() == nil && err != nil:
		return named(err)
	case readErr != nil:
		return fmt.Sprintf("WRONG: a read failed and the member went on: %v, at its end %v", readErr, err)
	case got != want:
		return "WRONG: other data: " + firstDifferent(got, want)
	case err != nil:
		return named(err)
	}
	return "the same"
}

func firstDifferent(got, want string) string {
	a, b := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range a {
		if i >= len(b) || a[i] != b[i] {
			return fmt.Sprintf("line %d: %.200s, want %.200s", i, a[i], strings.Join(b[min(i, len(b)):min(i+1, len(b))], ""))
		}
	}
	return "lines are missing"
}
