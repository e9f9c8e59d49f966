package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

const testCluster = 0xabc

// fakeRaft keeps what it is given, and wakes who waits for it.
type fakeRaft struct {
	mu          sync.Mutex
	moved       *sync.Cond
	got         []*raftpb.Message
	unreachable map[uint64]int
	snapshots   map[uint64][]bool
	refuse      error
}

func newFakeRaft() *fakeRaft {
	f := &fakeRaft{unreachable: map[uint64]int{}, snapshots: map[uint64][]bool{}}
	f.moved = sync.NewCond(&f.mu)
	return f
}

func (f *fakeRaft) change(g func()) {
	f.mu.Lock()
	g()
	f.mu.Unlock()
	f.moved.Broadcast()
}

func (f *fakeRaft) Receive(m *raftpb.Message) (err error) {
	f.change(func() {
		if err = f.refuse; err == nil {
			f.got = append(f.got, m)
		}
	})
	return err
}

func (f *fakeRaft) ReportUnreachable(id uint64) { f.change(func() { f.unreachable[id]++ }) }

func (f *fakeRaft) ReportSnapshot(id uint64, ok bool) {
	f.change(func() { f.snapshots[id] = append(f.snapshots[id], ok) })
}

// patience bounds every wait of the tests: what has not happened by then does not.
const patience = 30 * time.Second

// wait waits for what is true under the lock.
func (f *fakeRaft) wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	late := false
	timer := time.AfterFunc(patience, func() { f.change(func() { late = true }) })
	defer timer.Stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	for !ok() {
		if late {
			t.Fatalf("waited in vain for %s; messages %v, unreachable %v, snapshots %v", what, len(f.got), f.unreachable, f.snapshots)
		}
		f.moved.Wait()
	}
}

// fakeServices answers with its fields.
type fakeServices struct {
	mu      sync.Mutex
	gone    map[uint64]bool
	members []Member
	err     error
	token   string
	asked   int64
}

func (s *fakeServices) Members() []Member { return s.members }
func (s *fakeServices) Removed(id uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gone[id]
}
func (s *fakeServices) fail() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}
func (s *fakeServices) Promote(_ context.Context, id uint64, token string) ([]Member, error) {
	s.token, s.asked = token, int64(id)
	return s.members, s.fail()
}
func (s *fakeServices) HashKV(_ context.Context, revision int64) (HashKV, error) {
	s.asked = revision
	return HashKV{Revision: 7, Hash: 42, CompactRevision: -1, HashRevision: 7}, s.fail()
}
func (s *fakeServices) RenewLease(_ context.Context, id int64) (int64, error) {
	s.asked = id
	return 30, s.fail()
}
func (s *fakeServices) LeaseTimeToLive(_ context.Context, id int64, keys bool) (LeaseTTL, error) {
	l := LeaseTTL{ID: id, TTL: 20, GrantedTTL: 30}
	if keys {
		l.Keys = [][]byte{[]byte("a"), []byte("b")}
	}
	return l, s.fail()
}
func (s *fakeServices) DowngradeEnabled(context.Context) (bool, error) { return true, s.fail() }
func (s *fakeServices) Versions() Versions {
	return Versions{Server: "3.7.3", Cluster: "3.7.0", Storage: "3.7.0", Engram: "0.1.0"}
}

// fakeSnapshots sends body and keeps what it receives.
type fakeSnapshots struct {
	mu       sync.Mutex
	body     []byte
	openErr  error
	writeErr error
	recvErr  error
	native   []bool // of Open
	received []byte
	form     []bool // of Receive
	dropped  int
	closed   int
	hold     chan struct{} // if not nil, WriteTo waits for it after the first half
	entered  chan struct{} // if not nil, told when Receive begins
}

type fakeOutgoing struct {
	s *fakeSnapshots
	m *raftpb.Message
}

func (s *fakeSnapshots) Open(_ context.Context, m *raftpb.Message, native bool) (Outgoing, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.native = append(s.native, native)
	if s.openErr != nil {
		return nil, s.openErr
	}
	m = proto.Clone(m).(*raftpb.Message)
	m.Snapshot.Metadata.Index = proto.Uint64(99)
	return &fakeOutgoing{s, m}, nil
}

func (o *fakeOutgoing) Message() *raftpb.Message { return o.m }
func (o *fakeOutgoing) WriteTo(w io.Writer) (int64, error) {
	half := len(o.s.body) / 2
	n, err := w.Write(o.s.body[:half])
	if err == nil && o.s.hold != nil {
		<-o.s.hold
	}
	if err == nil && o.s.writeErr != nil {
		err = o.s.writeErr
	}
	if err != nil {
		return int64(n), err
	}
	more, err := w.Write(o.s.body[half:])
	return int64(n + more), err
}
func (o *fakeOutgoing) Close() error {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	o.s.closed++
	return nil
}

