package rpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// must returns v, or ends the test.
func must[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// wantError checks code and text of an error from the wire.
func wantError(t *testing.T, err, want error) {
	t.Helper()
	got, expected := status.Convert(err), status.Convert(want)
	if got.Code() != expected.Code() || got.Message() != expected.Message() {
		t.Errorf("got %v %q, want %v %q", got.Code(), got.Message(), expected.Code(), expected.Message())
	}
}

func (m *served) put(t *testing.T, key, value string) int64 {
	t.Helper()
	r, err := m.kv.Put(t.Context(), &pb.PutRequest{Key: []byte(key), Value: []byte(value)})
	if err != nil {
		t.Fatal(err)
	}
	return r.Header.Revision
}

func keysOf(kvs []*mvccpb.KeyValue) string {
	var keys []string
	for _, kv := range kvs {
		keys = append(keys, string(kv.Key))
	}
	return strings.Join(keys, " ")
}

func TestPut(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	r := must[*pb.PutResponse](t)(m.kv.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte("1"), PrevKv: true}))
	want := &pb.PutResponse{Header: &pb.ResponseHeader{ClusterId: testCluster, MemberId: testMember, Revision: 2, RaftTerm: 3}}
	if !proto.Equal(r, want) {
		t.Errorf("got %v, want %v", r, want)
	}
	must[*pb.LeaseGrantResponse](t)(pb.NewLeaseClient(m.conn).LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: 9, TTL: 60}))
	r = must[*pb.PutResponse](t)(m.kv.Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte("2"), Lease: 9, PrevKv: true}))
	if !proto.Equal(r.PrevKv, &mvccpb.KeyValue{Key: []byte("a"), Value: []byte("1"), CreateRevision: 2, ModRevision: 2, Version: 1}) {
		t.Errorf("prev_kv %v", r.PrevKv)
	}
	r = must[*pb.PutResponse](t)(m.kv.Put(ctx, &pb.PutRequest{Key: []byte("a"), IgnoreValue: true, IgnoreLease: true, PrevKv: true}))
	if r.Header.Revision != 4 || r.PrevKv.Lease != 9 {
		t.Errorf("got %v", r)
	}
	g := must[*pb.RangeResponse](t)(m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("a")}))
	if len(g.Kvs) != 1 || !proto.Equal(g.Kvs[0], &mvccpb.KeyValue{Key: []byte("a"), Value: []byte("2"), CreateRevision: 2, ModRevision: 4, Version: 3, Lease: 9}) {
		t.Errorf("got %v", g)
	}
	for _, c := range []struct {
		name string
		r    *pb.PutRequest
		want error
	}{
		{"no key", &pb.PutRequest{Value: []byte("1"), IgnoreValue: true}, rpctypes.ErrGRPCEmptyKey},
		{"value and ignore_value", &pb.PutRequest{Key: []byte("a"), Value: []byte("1"), IgnoreValue: true, Lease: 9, IgnoreLease: true}, rpctypes.ErrGRPCValueProvided},
		{"lease and ignore_lease", &pb.PutRequest{Key: []byte("a"), Lease: 9, IgnoreLease: true}, rpctypes.ErrGRPCLeaseProvided},
		{"unknown lease", &pb.PutRequest{Key: []byte("a"), Lease: 10}, rpctypes.ErrGRPCLeaseNotFound},
		{"ignore_value of nothing", &pb.PutRequest{Key: []byte("b"), IgnoreValue: true}, rpctypes.ErrGRPCKeyNotFound},
		{"ignore_lease of nothing", &pb.PutRequest{Key: []byte("b"), IgnoreLease: true}, rpctypes.ErrGRPCKeyNotFound},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := m.kv.Put(ctx, c.r)
			wantError(t, err, c.want)
		})
	}
	if rev := m.put(t, "z", ""); rev != 5 {
		t.Errorf("refused puts left a trace: revision %d", rev)
	}
}

