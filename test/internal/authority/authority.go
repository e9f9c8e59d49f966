// Package authority makes certificates for tests: files that programs are started with, and what their clients need.
package authority

import (
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
	"os"
	"path/filepath"
	"time"
)

// Authority signs certificates for servers and clients on this host. It is for one goroutine.
type Authority struct {
	File string // its own certificate

	dir    string
	serial int64
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
}

// New makes an authority that keeps its files in dir.
func New(dir string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &Authority{dir: dir, key: key, File: filepath.Join(dir, "authority.pem")}
	a.cert = a.template("authority")
	a.cert.IsCA, a.cert.BasicConstraintsValid, a.cert.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return a, write(a.File, "CERTIFICATE", der)
}

// Issue writes a certificate and its key. The certificate is good for a server on loopback, and for a client whose
// common name is name.
func (a *Authority) Issue(name string) (certFile, keyFile string, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", err
	}
	leaf := a.template(name)
	leaf.DNSNames, leaf.IPAddresses = []string{"localhost"}, []net.IP{net.IPv4(127, 0, 0, 1)}
	leaf.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err := x509.CreateCertificate(rand.Reader, leaf, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return "", "", err
	}
	certFile, keyFile = filepath.Join(a.dir, name+".pem"), filepath.Join(a.dir, name+"-key.pem")
	if err := write(certFile, "CERTIFICATE", der); err != nil {
		return "", "", err
	}
	if der, err = x509.MarshalECPrivateKey(key); err != nil {
		return "", "", err
	}
	return certFile, keyFile, write(keyFile, "EC PRIVATE KEY", der)
}

// Client is the configuration of a client that trusts the authority, and shows a certificate with a common name if that
// is not empty.
func (a *Authority) Client(name string) (*tls.Config, error) {
	c, err := Client(a.File)
	if err != nil || name == "" {
		return c, err
	}
	certFile, keyFile, err := a.Issue(name)
	if err != nil {
		return nil, err
	}
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	c.Certificates = []tls.Certificate{pair}
	return c, err
}

// Client is the configuration of a client that trusts the authority of a file.
func Client(file string) (*tls.Config, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	c := &tls.Config{RootCAs: x509.NewCertPool(), NextProtos: []string{"h2"}}
	if !c.RootCAs.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s holds no certificate", file)
	}
	return c, nil
}

func (a *Authority) template(name string) *x509.Certificate {
	a.serial++
	return &x509.Certificate{
		SerialNumber: big.NewInt(a.serial), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
}

func write(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
