package peer

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/engram-kv/engram/internal/clock"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

func msgSnap(from, to uint64) *raftpb.Message {
	m := message(raftpb.MsgSnap, from, to)
	m.Snapshot = &raftpb.Snapshot{Metadata: &raftpb.SnapshotMetadata{Index: proto.Uint64(10), Term: proto.Uint64(2),
		ConfState: &raftpb.ConfState{Voters: []uint64{1, 2}}}}
	return m
}

// TestSnapshot sends one in each form. An etcd in the receiver's place gets etcd's form.
func TestSnapshot(t *testing.T) {
	for name, tc := range map[string]struct {
		receiver func(*Options)
		native   bool
	}{
		"native":          {func(*Options) {}, true},
		"etcd":            {func(o *Options) { o.Engram = "" }, false},
		"another version": {func(o *Options) { o.SnapshotVersion++ }, false},
		"an older Engram": {func(o *Options) { o.SnapshotVersion = 0 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			native := tc.native
			all := cluster(t, 2, func(o *Options) {
				if o.MemberID == 2 {
					tc.receiver(o)
				}
			})
			a, b := all[0], all[1]
			a.snaps.body = bytes.Repeat([]byte("0123456789"), 300_000)
			a.Send([]*raftpb.Message{msgSnap(1, 2)})
			a.raft.wait(t, "the report", func() bool { return len(a.raft.snapshots[2]) == 1 })
			if !a.raft.snapshots[2][0] || a.raft.unreachable[2] != 0 || !reflect.DeepEqual(a.snaps.native, []bool{native}) {
				t.Fatal(a.raft.snapshots, a.raft.unreachable, a.snaps.native)
			}
			b.raft.wait(t, "the message", func() bool { return len(b.raft.got) == 1 })
			if i := b.raft.got[0].GetSnapshot().GetMetadata().GetIndex(); i != 99 {
				t.Fatalf("the message is of index %d, not that of what was opened", i)
			}
			if !bytes.Equal(b.snaps.received, a.snaps.body) || !reflect.DeepEqual(b.snaps.form, []bool{native}) || a.snaps.closed != 1 {
				t.Fatal(len(b.snaps.received), b.snaps.form, a.snaps.closed)
			}
		})
	}
}

// TestNativeSnapshotToEtcd: the head of the native form is one that etcd refuses before it stores anything.
func TestNativeSnapshotToEtcd(t *testing.T) {
	a := newTestMember(t, 1, nil)
	heads := make(chan []byte, 1)
	etcd := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		head := make([]byte, 8)
		if _, err := io.ReadFull(r.Body, head); err == nil {
			heads <- head
		}
		http.Error(w, "failed to decode raft message (too long)", http.StatusBadRequest)
	})
	a.SetMembers([]Member{{ID: 2, PeerURLs: []string{etcd}}}, nil)
	a.peer(2).native.Store(true)
	a.peer(2).form.Store(true)
	a.snaps.body = []byte("x")
	a.Send([]*raftpb.Message{msgSnap(1, 2)})
	a.raft.wait(t, "the report", func() bool { return len(a.raft.snapshots[2]) == 1 })
	if head := <-heads; head[0] != 0x80 || a.raft.snapshots[2][0] || a.Native(2) {
		t.Fatalf("%x, %v, native %v", head, a.raft.snapshots[2], a.Native(2))
	}
}

