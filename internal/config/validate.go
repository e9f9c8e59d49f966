package config

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// maxElectionMillis is the longest election timeout that etcd takes.
const maxElectionMillis = 50000

// Validate reports every problem at once. Texts are etcd's where it has one
// (surface.md, section 3.2).
func (c *Config) Validate() error {
	var problems []error
	bad := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }

	for o := range options() {
		if c.set[o.flag] && o.value(c).String() != o.def && !(o.def == "" && o.value(c).String() == "false") {
			switch o.support {
			case refused:
				bad("--%s=%s is not supported by this version of Engram: remove it, or use a member that has it", o.flag, o.value(c))
			case deprecated:
				c.Warnings = append(c.Warnings, fmt.Sprintf("--%s is deprecated and has no effect", o.flag))
			}
		}
	}
	if c.Name == "" {
		bad("--name must not be empty")
	}
	if c.ResponseBytes == 0 {
		bad("--response-bytes=0 would leave no room for any answer: give at least 1MiB")
	}
	if total := c.MemoryBudget.Of(MemoryLimit()); c.IsSet("response-bytes") && c.ResponseBytes > total/2 {
		bad("--response-bytes=%d is more than half of --memory-budget, which is %d bytes here: give less, or a larger budget", c.ResponseBytes, total)
	}
	if c.IsSet("listen-client-urls") && !c.IsSet("advertise-client-urls") {
		bad("--advertise-client-urls is required when --listen-client-urls is set explicitly")
	}
	for _, us := range [][]url.URL{c.ListenPeer, c.ListenClient, c.ListenClientHTTP, c.ListenMetrics} {
		for i := range us {
			if err := bindable(&us[i]); err != nil {
				problems = append(problems, err)
			}
		}
	}
	for i := range c.ListenClientHTTP {
		if slices.Contains(c.ListenClient, c.ListenClientHTTP[i]) {
			bad("cannot bind both --listen-client-urls and --listen-client-http-urls on the same url %s", c.ListenClientHTTP[i].String())
		}
	}
	c.validateTimes(bad)
	c.validateCluster(bad)
	c.validateTLS(bad)
	if err := c.validateCompaction(); err != nil {
		problems = append(problems, err)
	}
	if c.FeatureGates["LeaseCheckpointPersist"] && !c.FeatureGates["LeaseCheckpoint"] {
		bad("enabling feature gate LeaseCheckpointPersist requires enabling feature gate LeaseCheckpoint")
	}
	if c.Logger == "capnslog" {
		bad("--logger=capnslog is removed in v3.5")
	} else if c.Logger != "zap" {
		bad("unknown logger option %q: --logger takes zap", c.Logger)
	}
	if c.LogFormat != "json" && c.LogFormat != "console" {
		bad("unknown log format: %s, supported values json, console", c.LogFormat)
	}
	if c.LogRotation && (len(c.LogOutputs) != 1 || slices.Contains([]string{"default", "stdout", "stderr"}, c.LogOutputs[0])) {
		bad("log rotation requires a single file target")
	}
	if c.AuthToken != "simple" {
		if strings.HasPrefix(c.AuthToken, "jwt,") || c.AuthToken == "jwt" {
			bad("--auth-token=%s is not supported by this version of Engram: remove it", c.AuthToken)
		} else {
			bad("auth: invalid auth options")
		}
	}
	if c.Discovery.Fallback != "exit" {
		bad("v2 proxy is deprecated, and --discovery-fallback can't be configured as %q", c.Discovery.Fallback)
	}
	return errors.Join(problems...)
}

func (c *Config) validateTimes(bad func(string, ...any)) {
	if c.HeartbeatMillis == 0 {
		bad("--heartbeat-interval must be >0 (set to 0ms)")
	}
	if c.ElectionMillis == 0 {
		bad("--election-timeout must be >0 (set to 0ms)")
	} else if c.ElectionMillis < 5*c.HeartbeatMillis {
		bad("--election-timeout[%dms] should be at least as 5 times as --heartbeat-interval[%dms]", c.ElectionMillis, c.HeartbeatMillis)
	}
	if c.ElectionMillis > maxElectionMillis {
		bad("--election-timeout[%dms] is too long, and should be set less than %dms", c.ElectionMillis, maxElectionMillis)
	}
	c.validateDurations(bad)
	if c.CompactionBatchLimit <= 0 {
		bad("--compaction-batch-limit must be >0 (set to %d)", c.CompactionBatchLimit)
	}
	if c.WatchProgressInterval < 100*time.Millisecond {
		c.WatchProgressInterval = 100 * time.Millisecond
	}
}

// leastRaftTimeout is the shortest time-out of a connection to a peer: a part of
// it is the time between two heartbeats.
const leastRaftTimeout = time.Millisecond

// validateDurations refuses what no timer can count, and what one would ring
// without end.
func (c *Config) validateDurations(bad func(string, ...any)) {
	for o := range options() {
		v, ok := o.value(c).(duration)
		if !ok || o.support != honoured {
			continue
		}
		switch d := *v.p; {
		case o.flag == "compact-hash-check-time":
			if d <= 0 {
				bad("--compact-hash-check-time must be >0 (set to %v)", d)
			}
		case d < 0:
			bad("--%s=%v is negative: give 0s or more, such as the default of %s", o.flag, d, o.def)
		case d > 0 && d < leastRaftTimeout && strings.HasPrefix(o.flag, "raft-"):
			bad("--%s=%v is too short: give %v or more, such as the default of %s", o.flag, d, leastRaftTimeout, o.def)
		}
	}
}

