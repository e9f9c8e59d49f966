package discovery_test

import (
	"context"
	"errors"
	"net"
	"net/url"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/engram-kv/engram/internal/discovery"
)

// fakeDNS has the records of one domain. What is not there is not found.
type fakeDNS struct {
	srv   map[string][]*net.SRV // by service
	hosts map[string][]string
}

func (f fakeDNS) LookupSRV(_ context.Context, service, proto, name string) (string, []*net.SRV, error) {
	if r, ok := f.srv[service]; ok && proto == "tcp" && name == "example.com" {
		return "", append([]*net.SRV(nil), r...), nil
	}
	return "", nil, &net.DNSError{Err: "no such host", Name: service, IsNotFound: true}
}

func (f fakeDNS) LookupHost(_ context.Context, host string) ([]string, error) {
	if h, ok := f.hosts[strings.TrimSuffix(host, ".")]; ok {
		return h, nil
	}
	return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
}

func TestSRV(t *testing.T) {
	hosts := map[string][]string{
		"a.example.com": {"10.0.0.1"}, "b.example.com": {"10.0.0.2"}, "c.example.com": {"10.0.0.3"}, "me": {"10.0.0.9", "10.0.0.1"},
	}
	record := func(target string, port uint16) *net.SRV { return &net.SRV{Target: target + ".", Port: port} }
	members := []*net.SRV{record("c.example.com", 2380), record("a.example.com", 2380), record("b.example.com", 2380)}
	for _, c := range []struct {
		what, suffix, advertised string
		srv                      map[string][]*net.SRV
		want                     string // the cluster, or an error's text
	}{
		{"http", "", "http://10.0.0.1:2380", map[string][]*net.SRV{"etcd-server": members},
			"m=http://a.example.com:2380,0=http://b.example.com:2380,1=http://c.example.com:2380"},
		{"https", "", "https://10.0.0.1:2380", map[string][]*net.SRV{"etcd-server-ssl": members},
			"m=https://a.example.com:2380,0=https://b.example.com:2380,1=https://c.example.com:2380"},
		{"suffix", "infra", "http://10.0.0.3:2380", map[string][]*net.SRV{"etcd-server-infra": members, "etcd-server": {record("x", 1)}},
			"0=http://a.example.com:2380,1=http://b.example.com:2380,m=http://c.example.com:2380"},
		{"a host name advertised", "", "http://me:2380", map[string][]*net.SRV{"etcd-server": members[1:]},
			"m=http://a.example.com:2380,0=http://b.example.com:2380"},
		{"one not resolved", "", "http://10.0.0.1:2380", map[string][]*net.SRV{"etcd-server": {members[1], record("gone.example.com", 2380)}},
			"m=http://a.example.com:2380"},
		{"both services", "", "https://10.0.0.1:2380", map[string][]*net.SRV{"etcd-server-ssl": members[1:2], "etcd-server": members[2:]},
			"m=https://a.example.com:2380,0=http://b.example.com:2380"},
		{"nothing", "", "http://10.0.0.1:2380", nil, "no usable SRV record"},
		{"no host known", "", "http://10.0.0.1:2380", map[string][]*net.SRV{"etcd-server": {record("gone.example.com", 1)}}, "no usable SRV record"},
		{"other port", "", "http://10.0.0.1:2381", map[string][]*net.SRV{"etcd-server": members}, "no record leads to --initial-advertise-peer-urls"},
		{"scheme", "", "http://10.0.0.1:2380", map[string][]*net.SRV{"etcd-server-ssl": members[1:2]}, "has another scheme than --initial-advertise-peer-urls=http://10.0.0.1:2380"},
		{"advertised unknown", "", "http://gone:2380", map[string][]*net.SRV{"etcd-server": members}, "looking up --initial-advertise-peer-urls=http://gone:2380"},
	} {
		u, err := url.Parse(c.advertised)
		if err != nil {
			t.Fatal(err)
		}
		got, err := discovery.SRV(t.Context(), discovery.SRVOptions{
			Domain: "example.com", ServiceSuffix: c.suffix, Name: "m", Advertised: []url.URL{*u}, Resolver: fakeDNS{c.srv, hosts},
		})
		if got != c.want && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %q %v\nwant %s", c.what, got, err, c.want)
		}
		if c.what == "nothing" && !errors.Is(err, discovery.ErrNoRecords) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// TestSRVOverDNS asks a real name server on loopback.
func TestSRVOverDNS(t *testing.T) {
	server := serveDNS(t)
	r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", server)
	}}
	got, err := discovery.SRV(t.Context(), discovery.SRVOptions{
		Domain: "cluster.test", Name: "m", Advertised: []url.URL{{Scheme: "http", Host: "127.0.0.2:2380"}}, Resolver: r,
	})
	if want := "0=http://a.cluster.test:2380,m=http://b.cluster.test:2380"; got != want {
		t.Errorf("%q %v, want %s", got, err, want)
	}
}

// serveDNS answers for cluster.test: two members, without TLS.
func serveDNS(t *testing.T) (address string) {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { _ = conn.Close(); <-done })
	name := dnsmessage.MustNewName
	hosts := map[string][4]byte{"a.cluster.test.": {127, 0, 0, 1}, "b.cluster.test.": {127, 0, 0, 2}}
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var q dnsmessage.Message
			if err := q.Unpack(buf[:n]); err != nil || len(q.Questions) != 1 {
				continue
			}
			asked := q.Questions[0]
			a := dnsmessage.Message{Header: dnsmessage.Header{ID: q.ID, Response: true, Authoritative: true}, Questions: q.Questions}
			head := dnsmessage.ResourceHeader{Name: asked.Name, Type: asked.Type, Class: dnsmessage.ClassINET, TTL: 1}
			ip, known := hosts[asked.Name.String()]
			switch {
			case asked.Type == dnsmessage.TypeSRV && asked.Name.String() == "_etcd-server._tcp.cluster.test.":
				for host := range hosts {
					a.Answers = append(a.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.SRVResource{Port: 2380, Target: name(host)}})
				}
			case asked.Type == dnsmessage.TypeA && known:
				a.Answers = append(a.Answers, dnsmessage.Resource{Header: head, Body: &dnsmessage.AResource{A: ip}})
			case !known:
				a.RCode = dnsmessage.RCodeNameError
			}
			out, err := a.Pack()
			if err != nil {
				t.Errorf("DNS answer: %v", err)
				return
			}
			_, _ = conn.WriteTo(out, from)
		}
	}()
	return conn.LocalAddr().String()
}
