package ctl

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// prober looks at endpoints from the outside: name, port, TLS, and what it is that listens. It trusts nobody and sends nothing but
// questions that need no right.
type prober struct {
	tls     *tls.Config // as the flags have it; nil without any flag about TLS
	flags   *globalFlags
	name    string // of the tool, for cures
	timeout time.Duration
	now     func() time.Time
}

// language is what a port speaks.
type language int

const (
	langNone  language = iota // it closed the connection, or said nothing
	langTLS                   // TLS
	langHTTP                  // HTTP/1.1 in clear text
	langHTTP2                 // HTTP/2 alone, in clear text
	langOther
)

// reach is what a look at one endpoint found.
type reach struct {
	endpoint, address string
	network           string // tcp or unix
	host              string // what a certificate must be for
	wantTLS           bool
	findings          []finding // what is wrong, the first thing in the way first
	heard             string    // the beginning of an answer that is in no language of a member
	usable            bool      // a client with these flags can talk gRPC to it
	base              string    // of its URLs for HTTP, "" if it has none
	versions          versionAnswer
	date              dateAnswer
	leaf              *x509.Certificate
	status            *etcdserverpb.StatusResponse // nil if the member did not tell
}

// versionAnswer is what /version tells.
type versionAnswer struct {
	Server  string `json:"etcdserver"`
	Cluster string `json:"etcdcluster"`
	Engram  string `json:"engram"`
}

// dateAnswer is a Date header and when it came.
type dateAnswer struct {
	date     time.Time
	from, to time.Time // of the question and the answer
}

func (t *tool) newProber() (*prober, error) {
	cfg, err := t.global.tlsConfig()
	if err != nil {
		return nil, err
	}
	return &prober{tls: cfg, flags: &t.global, name: t.name, timeout: min(t.global.dialTimeout, maxProbe), now: time.Now}, nil
}

// maxProbe bounds each step of a look.
const maxProbe = 3 * time.Second

// found adds a finding about the endpoint.
func (r *reach) found(s severity, check, what, cause, cure string) {
	r.findings = append(r.findings, finding{Severity: s, Check: check, Where: r.endpoint, What: what, Cause: cause, Cure: cure})
}

// look looks at one endpoint. It takes some seconds at most.
func (p *prober) look(ctx context.Context, endpoint string) *reach {
	r := &reach{endpoint: endpoint}
	if !p.parse(r) || !p.resolve(ctx, r) {
		return r
	}
	conn := p.dial(ctx, r)
	if conn == nil {
		return r
	}
	_ = conn.Close()
	switch heard := p.listen(ctx, r); {
	case heard == langTLS && !r.wantTLS:
		r.found(failure, "scheme", "the server speaks TLS, and it was spoken to without",
			"the endpoint begins with http://, or with nothing while no flag asks for TLS", fmt.Sprintf("write it as https://%s, and give --cacert (and --cert and --key, if it asks clients for certificates)", r.address))
	case heard == langTLS:
		p.checkTLS(ctx, r)
	case r.wantTLS && (heard == langHTTP || heard == langHTTP2):
		cause := "the endpoint begins with https://"
		if !strings.Contains(r.endpoint, "://") {
			cause = "a flag about TLS is given, so that an endpoint without a scheme means TLS"
		}
		r.found(failure, "scheme", "the server speaks no TLS, and TLS was asked for", cause, fmt.Sprintf("write it as http://%s; or start the member with --cert-file and --key-file and https:// in its client URLs", r.address))
	case heard == langOther:
		cause := "it speaks neither HTTP nor TLS"
		if r.heard != "" {
			cause = fmt.Sprintf("it says %q", r.heard)
		}
		r.found(failure, "no-etcd", "what listens is no etcd", cause, "name the client URL of a member by --endpoints")
	case heard == langNone:
		r.found(failure, "silent", "something takes connections and does not answer", "the process hangs or is paused, its machine is overloaded, or it is no etcd", "look at the process that listens at "+r.address+" and its log")
	}
	if len(r.findings) == 0 || worst(r.findings) < failure {
		p.identify(ctx, r)
	}
	r.usable = worst(r.findings) < failure
	return r
}

