package server_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// authority is a CA that keeps its files in a directory.
type authority struct {
	t      *testing.T
	dir    string
	key    *ecdsa.PrivateKey
	cert   *x509.Certificate
	serial int64
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir(), serial: 1}
	a.key = a.newKey()
	a.cert = a.sign("ca.pem", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, &a.key.PublicKey)
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) newKey() *ecdsa.PrivateKey {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	return key
}

// sign writes a certificate for a key; the first is the CA's own.
func (a *authority) sign(name string, c *x509.Certificate, key *ecdsa.PublicKey) *x509.Certificate {
	a.t.Helper()
	a.serial++
	c.SerialNumber, c.Subject = big.NewInt(a.serial), pkix.Name{CommonName: name}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent := a.cert
	if parent == nil {
		parent = c
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(name, "CERTIFICATE", der)
	if c, err = x509.ParseCertificate(der); err != nil {
		a.t.Fatal(err)
	}
	return c
}

func (a *authority) write(name, kind string, der []byte) {
	a.t.Helper()
	if err := os.WriteFile(a.path(name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// issue writes the files of a member on this host, name.pem and name.key.
func (a *authority) issue(name string) *x509.Certificate {
	a.t.Helper()
	key := a.newKey()
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(name+".key", "EC PRIVATE KEY", der)
	return a.sign(name+".pem", &x509.Certificate{
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}, &key.PublicKey)
}

// pair reads what issue wrote.
func (a *authority) pair(name string) tls.Certificate {
	a.t.Helper()
	c, err := tls.LoadX509KeyPair(a.path(name+".pem"), a.path(name+".key"))
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// secureMember is a member whose peer URL is one of TLS.
func secureMember(t *testing.T, name string) *clusterMember {
	m := newClusterMember(t, name)
	m.peer = strings.Replace(m.peer, "http:", "https:", 1)
	return m
}

// TestPeerTLS founds a cluster of three over TLS of which one has a certificate of
// another CA: it has no part in it, until its files are replaced.
func TestPeerTLS(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	ca, other := newAuthority(t), newAuthority(t)
	members := []*clusterMember{secureMember(t, "m0"), secureMember(t, "m1"), secureMember(t, "m2")}
	stranger := members[2]
	for _, m := range members {
		from := ca
		if m == stranger {
			from = other
		}
		from.issue(m.name)
		// Two of them may be late by seconds before they elect anew, which the stranger must not bring about.
		m.start(members, "new", "--peer-cert-file="+from.path(m.name+".pem"), "--peer-key-file="+from.path(m.name+".key"),
			"--peer-trusted-ca-file="+ca.path("ca.pem"), "--peer-client-cert-auth", "--election-timeout=5000")
	}
	cli := dialMembers(t, members[0])
	waitServes(ctx, t, cli)
	for i := range 20 {
		if _, err := cli.Put(ctx, fmt.Sprintf("k%02d", i), "v"); err != nil {
			t.Fatal(err)
		}
	}
	before, err := cli.Status(ctx, members[0].client)
	if err != nil {
		t.Fatal(err)
	}
	hasty, cancel2 := context.WithTimeout(ctx, time.Second)
	defer cancel2()
	outside := dialMembers(t, stranger)
	if got, err := outside.Get(hasty, "k", clientv3.WithPrefix(), clientv3.WithSerializable()); err == nil {
		t.Fatalf("the stranger serves %v", got)
	}

	// Nobody talks to a member without a certificate of the right CA.
	ca.issue("friend")
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	for _, c := range []struct {
		who   string
		certs []tls.Certificate
		ok    bool
	}{
		{"no certificate", nil, false},
		{"one of another CA", []tls.Certificate{other.pair("m2")}, false},
		{"one of the CA", []tls.Certificate{ca.pair("friend")}, true},
	} {
		got, err := peerCertificate(ctx, members[0], &tls.Config{RootCAs: roots, Certificates: c.certs})
		if (err == nil) != c.ok {
			t.Errorf("%s: %v, %v", c.who, got, err)
		}
	}
	if resp, err := http.Get(strings.Replace(members[0].peer, "https:", "http:", 1) + "/version"); err == nil {
		resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			t.Error("a peer port with TLS answers without")
		}
	}

	// New files serve new connections, without a restart: at the listener and when dialing.
	fresh := ca.issue("m0")
	got, err := peerCertificate(ctx, members[0], &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{ca.pair("friend")}})
	if err != nil || !got.Equal(fresh) {
		t.Errorf("after m0 got a new certificate: %v, %v", got, err)
	}
	ca.issue("m2")
	for _, file := range []string{"m2.key", "m2.pem"} {
		b, err := os.ReadFile(ca.path(file))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(other.path(file), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := outside.Get(ctx, "k", clientv3.WithPrefix()); err != nil || len(got.Kvs) != 20 {
		t.Fatalf("at the stranger that became a member: %v, %v", got, err)
	}
	after, err := cli.Status(ctx, members[0].client)
	if err != nil || after.RaftTerm != before.RaftTerm || after.Leader != before.Leader {
		t.Errorf("the stranger disturbed the cluster: %v, then %v, %v", before, after, err)
	}
}

// peerCertificate asks a member for its version and returns the certificate that it answered with.
func peerCertificate(ctx context.Context, m *clusterMember, c *tls.Config) (*x509.Certificate, error) {
	tr := &http.Transport{TLSClientConfig: c}
	defer tr.CloseIdleConnections()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, m.peer+"/version", nil)
	if err != nil {
		return nil, err
	}
	resp, err := (&http.Client{Transport: tr}).Do(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s", resp.Status)
	}
	return resp.TLS.PeerCertificates[0], nil
}

// TestPeerAutoTLS: certificates that members make themselves secure what goes
// between them, and outlive a restart.
func TestPeerAutoTLS(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	members := []*clusterMember{secureMember(t, "m0"), secureMember(t, "m1"), secureMember(t, "m2")}
	for _, m := range members {
		m.start(members, "new", "--peer-auto-tls")
	}
	for _, m := range members {
		cli := dialMembers(t, m)
		waitServes(ctx, t, cli)
		if _, err := cli.Put(ctx, m.name, "v"); err != nil {
			t.Fatal(err)
		}
	}
	insecure := &tls.Config{InsecureSkipVerify: true}
	before, err := peerCertificate(ctx, members[1], insecure)
	if err != nil {
		t.Fatal(err)
	}
	members[1].close()
	members[1].start(members, "new")
	got, err := dialMembers(t, members[1]).Get(ctx, "m", clientv3.WithPrefix())
	if err != nil || len(got.Kvs) != 3 {
		t.Fatalf("after a restart: %v, %v", got, err)
	}
	if after, err := peerCertificate(ctx, members[1], insecure); err != nil || !after.Equal(before) {
		t.Errorf("after a restart the certificate is another one: %v", err)
	}
}
