// Package apart holds a fault that every test of durability must find: effects that are committed apart from their applied index.
package apart

import (
	"bytes"

	"github.com/cockroachdb/pebble/v2"

	"github.com/engram-kv/engram/internal/storage"
)

// Commit commits a batch in two: its effects, and then its applied mark.
// flush decides whether a flush comes between.
func Commit(db *pebble.DB, b *pebble.Batch, flush func() bool) error {
	effects, mark := db.NewBatch(), db.NewBatch()
	row := storage.RowKey(storage.TableMeta, []byte(storage.MetaApplied))
	lower, _ := storage.RevisionBounds(0, 0)
	for r := b.Reader(); ; {
		kind, key, value, ok, err := r.Next()
		if err != nil {
			return err
		}
		if !ok {
			break
		}
		if kind == pebble.InternalKeyKindDelete {
			if err := effects.Delete(key, nil); err != nil {
				return err
			}
			continue
		}
		if kind != pebble.InternalKeyKindSet {
			return b.Commit(pebble.NoSync) // a step of a compaction, which carries no mark
		}
		switch {
		case bytes.Equal(key, row):
			err = mark.Set(key, value, nil)
		case key[0] == lower[0]:
			record, perr := storage.ParseRevisionValue(value)
			if perr != nil {
				return perr
			}
			if record.Applied != 0 {
				if err := mark.Set(row, storage.AppendApplied(nil, record.Applied, record.Term), nil); err != nil {
					return err
				}
				record.Applied, record.Term = 0, 0
			}
			err = effects.Set(key, storage.AppendRevisionValue(nil, record), nil)
		default:
			err = effects.Set(key, value, nil)
		}
		if err != nil {
			return err
		}
	}
	if err := effects.Commit(pebble.NoSync); err != nil {
		return err
	}
	if flush() { // a memtable may be full between the two
		if err := db.Flush(); err != nil {
			return err
		}
	}
	return mark.Commit(pebble.NoSync)
}
