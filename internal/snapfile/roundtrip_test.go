package snapfile

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	bolt "go.etcd.io/bbolt"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/storage"
)

// stores are the contents that tests write and read.
var stores = []struct {
	name string
	fill func(r *rig)
}{
	{"empty", func(*rig) {}},
	{"one key", func(r *rig) { r.put("a", []byte("1"), 0) }},
	{"tables", (*rig).cluster},
	{"history", func(r *rig) {
		r.cluster()
		r.history(rand.New(rand.NewPCG(1, 2)), 3000, 200, 60, 7, -8)
	}},
	{"compacted", func(r *rig) {
		r.cluster()
		rng := rand.New(rand.NewPCG(3, 4))
		for range 4 {
			r.history(rng, 800, 100, 300, 7)
			r.run(&pb.InternalRaftRequest{DeleteRange: &pb.DeleteRangeRequest{Key: []byte("key/"), RangeEnd: []byte("key/00001")}})
			r.run(&pb.InternalRaftRequest{Compaction: &pb.CompactionRequest{Revision: r.m.Root().Revision()}})
			r.compact()
		}
		r.history(rng, 10, 100, 300)
	}},
	{"compaction under way", func(r *rig) {
		r.cluster()
		rng := rand.New(rand.NewPCG(5, 6))
		r.history(rng, 500, 50, 100, 7)
		r.run(&pb.InternalRaftRequest{Compaction: &pb.CompactionRequest{Revision: 200}})
		r.compact()
		r.run(&pb.InternalRaftRequest{Compaction: &pb.CompactionRequest{Revision: 400}})
	}},
	{"all gone", func(r *rig) {
		r.history(rand.New(rand.NewPCG(7, 8)), 300, 50, 100)
		r.run(&pb.InternalRaftRequest{DeleteRange: &pb.DeleteRangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}})
		r.run(&pb.InternalRaftRequest{Compaction: &pb.CompactionRequest{Revision: r.m.Root().Revision()}})
		r.compact()
	}},
	{"big values", func(r *rig) {
		rng := rand.New(rand.NewPCG(9, 10))
		for i := range 12 {
			r.put(fmt.Sprintf("big%d", i%5), random(rng, 1<<20-i), 0)
			r.put(fmt.Sprintf("small%d", i), []byte("x"), 0)
		}
		for size := 3900; size < 4200; size++ { // around the size of a page
			r.put("page", random(rng, size), 0)
		}
	}},
	{"many keys", func(r *rig) {
		n := 300_000
		if testing.Short() || raceEnabled {
			n = 30_000
		}
		var batch []*raftpb.Entry
		for i := range n {
			batch = append(batch, r.entry(&pb.InternalRaftRequest{Put: &pb.PutRequest{Key: fmt.Appendf(nil, "k%d", i), Value: []byte("v")}}))
			if len(batch) == 1000 || i == n-1 {
				r.apply(batch...)
				batch = batch[:0]
			}
		}
	}},
}

// TestRoundTrip writes stores in both forms and reads them back: bbolt finds
// nothing wrong, rows and hashes are the same, and the copy goes on as the
// original does.
func TestRoundTrip(t *testing.T) {
	for _, c := range stores {
		t.Run(c.name, func(t *testing.T) {
			r := openRig(t, newStore(t))
			c.fill(r)
			want := contents(t, r.store)
			hash, revision, err := r.m.Hash(context.Background())
			if err != nil {
				t.Fatal(err)
			}

			t.Run("etcd", func(t *testing.T) {
				path := writeEtcd(t, r.store)
				checkBolt(t, path)
				db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true})
				if err != nil {
					t.Fatal(err)
				}
				if got := hashBolt(t, db); got != hash {
					t.Errorf("etcd's Hash of the file is %d, of the store %d", got, hash)
				}
				if err := db.Close(); err != nil {
					t.Fatal(err)
				}
				into := newStore(t)
				m, err := ReadEtcd(context.Background(), path, into)
				if err != nil {
					t.Fatal(err)
				}
				equalRows(t, want, contents(t, into))
				checkMeta(t, r, m, revision)
				same(t, r, openRig(t, into))
			})
			t.Run("native", func(t *testing.T) {
				into, m := readNative(t, native(t, r.store))
				equalRows(t, raw(t, r.store), raw(t, into))
				equalRows(t, raw(t, r.store), raw(t, into.DurableReader()))
				checkMeta(t, r, m, revision)
				same(t, r, openRig(t, into))
			})
			t.Run("native with index", func(t *testing.T) {
				fs := fsOf(r.store)
				if err := r.m.Checkpoint("indexed/"+StoreDir, "indexed/"+IndexDir); err != nil {
					t.Fatal(err)
				}
				files, err := OpenFiles(fs, "indexed")
				if err != nil {
					t.Fatal(err)
				}
				if files.list[0].name != "index/index.checkpoint" {
					t.Fatalf("the first file is %s", files.list[0].name)
				}
				into, m := readNative(t, stream(t, files))
				equalRows(t, raw(t, r.store), raw(t, into))
				checkMeta(t, r, m, revision)
				same(t, r, openRig(t, into)) // fails if the index is of no use
			})
		})
	}
}

