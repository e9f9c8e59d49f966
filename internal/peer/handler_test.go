package peer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// call sends one request; headers are "name: value".
func call(t *testing.T, method, url string, body []byte, headers ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest(method, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(got)
}

// TestPaths asks every path in every way it can be refused; the answers were taken from etcd 3.7.3.
func TestPaths(t *testing.T) {
	m := newTestMember(t, 1, nil)
	m.services.gone[9] = true
	m.services.members = []Member{{ID: 2, IsLearner: true}, {ID: 1, PeerURLs: []string{"http://a:1"}, Name: "a", ClientURLs: []string{"http://a:2"}}}
	m.SetMembers([]Member{{ID: 2, PeerURLs: []string{"http://127.0.0.1:1"}}}, nil)
	good := []string{"X-Server-Version: 3.7.1", "X-Min-Cluster-Version: 3.0.0", "X-Etcd-Cluster-ID: abc", "X-Server-From: 2"}
	with := func(more ...string) []string { return append(append([]string(nil), good...), more...) }
	raw := func(m *raftpb.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	beat := message(raftpb.MsgHeartbeat, 2, 1)
	snap := message(raftpb.MsgSnap, 2, 1)
	const members = `[{"id":1,"peerURLs":["http://a:1"],"name":"a","clientURLs":["http://a:2"]},{"id":2,"peerURLs":null,"isLearner":true}]` + "\n"
	for _, tc := range []struct {
		request string
		headers []string
		body    []byte
		refuse  error // of raft and services
		status  int
		want    string
		header  string // that the answer must have
	}{
		{"GET /raft", good, nil, nil, 405, "Method Not Allowed\n", "Allow: POST"},
		{"POST /raft", nil, nil, nil, 412, "incompatible version\n", "X-Etcd-Cluster-Id: abc"},
		{"POST /raft", []string{"X-Server-Version: nonsense"}, nil, nil, 412, "incompatible version\n", ""},
		{"POST /raft", []string{"X-Server-Version: 2.3.0", "X-Min-Cluster-Version: 2.0.0", "X-Etcd-Cluster-ID: abc"}, nil, nil, 412, "incompatible version\n", ""},
		{"POST /raft", []string{"X-Server-Version: 3.8.0", "X-Min-Cluster-Version: 3.8.0", "X-Etcd-Cluster-ID: abc"}, nil, nil, 412, "incompatible version\n", ""},
		{"POST /raft", good[:2], nil, nil, 412, "cluster ID mismatch\n", ""},
		{"POST /raft", append(good[:2:2], "X-Etcd-Cluster-ID: 0abc"), nil, nil, 412, "cluster ID mismatch\n", ""},
		{"POST /raft", good, []byte("\xff"), nil, 400, "error unmarshalling raft message\n", ""},
		{"POST /raft", good, raw(beat), nil, 204, "", "X-Engram-Version: 0.1.0"},
		{"POST /raft", []string{"X-Server-Version: 3.0.0", "X-Min-Cluster-Version: 3.7.0", "X-Etcd-Cluster-ID: abc"}, raw(beat), nil, 204, "", ""},
		{"POST /raft", good, raw(beat), errors.New("full"), 500, "error processing raft message\n", ""},
		{"POST /raft", good, raw(message(raftpb.MsgHeartbeat, 9, 1)), nil, 500, "error processing raft message\n", ""},
		{"POST /raft", good, raw(message(raftpb.MsgHeartbeat, 2, 3)), nil, 500, "error processing raft message\n", ""},
		{"POST /raft", good, raw(message(raftpb.MsgHup, 2, 1)), nil, 500, "error processing raft message\n", ""},
		{"POST /raft", good, raw(message(raftpb.MsgSnap, 2, 1)), nil, 500, "error processing raft message\n", ""},
		{"POST /raft", good, raw(message(raftpb.MsgProp, 77, 1)), nil, 204, "", ""}, // from whomever
		{"POST /raft/stream/msgapp/2", good, nil, nil, 405, "Method Not Allowed\n", "Allow: GET"},
		{"GET /raft/stream/msgapp/2", nil, nil, nil, 412, "incompatible version\n", "X-Server-Version: 3.7.3"},
		{"GET /raft/stream/msgapp/2", good[:2], nil, nil, 412, "cluster ID mismatch\n", ""},
		{"GET /raft/stream/nothing/zz", good, nil, nil, 404, "invalid path\n", ""},
		{"GET /raft/stream/msgapp/zz", good, nil, nil, 404, "invalid from\n", ""},
		{"GET /raft/stream/message/", good, nil, nil, 404, "invalid from\n", "X-Etcd-Cluster-Id: abc"},
		{"GET /raft/stream/message/9", good, nil, nil, 410, "removed member\n", "X-Etcd-Cluster-Id: abc"},
		{"GET /raft/stream/message/7", good, nil, nil, 404, "error sender not found\n", ""},
		{"GET /raft/stream/message/2", good, nil, nil, 412, "to field mismatch\n", ""},
		{"GET /raft/stream/message/2", with("X-Raft-To: 01"), nil, nil, 412, "to field mismatch\n", ""},
		{"GET /raft/snapshot", good, nil, nil, 405, "Method Not Allowed\n", "Allow: POST"},
		{"POST /raft/snapshot", nil, nil, nil, 412, "incompatible version\n", ""},
		{"POST /raft/snapshot", good, []byte("x"), nil, 400, "failed to decode raft message (unexpected EOF)\n", ""},
		{"POST /raft/snapshot", good, []byte("\x00\x00\x00\x00\x04\x00\x00\x01"), nil, 400, "failed to decode raft message (", ""},
		{"POST /raft/snapshot", good, []byte("\x80\x00\x00\x00\x00\x00\x00\x00"), nil, 400, "failed to decode raft message (", ""},
		{"POST /raft/snapshot", good, func() []byte { b, _ := appendMessage(nil, beat); return b }(), nil, 400, "wrong raft message type\n", ""},
		{"POST /raft/snapshot", good, func() []byte { b, _ := appendMessage(nil, snap); return b }(), nil, 400, "wrong raft message type\n", ""},
		{"GET /members", nil, nil, nil, 200, members, "X-Etcd-Cluster-Id: abc"},
		{"POST /members", nil, nil, nil, 405, "Method Not Allowed\n", ""},
		{"GET /members/", nil, nil, nil, 404, "404 page not found\n", ""},
		{"GET /members/promote/2", nil, nil, nil, 405, "Method Not Allowed\n", "Allow: POST"},
		{"POST /members/promote/xx", nil, nil, nil, 404, "member xx not found in cluster\n", ""},
		{"POST /members/promote/2", nil, nil, nil, 200, members, "X-Etcd-Cluster-Id: abc"},
		{"POST /members/promote/2", nil, nil, ErrMemberNotFound, 404, "membership: ID not found\n", ""},
		{"POST /members/promote/2", nil, nil, fmt.Errorf("so: %w", ErrNotLearner), 412, "membership: can only promote a learner member\n", ""},
		{"POST /members/promote/2", nil, nil, ErrLearnerNotReady, 412, "etcdserver: can only promote a learner member which is in sync with leader\n", ""},
		{"POST /members/promote/2", nil, nil, errors.New("secret"), 500, `{"message":"Internal Server Error"}`, ""},
		{"GET /members/hashkv", nil, []byte("{}"), nil, 200, `{"header":{"revision":7},"hash":42,"compact_revision":-1,"hash_revision":7}`, ""},
		{"GET /members/hashkv", nil, []byte("x"), nil, 400, "error unmarshalling request\n", ""},
		{"GET /members/hashkv", []string{"X-Etcd-Cluster-ID: 1"}, []byte("{}"), nil, 412, "cluster ID mismatch\n", ""},
		{"GET /members/hashkv", good, []byte("{}"), ErrFutureRevision, 400, "mvcc: required revision is a future revision\n", ""},
		{"GET /members/hashkv", good, []byte("{}"), ErrCompacted, 400, "mvcc: required revision has been compacted\n", ""},
		{"GET /members/hashkv", good, []byte("{}"), errors.New("disk"), 500, "disk\n", ""},
		{"POST /members/hashkv", good, []byte("{}"), nil, 405, "Method Not Allowed\n", ""},
		{"GET /leases", nil, nil, nil, 405, "Method Not Allowed\n", ""},
		{"POST /leases", nil, []byte("x"), nil, 400, "error unmarshalling request\n", ""},
		{"POST /leases", nil, make([]byte, maxRequestBody+1), nil, 413, "request body too large\n", ""},
		{"POST /leases", nil, []byte{8, 5}, nil, 200, "\x10\x05\x18\x1e", "Content-Type: application/protobuf"},
		{"POST /leases", nil, []byte{8, 5}, ErrLeaseNotFound, 404, "lease not found\n", ""},
		{"POST /leases", nil, []byte{8, 5}, ErrNotPrimary, 400, "not a primary lessor\n", ""},
		{"POST /leases", nil, []byte{8, 5}, ErrNotCaughtUp, 408, "waiting for node to catch up its applied index has timed out\n", ""},
		{"POST /leases/internal", nil, nil, nil, 400, "error unmarshalling request\n", ""},
		{"POST /leases/internal", nil, []byte{10, 4, 8, 5, 16, 1}, nil, 200, "\x0a\x0e\x0a\x00\x10\x05\x18\x14\x20\x1e\x2a\x01a\x2a\x01b", ""},
		{"POST /leases/internal", nil, []byte{10, 2, 8, 5}, nil, 200, "\x0a\x08\x0a\x00\x10\x05\x18\x14\x20\x1e", ""},
		{"POST /leases/internal", nil, []byte{10, 2, 8, 5}, ErrLeaseNotFound, 404, "lease not found\n", ""},
		{"POST /leases/internal", nil, []byte{10, 2, 8, 5}, ErrNotPrimary, 500, "not a primary lessor\n", ""},
		{"GET /downgrade/enabled", nil, nil, nil, 200, "true", "X-Etcd-Cluster-Id: abc"},
		{"GET /downgrade/enabled", nil, nil, errors.New("no leader"), 500, "failed linearized read: no leader\n", ""},
		{"PUT /downgrade/enabled", nil, nil, nil, 405, "Method Not Allowed\n", ""},
		{"GET /version", nil, nil, nil, 200, `{"etcdserver":"3.7.3","etcdcluster":"3.7.0","storage":"3.7.0","engram":"0.1.0"}`, "Content-Type: application/json"},
		{"POST /version", nil, nil, nil, 405, "Method Not Allowed\n", "Allow: GET"},
		{"GET /health", nil, nil, nil, 404, "404 page not found\n", ""},
		{"GET /raft/nothing", good, nil, nil, 404, "404 page not found\n", ""},
	} {
		m.raft.change(func() { m.raft.refuse = tc.refuse })
		m.services.mu.Lock()
		m.services.err = tc.refuse
		m.services.mu.Unlock()
		method, path, _ := strings.Cut(tc.request, " ")
		resp, got := call(t, method, m.url+path, tc.body, tc.headers...)
		if resp.StatusCode != tc.status || got != tc.want && !(strings.HasSuffix(tc.want, "(") && strings.HasPrefix(got, tc.want)) {
			t.Errorf("%s %q: %d %q, want %d %q", tc.request, tc.headers, resp.StatusCode, got, tc.status, tc.want)
		}
		if name, value, ok := strings.Cut(tc.header, ": "); ok && resp.Header.Get(name) != value {
			t.Errorf("%s: header %s is %q, want %q", tc.request, name, resp.Header.Get(name), value)
		}
	}
	for _, method := range []string{"GET", "POST"} {
		_, got := call(t, method, m.url+"/raft/probing", nil)
		var h health
		if err := json.Unmarshal([]byte(got), &h); err != nil || !h.OK || time.Since(h.Now).Abs() > time.Minute || !strings.HasSuffix(got, "\n") {
			t.Errorf("probing: %q %v", got, err)
		}
	}
	if len(m.raft.got) != 3 {
		t.Errorf("raft has %v", m.raft.got)
	}
}

func TestClient(t *testing.T) {
	m := newTestMember(t, 1, nil)
	m.services.members = []Member{{ID: 2, IsLearner: true}, {ID: 1 << 63, PeerURLs: []string{"http://a:1"}, Name: "a", ClientURLs: []string{"http://a:2"}}}
	c := NewClient(ClientOptions{ClusterID: testCluster, Engram: "0.1.0"})
	defer c.Close()
	ctx := context.Background()
	urls := []string{"http://127.0.0.1:1", newServer(t, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, m.url, http.StatusFound) }), m.url}
	cluster, members, err := c.Members(ctx, m.url)
	if err != nil || cluster != testCluster || !reflect.DeepEqual(members, m.services.members) {
		t.Error(cluster, members, err)
	}
	if v, err := c.Version(ctx, urls); err != nil || v != m.services.Versions() {
		t.Error(v, err)
	}
	if on, err := c.DowngradeEnabled(ctx, urls); err != nil || !on {
		t.Error(on, err)
	}
	members, err = c.Promote(ctx, urls, 1<<63, "token.7")
	if err != nil || !reflect.DeepEqual(members, m.services.members) || m.services.token != "token.7" || uint64(m.services.asked) != 1<<63 {
		t.Error(members, err, m.services.token, m.services.asked)
	}
	if h, err := c.HashKV(ctx, urls, 5); err != nil || h != (HashKV{7, 42, -1, 7}) || m.services.asked != 5 {
		t.Error(h, err)
	}
	if ttl, err := c.RenewLease(ctx, urls, -6); err != nil || ttl != 30 || m.services.asked != -6 {
		t.Error(ttl, err)
	}
	for _, keys := range []bool{false, true} {
		want := LeaseTTL{ID: 6, TTL: 20, GrantedTTL: 30}
		if keys {
			want.Keys = [][]byte{[]byte("a"), []byte("b")}
		}
		if l, err := c.LeaseTimeToLive(ctx, urls, 6, keys); err != nil || !reflect.DeepEqual(l, want) {
			t.Error(l, err)
		}
	}
	errs := map[string]func() error{
		"promote": func() error { _, err := c.Promote(ctx, urls, 2, ""); return err },
		"hash":    func() error { _, err := c.HashKV(ctx, urls, 2); return err },
		"renew":   func() error { _, err := c.RenewLease(ctx, urls, 2); return err },
		"ttl":     func() error { _, err := c.LeaseTimeToLive(ctx, urls, 2, true); return err },
	}
	for _, tc := range []struct {
		call string
		err  error
	}{
		{"promote", ErrMemberNotFound}, {"promote", ErrNotLearner}, {"promote", ErrLearnerNotReady},
		{"hash", ErrFutureRevision}, {"hash", ErrCompacted},
		{"renew", ErrLeaseNotFound}, {"renew", ErrNotPrimary}, {"renew", ErrNotCaughtUp},
		{"ttl", ErrLeaseNotFound}, {"ttl", ErrNotPrimary}, {"ttl", ErrNotCaughtUp},
	} {
		m.services.mu.Lock()
		m.services.err = tc.err
		m.services.mu.Unlock()
		if err := errs[tc.call](); !errors.Is(err, tc.err) {
			t.Errorf("%s: %v, want %v", tc.call, err, tc.err)
		}
	}
	m.services.err = nil
	other := NewClient(ClientOptions{ClusterID: 5})
	defer other.Close()
	if _, err := other.HashKV(ctx, []string{m.url}, 0); !errors.Is(err, ErrClusterMismatch) {
		t.Error(err)
	}
	if _, _, err := other.Members(ctx, m.url); !errors.Is(err, ErrClusterMismatch) {
		t.Error(err)
	}
	for name, body := range map[string]string{"no header": `{"hash":1}`, "no JSON": "x"} {
		bad := newServer(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })
		if h, err := c.HashKV(ctx, []string{bad}, 0); err == nil {
			t.Errorf("%s: %v", name, h)
		}
		if _, _, err := c.Members(ctx, bad); err == nil {
			t.Errorf("%s: accepted members", name)
		}
	}
	silent := newServer(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	var quick *Client
	for limit := 50 * time.Millisecond; ; limit *= 2 { // the second has as long, too
		quick = NewClient(ClientOptions{RequestTimeout: limit})
		defer quick.Close()
		v, err := quick.Version(ctx, []string{silent, m.url})
		if err == nil && v.Server == "3.7.3" {
			break
		}
		if err == nil || limit > patience/4 {
			t.Fatal(v, err)
		}
	}
	if _, err := quick.Version(ctx, nil); err == nil {
		t.Error("no URLs, no error")
	}
	huge := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
		for b := make([]byte, 1<<20); ; {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	})
	slow := NewClient(ClientOptions{RequestTimeout: 10 * patience}) // its size is to end it, and a slow machine takes long to read as much
	defer slow.Close()
	if _, err := slow.Version(ctx, []string{huge}); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Error(err)
	}
}
