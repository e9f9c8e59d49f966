// Package mvcc keeps keys at revisions: put, delete, range, history,
// compaction and hashes, as state-machine.md sections 3 and 4 have them.
//
// It knows nothing of leases beyond their number, of users, or of raft beyond
// the applied mark that it stores. Store is the main type; Writer changes it,
// View reads it. Invariants:
//
//	V1: one apply batch is one storage.Batch. It carries its records, the
//	    compact revision and the applied mark, so that a crash leaves a store
//	    that is exactly as after some batch.
//	V2: nothing of a batch can be seen through a Root taken before it, and a
//	    Root never changes.
//	V3: Root.UsageBytes, Keys, Revision and CompactRevision are functions of
//	    the log alone, whatever was physically removed.
//	V4: a record that the index names at or above the physical compact
//	    revision is on disk. One that is missing is a panic, never "absent".
//	V5: an encoded KeyValue that was handed out is never written to again.
//
// Changes (Writer, CompactStep, Root, Close) are made by one goroutine at a
// time, the applier or whoever holds its lock. Everything else may be called
// by anyone at any time.
package mvcc

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/engram-kv/engram/internal/mvcc/index"
	"github.com/engram-kv/engram/internal/storage"
)

// Revision is a place in the store's history: the write transaction (Main)
// and the order inside it (Sub).
type Revision = index.Revision

// The caller's errors. They come wrapped with what was asked and found.
var (
	// ErrCompacted says that a revision is below the compact revision.
	ErrCompacted = errors.New("required revision has been compacted")
	// ErrFutureRevision says that a revision has not happened yet.
	ErrFutureRevision = errors.New("required revision is a future revision")
	// ErrTooBig says that an answer would pass RangeOptions.MaxBytes.
	ErrTooBig = errors.New("answer is too big")
	// ErrNotInMemory says that an answer takes more than RangeOptions.MemoryOnly
	// allows.
	ErrNotInMemory = errors.New("answer is not in memory")
)

// Options configure a Store. Only Storage is needed.
type Options struct {
	Storage *storage.Store
	// FS and Dir say where index checkpoints are kept. An empty Dir means
	// none: each Open then scans the whole history. Whoever opens the same
	// storage must give the same Dir, since a compaction keeps the checkpoint
	// in step with what it deletes.
	FS  storage.FS // nil means the operating system's
	Dir string

	// ValueBudgetBytes bounds the memory that holds current values. 0 means
	// 256 MiB; negative means as little as one batch needs.
	ValueBudgetBytes int64
	// WarmBytes bounds what is read into the value memory after a start without
	// being asked for; the rest comes as it is read. Default 256 MiB; negative
	// means nothing.
	WarmBytes int64
	// OnWarm is called once, by CompactStep, when that reading is over. It must
	// not block.
	OnWarm func()
	// ViewAge is how long physical deletion waits for a view that is older
	// than the compaction; afterwards such a view may answer ErrCompacted.
	// 0 means 10 s; negative means it does not wait.
	ViewAge time.Duration

	// CompactionBatch is how many records one CompactStep looks at, while the
	// applier waits. Default 400, less than a millisecond.
	CompactionBatch int
	// CompactionPause is what CompactStep asks for between steps. Default 1 ms.
	CompactionPause time.Duration

	// CheckpointBytes is the volume of new records after which an index
	// checkpoint is written. Default 128 MiB; negative means only at Close and
	// before a compaction that needs one.
	CheckpointBytes int64
	// CheckpointInterval is the least time between two checkpoints made for
	// volume. It bounds the records that a start after a crash reads one by one.
	// Those that take long are further apart, so that no more than a twelfth of
	// the time goes to them, up to a minute. Default 5 s.
	CheckpointInterval time.Duration
	// Room returns how many bytes the disk has for a checkpoint. One that takes
	// more is given up: the next start is slower. Nil means enough.
	Room func() int64

	// Now is the clock that paces background work; it never influences what a
	// read answers. Default time.Now.
	Now func() time.Time
	// Go runs a background job. Default: a new goroutine. A simulation may
	// run the job in place.
	Go func(job func())

	Logger  *slog.Logger // nil means discard
	Metrics *Metrics     // nil means that nobody reads them

	slabBytes int // for tests; 0 means 1 MiB
	// unusable is told why a checkpoint is of no use, and keeps files as they are.
	unusable func(error)
}

