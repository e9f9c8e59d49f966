package rpc

import (
	"context"
	"fmt"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/grpcserver"
	"github.com/engram-kv/engram/internal/state"
)

// instant is a consensus that agrees at once and applies nothing.
type instant struct{ *engine }

func (i instant) Propose(p Proposal) error {
	p.Done(&state.Reply{Revision: 2, Op: state.OpReply{Kind: state.OpPut}}, nil)
	return nil
}

func (i instant) ReadIndex(_ time.Time, done func(error)) { done(nil) }
func (i instant) Term() uint64                            { return 3 }

func benchmark(b *testing.B, method string, request proto.Message) {
	e := newEngine(b, 0)
	s := New(Options{
		Consensus: instant{e}, Views: e, Auth: e, Quota: e, Cluster: engineCluster{e}, Maintenance: engineMaintenance{e},
		Metrics: NewMetrics(false),
	})
	defer s.Close()
	defer e.close(b)
	for i := range 1000 {
		put, err := proto.Marshal(&pb.PutRequest{Key: fmt.Appendf(nil, "key%04d", i), Value: make([]byte, 1024)})
		if err != nil {
			b.Fatal(err)
		}
		done := make(chan error, 1)
		s2 := *s
		s2.o.Consensus = e
		s2.put(grpcserver.NewCall(context.Background(), "", nil), put, func(_ []byte, err error) { done <- err })
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
	raw, err := proto.Marshal(request)
	if err != nil {
		b.Fatal(err)
	}
	h := s.handlers()[method]
	md := map[string][]string{"client-api-version": {"3.7"}}
	answered := make(chan int, 1)
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		call := grpcserver.NewCall(context.Background(), method, md)
		h(call, raw, func(raw []byte, err error) {
			if err != nil {
				b.Error(err)
			}
			call.Sent()
			answered <- len(raw)
		})
		b.SetBytes(int64(<-answered))
	}
}

func BenchmarkPut(b *testing.B) {
	benchmark(b, "/etcdserverpb.KV/Put", &pb.PutRequest{Key: []byte("key0001"), Value: make([]byte, 300)})
}

func BenchmarkGet(b *testing.B) {
	benchmark(b, "/etcdserverpb.KV/Range", &pb.RangeRequest{Key: []byte("key0001")})
}

func BenchmarkRange1000(b *testing.B) {
	benchmark(b, "/etcdserverpb.KV/Range", &pb.RangeRequest{Key: []byte("key"), RangeEnd: []byte("kez")})
}