// parse splits the endpoint.
func (p *prober) parse(r *reach) bool {
	scheme, rest, ok := strings.Cut(r.endpoint, "://")
	if !ok {
		scheme, rest = "", r.endpoint
	}
	r.network, r.address = "tcp", rest
	switch scheme {
	case "https", "unixs":
		r.wantTLS = true
	case "":
		r.wantTLS = p.tls != nil
	case "http", "unix":
	default:
		r.found(failure, "endpoint", fmt.Sprintf("%q is no scheme of an endpoint", scheme), "", "write http://host:port or https://host:port")
		return false
	}
	if strings.HasPrefix(scheme, "unix") || strings.HasPrefix(r.endpoint, "unix:") {
		r.network, r.address, r.host = "unix", strings.TrimPrefix(rest, "unix:"), "localhost"
		return true
	}
	r.address = strings.TrimSuffix(rest, "/")
	host, port, err := net.SplitHostPort(r.address)
	if err != nil || port == "" {
		r.found(failure, "endpoint", "the endpoint is not host:port", fmt.Sprint(cmp.Or(err, errors.New("the port is missing"))), "write it as 127.0.0.1:2379 or https://etcd.example.com:2379")
		return false
	}
	r.host = host
	if p.tls != nil && p.tls.ServerName != "" {
		r.host = p.tls.ServerName
	}
	return true
}

// resolve looks the host up.
func (p *prober) resolve(ctx context.Context, r *reach) bool {
	if r.network == "unix" {
		return true
	}
	host, _, _ := net.SplitHostPort(r.address)
	if net.ParseIP(host) != nil || host == "" {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	_, err := net.DefaultResolver.LookupHost(ctx, host)
	if err == nil {
		return true
	}
	cause := err.Error()
	if dns, ok := errors.AsType[*net.DNSError](err); ok {
		cause = dns.Err
		if dns.IsTimeout {
			cause = "the name server does not answer"
		}
	}
	r.found(failure, "name", fmt.Sprintf("the name %s cannot be resolved", host), cause, "check how it is written, /etc/hosts and /etc/resolv.conf; or name the member by its IP address")
	return false
}

// dial connects, or tells why not.
func (p *prober) dial(ctx context.Context, r *reach) net.Conn {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, r.network, r.address)
	if err == nil {
		return conn
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		r.found(failure, "refused", "nothing listens at "+r.address, "connection refused: no member runs there, or it listens at another address (--listen-client-urls)",
			"start the member (`engram` starts one), or name the right address by --endpoints")
	case errors.Is(err, os.ErrNotExist):
		r.found(failure, "refused", "there is no socket "+r.address, err.Error(), "start the member, or name the right path")
	case errors.Is(err, context.DeadlineExceeded) || os.IsTimeout(err):
		r.found(failure, "timeout", fmt.Sprintf("nobody answers at %s for %v", r.address, p.timeout), "the machine is off, the address is wrong, or a firewall drops packets", "see if the machine is up, and that the port is open for this one")
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		r.found(failure, "route", r.address+" cannot be reached", err.Error(), "see if the machine is up and the network between has a route to it")
	default:
		r.found(failure, "connect", r.address+" cannot be connected to", err.Error(), "")
	}
	return nil
}

// heardBytes bounds what is read of an answer, heardShown what is shown of one that is not understood.
const heardBytes, heardShown = 64 << 10, 60

