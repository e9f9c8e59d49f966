// Package member starts one member for the tests of the edge: a process that clients reach in cleartext and over TLS, and
// whose cost can be read.
package member

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/engram-kv/engram/test/internal/authority"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// Variable is what CI sets: long versions run, and what is missing fails.
const Variable = "ENGRAM_CI"

// Long says that the long versions are wanted.
func Long() bool { return os.Getenv(Variable) != "" }

// Member is one member that serves clients.
type Member struct {
	*cluster.Member
	Clear, TLS string // addresses of host and port
	Authority  *authority.Authority
}

// program is built once for all tests of a package.
var program = sync.OnceValues(func() (cluster.Program, error) { return cluster.Build(cluster.Chosen()) })

// Engram says that the member is one of ours, whose metrics and limits can be asked for. Others show faults of the tests.
func Engram() bool { return cluster.Chosen() == cluster.DefaultProgram }

// ClientCertAuth, among the flags of Start, has the member demand certificates of its authority.
const ClientCertAuth = "--client-cert-auth"

// Start starts a member that ends with the test. Limit, if not 0, is the memory in bytes that its process may have.
func Start(t testing.TB, limit int64, flags ...string) *Member {
	t.Helper()
	p, err := program()
	must(t, err)
	if limit > 0 {
		p.Path = confine(t, p.Path, limit)
	}
	dir := t.TempDir()
	a, err := authority.New(dir)
	must(t, err)
	certFile, keyFile, err := a.Issue("server")
	must(t, err)
	port, err := cluster.FreePort()
	must(t, err)
	m := &Member{TLS: "127.0.0.1:" + port, Authority: a}
	c := cluster.New(dir)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.Logs())
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	c.Listen = []string{"https://" + m.TLS}
	c.Flags = append([]string{"--cert-file=" + certFile, "--key-file=" + keyFile}, flags...)
	if slices.Contains(flags, ClientCertAuth) {
		c.Flags = append(c.Flags, "--trusted-ca-file="+a.File)
	}
	must(t, c.Start(t.Context(), p))
	m.Member = c.Members()[0]
	m.Clear = m.Endpoint()
	return m
}

// Dial makes a client of the member's cleartext listener that ends with the test.
func (m *Member) Dial(t testing.TB, change ...func(*clientv3.Config)) *clientv3.Client {
	t.Helper()
	return dial(t, clientv3.Config{Endpoints: []string{"http://" + m.Clear}}, change)
}

// DialTLS makes a client of the member's TLS listener that ends with the test. It shows a certificate with a common name if
// that is not empty.
func (m *Member) DialTLS(t testing.TB, name string, change ...func(*clientv3.Config)) *clientv3.Client {
	t.Helper()
	return dial(t, clientv3.Config{Endpoints: []string{"https://" + m.TLS}, TLS: m.ClientTLS(t, name)}, change)
}

// ClientTLS is the configuration of a client, with a common name if that is not empty.
func (m *Member) ClientTLS(t testing.TB, name string) *tls.Config {
	t.Helper()
	c, err := m.Authority.Client(name)
	must(t, err)
	return c
}

func dial(t testing.TB, cfg clientv3.Config, change []func(*clientv3.Config)) *clientv3.Client {
	t.Helper()
	cfg.Logger = zap.NewNop()
	for _, f := range change {
		f(&cfg)
	}
	client, err := clientv3.New(cfg)
	must(t, err)
	t.Cleanup(func() { client.Close() })
	return client
}

// Option adds gRPC options to a client.
func Option(o ...grpc.DialOption) func(*clientv3.Config) {
	return func(c *clientv3.Config) { c.DialOptions = append(c.DialOptions, o...) }
}

// Memory is what the process holds in memory, now and at most since it began, in bytes.
func (m *Member) Memory() (now, most int64, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.PID()))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != "VmRSS:" && f[0] != "VmHWM:" {
			continue
		}
		kib, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("%q: %w", line, err)
		}
		if f[0] == "VmRSS:" {
			now = kib << 10
		} else {
			most = kib << 10
		}
	}
	if now == 0 || most == 0 {
		return 0, 0, fmt.Errorf("/proc/%d/status names no memory", m.PID())
	}
	return now, most, nil
}

// Metrics are the samples that the member serves, by name and labels as they are written there.
func (m *Member) Metrics(ctx context.Context) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, m.ClientURL+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("/metrics: %s", resp.Status)
	}
	out := make(map[string]float64)
	for lines := bufio.NewScanner(resp.Body); ; {
		if !lines.Scan() {
			return out, lines.Err()
		}
		name, value, ok := cutLast(lines.Text(), " ")
		if !ok || strings.HasPrefix(name, "#") {
			continue
		}
		if out[name], err = strconv.ParseFloat(value, 64); err != nil {
			return nil, fmt.Errorf("/metrics: %q: %w", lines.Text(), err)
		}
	}
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