// TestSnapshotFails fails at each step; raft hears it every time, and the opened one is closed.
func TestSnapshotFails(t *testing.T) {
	oops := errors.New("oops")
	for name, tc := range map[string]struct {
		break_   func(a, b *testMember)
		received bool // in part
	}{
		"open":    {func(a, _ *testMember) { a.snaps.openErr = oops }, false},
		"write":   {func(a, _ *testMember) { a.snaps.writeErr = oops }, true},
		"receive": {func(_, b *testMember) { b.snaps.recvErr = oops }, true},
		"raft":    {func(_, b *testMember) { b.raft.refuse = oops }, true},
		"dead":    {func(_, b *testMember) { b.server.Close() }, false},
		"403": {func(_, b *testMember) {
			b.setDeny(func(r *http.Request) int { return http.StatusForbidden })
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := newTestMember(t, 1, nil), newTestMember(t, 2, nil)
			a.snaps.body = make([]byte, 1<<20)
			tc.break_(a, b)
			a.SetMembers([]Member{b.member()}, nil)
			b.SetMembers([]Member{a.member()}, nil)
			a.Send([]*raftpb.Message{msgSnap(1, 2)})
			a.raft.wait(t, "the report", func() bool { return len(a.raft.snapshots[2]) == 1 })
			if a.raft.snapshots[2][0] || a.raft.unreachable[2] != 1 {
				t.Fatal(a.raft.snapshots, a.raft.unreachable)
			}
			if want := map[bool]int{true: 0, false: 1}[name == "open"]; a.snaps.closed != want {
				t.Fatalf("closed %d times", a.snaps.closed)
			}
			waitFor(t, "the receiver", func() bool {
				b.snaps.mu.Lock()
				defer b.snaps.mu.Unlock()
				return len(b.snaps.form) > 0 == tc.received
			})
			if dropped := map[bool]int{true: 1}[name == "raft"]; b.snaps.dropped != dropped {
				t.Fatalf("dropped %d times", b.snaps.dropped)
			}
			if len(b.raft.got) != 0 || len(a.removed) != 0 { // the 403 comes from no cluster
				t.Fatal(b.raft.got, len(a.removed))
			}
		})
	}
}

// TestOneSnapshotAtATime: a second for the same member is dropped silently, one beyond the queue loudly; a second receiver waits for
// nobody.
func TestOneSnapshotAtATime(t *testing.T) {
	a := newTestMember(t, 1, nil)
	hold := make(chan struct{})
	a.snaps.body, a.snaps.hold = make([]byte, 1000), hold
	var members []Member
	all := map[uint64]*testMember{}
	for id := uint64(2); id < 2+snapshotsAtOnce+maxSnapshotQueue+1; id++ {
		m := newTestMember(t, id, nil)
		all[id] = m
		members = append(members, m.member())
	}
	a.SetMembers(members, nil)
	for range 2 {
		a.Send([]*raftpb.Message{msgSnap(1, 2), msgSnap(1, 3)})
		waitFor(t, "two to be sent", func() bool {
			a.snaps.mu.Lock()
			defer a.snaps.mu.Unlock()
			return len(a.snaps.native) == snapshotsAtOnce
		})
	}
	for id := uint64(4); id < 2+snapshotsAtOnce+maxSnapshotQueue+1; id++ {
		a.Send([]*raftpb.Message{msgSnap(1, id)})
	}
	a.raft.mu.Lock()
	early := len(a.raft.snapshots)
	a.raft.mu.Unlock()
	if early != 1 || len(a.raft.snapshots[2+snapshotsAtOnce+maxSnapshotQueue]) != 1 {
		t.Fatal(a.raft.snapshots)
	}
	close(hold)
	a.raft.wait(t, "all reports", func() bool { return len(a.raft.snapshots) == len(members) })
	for id, oks := range a.raft.snapshots {
		if want := id != 2+snapshotsAtOnce+maxSnapshotQueue; len(oks) != 1 || oks[0] != want {
			t.Errorf("%d: %v", id, oks)
		}
	}
}

// rawUpload begins to upload a snapshot by hand and leaves the rest to the test.
func rawUpload(t *testing.T, m *testMember) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(m.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	head, err := appendMessage(nil, msgSnap(2, 1))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "POST /raft/snapshot HTTP/1.1\r\nHost: x\r\nX-Server-From: 2\r\nX-Server-Version: 3.7.1\r\nX-Min-Cluster-Version: 3.0.0\r\n"+
		"X-Etcd-Cluster-ID: %x\r\nContent-Length: 1000000\r\n\r\n%s", testCluster, head)
	return conn
}

// TestStalledUpload: an upload that stands still ends, one that goes on slowly does not; another is refused meanwhile. A machine that
// stands still itself for the time of an upload is given more.
func TestStalledUpload(t *testing.T) {
	for limit := 200 * time.Millisecond; ; limit *= 2 {
		err := stalledUpload(t, limit)
		if err == nil {
			return
		}
		if limit > patience/8 {
			t.Fatal(err)
		}
		t.Logf("with %v: %v", limit, err)
	}
}

