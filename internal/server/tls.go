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
	"github.com/engram-kv/engram/internal/datadir"
	"github.com/engram-kv/engram/internal/tlsfiles"
)

// The certificates of --auto-tls and --peer-auto-tls, below the data directory.
var (
	autoClientDir = filepath.Join(datadir.Fixtures, datadir.ClientSide)
	autoPeerDir   = filepath.Join(datadir.Fixtures, datadir.PeerSide)
)

const year = 365 * 24 * time.Hour

// peerTLS is what the flags say about TLS among members.
func peerTLS(cfg *config.Config) (tlsfiles.Options, error) {
	o, err := tlsOptions(cfg, &cfg.PeerTLS)
	if cfg.PeerTLS.Auto && o.CertFile == "" {
		o.Auto = auto(cfg, autoPeerDir, cfg.ListenPeer)
	}
	if cfg.DiscoverySRV != "" && o.TrustedCAFile == "" {
		o.ServerName = cfg.DiscoverySRV
	}
	return o, err
}

// clientTLS is what the flags say about TLS with clients.
func clientTLS(cfg *config.Config) (tlsfiles.Options, error) {
	o, err := tlsOptions(cfg, &cfg.ClientTLS)
	o.NextProtos = []string{"h2", "http/1.1"}
	o.SkipClientSANVerify = true // as in etcd, a client may come from anywhere
	if cfg.ClientTLS.Auto && o.CertFile == "" {
		o.Auto = auto(cfg, autoClientDir, cfg.ListenClient)
	}
	return o, err
}

// tlsOptions is what both sides have in common.
func tlsOptions(cfg *config.Config, side *config.TLS) (tlsfiles.Options, error) {
	o := tlsfiles.Options{
		CertFile: side.CertFile, KeyFile: side.KeyFile, ClientCertFile: side.ClientCertFile, ClientKeyFile: side.ClientKeyFile,
		TrustedCAFile: side.TrustedCAFile, CRLFile: side.CRLFile, ClientCertAuth: side.ClientCertAuth,
		AllowedCNs: side.AllowedCN, AllowedHostnames: side.AllowedHostname, SkipClientSANVerify: side.SkipClientSAN,
		MinVersion: tlsVersion(cfg.TLSMin), MaxVersion: tlsVersion(cfg.TLSMax),
	}
	for _, name := range cfg.CipherSuites {
		i := slices.IndexFunc(tls.CipherSuites(), func(s *tls.CipherSuite) bool { return s.Name == name })
		if i < 0 {
			return o, fmt.Errorf("--cipher-suites: unexpected TLS cipher suite %q: give names like %s", name, tls.CipherSuites()[0].Name)
		}
		o.CipherSuites = append(o.CipherSuites, tls.CipherSuites()[i].ID)
	}
	return o, nil
}

func auto(cfg *config.Config, dir string, listen []url.URL) *tlsfiles.Auto {
	return &tlsfiles.Auto{Dir: filepath.Join(cfg.DataDir, dir), Hosts: hostsOf(listen), Lifetime: time.Duration(cfg.SelfSignedYears) * year}
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

// isSecure says that a URL asks for TLS.
func isSecure(u *url.URL) bool { return u.Scheme == "https" || u.Scheme == "unixs" }

// wrapPeers puts TLS on a listener for peers whose URL asks for it. refused is
// told of who is not let in.
func wrapPeers(l net.Listener, u *url.URL, cfg *config.Config, refused func(net.Addr, error)) (net.Listener, error) {
	if !isSecure(u) {
		return l, nil
	}
	o, err := peerTLS(cfg)
	if err != nil {
		return nil, err
	}
	if o.CertFile == "" && o.Auto == nil {
		return nil, fmt.Errorf("cannot listen on TLS for %s: KeyFile and CertFile are not presented: give --peer-cert-file and --peer-key-file, or --peer-auto-tls", u.Host)
	}
	o.OnRefused = refused
	wrap, err := tlsfiles.Wrapper(o)
	if err != nil {
		return nil, err
	}
	return wrap(l), nil
}

// clientTLSConfig makes the configuration of the listeners for clients, nil if
// none of their URLs asks for it: files that nobody uses may be missing.
func clientTLSConfig(cfg *config.Config) (*tls.Config, error) {
	if !slices.ContainsFunc(slices.Concat(cfg.ListenClient, cfg.ListenClientHTTP, cfg.ListenMetrics), func(u url.URL) bool { return isSecure(&u) }) {
		return nil, nil
	}
	o, err := clientTLS(cfg)
	if err != nil {
		return nil, err
	}
	return tlsfiles.Server(o)
}
