package snapfile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/engram-kv/engram/internal/storage"
)

func readInto(t testing.TB, b []byte) (*vfs.MemFS, error) {
	t.Helper()
	fs := emptyDirs(t)
	_, err := ReadNative(context.Background(), bytes.NewReader(b), fs, dir)
	return fs, err
}

// TestNativeDamage flips bits everywhere, cuts at every length and adds bytes:
// each time the reader refuses.
func TestNativeDamage(t *testing.T) {
	whole := native(t, small(t).store)
	for i := range whole {
		bit := byte(1) << (i % 8)
		whole[i] ^= bit
		if _, err := readInto(t, whole); !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrUnsupported) {
			t.Fatalf("byte %d has a flipped bit, and it is read: %v", i, err)
		}
		whole[i] ^= bit
		if i%16 != 0 && i > headSize && i < len(whole)-2*endSize {
			continue
		}
		if _, err := readInto(t, whole[:i]); !errors.Is(err, ErrDamaged) {
			t.Fatalf("cut to %d of %d bytes: %v", i, len(whole), err)
		}
	}
	for _, tail := range []string{"\x00", "x", string(whole)} {
		if _, err := readInto(t, append(bytes.Clone(whole), tail...)); !errors.Is(err, ErrDamaged) {
			t.Fatalf("%d bytes too many: %v", len(tail), err)
		}
	}
	if _, err := readInto(t, whole); err != nil {
		t.Fatal(err)
	}
}

// part is a file in a stream.
type part struct {
	name string
	size uint64
	data []byte
}

// split takes a stream apart.
func split(t testing.TB, b []byte) (head []byte, parts []part) {
	t.Helper()
	head = b[:headSize-sumSize]
	for at := headSize; b[at] == markFile; {
		p := part{size: binary.BigEndian.Uint64(b[at+2:])}
		n := int(b[at+1])
		p.name = string(b[at+fileHeadSize : at+fileHeadSize+n])
		at += fileHeadSize + n + sumSize
		for left := int(p.size); left > 0; {
			piece := min(left, pieceBytes)
			p.data = append(p.data, b[at:at+piece]...)
			at += piece + sumSize
			left -= piece
		}
		parts = append(parts, p)
	}
	return head, parts
}

// join makes a stream whose checksums are right. files and size are what the end
// says more than there is.
func join(head []byte, parts []part, files, size int) []byte {
	var b bytes.Buffer
	w := &summedWriter{w: &b}
	_ = w.write(bytes.Clone(head))
	var sum uint64
	for _, p := range parts {
		h := append([]byte{markFile, byte(len(p.name))}, binary.BigEndian.AppendUint64(nil, p.size)...)
		_ = w.write(append(h, p.name...))
		for data := p.data; len(data) > 0; data = data[min(len(data), pieceBytes):] {
			_ = w.write(bytes.Clone(data[:min(len(data), pieceBytes)]))
		}
		sum += p.size
	}
	end := binary.BigEndian.AppendUint64([]byte{markEnd}, uint64(len(parts)+files))
	_ = w.write(binary.BigEndian.AppendUint64(end, sum+uint64(size)))
	return b.Bytes()
}

// TestNativeParts reads streams whose checksums are right and which say
// something else than a snapshot does.
func TestNativeParts(t *testing.T) {
	r := openRig(t, newStore(t))
	rng := rand.New(rand.NewPCG(1, 1))
	for range 5 {
		r.put("k", random(rng, 300<<10), 0)
	}
	head, parts := split(t, native(t, r.store))
	if _, err := readInto(t, join(head, parts, 0, 0)); err != nil || len(parts) < 5 {
		t.Fatalf("%d parts as they were: %v", len(parts), err)
	}
	table := slices.IndexFunc(parts, func(p part) bool { return strings.HasSuffix(p.name, ".sst") && p.size > pieceBytes })
	if table < 0 {
		t.Fatal("no large table")
	}
	other := func(at int, with byte) []byte {
		h := bytes.Clone(head)
		h[at] ^= with
		return h
	}
	renamed := func(name string) []part {
		p := slices.Clone(parts)
		p[table].name = name
		slices.SortFunc(p, func(a, b part) int { return strings.Compare(a.name, b.name) })
		return p
	}
	changed := func(change func(p *part)) []part {
		p := slices.Clone(parts)
		p[table].data = bytes.Clone(p[table].data)
		change(&p[table])
		return p
	}
	for _, c := range []struct {
		name string
		b    []byte
		want error
		text string
	}{
		{"another version", join(other(11, 8), parts, 0, 0), ErrUnsupported, "let both members have one version"},
		{"the version of rows", join(other(11, 3), parts, 0, 0), ErrUnsupported, "snapshot has version 1, this Engram reads 2"},
		{"another store", join(other(15, 8), parts, 0, 0), ErrUnsupported, "store of format"},
		{"another index", join(other(23, 1), parts, 0, 0), ErrDamaged, "its head says index"},
		{"another term", join(other(31, 1), parts, 0, 0), ErrDamaged, "its head says index"},
		{"another revision", join(other(39, 1), parts, 0, 0), ErrDamaged, "its head says index"},
		{"a table is missing", join(head, slices.Delete(slices.Clone(parts), table, table+1), 0, 0), ErrDamaged, "no store"},
		{"all is missing", join(head, nil, 0, 0), ErrDamaged, "no store"},
		{"one is there twice", join(head, slices.Insert(slices.Clone(parts), table, parts[table]), 0, 0), ErrDamaged, "follows"},
		{"two are swapped", join(head, slices.Insert(slices.Clone(parts[1:]), 1, parts[0]), 0, 0), ErrDamaged, "follows"},
		{"one more is said", join(head, parts, 1, 0), ErrDamaged, "it should have"},
		{"more bytes are said", join(head, parts, 0, 1), ErrDamaged, "it should have"},
		{"a table is shorter", join(head, changed(func(p *part) { p.size--; p.data = p.data[:p.size] }), 0, 0), ErrDamaged, "no store"},
		{"a table is too large", join(head, changed(func(p *part) { p.size = maxFileBytes + 1 }), 0, 0), ErrDamaged, "at most"},
		{"a table says too much", join(head, changed(func(p *part) { p.size += pieceBytes }), 0, 0), ErrDamaged, ""},
		{"up", join(head, renamed("store/../000001.sst"), 0, 0), ErrUnsupported, "has a file"},
		{"beside", join(head, renamed("../000001.sst"), 0, 0), ErrUnsupported, "has a file"},
		{"deeper", join(head, renamed("store/x/000001.sst"), 0, 0), ErrUnsupported, "has a file"},
		{"from the root", join(head, renamed("/000001.sst"), 0, 0), ErrUnsupported, "has a file"},
		{"no directory", join(head, renamed("000001.sst"), 0, 0), ErrUnsupported, "has a file"},
		{"no name", join(head, renamed(""), 0, 0), ErrUnsupported, "has a file"},
		{"a newline", join(head, renamed("store/000001.sst\n"), 0, 0), ErrUnsupported, "has a file"},
		{"a log", join(head, renamed("store/000001.log"), 0, 0), ErrUnsupported, "has a file"},
		{"a table of the index", join(head, renamed("index/000001.sst"), 0, 0), ErrUnsupported, "has a file"},
		{"a zero in the name", join(head, renamed("store/000001.sst\x00"), 0, 0), ErrUnsupported, "has a file"},
	} {
		fs, err := readInto(t, c.b)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %v with %q", c.name, err, c.want, c.text)
		}
		if names, _ := fs.List(""); len(names) != 1 {
			t.Errorf("%s: beside the directory there are %q", c.name, names)
		}
	}
}

