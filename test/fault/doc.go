// Package fault proves that a cluster of real processes keeps its promises whatever happens to its network, its processes
// and its disks.
//
// It holds tests only. Members run in network namespaces of their own, between which packets are dropped, or on loopback
// behind a proxy that delays, stalls and breaks connections. Clients read, write and watch through all members meanwhile,
// and what they were told is judged by package history: no acknowledged write lost, the keys that are fought over
// linearizable, no event missed or doubled, equal hashes.
//
// Namespaces and small disks need root, ip and iptables, and a slow disk mkfs.ext4, a loop device and the control groups of
// blkio, version 1. Without them a test is skipped, and says so; with ENGRAM_CI it fails instead, and every test takes more
// turns. CLUSTER_PROGRAM chooses the program, see package cluster.
package fault
