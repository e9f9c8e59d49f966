package compat

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/compat/internal/process"
)

// server runs a program as a server that must end by itself, because of what its flags ask for.
func runServer(t *testing.T, program string, env []string, args ...string) process.Output {
	t.Helper()
	o, err := process.Command{Program: []string{program}, Args: args, Env: env}.Run()
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// stopper is a flag that ends every start, in both programs, after all flags were read and checked. stopped is what they say.
const (
	stopper = "--log-format=nonsense"
	stopped = "unknown log format: nonsense, supported values json, console"
)

var helpFlag = regexp.MustCompile(`(?m)^[ \t]+--([a-z0-9-]+)(?:[ \t]+('[^']*'|\S+))?`)

// flagsOf reads flags and defaults off a help text.
func flagsOf(help string) map[string]string {
	flags := make(map[string]string)
	for _, m := range helpFlag.FindAllStringSubmatch(help, -1) {
		if _, again := flags[m[1]]; !again {
			flags[m[1]] = strings.Trim(m[2], "'")
		}
	}
	return flags
}

func sameDuration(a, b string) bool {
	x, err := time.ParseDuration(a)
	if err != nil {
		return false
	}
	y, err := time.ParseDuration(b)
	return err == nil && x == y
}

// flagValues are values to try flags with; a flag that is not here is tried with its default.
var flagValues = map[string]string{
	"wal-dir": "wal", "listen-client-http-urls": "http://127.0.0.1:1", "memory-mlock": "true", "socket-reuse-port": "true",
	"socket-reuse-address": "true", "enable-grpc-gateway": "true", "feature-gates": "InitialCorruptCheck=true",
	"initial-cluster": "default=http://localhost:2380", "backend-batch-interval": "100ms", "discovery-token": "t",
	"discovery-endpoints": "http://127.0.0.1:1", "discovery-cert": "c", "discovery-key": "k", "discovery-cacert": "c", "discovery-user": "u",
	"discovery-password": "p", "discovery-srv": "d", "discovery-srv-name": "n", "cert-file": "c", "key-file": "k",
	"client-cert-auth": "true", "client-cert-file": "c", "client-key-file": "k", "client-crl-file": "c", "client-cert-allowed-hostname": "h",
	"trusted-ca-file": "c", "auto-tls": "true", "peer-cert-file": "c", "peer-key-file": "k", "peer-client-cert-auth": "true",
	"peer-client-cert-file": "c", "peer-client-key-file": "k", "peer-trusted-ca-file": "c", "peer-cert-allowed-cn": "c",
	"peer-cert-allowed-hostname": "h", "peer-auto-tls": "true", "peer-crl-file": "c", "cipher-suites": "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
	"tls-max-version": "TLS1.3", "enable-pprof": "true", "listen-metrics-urls": "http://127.0.0.1:1", "enable-log-rotation": "false",
	"enable-distributed-tracing": "true", "distributed-tracing-instance-id": "i", "peer-skip-client-san-verification": "true",
	"bootstrap-defrag-threshold-megabytes": "1", "compaction-sleep-interval": "10ms", "downgrade-check-time": "5s",
	"snapshot-catchup-entries": "5000", "force-new-cluster": "true", "unsafe-no-fsync": "true", "data-dir": "d", "log-format": "json",
	"auto-compaction-retention": "1h", "discovery": "d", "discovery-proxy": "d", "max-concurrent-streams": "100",
}

// TestFlags gives every flag of etcd's help to both programs. What the page calls absent must be refused by name, in one
// line with what to do; all others must be taken by both.
func TestFlags(t *testing.T) {
	if programs.Engram == "" {
		return
	}
	page := areaOf(t, "flag")
	theirs, ours := flagsOf(runServer(t, programs.Etcd, nil, "--help").Stdout), flagsOf(runServer(t, subject, nil, "--help").Stdout)
	if len(theirs) < 100 {
		t.Fatalf("etcd's help names %d flags", len(theirs))
	}
	for name, def := range theirs {
		if name == "version" || name == "help" || name == "config-file" {
			continue
		}
		line, named := page["--"+name]
		if !named {
			t.Errorf("--%s: etcd has it, and it is not on the page", name)
			continue
		}
		value, chosen := flagValues[name]
		if !chosen {
			value = def
		}
		flag := fmt.Sprintf("--%s=%s", name, value)
		reference := runServer(t, programs.Etcd, nil, flag, stopper)
		o := runServer(t, subject, nil, flag, stopper)
		switch {
		case reference.Code == 2 && o.Code == 2: // neither has it: --discovery
		case reference.Code != 1 || o.Code != 1:
			t.Errorf("%s: etcd ends with %d, subject with %d: %s", flag, reference.Code, o.Code, o.Stderr)
		case line.status == absent:
			if !strings.Contains(o.Stderr, fmt.Sprintf("--%s=%s is not supported by this version of Engram: ", name, value)) {
				t.Errorf("%s is absent by the page, and is not refused: %s", flag, o.Stderr)
			}
		case strings.Contains(o.Stderr, "not supported"):
			t.Errorf("%s is not absent by the page, and is refused: %s", flag, o.Stderr)
		case name != "log-format" && !strings.Contains(o.Stderr, stopped):
			t.Errorf("%s is not taken: %s", flag, o.Stderr)
		}
		if got, ok := ours[name]; line.status == passes && ok && def != "" && got != def && !sameDuration(got, def) {
			t.Errorf("--%s: etcd's default is %q, subject's %q", name, def, got)
		}
	}
}

// TestFeatureGates switches each gate of etcd.
func TestFeatureGates(t *testing.T) {
	gates := []string{
		"AllAlpha", "AllBeta", "CompactHashCheck", "FastLeaseKeepAlive", "InitialCorruptCheck", "LeaseCheckpoint", "PriorityRequest",
		"SetMemberLocalAddr", "StopGRPCServiceOnDefrag", "TxnModeWriteWithSharedBuffer", "LeaseCheckpointPersist=true,LeaseCheckpoint",
	}
	for _, gate := range gates {
		for _, value := range []string{"true", "false"} {
			for _, program := range []string{programs.Etcd, subject} {
				o := runServer(t, program, nil, "--feature-gates="+gate+"="+value, stopper)
				// etcd itself refuses AllAlpha=true: it names LeaseCheckpointPersist, but not LeaseCheckpoint
				if o.Code != 1 || !strings.Contains(o.Stderr, "nonsense") && !strings.Contains(o.Stderr, "LeaseCheckpoint") {
					t.Errorf("%s %s=%s ends with %d: %s", filepath.Base(program), gate, value, o.Code, o.Stderr)
				}
			}
		}
	}
}

// badStarts are command lines that must not start a member. A text must be in what both programs print; an empty one is for
// etcd's own words, which scripts do not look for.
var badStarts = []struct {
	name, text string
	code       int
	env        []string
	args       string
}{
	{name: "advertise", code: 1, args: "--listen-client-urls=http://127.0.0.1:1", text: "--advertise-client-urls is required when --listen-client-urls is set explicitly"},
	{name: "host in listen URL", code: 1, args: "--listen-peer-urls=http://example.com:1", text: "expected IP in URL for binding (http://example.com:1)"},
	{name: "host in client URL", code: 1, args: "--listen-client-urls=http://example.com:1 --advertise-client-urls=http://example.com:1", text: "expected IP in URL for binding (http://example.com:1)"},
	{name: "no heartbeat", code: 1, args: "--heartbeat-interval=0", text: "--heartbeat-interval must be >0 (set to 0ms)"},
	{name: "no election", code: 1, args: "--election-timeout=0", text: "--election-timeout must be >0 (set to 0ms)"},
	{name: "five heartbeats", code: 1, args: "--heartbeat-interval=500", text: "--election-timeout[1000ms] should be at least as 5 times as --heartbeat-interval[500ms]"},
	{name: "long election", code: 1, args: "--election-timeout=60000", text: "--election-timeout[60000ms] is too long, and should be set less than 50000ms"},
	{name: "two bootstraps", code: 1, args: "--initial-cluster=default=http://127.0.0.1:1 --discovery-srv=example.com", text: `multiple discovery or bootstrap flags are set. Choose one of "initial-cluster", "discovery-endpoints" or "discovery-srv"`},
	{name: "half a discovery", code: 1, args: "--discovery-token=t", text: "both --discovery-token and --discovery-endpoints must be set"},
	{name: "compaction mode", code: 1, args: "--auto-compaction-mode=foo", text: `unknown auto-compaction-mode "foo"`},
	{name: "compaction retention", code: 1, args: "--auto-compaction-retention=foo --listen-peer-urls=http://127.0.0.1:0 --listen-client-urls=http://127.0.0.1:0 --advertise-client-urls=http://127.0.0.1:0", text: "error parsing CompactionRetention: "},
	{name: "hash check", code: 1, args: "--compact-hash-check-time=0s", text: "--compact-hash-check-time must be >0 (set to 0s)"},
	{name: "gate without its gate", code: 1, args: "--feature-gates=LeaseCheckpointPersist=true", text: "enabling feature gate LeaseCheckpointPersist requires enabling feature gate LeaseCheckpoint"},
	{name: "log format", code: 1, args: "--log-format=foo", text: "unknown log format: foo, supported values json, console"},
	{name: "logger", code: 1, args: "--logger=capnslog", text: "--logger=capnslog is removed in v3.5"},
	{name: "log level", code: 2, args: "--log-level=loud"},
	{name: "fallback", code: 1, args: "--discovery-fallback=proxy", text: `v2 proxy is deprecated, and --discovery-fallback can't be configured as "proxy"`},
	{name: "auth token", code: 1, args: "--auth-token=nonsense $fresh", text: "auth: invalid auth options"},
	{name: "HTTPS without a certificate", code: 1, args: "--listen-client-urls=https://127.0.0.1:0 --advertise-client-urls=https://127.0.0.1:0 --listen-peer-urls=http://127.0.0.1:0 --data-dir=$dir", text: "TLS key/cert (--cert-file, --key-file) must be provided for client url https://127.0.0.1:0 with HTTPS scheme"},
	{name: "TLS versions", code: 1, args: "--tls-min-version=TLS1.1 $fresh", text: `unexpected TLS version "TLS1.1" (must be one of: TLS1.2, TLS1.3)`},
	{name: "TLS order", code: 1, args: "--tls-min-version=TLS1.3 --tls-max-version=TLS1.2 $fresh", text: "min version (TLS1.3) is greater than max version (TLS1.2)"},
	{name: "TLS 1.3 and suites", code: 1, args: "--tls-min-version=TLS1.3 --cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 $fresh", text: "cipher suites cannot be configured when only TLS1.3 is enabled"},
	{name: "stray argument", code: 1, args: "extra", text: `"extra" is not a valid flag`},
	{name: "unknown flag", code: 2, args: "--nonsense=1"},
	{name: "experimental flag", code: 2, args: "--experimental-initial-corrupt-check=true"},
	{name: "v2", code: 2, args: "--enable-v2=true"},
	{name: "proxy", code: 2, args: "--proxy=off"},
	{name: "discovery", code: 2, args: "--discovery=http://127.0.0.1:1"},
	{name: "bad enum", code: 2, args: "--initial-cluster-state=nonsense"},
	{name: "unknown gate", code: 2, args: "--feature-gates=Nonsense=true"},
	{name: "bad number", code: 2, args: "--max-txn-ops=many"},
	{name: "bad duration", code: 2, args: "--grpc-keepalive-min-time=5"},
	{name: "not in the cluster", code: 1, args: "--name=x --initial-cluster=y=http://127.0.0.1:1 $fresh", text: `couldn't find local name "x" in the initial cluster configuration`},
	{name: "other peer URLs", code: 1, args: "--name=x --initial-cluster=x=http://127.0.0.1:1 --initial-advertise-peer-urls=http://127.0.0.1:2 $fresh", text: "--initial-cluster has x=http://127.0.0.1:1 but missing from --initial-advertise-peer-urls=http://127.0.0.1:2"},
	{name: "same URL twice", code: 1, args: "--listen-client-http-urls=$url --listen-client-urls=$url --advertise-client-urls=$url --listen-peer-urls=http://127.0.0.1:0 --data-dir=$dir", text: "cannot bind both --listen-client-urls and --listen-client-http-urls on the same url"},
	{name: "log rotation", code: 1, args: "--enable-log-rotation=true"},
	{name: "flag and variable", code: 1, env: []string{"ETCD_NAME=a"}, args: "--name=a", text: "conflicting environment variable is shadowed by corresponding command-line flag"},
	{name: "variable", code: 1, env: []string{"ETCD_LOG_FORMAT=foo"}, text: "unknown log format: foo"},
	{name: "unknown variable", code: 1, env: []string{"ETCD_NONSENSE=1"}, args: stopper, text: "unknown log format: nonsense"},
	{name: "tolerated variables", code: 1, env: []string{"ETCD_UNSUPPORTED_ARCH=arm64", "ETCD_VERIFY=all"}, args: stopper, text: "unknown log format: nonsense"},
	{name: "file wins over flags", code: 1, args: "--config-file=$file(auto-compaction-mode: foo) " + stopper, text: `unknown auto-compaction-mode "foo"`},
	{name: "file by variable", code: 1, env: []string{"ETCD_CONFIG_FILE=$file(auto-compaction-mode: foo)"}, args: stopper, text: `unknown auto-compaction-mode "foo"`},
	{name: "file with nanoseconds", code: 1, args: "--config-file=$file(compact-hash-check-time: -5000000000)", text: "--compact-hash-check-time must be >0 (set to -5s)"},
	{name: "no file", code: 1, args: "--config-file=/nonexistent/file"},
	{name: "old flags", code: 1, args: "--snapshot=1 --v=1 --retry-interval=1 --cluster-active-size=3 " + stopper, text: "unknown log format: nonsense"},
	{name: "deprecated flags", code: 1, args: "--max-snapshots=7 --v2-deprecation=gone " + stopper, text: "unknown log format: nonsense"},
	{name: "flag twice", code: 1, args: "--name=a --name=a " + stopper, text: "unknown log format: nonsense"},
	{name: "flag apart", code: 1, args: "--name a --pre-vote --unsafe-no-fsync=false " + stopper, text: "unknown log format: nonsense"},
}

var fileArgument = regexp.MustCompile(`\$file\(([^)]*)\)`)

// TestBadStarts runs command lines that must not start a member and compares exit codes, and texts that people look up.
func TestBadStarts(t *testing.T) {
	for _, b := range badStarts {
		t.Run(b.name, func(t *testing.T) {
			for _, program := range []string{programs.Etcd, subject} {
				dir := t.TempDir()
				fill := func(s string) string {
					s = fileArgument.ReplaceAllStringFunc(s, func(m string) string {
						path := filepath.Join(dir, "config.yaml")
						if err := os.WriteFile(path, []byte(fileArgument.FindStringSubmatch(m)[1]+"\n"), 0o600); err != nil {
							t.Fatal(err)
						}
						return path
					})
					return strings.NewReplacer("$fresh", "--data-dir=$dir --listen-peer-urls=http://127.0.0.1:0 --listen-client-urls=http://127.0.0.1:0 --advertise-client-urls=http://127.0.0.1:0",
						"$url", "http://127.0.0.1:1").Replace(s)
				}
				var args []string
				text := strings.ReplaceAll(fill(b.args), "$dir", filepath.Join(dir, "data"))
				if b.name == "file wins over flags" {
					path, rest, _ := strings.Cut(text, ".yaml ")
					args = append(args, path+".yaml", rest)
				} else {
					args = strings.Fields(text)
				}
				env := slices.Clone(b.env)
				for i := range env {
					env[i] = fill(env[i])
				}
				o := runServer(t, program, env, args...)
				said := strings.ReplaceAll(o.Stdout+o.Stderr, `\"`, `"`)
				if o.Code != b.code || !strings.Contains(said, b.text) {
					t.Errorf("%s %q ends with %d, not %d, or does not say %q:\n%s", filepath.Base(program), args, o.Code, b.code, b.text, indent(said))
				}
			}
		})
	}
}

// TestServerVersion compares the first line of --version, which tools parse, and the help's exit code.
func TestServerVersion(t *testing.T) {
	var answers [2]string
	for i, program := range []string{programs.Etcd, subject} {
		if i == 1 && programs.Engram != "" { // called by etcd's name, as it is in etcd's place
			link := filepath.Join(t.TempDir(), "etcd")
			if err := os.Symlink(program, link); err != nil {
				t.Fatal(err)
			}
			program = link
		}
		o := runServer(t, program, nil, "--version")
		first, _, _ := strings.Cut(o.Stdout, "\n")
		answers[i] = fmt.Sprintf("%d %s, help %d", o.Code, first, runServer(t, program, nil, "--help").Code)
	}
	equal(t, "version", answers)
}
