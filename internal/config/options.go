package config

import "strings"

// support says how far an option is honoured.
type support uint8

const (
	// honoured: does what etcd's does.
	honoured support = iota
	// noEffect: accepted, since command lines carry it, but Engram has nothing
	// that it could change.
	noEffect
	// refused: would weaken or change what the operator asked for if it were
	// ignored; a member does not start with it until it is built.
	refused
	// deprecated: as noEffect, with a warning as in etcd.
	deprecated
)

// option is one row of the table.
type option struct {
	flag, def, help string
	file            string // key in the config file; "" means the flag's name, "-" none
	support         support
	value           func(*Config) value
}

// env is the option's environment variable without its ETCD_ or ENGRAM_ prefix.
func (o *option) env() string {
	return strings.ToUpper(strings.ReplaceAll(o.flag, "-", "_"))
}

func (o *option) fileKey() string {
	if o.file == "" {
		return o.flag
	}
	return o.file
}

// group is a heading of the help text with its options.
type group struct {
	title   string
	options []option
}

func str(f func(*Config) *string) func(*Config) value {
	return func(c *Config) value { return text{f(c)} }
}

func flagBool(f func(*Config) *bool) func(*Config) value {
	return func(c *Config) value { return boolean{f(c)} }
}

// table is every option, in the order of the help text. Defaults are etcd's
// (surface.md, section 3) unless the help says otherwise. An empty default
// leaves the field's zero value.
var table = []group{
	{"Member", []option{
		{flag: "name", def: "default", help: "human-readable name of this member", value: str(func(c *Config) *string { return &c.Name })},
		{flag: "data-dir", help: "directory of the member's data (default ${name}.engram; ${name}.etcd when called as etcd)", value: str(func(c *Config) *string { return &c.DataDir })},
		{flag: "wal-dir", help: "directory of the raft log, if it is to lie elsewhere", value: str(func(c *Config) *string { return &c.WALDir })},
		{flag: "snapshot-count", def: "10000", support: noEffect, help: "entries between etcd's raft snapshots; Engram cuts its log by what the store has made durable", value: func(c *Config) value { return number[uint64]{&c.SnapshotCount} }},
		{flag: "snapshot-catchup-entries", def: "5000", help: "log entries kept for slow followers", value: func(c *Config) value { return number[uint64]{&c.CatchUpEntries} }},
		{flag: "heartbeat-interval", def: "100", help: "leader's tick in milliseconds", value: func(c *Config) value { return number[uint]{&c.HeartbeatMillis} }},
		{flag: "election-timeout", def: "1000", help: "follower's patience in milliseconds", value: func(c *Config) value { return number[uint]{&c.ElectionMillis} }},
		{flag: "initial-election-tick-advance", def: "true", help: "skip most of the first election wait", value: flagBool(func(c *Config) *bool { return &c.TickAdvance })},
		{flag: "listen-peer-urls", def: "http://localhost:2380", help: "URLs to listen on for peers", value: func(c *Config) value { return urls{&c.ListenPeer} }},
		{flag: "listen-client-urls", def: "http://localhost:2379", help: "URLs to listen on for clients, gRPC and HTTP", value: func(c *Config) value { return urls{&c.ListenClient} }},
		{flag: "listen-client-http-urls", help: "URLs to listen on for HTTP alone; the client URLs then serve gRPC alone", value: func(c *Config) value { return urls{&c.ListenClientHTTP} }},
		{flag: "max-snapshots", def: "5", support: deprecated, help: "snapshot files kept", value: func(c *Config) value { return number[uint]{&c.MaxSnapshots} }},
		{flag: "max-wals", def: "5", support: noEffect, help: "log files kept; Engram keeps what it needs", value: func(c *Config) value { return number[uint]{&c.MaxWALs} }},
		{flag: "memory-mlock", support: refused, help: "lock the process's memory", value: flagBool(func(c *Config) *bool { return &c.MemoryLock })},
		{flag: "quota-backend-bytes", def: "0", help: "bytes of keys, values and kept history at which writes are refused; 0 is 8 GiB (2 GiB in etcd), negative is none", value: func(c *Config) value { return number[int64]{&c.QuotaBytes} }},
		{flag: "auto-clear-nospace", def: "true", help: "Engram only: clear the alarm NOSPACE when usage has been below 90% of the quota for ten seconds; only where every member is an Engram", value: flagBool(func(c *Config) *bool { return &c.AutoClearNoSpace })},
		{flag: "memory-budget", def: "50%", help: "Engram only: memory for values, caches and answers, as a size or a share of what the process may use", value: func(c *Config) value { return budget{&c.MemoryBudget} }},
		{flag: "response-bytes", def: "256MiB", help: "Engram only: bytes of answers being made or sent at one time, at most half of memory-budget; more wait, then get ResourceExhausted", value: func(c *Config) value { return size{&c.ResponseBytes} }},
		{flag: "disk-reserve-bytes", def: "512MiB", help: "Engram only: free disk space below which writes are refused until there is more; what makes space passes for longer, deletes until half of it is gone and compactions until three quarters are", value: func(c *Config) value { return size{&c.DiskReserveBytes} }},
		{flag: "backend-bbolt-freelist-type", def: "map", support: noEffect, help: "bbolt's freelist; Engram has no bbolt", value: func(c *Config) value { return choice{&c.BackendFreelistType, []string{"map", "array"}} }},
		{flag: "backend-batch-interval", def: "0s", support: noEffect, help: "bbolt's commit period", value: func(c *Config) value { return duration{&c.BackendBatchInterval} }},
		{flag: "backend-batch-limit", def: "0", support: noEffect, help: "bbolt's operations per commit", value: func(c *Config) value { return number[int]{&c.BackendBatchLimit} }},
		{flag: "max-txn-ops", def: "128", help: "operations in one list of a transaction", value: func(c *Config) value { return number[uint]{&c.MaxTxnOps} }},
		{flag: "max-request-bytes", def: "1572864", help: "largest request that is replicated", value: func(c *Config) value { return number[uint]{&c.MaxRequestBytes} }},
		{flag: "max-concurrent-streams", def: "4294967295", help: "streams that one connection may have", value: func(c *Config) value { return number[uint32]{&c.MaxConcurrentStreams} }},
		{flag: "grpc-keepalive-min-time", def: "5s", help: "shortest time between pings of a client", value: func(c *Config) value { return duration{&c.KeepaliveMinTime} }},
		{flag: "grpc-keepalive-interval", def: "2h0m0s", help: "time after which a silent client is pinged", value: func(c *Config) value { return duration{&c.KeepaliveInterval} }},
		{flag: "grpc-keepalive-timeout", def: "20s", help: "time that a pinged client has to answer", value: func(c *Config) value { return duration{&c.KeepaliveTimeout} }},
		{flag: "socket-reuse-port", file: "socket-options.reuse-port", help: "set SO_REUSEPORT", value: flagBool(func(c *Config) *bool { return &c.SocketReusePort })},
		{flag: "socket-reuse-address", file: "socket-options.reuse-address", help: "set SO_REUSEADDR", value: flagBool(func(c *Config) *bool { return &c.SocketReuseAddress })},
		{flag: "enable-grpc-gateway", def: "true", support: noEffect, help: "serve the JSON gateway (not built yet)", value: flagBool(func(c *Config) *bool { return &c.GRPCGateway })},
		{flag: "raft-read-timeout", def: "5s", file: "-", help: "time-out of reads from peers", value: func(c *Config) value { return duration{&c.RaftReadTimeout} }},
		{flag: "raft-write-timeout", def: "5s", file: "-", help: "time-out of writes to peers", value: func(c *Config) value { return duration{&c.RaftWriteTimeout} }},
		{flag: "feature-gates", help: "etcd's feature gates, as name=true,…", value: func(c *Config) value { return gates{&c.FeatureGates} }},
	}},
	{"Clustering", []option{
		{flag: "initial-advertise-peer-urls", def: "http://localhost:2380", help: "peer URLs told to the other members", value: func(c *Config) value { return urls{&c.AdvertisePeer} }},
		{flag: "initial-cluster", help: "members to start with, as name=url,… (default ${name}=${initial-advertise-peer-urls})", value: str(func(c *Config) *string { return &c.InitialCluster })},
		{flag: "initial-cluster-state", def: "new", help: "new or existing", value: func(c *Config) value { return choice{&c.InitialClusterState, []string{"new", "existing"}} }},
		{flag: "initial-cluster-token", def: "etcd-cluster", help: "seed of the cluster id", value: str(func(c *Config) *string { return &c.InitialClusterToken })},
		{flag: "advertise-client-urls", def: "http://localhost:2379", help: "client URLs in the member list", value: func(c *Config) value { return urls{&c.AdvertiseClient} }},
		{flag: "discovery-token", file: "discovery-config.token", help: "v3 discovery: cluster token", value: str(func(c *Config) *string { return &c.Discovery.Token })},
		{flag: "discovery-endpoints", file: "discovery-config.client.endpoints", help: "v3 discovery: servers", value: func(c *Config) value { return list{&c.Discovery.Endpoints} }},
		{flag: "discovery-dial-timeout", def: "2s", file: "discovery-config.client.dial-timeout", help: "v3 discovery", value: func(c *Config) value { return duration{&c.Discovery.DialTimeout} }},
		{flag: "discovery-request-timeout", def: "5s", file: "discovery-config.client.request-timeout", help: "v3 discovery", value: func(c *Config) value { return duration{&c.Discovery.RequestTimeout} }},
		{flag: "discovery-keepalive-time", def: "2s", file: "discovery-config.client.keepalive-time", help: "v3 discovery", value: func(c *Config) value { return duration{&c.Discovery.KeepaliveTime} }},
		{flag: "discovery-keepalive-timeout", def: "6s", file: "discovery-config.client.keepalive-timeout", help: "v3 discovery", value: func(c *Config) value { return duration{&c.Discovery.KeepaliveEnd} }},
		{flag: "discovery-insecure-transport", def: "true", file: "discovery-config.client.secure.insecure-transport", help: "v3 discovery", value: flagBool(func(c *Config) *bool { return &c.Discovery.Insecure })},
		{flag: "discovery-insecure-skip-tls-verify", file: "discovery-config.client.secure.insecure-skip-tls-verify", help: "v3 discovery", value: flagBool(func(c *Config) *bool { return &c.Discovery.SkipVerify })},
		{flag: "discovery-cert", file: "discovery-config.client.secure.cert", help: "v3 discovery", value: str(func(c *Config) *string { return &c.Discovery.Cert })},
		{flag: "discovery-key", file: "discovery-config.client.secure.key", help: "v3 discovery", value: str(func(c *Config) *string { return &c.Discovery.Key })},
		{flag: "discovery-cacert", file: "discovery-config.client.secure.cacert", help: "v3 discovery", value: str(func(c *Config) *string { return &c.Discovery.CA })},
		{flag: "discovery-user", file: "discovery-config.client.auth.username", help: "v3 discovery", value: str(func(c *Config) *string { return &c.Discovery.User })},
		{flag: "discovery-password", file: "discovery-config.client.auth.password", help: "v3 discovery", value: str(func(c *Config) *string { return &c.Discovery.Password })},
		{flag: "discovery-fallback", def: "exit", file: "-", support: noEffect, help: "only exit is allowed", value: str(func(c *Config) *string { return &c.Discovery.Fallback })},
		{flag: "discovery-srv", help: "DNS domain of the cluster's SRV records", value: str(func(c *Config) *string { return &c.DiscoverySRV })},
		{flag: "discovery-srv-name", help: "suffix of the SRV name", value: str(func(c *Config) *string { return &c.DiscoverySRVName })},
		{flag: "strict-reconfig-check", def: "true", help: "refuse member changes that endanger the quorum", value: flagBool(func(c *Config) *bool { return &c.StrictReconfig })},
		{flag: "pre-vote", def: "true", help: "ask before disturbing a leader", value: flagBool(func(c *Config) *bool { return &c.PreVote })},
		{flag: "auto-compaction-retention", def: "0", help: "history to keep: a duration or hours in periodic mode, revisions in revision mode; 0 is off", value: str(func(c *Config) *string { return &c.AutoCompactionRetention })},
		{flag: "auto-compaction-mode", def: "periodic", help: "periodic or revision", value: str(func(c *Config) *string { return &c.AutoCompactionMode })},
		{flag: "v2-deprecation", def: "write-only", support: deprecated, help: "phase of the v2 store's end", value: func(c *Config) value {
			return choice{&c.V2Deprecation, []string{"write-only", "write-only-drop-data", "gone"}}
		}},
		{flag: "max-learners", def: "1", help: "learners that the cluster may have", value: func(c *Config) value { return number[int]{&c.MaxLearners} }},
	}},
	{"Security", []option{
		{flag: "cert-file", file: "client-transport-security.cert-file", help: "certificate shown to clients, read again when it changes", value: str(func(c *Config) *string { return &c.ClientTLS.CertFile })},
		{flag: "key-file", file: "client-transport-security.key-file", help: "its key", value: str(func(c *Config) *string { return &c.ClientTLS.KeyFile })},
		{flag: "client-cert-auth", file: "client-transport-security.client-cert-auth", help: "require certificates of clients; their common name is the user when auth is on and there is no token", value: flagBool(func(c *Config) *bool { return &c.ClientTLS.ClientCertAuth })},
		{flag: "client-cert-file", file: "client-transport-security.client-cert-file", help: "certificate used when the member calls a client URL itself (default that of cert-file)", value: str(func(c *Config) *string { return &c.ClientTLS.ClientCertFile })},
		{flag: "client-key-file", file: "client-transport-security.client-key-file", help: "its key", value: str(func(c *Config) *string { return &c.ClientTLS.ClientKeyFile })},
		{flag: "client-crl-file", file: "-", help: "revoked client certificates, read again when it changes", value: str(func(c *Config) *string { return &c.ClientTLS.CRLFile })},
		{flag: "client-cert-allowed-hostname", file: "client-transport-security.allowed-hostname", help: "host names of which client certificates must have one", value: func(c *Config) value { return list{&c.ClientTLS.AllowedHostname} }},
		{flag: "trusted-ca-file", file: "client-transport-security.trusted-ca-file", help: "CA of client certificates, which are then required", value: str(func(c *Config) *string { return &c.ClientTLS.TrustedCAFile })},
		{flag: "auto-tls", file: "client-transport-security.auto-tls", help: "self-signed certificate for clients", value: flagBool(func(c *Config) *bool { return &c.ClientTLS.Auto })},
		{flag: "peer-cert-file", file: "peer-transport-security.cert-file", help: "certificate for peers", value: str(func(c *Config) *string { return &c.PeerTLS.CertFile })},
		{flag: "peer-key-file", file: "peer-transport-security.key-file", help: "its key", value: str(func(c *Config) *string { return &c.PeerTLS.KeyFile })},
		{flag: "peer-client-cert-auth", file: "peer-transport-security.client-cert-auth", help: "require certificates of peers", value: flagBool(func(c *Config) *bool { return &c.PeerTLS.ClientCertAuth })},
		{flag: "peer-client-cert-file", file: "peer-transport-security.client-cert-file", help: "certificate used towards peers", value: str(func(c *Config) *string { return &c.PeerTLS.ClientCertFile })},
		{flag: "peer-client-key-file", file: "peer-transport-security.client-key-file", help: "its key", value: str(func(c *Config) *string { return &c.PeerTLS.ClientKeyFile })},
		{flag: "peer-trusted-ca-file", file: "peer-transport-security.trusted-ca-file", help: "CA of peer certificates", value: str(func(c *Config) *string { return &c.PeerTLS.TrustedCAFile })},
		{flag: "peer-cert-allowed-cn", file: "peer-transport-security.allowed-cn", help: "common names allowed in peer certificates", value: func(c *Config) value { return list{&c.PeerTLS.AllowedCN} }},
		{flag: "peer-cert-allowed-hostname", file: "peer-transport-security.allowed-hostname", help: "names allowed in peer certificates", value: func(c *Config) value { return list{&c.PeerTLS.AllowedHostname} }},
		{flag: "peer-auto-tls", file: "peer-transport-security.auto-tls", help: "self-signed certificate for peers", value: flagBool(func(c *Config) *bool { return &c.PeerTLS.Auto })},
		{flag: "peer-crl-file", file: "-", help: "revoked peer certificates", value: str(func(c *Config) *string { return &c.PeerTLS.CRLFile })},
		{flag: "peer-skip-client-san-verification", file: "peer-transport-security.skip-client-san-verification", help: "do not compare names of peer certificates", value: flagBool(func(c *Config) *bool { return &c.PeerTLS.SkipClientSAN })},
		{flag: "self-signed-cert-validity", def: "1", help: "years that self-signed certificates last", value: func(c *Config) value { return number[uint]{&c.SelfSignedYears} }},
		{flag: "cipher-suites", help: "TLS 1.2 cipher suites", value: func(c *Config) value { return list{&c.CipherSuites} }},
		{flag: "tls-min-version", def: "TLS1.2", help: "lowest TLS version", value: str(func(c *Config) *string { return &c.TLSMin })},
		{flag: "tls-max-version", help: "highest TLS version", value: str(func(c *Config) *string { return &c.TLSMax })},
		{flag: "cors", def: "*", help: "origins allowed to call over HTTP", value: func(c *Config) value { return list{&c.CORS} }},
		{flag: "host-whitelist", def: "*", help: "hosts allowed in plain HTTP requests", value: func(c *Config) value { return list{&c.HostWhitelist} }},
		{flag: "auth-token", def: "simple", help: "simple; jwt with options is not supported yet", value: str(func(c *Config) *string { return &c.AuthToken })},
		{flag: "auth-token-ttl", def: "300", help: "seconds that a simple token lives without being used; 0 is 300", value: func(c *Config) value { return number[uint]{&c.AuthTokenTTL} }},
		{flag: "bcrypt-cost", def: "10", help: "cost of password hashes, 4 to 31; 10 if it is another", value: func(c *Config) value { return number[uint]{&c.BcryptCost} }},
	}},
	{"Observation", []option{
		{flag: "logger", def: "zap", support: noEffect, help: "zap; Engram writes lines of the same form", value: str(func(c *Config) *string { return &c.Logger })},
		{flag: "log-outputs", def: "default", help: "default, stderr, stdout, or files, comma-separated", value: func(c *Config) value { return list{&c.LogOutputs} }},
		{flag: "log-level", def: "info", help: "debug, info, warn, error, panic or fatal", value: func(c *Config) value {
			return choice{&c.LogLevel, []string{"debug", "info", "warn", "error", "dpanic", "panic", "fatal"}}
		}},
		{flag: "log-format", def: "json", help: "json or console", value: str(func(c *Config) *string { return &c.LogFormat })},
		{flag: "enable-log-rotation", help: "rotate the log; needs one file in log-outputs", value: flagBool(func(c *Config) *bool { return &c.LogRotation })},
		{flag: "log-rotation-config-json", def: `{"maxsize": 100, "maxage": 0, "maxbackups": 0, "localtime": false, "compress": false}`, help: "rotation by size (MB), age (days) and count", value: str(func(c *Config) *string { return &c.LogRotationJSON })},
		{flag: "metrics", def: "basic", help: "basic, or extensive for call durations", value: func(c *Config) value { return choice{&c.Metrics, []string{"basic", "extensive"}} }},
		{flag: "listen-metrics-urls", help: "further URLs for metrics and health", value: func(c *Config) value { return urls{&c.ListenMetrics} }},
		{flag: "enable-pprof", help: "serve /debug/pprof", value: flagBool(func(c *Config) *bool { return &c.Pprof })},
		{flag: "warning-apply-duration", def: "100ms", help: "apply time that is logged as slow", value: func(c *Config) value { return duration{&c.WarningApply} }},
		{flag: "warning-unary-request-duration", def: "300ms", help: "call time that is logged as slow", value: func(c *Config) value { return duration{&c.WarningUnary} }},
		{flag: "enable-distributed-tracing", support: refused, help: "send traces", value: flagBool(func(c *Config) *bool { return &c.Tracing })},
		{flag: "distributed-tracing-address", def: "localhost:4317", support: noEffect, help: "trace collector", value: str(func(c *Config) *string { return &c.TracingAddress })},
		{flag: "distributed-tracing-service-name", def: "etcd", support: noEffect, help: "service name in traces", value: str(func(c *Config) *string { return &c.TracingService })},
		{flag: "distributed-tracing-instance-id", support: noEffect, help: "instance id in traces", value: str(func(c *Config) *string { return &c.TracingInstance })},
		{flag: "distributed-tracing-sampling-rate", def: "0", support: noEffect, help: "traces per million calls", value: func(c *Config) value { return number[int]{&c.TracingSampleRate} }},
	}},
	{"Upkeep", []option{
		{flag: "corrupt-check-time", def: "12h0m0s", help: "time between comparisons of the whole store with those of peers, by the leader; 0 is never (etcd's default)", value: func(c *Config) value { return duration{&c.CorruptCheckTime} }},
		{flag: "compact-hash-check-time", def: "1m0s", help: "time between comparisons of what compactions found with what peers found, by the leader; the gate CompactHashCheck turns them off", value: func(c *Config) value { return duration{&c.CompactHashCheckTime} }},
		{flag: "compaction-batch-limit", def: "1000", help: "revisions removed in one step of a compaction", value: func(c *Config) value { return number[int]{&c.CompactionBatchLimit} }},
		{flag: "compaction-sleep-interval", def: "10ms", help: "pause between two steps", value: func(c *Config) value { return duration{&c.CompactionSleepInterval} }},
		{flag: "watch-progress-notify-interval", def: "10m0s", help: "time between progress notifications of a quiet watcher", value: func(c *Config) value { return duration{&c.WatchProgressInterval} }},
		{flag: "bootstrap-defrag-threshold-megabytes", def: "0", support: noEffect, help: "defragment at start; Engram needs none", value: func(c *Config) value { return number[uint]{&c.BootstrapDefragMegabytes} }},
		{flag: "downgrade-check-time", def: "5s", help: "time between looks at a running downgrade", value: func(c *Config) value { return duration{&c.DowngradeCheckTime} }},
	}},
	{"Unsafe", []option{
		{flag: "force-new-cluster", help: "begin a new single-member cluster with this data", value: flagBool(func(c *Config) *bool { return &c.ForceNewCluster })},
		{flag: "unsafe-no-fsync", help: "do not sync the raft log: acknowledged writes may be lost", value: flagBool(func(c *Config) *bool { return &c.UnsafeNoFsync })},
	}},
}

// ignoredFlags are flags of old releases that etcd accepts with a warning.
var ignoredFlags = []string{
	"cluster-active-size", "cluster-remove-delay", "cluster-sync-interval", "config", "force", "max-result-buffer",
	"max-retry-attempts", "peer-heartbeat-interval", "peer-election-timeout", "retry-interval", "snapshot", "v", "vv",
}
