package h2

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	answerIn  = 20 * time.Second
	putPath   = "/etcdserverpb.KV/Put"
	rangePath = "/etcdserverpb.KV/Range"
	watchPath = "/etcdserverpb.Watch/Watch"
)

// server answers a Range with as many bytes as its limit says, a Put with an error, and a Watch with what it was sent.
type server struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
}

func (server) Range(_ context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	return &pb.RangeResponse{Count: int64(len(r.Key)), Kvs: []*mvccpb.KeyValue{{Value: make([]byte, r.Limit)}}}, nil
}

func (server) Put(context.Context, *pb.PutRequest) (*pb.PutResponse, error) {
	return nil, status.Error(codes.ResourceExhausted, "full")
}

func (server) Watch(s pb.Watch_WatchServer) error {
	for {
		r, err := s.Recv()
		if err != nil {
			return nil
		}
		if err := s.Send(&pb.WatchResponse{WatchId: r.GetCreateRequest().GetWatchId()}); err != nil {
			return err
		}
	}
}

func dial(t *testing.T) (*Conn, *grpc.Server) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	pb.RegisterKVServer(s, server{})
	pb.RegisterWatchServer(s, server{})
	go s.Serve(l)
	t.Cleanup(s.Stop)
	c, err := Dial(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c, s
}

// TestCalls sends more than the first windows hold, both ways, with many calls open at once.
func TestCalls(t *testing.T) {
	c, _ := dial(t)
	var wg sync.WaitGroup
	for i := range 200 {
		size, answer := 10_000+i, int64(i*1000)
		if i == 7 {
			size, answer = MaxRequest-100, 3<<20
		}
		request, err := proto.Marshal(&pb.RangeRequest{Key: make([]byte, size), Limit: answer})
		if err != nil {
			t.Fatal(err)
		}
		wg.Add(1)
		c.Call(rangePath, request, func(body []byte, err error) {
			defer wg.Done()
			var r pb.RangeResponse
			if err == nil {
				err = proto.Unmarshal(body, &r)
			}
			if err != nil || r.Count != int64(size) || int64(len(r.Kvs[0].Value)) != answer {
				t.Errorf("call %d: count %d, %v", i, r.Count, err)
			}
		})
	}
	wg.Wait()
}

func TestStatus(t *testing.T) {
	c, _ := dial(t)
	_, err := c.Do(putPath, nil, answerIn)
	var s *StatusError
	if !errors.As(err, &s) || s.Code != "8" || s.Message != "full" {
		t.Errorf("got %v, want status 8, full", err)
	}
	if _, err := c.Do(rangePath, make([]byte, MaxRequest+1), answerIn); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("a request too long: %v", err)
	}
}

func TestStream(t *testing.T) {
	c, s := dial(t)
	got, ended := make(chan int64, 10), make(chan error, 1)
	request := func(id int64) []byte {
		b, err := proto.Marshal(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{WatchId: id}}})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	stream := c.Open(watchPath, request(1), func(m []byte) {
		var r pb.WatchResponse
		if err := proto.Unmarshal(m, &r); err != nil {
			t.Error(err)
		}
		got <- r.WatchId
	}, func(err error) { ended <- err })
	stream.Send(request(2))
	for want := int64(1); want <= 2; want++ {
		if id := <-got; id != want {
			t.Errorf("got %d, want %d", id, want)
		}
	}
	s.Stop()
	if err := <-ended; err == nil {
		t.Error("the stream ended without an error though the server went away")
	}
	if _, err := c.Do(rangePath, nil, answerIn); err == nil {
		t.Error("a call on a dead connection succeeded")
	}
}

// TestTake cuts messages out of bytes that arrive in every possible piece.
func TestTake(t *testing.T) {
	all := append(append(envelope([]byte("one")), envelope(nil)...), envelope([]byte("three"))...)
	for size := 1; size <= len(all); size++ {
		var got []string
		k := &call{message: func(m []byte) { got = append(got, string(m)) }}
		for rest := all; len(rest) > 0; {
			n := min(size, len(rest))
			if err := k.take(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if strings.Join(got, ",") != "one,,three" {
			t.Errorf("in pieces of %d: %q", size, got)
		}
	}
}
