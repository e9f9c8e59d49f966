package peer

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"github.com/engram-kv/engram/internal/tlsfiles"
	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

var allKinds = []raftpb.MessageType{
	raftpb.MsgProp, raftpb.MsgApp, raftpb.MsgAppResp, raftpb.MsgVote, raftpb.MsgVoteResp, raftpb.MsgHeartbeat, raftpb.MsgHeartbeatResp,
	raftpb.MsgTransferLeader, raftpb.MsgTimeoutNow, raftpb.MsgReadIndex, raftpb.MsgReadIndexResp, raftpb.MsgPreVote, raftpb.MsgPreVoteResp,
}

// oneOfEach has a message of each kind, all fields set that the kind uses.
func oneOfEach(from, to uint64) []*raftpb.Message {
	var all []*raftpb.Message
	for i, k := range allKinds {
		m := message(k, from, to)
		switch k {
		case raftpb.MsgApp:
			m = msgApp(from, to, 3, 7, 2, 10)
		case raftpb.MsgProp, raftpb.MsgReadIndex, raftpb.MsgReadIndexResp:
			m.Entries = []*raftpb.Entry{{Data: []byte("12345678")}}
		}
		m.Context = []byte{byte(i), 2, 3, 4, 5, 6, 7, 8}
		if i%2 == 1 {
			m.Reject, m.RejectHint, m.Vote = proto.Bool(true), proto.Uint64(5), proto.Uint64(6)
		}
		all = append(all, m)
	}
	return all
}

// expect waits until exactly these messages have come, in whatever order.
func (f *fakeRaft) expect(t *testing.T, want []*raftpb.Message) {
	t.Helper()
	f.wait(t, fmt.Sprintf("%d messages", len(want)), func() bool { return len(f.got) >= len(want) })
	f.mu.Lock()
	defer f.mu.Unlock()
	left := slices.Clone(f.got)
	for _, w := range want {
		i := slices.IndexFunc(left, func(g *raftpb.Message) bool { return proto.Equal(g, w) })
		if i < 0 {
			t.Fatalf("%v did not come; left are %v", w, left)
		}
		left = slices.Delete(left, i, i+1)
	}
	if len(left) > 0 {
		t.Fatalf("too much: %v", left)
	}
}

func TestAllKindsBetweenThree(t *testing.T) {
	all := cluster(t, 3, nil)
	for _, m := range all {
		var msgs []*raftpb.Message
		for _, other := range all {
			if m != other {
				msgs = append(msgs, oneOfEach(m.id, other.id)...)
			}
		}
		m.Send(append(msgs, message(raftpb.MsgHeartbeat, m.id, 77), message(raftpb.MsgHeartbeat, m.id, m.id)))
	}
	for _, m := range all {
		var want []*raftpb.Message
		for _, other := range all {
			if m != other {
				want = append(want, oneOfEach(other.id, m.id)...)
			}
		}
		m.raft.expect(t, want)
		for _, other := range all {
			if m == other {
				continue
			}
			if m.ActiveSince(other.id).IsZero() || !m.Native(other.id) {
				t.Fatalf("%x of %x: active since %v, native %v", m.id, other.id, m.ActiveSince(other.id), m.Native(other.id))
			}
			if n := m.raft.unreachable[other.id]; n != 0 {
				t.Fatalf("%x was reported unreachable %d times", other.id, n)
			}
		}
	}
	if a := all[0].ActiveSince(77); !a.IsZero() {
		t.Fatalf("a stranger is active since %v", a)
	}
}

// TestOrder sends what must arrive in its order, on each stream.
func TestOrder(t *testing.T) {
	all := cluster(t, 2, nil)
	const n = 1000
	for i := range n {
		all[0].Send([]*raftpb.Message{
			msgApp(1, 2, 3, uint64(i), 1, i%500),
			{Type: raftpb.MsgHeartbeat.Enum(), From: proto.Uint64(1), To: proto.Uint64(2), Commit: proto.Uint64(uint64(i))},
		})
	}
	raft := all[1].raft
	raft.wait(t, "all messages", func() bool { return len(raft.got) == 2*n })
	var app, beat uint64
	for _, m := range raft.got {
		if m.GetType() == raftpb.MsgApp {
			if m.GetIndex() != app || len(m.GetEntries()) != 1 || m.GetEntries()[0].GetIndex() != app+1 || len(m.GetEntries()[0].GetData()) != int(app%500) {
				t.Fatalf("%v where index %d belongs", m, app)
			}
			app++
		} else if m.GetCommit() != beat {
			t.Fatalf("heartbeat %d where %d belongs", m.GetCommit(), beat)
		} else {
			beat++
		}
	}
}

