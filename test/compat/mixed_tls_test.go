package compat

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/engram-kv/engram/test/internal/broken"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// TestMixedPeerTLS: real members and Engram members talk over TLS, with certificates of one CA that each side demands, and with
// certificates that they make themselves.
func TestMixedPeerTLS(t *testing.T) {
	t.Parallel() // it waits more than it works
	if programs.Engram == "" {
		return
	}
	e := cluster.Program{Name: "engram", Path: programs.Engram}
	for _, c := range []struct {
		name  string
		flags func(t *testing.T) []string
	}{
		{"certificates", peerCertificates},
		{"auto", func(*testing.T) []string { return []string{"--peer-auto-tls"} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx := mixedContext(t)
			mixed := newCluster(t, append(c.flags(t), quick...)...)
			mixed.PeerTLS = true
			check(t, mixed.Start(ctx, reference(t), e))
			third, err := mixed.Add(ctx, e, true)
			check(t, err)
			check(t, mixed.Promote(ctx, third))
			for i, leader := range mixed.Members() {
				check(t, mixed.MoveLeader(ctx, leader))
				for j, m := range mixed.Members() {
					client, err := m.Client()
					check(t, err)
					_, err = client.Put(ctx, fmt.Sprintf("%d-%d", i, j), "v")
					check(t, err)
				}
			}
			check(t, sameHash(ctx, mixed))
		})
	}
}

// sameHash compares what members answer to clients.
func sameHash(ctx context.Context, c *cluster.Cluster) error {
	revision, err := c.Settle(ctx)
	if err != nil {
		return err
	}
	var first cluster.Hash
	for i, m := range c.Members() {
		got, err := m.HashKV(ctx, revision)
		if err != nil {
			return err
		}
		if i == 0 {
			first = got
		}
		if got != first {
			return broken.Errorf("%v has hash %+v, %v %+v", m, got, c.Members()[0], first)
		}
	}
	return nil
}

// peerCertificates writes a CA and one certificate, which all members on this host can use, and returns the flags that name them.
func peerCertificates(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	write := func(name, kind string, der []byte, err error) string {
		t.Helper()
		check(t, err)
		path := filepath.Join(dir, name)
		check(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	newKey := func() *ecdsa.PrivateKey {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		check(t, err)
		return key
	}
	template := func(serial int64) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: fmt.Sprint(serial)}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		}
	}
	caKey, key := newKey(), newKey()
	ca := template(1)
	ca.IsCA, ca.BasicConstraintsValid, ca.KeyUsage = true, true, x509.KeyUsageCertSign
	leaf := template(2)
	leaf.ExtKeyUsage, leaf.IPAddresses = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, []net.IP{net.IPv4(127, 0, 0, 1)}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	caFile := write("ca.pem", "CERTIFICATE", der, err)
	der, err = x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	certFile := write("cert.pem", "CERTIFICATE", der, err)
	der, err = x509.MarshalECPrivateKey(key)
	keyFile := write("key.pem", "EC PRIVATE KEY", der, err)
	return []string{"--peer-cert-file=" + certFile, "--peer-key-file=" + keyFile, "--peer-trusted-ca-file=" + caFile, "--peer-client-cert-auth"}
}
