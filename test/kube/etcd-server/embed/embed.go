// Package embed has the names that Kubernetes' tests use of etcd's package of the same path, with Engram behind them.
//
// The module file of test/kube puts this module in the place of etcd's server, so that Kubernetes' own tests, unchanged,
// start an Engram process wherever they would start etcd in their own process. It is not a copy: it holds what those
// tests name and no more, and a test that names more does not compile. Etcd is the main type, a running member.
package embed

import (
	"fmt"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/engram-kv/engram/test/kube/member"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.uber.org/zap"
)

// ProgramVariable is the environment variable with the path of the engram program to run.
const ProgramVariable = "KUBE_ENGRAM"

// Config says how to run a member.
type Config struct {
	Name                             string
	Dir                              string
	ListenPeerUrls, ListenClientUrls []url.URL // one each
	AdvertisePeerUrls                []url.URL // as ListenPeerUrls
	AdvertiseClientUrls              []url.URL // as ListenClientUrls
	InitialCluster                   string
	ClientTLSInfo                    transport.TLSInfo
	UnsafeNoFsync                    bool
	QuotaBackendBytes                int64         // 0: the default
	WatchProgressNotifyInterval      time.Duration // 0: the default
	ZapLoggerBuilder                 LoggerBuilder // not called: the member logs for itself
}

// LoggerBuilder is what NewZapLoggerBuilder returns.
type LoggerBuilder func(*Config) error

// NewConfig returns the configuration that tests start from.
func NewConfig() *Config { return &Config{Name: "default"} }

// NewZapLoggerBuilder returns a builder that does nothing: the member's log is shown when it fails.
func NewZapLoggerBuilder(*zap.Logger) LoggerBuilder { return func(*Config) error { return nil } }

// InitialClusterFromName returns the cluster of one member of that name.
func (c *Config) InitialClusterFromName(name string) string {
	return name + "=" + c.AdvertisePeerUrls[0].String()
}

// Etcd is a running member.
type Etcd struct {
	Server *Server
	member *member.Member
	errs   chan error
}

// Server is what tests ask a running member.
type Server struct{ etcd *Etcd }

// Cluster is what tests ask about a member's cluster.
type Cluster struct{ clientURLs []string }

// StartEtcd starts a member and waits until it serves clients.
func StartEtcd(c *Config) (*Etcd, error) {
	program := os.Getenv(ProgramVariable)
	if program == "" {
		return nil, fmt.Errorf("environment variable %s is empty: set it to the path of the engram program", ProgramVariable)
	}
	if len(c.ListenClientUrls) != 1 || len(c.ListenPeerUrls) != 1 {
		return nil, fmt.Errorf("%d client and %d peer URLs: one each is supported", len(c.ListenClientUrls), len(c.ListenPeerUrls))
	}
	m, err := member.Start(member.Options{
		Program:   program,
		Dir:       c.Dir,
		ClientURL: c.ListenClientUrls[0].String(),
		PeerURL:   c.ListenPeerUrls[0].String(),
		Flags:     c.flags(),
	})
	if err != nil {
		return nil, err
	}
	e := &Etcd{member: m, errs: make(chan error, 1)}
	e.Server = &Server{etcd: e}
	return e, nil
}

func (c *Config) flags() []string {
	var flags []string
	if c.UnsafeNoFsync {
		flags = append(flags, "--unsafe-no-fsync")
	}
	if c.QuotaBackendBytes != 0 {
		flags = append(flags, "--quota-backend-bytes="+strconv.FormatInt(c.QuotaBackendBytes, 10))
	}
	if c.WatchProgressNotifyInterval != 0 {
		flags = append(flags, "--watch-progress-notify-interval="+c.WatchProgressNotifyInterval.String())
	}
	if tls := c.ClientTLSInfo; !tls.Empty() {
		flags = append(flags, "--cert-file="+tls.CertFile, "--key-file="+tls.KeyFile)
		if tls.TrustedCAFile != "" {
			flags = append(flags, "--trusted-ca-file="+tls.TrustedCAFile)
		}
		if tls.ClientCertAuth {
			flags = append(flags, "--client-cert-auth")
		}
	}
	return flags
}

// Close ends the member; Err then has its end if that was not orderly.
func (e *Etcd) Close() {
	err := e.member.Stop()
	select {
	case e.errs <- err:
	default: // closed before
	}
}

// Err has the member's error, or nil, once it is closed.
func (e *Etcd) Err() <-chan error { return e.errs }

// ReadyNotify is closed: StartEtcd returns a member that serves.
func (s *Server) ReadyNotify() <-chan struct{} {
	ready := make(chan struct{})
	close(ready)
	return ready
}

// Stop ends the member.
func (s *Server) Stop() { s.etcd.Close() }

// Cluster returns the member's cluster.
func (s *Server) Cluster() Cluster { return Cluster{clientURLs: []string{s.etcd.member.ClientURL()}} }

// ClientURLs are where clients find the cluster.
func (c Cluster) ClientURLs() []string { return c.clientURLs }
