package snapfile

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/storage"
)

// TestMemory writes a source of 500 MB in etcd's form and watches the heap.
func TestMemory(t *testing.T) {
	s, err := storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "store", MemTableBytes: 4 << 20, CacheBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Abandon() }()
	load := s.NewLoader()
	var size int64
	large, little := make([]byte, 1<<20), make([]byte, 200) // zeros: Pebble makes them small
	for rev := int64(2); size < 500<<20; rev++ {
		value := little
		if rev%500 == 0 {
			value = large
		}
		kv := fmt.Appendf(nil, "\x0a\x08%08d%s", rev, value)
		if err := load.Set(storage.AppendRevisionKey(nil, rev, 0), storage.AppendRevisionValue(nil, storage.RevisionRecord{KV: kv})); err != nil {
			t.Fatal(err)
		}
		size += int64(len(kv))
	}
	if err := load.Finish(); err != nil {
		t.Fatal(err)
	}
	const bound = 24 << 20
	for name, write := range map[string]func(io.Writer, Source) error{
		"etcd": func(w io.Writer, src Source) error {
			plan, err := PlanEtcd(context.Background(), src)
			if err != nil {
				return err
			}
			n, err := plan.WriteTo(w)
			if n < size {
				t.Errorf("a file of %d bytes holds %d", n, size)
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			heap := func() uint64 {
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return m.HeapAlloc
			}
			before, most := heap(), uint64(0)
			calls := 0
			err := write(io.Discard, Source{Reader: s, Progress: func(done, _ int64) {
				if calls++; calls%8 == 0 {
					most = max(most, heap())
				}
			}})
			if err != nil {
				t.Fatal(err)
			}
			if most > before+bound || calls < 50 {
				t.Errorf("the heap grew from %d to %d bytes, seen %d times; allowed are %d", before, most, calls, bound)
			}
		})
	}
}

// TestSource refuses a source that is not of one moment.
func TestSource(t *testing.T) {
	r := small(t)
	index, term := r.m.Applied()
	for _, c := range []struct {
		index, term uint64
		ok          bool
	}{{0, 0, true}, {index, term, true}, {index + 1, term, false}, {index, term - 1, false}} {
		src := Source{Reader: r.store, Applied: c.index, Term: c.term}
		_, err := PlanEtcd(context.Background(), src)
		if (err == nil) != c.ok {
			t.Errorf("index %d, term %d: %v", c.index, c.term, err)
		}
	}
}

// TestSourceChanges writes a file whose source is not pinned.
func TestSourceChanges(t *testing.T) {
	r := openRig(t, newStore(t))
	r.put("a", nil, 0)
	plan, err := PlanEtcd(context.Background(), Source{Reader: r.store})
	if err != nil {
		t.Fatal(err)
	}
	r.put("big", make([]byte, 2*pageSize), 0)
	if _, err := plan.WriteTo(io.Discard); err == nil || !strings.Contains(err.Error(), "the source changed") {
		t.Error(err)
	}
}

