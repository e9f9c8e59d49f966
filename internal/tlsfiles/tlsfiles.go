// Package tlsfiles makes TLS configurations from certificate files, with etcd's rules: files are read again when they change, a
// listener can refuse revoked certificates and those that do not belong to the address they come from, and both sides can insist on
// names.
//
// It knows no protocol above TLS. Server (or Wrapper) and Client are what it is for. Invariants:
//
//	T1: a certificate or key that was replaced on disk serves the next handshake; one that cannot be read fails handshakes, loudly.
//	T2: with a trusted CA, or ClientCertAuth, no handshake succeeds before the client's certificate was verified.
//	T3: of a Wrapper's listener, one client that is slow in its handshake delays no other, and no handshake takes longer than
//	    handshakeTime. Who takes Server sees to that alone.
package tlsfiles

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// Options name the files and the rules of one kind of connection, of clients or of peers.
type Options struct {
	CertFile, KeyFile string
	// ClientCertFile and ClientKeyFile are for dialing; empty means the same as CertFile and KeyFile.
	ClientCertFile, ClientKeyFile string
	// TrustedCAFile has the CAs of the other side. A listener that has one demands certificates.
	TrustedCAFile string
	// CRLFile lists certificates that a listener refuses.
	CRLFile string
	// ClientCertAuth demands certificates of clients, of the system's CAs if TrustedCAFile is empty.
	ClientCertAuth bool
	// AllowedCNs or AllowedHostnames, not both, are what the other side's certificate must name one of. Dialers apply it too.
	AllowedCNs, AllowedHostnames []string

	MinVersion, MaxVersion uint16   // default TLS 1.2, and no limit
	CipherSuites           []uint16 // of TLS 1.2; default Go's
	// SkipClientSANVerify lets a client use a certificate whose names belong to another address.
	SkipClientSANVerify bool
	// ServerName is what dialers verify instead of the host they dial.
	ServerName string
	// NextProtos are the protocols that a listener speaks, for ALPN; none for peers. Dialers offer none.
	NextProtos []string

	// OnRefused is told of each connection whose client a Wrapper's listener did not let in, and why. It may be called concurrently.
	OnRefused func(from net.Addr, err error)

	// Auto, if CertFile is empty, makes a certificate signed by itself. Dialers then verify nothing.
	Auto *Auto
}

// Auto is a certificate that this member makes, and keeps in a directory.
type Auto struct {
	Dir      string        // it is made if it is missing
	Hosts    []string      // names and addresses, with port or without, that the certificate is for
	Lifetime time.Duration // default a year
}

// ErrOptions is wrapped by errors about Options that contradict each other.
var ErrOptions = errors.New("TLS options")

func (o *Options) check() error {
	switch {
	case len(o.AllowedCNs) > 0 && len(o.AllowedHostnames) > 0:
		return fmt.Errorf("%w: allowed common names and allowed host names are mutually exclusive: give one of the lists", ErrOptions)
	case (o.CertFile == "") != (o.KeyFile == ""):
		return fmt.Errorf("%w: a certificate and its key come together: cert file %q, key file %q", ErrOptions, o.CertFile, o.KeyFile)
	case (o.ClientCertFile == "") != (o.ClientKeyFile == ""):
		return fmt.Errorf("%w: a certificate and its key come together: client cert file %q, client key file %q",
			ErrOptions, o.ClientCertFile, o.ClientKeyFile)
	case o.MaxVersion != 0 && o.MinVersion > o.MaxVersion:
		return fmt.Errorf("%w: min version %s is greater than max version %s",
			ErrOptions, tls.VersionName(o.MinVersion), tls.VersionName(o.MaxVersion))
	}
	return nil
}

// base is what both sides have in common.
func (o *Options) base() *tls.Config {
	c := &tls.Config{MinVersion: o.MinVersion, MaxVersion: o.MaxVersion, CipherSuites: o.CipherSuites, ServerName: o.ServerName}
	if c.MinVersion == 0 {
		c.MinVersion = tls.VersionTLS12
	}
	if len(o.AllowedCNs) > 0 || len(o.AllowedHostnames) > 0 {
		c.VerifyConnection = o.verifyNames
	}
	return c
}

// verifyNames lets through a certificate of a verified chain with one of the allowed names. It sees resumed sessions too.
func (o *Options) verifyNames(state tls.ConnectionState) error {
	for _, chain := range state.VerifiedChains {
		if len(chain) == 0 {
			continue
		}
		leaf := chain[0]
		if slices.Contains(o.AllowedCNs, leaf.Subject.CommonName) {
			return nil
		}
		for _, host := range o.AllowedHostnames {
			if leaf.VerifyHostname(host) == nil {
				return nil
			}
		}
	}
	if len(o.AllowedCNs) > 0 {
		return fmt.Errorf("the certificate's common name is none of %q", o.AllowedCNs)
	}
	return fmt.Errorf("the certificate is for none of the host names %q", o.AllowedHostnames)
}