func checkMeta(t *testing.T, r *rig, m Meta, revision int64) {
	t.Helper()
	index, term := r.m.Applied()
	if m.Applied != index || m.Term != term || m.Revision != revision {
		t.Errorf("read index %d, term %d, revision %d, want %d, %d, %d", m.Applied, m.Term, m.Revision, index, term, revision)
	}
	if got, want := fmt.Sprint(m.ConfState), fmt.Sprint(r.m.ConfState()); got != want {
		t.Errorf("read configuration %s, want %s", got, want)
	}
}

// same compares two machines, and compares them again after both went on.
func same(t *testing.T, a, b *rig) {
	t.Helper()
	compare := func() {
		t.Helper()
		for _, rev := range []int64{0, a.m.Root().Revision(), a.m.Root().Revision() - 1} {
			// That of the compact revision itself comes from a cache, which is not
			// part of the state.
			if rev != 0 && rev <= a.m.Root().CompactRevision() {
				continue
			}
			x, y := a.hashKV(rev), b.hashKV(rev)
			if x != y {
				t.Errorf("HashKV(%d) is %+v of the original, %+v of the copy", rev, x, y)
			}
		}
	}
	if compacted(t, a.store, storage.MetaScheduledCompact) == compacted(t, a.store, storage.MetaFinishedCompact) {
		compare()
		return // others still want the original
	}
	// A compaction goes on at the receiver.
	b.compact()
	if got, want := compacted(t, b.store, storage.MetaFinishedCompact), compacted(t, a.store, storage.MetaScheduledCompact); got != want {
		t.Errorf("the copy's compaction came to %d, want %d", got, want)
	}
	c, _ := readNative(t, native(t, a.store))
	cr := openRig(t, c)
	cr.compact()
	equalRows(t, contents(t, c), contents(t, b.store))
}

// TestGoesOn applies the same entries to a copy and the original.
func TestGoesOn(t *testing.T) {
	a := openRig(t, newStore(t))
	a.cluster()
	a.history(rand.New(rand.NewPCG(1, 1)), 500, 50, 50, 7)
	into := newStore(t)
	if _, err := ReadEtcd(context.Background(), writeEtcd(t, a.store), into); err != nil {
		t.Fatal(err)
	}
	b := openRig(t, into)
	for _, r := range []*rig{a, b} {
		r.history(rand.New(rand.NewPCG(2, 2)), 500, 50, 50, 7)
		r.run(&pb.InternalRaftRequest{LeaseRevoke: &pb.LeaseRevokeRequest{ID: 7}})
		r.run(&pb.InternalRaftRequest{Compaction: &pb.CompactionRequest{Revision: 300}})
		r.compact()
	}
	equalRows(t, contents(t, a.store), contents(t, b.store))
	if x, y := a.hashKV(0), b.hashKV(0); x != y {
		t.Errorf("HashKV is %+v and %+v", x, y)
	}
}

