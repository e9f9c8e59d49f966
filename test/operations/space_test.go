package operations

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// fill overwrites one key, with what does not compress, until a store of that quota is full. Between its revisions lie other keys, so that no file of the store is
// dead as a whole after a compaction.
func (r *rig) fill(quotaBytes int64) {
	r.Helper()
	c := r.client()
	random := rand.NewChaCha8([32]byte{1})
	value := make([]byte, 1_300_000)
	var err error
	for i := 0; err == nil && i < 200; i++ {
		random.Read(value)
		key := "fill"
		if i%10 == 5 {
			key = fmt.Sprintf("kept/%d", i)
		}
		_, err = c.Put(r.ctx, key, string(value))
	}
	if !errors.Is(err, rpctypes.ErrNoSpace) {
		r.Fatalf("filling the store ended with %v", err)
	}
	r.alarms("alarm:NOSPACE")
	r.until("all members are full", func() error {
		for _, s := range r.status() {
			if s.Status.DBSize < quotaBytes*9/10 || s.Status.DBSizeInUse < quotaBytes*9/10 {
				return fmt.Errorf("%s: of a quota of %d bytes %d are in use, in files of %d", s.Endpoint, quotaBytes, s.Status.DBSizeInUse, s.Status.DBSize)
			}
		}
		return nil
	})
}

// small is nil if a compaction has left little in use, and every member's files hold no more than a quarter of that and so many bytes beyond it.
func (r *rig) small(quotaBytes, beyond int64) error {
	r.Helper()
	for _, s := range r.status() {
		if s.Status.DBSizeInUse > quotaBytes/7 {
			r.Fatalf("%s: after the compaction %d bytes are in use, quota %d", s.Endpoint, s.Status.DBSizeInUse, quotaBytes)
		}
		if most := s.Status.DBSizeInUse*5/4 + beyond; s.Status.DBSize > most {
			return fmt.Errorf("%s has files of %d bytes, of which %d are in use; there shall be %d", s.Endpoint, s.Status.DBSize, s.Status.DBSizeInUse, most)
		}
	}
	return nil
}

// TestFullStoreByHand is the procedure of etcd's documentation for a full store,
// as it is typed there.
func TestFullStoreByHand(t *testing.T) {
	const quotaBytes = 100 << 20
	for _, members := range []int{1, 3} {
		t.Run(fmt.Sprintf("members=%d", members), func(t *testing.T) {
			r := begin(t, members, fmt.Sprintf("--quota-backend-bytes=%d", quotaBytes), "--auto-clear-nospace=false")
			r.fill(quotaBytes)
			if _, errs, err := r.try("put", "newkey", "123"); err == nil || !strings.Contains(errs, "database space exceeded") {
				t.Fatalf("a put on a full store: %v %s", err, errs)
			}
			if _, errs, err := r.try("endpoint", "health"); err == nil || !strings.Contains(errs, "NOSPACE") {
				t.Fatalf("health of a full store: %v %s", err, errs)
			}
			// Deletes pass, and reads.
			if got := r.typed("del", "newkey"); strings.TrimSpace(got) != "0" {
				t.Fatalf("del: %s", got)
			}
			r.typed("get", "fill", "--keys-only")

			at := r.c.Members()[0].Endpoint()
			if got := r.block("full-look", "10.0.0.1:2379", at); !strings.Contains(got, "NOSPACE") {
				t.Fatalf("looking at the alarms: %s", got)
			}
			r.block("full-compact", "10.0.0.1:2379", at)
			r.until("all space comes back", func() error { return r.small(quotaBytes, 1<<20) }) // a store has some files of its own
			// The alarm stays until it is disarmed.
			if _, _, err := r.try("put", "newkey", "123"); err == nil {
				t.Fatal("a put with the alarm on")
			}
			r.block("full-disarm", "10.0.0.1:2379", at)
			r.alarms("")
			r.typed("put", "newkey", "123")
			r.typed("endpoint", "health")
		})
	}
}

// TestFullStoreByItself is the same with nobody typing: an API server's compactor
// goes on, and the alarm goes.
func TestFullStoreByItself(t *testing.T) {
	const quotaBytes = 200 << 20 // so that more is dead than a store keeps
	for _, members := range []int{1, 3} {
		t.Run(fmt.Sprintf("members=%d", members), func(t *testing.T) {
			r := begin(t, members, fmt.Sprintf("--quota-backend-bytes=%d", quotaBytes))
			c := r.client()
			if _, err := c.Put(r.ctx, "compact_rev_key", "0"); err != nil {
				t.Fatal(err)
			}
			r.until("feature level", func() error {
				for _, m := range r.c.Members() {
					if err := r.metric(m, "engram_cluster_feature_level", 1); err != nil {
						return err
					}
				}
				return nil
			})
			r.fill(quotaBytes)
			for _, m := range r.c.Members() {
				r.until("quota metric", func() error { return r.metric(m, `engram_quota_warnings_total{percent="90"}`, 1) })
			}
			txn, err := c.Txn(r.ctx).If(clientv3.Compare(clientv3.Version("compact_rev_key"), "=", 1)).
				Then(clientv3.OpPut("compact_rev_key", "1")).Else(clientv3.OpGet("compact_rev_key")).Commit()
			if err != nil || !txn.Succeeded {
				t.Fatalf("the compactor's transaction: %v %v", txn, err)
			}
			if _, err := c.Compact(r.ctx, txn.Header.Revision); err != nil {
				t.Fatal(err)
			}
			r.alarms("")
			r.typed("put", "newkey", "123")
			r.until("space comes back", func() error { return r.small(quotaBytes, 64<<20) })
			if _, err := r.c.CheckHash(r.ctx); err != nil {
				t.Fatal(err)
			}
		})
	}
}