// Client makes the configuration of the dialing side. It offers no ALPN: a peer listener of etcd advertises h2 and cannot speak it.
func Client(o Options) (*tls.Config, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	c := o.base()
	if o.CertFile == "" && o.Auto != nil {
		if o.ClientCertFile == "" {
			pair, err := o.Auto.files()
			if err != nil {
				return nil, err
			}
			o.ClientCertFile, o.ClientKeyFile = pair[0], pair[1]
		}
		c.InsecureSkipVerify = true // both sides made their certificates themselves: there is nothing to verify against
		c.VerifyConnection = nil
	}
	if o.ClientCertFile == "" {
		o.ClientCertFile, o.ClientKeyFile = o.CertFile, o.KeyFile
	}
	if o.ClientCertFile != "" {
		p := &pair{certFile: o.ClientCertFile, keyFile: o.ClientKeyFile}
		if _, err := p.load(); err != nil {
			return nil, err
		}
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return p.load() }
	}
	if o.TrustedCAFile != "" {
		pool, err := readCAs(o.TrustedCAFile)
		if err != nil {
			return nil, err
		}
		c.RootCAs = pool
	}
	return c, nil
}

func readCAs(path string) (*x509.CertPool, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("trusted CA file: %w", err)
	}
	pool, found := x509.NewCertPool(), false
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("trusted CA file %s: %w", path, err)
		}
		pool.AddCert(cert)
		found = true
	}
	if !found {
		return nil, fmt.Errorf("trusted CA file %s has no certificate in PEM form", path)
	}
	return pool, nil
}

// stamp tells if a file is as it was.
type stamp struct {
	modified time.Time
	size     int64
}

func stampOf(path string) (stamp, error) {
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}, err
	}
	return stamp{info.ModTime(), info.Size()}, nil
}

// settled is how old a file must be before its time stamp is trusted: it may change again within the clock's grain.
const settled = 2 * time.Second

// pair is a certificate and its key, read again when either file changes.
type pair struct {
	certFile, keyFile string

	mu        sync.Mutex
	cert, key stamp
	loaded    *tls.Certificate
}

func (p *pair) load() (*tls.Certificate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	cert, err := stampOf(p.certFile)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	key, err := stampOf(p.keyFile)
	if err != nil {
		return nil, fmt.Errorf("key: %w", err)
	}
	if p.loaded != nil && cert == p.cert && key == p.key && time.Since(cert.modified) > settled && time.Since(key.modified) > settled {
		return p.loaded, nil
	}
	loaded, err := tls.LoadX509KeyPair(p.certFile, p.keyFile)
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", p.certFile, p.keyFile, err)
	}
	p.loaded, p.cert, p.key = &loaded, cert, key
	return p.loaded, nil
}

// revocations is a CRL file, read again when it changes.
type revocations struct {
	path string

	mu     sync.Mutex
	at     stamp
	parsed bool
	serial map[string]bool
}

// check refuses if any of the certificates is revoked, or if the list cannot be read.
func (r *revocations) check(certs []*x509.Certificate) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, err := stampOf(r.path)
	if err != nil {
		return fmt.Errorf("CRL file: %w", err)
	}
	if !r.parsed || at != r.at || time.Since(at.modified) <= settled {
		b, err := os.ReadFile(r.path)
		if err != nil {
			return fmt.Errorf("CRL file: %w", err)
		}
		if block, _ := pem.Decode(bytes.TrimSpace(b)); block != nil {
			b = block.Bytes
		}
		list, err := x509.ParseRevocationList(b)
		if err != nil {
			return fmt.Errorf("CRL file %s: %w", r.path, err)
		}
		r.serial = make(map[string]bool, len(list.RevokedCertificateEntries))
		for _, e := range list.RevokedCertificateEntries {
			r.serial[string(e.SerialNumber.Bytes())] = true
		}
		r.at, r.parsed = at, true
	}
	for _, c := range certs {
		if r.serial[string(c.SerialNumber.Bytes())] {
			return fmt.Errorf("the certificate with serial number %x is revoked", c.SerialNumber)
		}
	}
	return nil
}

// hostOf cuts a port off.
func hostOf(s string) string {
	if i := strings.LastIndex(s, ":"); i > strings.LastIndex(s, "]") && (strings.HasPrefix(s, "[") || strings.Count(s, ":") == 1) {
		s = s[:i]
	}
	return strings.Trim(s, "[]")
}
