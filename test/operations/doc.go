// Package operations does what operators do, through the command line, on clusters of real processes: a store that is full
// and empties again, a member whose data went bad, a member that is rebuilt from its peers.
//
// It holds tests only. CLUSTER_PROGRAM does not matter here: the members are Engram.
package operations
