package state

import (
	"fmt"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
)

// TestDeleteCost reckons what deletes leave behind, and leaves the store alone.
func TestDeleteCost(t *testing.T) {
	r := newRig(t, Options{})
	grant := func(id int64) {
		r.run(command.Header{}, command.KindLeaseGrant, &pb.LeaseGrantRequest{ID: id, TTL: 600})
	}
	put := func(key, value string, lease int64) {
		r.run(command.Header{}, command.KindPut, &pb.PutRequest{Key: []byte(key), Value: []byte(value), Lease: lease})
	}
	grant(7)
	grant(8)
	for i := range 100 {
		put(fmt.Sprintf("large/%03d", i), strings.Repeat("x", 1000), 7)
	}
	for i := range 10 {
		put(fmt.Sprintf("small/%d", i), "", 0)
	}
	del := func(key, end string) *pb.DeleteRangeRequest {
		return &pb.DeleteRangeRequest{Key: []byte(key), RangeEnd: []byte(end)}
	}
	op := func(key, end string) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: del(key, end)}}
	}
	nested := func(x *pb.TxnRequest) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: x}}
	}
	small := r.m.View()
	_, smallBytes := small.Count([]byte("small/"), []byte("small0"))
	small.Release()
	if smallBytes == 0 || smallBytes >= 10*tombstoneCost {
		t.Fatalf("ten keys without values have %d bytes", smallBytes)
	}
	const large = 100 * tombstoneCost
	for _, x := range []struct {
		kind command.Kind
		msg  proto.Message
		want int64
	}{
		{command.KindDeleteRange, del("large/000", ""), tombstoneCost},
		{command.KindDeleteRange, del("large/", "large0"), large},
		{command.KindDeleteRange, del("small/", "small0"), smallBytes},
		{command.KindDeleteRange, del("\x00", "\x00"), large + 10*tombstoneCost},
		{command.KindDeleteRange, del("none", ""), 0},
		{command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: 7}, large},
		{command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: 8}, 0},
		{command.KindLeaseRevoke, &pb.LeaseRevokeRequest{ID: 9}, 0},
		{command.KindTxn, &pb.TxnRequest{Success: []*pb.RequestOp{op("large/", "large0"), op("small/", "small0")}}, large + smallBytes},
		{command.KindTxn, &pb.TxnRequest{Success: []*pb.RequestOp{op("large/000", "")}, Failure: []*pb.RequestOp{
			nested(&pb.TxnRequest{Failure: []*pb.RequestOp{op("large/", "large0")}})}}, large},
		{command.KindCompaction, &pb.CompactionRequest{Revision: 5}, 0},
		{command.KindPut, &pb.PutRequest{Key: []byte("large/000"), Value: []byte("x")}, 0},
	} {
		data, err := command.AppendMessage(nil, x.kind, command.Header{ID: 1}, x.msg)
		if err != nil {
			t.Fatal(err)
		}
		var c command.Command
		if err := command.Decode(data, &c); err != nil {
			t.Fatal(err)
		}
		before := r.m.Root().Revision()
		if got := r.m.DeleteCost(&c); got != x.want {
			t.Errorf("%v %v: %d bytes, want %d", x.kind, x.msg, got, x.want)
		}
		if got := r.m.Root().Revision(); got != before {
			t.Errorf("%v: the revision went from %d to %d", x.kind, before, got)
		}
	}
}