func TestRange(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	for i, k := range []string{"a", "b", "c", "d"} {
		m.put(t, k, fmt.Sprint(9-i)) // revisions 2 to 5
	}
	m.put(t, "b", "again")
	get := func(r *pb.RangeRequest) *pb.RangeResponse {
		t.Helper()
		return must[*pb.RangeResponse](t)(m.kv.Range(ctx, r))
	}
	all := func() *pb.RangeRequest { return &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte{0}} }
	for _, c := range []struct {
		name  string
		turn  func(*pb.RangeRequest)
		keys  string
		count int64
		more  bool
	}{
		{"from key", func(r *pb.RangeRequest) {}, "a b c d", 4, false},
		{"single", func(r *pb.RangeRequest) { r.RangeEnd = nil }, "a", 1, false},
		{"half open", func(r *pb.RangeRequest) { r.RangeEnd = []byte("c") }, "a b", 2, false},
		{"inverted", func(r *pb.RangeRequest) { r.Key, r.RangeEnd = []byte("c"), []byte("a") }, "", 0, false},
		{"limit", func(r *pb.RangeRequest) { r.Limit = 3 }, "a b c", 4, true},
		{"exact limit", func(r *pb.RangeRequest) { r.Limit = 4 }, "a b c d", 4, false},
		{"negative limit", func(r *pb.RangeRequest) { r.Limit = -1 }, "a b c d", 4, false},
		{"past", func(r *pb.RangeRequest) { r.Revision = 3 }, "a b", 2, false},
		{"negative revision", func(r *pb.RangeRequest) { r.Revision = -5 }, "a b c d", 4, false},
		{"count only", func(r *pb.RangeRequest) { r.CountOnly, r.Limit = true, 1 }, "", 4, false},
		{"past count", func(r *pb.RangeRequest) { r.CountOnly, r.Revision = true, 4 }, "", 3, false},
		{"keys only", func(r *pb.RangeRequest) { r.KeysOnly = true }, "a b c d", 4, false},
		{"serializable", func(r *pb.RangeRequest) { r.Serializable = true }, "a b c d", 4, false},
		{"descending", func(r *pb.RangeRequest) { r.SortOrder, r.Limit = pb.RangeRequest_DESCEND, 2 }, "d c", 4, true},
		{"by value", func(r *pb.RangeRequest) {
			r.SortOrder, r.SortTarget = pb.RangeRequest_ASCEND, pb.RangeRequest_VALUE
		}, "d c a b", 4, false},
		{"filter", func(r *pb.RangeRequest) { r.MinModRevision = 5 }, "b d", 4, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := all()
			c.turn(r)
			got := get(r)
			if keysOf(got.Kvs) != c.keys || got.Count != c.count || got.More != c.more {
				t.Errorf("got %q, count %d, more %v; want %q, %d, %v", keysOf(got.Kvs), got.Count, got.More, c.keys, c.count, c.more)
			}
			if want := (&pb.ResponseHeader{ClusterId: testCluster, MemberId: testMember, Revision: 6, RaftTerm: 3}); !proto.Equal(got.Header, want) {
				t.Errorf("header %v", got.Header)
			}
			for _, kv := range got.Kvs {
				if r.KeysOnly != (len(kv.Value) == 0) {
					t.Errorf("keys_only %v: %v", r.KeysOnly, kv)
				}
			}
		})
	}
	must[*pb.CompactionResponse](t)(m.kv.Compact(ctx, &pb.CompactionRequest{Revision: 4}))
	for _, c := range []struct {
		name string
		r    *pb.RangeRequest
		want error
	}{
		{"no key", &pb.RangeRequest{RangeEnd: []byte("b"), SortOrder: 7}, rpctypes.ErrGRPCEmptyKey},
		{"sort order", &pb.RangeRequest{Key: []byte("a"), SortOrder: 3}, rpctypes.ErrGRPCInvalidSortOption},
		{"sort target", &pb.RangeRequest{Key: []byte("a"), SortTarget: 5}, rpctypes.ErrGRPCInvalidSortOption},
		{"future", &pb.RangeRequest{Key: []byte("a"), Revision: 7}, rpctypes.ErrGRPCFutureRev},
		{"compacted", &pb.RangeRequest{Key: []byte("a"), Revision: 3}, rpctypes.ErrGRPCCompacted},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := m.kv.Range(ctx, c.r)
			wantError(t, err, c.want)
		})
	}
	if got := get(&pb.RangeRequest{Key: []byte("b"), Revision: 4}); len(got.Kvs) != 1 || string(got.Kvs[0].Value) != "8" {
		t.Errorf("at the compact revision: %v", got)
	}
}

