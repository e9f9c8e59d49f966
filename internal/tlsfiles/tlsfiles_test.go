package tlsfiles

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
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
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{t: t, dir: t.TempDir(), key: key, cert: cert, serial: 1}
	a.write("ca.pem", "CERTIFICATE", der)
	return a
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) write(name, kind string, der []byte) {
	a.t.Helper()
	if err := os.WriteFile(a.path(name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// issue writes name.pem and name.key and returns the serial number; sans are addresses or names.
func (a *authority) issue(name, cn string, sans ...string) *big.Int {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	a.serial++
	template := &x509.Certificate{SerialNumber: big.NewInt(a.serial), Subject: pkix.Name{CommonName: cn}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	for _, s := range sans {
		if ip := net.ParseIP(s); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, s)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(name+".pem", "CERTIFICATE", der)
	a.write(name+".key", "EC PRIVATE KEY", keyDER)
	return template.SerialNumber
}

// revoke writes crl.pem.
func (a *authority) revoke(serials ...*big.Int) {
	a.t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now(), NextUpdate: time.Now().Add(time.Hour)}
	for _, s := range serials {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: s, RevocationTime: time.Now()})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, a.cert, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write("crl.pem", "X509 CRL", der)
}

// options of a member with the certificate of that name.
func (a *authority) options(name string) Options {
	return Options{CertFile: a.path(name + ".pem"), KeyFile: a.path(name + ".key"), TrustedCAFile: a.path("ca.pem"), ClientCertAuth: true}
}

// serve echoes over TLS and returns the address.
func serve(t *testing.T, o Options) string {
	t.Helper()
	wrap, err := Wrapper(o)
	if err != nil {
		t.Fatal(err)
	}
	return serveWrapped(t, wrap)
}

// serveInside is serve with clients judged within the handshake.
func serveInside(t *testing.T, o Options) string {
	t.Helper()
	c, err := Server(o)
	if err != nil {
		t.Fatal(err)
	}
	return serveWrapped(t, func(inner net.Listener) net.Listener { return tls.NewListener(inner, c) })
}

func serveWrapped(t *testing.T, wrap func(net.Listener) net.Listener) string {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := wrap(inner)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if _, ok := conn.(*tls.Conn); !ok {
				t.Errorf("Accept gives a %T", conn)
			}
			go func() {
				_, _ = io.Copy(conn, conn)
				conn.Close()
			}()
		}
	}()
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		<-done
	})
	return inner.Addr().String()
}

// reach dials and tells if bytes go there and back. It returns the certificate of the other side.
func reach(t *testing.T, address string, c *tls.Config) (*x509.Certificate, error) {
	t.Helper()
	conn, err := tls.DialWithDialer(&net.Dialer{Timeout: 5 * time.Second}, "tcp", address, c)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := conn.Write([]byte("x")); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		return nil, err
	}
	return conn.ConnectionState().PeerCertificates[0], nil
}

