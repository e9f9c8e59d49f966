package peer

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

func TestShareReads(t *testing.T) {
	b := &bodies{limit: 1 << 20}
	for _, size := range []int{0, 1, firstBody - 1, firstBody, firstBody + 1, 100_000} {
		want := bytes.Repeat([]byte{7}, size)
		for _, length := range []int64{int64(size), -1, 3, int64(size) * 2} { // also a lie
			s := b.share()
			got, err := s.read(iotest.HalfReader(bytes.NewReader(want)), length)
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%d bytes announced as %d: %d bytes, %v", size, length, len(got), err)
			}
			if s.has != b.used || s.has < cap(got) || length == int64(size) && s.has > size+1+firstBody {
				t.Fatalf("%d bytes announced as %d: %d taken for %d, %d of all", size, length, s.has, cap(got), b.used)
			}
			s.release()
			if b.used != 0 || b.beyond != nil {
				t.Fatalf("after a release %d are taken", b.used)
			}
		}
	}
	s := b.share()
	if _, err := s.read(iotest.ErrReader(io.ErrUnexpectedEOF), 5); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatal(err)
	}
	if _, err := s.read(strings.NewReader("x"), maxFrame+1); !errors.Is(err, errTooLong) {
		t.Fatal(err)
	}
}

// TestBodiesAreBounded sends more at once than there is memory for: what is beyond is refused at once, one that is
// larger than all memory is not, and when the others are through there is room again.
func TestBodiesAreBounded(t *testing.T) {
	m := newTestMember(t, 1, nil)
	const limit = 1 << 20
	m.bodies.limit = limit
	good := []string{"X-Server-Version: 3.7.1", "X-Min-Cluster-Version: 3.0.0", "X-Etcd-Cluster-ID: abc"}
	large := message(raftpb.MsgApp, 2, 1)
	large.Entries = []*raftpb.Entry{{Data: make([]byte, 2*limit), Index: proto.Uint64(1), Term: proto.Uint64(1)}}
	body, err := proto.Marshal(large)
	if err != nil {
		t.Fatal(err)
	}

	// Each of these stops in the middle, when memory for all that came has been taken.
	type half struct {
		rest   io.WriteCloser
		status chan int
	}
	taken := func(what string, want func(used int, beyond bool) bool) {
		t.Helper()
		again, late := time.NewTicker(time.Millisecond), time.After(patience) // reading more tells nobody
		defer again.Stop()
		for {
			m.bodies.mu.Lock()
			used, beyond := m.bodies.used, m.bodies.beyond != nil
			m.bodies.mu.Unlock()
			if want(used, beyond) {
				return
			}
			select {
			case <-again.C:
			case <-late:
				t.Fatalf("waited in vain for %s: %d taken, beyond %t", what, used, beyond)
			}
		}
	}
	begin := func(size int) half {
		pr, pw := io.Pipe()
		h := half{pw, make(chan int, 1)}
		go func() {
			req, err := http.NewRequest(http.MethodPost, m.url+"/raft", pr)
			if err != nil {
				panic(err)
			}
			for _, g := range good {
				name, value, _ := strings.Cut(g, ": ")
				req.Header.Set(name, value)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				fmt.Println(err)
				h.status <- 0
				return
			}
			resp.Body.Close()
			h.status <- resp.StatusCode
		}()
		go pw.Write(body[:size]) //nolint:errcheck // the answer tells
		return h
	}
	first := begin(limit/2 + 1) // doubling takes all
	taken("the first", func(used int, _ bool) bool { return used == limit })
	second := begin(limit / 2)
	taken("one beyond", func(_ int, beyond bool) bool { return beyond })
	for range 3 {
		resp, got := call(t, http.MethodPost, m.url+"/raft", body[:100], good...)
		if resp.StatusCode != http.StatusServiceUnavailable || got != errBodies.Error()+"\n" {
			t.Fatalf("when all is taken: %d %q", resp.StatusCode, got)
		}
	}
	for _, h := range []half{second, first} {
		h.rest.Close()
		if status := <-h.status; status != http.StatusBadRequest { // half a message
			t.Fatalf("status %d", status)
		}
	}
	taken("none", func(used int, beyond bool) bool { return used == 0 && !beyond })
	if resp, got := call(t, http.MethodPost, m.url+"/raft", body, good...); resp.StatusCode != http.StatusNoContent {
		t.Fatalf("one that is larger than the memory, alone: %d %q", resp.StatusCode, got)
	}
}

// TestElementsAreMemory: what the lists of a message take when it is decoded is reckoned, and so is a message before a snapshot.
func TestElementsAreMemory(t *testing.T) {
	m := newTestMember(t, 1, nil)
	m.bodies.limit = 1 << 20
	good := []string{"X-Server-Version: 3.7.1", "X-Min-Cluster-Version: 3.0.0", "X-Etcd-Cluster-ID: abc"}
	empty := bytes.Repeat([]byte{0x3a, 0}, 10_000)
	snapshot, err := appendMessage(nil, msgSnap(2, 1))
	if err != nil {
		t.Fatal(err)
	}
	ask := func(path string, body []byte) int {
		resp, _ := call(t, http.MethodPost, m.url+path, body, good...)
		return resp.StatusCode
	}
	if status := ask("/raft", bytes.Repeat([]byte{0x3a, 0}, maxEntries+1)); status != http.StatusBadRequest {
		t.Errorf("more entries than there can be: %d", status)
	}
	large := m.bodies.share()
	if !large.grow(2 * m.bodies.limit) { // which may go beyond
		t.Fatal("refused")
	}
	if status := ask("/raft", empty); status != http.StatusServiceUnavailable {
		t.Errorf("a message that grows: %d", status)
	}
	if status := ask("/raft/snapshot", snapshot); status != http.StatusNoContent {
		t.Errorf("a snapshot while there is room: %d", status)
	}
	rest := m.bodies.share()
	if !rest.grow(m.bodies.limit) {
		t.Fatal("refused")
	}
	if status := ask("/raft/snapshot", snapshot); status != http.StatusServiceUnavailable {
		t.Errorf("a snapshot while there is none: %d", status)
	}
	large.release()
	rest.release()
	if status := ask("/raft", empty); status != http.StatusInternalServerError { // alone it is read, and then it is to nobody
		t.Errorf("a message that grows, alone: %d", status)
	}
	if m.bodies.used != 0 || m.bodies.beyond != nil {
		t.Errorf("%d are taken", m.bodies.used)
	}
}

// TestSnapshotLeavesTheRest: a snapshot that began when there was no memory is itself not in the way of what comes while it is received.
func TestSnapshotLeavesTheRest(t *testing.T) {
	m := newTestMember(t, 1, nil)
	const limit = 1 << 20
	m.bodies.limit = limit
	m.snaps.entered = make(chan struct{}, 1)
	others := m.bodies.share()
	if !others.grow(limit) {
		t.Fatal("refused")
	}
	rawUpload(t, m)
	<-m.snaps.entered
	others.release()
	large := message(raftpb.MsgApp, 2, 1)
	large.Entries = []*raftpb.Entry{{Data: make([]byte, 2*limit), Index: proto.Uint64(1), Term: proto.Uint64(1)}}
	body, err := proto.Marshal(large)
	if err != nil {
		t.Fatal(err)
	}
	resp, text := call(t, http.MethodPost, m.url+"/raft", body, "X-Server-Version: 3.7.1", "X-Min-Cluster-Version: 3.0.0", "X-Etcd-Cluster-ID: abc")
	if resp.StatusCode != http.StatusNoContent {
		t.Errorf("one that is larger than the memory: %d %q", resp.StatusCode, text)
	}
}