func TestDeleteRange(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	m.put(t, "a", "1")
	m.put(t, "b", "2")
	r := must[*pb.DeleteRangeResponse](t)(m.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("x")}))
	if r.Deleted != 0 || r.Header.Revision != 3 {
		t.Errorf("deleting nothing: %v", r)
	}
	r = must[*pb.DeleteRangeResponse](t)(m.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, PrevKv: true}))
	if r.Deleted != 2 || r.Header.Revision != 4 || keysOf(r.PrevKvs) != "a b" || string(r.PrevKvs[1].Value) != "2" {
		t.Errorf("deleting all: %v", r)
	}
	_, err := m.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{})
	wantError(t, err, rpctypes.ErrGRPCEmptyKey)
}

func TestTxn(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	m.put(t, "a", "1")
	created := func(key string, rev int64) clientv3.Cmp {
		return clientv3.Compare(clientv3.CreateRevision(key), "=", rev)
	}
	r := must[*clientv3.TxnResponse](t)(m.client.Txn(ctx).If(created("a", 2), created("b", 0)).
		Then(clientv3.OpPut("b", "2"), clientv3.OpGet("a", clientv3.WithFromKey()), clientv3.OpDelete("a", clientv3.WithPrevKV()),
			clientv3.OpTxn([]clientv3.Cmp{created("b", 0)}, []clientv3.Op{clientv3.OpPut("c", "3", clientv3.WithPrevKV())}, nil)).
		Else(clientv3.OpGet("a")).Commit())
	inner := func(rev int64) *pb.ResponseHeader { return &pb.ResponseHeader{Revision: rev} }
	kv := func(key, value string, rev int64) *mvccpb.KeyValue {
		return &mvccpb.KeyValue{Key: []byte(key), Value: []byte(value), CreateRevision: rev, ModRevision: rev, Version: 1}
	}
	want := &pb.TxnResponse{
		Header:    &pb.ResponseHeader{ClusterId: testCluster, MemberId: testMember, Revision: 3, RaftTerm: 3},
		Succeeded: true,
		Responses: []*pb.ResponseOp{
			{Response: &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{Header: inner(3)}}},
			{Response: &pb.ResponseOp_ResponseRange{ResponseRange: &pb.RangeResponse{Header: inner(3), Count: 2,
				Kvs: []*mvccpb.KeyValue{kv("a", "1", 2), kv("b", "2", 3)}}}},
			{Response: &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: &pb.DeleteRangeResponse{Header: inner(3), Deleted: 1,
				PrevKvs: []*mvccpb.KeyValue{kv("a", "1", 2)}}}},
			{Response: &pb.ResponseOp_ResponseTxn{ResponseTxn: &pb.TxnResponse{Header: &pb.ResponseHeader{}, Succeeded: true,
				Responses: []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{Header: inner(3)}}}}}}},
		},
	}
	if got := (*pb.TxnResponse)(r); !proto.Equal(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
	r = must[*clientv3.TxnResponse](t)(m.client.Txn(ctx).If(created("b", 0)).Then(clientv3.OpPut("b", "x")).Else(clientv3.OpGet("b")).Commit())
	if r.Succeeded || r.Header.Revision != 3 || string(r.Responses[0].GetResponseRange().Kvs[0].Value) != "2" {
		t.Errorf("failure branch: %v", r)
	}
	r = must[*clientv3.TxnResponse](t)(m.client.Txn(ctx).Commit())
	if !r.Succeeded || r.Header.Revision != 3 || len(r.Responses) != 0 {
		t.Errorf("empty txn: %v", r)
	}
	_, err := m.kv.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{{}}})
	wantError(t, err, rpctypes.ErrGRPCKeyNotFound)
	_, err = m.client.Txn(ctx).Then(clientv3.OpPut("n", "1"), clientv3.OpPut("n", "1")).Commit()
	wantError(t, rpctypes.ErrGRPCDuplicateKey, toStatus(err))
	_, err = m.kv.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{
		{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("n")}}},
		{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("o"), Lease: 77}}},
	}})
	wantError(t, err, rpctypes.ErrGRPCLeaseNotFound)
	if g := must[*clientv3.GetResponse](t)(m.client.Get(ctx, "n")); g.Count != 0 || g.Header.Revision != 3 {
		t.Errorf("a refused transaction left %v", g)
	}
}

