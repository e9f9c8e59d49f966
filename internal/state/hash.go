package state

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash"
	"hash/crc32"

	"github.com/engram-kv/engram/internal/storage"
)

// Hash is etcd's hash over the whole database (state-machine.md, section 4.2):
// CRC-32C over every bucket in name order, its name first and then each key and
// value. It leaves out what a member's own progress decides (applied index,
// term, storage version). It reads a snapshot beside writes.
func (m *Machine) Hash(ctx context.Context) (sum uint32, revision int64, err error) {
	m.mu.Lock() // so that snapshot, revision and members are of one moment
	snap := m.store.Snapshot()
	now := m.now.Load()
	m.mu.Unlock()
	defer func() {
		if e := snap.Close(); err == nil {
			err = e
		}
	}()

	h := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	for _, bucket := range []struct {
		name string
		add  func() error
	}{
		{"alarm", func() error { return hashTable(ctx, h, snap, storage.TableAlarm) }},
		{"auth", func() error { return hashTable(ctx, h, snap, storage.TableAuth) }},
		{"authRoles", func() error { return hashTable(ctx, h, snap, storage.TableAuthRole) }},
		{"authUsers", func() error { return hashTable(ctx, h, snap, storage.TableAuthUser) }},
		{"cluster", func() error { return hashTable(ctx, h, snap, storage.TableCluster) }},
		{"key", func() error { return hashRevisions(ctx, h, snap) }},
		{"lease", func() error { return hashTable(ctx, h, snap, storage.TableLease) }},
		{"members", func() error { return hashTable(ctx, h, snap, storage.TableMember) }},
		{"members_removed", func() error { return hashTable(ctx, h, snap, storage.TableMemberRemoved) }},
		{"meta", func() error { return hashMeta(h, snap, now) }},
	} {
		_, _ = h.Write([]byte(bucket.name))
		if err := bucket.add(); err != nil {
			return 0, 0, fmt.Errorf("state: hash of %s: %w", bucket.name, err)
		}
	}
	return h.Sum32(), now.kv.Revision(), nil
}

func hashTable(ctx context.Context, h hash.Hash32, r storage.Reader, t storage.Table) error {
	lower, upper := storage.TableBounds(t)
	it, err := r.Iter(ctx, lower, upper)
	if err != nil {
		return err
	}
	for ok := it.First(); ok; ok = it.Next() {
		_, _ = h.Write(storage.RowOf(it.Key()))
		_, _ = h.Write(it.Value())
	}
	if err := it.Error(); err != nil {
		_ = it.Close()
		return err
	}
	return it.Close()
}

// hashRevisions writes the revision log as etcd's bucket "key" has it: the key
// is BE64 main, '_', BE64 sub, and 't' for a tombstone.
func hashRevisions(ctx context.Context, h hash.Hash32, r storage.Reader) error {
	lower, upper := storage.RevisionBounds(0, 0)
	it, err := r.Iter(ctx, lower, upper)
	if err != nil {
		return err
	}
	defer func() { _ = it.Close() }()
	key := make([]byte, 0, 18)
	n := 0
	for ok := it.First(); ok; ok = it.Next() {
		if n++; n%4096 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		main, sub, err := storage.ParseRevisionKey(it.Key())
		if err != nil {
			return err
		}
		rec, err := storage.ParseRevisionValue(it.Value())
		if err != nil {
			return err
		}
		key = binary.BigEndian.AppendUint64(key[:0], uint64(main))
		key = append(key, '_')
		key = binary.BigEndian.AppendUint64(key, uint64(sub))
		if rec.Tombstone {
			key = append(key, 't')
		}
		_, _ = h.Write(key)
		_, _ = h.Write(rec.KV)
	}
	return it.Error()
}

// hashMeta writes the rows of etcd's bucket "meta" that it hashes: confState,
// finishedCompactRev and scheduledCompactRev, in this order.
func hashMeta(h hash.Hash32, r storage.Reader, now *moment) error {
	cs := ConfStateOf(now.members)
	if len(cs.Voters)+len(cs.Learners) > 0 {
		text, err := json.Marshal(cs)
		if err != nil {
			return err
		}
		_, _ = h.Write([]byte("confState"))
		_, _ = h.Write(text)
	}
	for _, name := range []string{storage.MetaFinishedCompact, storage.MetaScheduledCompact} {
		row, err := r.Get(storage.RowKey(storage.TableMeta, []byte(name)))
		if err == storage.ErrNotFound {
			continue
		}
		if err != nil {
			return err
		}
		_, _ = h.Write([]byte(name))
		_, _ = h.Write(append(append(row, '_'), 0, 0, 0, 0, 0, 0, 0, 0))
	}
	return nil
}