// stalledUpload fails if the upload ended before it stood still.
func stalledUpload(t *testing.T, limit time.Duration) error {
	t.Helper()
	m := newTestMember(t, 1, func(o *Options) { o.ReadTimeout = limit })
	m.snaps.entered = make(chan struct{}, 1)
	conn := rawUpload(t, m)
	<-m.snaps.entered
	began := time.Now()
	head, _ := appendMessage(nil, msgSnap(2, 1))
	resp, text := call(t, "POST", m.url+"/raft/snapshot", head, "X-Server-Version: 3.7.1", "X-Min-Cluster-Version: 3.0.0", "X-Etcd-Cluster-ID: abc")
	if refused := resp.StatusCode == 500 && text == "failed to save KV snapshot (another snapshot is being received)\n"; !refused && time.Since(began) < limit {
		t.Fatalf("%d %q", resp.StatusCode, text)
	} else if !refused {
		return fmt.Errorf("the other one was refused after %v: %d %q", time.Since(began), resp.StatusCode, text)
	}
	for n := range 8 { // longer than the limit in all, shorter each time
		if _, err := conn.Write([]byte("x")); err != nil {
			return fmt.Errorf("it ended after %d bytes: %w", n, err)
		}
		<-time.After(limit / 4)
	}
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 12)
	if _, err := io.ReadFull(conn, b); err != nil || string(b) != "HTTP/1.1 500" {
		t.Fatalf("%q %v", b, err)
	}
	m.snaps.mu.Lock()
	received := len(m.snaps.received)
	m.snaps.mu.Unlock()
	if received != 8 {
		return fmt.Errorf("it ended after %d bytes", received)
	}
	if d := time.Since(began); d < 11*limit/4 || len(m.raft.got) != 0 {
		t.Fatalf("ended after %v, messages %v", d, m.raft.got)
	}
	return nil
}

// TestCloseDuringUpload: Close does not wait for a sender that stands still.
func TestCloseDuringUpload(t *testing.T) {
	m := newTestMember(t, 1, func(o *Options) { o.ReadTimeout = time.Hour })
	m.snaps.entered = make(chan struct{}, 1)
	rawUpload(t, m)
	<-m.snaps.entered
	began := time.Now()
	if err := m.Transport.Close(); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(began); d > patience/2 {
		t.Fatalf("took %v", d)
	}
}

// TestRemovedDuringSend: a member that is dropped takes its snapshot along, also while the snapshot is being sent.
func TestRemovedDuringSend(t *testing.T) {
	a := newTestMember(t, 1, nil)
	a.SetMembers([]Member{{ID: 2, PeerURLs: []string{unanswered(t)}}}, nil)
	a.Send([]*raftpb.Message{msgSnap(1, 2)})
	waitFor(t, "the sending", func() bool {
		a.snaps.mu.Lock()
		defer a.snaps.mu.Unlock()
		return len(a.snaps.native) == 1
	})
	a.SetMembers(nil, nil)
	a.raft.wait(t, "the report", func() bool { return len(a.raft.snapshots[2]) == 1 })
	waitFor(t, "the end", func() bool {
		a.snaps.mu.Lock()
		defer a.snaps.mu.Unlock()
		return a.snaps.closed == 1
	})
}

// TestLaterTerm: a leader that was deposed does not shut out the next one with what it still sends.
func TestLaterTerm(t *testing.T) {
	m := newTestMember(t, 1, func(o *Options) { o.ReadTimeout = time.Hour })
	m.snaps.entered = make(chan struct{}, 2)
	conn := rawUpload(t, m) // of term 3
	<-m.snaps.entered
	of := func(term uint64) (int, string) {
		snap := msgSnap(2, 1)
		snap.Term = &term
		head, err := appendMessage(nil, snap)
		if err != nil {
			t.Fatal(err)
		}
		resp, text := call(t, "POST", m.url+"/raft/snapshot", head, "X-Server-Version: 3.7.1", "X-Min-Cluster-Version: 3.0.0", "X-Etcd-Cluster-ID: abc")
		return resp.StatusCode, text
	}
	for _, term := range []uint64{2, 3} {
		if status, text := of(term); status != http.StatusInternalServerError || !strings.Contains(text, errReceiving.Error()) {
			t.Fatalf("of term %d: %d %q", term, status, text)
		}
	}
	if status, text := of(4); status != http.StatusNoContent {
		t.Fatalf("of a later term: %d %q", status, text)
	}
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusInternalServerError || !strings.Contains(string(text), errSuperseded.Error()) {
		t.Fatalf("the one before: %d %q", resp.StatusCode, text)
	}
	if len(m.raft.got) != 1 || m.raft.got[0].GetTerm() != 4 {
		t.Fatal(m.raft.got)
	}
}

