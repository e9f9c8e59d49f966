package snapfile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"hash"
	"hash/crc32"
	"os"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/engram-kv/engram/internal/mvcc"
)

// TestInspect compares what Inspect and HashOfEtcd say of files with what bbolt
// and a store made of the file say.
func TestInspect(t *testing.T) {
	for _, c := range stores {
		t.Run(c.name, func(t *testing.T) {
			r := openRig(t, newStore(t))
			c.fill(r)
			path := writeEtcd(t, r.store)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			into := newStore(t)
			if _, err := ReadEtcd(context.Background(), path, into); err != nil {
				t.Fatal(err)
			}
			copied := openRig(t, into)
			info, err := Inspect(context.Background(), bytes.NewReader(b), int64(len(b)))
			if err != nil {
				t.Fatal(err)
			}
			if want := boltSum(t, path); info.Hash != want {
				t.Errorf("hash %d, by bbolt %d", info.Hash, want)
			}
			root := copied.m.Root()
			if info.Keys != root.Keys() || max(info.Revision, info.CompactRevision, 1) != root.Revision() || info.Bytes != int64(len(b)) {
				t.Errorf("%+v, the store has %d keys at revision %d", info, root.Keys(), root.Revision())
			}
			compacted := info.CompactRevision
			for _, rev := range []int64{0, 1, root.Revision(), root.Revision() / 2, root.Revision() - 1, compacted, compacted + 1, compacted - 1, root.Revision() + 1} {
				want, wantErr := copied.m.Keys().HashKV(context.Background(), root, max(rev, 0))
				got, err := HashOfEtcd(context.Background(), bytes.NewReader(b), int64(len(b)), max(rev, 0))
				switch {
				case errors.Is(wantErr, mvcc.ErrCompacted):
					// A store says so of what it cannot vouch for, too.
					if !errors.Is(err, ErrCompacted) && rev >= compacted+1 {
						t.Errorf("revision %d: %+v, %v, the store says %v", rev, got, err, wantErr)
					}
				case errors.Is(wantErr, mvcc.ErrFutureRevision):
					if !errors.Is(err, ErrFutureRevision) {
						t.Errorf("revision %d: %+v, %v, the store says %v", rev, got, err, wantErr)
					}
				case wantErr != nil || err != nil:
					t.Errorf("revision %d: %v and %v", rev, err, wantErr)
				case got != HashKV{Hash: want.Hash, Revision: want.HashRevision, CompactRevision: want.CompactRevision}:
					t.Errorf("revision %d: %+v, the store says %+v", rev, got, want)
				}
			}
		})
	}
}

// boltSum is the CRC-32C of all that is in a file, by bbolt.
func boltSum(t *testing.T, path string) uint32 {
	t.Helper()
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	var h hash.Hash32 = crc32.New(castagnoli)
	err = db.View(func(tx *bolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bolt.Bucket) error {
			h.Write(name)
			return b.ForEach(func(k, v []byte) error {
				h.Write(k)
				h.Write(v)
				return nil
			})
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return h.Sum32()
}

// TestCheckSum flips each byte of a small backup.
func TestCheckSum(t *testing.T) {
	r := openRig(t, newStore(t))
	r.put("a", []byte("1"), 0)
	b, err := os.ReadFile(writeEtcd(t, r.store))
	if err != nil {
		t.Fatal(err)
	}
	if HasSum(int64(len(b))) {
		t.Error("a database has a checksum")
	}
	sum := sha256.Sum256(b)
	b = append(b, sum[:]...)
	check := func() bool {
		s, err := CheckSum(context.Background(), bytes.NewReader(b), int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		return s.Got == s.Want
	}
	if !HasSum(int64(len(b))) || !check() {
		t.Fatal("a good backup is refused")
	}
	for i := 0; i < len(b); i += 97 {
		b[i] ^= 1
		if check() {
			t.Fatalf("byte %d was flipped", i)
		}
		b[i] ^= 1
	}
}
