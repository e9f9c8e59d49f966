// Package raftlog keeps a member's raft log in segment files.
//
// It is raft.Storage plus the writing side: entries, hard state, and the record
// that names an installed snapshot. It does not know what an entry means, does
// not decide when the log may be cut, and does not lock its directory: the
// server locks the data directory. Log is the main type; docs/format.md
// has every byte.
//
// Who calls what: one goroutine, the log writer, calls Write, Sync and Mark.
// Prepare and Compact may run on another one; they take turns with the writer
// where they must. The methods of raft.Storage, Prefetch and the sizes may be
// called from any goroutine at any time. Raft asks Storage only for what it was
// told is stable, so entries become readable after Write, before Sync.
//
// Invariants:
//
//	L1: what Sync has returned nil for is there after any crash, unchanged.
//	L2: what was written after the last Sync survives a crash as an exact
//	    prefix of the written records, perhaps empty.
//	L3: no byte that was not written by this log at this place is ever taken
//	    for a record: each carries a checksum over its position, under a seed
//	    drawn for its segment.
//	L4: damage below a position known to be synced is refused, never cut.
//	L5: after a failed write or sync of promised bytes nothing more is written;
//	    every later writing call returns that first error.
//	L6: a full disk is met when a segment is prepared, before anything of the
//	    batch is written: ErrNoSpace, and the same call may be tried again.
//	L7: the first index and the segments still needed are durable before a
//	    segment is deleted.
//
// L4 has a window. Each record says how far the log was known to be synced when
// it was written. So the records written after the highest such statement, which
// are those of the last Write before the crash, may have been synced and
// acknowledged without the file saying so; if the disk later damages exactly
// these, Open cannot tell them from a write that the crash interrupted, and cuts
// them. Mark, which the driver calls in an idle moment and Close calls at stop,
// closes the window until the next Write.
package raftlog