// toStatus turns what clientv3 made of a status back into one.
func toStatus(err error) error {
	var e rpctypes.EtcdError
	if errors.As(err, &e) {
		return status.Error(e.Code(), e.Error())
	}
	return err
}

func TestReadonlyTxn(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	m.put(t, "a", "1")
	m.put(t, "b", strings.Repeat("b", 100))
	read := func(key string, rev int64) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte(key), Revision: rev}}}
	}
	index := m.Applied()
	r := must[*pb.TxnResponse](t)(m.kv.Txn(ctx, &pb.TxnRequest{
		Compare: []*pb.Compare{{Target: pb.Compare_VALUE, Key: []byte("a"), RangeEnd: []byte("b"), TargetUnion: &pb.Compare_Value{Value: []byte("1")}}},
		Success: []*pb.RequestOp{read("a", 0), read("b", 2)},
	}))
	want := &pb.TxnResponse{
		Header: &pb.ResponseHeader{ClusterId: testCluster, MemberId: testMember, Revision: 3, RaftTerm: 3}, Succeeded: true,
		Responses: []*pb.ResponseOp{
			{Response: &pb.ResponseOp_ResponseRange{ResponseRange: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 3}, Count: 1,
				Kvs: []*mvccpb.KeyValue{{Key: []byte("a"), Value: []byte("1"), CreateRevision: 2, ModRevision: 2, Version: 1}}}}},
			{Response: &pb.ResponseOp_ResponseRange{ResponseRange: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 3}}}},
		},
	}
	if !proto.Equal(r, want) {
		t.Errorf("got  %v\nwant %v", r, want)
	}
	if m.Applied() != index {
		t.Error("a transaction that only reads went through the log")
	}
	_, err := m.kv.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{read("a", 9)}})
	wantError(t, err, rpctypes.ErrGRPCFutureRev)
	_, err = m.kv.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{read("a", -2)}})
	wantError(t, err, rpctypes.ErrGRPCCompacted)
	r = must[*pb.TxnResponse](t)(m.kv.Txn(ctx, &pb.TxnRequest{Failure: []*pb.RequestOp{read("a", 9)}}))
	if !r.Succeeded {
		t.Error("a branch that does not run was checked")
	}
}

