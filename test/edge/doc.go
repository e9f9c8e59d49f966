// Package edge proves that a member serves clients as they are: official clients with their habits, and clients that mean
// harm beside them.
//
// It holds tests only. A member is a real process; what it costs is read from the kernel, what it counted from its metrics.
// Hostile clients speak raw HTTP/2 frames. Beside each of them a good client reads, writes and watches at a fixed rate, and
// must be served all the time; its latency is counted from the moment at which a call was due.
//
// With ENGRAM_CI the attacks are longer, and what is missing fails instead of skipping. CLUSTER_PROGRAM=etcd runs the same
// against a real member, where limits and metrics of ours are not asked for. What others have written to test such servers,
// and clients of other languages, are in conformance, a module of its own.
package edge