// TestNativeIsDurable crashes after a snapshot was read and its directories
// synced: all of it is there.
func TestNativeIsDurable(t *testing.T) {
	r := small(t)
	whole := native(t, r.store)
	fs := vfs.NewCrashableMem()
	sync := func(path string) {
		t.Helper()
		d, err := fs.OpenDir(path)
		if err == nil {
			err = errors.Join(d.Sync(), d.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, sub := range []string{StoreDir, IndexDir} {
		if err := fs.MkdirAll(fs.PathJoin(dir, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ReadNative(context.Background(), bytes.NewReader(whole), fs, dir); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fs.PathJoin(dir, StoreDir), fs.PathJoin(dir, IndexDir), dir, "/"} {
		sync(path)
	}
	equalRows(t, raw(t, r.store), raw(t, openStore(t, fs.CrashClone(vfs.CrashCloneCfg{}))))
}

// TestNativeMemory moves 64 MB with memory for a few pieces.
func TestNativeMemory(t *testing.T) {
	base := t.TempDir()
	s, err := storage.Open(storage.Options{Dir: filepath.Join(base, "a")})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Abandon() }()
	load, rng := s.NewLoader(), rand.New(rand.NewPCG(1, 1))
	for rev := int64(2); rev < 66; rev++ {
		kv := append(fmt.Appendf(nil, "\x0a\x08%08d", rev), random(rng, 1<<20)...)
		if err := load.Set(storage.AppendRevisionKey(nil, rev, 0), storage.AppendRevisionValue(nil, storage.RevisionRecord{KV: kv})); err != nil {
			t.Fatal(err)
		}
	}
	sending, received := filepath.Join(base, "sending"), filepath.Join(base, "received")
	if err := errors.Join(load.Finish(), s.Checkpoint(filepath.Join(sending, StoreDir))); err != nil {
		t.Fatal(err)
	}
	files, err := OpenFiles(storage.DefaultFS, sending)
	if err != nil {
		t.Fatal(err)
	}
	for _, sub := range []string{StoreDir, IndexDir} {
		if err := storage.DefaultFS.MkdirAll(filepath.Join(received, sub), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	stream := &pipe{into: make(chan []byte), free: make(chan struct{})}
	ctx, written := context.Background(), make(chan error, 1)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	go func() {
		written <- files.WriteNative(ctx, stream, nil)
		close(stream.into)
	}()
	_, err = ReadNative(ctx, stream, storage.DefaultFS, received)
	if err = errors.Join(err, <-written); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	// Opening the store to look at it takes its share.
	if got := after.TotalAlloc - before.TotalAlloc; got > 24<<20 || files.Size() < 64<<20 {
		t.Errorf("a snapshot of %d bytes took %d bytes of memory", files.Size(), got)
	}
}

// pipe gives each write to the reader, without a copy.
type pipe struct {
	into chan []byte
	free chan struct{}
	rest []byte
	busy bool
}

func (p *pipe) Write(b []byte) (int, error) {
	p.into <- b
	<-p.free
	return len(b), nil
}

func (p *pipe) Read(b []byte) (int, error) {
	for len(p.rest) == 0 {
		if p.busy {
			p.free <- struct{}{}
		}
		var ok bool
		if p.rest, ok = <-p.into; !ok {
			return 0, io.EOF
		}
		p.busy = true
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

// FuzzReadNative reads whatever bytes. What it takes opens as a store.
func FuzzReadNative(f *testing.F) {
	f.Add(native(f, small(f).store))
	f.Add(native(f, newStore(f)))
	f.Add([]byte(nativeMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		if fs, err := readInto(t, b); err == nil {
			openStore(t, fs)
		}
	})
}
