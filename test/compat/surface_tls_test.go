package compat

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// certificates are a CA and what it has issued, as files in one directory.
type certificates struct {
	t      *testing.T
	dir    string
	ca     *x509.Certificate
	key    *ecdsa.PrivateKey
	serial int64
}

func newCertificates(t *testing.T) *certificates {
	t.Helper()
	c := &certificates{t: t, dir: t.TempDir()}
	c.key = c.newKey()
	c.ca = c.sign("ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign}, c.key)
	return c
}

func (c *certificates) path(name string) string { return filepath.Join(c.dir, name) }

func (c *certificates) newKey() *ecdsa.PrivateKey {
	c.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(c.t, err)
	return key
}

// sign writes name.pem and name.key; the first is the CA's own.
func (c *certificates) sign(name string, cert *x509.Certificate, key *ecdsa.PrivateKey) *x509.Certificate {
	c.t.Helper()
	c.serial++
	cert.SerialNumber, cert.NotBefore, cert.NotAfter = big.NewInt(c.serial), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	if cert.Subject.CommonName == "" {
		cert.Subject.CommonName = name
	}
	parent := c.ca
	if parent == nil {
		parent = cert
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, parent, &key.PublicKey, c.key)
	check(c.t, err)
	c.write(name+".pem", "CERTIFICATE", der)
	keyDER, err := x509.MarshalECPrivateKey(key)
	check(c.t, err)
	c.write(name+".key", "EC PRIVATE KEY", keyDER)
	signed, err := x509.ParseCertificate(der)
	check(c.t, err)
	return signed
}

func (c *certificates) write(name, kind string, der []byte) {
	c.t.Helper()
	check(c.t, os.WriteFile(c.path(name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
}

// issue makes a certificate for addresses and names, usable by servers and clients.
func (c *certificates) issue(name string, sans ...string) *x509.Certificate {
	c.t.Helper()
	leaf := &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	for _, s := range sans {
		if ip := net.ParseIP(s); ip != nil {
			leaf.IPAddresses = append(leaf.IPAddresses, ip)
		} else {
			leaf.DNSNames = append(leaf.DNSNames, s)
		}
	}
	return c.sign(name, leaf, c.newKey())
}

// revoke writes crl.der, the only form that etcd reads.
func (c *certificates) revoke(certs ...*x509.Certificate) {
	c.t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour)}
	for _, cert := range certs {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: cert.SerialNumber, RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, c.ca, c.key)
	check(c.t, err)
	check(c.t, os.WriteFile(c.path("crl.der"), der, 0o600))
}

// client is the configuration of a client with the certificate of that name, "" for none.
func (c *certificates) client(name string) *tls.Config {
	c.t.Helper()
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AddCert(c.ca)
	if name != "" {
		pair, err := tls.LoadX509KeyPair(c.path(name+".pem"), c.path(name+".key"))
		check(c.t, err)
		config.Certificates = []tls.Certificate{pair}
	}
	return config
}

// securePair starts both programs with an https URL for clients.
func securePair(t *testing.T, flags ...string) [2]*process.Server {
	t.Helper()
	var pair [2]*process.Server
	for i, program := range []string{programs.Etcd, subject} {
		s, err := process.Start(process.Options{Program: program, Dir: t.TempDir(), Name: "m", Flags: flags, Secure: true})
		check(t, err)
		t.Cleanup(s.Close)
		pair[i] = s
	}
	return pair
}

func secureDial(t *testing.T, s *process.Server, c *tls.Config) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(strings.TrimPrefix(s.SecureURL, "https://"), grpc.WithTransportCredentials(credentials.NewTLS(c)))
	check(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// alertOf is the TLS alert that an error tells of, "" for none.
func alertOf(err error) string {
	_, alert, found := strings.Cut(status.Convert(err).Message(), "remote error: ")
	if !found {
		return ""
	}
	return strings.Trim(alert, `"`)
}

// TestTLSClients has clients of all kinds come to servers of all kinds: both programs let in the same.
func TestTLSClients(t *testing.T) {
	t.Parallel() // it waits more than it works
	certs, others := newCertificates(t), newCertificates(t)
	certs.issue("server", "127.0.0.1", "localhost")
	certs.issue("bare")
	certs.issue("elsewhere", "10.1.2.3")
	certs.issue("named", "client.example")
	certs.revoke(certs.issue("revoked"))
	others.issue("stranger")
	serverOnly := &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	certs.sign("serveronly", serverOnly, certs.newKey())

	clients := map[string]*tls.Config{"none": certs.client("")}
	for _, name := range []string{"bare", "elsewhere", "named", "revoked", "serveronly"} {
		clients[name] = certs.client(name)
	}
	clients["stranger"] = others.client("stranger")
	clients["stranger"].RootCAs = certs.client("").RootCAs
	clients["distrusts"] = certs.client("bare")
	clients["distrusts"].RootCAs = others.client("").RootCAs
	clients["1.2"] = certs.client("bare")
	clients["1.2"].MaxVersion = tls.VersionTLS12
	clients["1.2 with another cipher"] = clients["1.2"].Clone()
	clients["1.2 with another cipher"].CipherSuites = []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384}

	pair := []string{"--cert-file=" + certs.path("server.pem"), "--key-file=" + certs.path("server.key")}
	ca := "--trusted-ca-file=" + certs.path("ca.pem")
	for _, c := range []struct {
		name  string
		flags []string
		// alerts says that both must send the same alert to whom they refuse. A revoked certificate has etcd close the connection.
		alerts bool
	}{
		{"certificate", pair, true},
		{"mutual", append([]string{ca, "--client-cert-auth"}, pair...), true},
		{"a CA alone", append([]string{ca}, pair...), true},
		{"revocations", append([]string{ca, "--client-crl-file=" + certs.path("crl.der")}, pair...), false},
		{"host names", append([]string{ca, "--client-cert-auth", "--client-cert-allowed-hostname=client.example"}, pair...), true},
		{"1.3", append([]string{"--tls-min-version=TLS1.3"}, pair...), true},
		{"1.2 with one cipher", append([]string{"--tls-max-version=TLS1.2", "--cipher-suites=TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"}, pair...), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			servers := securePair(t, c.flags...)
			for name, config := range clients {
				var errs [2]error
				for i, s := range servers {
					ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
					_, errs[i] = etcdserverpb.NewKVClient(secureDial(t, s, config)).Put(ctx, &etcdserverpb.PutRequest{Key: []byte("k")})
					cancel()
				}
				if status.Code(errs[0]) != status.Code(errs[1]) {
					t.Errorf("%s: etcd answers %v, subject %v", name, errs[0], errs[1])
				}
				// A client of TLS 1.3 may find out when it writes, before it could read the alert.
				if a, b := alertOf(errs[0]), alertOf(errs[1]); c.alerts && a != "" && b != "" && a != b {
					t.Errorf("%s: etcd sends alert %q, subject %q", name, a, b)
				}
			}
			plain, err := net.Dial("tcp", strings.TrimPrefix(servers[1].SecureURL, "https://"))
			check(t, err)
			defer plain.Close()
			check(t, plain.SetDeadline(time.Now().Add(10*time.Second)))
			_, err = io.WriteString(plain, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
			check(t, err)
			if b, _ := io.ReadAll(plain); bytes.Contains(b, []byte{0, 0, 0, 4, 0}) {
				t.Errorf("cleartext is answered: %q", b)
			}
		})
	}
}

// TestTLSWeb asks over HTTP/1.1 and HTTP/2, on a client URL and on a metrics URL.
func TestTLSWeb(t *testing.T) {
	certs := newCertificates(t)
	certs.issue("server", "127.0.0.1")
	certs.issue("bare")
	port, err := cluster.FreePort()
	check(t, err)
	metrics := "https://127.0.0.1:" + port
	type reply struct {
		proto  string
		status int
		kind   string
		body   string
	}
	replies := map[string][2]reply{}
	for i, program := range []string{programs.Etcd, subject} { // one after the other: they share the metrics URL
		s, err := process.Start(process.Options{Program: program, Dir: t.TempDir(), Name: "m", Secure: true, Flags: []string{
			"--cert-file=" + certs.path("server.pem"), "--key-file=" + certs.path("server.key"), "--trusted-ca-file=" + certs.path("ca.pem"),
			"--client-cert-auth", "--listen-metrics-urls=" + metrics,
		}})
		check(t, err)
		for _, http2 := range []bool{false, true} {
			transport := &http.Transport{TLSClientConfig: certs.client("bare"), ForceAttemptHTTP2: http2}
			client := http.Client{Transport: transport, Timeout: 10 * time.Second}
			for _, url := range []string{
				s.SecureURL + "/health", s.SecureURL + "/readyz?verbose", s.SecureURL + "/nope", s.SecureURL + "/debug/vars", s.SecureURL + "/metrics",
				metrics + "/health", metrics + "/metrics", metrics + "/version",
			} {
				name := fmt.Sprint(strings.NewReplacer(s.SecureURL, "client", metrics, "metrics").Replace(url), " by HTTP/2: ", http2)
				resp, err := client.Get(url)
				if err != nil {
					t.Errorf("%s: %v", name, err)
					continue
				}
				body, err := io.ReadAll(resp.Body)
				check(t, err)
				resp.Body.Close()
				r := reply{resp.Proto, resp.StatusCode, resp.Header.Get("Content-Type"), string(body)}
				if strings.Contains(url, "/debug") || strings.Contains(url, "/metrics") || strings.Contains(url, "/readyz") {
					r.body = "" // each has its own, and etcd lists checks in any order
				}
				both := replies[name]
				both[i] = r
				replies[name] = both
			}
			transport.CloseIdleConnections()
			bare := &http.Transport{TLSClientConfig: certs.client("")}
			for _, url := range []string{s.SecureURL, metrics} {
				if resp, err := (&http.Client{Transport: bare}).Get(url + "/health"); err == nil {
					resp.Body.Close()
					t.Errorf("%s answers who shows no certificate at %s", program, url)
				}
			}
			bare.CloseIdleConnections()
		}
		s.Close()
	}
	for name, both := range replies {
		if both[0] != both[1] {
			t.Errorf("%s: etcd answers %+v, subject %+v", name, both[0], both[1])
		}
	}
}

// TestTLSUsers takes the common name of a certificate for the user, with --client-cert-auth alone.
func TestTLSUsers(t *testing.T) {
	certs := newCertificates(t)
	certs.issue("server", "127.0.0.1")
	for _, name := range []string{"root", "ann", "nobody"} {
		certs.issue(name)
	}
	certs.sign("unnamed", &x509.Certificate{
		Subject: pkix.Name{CommonName: " "}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, certs.newKey())
	flags := []string{"--cert-file=" + certs.path("server.pem"), "--key-file=" + certs.path("server.key"), "--trusted-ca-file=" + certs.path("ca.pem"), "--bcrypt-cost=4"}
	for _, c := range []struct {
		name string
		more []string
	}{{"with client-cert-auth", []string{"--client-cert-auth"}}, {"with a CA alone", nil}} {
		t.Run(c.name, func(t *testing.T) {
			var said [2][]string
			for i, s := range securePair(t, append(c.more, flags...)...) {
				setUsers(t, s)
				for _, name := range []string{"root", "ann", "nobody", "unnamed"} {
					conn := secureDial(t, s, certs.client(name))
					for token, ctx := range map[string]context.Context{
						"":              t.Context(),
						"ann's token":   metadata.AppendToOutgoingContext(t.Context(), "token", tokenOf(t, s, "ann")),
						"gateway":       metadata.AppendToOutgoingContext(t.Context(), "grpcgateway-accept", "x"),
						"invalid token": metadata.AppendToOutgoingContext(t.Context(), "token", "nonsense"),
					} {
						said[i] = append(said[i], asUser(ctx, conn, name+" "+token)...)
					}
				}
				slices.Sort(said[i])
			}
			for i := range said[0] {
				if said[0][i] != said[1][i] {
					t.Errorf("etcd: %s; subject: %s", said[0][i], said[1][i])
				}
			}
		})
	}
}

// setUsers gives root all, and ann the keys from a to b; then it turns auth on.
func setUsers(t *testing.T, s *process.Server) {
	t.Helper()
	auth, ctx := etcdserverpb.NewAuthClient(s.Conn()), t.Context()
	for _, name := range []string{"root", "ann"} {
		_, err := auth.UserAdd(ctx, &etcdserverpb.AuthUserAddRequest{Name: name, Password: "p"})
		check(t, err)
		_, err = auth.RoleAdd(ctx, &etcdserverpb.AuthRoleAddRequest{Name: name})
		check(t, err)
		_, err = auth.UserGrantRole(ctx, &etcdserverpb.AuthUserGrantRoleRequest{User: name, Role: name})
		check(t, err)
	}
	_, err := auth.RoleGrantPermission(ctx, &etcdserverpb.AuthRoleGrantPermissionRequest{
		Name: "ann", Perm: &authpb.Permission{Key: []byte("a"), RangeEnd: []byte("b"), PermType: authpb.READWRITE},
	})
	check(t, err)
	_, err = auth.AuthEnable(ctx, &etcdserverpb.AuthEnableRequest{})
	check(t, err)
}

func tokenOf(t *testing.T, s *process.Server, user string) string {
	t.Helper()
	r, err := etcdserverpb.NewAuthClient(s.Conn()).Authenticate(t.Context(), &etcdserverpb.AuthenticateRequest{Name: user, Password: "p"})
	check(t, err)
	return r.Token
}

// asUser tells what a connection may do.
func asUser(ctx context.Context, conn *grpc.ClientConn, who string) (out []string) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	kv := etcdserverpb.NewKVClient(conn)
	note := func(what string, err error) {
		out = append(out, fmt.Sprintf("%s, %s: %v %q", who, what, status.Code(err), status.Convert(err).Message()))
	}
	for _, key := range []string{"a1", "z"} {
		_, err := kv.Put(ctx, &etcdserverpb.PutRequest{Key: []byte(key)})
		note("put "+key, err)
		_, err = kv.Range(ctx, &etcdserverpb.RangeRequest{Key: []byte(key)})
		note("get "+key, err)
	}
	_, err := etcdserverpb.NewAuthClient(conn).UserList(ctx, &etcdserverpb.AuthUserListRequest{})
	note("list users", err)
	_, err = etcdserverpb.NewClusterClient(conn).MemberList(ctx, &etcdserverpb.MemberListRequest{})
	note("list members", err)
	_, err = etcdserverpb.NewClusterClient(conn).MemberList(ctx, &etcdserverpb.MemberListRequest{Linearizable: true})
	note("list members for sure", err)
	_, err = kv.Txn(ctx, &etcdserverpb.TxnRequest{})
	note("empty txn", err)
	leases, upkeep := etcdserverpb.NewLeaseClient(conn), etcdserverpb.NewMaintenanceClient(conn)
	granted, err := leases.LeaseGrant(ctx, &etcdserverpb.LeaseGrantRequest{TTL: 60})
	note("grant", err)
	_, err = leases.LeaseTimeToLive(ctx, &etcdserverpb.LeaseTimeToLiveRequest{ID: granted.GetID()})
	note("time to live", err)
	_, err = leases.LeaseTimeToLive(ctx, &etcdserverpb.LeaseTimeToLiveRequest{ID: 1, Keys: true})
	note("time to live of none", err)
	_, err = leases.LeaseLeases(ctx, &etcdserverpb.LeaseLeasesRequest{})
	note("leases", err)
	_, err = leases.LeaseRevoke(ctx, &etcdserverpb.LeaseRevokeRequest{ID: granted.GetID()})
	note("revoke", err)
	_, err = upkeep.Status(ctx, &etcdserverpb.StatusRequest{})
	note("status", err)
	_, err = upkeep.Alarm(ctx, &etcdserverpb.AlarmRequest{})
	note("alarms", err)
	_, err = upkeep.HashKV(ctx, &etcdserverpb.HashKVRequest{})
	note("hash", err)
	_, err = etcdserverpb.NewAuthClient(conn).AuthStatus(ctx, &etcdserverpb.AuthStatusRequest{})
	note("auth status", err)
	alive, err := leases.LeaseKeepAlive(ctx)
	if err == nil {
		err = alive.Send(&etcdserverpb.LeaseKeepAliveRequest{ID: 1})
	}
	if err == nil {
		_, err = alive.Recv()
	}
	note("keep alive", err)
	watch, err := etcdserverpb.NewWatchClient(conn).Watch(ctx)
	if err == nil {
		err = watch.Send(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{CreateRequest: &etcdserverpb.WatchCreateRequest{Key: []byte("a1")}}})
	}
	var r *etcdserverpb.WatchResponse
	if err == nil {
		r, err = watch.Recv()
	}
	note("watch: "+r.GetCancelReason(), err)
	return out
}

// TestTLSFiles replaces the certificate of a running server, and has it make one by itself.
func TestTLSFiles(t *testing.T) {
	certs := newCertificates(t)
	first := certs.issue("server", "127.0.0.1")
	servers := securePair(t, "--cert-file="+certs.path("server.pem"), "--key-file="+certs.path("server.key"))
	shown := func(s *process.Server) *x509.Certificate {
		t.Helper()
		conn, err := tls.Dial("tcp", strings.TrimPrefix(s.SecureURL, "https://"), &tls.Config{InsecureSkipVerify: true})
		check(t, err)
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0]
	}
	for i, s := range servers {
		if got := shown(s); !got.Equal(first) {
			t.Errorf("server %d shows serial %v", i, got.SerialNumber)
		}
	}
	second := certs.issue("server", "127.0.0.1")
	for i, s := range servers {
		if got := shown(s); !got.Equal(second) {
			t.Errorf("server %d still shows serial %v", i, got.SerialNumber)
		}
	}
	for i, s := range securePair(t, "--auto-tls", "--self-signed-cert-validity=2") {
		got := shown(s)
		left := time.Until(got.NotAfter)
		if len(got.IPAddresses) == 0 || !got.IPAddresses[0].Equal(net.IPv4(127, 0, 0, 1)) || left < 729*24*time.Hour || left > 732*24*time.Hour {
			t.Errorf("server %d made a certificate for %v until %v", i, got.IPAddresses, got.NotAfter)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := etcdserverpb.NewKVClient(secureDial(t, s, &tls.Config{InsecureSkipVerify: true})).Put(ctx, &etcdserverpb.PutRequest{Key: []byte("k")})
		check(t, err)
	}
}

// TestTLSStarts gives both programs what they cannot start with.
func TestTLSStarts(t *testing.T) {
	certs := newCertificates(t)
	certs.issue("server", "127.0.0.1")
	cert, key := "--cert-file="+certs.path("server.pem"), "--key-file="+certs.path("server.key")
	for _, flags := range [][]string{
		{"--cert-file=" + certs.path("no.pem"), key}, {cert, "--key-file=" + certs.path("ca.key")}, {cert}, {key},
		{cert, key, "--trusted-ca-file=" + certs.path("no.pem")}, {cert, key, "--client-cert-file=" + certs.path("server.pem")},
		{cert, key, "--client-cert-file=" + certs.path("no.pem"), "--client-key-file=" + certs.path("no.key")},
		{cert, key, "--cipher-suites=NONSENSE"}, {cert, key, "--tls-min-version=TLS1.3", "--tls-max-version=TLS1.2"}, {cert, key, "--tls-min-version=TLS1.1"}, {},
	} {
		for _, program := range []string{programs.Etcd, subject} {
			dir := t.TempDir()
			o := runServer(t, program, nil, append([]string{"--data-dir=" + filepath.Join(dir, "d"),
				"--listen-client-urls=https://127.0.0.1:0", "--advertise-client-urls=https://127.0.0.1:0", "--listen-peer-urls=http://127.0.0.1:0"}, flags...)...)
			if o.Code != 1 {
				t.Errorf("%s starts with %q: exit code %d", program, flags, o.Code)
			}
		}
	}
}

var healthTook = regexp.MustCompile(`took = \S+`)

// TestTLSCommands runs etcdctl and our ctl over TLS.
func TestTLSCommands(t *testing.T) {
	t.Parallel() // it waits more than it works
	certs := newCertificates(t)
	certs.issue("server", "127.0.0.1")
	certs.issue("bare")
	servers := securePair(t, "--cert-file="+certs.path("server.pem"), "--key-file="+certs.path("server.key"), "--trusted-ca-file="+certs.path("ca.pem"), "--client-cert-auth")
	material := []string{"--cacert=" + certs.path("ca.pem"), "--cert=" + certs.path("bare.pem"), "--key=" + certs.path("bare.key")}
	for _, args := range [][]string{
		append([]string{"put", "a", "b"}, material...), append([]string{"get", "a"}, material...), append([]string{"endpoint", "health"}, material...),
		{"get", "a", material[0], "--command-timeout=2s"}, {"get", "a", "--insecure-skip-tls-verify", "--command-timeout=2s"}, {"get", "a", "--insecure-transport", "--command-timeout=2s"},
	} {
		var outs [2]process.Output
		for i, s := range servers {
			o, err := process.Command{Program: []string{programs.Etcdctl}, Args: append([]string{"--endpoints=" + s.SecureURL}, args...)}.Run()
			check(t, err)
			o.Stdout = healthTook.ReplaceAllString(strings.ReplaceAll(o.Stdout, s.SecureURL, "$url"), "took = $$time")
			outs[i] = o
		}
		if outs[0].Stdout != outs[1].Stdout || outs[0].Code != outs[1].Code {
			t.Errorf("etcdctl %q: etcd gives %d %q, subject %d %q %s", args, outs[0].Code, outs[0].Stdout, outs[1].Code, outs[1].Stdout, outs[1].Stderr)
		}
	}
	if programs.Engram == "" {
		return
	}
	o, err := process.Command{Program: []string{programs.Engram, "ctl"}, Args: append([]string{"--endpoints=" + servers[0].SecureURL, "get", "a"}, material...)}.Run()
	check(t, err)
	if o.Stdout != "a\nb\n" {
		t.Errorf("our ctl at etcd: %d %q %s", o.Code, o.Stdout, o.Stderr)
	}
}