func TestOnlyTheLastMsgAppResp(t *testing.T) {
	all := cluster(t, 3, nil)
	resp := func(to, index uint64) *raftpb.Message {
		m := message(raftpb.MsgAppResp, 1, to)
		m.Index = &index
		return m
	}
	vote := message(raftpb.MsgVoteResp, 1, 2)
	all[0].Send([]*raftpb.Message{resp(2, 1), vote, resp(3, 1), resp(2, 2), resp(3, 5), resp(2, 3)})
	all[1].raft.expect(t, []*raftpb.Message{vote, resp(2, 3)})
	all[2].raft.expect(t, []*raftpb.Message{resp(3, 5)})
	if got := all[1].raft.got; got[0].GetType() != raftpb.MsgVoteResp {
		t.Fatalf("out of order: %v", got)
	}
}

// TestPipeline refuses the streams, so that all goes by single requests.
func TestPipeline(t *testing.T) {
	a, b := newTestMember(t, 1, nil), newTestMember(t, 2, nil)
	a.setDeny(func(r *http.Request) int {
		if strings.HasPrefix(r.URL.Path, "/raft/stream/") {
			return http.StatusNotFound
		}
		return 0
	})
	a.SetMembers([]Member{a.member(), b.member()}, nil)
	b.SetMembers([]Member{a.member(), b.member()}, nil)
	a.Start()
	b.Start()
	msgs := oneOfEach(1, 2)
	a.Send(msgs)
	b.raft.expect(t, msgs)
	// And back on the streams, which a dials.
	back := oneOfEach(2, 1)
	b.waitAttached(t, 1)
	b.Send(back)
	a.raft.expect(t, back)
}

// rawStream is a peer that asks for a stream by hand and reads only what the test reads.
func rawStream(t *testing.T, m *testMember, id uint64, k kind) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(m.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "GET /raft/stream/%s/%x HTTP/1.1\r\nHost: x\r\nX-Server-From: %x\r\nX-Server-Version: 3.7.1\r\nX-Min-Cluster-Version: 3.0.0\r\n"+
		"X-Etcd-Cluster-ID: %x\r\nX-Raft-To: %x\r\n\r\n", k, id, id, testCluster, m.id)
	return conn
}

// answered reads the headers of the answer.
func answered(t *testing.T, conn net.Conn) *http.Response {
	t.Helper()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}
	return resp
}

// newServer serves f and returns its URL.
func newServer(t *testing.T, f http.HandlerFunc) string {
	s := httptest.NewServer(f)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s.URL
}

// TestStalledMsgApp has a peer that does not read its entries: Send does not wait, heartbeats arrive, others are not delayed, the
// queue is bounded, and the stream ends. A machine that stands still itself for the time of a write is given more.
func TestStalledMsgApp(t *testing.T) {
	for limit := 300 * time.Millisecond; ; limit *= 2 {
		err := stalledMsgApp(t, limit)
		if err == nil {
			return
		}
		if limit > patience/8 {
			t.Fatal(err)
		}
		t.Logf("with %v: %v", limit, err)
	}
}

