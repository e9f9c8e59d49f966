package sim

import (
	"bytes"
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/raftlog"
	"github.com/engram-kv/engram/internal/storage"
)

// mutant is a rule that members break on purpose, to see that the checks find
// it.
type mutant int

const (
	sound            mutant = iota
	noSync                  // a member acknowledges before its log is synced
	markApart               // the applied index is committed after its batch
	cutEarly                // the log is cut up to what is applied, durable or not
	readAnywhere            // a read is answered without asking the leader
	swapFirst               // a snapshot is installed before the log says so
	unsyncedSnapshot        // a received snapshot is said to be there before it is on disk
	eventsLost              // a batch of events does not reach the hub
	leasesCut               // a new leader does not give leases their time
)

var mutants = map[mutant]string{
	noSync: "acknowledges before sync", markApart: "applied index outside its batch", cutEarly: "log cut before the store is durable",
	readAnywhere: "read without read index", swapFirst: "snapshot installed without its log record", eventsLost: "events lost",
	unsyncedSnapshot: "received snapshot not synced", leasesCut: "leases cut short by a new leader",
}

// log returns what stands before a member's log, or nil for nothing.
func (mu mutant) log(m *member) consensus.Log {
	switch mu {
	case noSync:
		return lyingLog{m.log}
	case swapFirst:
		return &hastyLog{m.log, m}
	}
	return nil
}

// lyingLog says that it has synced and has not.
type lyingLog struct{ *raftlog.Log }

func (lyingLog) Sync() error { return nil }
func (lyingLog) Mark() error { return nil }

// hastyLog has a snapshot installed, and what was before it deleted, before the
// record that says so is written, and leaves it to the next sync to make that durable.
type hastyLog struct {
	*raftlog.Log
	m *member
}

func (l *hastyLog) Write(appends []raftlog.Append) (bool, error) {
	hasty := false
	for i := range appends {
		if s := appends[i].Snapshot; s != nil {
			hasty = true
			last := l.m.gen
			if err := l.m.Install(*s); err != nil {
				return false, err
			}
			if err := errors.Join(l.m.removeGeneration(last.dir), syncDir(l.m.fs, dataDir)); err != nil {
				return false, err
			}
		}
	}
	must, err := l.Log.Write(appends)
	return must && !hasty, err
}

// commitApart commits a batch in two: its effects, and then its applied mark.
// flush decides whether a flush comes between.
func commitApart(db *pebble.DB, b *pebble.Batch, flush func() bool) error {
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