func (s *fakeSnapshots) Receive(_ context.Context, _ *raftpb.Message, native bool, body io.Reader) (func() error, error) {
	if s.entered != nil {
		s.entered <- struct{}{}
	}
	b, err := io.ReadAll(body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.received, s.form = b, append(s.form, native)
	return s.drop, errors.Join(err, s.recvErr)
}

func (s *fakeSnapshots) drop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropped++
	return nil
}

// member is a transport with its listener and everything behind it.
type testMember struct {
	*Transport
	id       uint64
	raft     *fakeRaft
	services *fakeServices
	snaps    *fakeSnapshots
	url      string
	removed  chan error
	server   *http.Server

	mu   sync.Mutex
	deny func(r *http.Request) int // a status to answer instead
}

func (m *testMember) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	deny := m.deny
	m.mu.Unlock()
	if deny != nil {
		if status := deny(r); status != 0 {
			w.WriteHeader(status)
			return
		}
	}
	m.Transport.Handler().ServeHTTP(w, r)
}

func (m *testMember) setDeny(f func(r *http.Request) int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.deny = f
}

func (m *testMember) member() Member { return Member{ID: m.id, PeerURLs: []string{m.url}} }

func newTestMember(t *testing.T, id uint64, change func(*Options)) *testMember {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &testMember{id: id, raft: newFakeRaft(), services: &fakeServices{gone: map[uint64]bool{}}, snaps: &fakeSnapshots{},
		url: "http://" + l.Addr().String(), removed: make(chan error, 8)}
	o := Options{
		MemberID: id, ClusterID: testCluster, Version: "3.7.3", Engram: "0.1.0", SnapshotVersion: 2, PeerURLs: []string{m.url},
		Raft: m.raft, Services: m.services, Snapshots: m.snaps,
		OnRemoved: func(err error) { m.removed <- err }, RedialInterval: 10 * time.Millisecond, ProbeInterval: 50 * time.Millisecond,
		SnapshotPause: time.Millisecond,
		Logger:        slog.New(slog.NewTextHandler(testWriter{t}, nil)),
	}
	if change != nil {
		change(&o)
	}
	m.Transport = New(o)
	m.server = &http.Server{Handler: m, ReadHeaderTimeout: 5 * time.Second, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = m.server.Serve(l)
	}()
	t.Cleanup(func() {
		if err := m.Transport.Close(); err != nil {
			t.Error(err)
		}
		_ = m.server.Close()
		<-served
	})
	return m
}

// testWriter logs to the test while it runs.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", b)
	return len(b), nil
}

// cluster starts n members that know each other and waits until all streams stand.
func cluster(t *testing.T, n int, change func(*Options)) []*testMember {
	t.Helper()
	var all []*testMember
	var members []Member
	for i := range n {
		m := newTestMember(t, uint64(i+1), change)
		all, members = append(all, m), append(members, m.member())
	}
	for _, m := range all {
		m.SetMembers(members, nil)
		m.Start()
	}
	for _, m := range all {
		for _, other := range all {
			if m != other {
				m.waitAttached(t, other.id)
			}
		}
	}
	return all
}

// waitAttached waits until the peer reads both streams.
func (m *testMember) waitAttached(t *testing.T, id uint64) {
	t.Helper()
	waitFor(t, fmt.Sprintf("streams of %x to %x", m.id, id), func() bool {
		p := m.peer(id)
		if p == nil {
			return false
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.attached[msgAppKind] != nil && p.attached[messageKind] != nil
	})
}

// waitFor polls for what tells nobody.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	late := time.After(patience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func message(kind raftpb.MessageType, from, to uint64) *raftpb.Message {
	return &raftpb.Message{Type: kind.Enum(), From: &from, To: &to, Term: proto.Uint64(3)}
}

// msgApp has n entries of size bytes after index.
func msgApp(from, to, term, index uint64, n, size int) *raftpb.Message {
	m := message(raftpb.MsgApp, from, to)
	m.Term, m.LogTerm, m.Index, m.Commit = &term, proto.Uint64(term), &index, proto.Uint64(index)
	for i := range n {
		m.Entries = append(m.Entries, &raftpb.Entry{Term: proto.Uint64(term), Index: proto.Uint64(index + 1 + uint64(i)), Data: make([]byte, size)})
	}
	return m
}
