package ctl

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/grpclog"
)

const logTime = "2006-01-02T15:04:05.000000Z0700"

// setup takes over the environment and makes the printer: what a command does first when its arguments are in order.
func (t *tool) setup(c *cobra.Command, known ...string) (printer, error) {
	if err := t.applyEnv(c, known...); err != nil {
		return nil, err
	}
	if t.global.debug {
		writeFlags(t.err, c.Root().PersistentFlags())
		grpclog.SetLoggerV2(grpclog.NewLoggerV2WithVerbosity(t.err, t.err, t.err, 4))
	}
	return newPrinter(t.global.writeOut, t.out, t.global.hex)
}

// connect is setup, and a client for the endpoints. The caller closes the client.
func (t *tool) connect(c *cobra.Command, known ...string) (*clientv3.Client, printer, error) {
	p, err := t.setup(c, known...)
	if err != nil {
		return nil, nil, err
	}
	cfg, err := t.clientConfig(c)
	if err != nil {
		return nil, nil, err
	}
	client, err := dial(cfg)
	return client, p, err
}

// dial makes a client. The caller closes it.
func dial(cfg clientv3.Config) (*clientv3.Client, error) {
	client, err := clientv3.New(cfg)
	if err != nil {
		return nil, exit(exitConnection, err)
	}
	return client, nil
}

// connectLasting is connect for a command that goes on for long: etcd's client would wait for ever for its first member, so one must
// be there as soon as a short command would have its answer.
func (t *tool) connectLasting(c *cobra.Command, known ...string) (*clientv3.Client, printer, error) {
	client, p, err := t.connect(c, known...)
	if err != nil {
		return nil, nil, err
	}
	if err := t.awaitMember(client); err != nil {
		closeClient(client)
		return nil, nil, exit(exitConnection, err)
	}
	return client, p, nil
}

// awaitMember returns once a member is connected.
func (t *tool) awaitMember(client *clientv3.Client) error {
	ctx, cancel := t.commandContext()
	defer cancel()
	conn := client.ActiveConnection()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		conn.Connect() // if it is idle
		if !conn.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
	}
	return nil
}

// commandContext bounds a short command.
func (t *tool) commandContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.ctx, t.global.commandTimeout)
}

// clientConfig turns the flags into the client's configuration. It may ask for a password, so a command calls it once.
func (t *tool) clientConfig(c *cobra.Command) (clientv3.Config, error) {
	g := &t.global
	cfg := clientv3.Config{
		Endpoints:            g.endpoints,
		Context:              t.ctx,
		DialTimeout:          g.dialTimeout,
		DialKeepAliveTime:    g.keepAliveTime,
		DialKeepAliveTimeout: g.keepAliveTimeout,
		MaxCallSendMsgSize:   g.maxRequestBytes,
		MaxCallRecvMsgSize:   cmp.Or(g.maxRecvBytes, math.MaxInt32),
		Token:                g.authJWTToken,
		Logger:               t.clientLogger(),
	}
	if g.discoverySRV != "" {
		endpoints, err := discover(t.ctx, g.discoverySRV, g.discoverySRVName, g.insecureDiscovery)
		if err != nil {
			return cfg, err
		}
		cfg.Endpoints = endpoints
	}
	t.dialed = cfg.Endpoints
	var err error
	if cfg.TLS, err = g.tlsConfig(); err != nil {
		return cfg, exit(exitArguments, err)
	}
	if g.user == "" || g.authJWTToken != "" { // a token is proof enough
		return cfg, nil
	}
	cfg.Username, cfg.Password = g.user, g.password
	if g.password == "" {
		var found bool
		if cfg.Username, cfg.Password, found = strings.Cut(g.user, ":"); !found {
			cfg.Password, err = t.askPassword()
		}
	}
	return cfg, err
}

// tlsConfig returns nil if the connection is without TLS, unless an endpoint asks for it by https.
func (g *globalFlags) tlsConfig() (*tls.Config, error) {
	if g.cert == "" && g.key == "" && g.caCert == "" && !g.insecureSkipTLSVerify && g.insecureTransport {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: g.insecureSkipTLSVerify}
	if g.discoverySRV != "" { // DNS chose the host, so its name proves nothing; the domain is what the user named
		cfg.ServerName = g.discoverySRV
	}
	if (g.cert == "") != (g.key == "") {
		return nil, fmt.Errorf("KeyFile and CertFile must both be present[key: %v, cert: %v]", g.key, g.cert)
	}
	if g.cert != "" {
		certificate, err := tls.LoadX509KeyPair(g.cert, g.key)
		if err != nil {
			return nil, err
		}
		// The files are read again for each connection, for long commands outlive short certificates.
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			fresh, err := tls.LoadX509KeyPair(g.cert, g.key)
			if err != nil {
				return &certificate, nil
			}
			return &fresh, nil
		}
	}
	if g.caCert != "" {
		pem, err := os.ReadFile(g.caCert)
		if err != nil {
			return nil, err
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--cacert %s holds no certificate; give a file of certificates in PEM form", g.caCert)
		}
	}
	return cfg, nil
}

