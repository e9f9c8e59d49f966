package bench

import (
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/engram-kv/engram/internal/tlsfiles"
)

// options are the flags of one run.
type options struct {
	endpoints            []string
	connections, streams int
	duration, warmup     time.Duration
	total                int64
	rate                 float64
	timeout              time.Duration
	keys, keySize        int
	valueSize            int
	prefix               string
	keep                 bool
	seed                 uint64

	cert, key, caCert     string
	insecureSkipTLSVerify bool
	user, password        string
	dialTimeout           time.Duration

	json       bool
	serverPIDs []int

	// Of single workloads.
	serializable bool
	lease        bool
	limit        int64
	watchers     int
	writers      int
	leases       int
	nodes        int
	speed        float64
}

func (o *options) register(f *pflag.FlagSet) {
	f.StringSliceVar(&o.endpoints, "endpoints", []string{"127.0.0.1:2379"}, "addresses of members, separated by commas; connections are spread over them")
	f.IntVar(&o.connections, "connections", 10, "connections")
	f.IntVar(&o.streams, "streams", 10, "calls that each connection has open at a time, at most")
	f.DurationVar(&o.duration, "duration", 10*time.Second, "how long to measure, after --warmup")
	f.Int64Var(&o.total, "total", 0, "operations to measure, instead of --duration")
	f.Float64Var(&o.rate, "rate", 0, "operations a second, whether or not earlier ones were answered; latency then counts from when each was due (default as fast as answers come)")
	f.DurationVar(&o.warmup, "warmup", 0, "how long to load before measuring begins")
	f.DurationVar(&o.timeout, "timeout", 10*time.Second, "how long one call may take; a server out of reach for that long ends the run")
	f.IntVar(&o.keys, "keys", 10_000, "different keys")
	f.IntVar(&o.keySize, "key-size", 0, "bytes of a key, prefix included (default the prefix and 9 digits)")
	f.IntVar(&o.valueSize, "value-size", 256, "bytes of a value")
	f.StringVar(&o.prefix, "prefix", "", "what all keys begin with; nothing outside is written, and a prefix with foreign keys is refused (default a new one below /engram-bench/)")
	f.BoolVar(&o.keep, "keep", false, "keep the keys at the end; a later run with the same --prefix, --keys and sizes uses them again")
	f.Uint64Var(&o.seed, "seed", 1, "seed of what is chosen by chance")
	f.StringVar(&o.cert, "cert", "", "file of the client's certificate (PEM)")
	f.StringVar(&o.key, "key", "", "file of the key of --cert (PEM)")
	f.StringVar(&o.caCert, "cacert", "", "file of the certificates that servers are checked against (PEM)")
	f.BoolVar(&o.insecureSkipTLSVerify, "insecure-skip-tls-verify", false, "do not check the server's certificate (for tests only)")
	f.StringVar(&o.user, "user", "", "name or name:password to log in with")
	f.StringVar(&o.password, "password", "", "password to log in with; --user must not have one then")
	f.DurationVar(&o.dialTimeout, "dial-timeout", 2*time.Second, "how long connecting may take")
	f.BoolVar(&o.json, "json", false, "print the figures as JSON")
	f.IntSliceVar(&o.serverPIDs, "server-pid", nil, "processes whose CPU time and memory are the servers' (default those that listen at the endpoints, on this machine)")
}

// endpoint is an address to dial.
type endpoint struct {
	name             string // as given
	network, address string
	secure           bool
}

const (
	maxConnections = 10_000
	maxCalls       = 200_000 // open at a time
	maxKeys        = 100_000_000
	maxValue       = 64 << 20
)

// check reports what is wrong with the flags, all at once.
func (o *options) check() error {
	var errs []error
	within := func(flag string, v, least, most int) {
		if v < least || v > most {
			errs = append(errs, fmt.Errorf("--%s=%d: give a number from %d to %d", flag, v, least, most))
		}
	}
	within("connections", o.connections, 1, maxConnections)
	within("streams", o.streams, 1, maxCalls/max(1, min(o.connections, maxConnections)))
	within("keys", o.keys, 1, maxKeys)
	within("value-size", o.valueSize, 0, maxValue)
	for flag, d := range map[string]time.Duration{"duration": o.duration, "timeout": o.timeout, "dial-timeout": o.dialTimeout} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("--%s=%v: give a time above 0", flag, d))
		}
	}
	if o.warmup < 0 {
		errs = append(errs, fmt.Errorf("--warmup=%v: give a time of 0 or more", o.warmup))
	}
	if o.total < 0 {
		errs = append(errs, fmt.Errorf("--total=%d: give a number of operations, or 0 for --duration", o.total))
	}
	if o.rate < 0 || o.rate > 10_000_000 || math.IsNaN(o.rate) {
		errs = append(errs, fmt.Errorf("--rate=%v: give operations a second, or 0 for as fast as answers come", o.rate))
	}
	if len(o.endpoints) == 0 {
		errs = append(errs, errors.New("--endpoints is empty: give at least one address"))
	}
	for _, e := range o.endpoints {
		if _, err := parseEndpoint(e, o.tls()); err != nil {
			errs = append(errs, err)
		}
	}
	if o.password != "" && (o.user == "" || strings.Contains(o.user, ":")) {
		errs = append(errs, errors.New("--password goes with a --user that has no password in it"))
	}
	if o.user != "" && o.password == "" && !strings.Contains(o.user, ":") {
		errs = append(errs, fmt.Errorf("--user=%s comes without a password: give --user %s:PASSWORD, or --password", o.user, o.user))
	}
	return errors.Join(append(errs, o.checkKeys())...)
}

// tls tells if the flags ask for TLS, where an endpoint names no scheme.
func (o *options) tls() bool { return o.cert != "" || o.caCert != "" || o.insecureSkipTLSVerify }

func (o *options) tlsConfig() (*tls.Config, error) {
	c, err := tlsfiles.Client(tlsfiles.Options{CertFile: o.cert, KeyFile: o.key, TrustedCAFile: o.caCert})
	if err != nil {
		return nil, err
	}
	c.InsecureSkipVerify = o.insecureSkipTLSVerify
	return c, nil
}

func (o *options) credentials() (name, password string) {
	if name, password, found := strings.Cut(o.user, ":"); found {
		return name, password
	}
	return o.user, o.password
}

func parseEndpoint(s string, secure bool) (endpoint, error) {
	e := endpoint{name: s, network: "tcp", secure: secure}
	scheme, rest, found := strings.Cut(s, "://")
	if !found {
		scheme, rest = "", s
	}
	switch scheme {
	case "":
	case "http":
		e.secure = false
	case "https":
		e.secure = true
	case "unix", "unixs":
		e.network, e.address, e.secure = "unix", rest, scheme == "unixs"
		if rest == "" {
			return e, fmt.Errorf("--endpoints: %q names no socket", s)
		}
		return e, nil
	default:
		return e, fmt.Errorf("--endpoints: %q has scheme %q: http, https, unix and unixs are known", s, scheme)
	}
	u, err := url.Parse("//" + rest)
	if err != nil || u.Host == "" || strings.Trim(u.Path, "/") != "" {
		return e, fmt.Errorf("--endpoints: %q is no address: give host:port, with http:// or https:// before it or without", s)
	}
	e.address = u.Host
	if u.Port() == "" {
		e.address = net.JoinHostPort(u.Hostname(), "2379")
	}
	return e, nil
}
