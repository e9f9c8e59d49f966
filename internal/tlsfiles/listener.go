package tlsfiles

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"
)

const (
	handshakeTime = 10 * time.Second // for a handshake and all that is checked after it
	lookupTime    = 5 * time.Second
	// waitingMost bounds the connections in their handshakes. More wait in the kernel.
	waitingMost = 1024
)

// resolver looks names up; tests replace it.
type resolver interface {
	LookupAddr(ctx context.Context, address string) ([]string, error)
	LookupHost(ctx context.Context, host string) ([]string, error)
}

// Server makes the configuration of the listening side, which judges clients within the handshake: who has no business here is told so
// by an alert.
func Server(o Options) (*tls.Config, error) {
	c, j, err := server(o)
	if err != nil || j.revoked == nil && j.skipSAN {
		return c, err
	}
	judged := c.Clone()
	judged.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		own := c.Clone()
		own.VerifyConnection = func(state tls.ConnectionState) error {
			if c.VerifyConnection != nil {
				if err := c.VerifyConnection(state); err != nil {
					return err
				}
			}
			return j.check(hello.Context(), state.PeerCertificates, hello.Conn.RemoteAddr())
		}
		return own, nil
	}
	return judged, nil
}

// Wrapper is Server for a protocol that has no limits of its own on connections in their handshake: it makes of a plain listener
// one whose Accept returns connections (of type *tls.Conn) with the handshake done and the client judged.
func Wrapper(o Options) (func(net.Listener) net.Listener, error) {
	c, j, err := server(o)
	if err != nil {
		return nil, err
	}
	return func(inner net.Listener) net.Listener { return newListener(inner, c, j, o.OnRefused) }, nil
}

// server makes a configuration and what judges clients beyond it.
func server(o Options) (*tls.Config, judge, error) {
	if err := o.check(); err != nil {
		return nil, judge{}, err
	}
	if o.CertFile == "" {
		if o.Auto == nil {
			return nil, judge{}, fmt.Errorf("%w: a listener needs a certificate and its key", ErrOptions)
		}
		files, err := o.Auto.files()
		if err != nil {
			return nil, judge{}, err
		}
		o.CertFile, o.KeyFile = files[0], files[1]
	}
	c := o.base()
	c.NextProtos = o.NextProtos
	p := &pair{certFile: o.CertFile, keyFile: o.KeyFile}
	if _, err := p.load(); err != nil {
		return nil, judge{}, err
	}
	if o.ClientCertFile != "" { // found to be bad now rather than when it is used
		if _, err := (&pair{certFile: o.ClientCertFile, keyFile: o.ClientKeyFile}).load(); err != nil {
			return nil, judge{}, err
		}
	}
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.load() }
	if o.TrustedCAFile != "" || o.ClientCertAuth {
		c.ClientAuth = tls.RequireAndVerifyClientCert
	} else {
		c.VerifyConnection = nil // no client certificate is asked for, so there are no names to check
	}
	if o.TrustedCAFile != "" {
		pool, err := readCAs(o.TrustedCAFile)
		if err != nil {
			return nil, judge{}, err
		}
		c.ClientCAs = pool
	}
	j := judge{skipSAN: o.SkipClientSANVerify, resolver: net.DefaultResolver}
	if o.CRLFile != "" {
		j.revoked = &revocations{path: o.CRLFile}
		if err := j.revoked.check(nil); err != nil {
			return nil, judge{}, err
		}
	}
	return c, j, nil
}

// judge decides about a client whose certificate was verified.
type judge struct {
	skipSAN  bool
	revoked  *revocations // nil without a CRL
	resolver resolver
}