func TestRangeStream(t *testing.T) {
	m := start(t, func(o *Options) { o.MaxRequestBytes = 64 << 10 })
	ctx := t.Context()
	value := bytes.Repeat([]byte{'v'}, 1000)
	for i := range 300 {
		must[*pb.PutResponse](t)(m.kv.Put(ctx, &pb.PutRequest{Key: fmt.Appendf(nil, "k%03d", i), Value: value}))
	}
	collect := func(t *testing.T, r *pb.RangeRequest) (chunks []int, merged *pb.RangeResponse) {
		t.Helper()
		stream := must[pb.KV_RangeStreamClient](t)(m.kv.RangeStream(ctx, r))
		merged = &pb.RangeResponse{}
		for {
			part, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return chunks, merged
			}
			if err != nil {
				t.Fatal(err)
			}
			if merged.Header != nil {
				t.Fatal("a chunk after the one with the header")
			}
			chunks = append(chunks, len(part.RangeResponse.Kvs))
			proto.Merge(merged, part.RangeResponse)
		}
	}
	everything := []byte{0}
	for _, c := range []struct {
		name   string
		r      *pb.RangeRequest
		chunks string
	}{
		// 40 keys are above half of the request limit and below twice it.
		{"all", &pb.RangeRequest{Key: everything, RangeEnd: everything}, "[10 20 40 40 40 40 40 40 30]"},
		{"limit", &pb.RangeRequest{Key: everything, RangeEnd: everything, Limit: 25}, "[10 15]"},
		{"limit beyond", &pb.RangeRequest{Key: everything, RangeEnd: everything, Limit: 1000}, "[10 20 40 40 40 40 40 40 30]"},
		{"ascending keys", &pb.RangeRequest{Key: everything, RangeEnd: everything, SortOrder: pb.RangeRequest_ASCEND}, "[10 20 40 40 40 40 40 40 30]"},
		{"target without order", &pb.RangeRequest{Key: []byte("k29"), RangeEnd: everything, SortTarget: pb.RangeRequest_MOD}, "[10]"},
		{"past", &pb.RangeRequest{Key: everything, RangeEnd: everything, Revision: 21}, "[10 10]"},
		{"keys only", &pb.RangeRequest{Key: everything, RangeEnd: everything, KeysOnly: true}, "[10 20 40 80 150]"},
		{"single", &pb.RangeRequest{Key: []byte("k007")}, "[1]"},
		{"empty", &pb.RangeRequest{Key: []byte("x"), RangeEnd: []byte("z")}, "[0]"},
		{"count only", &pb.RangeRequest{Key: everything, RangeEnd: everything, CountOnly: true}, "[0]"},
		{"serializable", &pb.RangeRequest{Key: []byte("k001"), RangeEnd: []byte("k003"), Serializable: true}, "[2]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			chunks, merged := collect(t, c.r)
			if fmt.Sprint(chunks) != c.chunks {
				t.Errorf("chunks %v, want %v", chunks, c.chunks)
			}
			c.r.SortTarget = pb.RangeRequest_KEY
			if want := must[*pb.RangeResponse](t)(m.kv.Range(ctx, c.r)); !proto.Equal(merged, want) {
				t.Errorf("merged: %d keys, count %d, more %v, %v; Range: %d, %d, %v, %v", len(merged.Kvs), merged.Count, merged.More, merged.Header,
					len(want.Kvs), want.Count, want.More, want.Header)
			}
		})
	}
	for _, c := range []struct {
		name string
		r    *pb.RangeRequest
		want error
	}{
		{"descending", &pb.RangeRequest{Key: []byte("k"), SortOrder: pb.RangeRequest_DESCEND}, status.Error(codes.Unimplemented, "RangeStream does not support custom sort orders")},
		{"by version", &pb.RangeRequest{Key: []byte("k"), SortOrder: pb.RangeRequest_ASCEND, SortTarget: pb.RangeRequest_VERSION}, status.Error(codes.Unimplemented, "RangeStream does not support custom sort orders")},
		{"filter", &pb.RangeRequest{Key: []byte("k"), MinCreateRevision: 1}, status.Error(codes.Unimplemented, "RangeStream does not support revision filters")},
		{"no key", &pb.RangeRequest{}, rpctypes.ErrGRPCEmptyKey},
		{"future", &pb.RangeRequest{Key: []byte("k"), Revision: 1000}, rpctypes.ErrGRPCFutureRev},
	} {
		t.Run(c.name, func(t *testing.T) {
			stream := must[pb.KV_RangeStreamClient](t)(m.kv.RangeStream(ctx, c.r))
			_, err := stream.Recv()
			wantError(t, err, c.want)
		})
	}
}

