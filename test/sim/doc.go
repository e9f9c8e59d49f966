// Package sim runs whole clusters in one process, from a seed.
//
// It has no product code. A world is a few members, a network and some clients,
// all driven by one goroutine from one queue of events under a clock of its own.
// A member is what internal/server wires together below its edge (consensus,
// raft log, machine, store, watch hub, lessor), on a disk in memory that forgets
// what was not synced when the power goes. The seed decides everything: when a
// message arrives and whether, before which file operation a member dies and
// what of its disk survives, when Pebble flushes, who joins and who leaves.
// Then all comes to rest, and is compared:
//
//   - no two members applied different entries at one index, or told different
//     events of one revision, also before and after a crash;
//   - what a client was told is in the log, where it was said to be;
//   - the history of the clients is linearizable, and each read is what the
//     store was at the revision that it names;
//   - watchers got every event once and in order;
//   - no lease ended before its time;
//   - members that have applied the same index have the same hashes, and
//     everybody gets there.
//
// Mutants, members that break one rule, show that each check can fail. A seed
// is run twice in CI and has to give the same trace.
package sim