// unanswered is a peer that takes a snapshot and does not say so.
func unanswered(t *testing.T) string {
	return newServer(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
}

// TestDeposed: what this member sends as a leader ends when it follows another.
func TestDeposed(t *testing.T) {
	a := newTestMember(t, 1, func(o *Options) { o.SnapshotPause = time.Hour })
	a.SetMembers([]Member{{ID: 2, PeerURLs: []string{unanswered(t)}}}, nil)
	a.Send([]*raftpb.Message{msgSnap(1, 2)})
	ask := message(raftpb.MsgPreVote, 1, 2)
	ask.Term = proto.Uint64(4)
	a.Send([]*raftpb.Message{ask})
	if n := a.sender.newest.Load(); n != 3 {
		t.Fatalf("a vote that may never be cast makes term %d", n)
	}
	heard := message(raftpb.MsgAppResp, 1, 77)
	heard.Term = proto.Uint64(4)
	a.Send([]*raftpb.Message{heard})
	a.raft.wait(t, "the report", func() bool { return len(a.raft.snapshots[2]) == 1 })
	if a.raft.snapshots[2][0] {
		t.Fatal("it is said to have arrived")
	}
}

// TestSnapshotPause: one that could not be sent is not prepared again with the next heartbeat.
func TestSnapshotPause(t *testing.T) {
	fake := clock.NewFake(time.Unix(1_000_000, 0))
	a := newTestMember(t, 1, func(o *Options) { o.Clock, o.SnapshotPause = fake, time.Second })
	var refuse atomic.Bool
	other := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if refuse.Load() {
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	a.SetMembers([]Member{{ID: 2, PeerURLs: []string{other}}}, nil)
	opened := func() int {
		a.snaps.mu.Lock()
		defer a.snaps.mu.Unlock()
		return len(a.snaps.native)
	}
	reports := 0
	send := func(ok bool, pause time.Duration) {
		t.Helper()
		refuse.Store(!ok)
		before := opened()
		a.Send([]*raftpb.Message{msgSnap(1, 2)})
		if !ok {
			waitFor(t, "the pause", func() bool {
				a.sender.mu.Lock()
				defer a.sender.mu.Unlock()
				return a.sender.pauses[2] == pause
			})
			fake.WaitAlarms(1)
			a.Send([]*raftpb.Message{msgSnap(1, 2)}) // raft has not been told, and asks no more
			fake.Advance(pause - 1)
			fake.WaitAlarms(1)
			a.raft.mu.Lock()
			early := len(a.raft.snapshots[2]) - reports
			a.raft.mu.Unlock()
			if n := opened() - before; n != 1 || early != 0 {
				t.Fatalf("in the pause %d are opened and %d reported", n, early)
			}
			fake.Advance(1)
		}
		reports++
		a.raft.wait(t, "the report", func() bool { return len(a.raft.snapshots[2]) == reports })
		if a.raft.snapshots[2][reports-1] != ok {
			t.Fatalf("report %d is %t", reports, !ok)
		}
	}
	for _, seconds := range []int{1, 2, 4, 8, 16, 30} {
		send(false, time.Duration(seconds)*time.Second)
	}
	if longest := a.sender.pause(2); longest != 30*time.Second {
		t.Fatalf("then %v", longest)
	}
	send(true, 0)
	send(false, time.Second)
}

// TestSilentReceivers: who takes a snapshot and never says so holds up nobody else.
func TestSilentReceivers(t *testing.T) {
	a, b := newTestMember(t, 1, nil), newTestMember(t, 9, nil)
	a.snaps.body = []byte("0123456789")
	members := []Member{b.member()}
	for id := uint64(2); id < 2+snapshotsAtOnce; id++ {
		members = append(members, Member{ID: id, PeerURLs: []string{unanswered(t)}})
	}
	a.SetMembers(members, nil)
	for id := uint64(2); id < 2+snapshotsAtOnce; id++ {
		a.Send([]*raftpb.Message{msgSnap(1, id)})
	}
	waitFor(t, "them to be sent", func() bool {
		a.snaps.mu.Lock()
		defer a.snaps.mu.Unlock()
		return a.snaps.closed == snapshotsAtOnce // what is pinned is not pinned until they answer
	})
	a.Send([]*raftpb.Message{msgSnap(1, 9)})
	a.raft.wait(t, "the report", func() bool { return len(a.raft.snapshots[9]) == 1 })
	if !a.raft.snapshots[9][0] {
		t.Fatal("it failed")
	}
}
