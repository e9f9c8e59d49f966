package rpc

import (
	"context"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/clock"
)

// fill puts n keys of 8 KiB.
func (m *served) fill(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		m.put(t, "k"+string(rune('a'+i)), strings.Repeat("v", 8<<10))
	}
}

// dialNarrow returns a connection whose windows never grow.
func (m *served) dialNarrow(t *testing.T) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(m.conn.Target(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(65535), grpc.WithInitialConnWindowSize(65535))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// unread opens a stream of which nothing is read, on a connection of its own,
// and returns once the server has room taken for it that it cannot give back.
func (m *served) unread(t *testing.T, ctx context.Context) *grpc.ClientConn {
	t.Helper()
	conn := m.dialNarrow(t)
	if _, err := pb.NewKVClient(conn).RangeStream(ctx, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}); err != nil {
		t.Fatal(err)
	}
	settled := 0
	for last := int64(-1); settled < 20; {
		now := m.s.room.available()
		if settled++; now != last || now == m.s.o.ResponseBytes {
			settled = 0
		}
		last = now
		time.Sleep(2 * time.Millisecond)
	}
	return conn
}

// TestSlowReaderHoldsRoom has a read wait for a client that does not take its
// answer, and go on once that client is gone, in one way or another.
func TestSlowReaderHoldsRoom(t *testing.T) {
	for name, leave := range map[string]func(context.CancelFunc, *grpc.ClientConn) error{
		"cancel": func(cancel context.CancelFunc, _ *grpc.ClientConn) error { cancel(); return nil },
		"close":  func(_ context.CancelFunc, conn *grpc.ClientConn) error { return conn.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			m := start(t, func(o *Options) { o.ResponseBytes, o.InlineBytes, o.MaxRequestBytes = 200<<10, 1<<10, 40<<10 })
			m.fill(t, 20)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			conn := m.unread(t, ctx)
			defer conn.Close()

			all := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}
			short, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer stop()
			if _, err := m.kv.Range(short, all); status.Code(err) != codes.DeadlineExceeded {
				t.Errorf("with the room taken: %v", err)
			}
			got := make(chan error)
			go func() {
				r, err := m.kv.Range(t.Context(), all)
				if err == nil && len(r.Kvs) != 20 {
					t.Errorf("%d keys", len(r.Kvs))
				}
				got <- err
			}()
			if err := leave(cancel, conn); err != nil {
				t.Fatal(err)
			}
			if err := <-got; err != nil {
				t.Errorf("after the slow client left: %v", err)
			}
		})
	}
}

// TestUnreadAnswersAreDropped has a client, stopped it seems, hold room
// while another waits for it: not for ever.
func TestUnreadAnswersAreDropped(t *testing.T) {
	fake := clock.NewFake(time.Unix(1e6, 0))
	m := start(t, func(o *Options) {
		o.ResponseBytes, o.InlineBytes, o.MaxRequestBytes = 200<<10, 1<<10, 40<<10
		o.Clock, o.RequestTimeout, o.StreamStall = fake, 100*time.Millisecond, 300*time.Millisecond
	})
	m.fill(t, 20)
	conn := m.unread(t, t.Context())
	defer conn.Close()
	all := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}
	if _, err := m.kv.Range(t.Context(), all); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("with the room taken: %v", err)
	}
	m.getsRoom(t, fake, 301*time.Millisecond, func() {})
}

// TestUnreadAnswersAreDroppedAmongOthers has a client hold room with an answer that
// it does not take, while it puts and takes the answers to that: nobody waits for
// the room for ever, and the puts go on.
func TestUnreadAnswersAreDroppedAmongOthers(t *testing.T) {
	fake := clock.NewFake(time.Unix(1e6, 0))
	m := start(t, func(o *Options) {
		o.ResponseBytes, o.InlineBytes, o.MaxRequestBytes = 200<<10, 1<<10, 40<<10
		o.Clock, o.RequestTimeout, o.StreamStall = fake, 100*time.Millisecond, 300*time.Millisecond
	})
	m.fill(t, 20)
	conn := m.unread(t, t.Context())
	defer conn.Close()
	m.getsRoom(t, fake, 100*time.Millisecond, func() {
		if _, err := pb.NewKVClient(conn).Put(t.Context(), &pb.PutRequest{Key: []byte("other"), Value: []byte("v")}); err != nil {
			t.Fatal(err)
		}
	})
}

// getsRoom lists all until there is room for it again, a moment after the call that
// holds it was ended. Before each try the clock goes on by step, and others work.
func (m *served) getsRoom(t *testing.T, fake *clock.Fake, step time.Duration, others func()) {
	t.Helper()
	all := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}
	for deadline := time.Now().Add(20 * time.Second); ; {
		fake.Advance(step)
		others()
		got, err := m.kv.Range(t.Context(), all)
		if err == nil {
			if len(got.Kvs) != 20 {
				t.Errorf("%d keys", len(got.Kvs))
			}
			return
		}
		if status.Code(err) != codes.ResourceExhausted {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatal("the room is still held by an answer that nobody reads")
		}
	}
}
