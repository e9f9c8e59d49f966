package server_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestClientTLS serves gRPC and HTTP under TLS, on TCP and on a unix socket, knows
// users by their certificates, and takes a new certificate without a restart.
func TestClientTLS(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	ca := newAuthority(t)
	for _, name := range []string{"server", "root", "ann"} {
		ca.issue(name)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	as := func(name string) *tls.Config {
		c := &tls.Config{RootCAs: roots, ServerName: "127.0.0.1"}
		if name != "" {
			c.Certificates = []tls.Certificate{ca.pair(name)}
		}
		return c
	}
	m := newClusterMember(t, "m")
	m.client = strings.Replace(m.client, "http:", "https:", 1)
	metrics := strings.Replace(freeURL(t), "http:", "https:", 1)
	socket := filepath.Join(t.TempDir(), "127.0.0.1") // clients compare the certificate with the name of the file
	m.start([]*clusterMember{m}, "new", "--listen-client-urls="+m.client+",unixs://"+socket, "--cert-file="+ca.path("server.pem"), "--key-file="+ca.path("server.key"),
		"--trusted-ca-file="+ca.path("ca.pem"), "--client-cert-auth", "--listen-metrics-urls="+metrics, "--bcrypt-cost=4")
	dial := func(endpoint, who string) *clientv3.Client {
		t.Helper()
		c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, TLS: as(who)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}

	// The common name of a certificate is that of its file.
	root, ann := dial(m.client, "root"), dial("unixs://"+socket, "ann")
	for _, user := range []string{"root.pem", "ann.pem", "root"} {
		if _, err := root.UserAdd(ctx, user, "p"); err != nil {
			t.Fatal(err)
		}
	}
	for _, user := range []string{"root.pem", "root"} {
		if _, err := root.UserGrantRole(ctx, user, "root"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := root.AuthEnable(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := root.Put(ctx, "k", "v"); err != nil {
		t.Errorf("root by its certificate: %v", err)
	}
	if _, err := ann.Get(ctx, "k"); err != rpctypes.ErrPermissionDenied {
		t.Errorf("ann by her certificate: %v", err)
	}
	hasty, cancel2 := context.WithTimeout(ctx, time.Second)
	defer cancel2()
	if _, err := dial(m.client, "").Get(hasty, "k"); err == nil {
		t.Error("who shows no certificate is let in")
	}

	for _, http2 := range []bool{false, true} {
		tr := &http.Transport{TLSClientConfig: as("ann"), ForceAttemptHTTP2: http2}
		for _, url := range []string{m.client + "/health", metrics + "/health"} {
			r, err := (&http.Client{Transport: tr, Timeout: 10 * time.Second}).Get(url)
			if err != nil {
				t.Errorf("HTTP/2 %v: %v", http2, err)
				continue
			}
			b, _ := io.ReadAll(r.Body)
			r.Body.Close()
			if string(b) != `{"health":"true","reason":""}` || (r.ProtoMajor == 2) != http2 {
				t.Errorf("HTTP/2 %v: %s %q", http2, r.Proto, b)
			}
		}
		tr.CloseIdleConnections()
	}

	fresh := ca.issue("server")
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 5 * time.Second}, "tcp", strings.TrimPrefix(m.client, "https://"), as("ann"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got := conn.ConnectionState().PeerCertificates[0]; !got.Equal(fresh) {
		t.Errorf("after the server got a new certificate: serial number %v", got.SerialNumber)
	}
}