// stalledMsgApp fails if another stream ended than the one that stood still.
func stalledMsgApp(t *testing.T, limit time.Duration) error {
	t.Helper()
	all := cluster(t, 2, func(o *Options) { o.WriteTimeout = limit })
	a, b := all[0], all[1]
	stuck := newTestMember(t, 3, nil) // it listens, but never dials: its streams are ours
	a.SetMembers([]Member{a.member(), b.member(), stuck.member()}, nil)
	a.Start()
	rawStream(t, a, 3, msgAppKind)
	heard := answered(t, rawStream(t, a, 3, messageKind))
	a.waitAttached(t, 3)
	p := a.peer(3)
	p.mu.Lock()
	stalled := p.attached[msgAppKind]
	p.mu.Unlock()
	const rounds = 400
	data := make([]byte, 1<<20)
	began := time.Now()
	for i := range uint64(rounds) {
		big := msgApp(1, 3, 3, i, 1, 0)
		big.Entries[0].Data = data
		a.Send([]*raftpb.Message{big, msgApp(1, 2, 3, i, 1, 10),
			message(raftpb.MsgHeartbeat, 1, 3), message(raftpb.MsgHeartbeat, 1, 2)})
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Fatalf("Send took %v", d)
	}
	stalled.queue.mu.Lock()
	waiting := stalled.queue.bulk.bytes
	stalled.queue.mu.Unlock()
	if waiting > streamBulk.bytes {
		t.Fatalf("%d bytes wait", waiting)
	}
	lost := 0
	waitFor(t, "the other peer's messages", func() bool {
		a.raft.mu.Lock()
		lost = a.raft.unreachable[2]
		a.raft.mu.Unlock()
		b.raft.mu.Lock()
		defer b.raft.mu.Unlock()
		return lost > 0 || len(b.raft.got) == 2*rounds
	})
	if lost > 0 {
		return fmt.Errorf("the other peer lost messages %d times", lost)
	}
	d := &messageDecoder{frameReader{r: heard.Body}}
	for n := 0; n < rounds; {
		m, err := d.decode()
		if err != nil {
			return fmt.Errorf("after %d heartbeats: %w", n, err)
		}
		if m != nil && m.GetType() != raftpb.MsgHeartbeat {
			t.Fatal(m)
		}
		if m != nil {
			n++
		}
	}
	a.raft.wait(t, "a report", func() bool { return a.raft.unreachable[3] > 0 })
	waitFor(t, "the end of the stalled stream", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.attached[msgAppKind] == nil
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.attached[messageKind] == nil {
		return errors.New("the message stream went with it")
	}
	return nil
}

// TestNewestStreamWins opens the same stream again.
func TestNewestStreamWins(t *testing.T) {
	m := newTestMember(t, 1, nil)
	m.SetMembers([]Member{{ID: 2, PeerURLs: []string{"http://127.0.0.1:1"}}}, nil)
	older := answered(t, rawStream(t, m, 2, messageKind))
	newer := answered(t, rawStream(t, m, 2, messageKind))
	if _, err := io.ReadAll(older.Body); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatal(err)
	}
	m.Send([]*raftpb.Message{message(raftpb.MsgVote, 1, 2)})
	d := &messageDecoder{frameReader{r: newer.Body}}
	if got, err := d.decode(); err != nil || got.GetType() != raftpb.MsgVote {
		t.Fatal(got, err)
	}
	// A stream that is cut while messages wait is reported.
	p := m.peer(2)
	p.mu.Lock()
	o := p.attached[messageKind]
	p.mu.Unlock()
	o.queue.mu.Lock() // holds the writer
	o.queue.urgent.items = append(o.queue.urgent.items, message(raftpb.MsgVote, 1, 2))
	third := make(chan struct{})
	go func() {
		defer close(third)
		answered(t, rawStream(t, m, 2, messageKind))
	}()
	<-o.ended
	o.queue.mu.Unlock()
	<-third
	m.raft.wait(t, "a report", func() bool { return m.raft.unreachable[2] == 1 })
}

// TestLinkHeartbeats turns the clock and reads what a silent and a busy stream say.
func TestLinkHeartbeats(t *testing.T) {
	fake := clock.NewFake(time.Unix(1_000_000, 0))
	m := newTestMember(t, 1, func(o *Options) { o.Clock = fake })
	m.SetMembers([]Member{{ID: 2, PeerURLs: []string{"http://127.0.0.1:1"}}}, nil)
	apps, messages := answered(t, rawStream(t, m, 2, msgAppKind)), answered(t, rawStream(t, m, 2, messageKind))
	fake.WaitAlarms(2)
	for range 3 {
		fake.Advance(5 * time.Second / 3)
		var b [18]byte
		if _, err := io.ReadFull(apps.Body, b[:1]); err != nil || b[0] != 0 {
			t.Fatal(b[0], err)
		}
		if _, err := io.ReadFull(messages.Body, b[:10]); err != nil || string(b[:10]) != "\x00\x00\x00\x00\x00\x00\x00\x02\x08\x08" {
			t.Fatal(b, err)
		}
	}
}