// discover looks the endpoints up in DNS: SRV records of the service etcd-client-ssl, for TLS, and of etcd-client.
func discover(ctx context.Context, domain, name string, insecure bool) ([]string, error) {
	var endpoints []string
	var failures []error
	for _, service := range []struct{ name, scheme string }{{"etcd-client-ssl", "https"}, {"etcd-client", "http"}} {
		if service.scheme == "http" && !insecure {
			continue
		}
		query := service.name
		if name != "" {
			query += "-" + name
		}
		_, records, err := net.DefaultResolver.LookupSRV(ctx, query, "tcp", domain)
		if err != nil {
			failures = append(failures, err)
			continue
		}
		for _, r := range records {
			host := net.JoinHostPort(strings.TrimSuffix(r.Target, "."), fmt.Sprint(r.Port))
			endpoints = append(endpoints, service.scheme+"://"+host)
		}
	}
	if len(endpoints) > 0 {
		return endpoints, nil
	}
	texts := make([]string, len(failures))
	for i, err := range failures {
		texts[i] = err.Error()
	}
	return nil, fmt.Errorf("dns lookup errors: %s", strings.Join(texts, " and "))
}

// errNoSecret says that the input ended before a password was read.
var errNoSecret = errors.New("no password on standard input")

// askPassword reads the password of --user.
func (t *tool) askPassword() (string, error) {
	password, err := t.readSecret("Password: ")
	if err != nil {
		return "", exit(exitConnection, fmt.Errorf("%w for --user: use --user name:password, or --password", err))
	}
	return password, nil
}

// readSecret reads a line, without echo where the input is a terminal and something is asked.
func (t *tool) readSecret(prompt string) (string, error) {
	fmt.Fprint(t.stdout, prompt)
	if prompt != "" {
		defer func() { fmt.Fprintln(t.stdout) }() // nobody's Enter was echoed
	}
	if f, ok := t.stdin.(*os.File); ok && prompt != "" && isTerminal(f) {
		if stty(f, "-echo") == nil {
			defer func() { _ = stty(f, "echo") }() // nothing can be done about a terminal that will not echo again
		}
	}
	line, err := t.in.ReadString('\n')
	if err != nil && line == "" {
		return "", errNoSecret
	}
	return strings.TrimRight(line, "\r\n"), nil
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// stty changes a setting of the terminal.
func stty(f *os.File, setting string) error {
	c := exec.Command("stty", setting)
	c.Stdin = f
	return c.Run()
}

// clientLogger writes the client's warnings, or all it has to tell with --debug or ETCD_CLIENT_DEBUG, one JSON object a line.
func (t *tool) clientLogger() *zap.Logger {
	level := zapcore.WarnLevel
	if name, ok := t.getenv("ETCD_CLIENT_DEBUG"); ok && name != "" {
		if err := level.Set(name); err != nil {
			level = zapcore.InfoLevel
		}
	}
	if t.global.debug {
		level = zapcore.DebugLevel
	}
	encoder := zap.NewProductionEncoderConfig()
	encoder.EncodeTime = zapcore.TimeEncoderOfLayout(logTime)
	encoder.EncodeDuration = zapcore.StringDurationEncoder
	core := zapcore.NewCore(zapcore.NewJSONEncoder(encoder), zapcore.Lock(zapcore.AddSync(t.err)), level)
	return zap.New(core, zap.AddCaller()).Named("etcd-client")
}

// memberEndpoints returns the client URLs of all members.
func (t *tool) memberEndpoints(client *clientv3.Client) ([]string, error) {
	ctx, cancel := t.commandContext()
	defer cancel()
	members, err := client.MemberList(ctx)
	if err != nil {
		return nil, fmt.Errorf("failed to fetch endpoints from etcd cluster member list: %w", err)
	}
	var endpoints []string
	for _, m := range members.Members {
		endpoints = append(endpoints, slices.Clone(m.ClientURLs)...)
	}
	return endpoints, nil
}