func TestCompact(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	for i := range 4 {
		m.put(t, "a", fmt.Sprint(i))
	}
	_, err := m.kv.Compact(ctx, &pb.CompactionRequest{Revision: 6})
	wantError(t, err, rpctypes.ErrGRPCFutureRev)
	r := must[*pb.CompactionResponse](t)(m.kv.Compact(ctx, &pb.CompactionRequest{Revision: 3}))
	if want := (&pb.ResponseHeader{ClusterId: testCluster, MemberId: testMember, Revision: 5, RaftTerm: 3}); !proto.Equal(r.Header, want) {
		t.Errorf("header %v", r.Header)
	}
	for _, rev := range []int64{3, 2, 0} {
		_, err = m.kv.Compact(ctx, &pb.CompactionRequest{Revision: rev})
		wantError(t, err, rpctypes.ErrGRPCCompacted)
	}

	// Physical waits, also when the revision was compacted before.
	for _, rev := range []int64{4, 2} {
		short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
		_, err = m.kv.Compact(short, &pb.CompactionRequest{Revision: rev, Physical: true})
		if status.Code(err) != codes.DeadlineExceeded { // the client's own words for it vary
			t.Errorf("compact at %d, nobody deletes: %v", rev, err)
		}
		cancel()
	}
	for more := true; more; {
		if more, _, err = m.machine.CompactStep(); err != nil {
			t.Fatal(err)
		}
	}
	_, err = m.kv.Compact(ctx, &pb.CompactionRequest{Revision: 2, Physical: true})
	wantError(t, err, rpctypes.ErrGRPCCompacted)
}

func TestRequestSize(t *testing.T) {
	m := start(t, nil)
	ctx := t.Context()
	put := func(n int) error {
		_, err := m.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Value: make([]byte, n)})
		return err
	}
	if err := put(3<<19 - 64); err != nil {
		t.Error(err)
	}
	wantError(t, put(3<<19), rpctypes.ErrGRPCRequestTooLarge)
	err := put(2<<20 + 1)
	if s := status.Convert(err); s.Code() != codes.ResourceExhausted || !strings.HasPrefix(s.Message(), "grpc: received message larger than max (") || !strings.HasSuffix(s.Message(), " vs. 2097152)") {
		t.Errorf("got %v", err)
	}
	r := must[*pb.RangeResponse](t)(m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("k")}))
	if len(r.Kvs[0].Value) != 3<<19-64 {
		t.Errorf("%d bytes came back", len(r.Kvs[0].Value))
	}
}

// TestResponseRoom bounds the bytes of answers.
func TestResponseRoom(t *testing.T) {
	m := start(t, func(o *Options) { o.ResponseBytes, o.InlineBytes = 100<<10, 1<<10 })
	ctx := t.Context()
	for i := range 4 {
		m.put(t, fmt.Sprint("k", i), strings.Repeat("v", 30<<10))
	}
	r := must[*pb.RangeResponse](t)(m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), Limit: 3}))
	if len(r.Kvs) != 3 {
		t.Errorf("%d keys", len(r.Kvs))
	}
	_, err := m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")})
	if s := status.Convert(err); s.Code() != codes.ResourceExhausted || !strings.Contains(s.Message(), "fewer keys") {
		t.Errorf("got %v", err)
	}
	// A write that was made says so, though its answer cannot be.
	_, err = m.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), PrevKv: true})
	if s := status.Convert(err); s.Code() != codes.Unavailable || !strings.Contains(s.Message(), "committed at revision 6") {
		t.Errorf("got %v", err)
	}
	if r := must[*pb.RangeResponse](t)(m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")})); r.Count != 0 {
		t.Errorf("%d keys are left", r.Count)
	}
}

// A list of keys without values is reckoned by how many of them are asked for, not
// by how many there are.
func TestEstimateOfKeys(t *testing.T) {
	m := start(t, nil)
	for i := range 50 {
		m.put(t, fmt.Sprintf("k%02d", i), "v")
	}
	v := m.s.view()
	defer v.Release()
	for limit, want := range map[int64]int64{0: 50, 7: 7, 50: 50, 51: 50, math.MaxInt64: 50} {
		op := state.OpReply{Kind: state.OpRange, View: v.KV(), Key: []byte("k"), End: []byte("l"), Range: mvcc.RangeOptions{KeysOnly: true, Limit: limit}}
		if got, exact := estimate(&op); got != want*keyGuess || exact {
			t.Errorf("limit %d: %d bytes, exactly: %v", limit, got, exact)
		}
	}
}