// TestRemoval: a member that was removed hears so, once, and its streams end.
func TestRemoval(t *testing.T) {
	all := cluster(t, 2, nil)
	a, b := all[0], all[1]
	a.services.mu.Lock()
	a.services.gone[2] = true
	a.services.mu.Unlock()
	a.SetMembers([]Member{a.member()}, a.services.Removed)
	select {
	case err := <-b.removed:
		if !errors.Is(err, ErrRemoved) {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("nobody told the removed member")
	}
	if !a.ActiveSince(2).IsZero() {
		t.Fatal("the removed member is active")
	}
	a.Send([]*raftpb.Message{message(raftpb.MsgHeartbeat, 1, 2)})
	b.Send([]*raftpb.Message{message(raftpb.MsgHeartbeatResp, 2, 1)}) // by single request, as its stream is gone
	b.raft.wait(t, "a report", func() bool { return b.raft.unreachable[1] > 0 })
	if len(a.raft.got)+len(b.raft.got)+len(b.removed) != 0 {
		t.Fatal(a.raft.got, b.raft.got, len(b.removed))
	}
}

// TestForeignRemoval: who is of another cluster cannot remove this member.
func TestForeignRemoval(t *testing.T) {
	a, b := newTestMember(t, 1, nil), newTestMember(t, 2, nil)
	asked := make(chan struct{}, 100)
	http410 := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Etcd-Cluster-ID", "dead")
		w.WriteHeader(http.StatusGone)
		select {
		case asked <- struct{}{}:
		default:
		}
	})
	a.SetMembers([]Member{{ID: b.id, PeerURLs: []string{http410}}}, nil)
	a.Start()
	for range 4 {
		<-asked
	}
	if len(a.removed) != 0 {
		t.Fatal(<-a.removed)
	}
}

// TestURLs: a member moves; URLs that fail are passed over; equal URLs leave the streams alone.
func TestURLs(t *testing.T) {
	all := cluster(t, 2, nil)
	a, b := all[0], all[1]
	stream := func() *outgoing {
		p := a.peer(2)
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.attached[messageKind]
	}
	before := stream()
	b.SetMembers([]Member{a.member(), b.member()}, nil)
	b.SetMembers([]Member{{ID: 1, PeerURLs: []string{"http://127.0.0.1:1", "nonsense", a.url}}}, nil) // its stream's URL is still there
	a.Send([]*raftpb.Message{message(raftpb.MsgHeartbeat, 1, 2)})
	b.raft.wait(t, "a heartbeat", func() bool { return len(b.raft.got) == 1 })
	if stream() != before {
		t.Fatal("the stream was dropped")
	}
	dead := strings.Replace(a.url, "127.0.0.1", "127.0.0.2", 1) // nobody listens there
	b.SetMembers([]Member{{ID: 1, PeerURLs: []string{dead, strings.Replace(a.url, "127.0.0.1", "localhost", 1)}}}, nil)
	waitFor(t, "another stream", func() bool { s := stream(); return s != nil && s != before })
}

// TestStrangers: who is no member yet is answered by single requests; who was removed is not.
func TestStrangers(t *testing.T) {
	a, b := newTestMember(t, 1, nil), newTestMember(t, 2, nil)
	b.AddRemote(1, []string{a.url})
	b.Send([]*raftpb.Message{message(raftpb.MsgHeartbeat, 2, 1)})
	a.raft.wait(t, "the heartbeat", func() bool { return len(a.raft.got) == 1 })
	a.Send([]*raftpb.Message{message(raftpb.MsgHeartbeatResp, 1, 2)}) // its headers said where b is
	b.raft.wait(t, "the answer", func() bool { return len(b.raft.got) == 1 })
	if !a.Native(2) || !a.ActiveSince(2).IsZero() {
		t.Fatal("a remote is native as it says, and never active")
	}
	a.services.gone[9] = true
	a.AddRemote(9, []string{b.url})
	a.AddRemote(8, []string{"ftp://x"})
	if a.receiver(9) != nil || a.receiver(8) != nil {
		t.Fatal("remembered")
	}
	for i := range uint64(2 * maxRemotes) {
		a.AddRemote(100+i, []string{b.url})
	}
	if n := len(a.remotes); n != maxRemotes {
		t.Fatalf("%d remotes", n)
	}
	a.SetMembers([]Member{b.member()}, nil)
	if a.receiver(2) != a.peer(2) {
		t.Fatal("the remote was not replaced by the member")
	}
}