func (j judge) check(ctx context.Context, certs []*x509.Certificate, from net.Addr) error {
	if len(certs) == 0 {
		return nil
	}
	if j.revoked != nil {
		if err := j.revoked.check(certs); err != nil {
			return err
		}
	}
	if j.skipSAN {
		return nil
	}
	tcp, ok := from.(*net.TCPAddr)
	if !ok {
		return nil // a unix socket has no address that a certificate could name
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	return j.checkSource(ctx, certs[0], tcp.IP)
}

// checkSource lets through a certificate for the address it comes from: by an IP SAN, or by a DNS SAN that is one of the
// address's names or has the address. One without any SAN passes.
func (j judge) checkSource(ctx context.Context, cert *x509.Certificate, ip net.IP) error {
	if len(cert.IPAddresses) == 0 && len(cert.DNSNames) == 0 {
		return nil
	}
	for _, san := range cert.IPAddresses {
		if san.Equal(ip) {
			return nil
		}
	}
	if len(cert.DNSNames) > 0 {
		names, _ := j.resolver.LookupAddr(ctx, ip.String())
		for _, san := range cert.DNSNames {
			for _, name := range names {
				if matchName(san, strings.TrimSuffix(name, ".")) {
					return nil
				}
			}
		}
		for _, san := range cert.DNSNames {
			if strings.Contains(san, "*") {
				continue
			}
			addresses, _ := j.resolver.LookupHost(ctx, san)
			for _, a := range addresses {
				if got := net.ParseIP(a); got != nil && got.Equal(ip) {
					return nil
				}
			}
		}
	}
	return fmt.Errorf("the certificate of %s is for addresses %v and names %q: it comes from elsewhere", ip, cert.IPAddresses, cert.DNSNames)
}

// matchName compares a SAN with a name; "*" at its beginning stands for one label or more, as in etcd.
func matchName(san, name string) bool {
	san, name = strings.ToLower(san), strings.ToLower(name)
	if strings.HasPrefix(san, "*.") {
		return strings.HasSuffix(name, san[1:])
	}
	return san == name
}

// listener shakes hands with many clients at once.
type listener struct {
	net.Listener
	config  *tls.Config
	judge   judge
	refused func(net.Addr, error) // may be nil

	ready  chan net.Conn
	failed chan struct{} // closed when the inner listener fails for good; err says why
	err    error
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func newListener(inner net.Listener, c *tls.Config, j judge, refused func(net.Addr, error)) *listener {
	l := &listener{Listener: inner, config: c, judge: j, refused: refused, ready: make(chan net.Conn), failed: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.wg.Add(1)
	go l.accept()
	return l
}

func (l *listener) accept() {
	defer l.wg.Done()
	slots := make(chan struct{}, waitingMost)
	for {
		slots <- struct{}{}
		conn, err := l.Listener.Accept()
		if err != nil {
			var temporary net.Error
			if <-slots; errors.As(err, &temporary) && temporary.Timeout() || tooManyFiles(err) {
				select {
				case <-time.After(50 * time.Millisecond):
					continue
				case <-l.ctx.Done():
				}
			}
			l.err = err
			close(l.failed)
			return
		}
		l.wg.Add(1)
		go func() {
			defer l.wg.Done()
			defer func() { <-slots }()
			l.shake(conn)
		}()
	}
}

func (l *listener) shake(raw net.Conn) {
	ctx, cancel := context.WithTimeout(l.ctx, handshakeTime)
	defer cancel()
	conn := tls.Server(raw, l.config)
	err := conn.HandshakeContext(ctx)
	if err == nil {
		err = l.judge.check(ctx, conn.ConnectionState().PeerCertificates, conn.RemoteAddr())
	}
	if err != nil {
		raw.Close()
		if l.refused != nil && l.ctx.Err() == nil {
			l.refused(raw.RemoteAddr(), err)
		}
		return
	}
	select {
	case l.ready <- conn:
	case <-l.ctx.Done():
		raw.Close()
	}
}

// Accept returns the next client that was let in.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.ready:
		return conn, nil
	case <-l.failed:
		return nil, l.err
	}
}

// Close stops accepting, breaks off handshakes and waits for them.
func (l *listener) Close() error {
	err := l.Listener.Close()
	l.cancel()
	l.wg.Wait()
	return err
}
