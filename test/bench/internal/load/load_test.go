package load

import (
	"slices"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
)

// TestRequests reads what is built back through the generated types, and demands the same bytes from them: so servers
// take their fast path.
func TestRequests(t *testing.T) {
	key, value := Key(7), []byte("v")
	put := &pb.PutRequest{Key: key, Value: value}
	for name, c := range map[string]struct {
		got  []byte
		want proto.Message
	}{
		"put":     {AppendPut(nil, key, value), put},
		"get":     {AppendRange(nil, key, RangeOptions{Serializable: true}), &pb.RangeRequest{Key: key, Serializable: true}},
		"page":    {AppendRange(nil, key, RangeOptions{End: KeysEnd(), Limit: 500, Revision: 9}), &pb.RangeRequest{Key: key, RangeEnd: KeysEnd(), Limit: 500, Revision: 9}},
		"compact": {AppendCompaction(nil, 9), &pb.CompactionRequest{Revision: 9, Physical: true}},
		"watch": {AppendWatch(nil, key, KeysEnd(), 2), &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{
			CreateRequest: &pb.WatchCreateRequest{Key: key, RangeEnd: KeysEnd(), StartRevision: 2}}}},
		"grant": {AppendGrant(nil, LeaseID(3), 60), &pb.LeaseGrantRequest{ID: LeaseID(3), TTL: 60}},
		"renew": {AppendLease(nil, LeaseID(3)), &pb.LeaseKeepAliveRequest{ID: LeaseID(3)}},
		"update": {AppendUpdate(nil, key, value, 5), &pb.TxnRequest{
			Compare: []*pb.Compare{{Target: pb.Compare_MOD, Key: key, TargetUnion: &pb.Compare_ModRevision{ModRevision: 5}}},
			Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: put}}},
			Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key}}}},
		}},
		"puts": {AppendPuts(nil, 7, 8, value), &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: put}}}}},
	} {
		read := c.want.ProtoReflect().New().Interface()
		if err := proto.Unmarshal(c.got, read); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if !proto.Equal(read, c.want) {
			t.Errorf("%s: built %s, want %s", name, prototext.Format(read), prototext.Format(c.want))
		}
		if want, err := (proto.MarshalOptions{Deterministic: true}).Marshal(c.want); err != nil || !slices.Equal(c.got, want) {
			t.Errorf("%s: built %x, the generated type %x (%v)", name, c.got, want, err)
		}
	}
}

func TestAnswers(t *testing.T) {
	header := &pb.ResponseHeader{ClusterId: 1, MemberId: 2, Revision: 300, RaftTerm: 4}
	marshal := func(m proto.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if id, ttl, err := Renewed(marshal(&pb.LeaseKeepAliveResponse{Header: header, ID: LeaseID(3), TTL: 60})); err != nil || id != LeaseID(3) || ttl != 60 {
		t.Errorf("renewed %d for %d, %v", id, ttl, err)
	}
	if rev, err := Revision(marshal(&pb.PutResponse{Header: header})); err != nil || rev != 300 {
		t.Errorf("revision %d, %v", rev, err)
	}
	if _, err := Revision(marshal(&pb.PutResponse{})); err == nil {
		t.Error("no revision, no error")
	}
	kvs := []*mvccpb.KeyValue{{Key: []byte("a"), Value: []byte("1")}, {Key: []byte("b"), Value: []byte("2")}}
	p, err := PageOf(marshal(&pb.RangeResponse{Header: header, Kvs: kvs, More: true, Count: 9}))
	if err != nil || p.Keys != 2 || string(p.Last) != "b" || !p.More {
		t.Errorf("page %+v, %v", p, err)
	}
	if ok, err := Succeeded(marshal(&pb.TxnResponse{Header: header, Succeeded: true})); err != nil || !ok {
		t.Errorf("succeeded %t, %v", ok, err)
	}
	e, err := EventsOf(marshal(&pb.WatchResponse{Header: header, WatchId: 5, Created: true, Canceled: true, Events: []*mvccpb.Event{{Kv: kvs[0]}, {Kv: kvs[1]}}}))
	if err != nil || e.Count != 2 || string(e.Key) != "b" || string(e.Value) != "2" || e.Watcher != 5 || !e.Created || !e.Canceled {
		t.Errorf("events %+v, %v", e, err)
	}
	if _, err := PageOf([]byte{0x12, 0x05, 0x00}); err == nil {
		t.Error("a cut answer is no error")
	}
}

func TestHistogram(t *testing.T) {
	var h, other Histogram
	if h.Quantile(0.5) != 0 {
		t.Error("an empty histogram has a median")
	}
	for i := range 1000 {
		d := time.Duration(i+1) * time.Millisecond
		if i%2 == 0 {
			h.Add(d)
		} else {
			other.Add(d)
		}
	}
	h.Merge(&other)
	if h.Count() != 1000 {
		t.Errorf("counted %d", h.Count())
	}
	for _, q := range []float64{0, 0.5, 0.99, 1} {
		want := time.Duration(max(1, q*1000)) * time.Millisecond
		if got := h.Quantile(q); got < want || got > want+want/25+time.Millisecond {
			t.Errorf("quantile %v is %v, want about %v", q, got, want)
		}
	}
	for v := uint64(1); v < 1<<62; v = v*3/2 + 1 {
		if b := bucketOf(v); upperBound(b) < v || b > 0 && upperBound(b-1) >= v {
			t.Fatalf("%d falls into bucket %d, which ends at %d after one that ends at %d", v, b, upperBound(b), upperBound(b-1))
		}
	}
}