// TestNotEmpty reads into a store that holds something.
func TestNotEmpty(t *testing.T) {
	r := small(t)
	b, path := native(t, r.store), writeEtcd(t, r.store)
	if _, err := ReadNative(context.Background(), bytes.NewReader(b), fsOf(r.store), dir); !errors.Is(err, ErrNotEmpty) {
		t.Error(err)
	}
	if _, err := ReadNative(context.Background(), bytes.NewReader(b), vfs.NewMem(), dir); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if _, err := ReadEtcd(context.Background(), path, r.store); !errors.Is(err, ErrNotEmpty) {
		t.Error(err)
	}
	if _, err := ReadEtcd(context.Background(), filepath.Join(t.TempDir(), "none"), newStore(t)); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// stopping cancels a context at a byte of the stream, or fails there.
type stopping struct {
	after int
	stop  func() error
}

func (s *stopping) Write(b []byte) (int, error) {
	if s.after -= len(b); s.after < 0 {
		return 0, s.stop()
	}
	return len(b), nil
}

func (s *stopping) Read(b []byte) (int, error) {
	if s.after -= len(b); s.after < 0 {
		return 0, s.stop()
	}
	return len(b), nil
}

// TestStops cancels and fails at several places.
func TestStops(t *testing.T) {
	r := openRig(t, newStore(t))
	for range 8 {
		r.put("k", random(rand.New(rand.NewPCG(1, 1)), 1<<20), 0)
	}
	plan, err := PlanEtcd(context.Background(), Source{Reader: r.store})
	if err != nil {
		t.Fatal(err)
	}
	files := filesOf(t, r.store)
	full := errors.New("full")
	for _, after := range []int{0, 100_000, 3 << 20} {
		if _, err := plan.WriteTo(&stopping{after, func() error { return full }}); !errors.Is(err, full) {
			t.Errorf("etcd's file fails after %d bytes: %v", after, err)
		}
		if err := files.WriteNative(context.Background(), &stopping{after, func() error { return full }}, nil); !errors.Is(err, full) {
			t.Errorf("native fails after %d bytes: %v", after, err)
		}
	}
	whole := stream(t, files)
	if _, err := ReadNative(context.Background(), io.MultiReader(bytes.NewReader(whole[:1<<20]), &stopping{0, func() error { return full }}), emptyDirs(t), dir); !errors.Is(err, full) {
		t.Errorf("reading fails: %v", err)
	}
	path := writeEtcd(t, r.store)
	ctx, cancel := context.WithCancel(context.Background())
	late, err := PlanEtcd(ctx, Source{Reader: r.store})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := late.WriteTo(io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("WriteTo: %v", err)
	}
	if _, err := PlanEtcd(ctx, Source{Reader: r.store}); !errors.Is(err, context.Canceled) {
		t.Errorf("PlanEtcd: %v", err)
	}
	if err := files.WriteNative(ctx, io.Discard, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("WriteNative: %v", err)
	}
	if _, err := ReadNative(ctx, bytes.NewReader(whole), emptyDirs(t), dir); !errors.Is(err, context.Canceled) {
		t.Errorf("ReadNative: %v", err)
	}
	if _, err := ReadEtcd(ctx, path, newStore(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("ReadEtcd: %v", err)
	}
}

// TestProgress is told of all bytes, in order.
func TestProgress(t *testing.T) {
	r := openRig(t, newStore(t))
	for range 10 {
		r.put("k", random(rand.New(rand.NewPCG(1, 1)), 1<<20), 0)
	}
	var last atomic.Int64
	src := Source{Reader: r.store, Progress: func(done, total int64) {
		if done < last.Load() || total != 0 && done > total {
			t.Errorf("%d of %d after %d", done, total, last.Load())
		}
		last.Store(done)
	}}
	if err := filesOf(t, r.store).WriteNative(context.Background(), io.Discard, src.Progress); err != nil || last.Load() < 8<<20 {
		t.Errorf("native: told of %d bytes, %v", last.Load(), err)
	}
	last.Store(0)
	src.Progress(0, 0)
	plan, err := PlanEtcd(context.Background(), src)
	if err != nil {
		t.Fatal(err)
	}
	last.Store(0)
	if _, err := plan.WriteTo(io.Discard); err != nil || last.Load() < 8<<20 {
		t.Errorf("etcd: told of %d bytes, %v", last.Load(), err)
	}
}

// TestTooLong names what does not fit into etcd's file.
func TestTooLong(t *testing.T) {
	r := openRig(t, newStore(t))
	r.run(&pb.InternalRaftRequest{AuthRoleAdd: &pb.AuthRoleAddRequest{Name: strings.Repeat("r", maxKeySize)}})
	checkBolt(t, writeEtcd(t, r.store))
	r.run(&pb.InternalRaftRequest{AuthRoleAdd: &pb.AuthRoleAddRequest{Name: strings.Repeat("s", maxKeySize+1)}})
	_, err := PlanEtcd(context.Background(), Source{Reader: r.store})
	for _, want := range []string{"authRoles", "sssss", "32769", "delete it"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %s", err, want)
		}
	}
}

// TestStoreV2 compares with the document of the members' specification.
func TestStoreV2(t *testing.T) {
	r := openRig(t, newStore(t))
	r.cluster()
	table, err := member.Open(r.store, member.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const at = `"CreatedIndex":9,"ModifiedIndex":9,"ExpireTime":"0001-01-01T00:00:00Z"`
	file := func(path, value string) string {
		text, _ := json.Marshal(value)
		return fmt.Sprintf(`{"Path":%q,%s,"Value":%s,"Children":null}`, path, at, text)
	}
	dir := func(path string, children ...string) string {
		return fmt.Sprintf(`{"Path":%q,%s,"Value":"","Children":{%s}}`, path, at, strings.Join(children, ","))
	}
	const m = "/0/members/"
	want := `{"Root":` + dir("/",
		`"0":`+dir("/0",
			`"members":`+dir("/0/members",
				`"a":`+dir(m+"a",
					`"attributes":`+file(m+"a/attributes", `{"name":"a\u003cb\u003e","clientURLs":["http://127.0.0.1:5"]}`),
					`"raftAttributes":`+file(m+"a/raftAttributes", `{"peerURLs":["http://127.0.0.1:1"]}`)),
				`"c":`+dir(m+"c", `"raftAttributes":`+file(m+"c/raftAttributes", `{"peerURLs":["http://127.0.0.1:3"],"isLearner":true}`)),
				`"fffffffffffffff1":`+dir(m+"fffffffffffffff1", `"raftAttributes":`+file(m+"fffffffffffffff1/raftAttributes", `{"peerURLs":["http://127.0.0.1:2"]}`))),
			`"removed_members":`+dir("/0/removed_members", `"d":`+file("/0/removed_members/d", "")),
			`"version":`+file("/0/version", "3.7.0")),
		`"1":`+dir("/1")) + `,"CurrentIndex":9,"CurrentVersion":2}`
	if got := string(StoreV2(table.Root(), 9)); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	var parsed struct {
		Root struct {
			ExpireTime time.Time
		}
	}
	if err := json.Unmarshal(StoreV2(new(member.Root), 0), &parsed); err != nil || !parsed.Root.ExpireTime.IsZero() {
		t.Error(err)
	}
}