// TestFullQueues: what does not fit is dropped and reported, and heartbeats pass what is stuck.
func TestFullQueues(t *testing.T) {
	a := newTestMember(t, 1, nil)
	hold, heard := make(chan struct{}), make(chan struct{}, 1000)
	slow := newServer(t, func(w http.ResponseWriter, r *http.Request) { // takes heartbeats at once, entries never
		body, _ := io.ReadAll(r.Body)
		m := &raftpb.Message{}
		if err := proto.Unmarshal(body, m); err != nil {
			t.Error(err)
		}
		if m.GetType() == raftpb.MsgHeartbeat {
			heard <- struct{}{}
			w.WriteHeader(http.StatusNoContent)
			return
		}
		select {
		case <-hold:
		case <-r.Context().Done():
		}
	})
	defer close(hold)
	a.SetMembers([]Member{{ID: 2, PeerURLs: []string{slow}}}, nil)
	for range bulkWorkers + pipelineBulk.messages + 50 {
		a.Send([]*raftpb.Message{msgApp(1, 2, 3, 1, 1, 1)})
	}
	a.raft.mu.Lock()
	lost := a.raft.unreachable[2]
	a.raft.mu.Unlock()
	if lost < 50 || lost > 50+bulkWorkers { // the workers may not have taken theirs yet
		t.Fatalf("%d lost", lost)
	}
	for range urgentWorkers + pipelineUrgent.messages {
		a.Send([]*raftpb.Message{message(raftpb.MsgHeartbeat, 1, 2)})
	}
	a.raft.mu.Lock()
	more := a.raft.unreachable[2] - lost
	a.raft.mu.Unlock()
	if more > urgentWorkers {
		t.Fatalf("%d heartbeats lost behind entries", more)
	}
	for range urgentWorkers + pipelineUrgent.messages - more {
		select {
		case <-heard:
		case <-time.After(patience):
			t.Fatal("heartbeats wait behind entries")
		}
	}
	q := newQueue()
	big := msgApp(1, 2, 3, 1, 1, streamBulk.bytes)
	if !q.put(big) || q.put(msgApp(1, 2, 3, 1, 0, 0)) || !q.put(message(raftpb.MsgVote, 1, 2)) {
		t.Fatal("the first is taken whatever its size, no second beside it, and votes always")
	}
	if q.next().GetType() != raftpb.MsgVote || q.next() != big || q.next() != nil || q.bulk.bytes != 0 || q.urgent.bytes != 0 {
		t.Fatal("urgent first")
	}
	for range streamUrgent.messages {
		if !q.put(message(raftpb.MsgVote, 1, 2)) {
			t.Fatal("too early")
		}
	}
	if q.put(message(raftpb.MsgVote, 1, 2)) {
		t.Fatal("too many")
	}
	if n := q.close(); n != streamUrgent.messages || q.put(big) || q.next() != nil {
		t.Fatal(n)
	}
}

// TestInactive: a peer that goes away becomes inactive, and active again.
func TestInactive(t *testing.T) {
	all := cluster(t, 2, nil)
	a, b := all[0], all[1]
	first := a.ActiveSince(2)
	if first.IsZero() {
		t.Fatal("not active")
	}
	if err := b.server.Close(); err != nil {
		t.Fatal(err)
	}
	if err := b.Transport.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the peer to be inactive", func() bool { return a.ActiveSince(2).IsZero() })
	reg := prometheus.NewRegistry()
	reg.MustRegister(a.opts.Metrics.Collectors()...)
	gathered, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range gathered {
		m := f.GetMetric()[0]
		values[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
	}
	if values["etcd_network_known_peers"] != 1 || values["etcd_network_active_peers"] != 0 || values["etcd_network_disconnected_peers_total"] < 1 {
		t.Fatal(values)
	}
	c := newTestMember(t, 2, nil)
	c.SetMembers([]Member{a.member()}, nil)
	c.Start()
	a.SetMembers([]Member{c.member()}, nil)
	waitFor(t, "the peer to be active", func() bool { return a.ActiveSince(2).After(first) })
}

// TestFailedRequest: a single request that fails says nothing of a peer whose streams stand.
func TestFailedRequest(t *testing.T) {
	all := cluster(t, 2, nil)
	a, b := all[0], all[1]
	b.setDeny(func(r *http.Request) int {
		if r.Method == http.MethodPost {
			return http.StatusInternalServerError
		}
		return 0
	})
	since := a.ActiveSince(2)
	large := message(raftpb.MsgProp, 1, 2)
	large.Entries = []*raftpb.Entry{{Data: make([]byte, bulkFrame)}}
	a.Send([]*raftpb.Message{large, msgSnap(1, 2)})
	a.raft.wait(t, "both reports", func() bool { return a.raft.unreachable[2] == 2 })
	if got := a.ActiveSince(2); since.IsZero() || !got.Equal(since) {
		t.Fatalf("active since %v, before since %v", got, since)
	}
}

// TestReversed puts a leader's batch that came backwards in order.
func TestReversed(t *testing.T) {
	a := newTestMember(t, 1, nil)
	sent := make(chan struct{})
	leader := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/raft/stream/msgapp/1" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set(versionHeader, "3.7.1")
		e := &msgAppEncoder{}
		var b []byte
		for i := uint64(9); i > 3; i-- {
			b, _ = e.append(b, msgApp(2, 1, 5, i, 1, 5))
			b, _ = e.append(b, nil)
		}
		b, _ = e.append(b, msgApp(2, 1, 6, 1, 1, 5))
		_, _ = w.Write(b)
		_ = http.NewResponseController(w).Flush()
		<-sent
	})
	defer close(sent)
	a.SetMembers([]Member{{ID: 2, PeerURLs: []string{leader}}}, nil)
	a.Start()
	a.raft.wait(t, "the batch", func() bool { return len(a.raft.got) >= 7 })
	for i, m := range a.raft.got[:6] {
		if m.GetIndex() != uint64(4+i) || m.GetTerm() != 5 {
			t.Fatalf("%d: %v", i, m)
		}
	}
	if a.raft.got[6].GetTerm() != 6 {
		t.Fatal("a later term moved before an earlier one")
	}
}

