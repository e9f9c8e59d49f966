package ctl

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// globalFlags are the flags that every command takes.
type globalFlags struct {
	endpoints             []string
	debug                 bool
	writeOut              string
	hex                   bool
	dialTimeout           time.Duration
	commandTimeout        time.Duration
	keepAliveTime         time.Duration
	keepAliveTimeout      time.Duration
	maxRequestBytes       int
	maxRecvBytes          int
	insecureTransport     bool
	insecureDiscovery     bool
	insecureSkipTLSVerify bool
	cert, key, caCert     string
	user, password        string
	authJWTToken          string
	discoverySRV          string
	discoverySRVName      string
}

func (g *globalFlags) register(f *pflag.FlagSet) {
	f.StringSliceVar(&g.endpoints, "endpoints", []string{"127.0.0.1:2379"}, "addresses of members, separated by commas")
	f.BoolVar(&g.debug, "debug", false, "log what the client does")
	f.StringVarP(&g.writeOut, "write-out", "w", "simple", "output format: simple, fields, json, protobuf or table")
	f.BoolVar(&g.hex, "hex", false, "print keys and values as hexadecimal escapes, and IDs in hexadecimal")
	f.DurationVar(&g.dialTimeout, "dial-timeout", 2*time.Second, "how long connecting may take")
	f.DurationVar(&g.commandTimeout, "command-timeout", 5*time.Second, "how long a short command may take, without connecting")
	f.DurationVar(&g.keepAliveTime, "keepalive-time", 2*time.Second, "silence after which the connection is probed")
	f.DurationVar(&g.keepAliveTimeout, "keepalive-timeout", 6*time.Second, "how long a probe may stay without answer")
	f.IntVar(&g.maxRequestBytes, "max-request-bytes", 0, "largest request sent, in bytes; 0 is 2 MiB")
	f.IntVar(&g.maxRecvBytes, "max-recv-bytes", 0, "largest answer accepted, in bytes; 0 is 2 GiB")
	f.BoolVar(&g.insecureTransport, "insecure-transport", true, "do without TLS where an endpoint names no scheme")
	f.BoolVar(&g.insecureDiscovery, "insecure-discovery", true, "accept endpoints without TLS from DNS discovery")
	f.BoolVar(&g.insecureSkipTLSVerify, "insecure-skip-tls-verify", false, "do not check the server's certificate (for tests only)")
	f.StringVar(&g.cert, "cert", "", "file of the client's certificate (PEM)")
	f.StringVar(&g.key, "key", "", "file of the key of --cert (PEM)")
	f.StringVar(&g.caCert, "cacert", "", "file of the certificates that servers are checked against (PEM)")
	f.StringVar(&g.user, "user", "", "name or name:password to log in with; without a password it is asked for")
	f.StringVar(&g.password, "password", "", "password to log in with; --user must not have one then")
	f.StringVar(&g.authJWTToken, "auth-jwt-token", "", "token to authenticate with instead of --user and --password")
	f.StringVarP(&g.discoverySRV, "discovery-srv", "d", "", "domain whose SRV records name the endpoints")
	f.StringVar(&g.discoverySRVName, "discovery-srv-name", "", "suffix of the service name asked for in DNS discovery")
}

const envPrefix = "ETCDCTL_"

func envName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// applyEnv sets the flags that the environment names. A flag that is also on the command line is an error, for nobody could tell
// which of the two was meant. Variables of our prefix that name no flag, or have a value that it cannot take, are told and
// ignored. known are names that the command reads by itself.
func (t *tool) applyEnv(c *cobra.Command, known ...string) error {
	var conflict error
	c.InheritedFlags().VisitAll(func(f *pflag.Flag) {
		name := envName(f.Name)
		known = append(known, name)
		value, ok := t.getenv(name)
		switch {
		case !ok:
		case f.Changed:
			if conflict == nil {
				conflict = exit(exitFailed, fmt.Errorf(
					"conflicting environment variable: %s=%q and flag --%s are both given; unset the variable or leave out the flag",
					name, value, f.Name))
			}
		case value == "":
		default:
			if err := f.Value.Set(value); err != nil {
				t.warn("environment variable ignored: its value does not fit the flag", "environment-variable", name,
					"value", value, "error", err.Error())
			}
		}
	})
	if conflict != nil {
		return conflict
	}
	for _, e := range t.env {
		if name, _, _ := strings.Cut(e, "="); strings.HasPrefix(name, envPrefix) && !slices.Contains(known, name) {
			t.warn("unrecognized environment variable", "environment-variable", e)
		}
	}
	return nil
}

// warn writes a warning in the form of the client's log lines. fields are names and values in turn.
func (t *tool) warn(message string, fields ...string) {
	var b strings.Builder
	fmt.Fprintf(&b, `{"level":"warn","ts":%q,"msg":%s`, time.Now().UTC().Format(logTime), jsonString(message))
	for i := 0; i+1 < len(fields); i += 2 {
		fmt.Fprintf(&b, ",%s:%s", jsonString(fields[i]), jsonString(fields[i+1]))
	}
	fmt.Fprintln(t.err, b.String()+"}")
}

func jsonString(s string) string {
	b, err := json.Marshal(s)
	if err != nil { // cannot be: every string has a JSON form
		return `""`
	}
	return string(b)
}

// writeFlags writes every global flag as the environment variable that would set it. The password is not shown.
func writeFlags(w io.Writer, flags *pflag.FlagSet) {
	flags.VisitAll(func(f *pflag.Flag) {
		value := f.Value.String()
		switch f.Name {
		case "help":
			return
		case "password", "auth-jwt-token":
			if value != "" {
				value = "(hidden)"
			}
		case "user":
			if name, _, found := strings.Cut(value, ":"); found {
				value = name + ":(hidden)"
			}
		}
		fmt.Fprintf(w, "%s=%s\n", envName(f.Name), value)
	})
}
