package server

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"time"

	"github.com/engram-kv/engram/internal/config"
	"github.com/engram-kv/engram/internal/tlsfiles"
)

// autoPeerDir holds the certificate of --peer-auto-tls, below the data directory.
var autoPeerDir = filepath.Join("fixtures", "peer")

const year = 365 * 24 * time.Hour

// peerTLS is what the flags say about TLS among members.
func peerTLS(cfg *config.Config) (tlsfiles.Options, error) {
	p := cfg.PeerTLS
	o := tlsfiles.Options{
		CertFile: p.CertFile, KeyFile: p.KeyFile, ClientCertFile: p.ClientCertFile, ClientKeyFile: p.ClientKeyFile,
		TrustedCAFile: p.TrustedCAFile, CRLFile: p.CRLFile, ClientCertAuth: p.ClientCertAuth,
		AllowedCNs: p.AllowedCN, AllowedHostnames: p.AllowedHostname, SkipClientSANVerify: p.SkipClientSAN,
		MinVersion: tlsVersion(cfg.TLSMin), MaxVersion: tlsVersion(cfg.TLSMax),
	}
	for _, name := range cfg.CipherSuites {
		i := slices.IndexFunc(tls.CipherSuites(), func(s *tls.CipherSuite) bool { return s.Name == name })
		if i < 0 {
			return o, fmt.Errorf("--cipher-suites: unexpected TLS cipher suite %q: give names like %s", name, tls.CipherSuites()[0].Name)
		}
		o.CipherSuites = append(o.CipherSuites, tls.CipherSuites()[i].ID)
	}
	if p.Auto && p.CertFile == "" {
		o.Auto = &tlsfiles.Auto{
			Dir: filepath.Join(cfg.DataDir, autoPeerDir), Hosts: hostsOf(cfg.ListenPeer), Lifetime: time.Duration(cfg.SelfSignedYears) * year,
		}
	}
	if cfg.DiscoverySRV != "" && o.TrustedCAFile == "" {
		o.ServerName = cfg.DiscoverySRV
	}
	return o, nil
}

// tlsVersion is the number of a version of the flags; 0 for none.
func tlsVersion(name string) uint16 {
	return map[string]uint16{"TLS1.2": tls.VersionTLS12, "TLS1.3": tls.VersionTLS13}[name]
}

func hostsOf(urls []url.URL) []string {
	var hosts []string
	for i := range urls {
		hosts = append(hosts, urls[i].Host)
	}
	return hosts
}

// secured puts TLS on a listener for peers whose URL asks for it.
func secured(l net.Listener, u *url.URL, cfg *config.Config) (net.Listener, error) {
	if u.Scheme != "https" && u.Scheme != "unixs" {
		return l, nil
	}
	o, err := peerTLS(cfg)
	if err != nil {
		return nil, err
	}
	if o.CertFile == "" && o.Auto == nil {
		return nil, fmt.Errorf("cannot listen on TLS for %s: KeyFile and CertFile are not presented: give --peer-cert-file and --peer-key-file, or --peer-auto-tls", u.Host)
	}
	_, wrap, err := tlsfiles.Server(o)
	if err != nil {
		return nil, err
	}
	return wrap(l), nil
}
