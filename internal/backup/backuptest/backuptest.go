// Package backuptest makes backups for tests that need one and no member.
package backuptest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/snapfile"
	"github.com/engram-kv/engram/internal/storage"
)

// Content is a backup of a cluster that is gone: so many keys k000, k001 and so
// on, one put each from revision 2 on, with values of up to 2000 bytes that do
// not compress; two members and one that was removed; cluster version 3.7.0; lease
// 7. Its applied index is 5000.
func Content(t testing.TB, keys int) []byte { return Compacted(t, keys, 0) }

// Compacted is Content, compacted at a revision, if that is not 0. It may be
// above those of all keys, as if later ones had been deleted.
func Compacted(t testing.TB, keys int, revision uint64) []byte {
	t.Helper()
	s, err := storage.Open(storage.Options{FS: vfs.NewMem(), Dir: "s"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	b := s.NewBatch()
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range int64(keys) {
		value := make([]byte, rng.IntN(2000))
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		kv, err := proto.Marshal(&mvccpb.KeyValue{Key: fmt.Appendf(nil, "k%03d", i), Value: value, CreateRevision: i + 2, ModRevision: i + 2, Version: 1})
		if err != nil {
			t.Fatal(err)
		}
		b.SetRevision(i+2, 0, storage.RevisionRecord{KV: kv})
	}
	for _, m := range []member.Member{{ID: 0xaaa, PeerURLs: []string{"http://old:1"}, Name: "old"}, {ID: 0xbbb, PeerURLs: []string{"http://older:1"}}} {
		b.Set(member.Row(m))
	}
	b.Set(storage.RowKey(storage.TableMemberRemoved, []byte("ccc")), []byte("removed"))
	b.Set(storage.RowKey(storage.TableCluster, []byte("clusterVersion")), []byte("3.7.0"))
	b.Set(storage.RowKey(storage.TableLease, binary.BigEndian.AppendUint64(nil, 7)), []byte{8, 7, 16, 60})
	b.Set(storage.RowKey(storage.TableMeta, []byte(storage.MetaApplied)), storage.AppendApplied(nil, 5000, 9))
	if revision > 0 {
		for _, row := range []string{storage.MetaScheduledCompact, storage.MetaFinishedCompact} {
			b.Set(storage.RowKey(storage.TableMeta, []byte(row)), binary.BigEndian.AppendUint64(nil, revision))
		}
	}
	if err := s.Commit(b); err != nil {
		t.Fatal(err)
	}
	plan, err := snapfile.PlanEtcd(context.Background(), snapfile.Source{Reader: s})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if _, err := plan.WriteTo(&out); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(out.Bytes())
	return append(out.Bytes(), sum[:]...)
}
