package snapfile

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	bolt "go.etcd.io/bbolt"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/storage"
)

// small is a store with a row in every table.
func small(t testing.TB) *rig {
	r := openRig(t, newStore(t))
	r.cluster()
	r.history(rand.New(rand.NewPCG(1, 1)), 40, 10, 20, 7)
	r.run(&pb.InternalRaftRequest{Compaction: &pb.CompactionRequest{Revision: 20}})
	r.compact()
	r.run(&pb.InternalRaftRequest{Alarm: &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 1, Alarm: pb.AlarmType_CORRUPT}})
	return r
}

// scratch is a store to read into again and again.
type scratch struct {
	s    *storage.Store
	used bool
}

// take returns an empty store.
func (c *scratch) take(t testing.TB) *storage.Store {
	t.Helper()
	if c.used || c.s == nil {
		if c.s != nil {
			_ = c.s.Abandon()
		}
		var err error
		if c.s, err = storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "store", MemTableBytes: 256 << 10, CacheBytes: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		c.used = false
	}
	return c.s
}

// put says whether what was taken is to be thrown away.
func (c *scratch) put(t testing.TB) {
	c.used = checkEmpty(c.s) != nil
}

// TestEtcdDamage flips bytes all over a file and cuts it: no panic, and the
// error names the file.
func TestEtcdDamage(t *testing.T) {
	path := writeEtcd(t, small(t).store)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var c scratch
	defer func() { _ = c.s.Abandon() }()
	damaged := filepath.Join(t.TempDir(), "damaged")
	read := func(b []byte) error {
		defer c.put(t)
		if err := os.WriteFile(damaged, b, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ReadEtcd(context.Background(), damaged, c.take(t))
		if err != nil && !strings.Contains(err.Error(), damaged) {
			t.Errorf("no file is named: %v", err)
		}
		return err
	}
	rng := rand.New(rand.NewPCG(1, 1))
	refused := 0
	const flips = 800
	for range flips {
		b := bytes.Clone(whole)
		// Where something is: headers, elements and data stand at pages' beginning.
		page := rng.IntN(len(b) / pageSize)
		for range 1 + rng.IntN(3) {
			b[page*pageSize+rng.IntN(1<<(3+rng.IntN(10)))] ^= byte(1 + rng.IntN(255))
		}
		if read(b) != nil {
			refused++
		}
	}
	if refused < flips/10 {
		t.Errorf("of %d damaged files %d were refused", flips, refused)
	}
	for n := 0; n < len(whole); n += 1 + rng.IntN(2000) {
		if err := read(whole[:n]); !errors.Is(err, ErrDamaged) {
			t.Fatalf("cut to %d of %d bytes: %v", n, len(whole), err)
		}
	}
	// One of the two meta pages may be lost, as after an interrupted write.
	for _, page := range []int{0, 1} {
		b := bytes.Clone(whole)
		clear(b[page*pageSize : page*pageSize+pageSize])
		if err := read(b); err != nil {
			t.Errorf("without meta page %d: %v", page, err)
		}
	}
	if err := read(make([]byte, 1<<16)); !errors.Is(err, ErrDamaged) {
		t.Errorf("a file of zeros: %v", err)
	}
}

// TestEtcdRows reads files that are whole, with rows that are not.
func TestEtcdRows(t *testing.T) {
	path := writeEtcd(t, small(t).store)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	rev := func(main, sub int64) string { return string(appendBoltRevision(nil, main, sub)) }
	const kv = "\x0a\x01a\x10\x63\x18\x63\x20\x01" // a, created and modified at 99
	for _, c := range []struct {
		bucket, key, value, want string // "": it is read, and not in the store
	}{
		{"alarm", "\xff", "", "no alarm"},
		{"auth", "authEnabled", "", "value of 0 bytes, want 1"},
		{"auth", "authRevision", "1", "value of 1 bytes, want 8"},
		{"auth", "other", "1", ""},
		{"authRoles", "r", "\xff", "no role"},
		{"authRoles", "r", "", `holds role ""`},
		{"authUsers", "u", "\xff", "no user"},
		{"authUsers", "u", "\x0a\x01v", `holds user "v"`},
		{"cluster", "clusterVersion", "x", "no version"},
		{"cluster", "downgrade", "{", "no downgrade"},
		{"cluster", "other", "{", ""},
		{"lease", "12345678", "\x08\x01", "holds lease 1"},
		{"lease", "12345678", "\xff", "no lease"},
		{"members", "zz", `{"id":1}`, "holds member 1"},
		{"members", "1", `{`, "no member"},
		{"members_removed", "xyz", "removed", "no member ID"},
		{"meta", "consistent_index", "1", "value of 1 bytes, want 8"},
		{"meta", "consistent_index", "\x00\x00\x00\x00\x00\x00\x00\x00", "is missing or 0 at term 3"},
		{"meta", "term", "", "value of 0 bytes, want 8"},
		{"meta", "scheduledCompactRev", "", "is no revision"},
		{"meta", "storageVersion", "3.8.0", "downgrade etcd first"},
		{"meta", "storageVersion", "new", "is no version"},
		{"meta", "confState", "{", ""},
		{"meta", "other", "", ""},
		{"key", "x", kv, "is no revision"},
		{"key", rev(99, 0) + "x", kv, "is no revision"},
		{"key", rev(0, 0), kv, "before the first"},
		{"key", "\xff" + rev(99, 0)[1:], kv, "beyond all"},
		{"key", rev(99, 0), "\xff", "no KeyValue"},
		{"key", rev(99, 0), "\x10\x63\x18\x63\x20\x01", "without a key"},
		{"key", rev(99, 0), "\x0a\x01a\x10\x63\x18\x62\x20\x01", "says mod revision 98"},
		{"key", rev(99, 0), "\x0a\x01a\x10\x64\x18\x63\x20\x01", "says create revision 100"},
		{"key", rev(99, 0), "\x0a\x01a\x10\x63\x18\x63", "says version 0"},
		{"key", rev(99, 0) + "t", kv, "more than a key"},
		{"key", rev(99, 0) + "t", "", "without a key"},
		{"key", rev(99, 0), kv + "\x39        ", "wire type 1"},
		{"unknown", "k", "v", ""},
	} {
		path := filepath.Join(t.TempDir(), "db")
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
		edit(t, path, func(tx *bolt.Tx) error {
			b, err := tx.CreateBucketIfNotExists([]byte(c.bucket))
			if err != nil {
				return err
			}
			return b.Put([]byte(c.key), []byte(c.value))
		})
		_, err := ReadEtcd(context.Background(), path, newStore(t))
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %q = %q: %v", c.bucket, c.key, c.value, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), c.bucket) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %q = %q: %v, want one with %q, the bucket and the file", c.bucket, c.key, c.value, err, c.want)
		}
	}
	edit(t, path, func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte("key"))
		if err := b.Put([]byte(rev(99, 0)), []byte(kv)); err != nil {
			return err
		}
		return b.Put([]byte(rev(99, 0)+"t"), []byte("\x0a\x01a"))
	})
	if _, err := ReadEtcd(context.Background(), path, newStore(t)); err == nil || !strings.Contains(err.Error(), "twice") {
		t.Errorf("put and tombstone of one revision: %v", err)
	}
	edit(t, path, func(tx *bolt.Tx) error { return tx.DeleteBucket([]byte("key")) })
	if _, err := ReadEtcd(context.Background(), path, newStore(t)); err == nil || !strings.Contains(err.Error(), "no bucket key") {
		t.Errorf("without a bucket: %v", err)
	}
}

func edit(t *testing.T, path string, fn func(tx *bolt.Tx) error) {
	t.Helper()
	db, err := bolt.Open(path, 0o600, &bolt.Options{NoSync: true, NoGrowSync: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Update(fn); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}
