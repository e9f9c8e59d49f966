package config

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var rewrite = flag.Bool("rewrite", false, "write the reference page anew")

func parse(t *testing.T, environ []string, args ...string) *Config {
	t.Helper()
	c, err := Parse("engram", args, environ)
	if err != nil {
		t.Fatalf("Parse(%q): %v", args, err)
	}
	return c
}

func TestDefaultsAreEtcds(t *testing.T) {
	c := parse(t, nil)
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if c.Name != "default" || c.DataDir != "default.engram" || JoinURLs(c.ListenClient) != "http://localhost:2379" ||
		c.InitialCluster != "default=http://localhost:2380" || c.MaxTxnOps != 128 || c.MaxRequestBytes != 1572864 ||
		c.Quota() != 8<<30 || c.RequestTimeout() != 7*time.Second || c.ElectionTicks() != 10 {
		t.Fatalf("unexpected defaults: %+v", c)
	}
	etcd, err := Parse("etcd", []string{"--name", "n1"}, nil)
	if err != nil || etcd.DataDir != "n1.etcd" || etcd.InitialCluster != "n1=http://localhost:2380" {
		t.Fatalf("called as etcd: %+v, %v", etcd, err)
	}
}

func TestFlagForms(t *testing.T) {
	c := parse(t, nil, "-name=a", "--enable-pprof", "--pre-vote=false", "--listen-client-urls", "http://127.0.0.1:1,unix://localhost:20000",
		"--advertise-client-urls=http://127.0.0.1:1", "--name=a", "--memory-budget=25%", "--feature-gates=InitialCorruptCheck=true")
	if c.Name != "a" || !c.Pprof || c.PreVote || len(c.ListenClient) != 2 || c.MemoryBudget.Of(1000) != 250 || !c.FeatureGates["InitialCorruptCheck"] {
		t.Fatalf("%+v", c)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
}

func TestUsageErrors(t *testing.T) {
	for _, args := range [][]string{{"--no-such-flag"}, {"--experimental-initial-corrupt-check=true"}, {"--pre-vote=perhaps"},
		{"--feature-gates=NoSuchGate=true"}, {"--initial-cluster-state=old"}, {"--max-txn-ops=-1"}, {"--listen-peer-urls=ftp://x:1"}, {"--memory-budget=99%"}} {
		if _, err := Parse("engram", args, nil); !errors.Is(err, ErrUsage) {
			t.Errorf("Parse(%q) = %v, want a usage error", args, err)
		}
	}
	if _, err := Parse("engram", []string{"extra"}, nil); err == nil || err.Error() != `"extra" is not a valid flag` {
		t.Errorf("stray argument: %v", err)
	}
	if _, err := Parse("engram", []string{"-h"}, nil); !errors.Is(err, ErrHelp) {
		t.Errorf("-h: %v", err)
	}
	if _, err := Parse("engram", []string{"--version"}, nil); !errors.Is(err, ErrVersion) {
		t.Errorf("--version: %v", err)
	}
}

func TestEnvironment(t *testing.T) {
	c := parse(t, []string{"ETCD_NAME=e1", "ENGRAM_MAX_TXN_OPS=7", "ETCD_NO_SUCH=1", "ETCD_UNSUPPORTED_ARCH=arm", "PATH=/bin"})
	if c.Name != "e1" || c.MaxTxnOps != 7 || !c.IsSet("name") {
		t.Fatalf("%+v", c)
	}
	if len(c.Warnings) != 1 || !strings.Contains(c.Warnings[0], "ETCD_NO_SUCH=1") {
		t.Fatalf("warnings %q", c.Warnings)
	}
	for want, in := range map[string]struct {
		env  []string
		args []string
	}{
		"conflicting environment variable is shadowed by corresponding command-line flag": {[]string{"ETCD_NAME=a"}, []string{"--name=b"}},
		"set the same option": {[]string{"ETCD_NAME=a", "ENGRAM_NAME=a"}, nil},
		`invalid value "x" for ETCD_MAX_TXN_OPS: want a whole number`: {[]string{"ETCD_MAX_TXN_OPS=x"}, nil},
	} {
		if _, err := Parse("engram", in.args, in.env); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestConfigFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	text := `
name: from-file
data-dir: /d
listen-client-urls: http://127.0.0.1:1,http://127.0.0.1:2
advertise-client-urls: http://127.0.0.1:1
auto-compaction-mode: revision
auto-compaction-retention: "1000"
warning-apply-duration: 5000000
socket-options:
  reuse-port: true
feature-gates: CompactHashCheck=true
quota-backend-bytes: 53248
no-such-key: 1
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c := parse(t, []string{"ETCD_NAME=env"}, "--config-file", path, "--name=flag")
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	a, _ := c.AutoCompaction()
	if c.Name != "from-file" || c.DataDir != "/d" || len(c.ListenClient) != 2 || c.WarningApply != 5*time.Millisecond ||
		!c.SocketReusePort || !c.FeatureGates["CompactHashCheck"] || c.Quota() != 53248 || a.Revisions != 1000 {
		t.Fatalf("%+v", c)
	}
	if len(c.Warnings) != 2 || !strings.Contains(c.Warnings[1], "no-such-key") {
		t.Fatalf("warnings %q", c.Warnings)
	}
}

func TestValidateNamesEveryProblem(t *testing.T) {
	c := parse(t, nil, "--listen-client-urls=http://example.com:1", "--heartbeat-interval=500", "--auto-compaction-mode=foo",
		"--log-format=foo", "--compact-hash-check-time=0s", "--feature-gates=LeaseCheckpointPersist=true", "--memory-mlock",
		"--discovery-token=t", "--auth-token=foo")
	err := c.Validate()
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		"--advertise-client-urls is required when --listen-client-urls is set explicitly",
		"expected IP in URL for binding (http://example.com:1)",
		"--election-timeout[1000ms] should be at least as 5 times as --heartbeat-interval[500ms]",
		`unknown auto-compaction-mode "foo"`,
		"unknown log format: foo, supported values json, console",
		"--compact-hash-check-time must be >0 (set to 0s)",
		"enabling feature gate LeaseCheckpointPersist requires enabling feature gate LeaseCheckpoint",
		"--memory-mlock=true is not supported",
		"both --discovery-token and --discovery-endpoints must be set",
		"auth: invalid auth options",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("missing %q in:\n%v", want, err)
		}
	}
	for want, args := range map[string][]string{
		"--heartbeat-interval must be >0 (set to 0ms)":                                          {"--heartbeat-interval=0"},
		"--election-timeout[60000ms] is too long, and should be set less than 50000ms":          {"--election-timeout=60000"},
		"cannot bind both --listen-client-urls and --listen-client-http-urls on the same":       {"--listen-client-http-urls=http://localhost:2379"},
		"TLS key/cert (--cert-file, --key-file) must be provided for client url https://l":      {"--listen-client-urls=https://localhost:1", "--advertise-client-urls=https://localhost:1"},
		"TLS key/cert (--cert-file, --key-file) must be provided for client url unixs://s":      {"--listen-client-http-urls=unixs://s"},
		"--response-bytes=33554433 is more than half of --memory-budget, which is 67108864":     {"--response-bytes=33554433", "--memory-budget=64MiB"},
		"client TLS key/cert (--cert-file, --key-file) must be provided for metrics secure url": {"--listen-metrics-urls=https://127.0.0.1:1"},
		"--election-timeout must be >0 (set to 0ms)":                                            {"--election-timeout=0"},
		"--logger=capnslog is removed in v3.5":                                                  {"--logger=capnslog"},
		`unexpected TLS version "TLS1.1" (must be one of: TLS1.2, TLS1.3)`:                      {"--tls-min-version=TLS1.1"},
		"min version (TLS1.3) is greater than max version (TLS1.2)":                             {"--tls-min-version=TLS1.3", "--tls-max-version=TLS1.2"},
		"cipher suites cannot be configured when only TLS1.3 is enabled":                        {"--tls-min-version=TLS1.3", "--cipher-suites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"},
		"multiple discovery or bootstrap flags are set":                                         {"--initial-cluster=default=http://localhost:2380", "--discovery-srv=x.test"},
		"error parsing CompactionRetention":                                                     {"--auto-compaction-retention=soon"},
	} {
		if err := parse(t, nil, args...).Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", args, err, want)
		}
	}
}

// TestDurations: no option takes a duration that would be a timer's undoing, and what is refused names option, value and cure.
func TestDurations(t *testing.T) {
	seen := 0
	for o := range options() {
		if _, ok := o.value(&Config{}).(duration); !ok || o.support != honoured {
			continue
		}
		seen++
		for _, value := range []string{"-1s", "-1ns"} {
			err := parse(t, nil, "--"+o.flag+"="+value).Validate()
			if err == nil || strings.Count(err.Error(), "\n") > 0 || !strings.HasPrefix(err.Error(), "--"+o.flag) ||
				!strings.Contains(err.Error(), value) || o.flag != "compact-hash-check-time" && !strings.Contains(err.Error(), "give ") {
				t.Errorf("--%s=%s: %v", o.flag, value, err)
			}
		}
		shortest := "0s"
		if o.flag == "compact-hash-check-time" {
			shortest = "1ns"
		}
		for _, value := range []string{shortest, "1ms"} {
			if err := parse(t, nil, "--"+o.flag+"="+value).Validate(); err != nil {
				t.Errorf("--%s=%s: %v", o.flag, value, err)
			}
		}
	}
	if seen < 10 {
		t.Errorf("%d options are durations", seen)
	}
	for _, flag := range []string{"raft-read-timeout", "raft-write-timeout"} {
		if err := parse(t, nil, "--"+flag+"=2ns").Validate(); err == nil || !strings.Contains(err.Error(), "--"+flag+"=2ns") {
			t.Errorf("2ns of --%s: %v", flag, err)
		}
	}
}

func TestInitialMembers(t *testing.T) {
	c := parse(t, nil, "--initial-cluster=b=http://127.0.0.1:2,a=http://127.0.0.1:1,b=http://127.0.0.1:0")
	ms, err := c.InitialMembers()
	if err != nil || len(ms) != 2 || ms[0].Name != "b" || ms[0].PeerURLs[0] != "http://127.0.0.1:0" {
		t.Fatalf("%v %v", ms, err)
	}
	if _, err := parse(t, nil, "--initial-cluster=b").InitialMembers(); err == nil {
		t.Fatal("accepted a name without URL")
	}
}

// TestReference keeps docs/options.md equal to the table.
func TestReference(t *testing.T) {
	var b bytes.Buffer
	WriteReference(&b)
	path := filepath.Join("..", "..", "docs", "options.md")
	if *rewrite {
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, b.Bytes()) {
		t.Fatalf("docs/options.md differs from the option table (%v): run go test ./internal/config -rewrite", err)
	}
}

func TestHelpNamesEveryOption(t *testing.T) {
	var b bytes.Buffer
	WriteHelp(&b, "engram")
	for o := range options() {
		if !strings.Contains(b.String(), "--"+o.flag+" ") {
			t.Errorf("help lacks --%s", o.flag)
		}
	}
}
