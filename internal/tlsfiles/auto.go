package tlsfiles

import (
	"cmp"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// files returns the names of the certificate and key files, and makes them if they are missing, expired or unreadable.
func (a *Auto) files() ([2]string, error) {
	dir, lifetime := a.Dir, cmp.Or(a.Lifetime, 365*24*time.Hour)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return [2]string{}, fmt.Errorf("self-signed certificate: %w", err)
	}
	names := [2]string{filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")}
	loaded, err := (&pair{certFile: names[0], keyFile: names[1]}).load()
	switch {
	case err == nil && time.Now().Before(loaded.Leaf.NotAfter):
		return names, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return names, fmt.Errorf("self-signed certificate: %w; remove both files to have new ones made", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return names, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return names, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{Organization: []string{"engram"}},
		NotBefore: now.Add(-time.Minute), NotAfter: now.Add(lifetime),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true,
	}
	for _, h := range a.Hosts {
		if h = hostOf(h); net.ParseIP(h) != nil {
			template.IPAddresses = append(template.IPAddresses, net.ParseIP(h))
		} else if h != "" {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return names, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return names, err
	}
	return names, writePair(names, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), writeFile)
}

// writePair replaces both files. Wherever it breaks off, what it leaves is a pair or lacks the certificate: without that new ones are made, and
// one beside the key of another would be refused.
func writePair(names [2]string, cert, key []byte, write func(path string, b []byte) error) error {
	if err := os.Remove(names[0]); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := syncDir(filepath.Dir(names[0])); err != nil {
		return err
	}
	if err := write(names[1], key); err != nil {
		return err
	}
	return write(names[0], cert)
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// writeFile replaces a file whole, durably.
func writeFile(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*") // only its owner can read it
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		return syncDir(filepath.Dir(path))
	}
	_ = os.Remove(f.Name())
	return err
}

// tooManyFiles tells if accepting failed for lack of descriptors, which passes.
func tooManyFiles(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}
