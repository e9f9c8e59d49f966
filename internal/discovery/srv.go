package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// ErrNoRecords says that DNS has no usable SRV record for a domain.
var ErrNoRecords = errors.New("no usable SRV record")

// Resolver asks the DNS: *net.Resolver.
type Resolver interface {
	LookupSRV(ctx context.Context, service, proto, name string) (string, []*net.SRV, error)
	LookupHost(ctx context.Context, host string) ([]string, error)
}

// SRVOptions say whose records are looked for. ServiceSuffix and Logger may be
// left out.
type SRVOptions struct {
	Domain        string
	ServiceSuffix string // appended to the service's name, after a dash
	Name          string // this member's
	Advertised    []url.URL
	Resolver      Resolver
	Logger        *slog.Logger
}

// SRV returns the initial cluster that a domain's SRV records describe, as
// name=url,…. A record that leads to an advertised URL of this member gets its
// name, the others are numbered.
func SRV(ctx context.Context, o SRVOptions) (string, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	own := map[string]url.URL{} // by address
	for _, u := range o.Advertised {
		addrs, err := o.addresses(ctx, u.Hostname(), u.Port())
		if err != nil {
			return "", fmt.Errorf("--discovery-srv=%s: looking up --initial-advertise-peer-urls=%s: %w", o.Domain, u.String(), err)
		}
		for _, a := range addrs {
			own[a] = u
		}
	}
	var parts []string
	var failure error
	for _, s := range []struct{ service, scheme string }{{"etcd-server-ssl", "https"}, {"etcd-server", "http"}} {
		if o.ServiceSuffix != "" {
			s.service += "-" + o.ServiceSuffix
		}
		found, err := o.lookup(ctx, s.service, s.scheme, own)
		if err != nil {
			failure = also(failure, fmt.Errorf("_%s._tcp.%s: %w", s.service, o.Domain, err))
		}
		parts = append(parts, found...)
	}
	if len(parts) == 0 {
		return "", fmt.Errorf("--discovery-srv=%s: %w (%w): publish a record for each member", o.Domain, ErrNoRecords, failure)
	}
	if failure != nil {
		o.Logger.Warn("some SRV records are not used", "domain", o.Domain, "error", failure)
	}
	if !slices.ContainsFunc(parts, func(p string) bool { return strings.HasPrefix(p, o.Name+"=") }) {
		return "", fmt.Errorf("--discovery-srv=%s: no record leads to --initial-advertise-peer-urls of this member, %q, found %s: publish one for it, or advertise what is published",
			o.Domain, o.Name, strings.Join(parts, ","))
	}
	return strings.Join(parts, ","), nil
}

// lookup returns the members that one service names. The error tells of records
// that cannot be used, and may stand beside members.
func (o *SRVOptions) lookup(ctx context.Context, service, scheme string, own map[string]url.URL) (parts []string, err error) {
	_, records, err := o.Resolver.LookupSRV(ctx, service, "tcp", o.Domain)
	if err != nil {
		return nil, err
	}
	// Records of one priority come in any order; the members' numbers should not.
	slices.SortFunc(records, func(a, b *net.SRV) int {
		return cmp.Or(cmp.Compare(a.Target, b.Target), cmp.Compare(a.Port, b.Port))
	})
	var failure error
	others := 0
	for _, r := range records {
		port := strconv.Itoa(int(r.Port))
		addrs, err := o.addresses(ctx, r.Target, port)
		if err != nil {
			failure = also(failure, err)
			continue
		}
		u := scheme + "://" + net.JoinHostPort(strings.TrimSuffix(r.Target, "."), port)
		i := slices.IndexFunc(addrs, func(a string) bool { _, is := own[a]; return is })
		switch {
		case i < 0:
			parts = append(parts, fmt.Sprintf("%d=%s", others, u))
			others++
		case own[addrs[i]].Scheme != scheme:
			advertised := own[addrs[i]]
			failure = also(failure, fmt.Errorf("%s has another scheme than --initial-advertise-peer-urls=%s", u, advertised.String()))
		default:
			parts = append(parts, o.Name+"="+u)
		}
	}
	return parts, failure
}

// also is one failure after another, on one line.
func also(failure, next error) error {
	if failure == nil {
		return next
	}
	return fmt.Errorf("%w; %w", failure, next)
}

// addresses are what a host and port may be dialed as.
func (o *SRVOptions) addresses(ctx context.Context, host, port string) ([]string, error) {
	hosts := []string{host}
	if net.ParseIP(host) == nil {
		var err error
		if hosts, err = o.Resolver.LookupHost(ctx, host); err != nil {
			return nil, err
		}
	}
	out := make([]string, len(hosts))
	for i, h := range hosts {
		out[i] = net.JoinHostPort(h, port)
	}
	return out, nil
}