// listen finds out what the port speaks.
func (p *prober) listen(ctx context.Context, r *reach) language {
	if answer := p.say(ctx, r, "GET /version HTTP/1.1\r\nHost: "+r.host+"\r\nConnection: close\r\n\r\n"); len(answer) > 0 {
		switch {
		case answer[0] == 0x15 && len(answer) > 1 && answer[1] == 3: // an alert of TLS
			return langTLS
		case bytes.HasPrefix(answer, []byte("HTTP/1.")):
			if bytes.Contains(answer, []byte("HTTPS server")) || bytes.Contains(answer, []byte("HTTPS port")) {
				return langTLS
			}
			return langHTTP
		case len(answer) >= 9 && answer[0] == 0 && answer[3] == 4: // a frame of settings
			return langHTTP2
		}
		first, _, _ := bytes.Cut(answer[:min(len(answer), heardShown)], []byte("\n"))
		r.heard = string(bytes.TrimSpace(first))
		return langOther
	}
	conn := p.dial(ctx, r)
	if conn == nil {
		return langNone
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	err := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, ServerName: r.host}).HandshakeContext(ctx)
	if _, plain := errors.AsType[tls.RecordHeaderError](err); plain {
		return langOther
	}
	if err == nil || strings.Contains(err.Error(), "tls: ") {
		return langTLS
	}
	return langNone
}

// say sends a text and returns what comes back until the connection ends.
func (p *prober) say(ctx context.Context, r *reach, text string) []byte {
	conn := p.dial(ctx, r)
	if conn == nil {
		return nil
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(p.timeout)) // a failure shows in what follows
	if _, err := io.WriteString(conn, text); err != nil {
		return nil
	}
	answer, _ := io.ReadAll(io.LimitReader(conn, heardBytes)) // what came before an error counts
	return answer
}

// unchecked is the TLS configuration of the flags without checks of the server, and notes if the server asks for a certificate.
func (p *prober) unchecked(r *reach, asked *bool) *tls.Config {
	cfg := &tls.Config{}
	if p.tls != nil {
		cfg = p.tls.Clone()
	}
	cfg.InsecureSkipVerify, cfg.ServerName = true, r.host
	own := cfg.GetClientCertificate
	cfg.GetClientCertificate = func(info *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		if asked != nil {
			*asked = true
		}
		if own == nil {
			return &tls.Certificate{}, nil
		}
		return own(info)
	}
	return cfg
}

// checkTLS checks the server's certificate, and if it takes ours.
func (p *prober) checkTLS(ctx context.Context, r *reach) {
	conn := p.dial(ctx, r)
	if conn == nil {
		return
	}
	defer func() { _ = conn.Close() }()
	asked := false
	secure := tls.Client(conn, p.unchecked(r, &asked))
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	err := secure.HandshakeContext(ctx)
	if err == nil { // from TLS 1.3 on a client learns only when it reads that its certificate was refused
		_ = secure.SetDeadline(time.Now().Add(p.timeout))
		_, err = io.WriteString(secure, "GET /version HTTP/1.1\r\nHost: "+r.host+"\r\nConnection: close\r\n\r\n")
		if err == nil {
			_, err = bufio.NewReader(secure).Peek(1)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) { // it does not answer HTTP
			err = nil
		}
	}
	if certs := secure.ConnectionState().PeerCertificates; len(certs) > 0 {
		r.leaf = certs[0]
		p.checkServerCertificate(r, certs)
	}
	if err != nil {
		p.explainTLS(r, err, asked)
	}
}

// expirySoon is how long before a certificate expires it is told.
const expirySoon = 30 * 24 * time.Hour