// Lists that hold all the room, and others that wait for theirs, must not hold
// up those who read a key.
func TestSmallAnswersPassTheLine(t *testing.T) {
	m := start(t, func(o *Options) { o.ResponseBytes, o.InlineBytes = 200<<10, 4<<10 })
	m.put(t, "a", "1")
	m.fill(t, 20)
	if !m.s.room.try(m.s.o.ResponseBytes) {
		t.Fatal("the room is not free")
	}
	defer m.s.room.release(m.s.o.ResponseBytes)
	listed := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, err := m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")})
		listed <- err
	}()
	defer func() { cancel(); <-listed }()
	for waiting := 0; waiting == 0; {
		m.s.room.mu.Lock()
		waiting = len(m.s.room.line)
		m.s.room.mu.Unlock()
	}
	for range 3 {
		got, err := m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("a")}) // in line behind the list it would be refused in the end
		if err != nil || len(got.Kvs) != 1 {
			t.Fatalf("a key beside lists that wait: %v, %v", got, err)
		}
	}
	select {
	case err := <-listed:
		t.Fatalf("the list did not wait: %v", err)
	default:
	}
}

// TestPlaces bounds the requests that may need a worker: a write is refused
// before it is made.
func TestPlaces(t *testing.T) {
	m := start(t, func(o *Options) { o.PendingAnswers = 1 })
	ctx := t.Context()
	m.put(t, "a", "1")
	hold := make(chan struct{})
	m.hold.Store(&hold)
	first := make(chan error)
	ask := func() error {
		_, err := m.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("a"), PrevKv: true})
		return err
	}
	go func() { first <- ask() }()
	for len(m.s.answers.slots) == 0 { // till the first is under way
		time.Sleep(time.Millisecond)
	}
	wantError(t, ask(), errTooManyRequests)
	m.hold.Store(nil)
	close(hold)
	if err := <-first; err != nil {
		t.Error(err)
	}
	if err := ask(); err != nil {
		t.Errorf("the place was not given up: %v", err)
	}
}

// TestCancelled ends calls whose answers come too late or never.
func TestCancelled(t *testing.T) {
	m := start(t, nil)
	m.put(t, "a", strings.Repeat("v", 4096))
	hold := make(chan struct{})
	m.readHold.Store(&hold)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("a")}); status.Code(err) != codes.DeadlineExceeded { // the client's own words for it vary
		t.Errorf("got %v", err)
	}

	ctx, cancel = context.WithCancel(t.Context())
	got := make(chan error)
	go func() {
		_, err := m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("a")})
		got <- err
	}()
	cancel()
	if err := <-got; status.Code(err) != codes.Canceled {
		t.Errorf("got %v", err)
	}
	if r := must[*pb.RangeResponse](t)(m.kv.Range(t.Context(), &pb.RangeRequest{Key: []byte("a"), Serializable: true})); r.Count != 1 {
		t.Errorf("got %v", r)
	}
	close(hold) // the answers are dropped, and their room given back
}

// TestColdValues reads what memory does not hold.
func TestColdValues(t *testing.T) {
	m := startOn(t, newEngine(t, -1), nil)
	ctx := t.Context()
	for i := range 200 {
		m.put(t, fmt.Sprintf("k%03d", i), strings.Repeat(string(rune('a'+i%26)), 32<<10))
	}
	v := m.machine.View()
	cold := !v.InMemory([]byte("k000"), nil, 1<<20)
	v.Release()
	if !cold {
		t.Fatal("the value is in memory")
	}
	one := must[*pb.RangeResponse](t)(m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("k000")}))
	if len(one.Kvs) != 1 || string(one.Kvs[0].Value) != strings.Repeat("a", 32<<10) {
		t.Errorf("got %d keys", len(one.Kvs))
	}
	txn := must[*clientv3.TxnResponse](t)(m.client.Txn(ctx).If(clientv3.Compare(clientv3.Value("k001"), "=", strings.Repeat("b", 32<<10))).
		Then(clientv3.OpGet("k002")).Commit())
	if !txn.Succeeded || string(txn.Responses[0].GetResponseRange().Kvs[0].Value) != strings.Repeat("c", 32<<10) {
		t.Errorf("succeeded %v", txn.Succeeded)
	}
	del := must[*pb.DeleteRangeResponse](t)(m.kv.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("k0"), RangeEnd: []byte("k1"), PrevKv: true}))
	if len(del.PrevKvs) != 100 || string(del.PrevKvs[27].Value) != strings.Repeat("b", 32<<10) {
		t.Errorf("%d previous values", len(del.PrevKvs))
	}
}

