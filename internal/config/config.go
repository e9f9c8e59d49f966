// Package config is the one place where a member's options are listed, read
// and checked.
//
// options.go holds the table: a row per option gives its flag, its environment
// variables, its key in the config file, its default and its help. Adding an
// option is adding one row and one field. Parse reads arguments, environment
// and file into a Config; Validate reports every problem at once. Nothing else
// is passed a Config: server fills each package's own Options from it.
package config

import (
	"net/url"
	"time"
)

// Config is every option of a member. Field comments give units where the type
// does not.
type Config struct {
	// Member.
	Name             string
	DataDir          string
	WALDir           string
	SnapshotCount    uint64
	CatchUpEntries   uint64
	HeartbeatMillis  uint
	ElectionMillis   uint
	TickAdvance      bool
	PreVote          bool
	MaxLearners      int
	StrictReconfig   bool
	ForceNewCluster  bool
	UnsafeNoFsync    bool
	MaxSnapshots     uint
	MaxWALs          uint
	MemoryLock       bool
	RaftReadTimeout  time.Duration
	RaftWriteTimeout time.Duration

	// Listening.
	ListenPeer, ListenClient, ListenClientHTTP, ListenMetrics []url.URL
	AdvertisePeer, AdvertiseClient                            []url.URL
	SocketReusePort, SocketReuseAddress                       bool
	MaxRequestBytes                                           uint
	MaxTxnOps                                                 uint
	MaxConcurrentStreams                                      uint32
	KeepaliveMinTime, KeepaliveInterval, KeepaliveTimeout     time.Duration
	CORS, HostWhitelist                                       []string
	GRPCGateway                                               bool

	// Cluster.
	InitialCluster, InitialClusterState, InitialClusterToken string
	DiscoverySRV, DiscoverySRVName                           string
	Discovery                                                Discovery

	// Store.
	QuotaBytes               int64
	MemoryBudget             Budget
	ResponseBytes            int64
	DiskReserveBytes         int64
	AutoClearNoSpace         bool
	AutoCompactionMode       string
	AutoCompactionRetention  string
	CompactionBatchLimit     int
	CompactionSleepInterval  time.Duration
	BackendFreelistType      string
	BackendBatchInterval     time.Duration
	BackendBatchLimit        int
	BootstrapDefragMegabytes uint

	// Checks and warnings.
	WarningApply, WarningUnary time.Duration
	CorruptCheckTime           time.Duration
	CompactHashCheckTime       time.Duration
	DowngradeCheckTime         time.Duration
	WatchProgressInterval      time.Duration
	FeatureGates               Gates

	// Security.
	ClientTLS, PeerTLS TLS
	CipherSuites       []string
	TLSMin, TLSMax     string
	SelfSignedYears    uint
	AuthToken          string
	AuthTokenTTL       uint // seconds
	BcryptCost         uint

	// Observation.
	Logger            string
	LogOutputs        []string
	LogLevel          string
	LogFormat         string
	LogRotation       bool
	LogRotationJSON   string
	Metrics           string
	Pprof             bool
	Tracing           bool
	TracingAddress    string
	TracingService    string
	TracingInstance   string
	TracingSampleRate int // per million

	V2Deprecation string
	ConfigFile    string

	// CalledAs is "engram" or "etcd"; it decides the default of DataDir.
	CalledAs string
	// set names the options that were given, by flag, environment or file.
	set map[string]bool
	// Warnings are things worth a log line that do not stop a member.
	Warnings []string
}

// TLS is the material of one side. Paths are of PEM files.
type TLS struct {
	CertFile, KeyFile, ClientCertFile, ClientKeyFile string
	ClientCertAuth                                   bool
	TrustedCAFile, CRLFile                           string
	AllowedCN, AllowedHostname                       []string
	Auto, SkipClientSAN                              bool
}

// Discovery is etcd's v3 discovery.
type Discovery struct {
	Token                                                    string
	Endpoints                                                []string
	DialTimeout, RequestTimeout, KeepaliveTime, KeepaliveEnd time.Duration
	Insecure, SkipVerify                                     bool
	Cert, Key, CA, User, Password, Fallback                  string
}

// IsSet says whether the option of that flag name was given.
func (c *Config) IsSet(flag string) bool { return c.set[flag] }

// Tick is raft's unit of time.
func (c *Config) Tick() time.Duration { return time.Duration(c.HeartbeatMillis) * time.Millisecond }

// ElectionTicks is the election timeout in ticks.
func (c *Config) ElectionTicks() int { return int(c.ElectionMillis / c.HeartbeatMillis) }

// RequestTimeout bounds a proposal or read index: 5 s plus two election
// timeouts (state-machine.md, section 0).
func (c *Config) RequestTimeout() time.Duration {
	return 5*time.Second + 2*time.Duration(c.ElectionMillis)*time.Millisecond
}

// PeerDialTimeout bounds a connection to a peer being made: 1 s plus an
// election timeout (peer-protocol.md, section 0).
func (c *Config) PeerDialTimeout() time.Duration {
	return time.Second + time.Duration(c.ElectionMillis)*time.Millisecond
}

// Quota is the effective limit in bytes; 0 means none. The flag's 0 means the
// default of 8 GiB, where etcd has 2, and a negative flag means none.
func (c *Config) Quota() int64 {
	switch {
	case c.QuotaBytes < 0:
		return 0
	case c.QuotaBytes == 0:
		return 8 << 30
	}
	return c.QuotaBytes
}
