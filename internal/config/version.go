package config

// Versions that a member tells. Clients switch features on etcd's, so ours
// stands beside it and never in its place.
const (
	// Version is Engram's own.
	Version = "0.1.0"
	// EtcdVersion is the release of etcd whose behaviour this one has.
	EtcdVersion = "3.7.3"
)
