package fault

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/engram-kv/engram/test/internal/cluster"
)

const (
	domain     = "cluster.test"
	peerPort   = 2380 // of a member in a namespace
	registryOf = "/_etcd/registry/"
	token      = "three"
)

// TestDiscoverySRV has three members find each other in the SRV records of a domain, at a name server. A fourth, to which no record leads, ends and
// says so.
func TestDiscoverySRV(t *testing.T) {
	n := newNetwork(t)
	n.publish(t, 3)
	hosts := func(first int) func(*cluster.Cluster) {
		return func(c *cluster.Cluster) {
			c.Hosts = func(i int) cluster.Host { return n.spaces[first+i] }
			c.Discovery = []string{"--discovery-srv=" + domain}
		}
	}
	b := gather(t, 3, hosts(0))
	var want []string
	for i := range 3 {
		want = append(want, fmt.Sprintf("http://%s:%d", hostName(i), peerPort))
	}
	b.met(want)
	b.late(hosts(3), map[string][]string{
		"engram": {"--discovery-srv=" + domain, "no record leads to --initial-advertise-peer-urls of this member", "publish one for it"},
		"etcd":   {"cannot find local etcd member"},
	})
	b.met(want)
	b.again()
}

// TestDiscoveryToken has three members meet in the registry of another cluster, which they do not need any more once they have. A fourth that comes
// with the same token ends and says that there are three already.
func TestDiscoveryToken(t *testing.T) {
	var registry *cluster.Cluster
	var discovery []string
	b := gather(t, 3, func(c *cluster.Cluster) {
		registry = meetingPlace(t)
		discovery = []string{"--discovery-token=" + token, "--discovery-endpoints=" + registry.Members()[0].ClientURL}
		c.Discovery = discovery
	})
	var want []string
	for _, m := range b.c.Members() {
		want = append(want, m.PeerURL)
	}
	b.met(want)
	b.registered(registry, want)
	b.late(func(c *cluster.Cluster) { c.Discovery = discovery }, map[string][]string{
		"engram": {"discovery: cluster is full", "3 members registered under " + registryOf + token, "use another --discovery-token", "--initial-cluster-state=existing"},
		"etcd":   {"discovery: cluster is full"},
	})
	b.registered(registry, want)
	b.met(want)
	b.must(registry.Close())
	b.again()
}

