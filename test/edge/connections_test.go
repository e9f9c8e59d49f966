package edge

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/engram-kv/engram/test/edge/member"
	"github.com/engram-kv/engram/test/internal/cluster"
)

// TestMoreConnectionsThanFiles has clients open more connections than a member may have files. They get no more than it can
// do without: it writes on, past the end of one file of its log and more, and lets in who waits when others leave.
func TestMoreConnectionsThanFiles(t *testing.T) {
	const files = 300
	if !member.Engram() {
		t.Skip("another program's files are its own")
	}
	p, err := cluster.Build(cluster.Chosen())
	check(t, err)
	dir := t.TempDir()
	limited := filepath.Join(dir, "limited")
	check(t, os.WriteFile(limited, fmt.Appendf(nil, "#!/bin/sh\nulimit -n %d && exec %s \"$@\"\n", files, p.Path), 0o700))
	p.Path = limited
	c := cluster.New(dir)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.Logs())
		}
		check(t, c.Close())
	})
	check(t, c.Start(t.Context(), p))
	m := c.Members()[0]
	client, err := m.Client()
	check(t, err)
	var conns []net.Conn
	for range files {
		conn, err := net.Dial("tcp", m.Endpoint())
		check(t, err)
		defer conn.Close()
		// Who speaks may stay.
		_, err = conn.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
		check(t, err)
		conns = append(conns, conn)
	}
	value := strings.Repeat("v", 1<<20)
	for i := range 80 {
		_, err := client.Put(t.Context(), fmt.Sprintf("k/%d", i%10), value)
		check(t, err)
	}
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.PID()))
	check(t, err)
	if len(open) >= files {
		t.Errorf("the member has %d files open", len(open))
	}
	for _, conn := range conns {
		conn.Close()
	}
	late, err := clientv3.New(clientv3.Config{Endpoints: []string{m.ClientURL}})
	check(t, err)
	defer late.Close()
	_, err = late.Get(t.Context(), "k/1")
	check(t, err)
}