func (p *prober) checkServerCertificate(r *reach, certs []*x509.Certificate) {
	if p.flags.insecureSkipTLSVerify {
		return
	}
	leaf, now := certs[0], p.now()
	o := x509.VerifyOptions{Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	for _, c := range certs[1:] {
		o.Intermediates.AddCert(c)
	}
	if p.tls != nil {
		o.Roots = p.tls.RootCAs
	}
	_, err := leaf.Verify(o)
	invalid, _ := errors.AsType[x509.CertificateInvalidError](err)
	switch _, unknown := errors.AsType[x509.UnknownAuthorityError](err); {
	case now.After(leaf.NotAfter):
		r.found(failure, "certificate", fmt.Sprintf("the server's certificate has expired on %s", day(leaf.NotAfter)), "nobody renewed it, or this machine's clock is wrong", "give the member a new one in its --cert-file: it is read again at each connection")
	case now.Before(leaf.NotBefore):
		r.found(failure, "certificate", fmt.Sprintf("the server's certificate is valid from %s on, and here it is %s", leaf.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339)), "the clock of this machine, or of the one that made the certificate, is wrong", "set the clocks right")
	case unknown && p.flags.caCert == "":
		r.found(failure, "ca", fmt.Sprintf("the server's certificate is signed by %q, whom this machine does not know", issuer(leaf)), "no --cacert was given", "give --cacert, the file of the CA that signed it (for kubeadm: /etc/kubernetes/pki/etcd/ca.crt)")
	case unknown:
		r.found(failure, "ca", fmt.Sprintf("the server's certificate is signed by %q, who is not in --cacert %s", issuer(leaf), p.flags.caCert), "the file is of another CA, or the server was given a certificate of a new one", "give the file of the CA that signed it")
	case invalid.Reason == x509.IncompatibleUsage:
		r.found(failure, "certificate", "the server's certificate is not for servers", "its extended key usage lacks server authentication", "make one with both server and client authentication, as members are clients of each other")
	case err != nil:
		r.found(failure, "certificate", "the server's certificate is not valid", err.Error(), "give the member another certificate")
	}
	if err := leaf.VerifyHostname(r.host); err != nil {
		r.found(failure, "certificate-name", fmt.Sprintf("the server's certificate is not for %s", r.host), "it is for "+names(leaf), "name the member as its certificate does, or make one whose subject alternative names have "+r.host+" too")
	}
	if left := leaf.NotAfter.Sub(now); left > 0 && left < expirySoon {
		r.found(warning, "certificate", fmt.Sprintf("the server's certificate expires in %s, on %s", days(left), day(leaf.NotAfter)), "", "renew it; a member reads its files again at each connection")
	}
}

// explainTLS says why a handshake failed.
func (p *prober) explainTLS(r *reach, err error, asked bool) {
	text := err.Error()
	refused := strings.Contains(text, "certificate required") || strings.Contains(text, "bad certificate") || strings.Contains(text, "unknown certificate authority") ||
		strings.Contains(text, "certificate unknown") || strings.Contains(text, "unknown certificate") || strings.Contains(text, "expired certificate") || strings.Contains(text, "handshake failure") && asked
	switch {
	case refused && p.flags.cert == "":
		r.found(failure, "client-certificate", "the server asks clients for a certificate, and none was given", "it runs with --client-cert-auth ("+text+")", "give --cert and --key (for kubeadm: /etc/kubernetes/pki/etcd/healthcheck-client.crt and .key)")
	case refused:
		cause := "it is not signed by the CA of the server's --trusted-ca-file, or not meant for clients"
		if strings.Contains(text, "expired") {
			cause = "it has expired"
		}
		r.found(failure, "client-certificate", fmt.Sprintf("the server refuses the certificate %s", p.flags.cert), cause+" ("+text+")", "give a certificate of that CA, with client authentication in its extended key usage")
	case strings.Contains(text, "protocol version"):
		r.found(failure, "tls", "the server and this tool share no version of TLS", text, "start the member with --tls-min-version=TLS1.2 or leave the flag out")
	default:
		r.found(failure, "tls", "the TLS handshake failed", text, "")
	}
}

func day(t time.Time) string { return t.UTC().Format(time.DateOnly) }

func days(d time.Duration) string {
	if d < 48*time.Hour {
		return fmt.Sprintf("%.0f hours", d.Hours())
	}
	return fmt.Sprintf("%.0f days", d.Hours()/24)
}

func issuer(c *x509.Certificate) string { return cmp.Or(c.Issuer.CommonName, c.Issuer.String()) }

