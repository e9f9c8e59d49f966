// Package crash proves that an acknowledged write is never lost.
//
// It has no product code. Its tests run whole members, as processes that are
// killed and in one process on a memory file system that forgets what was not
// synced, and compare what comes back with what clients were told before:
//
//   - ledger is what clients were told and what a watcher saw, and audits a
//     member that came back against it.
//   - load is the clients: writers with keys of their own, and some that fight
//     over few keys, whose history is checked for linearizability.
//   - core is a member without its edge, driven step by step from one
//     goroutine, so that a seed decides before which file operation the power
//     goes away.
//
// Each suite is shown to fail on a mutant: syncs left out, the applied index
// outside of its batch, the log cut before the store is durable.
//
// ENGRAM_CI=1 runs the long versions. A line that replays a failure is printed
// with it.
package crash