func client(t *testing.T, o Options) *tls.Config {
	t.Helper()
	c, err := Client(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestWhoIsLetIn pairs dialers and listeners.
func TestWhoIsLetIn(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	ca.issue("good", "member", "127.0.0.1", "localhost")
	ca.issue("bare", "bare")
	ca.issue("elsewhere", "member", "10.1.2.3")
	ca.issue("elsename", "member", "no-such-host.invalid")
	revoked := ca.issue("revoked", "member", "127.0.0.1")
	other.issue("good", "member", "127.0.0.1")
	ca.revoke(revoked)
	change := func(o Options, f func(*Options)) Options { f(&o); return o }
	good := ca.options("good")
	for name, tc := range map[string]struct {
		server, client Options
		ok             bool
	}{
		"both good":                     {good, good, true},
		"client has no certificate":     {good, Options{TrustedCAFile: good.TrustedCAFile}, false},
		"none is asked for":             {change(good, func(o *Options) { o.TrustedCAFile, o.ClientCertAuth = "", false }), Options{TrustedCAFile: good.TrustedCAFile}, true},
		"a CA alone demands one":        {change(good, func(o *Options) { o.ClientCertAuth = false }), Options{TrustedCAFile: good.TrustedCAFile}, false},
		"client of another CA":          {good, change(other.options("good"), func(o *Options) { o.TrustedCAFile = good.TrustedCAFile }), false},
		"server of another CA":          {other.options("good"), change(other.options("good"), func(o *Options) { o.TrustedCAFile = good.TrustedCAFile }), false},
		"server's name is wrong":        {ca.options("elsewhere"), good, false},
		"server's name is given":        {ca.options("elsename"), change(good, func(o *Options) { o.ServerName = "no-such-host.invalid" }), true},
		"client from elsewhere":         {good, ca.options("elsewhere"), false},
		"client of another name":        {good, ca.options("elsename"), false},
		"from elsewhere, not looked at": {change(good, func(o *Options) { o.SkipClientSANVerify = true }), ca.options("elsewhere"), true},
		"client without SAN":            {good, ca.options("bare"), true},
		"another client certificate": {good, change(good, func(o *Options) {
			o.ClientCertFile, o.ClientKeyFile = ca.path("elsewhere.pem"), ca.path("elsewhere.key")
		}), false},
		"revoked":                  {change(good, func(o *Options) { o.CRLFile = ca.path("crl.pem") }), ca.options("revoked"), false},
		"not revoked":              {change(good, func(o *Options) { o.CRLFile = ca.path("crl.pem") }), good, true},
		"revoked, no list":         {good, ca.options("revoked"), true},
		"common name allowed":      {change(good, func(o *Options) { o.AllowedCNs = []string{"x", "member"} }), good, true},
		"common name not allowed":  {change(good, func(o *Options) { o.AllowedCNs = []string{"member"} }), ca.options("bare"), false},
		"host name allowed":        {change(good, func(o *Options) { o.AllowedHostnames = []string{"x", "localhost"} }), good, true},
		"host name not allowed":    {change(good, func(o *Options) { o.AllowedHostnames = []string{"x"} }), good, false},
		"dialer allows the CN":     {good, change(good, func(o *Options) { o.AllowedCNs = []string{"member"} }), true},
		"dialer does not":          {good, change(good, func(o *Options) { o.AllowedCNs = []string{"x"} }), false},
		"dialer, host names":       {good, change(good, func(o *Options) { o.AllowedHostnames = []string{"x"} }), false},
		"1.3 only, both":           {change(good, func(o *Options) { o.MinVersion = tls.VersionTLS13 }), good, true},
		"1.3 only, client has 1.2": {change(good, func(o *Options) { o.MinVersion = tls.VersionTLS13 }), change(good, func(o *Options) { o.MaxVersion = tls.VersionTLS12 }), false},
		"1.2": {change(good, func(o *Options) {
			o.MaxVersion, o.CipherSuites = tls.VersionTLS12, []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256}
		}), good, true},
		"no cipher in common": {change(good, func(o *Options) {
			o.MaxVersion, o.CipherSuites = tls.VersionTLS12, []uint16{tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256}
		}), good, false},
	} {
		t.Run(name, func(t *testing.T) {
			refused := make(chan error, 1)
			tc.server.OnRefused = func(from net.Addr, err error) {
				if from == nil || err == nil {
					err = fmt.Errorf("%v: %v", from, err)
					t.Error(err)
				}
				refused <- err
			}
			if _, err := reach(t, serve(t, tc.server), client(t, tc.client)); (err == nil) != tc.ok {
				t.Errorf("a wrapped listener: %v", err)
			}
			if tc.ok && len(refused) > 0 {
				t.Errorf("let in, and told that it was refused: %v", <-refused)
			} else if !tc.ok {
				select {
				case <-refused:
				case <-time.After(20 * time.Second):
					t.Error("nobody is told of the refusal")
				}
			}
			if _, err := reach(t, serveInside(t, tc.server), client(t, tc.client)); (err == nil) != tc.ok {
				t.Errorf("within the handshake: %v", err)
			}
		})
	}
}

// TestReload replaces files under a listener and a dialer that stay.
func TestReload(t *testing.T) {
	ca := newAuthority(t)
	ca.issue("server", "one", "127.0.0.1")
	clientSerial := ca.issue("client", "member", "127.0.0.1")
	ca.revoke()
	o := ca.options("server")
	o.CRLFile = ca.path("crl.pem")
	address, c := serve(t, o), client(t, ca.options("client"))
	first, err := reach(t, address, c)
	if err != nil || first.Subject.CommonName != "one" {
		t.Fatal(first, err)
	}
	ca.issue("server", "two", "127.0.0.1")
	second, err := reach(t, address, c)
	if err != nil || second.Subject.CommonName != "two" {
		t.Fatal(second, err)
	}
	ca.revoke(clientSerial)
	if _, err := reach(t, address, c); err == nil {
		t.Fatal("the revoked client was let in")
	}
	ca.issue("client", "member", "127.0.0.1")
	if _, err := reach(t, address, c); err != nil {
		t.Fatal("the client's new certificate:", err)
	}
	if err := os.WriteFile(ca.path("crl.pem"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := reach(t, address, c); err == nil {
		t.Fatal("let in without a readable list")
	}
	ca.revoke()
	if err := os.WriteFile(ca.path("server.key"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := reach(t, address, c); err == nil {
		t.Fatal("served with a broken key")
	}
	// Old files are not read again: the cache is by their stamps.
	ca.issue("server", "three", "127.0.0.1")
	p := &pair{certFile: ca.path("server.pem"), keyFile: ca.path("server.key")}
	old := time.Now().Add(-time.Hour)
	for _, name := range []string{p.certFile, p.keyFile} {
		if err := os.Chtimes(name, old, old); err != nil {
			t.Fatal(err)
		}
	}
	a, err := p.load()
	if err != nil {
		t.Fatal(err)
	}
	if b, err := p.load(); err != nil || a != b {
		t.Fatal("loaded anew", err)
	}
}

// TestALPN: a listener of HTTP/1.1 serves clients that offer nothing, http/1.1, and h2 with it; a dialer offers nothing.
func TestALPN(t *testing.T) {
	ca := newAuthority(t)
	ca.issue("good", "member", "127.0.0.1")
	o := ca.options("good")
	for _, ours := range [][]string{nil, {"http/1.1"}} {
		o.NextProtos = ours
		wrap, err := Wrapper(o)
		if err != nil {
			t.Fatal(err)
		}
		inner, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "%s %v %d", r.Proto, r.TLS != nil, len(r.TLS.PeerCertificates))
		})}
		go func() { _ = s.Serve(wrap(inner)) }()
		for _, theirs := range [][]string{nil, {"http/1.1"}, {"h2", "http/1.1"}} {
			c := client(t, o)
			if len(c.NextProtos) != 0 {
				t.Error("the dialer offers", c.NextProtos)
			}
			c.NextProtos = theirs
			rt := &http.Transport{TLSClientConfig: c}
			resp, err := (&http.Client{Transport: rt}).Get("https://" + inner.Addr().String())
			if err != nil {
				t.Errorf("%v to %v: %v", theirs, ours, err)
				continue
			}
			b, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			rt.CloseIdleConnections()
			if string(b) != "HTTP/1.1 true 1" {
				t.Errorf("%v to %v: %q", theirs, ours, b)
			}
		}
		s.Close()
	}
}

// TestSlowHandshake: who connects and says nothing keeps nobody else out, and does not keep Close.
func TestSlowHandshake(t *testing.T) {
	ca := newAuthority(t)
	ca.issue("good", "member", "127.0.0.1")
	address := serve(t, ca.options("good"))
	for range 20 {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	if _, err := reach(t, address, client(t, ca.options("good"))); err != nil {
		t.Fatal(err)
	}
}

// fakeResolver knows one address.
type fakeResolver struct{ name, address string }

func (r fakeResolver) LookupAddr(_ context.Context, address string) ([]string, error) {
	if address == r.address && r.name != "" {
		return []string{r.name + "."}, nil
	}
	return nil, errors.New("no such address")
}

func (r fakeResolver) LookupHost(_ context.Context, host string) ([]string, error) {
	if host == "forward.example" {
		return []string{"10.0.0.9", r.address}, nil
	}
	return nil, errors.New("no such host")
}

func TestSourceAddress(t *testing.T) {
	j := judge{resolver: fakeResolver{name: "a.members.example", address: "10.0.0.1"}}
	ip := net.ParseIP("10.0.0.1")
	for _, tc := range []struct {
		ips   []string
		names []string
		ok    bool
	}{
		{nil, nil, true},
		{[]string{"10.0.0.2", "10.0.0.1"}, nil, true},
		{[]string{"10.0.0.2"}, nil, false},
		{[]string{"10.0.0.2"}, []string{"A.members.example"}, true},
		{nil, []string{"*.members.example"}, true},
		{nil, []string{"*.example"}, true}, // as in etcd
		{nil, []string{"*.EXAMPLE"}, true},
		{nil, []string{"*.a.members.example"}, false},
		{nil, []string{"*.other.example"}, false},
		{nil, []string{"x", "forward.example"}, true},
		{nil, []string{"b.members.example"}, false},
	} {
		cert := &x509.Certificate{DNSNames: tc.names}
		for _, s := range tc.ips {
			cert.IPAddresses = append(cert.IPAddresses, net.ParseIP(s))
		}
		if err := j.checkSource(context.Background(), cert, ip); (err == nil) != tc.ok {
			t.Errorf("%v %v: %v", tc.ips, tc.names, err)
		}
	}
}

// TestRenewalBreaksOff: wherever the making of new files ends, the next start makes new ones.
func TestRenewalBreaksOff(t *testing.T) {
	old, another := t.TempDir(), t.TempDir()
	for _, dir := range []string{old, another} {
		if _, err := (&Auto{Dir: dir}).files(); err != nil {
			t.Fatal(err)
		}
	}
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(another, name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	cert, key := read("cert.pem"), read("key.pem")
	names := [2]string{filepath.Join(old, "cert.pem"), filepath.Join(old, "key.pem")}
	crash := errors.New("crash")
	for written := range 3 {
		left := written
		err := writePair(names, cert, key, func(path string, b []byte) error {
			if left--; left < 0 {
				return crash
			}
			return writeFile(path, b)
		})
		if (written < 2) != errors.Is(err, crash) {
			t.Fatalf("after %d files: %v", written, err)
		}
		if _, err := (&Auto{Dir: old}).files(); err != nil {
			t.Errorf("after %d files the next start says: %v", written, err)
		}
	}
}

// TestAuto: members that make their certificates themselves reach each other; the files stay; expired ones are made anew.
func TestAuto(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "fixtures", "peer")
	o := Options{Auto: &Auto{Dir: dir, Hosts: []string{"127.0.0.1:2380", "[::1]:1", "host.example"}, Lifetime: time.Hour}}
	first, err := reach(t, serve(t, o), client(t, Options{Auto: &Auto{Dir: t.TempDir()}}))
	if err != nil {
		t.Fatal(err)
	}
	if len(first.IPAddresses) != 2 || len(first.DNSNames) != 1 || first.DNSNames[0] != "host.example" || time.Until(first.NotAfter) > time.Hour {
		t.Fatal(first.IPAddresses, first.DNSNames, first.NotAfter)
	}
	if info, err := os.Stat(filepath.Join(dir, "key.pem")); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatal(info.Mode(), err)
	}
	second, err := reach(t, serve(t, o), client(t, o))
	if err != nil || !second.Equal(first) {
		t.Fatal("made anew", err)
	}
	o.Auto = &Auto{Dir: t.TempDir(), Lifetime: -time.Second} // expired when it is made
	serve(t, o)
	o.Auto.Lifetime = time.Hour
	third, err := reach(t, serve(t, o), client(t, o))
	if err != nil || time.Now().After(third.NotAfter) {
		t.Fatal(third, err)
	}
}

func TestBadOptions(t *testing.T) {
	ca := newAuthority(t)
	ca.issue("good", "member")
	good := ca.options("good")
	for name, f := range map[string]func(*Options){
		"exclusive":           func(o *Options) { o.AllowedCNs, o.AllowedHostnames = []string{"a"}, []string{"b"} },
		"greater than":        func(o *Options) { o.MinVersion, o.MaxVersion = tls.VersionTLS13, tls.VersionTLS12 },
		"come together":       func(o *Options) { o.KeyFile = "" },
		"client cert file":    func(o *Options) { o.ClientKeyFile = "x" },
		"no certificate":      func(o *Options) { o.TrustedCAFile = o.KeyFile },
		"trusted CA file":     func(o *Options) { o.TrustedCAFile = "/nowhere" },
		"no such file":        func(o *Options) { o.CertFile, o.KeyFile = "/nowhere", "/nowhere" },
		"CRL file":            func(o *Options) { o.CRLFile = "/nowhere" },
		"needs a certificate": func(o *Options) { *o = Options{} },
	} {
		o := good
		f(&o)
		if _, err := Wrapper(o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := Server(o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := Client(o); err == nil && name != "CRL file" && name != "needs a certificate" {
			t.Errorf("%s: the dialer accepts it", name)
		}
	}
}