// TestRedial counts dials of a peer that refuses: one for each stream and interval.
func TestRedial(t *testing.T) {
	fake := clock.NewFake(time.Unix(1_000_000, 0))
	a := newTestMember(t, 1, func(o *Options) { o.Clock, o.RedialInterval, o.ProbeInterval = fake, 100*time.Millisecond, time.Hour })
	var dials atomic.Int32
	refusing := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/raft/stream/") {
			if r.Header.Get("X-Raft-To") != "2" || r.Header.Get("X-Server-From") != "1" || r.Header.Get("X-Server-Version") != "3.7.3" ||
				r.Header.Get("X-Min-Cluster-Version") != "3.0.0" || r.Header.Get("X-Etcd-Cluster-ID") != "abc" || r.Header.Get("X-PeerURLs") != a.url {
				t.Error(r.Header)
			}
			dials.Add(1)
		}
		w.WriteHeader(http.StatusNotFound)
	})
	a.SetMembers([]Member{{ID: 2, PeerURLs: []string{refusing}}}, nil)
	a.Start()
	for round := range int32(5) {
		fake.WaitAlarms(3) // two readers and the prober sleep
		if n := dials.Load(); n != 2*(round+1) {
			t.Fatalf("%d dials in round %d", n, round)
		}
		fake.Advance(99 * time.Millisecond)
		fake.WaitAlarms(3)
		if n := dials.Load(); n != 2*(round+1) {
			t.Fatalf("%d dials too early in round %d", n, round)
		}
		fake.Advance(time.Millisecond)
		waitFor(t, "the next dials", func() bool { return dials.Load() == 2*(round+2) })
	}
}

// TestProbe: a peer whose clock is off is named once, and once more when it is right again.
func TestProbe(t *testing.T) {
	var said logLines
	a := newTestMember(t, 1, func(o *Options) {
		o.Logger, o.ProbeInterval = slog.New(slog.NewTextHandler(&said, nil)), time.Millisecond
	})
	var off atomic.Int64
	var probes atomic.Int32
	other := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/raft/probing" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		probes.Add(1)
		_ = json.NewEncoder(w).Encode(health{OK: true, Now: time.Now().Add(time.Duration(off.Load()))})
	})
	some := func() {
		from := probes.Load()
		waitFor(t, "probes", func() bool { return probes.Load() > from+3 })
	}
	a.SetMembers([]Member{{ID: 2, PeerURLs: []string{other}}}, nil)
	a.Start()
	some()
	if n := said.count("clock"); n != 0 {
		t.Fatal(said.text())
	}
	off.Store(int64(-time.Hour))
	some()
	if said.count("the clock of a peer differs") != 1 || said.count("difference=1h0m0") != 1 && said.count("difference=59m59") != 1 {
		t.Fatal(said.text())
	}
	off.Store(0)
	some()
	if said.count("agrees again") != 1 || said.count("clock") != 2 {
		t.Fatal(said.text())
	}
}

