package member

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/engram-kv/engram/internal/storage"
)

// FeatureLevel is the highest feature level that this version of Engram knows.
// At level 0 entries mean what they mean to etcd. Above it every member is an
// Engram, so entries may mean more.
const FeatureLevel = 1

// FeatureLevel is the level that the cluster agreed on.
func (r *Root) FeatureLevel() uint64 { return r.level }

// Fingerprint stands for who the members are and who was removed, not for their
// roles, names or URLs. An ID never comes back, so no other membership of the
// cluster has the same. Everything it is made of is in etcd's form of a snapshot
// too, so a member that came by one judges like the others.
func (r *Root) Fingerprint() uint64 {
	gone := r.RemovedIDs()
	b := binary.BigEndian.AppendUint64(nil, uint64(len(r.members)))
	for _, m := range r.members {
		b = binary.BigEndian.AppendUint64(b, m.ID)
	}
	for _, id := range gone {
		b = binary.BigEndian.AppendUint64(b, id)
	}
	sum := sha256.Sum256(b)
	return binary.BigEndian.Uint64(sum[:])
}

// SetFeatureLevel sets the level if the membership is the one that it was found
// for, and otherwise does nothing. It fails with ErrFeatureLevel.
func (t *Table) SetFeatureLevel(b *storage.Batch, level, fingerprint uint64) error {
	if t.root.Fingerprint() != fingerprint {
		return nil
	}
	if err := checkFeatureLevel(level); err != nil {
		return err
	}
	t.setFeatureLevel(b, level)
	return nil
}

func (t *Table) setFeatureLevel(b *storage.Batch, level uint64) {
	if t.root.level == level {
		return
	}
	t.change(func(r *Root) { r.level = level })
	row := storage.RowKey(storage.TableMeta, []byte(storage.MetaFeatureLevel))
	if level == 0 {
		b.Delete(row)
		return
	}
	b.Set(row, binary.BigEndian.AppendUint64(nil, level))
}

func checkFeatureLevel(level uint64) error {
	if level > FeatureLevel {
		return fmt.Errorf("feature level %d, this member has %d (upgrade it): %w", level, FeatureLevel, ErrFeatureLevel)
	}
	return nil
}

func readFeatureLevel(r storage.Reader, root *Root) error {
	row, err := r.Get(storage.RowKey(storage.TableMeta, []byte(storage.MetaFeatureLevel)))
	switch {
	case errors.Is(err, storage.ErrNotFound):
		return nil
	case err != nil:
		return err
	case len(row) != 8:
		return fmt.Errorf("feature level row of %d bytes, want 8", len(row))
	}
	root.level = binary.BigEndian.Uint64(row)
	return nil
}
