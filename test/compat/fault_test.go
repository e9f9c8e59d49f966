package compat

import (
	"errors"
	"sync/atomic"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/test/compat/internal/fault"
	"github.com/engram-kv/engram/test/compat/internal/process"
	"github.com/engram-kv/engram/test/compat/internal/random"
)

// TestComparisonSeesFaults compares etcd with itself behind a proxy that spoils one answer in some hundred: each time the random
// test must name the method that was spoiled.
func TestComparisonSeesFaults(t *testing.T) {
	const rarely = 40
	faults := []struct {
		name, method, blamed string
		answer               func() proto.Message
		spoil                func(proto.Message) bool
	}{
		{"an old version in a range", etcdserverpb.KV_Range_FullMethodName, "Range",
			func() proto.Message { return &etcdserverpb.RangeResponse{} },
			func(m proto.Message) bool {
				if kvs := m.(*etcdserverpb.RangeResponse).Kvs; len(kvs) > 0 {
					kvs[0].Version--
				}
				return true
			}},
		{"a revision too high after a put", etcdserverpb.KV_Put_FullMethodName, "Put",
			func() proto.Message { return &etcdserverpb.PutResponse{} },
			func(m proto.Message) bool { m.(*etcdserverpb.PutResponse).Header.Revision++; return true }},
		{"a transaction that claims success", etcdserverpb.KV_Txn_FullMethodName, "Txn",
			func() proto.Message { return &etcdserverpb.TxnResponse{} },
			func(m proto.Message) bool {
				m.(*etcdserverpb.TxnResponse).Succeeded = !m.(*etcdserverpb.TxnResponse).Succeeded
				return true
			}},
		{"an event that gets lost", etcdserverpb.Watch_Watch_FullMethodName, "Watch",
			func() proto.Message { return &etcdserverpb.WatchResponse{} },
			func(m proto.Message) bool { return len(m.(*etcdserverpb.WatchResponse).Events) == 0 }},
		{"another hash", etcdserverpb.Maintenance_HashKV_FullMethodName, "HashKV",
			func() proto.Message { return &etcdserverpb.HashKVResponse{} },
			func(m proto.Message) bool { m.(*etcdserverpb.HashKVResponse).Hash++; return true }},
		{"a chunk that gets lost", etcdserverpb.KV_RangeStream_FullMethodName, "RangeStream",
			func() proto.Message { return &etcdserverpb.RangeStreamResponse{} },
			func(m proto.Message) bool {
				return m.(*etcdserverpb.RangeStreamResponse).RangeResponse.Header != nil
			}},
		{"a lease renewed for longer", etcdserverpb.Lease_LeaseKeepAlive_FullMethodName, "LeaseKeepAlive",
			func() proto.Message { return &etcdserverpb.LeaseKeepAliveResponse{} },
			func(m proto.Message) bool { m.(*etcdserverpb.LeaseKeepAliveResponse).TTL++; return true }},
		{"a wrong member", etcdserverpb.Lease_LeaseGrant_FullMethodName, "LeaseGrant",
			func() proto.Message { return &etcdserverpb.LeaseGrantResponse{} },
			func(m proto.Message) bool { m.(*etcdserverpb.LeaseGrantResponse).Header.MemberId++; return true }},
	}
	pair, err := process.StartPair(programs.Etcd, programs.Etcd, t.TempDir(), "--unsafe-no-fsync")
	if err != nil {
		t.Fatal(err)
	}
	defer pair.Close()
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			if err := pair.Each(func(_ int, s *process.Side) error { return s.Reset() }); err != nil {
				t.Fatal(err)
			}
			var answers atomic.Int64
			proxy, err := fault.Start(pair[1].Endpoint(), fault.Spoiler{
				Method: f.method, Answer: f.answer,
				Spoil: func(m proto.Message) bool { return answers.Add(1) < rarely || f.spoil(m) },
			})
			if err != nil {
				t.Fatal(err)
			}
			defer proxy.Close()
			if err := pair[1].Dial(proxy.Address()); err != nil {
				t.Fatal(err)
			}
			_, err = random.Run(pair, random.Options{Seed: 7, Operations: 20_000, Methods: methods, Log: t.Logf})
			difference := (*random.Difference)(nil)
			if !errors.As(err, &difference) {
				t.Fatalf("the fault was not seen: %v", err)
			}
			if difference.Operation.Method != f.blamed {
				t.Errorf("the fault was taken for one of %s, want %s: %v", difference.Operation.Method, f.blamed, err)
			}
		})
	}
}
