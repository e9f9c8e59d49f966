package command

import (
	"bytes"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

func benchDecode(b *testing.B, kind Kind, m proto.Message) {
	body := mustMarshal(b, m)
	data, err := AppendRequest(nil, kind, Header{ID: 0xac7c97ef0ec193b0}, body)
	if err != nil {
		b.Fatal(err)
	}
	var c Command
	b.ReportAllocs()
	for b.Loop() {
		if err := Decode(data, &c); err != nil {
			b.Fatal(err)
		}
	}
}

func benchPut() *pb.PutRequest {
	return &pb.PutRequest{Key: bytes.Repeat([]byte("k"), 40), Value: bytes.Repeat([]byte("v"), 256), Lease: 1 << 60}
}

// benchTxn is Kubernetes' update: compare mod revision, put, else get.
func benchTxn() *pb.TxnRequest {
	key := []byte("/registry/pods/default/some-pod-7f4d")
	return &pb.TxnRequest{
		Compare: []*pb.Compare{{Target: pb.Compare_MOD, Key: key, TargetUnion: &pb.Compare_ModRevision{ModRevision: 123456}}},
		Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key, Value: bytes.Repeat([]byte("v"), 1000)}}}},
		Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key}}}},
	}
}

func BenchmarkDecodePut(b *testing.B) { benchDecode(b, KindPut, benchPut()) }
func BenchmarkDecodeTxn(b *testing.B) { benchDecode(b, KindTxn, benchTxn()) }

func BenchmarkParsePut(b *testing.B) {
	raw := mustMarshal(b, benchPut())
	var r PutRequest
	b.ReportAllocs()
	for b.Loop() {
		if !ParsePut(raw, &r) {
			b.Fatal("not canonical")
		}
	}
}

func BenchmarkAppendPut(b *testing.B) {
	raw := mustMarshal(b, benchPut())
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf, _ = AppendRequest(buf[:0], KindPut, Header{ID: 0xac7c97ef0ec193b0}, raw)
	}
}

// BenchmarkGeneratedPut is what the generated type costs, for comparison.
func BenchmarkGeneratedPut(b *testing.B) {
	data, err := AppendRequest(nil, KindPut, Header{ID: 0xac7c97ef0ec193b0}, mustMarshal(b, benchPut()))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := proto.Unmarshal(data, new(pb.InternalRaftRequest)); err != nil {
			b.Fatal(err)
		}
	}
}