// TestMetaRows looks at the rows that are not copied.
func TestMetaRows(t *testing.T) {
	r := openRig(t, newStore(t))
	r.cluster()
	r.history(rand.New(rand.NewPCG(1, 1)), 50, 10, 10)
	r.run(&pb.InternalRaftRequest{Compaction: &pb.CompactionRequest{Revision: 9}})
	r.compact()
	db, err := bolt.Open(writeEtcd(t, r.store), 0o600, &bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	rev := append(append(binary.BigEndian.AppendUint64(nil, 9), '_'), make([]byte, 8)...)
	want := map[string][]byte{
		"confState":           []byte(`{"voters":[10,18446744073709551601],"learners":[12],"auto_leave":false}`),
		"consistent_index":    binary.BigEndian.AppendUint64(nil, r.index),
		"finishedCompactRev":  rev,
		"scheduledCompactRev": rev,
		"storageVersion":      []byte("3.7.0"),
		"term":                binary.BigEndian.AppendUint64(nil, 3),
	}
	if err := db.View(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte("meta")).ForEach(func(k, v []byte) error {
			if w, ok := want[string(k)]; !ok || !bytes.Equal(v, w) {
				t.Errorf("%s = %q, want %q", k, v, w)
			}
			delete(want, string(k))
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	if len(want) > 0 {
		t.Errorf("missing: %q", want)
	}
}

func TestStorageVersion(t *testing.T) {
	for cluster, want := range map[string]string{"": "", "3.5.0": "", "3.6.0": "3.6.0", "3.7.0": "3.7.0", "3.7.3": "3.7.0"} {
		if got, err := storageVersion(cluster); err != nil || got != want {
			t.Errorf("cluster version %q: storage version %q, %v, want %q", cluster, got, err, want)
		}
	}
}

// TestReadBackup reads a file that has a checksum behind its pages.
func TestReadBackup(t *testing.T) {
	r := openRig(t, newStore(t))
	r.history(rand.New(rand.NewPCG(1, 1)), 100, 10, 10)
	path := writeEtcd(t, r.store)
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(make([]byte, 32)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	into := newStore(t)
	if _, err := ReadEtcd(context.Background(), path, into); err != nil {
		t.Fatal(err)
	}
	equalRows(t, contents(t, r.store), contents(t, into))
}

func compacted(t *testing.T, r storage.Reader, row string) int64 {
	t.Helper()
	rev, err := compactRow(r, row)
	if err != nil {
		t.Fatal(err)
	}
	return rev
}

// TestFeatureLevel: it goes along in Engram's form, and in etcd's it is none. Who
// came by either takes the same membership for the present one.
func TestFeatureLevel(t *testing.T) {
	from := openRig(t, newStore(t))
	from.cluster()
	members := func(r *rig) *member.Root { _, m, _ := r.m.Tables(); return m }
	from.index++
	data, err := command.AppendFeatureLevel(nil, command.Header{ID: 1}, command.FeatureLevel{Level: 1, Fingerprint: members(from).Fingerprint()})
	if err != nil {
		t.Fatal(err)
	}
	from.apply(&raftpb.Entry{Index: proto.Uint64(from.index), Term: proto.Uint64(3), Data: data})
	if members(from).FeatureLevel() != 1 || len(members(from).RemovedIDs()) == 0 {
		t.Fatal("the test has no store that matters")
	}
	ctx := context.Background()
	source := Source{Reader: from.store, Applied: from.index, Term: 3, Members: members(from)}
	for _, form := range []struct {
		name string
		copy func() (*storage.Store, error)
		want uint64
	}{
		{"native", func() (*storage.Store, error) {
			into, _ := readNative(t, native(t, from.store))
			return into, nil
		}, 1},
		{"etcd", func() (*storage.Store, error) {
			path := filepath.Join(t.TempDir(), "db")
			plan, err := PlanEtcd(ctx, source)
			if err != nil {
				return nil, err
			}
			f, err := os.Create(path)
			if err != nil {
				return nil, err
			}
			_, err = plan.WriteTo(f)
			if err = errors.Join(err, f.Close()); err != nil {
				return nil, err
			}
			into := newStore(t)
			_, err = ReadEtcd(ctx, path, into)
			return into, err
		}, 0},
	} {
		into, err := form.copy()
		if err != nil {
			t.Fatalf("%s: %v", form.name, err)
		}
		got := members(openRig(t, into))
		if got.FeatureLevel() != form.want || got.Fingerprint() != members(from).Fingerprint() {
			t.Errorf("%s: level %d, fingerprint %x", form.name, got.FeatureLevel(), got.Fingerprint())
		}
	}
}