// names lists what a certificate is for.
func names(c *x509.Certificate) string {
	all := append([]string{}, c.DNSNames...)
	for _, ip := range c.IPAddresses {
		all = append(all, ip.String())
	}
	if len(all) == 0 {
		return "no host at all: it has no subject alternative names"
	}
	return strings.Join(all, ", ")
}

// setBase says where HTTP would be served.
func (r *reach) setBase() {
	scheme := "http://"
	if r.wantTLS {
		scheme = "https://"
	}
	r.base = scheme + cmp.Or(map[string]string{"unix": "localhost"}[r.network], r.address)
}

// identify finds out what it is that listens: a member's port for clients, for peers, for metrics, or something else.
func (p *prober) identify(ctx context.Context, r *reach) {
	r.setBase()
	from := p.now()
	code, header, body, err := p.get(ctx, r, "/version")
	to := p.now()
	grpcErr := p.grpc(ctx, r)
	speaksGRPC := grpcErr == nil
	if err != nil {
		r.base = ""
		if !speaksGRPC {
			r.found(failure, "no-etcd", "what listens is no etcd", "it answers neither HTTP nor gRPC: "+err.Error(), "name the client URL of a member by --endpoints")
		}
		return
	}
	if date, err := http.ParseTime(header.Get("Date")); err == nil {
		r.date = dateAnswer{date, from, to}
	}
	known := code == http.StatusOK && json.Unmarshal(body, &r.versions) == nil && r.versions.Server != ""
	if speaksGRPC {
		return
	}
	members, _, _, _ := p.get(ctx, r, "/members")
	metrics, _, _, _ := p.get(ctx, r, "/metrics")
	switch {
	case known && members == http.StatusOK:
		r.found(failure, "peer-port", r.address+" is a port for other members, not for clients", "it is in the member's --listen-peer-urls (usually port 2380)", "use the port of --listen-client-urls, usually 2379")
	case known:
		r.found(failure, "http-port", r.address+" serves HTTP alone, no gRPC", "it is in the member's --listen-client-http-urls", "use the port of --listen-client-urls, usually 2379")
	case metrics == http.StatusOK:
		r.found(failure, "metrics-port", r.address+" serves metrics alone", "it is in the member's --listen-metrics-urls (often port 2381), or of another program", "use the port of --listen-client-urls, usually 2379")
	default:
		who := "an HTTP server"
		if s := header.Get("Server"); s != "" {
			who += " that calls itself " + s
		}
		r.found(failure, "no-etcd", "what listens is no etcd", fmt.Sprintf("%s answers /version with status %d", who, code), "name the client URL of a member by --endpoints")
	}
}

// get asks for a page.
func (p *prober) get(ctx context.Context, r *reach, path string) (code int, header http.Header, body []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, r.base+path, nil)
	if err != nil {
		return 0, nil, nil, err
	}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, r.network, r.address)
		},
		TLSClientConfig:   p.unchecked(r, nil),
		DisableKeepAlives: true,
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return 0, nil, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err = io.ReadAll(io.LimitReader(response.Body, pageBytes))
	return response.StatusCode, response.Header, body, err
}

// pageBytes bounds a page: metrics have some hundred KiB.
const pageBytes = 16 << 20

// grpc says if there are etcd's services.
func (p *prober) grpc(ctx context.Context, r *reach) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	secure := insecure.NewCredentials()
	if r.wantTLS {
		secure = credentials.NewTLS(p.unchecked(r, nil))
	}
	target := "passthrough:///" + r.address
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(secure), grpc.WithAuthority(r.host),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, r.network, r.address)
		}))
	if err != nil {
		return err
	}
	defer closeClient(conn)
	r.status, err = etcdserverpb.NewMaintenanceClient(conn).Status(ctx, &etcdserverpb.StatusRequest{})
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Unimplemented:
		if strings.HasPrefix(status.Convert(err).Message(), "etcdserver:") {
			return nil // a member that cannot serve now
		}
		return err
	case codes.Unknown, codes.Internal:
		if strings.Contains(err.Error(), "HTTP status") {
			return err
		}
	}
	return nil
}