// meetingPlace is a cluster of one in which three may meet.
func meetingPlace(t *testing.T) *cluster.Cluster {
	t.Helper()
	p, err := program()
	if err != nil {
		t.Fatal(err)
	}
	c := cluster.New(t.TempDir())
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	if err := c.Start(ctx, p); err != nil {
		t.Fatal(err)
	}
	client, err := c.Members()[0].Client()
	if err == nil {
		_, err = client.Put(ctx, registryOf+token+"/_config/size", "3")
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// registered fails the test unless the registry holds the members of these URLs and no others.
func (b *trial) registered(registry *cluster.Cluster, want []string) {
	b.Helper()
	client, err := registry.Members()[0].Client()
	b.must(err)
	r, err := client.Get(b.ctx, registryOf+token+"/members/", clientv3.WithPrefix())
	b.must(err)
	var got []string
	for _, kv := range r.Kvs {
		_, url, _ := strings.Cut(string(kv.Value), "=")
		got = append(got, url)
	}
	if !sameSet(got, want) {
		b.Fatalf("registered are %q, want %q", got, want)
	}
}

// met fails the test unless the members, with these peer URLs, are one cluster: each knows all of them by name, and reads what was put at another.
func (b *trial) met(want []string) {
	b.Helper()
	members := b.c.Members()
	var names []string
	for _, m := range members {
		names = append(names, m.Name)
	}
	for i, m := range members {
		client, err := m.Client()
		b.must(err)
		list, err := client.MemberList(b.ctx)
		b.must(err)
		var gotNames, got []string
		for _, other := range list.Members {
			gotNames, got = append(gotNames, other.Name), append(got, other.PeerURLs...)
		}
		if !sameSet(got, want) || !sameSet(gotNames, names) {
			b.Fatalf("%v knows members %q at %q, want %q at %q", m, gotNames, got, names, want)
		}
		value := time.Now().String()
		_, err = client.Put(b.ctx, m.Name, value)
		b.must(err)
		client, err = members[(i+1)%len(members)].Client()
		b.must(err)
		r, err := client.Get(b.ctx, m.Name)
		b.must(err)
		if len(r.Kvs) != 1 || string(r.Kvs[0].Value) != value {
			b.Fatalf("put at %v was %q, at %v it is %v", m, value, members[(i+1)%len(members)], r.Kvs)
		}
	}
}

// late starts a member in the way that the first ones were. It must end, and say what it is expected to, by program.
func (b *trial) late(prepare func(*cluster.Cluster), want map[string][]string) {
	b.Helper()
	p, err := program()
	b.must(err)
	c := cluster.New(b.TempDir())
	b.Cleanup(func() { b.must(c.Close()) })
	prepare(c)
	if err := c.Start(b.ctx, p); err == nil {
		b.Fatalf("%v serves, and there was no place for it", c.Members()[0])
	}
	m := c.Members()[0]
	select {
	case <-m.Exited():
	default:
		b.Fatalf("%v has no place and runs on:\n%s", m, m.LogTail())
	}
	for _, text := range want[p.Name] {
		if !strings.Contains(m.Log(), text) {
			b.Errorf("%v does not say %q, but:\n%s", m, text, m.LogTail())
		}
	}
}

// again stops and starts all members: they know each other.
func (b *trial) again() {
	b.Helper()
	for _, m := range b.c.Members() {
		b.must(m.Stop())
	}
	for _, m := range b.c.Members() {
		b.must(m.Spawn())
	}
	b.must(b.whole())
	_, err := b.c.CheckHash(b.ctx)
	b.must(err)
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

func hostName(i int) string { return fmt.Sprintf("m%d.%s", i, domain) }

// publish runs a name server that has SRV records of the first hosts of the network, and addresses of all, and has the hosts ask it.
func (n *network) publish(t *testing.T, members int) {
	t.Helper()
	conn, err := net.ListenPacket("udp", net.JoinHostPort(n.address, "53"))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
	z := zone{addresses: map[string][4]byte{}}
	for i, h := range n.spaces {
		z.addresses[hostName(i)+"."] = netip.MustParseAddr(h.Address).As4()
		if i < members {
			z.members = append(z.members, hostName(i)+".")
		}
	}
	go func() {
		defer close(done)
		if err := z.serve(conn); !errors.Is(err, net.ErrClosed) {
			t.Errorf("name server: %v", err)
		}
	}()
	for _, h := range n.spaces {
		dir := filepath.Join("/etc/netns", h.Namespace) // what is in it lies over /etc for who is executed there
		t.Cleanup(func() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		})
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "resolv.conf"), []byte("nameserver "+n.address+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// zone is what a name server knows.
type zone struct {
	members   []string // host names in the SRV records, with a dot at the end
	addresses map[string][4]byte
}

// serve answers until the connection is closed.
func (z *zone) serve(conn net.PacketConn) error {
	for buf := make([]byte, 4096); ; {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return err
		}
		var q dnsmessage.Message
		if err := q.Unpack(buf[:n]); err != nil || len(q.Questions) != 1 {
			continue
		}
		a := z.answer(q.Questions[0])
		a.ID = q.ID
		out, err := a.Pack()
		if err != nil {
			return err
		}
		if _, err := conn.WriteTo(out, from); err != nil {
			return err
		}
	}
}

func (z *zone) answer(q dnsmessage.Question) dnsmessage.Message {
	a := dnsmessage.Message{Header: dnsmessage.Header{Response: true, Authoritative: true}, Questions: []dnsmessage.Question{q}}
	add := func(body dnsmessage.ResourceBody) {
		head := dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: dnsmessage.ClassINET, TTL: 1}
		a.Answers = append(a.Answers, dnsmessage.Resource{Header: head, Body: body})
	}
	address, isHost := z.addresses[q.Name.String()]
	switch {
	case isHost && q.Type == dnsmessage.TypeA:
		add(&dnsmessage.AResource{A: address})
	case isHost: // nothing else is known of it
	case q.Name.String() == "_etcd-server._tcp."+domain+".":
		for _, m := range z.members {
			if q.Type == dnsmessage.TypeSRV {
				add(&dnsmessage.SRVResource{Port: peerPort, Target: dnsmessage.MustNewName(m)})
			}
		}
	default:
		a.RCode = dnsmessage.RCodeNameError
	}
	return a
}