// Root is one immutable moment of the store. It is a small value; whoever
// publishes it may copy it. The zero Root is not usable.
type Root struct {
	index      index.Root
	revision   int64
	compacted  int64 // -1 if there was no compaction
	usageBytes int64
	epoch      *epoch
}

// Revision is the main revision of the last write transaction, 1 when there
// was none.
func (r Root) Revision() int64 { return r.revision }

// CompactRevision is the revision of the last Compact, -1 if there was none.
func (r Root) CompactRevision() int64 { return r.compacted }

// Keys is the number of live keys.
func (r Root) Keys() int64 { return r.index.Len() }

// UsageBytes is the size of all records that history still needs: encoded
// KeyValues, live, superseded but not compacted, and tombstones. It is equal
// on all members at the same applied index.
func (r Root) UsageBytes() int64 { return r.usageBytes }

// Event is one change as watchers see it. All slices are immutable and may be
// kept.
type Event struct {
	Rev Revision
	Key []byte
	// KV is the encoded KeyValue: of a put the record itself, of a delete
	// only key and mod_revision.
	KV     []byte
	Delete bool
	Create bool // a put of a key that was not live
	// Prev is the revision that was live before Rev.Main, zero if there was
	// none or it has been compacted. PrevRef may help ValueAt to find it.
	Prev    Revision
	PrevRef index.ValueRef
}

// SortOrder has the numbers of etcdserverpb.RangeRequest_SortOrder.
type SortOrder int32

// The sort orders.
const (
	OrderNone    SortOrder = 0
	OrderAscend  SortOrder = 1
	OrderDescend SortOrder = 2
)

// SortTarget has the numbers of etcdserverpb.RangeRequest_SortTarget.
type SortTarget int32

// The sort targets.
const (
	TargetKey     SortTarget = 0
	TargetVersion SortTarget = 1
	TargetCreate  SortTarget = 2
	TargetMod     SortTarget = 3
	TargetValue   SortTarget = 4
)

// RangeOptions are the options of a Range. The zero value reads all keys of
// the range as they are now, in key order.
type RangeOptions struct {
	Limit                                int64 // keys; <= 0 means all
	Revision                             int64 // <= 0 means the view's
	CountOnly, KeysOnly                  bool
	MinMod, MaxMod, MinCreate, MaxCreate int64 // 0 means off; they do not change the count
	Order                                SortOrder
	Target                               SortTarget
	// MaxBytes stops the read with ErrTooBig once the encoded KeyValues pass
	// it, in a sort by value those that the sort has to keep. 0 means no limit.
	MaxBytes int64
	// NoCount leaves RangeResult.Count 0: for the later chunks of a stream,
	// which move the start of the range past the last key they got.
	NoCount bool
	// MemoryOnly has the read end with ErrNotInMemory at once if it would touch
	// the disk, look at many keys, or at what is no longer the present.
	MemoryOnly bool
}

// RangeResult is the answer to a Range.
type RangeResult struct {
	KVs   [][]byte // encoded KeyValues, immutable
	Count int64    // keys in the range, whatever limit and filters left of them
	More  bool     // the limit cut keys off
	Bytes int64    // sum of the lengths of KVs
	// Pins is the memory that is not freed as long as KVs are held: values share
	// slabs. It is 0 for a read of memory alone, whose KVs are few.
	Pins int64
}

// HashResult is the answer to HashKV.
type HashResult struct {
	Hash            uint32
	CompactRevision int64 // -1 if there was no compaction
	HashRevision    int64 // the revision that was hashed
	Revision        int64 // the store's
}

// broken reports a broken invariant of this package. It does not return.
func broken(format string, args ...any) {
	panic("mvcc: broken invariant: " + fmt.Sprintf(format, args...))
}