func (c *Config) validateCluster(bad func(string, ...any)) {
	ways := 0
	for _, given := range []bool{c.IsSet("initial-cluster"), len(c.Discovery.Endpoints) > 0, c.DiscoverySRV != ""} {
		if given {
			ways++
		}
	}
	if ways > 1 {
		bad(`multiple discovery or bootstrap flags are set. Choose one of "initial-cluster", "discovery-endpoints" or "discovery-srv"`)
	}
	if (c.Discovery.Token == "") != (len(c.Discovery.Endpoints) == 0) {
		bad("both --discovery-token and --discovery-endpoints must be set")
	}
}

// tlsVersions are the versions of TLS that may be asked for, the lowest first.
var tlsVersions = []string{"TLS1.2", "TLS1.3"}

func (c *Config) validateTLS(bad func(string, ...any)) {
	c.validateClientTLS(bad)
	for _, v := range []string{c.TLSMin, c.TLSMax} {
		if v != "" && !slices.Contains(tlsVersions, v) {
			bad("unexpected TLS version %q (must be one of: %s)", v, strings.Join(tlsVersions, ", "))
			return
		}
	}
	low, high := slices.Index(tlsVersions, c.TLSMin), slices.Index(tlsVersions, c.TLSMax)
	if c.TLSMax != "" && low > high {
		bad("min version (%s) is greater than max version (%s)", c.TLSMin, c.TLSMax)
	}
	if len(c.CipherSuites) > 0 && c.TLSMin == "TLS1.3" {
		bad("cipher suites cannot be configured when only TLS1.3 is enabled")
	}
}

// validateClientTLS compares the client URLs with what there is for TLS.
func (c *Config) validateClientTLS(bad func(string, ...any)) {
	t := &c.ClientTLS
	none := t.CertFile == "" && !t.Auto
	for _, u := range slices.Concat(c.ListenClient, c.ListenClientHTTP) {
		switch secure := u.Scheme == "https" || u.Scheme == "unixs"; {
		case secure && none:
			bad("TLS key/cert (--cert-file, --key-file) must be provided for client url %s with HTTPS scheme", u.String())
		case !secure && (t.CertFile != "" || t.Auto):
			c.Warnings = append(c.Warnings, fmt.Sprintf("the client URL %s is served in cleartext, although there is a certificate for clients: write https:// or unixs:// if it is to be used", u.String()))
		case !secure && t.ClientCertAuth:
			c.Warnings = append(c.Warnings, fmt.Sprintf("the client URL %s is served in cleartext: --client-cert-auth has no effect on it", u.String()))
		}
	}
	for i := range c.ListenMetrics {
		if c.ListenMetrics[i].Scheme == "https" && none {
			bad("client TLS key/cert (--cert-file, --key-file) must be provided for metrics secure url")
		}
	}
	if t.Auto && t.CertFile != "" {
		c.Warnings = append(c.Warnings, "--auto-tls has no effect, since --cert-file is given")
	}
}

// bindable refuses host names, which may mean several addresses.
func bindable(u *url.URL) error {
	if u.Scheme == "unix" || u.Scheme == "unixs" {
		return nil
	}
	if host := u.Hostname(); host != "localhost" && host != "" && net.ParseIP(host) == nil {
		return fmt.Errorf("expected IP in URL for binding (%s)", u.String())
	}
	return nil
}

// AutoCompaction is how history is compacted without being asked. The zero
// value is off.
type AutoCompaction struct {
	// Period is how much time is kept; Revisions how many revisions. At most
	// one is set.
	Period    time.Duration
	Revisions int64
}

// AutoCompaction reads mode and retention.
func (c *Config) AutoCompaction() (AutoCompaction, error) {
	n, numErr := strconv.ParseInt(c.AutoCompactionRetention, 10, 64)
	switch c.AutoCompactionMode {
	case "periodic":
		if numErr == nil {
			return AutoCompaction{Period: time.Duration(n) * time.Hour}, nil
		}
		d, err := time.ParseDuration(c.AutoCompactionRetention)
		if err != nil {
			return AutoCompaction{}, fmt.Errorf("error parsing CompactionRetention: %w", err)
		}
		return AutoCompaction{Period: d}, nil
	case "revision":
		if numErr != nil {
			return AutoCompaction{}, fmt.Errorf("error parsing CompactionRetention: %w", numErr)
		}
		return AutoCompaction{Revisions: n}, nil
	}
	return AutoCompaction{}, fmt.Errorf("unknown auto-compaction-mode %q", c.AutoCompactionMode)
}

func (c *Config) validateCompaction() error {
	a, err := c.AutoCompaction()
	if err != nil {
		return err
	}
	if a.Period < 0 || a.Revisions < 0 {
		return fmt.Errorf("--auto-compaction-retention=%s is negative: use 0 to turn it off", c.AutoCompactionRetention)
	}
	return nil
}

// Member is one name and URL of --initial-cluster.
type Member struct {
	Name     string
	PeerURLs []string
}

// InitialMembers reads --initial-cluster: members in the order of their first
// appearance, each with its URLs sorted.
func (c *Config) InitialMembers() ([]Member, error) {
	var out []Member
	for part := range strings.SplitSeq(c.InitialCluster, ",") {
		name, raw, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("--initial-cluster: %q is not of the form name=url", part)
		}
		u, err := parseURL(raw)
		if err != nil {
			return nil, fmt.Errorf("--initial-cluster: member %s: %w", name, err)
		}
		i := slices.IndexFunc(out, func(m Member) bool { return m.Name == name })
		if i < 0 {
			out = append(out, Member{Name: name})
			i = len(out) - 1
		}
		out[i].PeerURLs = append(out[i].PeerURLs, u.String())
	}
	for i := range out {
		slices.Sort(out[i].PeerURLs)
	}
	return out, nil
}