// TestMixedLoad has many clients read, write and give up while there is room for
// few answers; each call gets one answer, and nothing is left over (see start).
func TestMixedLoad(t *testing.T) {
	m := start(t, func(o *Options) {
		o.ResponseBytes, o.InlineBytes, o.Workers, o.PendingAnswers = 256<<10, 4<<10, 2, 64
		o.RequestTimeout = 500 * time.Millisecond
	})
	for i := range 20 {
		m.put(t, fmt.Sprintf("k%02d", i), strings.Repeat("v", 4<<10))
	}
	deadline := time.Now().Add(time.Second)
	var answered, refused, gaveUp atomic.Int64
	var wg sync.WaitGroup
	for client := range 16 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(client), 1))
			for time.Now().Before(deadline) || answered.Load() == 0 && time.Now().Before(deadline.Add(time.Minute)) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+rnd.IntN(40))*time.Millisecond)
				var err error
				switch rnd.IntN(4) {
				case 0:
					_, err = m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")})
				case 1:
					_, err = m.kv.Range(ctx, &pb.RangeRequest{Key: []byte("k03")})
				case 2:
					_, err = m.kv.Put(ctx, &pb.PutRequest{Key: []byte("k05"), Value: make([]byte, 4<<10), PrevKv: true})
				case 3:
					_, err = m.client.Txn(ctx).If(clientv3.Compare(clientv3.Version("k05"), ">", 0)).
						Then(clientv3.OpPut("k06", strings.Repeat("w", 4<<10)), clientv3.OpGet("k", clientv3.WithPrefix())).Commit()
				}
				cancel()
				switch status.Code(toStatus(err)) {
				case codes.OK:
					answered.Add(1)
				case codes.DeadlineExceeded, codes.Canceled:
					gaveUp.Add(1)
				case codes.ResourceExhausted, codes.Unavailable, codes.Unknown:
					refused.Add(1)
				default:
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("got %v", err)
					}
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d answered, %d refused, %d gave up", answered.Load(), refused.Load(), gaveUp.Load())
	if answered.Load() == 0 {
		t.Error("no call was answered")
	}
}

// TestListsWhileWritten: the values of a list are taken from where the store keeps
// them while it is sent, whatever is put meanwhile.
func TestListsWhileWritten(t *testing.T) {
	m := start(t, func(o *Options) { o.InlineBytes = 1 << 10 })
	const keys, size = 400, 8 << 10
	put := func(round int) {
		for i := range keys {
			m.put(t, fmt.Sprintf("k%03d", i), strings.Repeat(string(rune('a'+round)), size))
		}
	}
	put(0)
	conn := m.dialNarrow(t)
	defer conn.Close()
	stop := make(chan struct{})
	var lists sync.WaitGroup
	for range 3 {
		lists.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				r, err := pb.NewKVClient(conn).Range(t.Context(), &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}, grpc.MaxCallRecvMsgSize(1<<30))
				if err != nil || len(r.Kvs) != keys || r.Count != keys {
					t.Errorf("%d keys, %v", len(r.GetKvs()), err)
					return
				}
				for i, kv := range r.Kvs {
					// All of one round and, as they are written in order, older ones behind newer ones.
					if v := kv.Value; string(kv.Key) != fmt.Sprintf("k%03d", i) || len(v) != size || strings.Count(string(v), string(v[:1])) != size ||
						kv.ModRevision > r.Header.Revision || i > 0 && v[0] > r.Kvs[i-1].Value[0] {
						t.Errorf("key %d is %q with %d bytes of %q, written at %d, listed at %d", i, kv.Key, len(v), v[:1], kv.ModRevision, r.Header.Revision)
						return
					}
				}
			}
		})
	}
	for round := range 4 {
		put(1 + round)
	}
	close(stop)
	lists.Wait()
}