// logLines keeps what was logged.
type logLines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logLines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logLines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logLines) count(s string) int { return strings.Count(l.text(), s) }

// TestUnfit: peers of another cluster or of too old a version are not read; the reason is logged once.
func TestUnfit(t *testing.T) {
	for name, tc := range map[string]struct {
		version, cluster, want string
	}{
		"version missing": {"", "abc", "which has no streams"},
		"version broken":  {"x.y", "abc", "incompatible version"},
		"version 2.0":     {"2.0.9", "abc", "which has no streams"},
		"another cluster": {"3.7.0", "dead", "cluster ID mismatch"},
		"old but fit":     {"3.4.0", "abc", ""},
		"newer":           {"3.8.0", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			var said logLines
			a := newTestMember(t, 1, func(o *Options) { o.Logger = slog.New(slog.NewTextHandler(&said, nil)) })
			var asked atomic.Int32
			stop := make(chan struct{})
			other := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/raft/stream/message/1" {
					w.WriteHeader(http.StatusNotFound)
					return
				}
				if tc.version != "" {
					w.Header().Set(versionHeader, tc.version)
				}
				w.Header().Set(clusterHeader, tc.cluster)
				if tc.cluster == "" {
					w.Header().Del(clusterHeader)
				}
				b, _ := messageEncoder{}.append(nil, message(raftpb.MsgVote, 2, 1))
				_, _ = w.Write(b)
				_ = http.NewResponseController(w).Flush()
				if asked.Add(1); tc.want == "" {
					<-stop
				}
			})
			defer close(stop)
			a.SetMembers([]Member{{ID: 2, PeerURLs: []string{other}}}, nil)
			a.Start()
			if tc.want == "" {
				a.raft.wait(t, "a message", func() bool { return len(a.raft.got) == 1 })
				return
			}
			waitFor(t, "dials", func() bool { return asked.Load() > 3 })
			if said.count(tc.want) < 1 || said.count("stream=message") != 1 || len(a.raft.got) != 0 {
				t.Fatal(said.text(), a.raft.got)
			}
		})
	}
}

// TestTLSAndSockets: two members over TLS with certificates, and two over unix sockets.
func TestTLSAndSockets(t *testing.T) {
	t.Run("TLS", func(t *testing.T) {
		auto := tlsfiles.Options{Auto: &tlsfiles.Auto{Dir: t.TempDir(), Hosts: []string{"127.0.0.1"}}}
		config, err := tlsfiles.Client(auto)
		if err != nil {
			t.Fatal(err)
		}
		pair(t, func(l net.Listener) (net.Listener, string) {
			wrap, err := tlsfiles.Wrapper(auto)
			if err != nil {
				t.Fatal(err)
			}
			return wrap(l), "https://" + l.Addr().String()
		}, config)
	})
	t.Run("unix", func(t *testing.T) {
		dir, n := t.TempDir(), 0
		pair(t, func(l net.Listener) (net.Listener, string) {
			l.Close()
			n++
			path := filepath.Join(dir, strconv.Itoa(n))
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			return l, "unix://" + path
		}, nil)
	})
}

// pair sends one of each message and a snapshot both ways between two members that listen as listen says.
func pair(t *testing.T, listen func(net.Listener) (net.Listener, string), config *tls.Config) {
	var all []*testMember
	var members []Member
	for id := uint64(1); id <= 2; id++ {
		m := newTestMember(t, id, func(o *Options) { o.TLS = config })
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l, url := listen(l)
		go func() { _ = m.server.Serve(l) }()
		all, members = append(all, m), append(members, Member{ID: id, PeerURLs: []string{url}})
	}
	for _, m := range all {
		m.snaps.body = []byte("snapshot")
		m.SetMembers(members, nil)
		m.Start()
	}
	for i, m := range all {
		m.waitAttached(t, all[1-i].id)
		m.Send(oneOfEach(m.id, all[1-i].id))
	}
	for i, m := range all {
		m.raft.expect(t, oneOfEach(all[1-i].id, m.id))
	}
	for i, m := range all {
		m.Send([]*raftpb.Message{msgSnap(m.id, all[1-i].id)})
		m.raft.wait(t, "the snapshot", func() bool { return len(m.raft.snapshots[all[1-i].id]) == 1 })
		if !m.raft.snapshots[all[1-i].id][0] {
			t.Fatal("the snapshot failed")
		}
	}
}
