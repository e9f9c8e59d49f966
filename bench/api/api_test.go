package api

import (
	"bytes"
	"slices"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
)

// TestRequests reads what is built back through the generated types, and demands the same bytes from them: so servers
// take their fast path.
func TestRequests(t *testing.T) {
	key, end, value := []byte("/p/000007"), []byte("/p0"), bytes.Repeat([]byte("v"), 300)
	put := func(lease int64) *pb.PutRequest { return &pb.PutRequest{Key: key, Value: value, Lease: lease} }
	unchanged := func(rev int64) []*pb.Compare {
		return []*pb.Compare{{Target: pb.Compare_MOD, Key: key, TargetUnion: &pb.Compare_ModRevision{ModRevision: rev}}}
	}
	get := []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key}}}}
	putOp := func(lease int64) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: put(lease)}}
	}
	for name, c := range map[string]struct {
		got  []byte
		want proto.Message
	}{
		"put":           {AppendPut(nil, key, value, 0), put(0)},
		"put, lease":    {AppendPut(nil, key, value, 1<<62), put(1 << 62)},
		"get":           {AppendRange(nil, key, RangeOptions{Serializable: true}), &pb.RangeRequest{Key: key, Serializable: true}},
		"page":          {AppendRange(nil, key, RangeOptions{End: end, Limit: 500, Revision: 9, KeysOnly: true}), &pb.RangeRequest{Key: key, RangeEnd: end, Limit: 500, Revision: 9, KeysOnly: true}},
		"count":         {AppendRange(nil, key, RangeOptions{End: end, CountOnly: true}), &pb.RangeRequest{Key: key, RangeEnd: end, CountOnly: true}},
		"delete range":  {AppendDeleteRange(nil, key, end), &pb.DeleteRangeRequest{Key: key, RangeEnd: end}},
		"compact":       {AppendCompaction(nil, 9), &pb.CompactionRequest{Revision: 9, Physical: true}},
		"watch":         {AppendWatch(nil, key, end, 2, 7), &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: key, RangeEnd: end, StartRevision: 2, WatchId: 7}}}},
		"grant":         {AppendGrant(nil, 1<<62, 60), &pb.LeaseGrantRequest{ID: 1 << 62, TTL: 60}},
		"renew":         {AppendLease(nil, 1<<62), &pb.LeaseKeepAliveRequest{ID: 1 << 62}},
		"authenticate":  {AppendAuthenticate(nil, "root", "secret"), &pb.AuthenticateRequest{Name: "root", Password: "secret"}},
		"update":        {AppendUpdate(nil, key, value, 0, 5), &pb.TxnRequest{Compare: unchanged(5), Success: []*pb.RequestOp{putOp(0)}, Failure: get}},
		"update, lease": {AppendUpdate(nil, key, value, 1<<61, 1<<40), &pb.TxnRequest{Compare: unchanged(1 << 40), Success: []*pb.RequestOp{putOp(1 << 61)}, Failure: get}},
		"create":        {AppendUpdate(nil, key, nil, 0, 0), &pb.TxnRequest{Compare: unchanged(0), Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key}}}}, Failure: get}},
		"delete": {AppendDelete(nil, key, 5), &pb.TxnRequest{Compare: unchanged(5), Failure: get,
			Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: key}}}}}},
		"puts": {AppendPutOp(AppendPutOp(nil, key, value), key, value), &pb.TxnRequest{Success: []*pb.RequestOp{putOp(0), putOp(0)}}},
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

func marshal(t *testing.T, m proto.Message) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestAnswers(t *testing.T) {
	header := &pb.ResponseHeader{ClusterId: 1, MemberId: 2, Revision: 300, RaftTerm: 4}
	if id, ttl, err := Renewed(marshal(t, &pb.LeaseKeepAliveResponse{Header: header, ID: 1 << 62, TTL: 60})); err != nil || id != 1<<62 || ttl != 60 {
		t.Errorf("renewed %d for %d, %v", id, ttl, err)
	}
	if rev, err := Revision(marshal(t, &pb.PutResponse{Header: header})); err != nil || rev != 300 {
		t.Errorf("revision %d, %v", rev, err)
	}
	if _, err := Revision(marshal(t, &pb.PutResponse{})); err == nil {
		t.Error("no revision, no error")
	}
	kvs := []*mvccpb.KeyValue{{Key: []byte("a"), Value: []byte("1"), ModRevision: 8}, {Key: []byte("b"), Value: []byte("2"), ModRevision: 9}}
	if k, err := KvsOf(marshal(t, &pb.RangeResponse{Header: header, Kvs: kvs, Count: 7})); err != nil || k.Keys != 2 || string(k.Value) != "2" || k.ModRevision != 9 || k.Count != 7 {
		t.Errorf("kvs %+v, %v", k, err)
	}
	if r, err := TxnOf(marshal(t, &pb.TxnResponse{Header: header, Succeeded: true})); err != nil || !r.Succeeded || r.Revision != 300 || r.Found {
		t.Errorf("success %+v, %v", r, err)
	}
	failed := &pb.TxnResponse{Header: header, Responses: []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponseRange{ResponseRange: &pb.RangeResponse{Header: header, Kvs: kvs[:1], Count: 1}}}}}
	if r, err := TxnOf(marshal(t, failed)); err != nil || r.Succeeded || !r.Found || r.Changed != 8 {
		t.Errorf("failure %+v, %v", r, err)
	}
	var seen []Event
	e, err := EventsOf(marshal(t, &pb.WatchResponse{Header: header, WatchId: 5, Created: true, Canceled: true, CompactRevision: 3, CancelReason: "why",
		Events: []*mvccpb.Event{{Kv: kvs[0]}, {Type: mvccpb.DELETE, Kv: kvs[1]}}}), func(w int64, e *Event) {
		if w != 5 {
			t.Errorf("watcher %d", w)
		}
		seen = append(seen, *e)
	})
	if err != nil || e.Count != 2 || e.Watcher != 5 || !e.Created || !e.Canceled || e.Compacted != 3 || string(e.Reason) != "why" {
		t.Errorf("events %+v, %v", e, err)
	}
	if len(seen) != 2 || string(seen[0].Key) != "a" || seen[0].Deleted || seen[0].ModRevision != 8 || !seen[1].Deleted || string(seen[1].Value) != "2" {
		t.Errorf("seen %+v", seen)
	}
	if token, err := TokenOf(marshal(t, &pb.AuthenticateResponse{Header: header, Token: "t"})); err != nil || token != "t" {
		t.Errorf("token %q, %v", token, err)
	}
	if v, err := VersionOf(marshal(t, &pb.StatusResponse{Header: header, Version: "3.7.3"})); err != nil || v != "3.7.3" {
		t.Errorf("version %q, %v", v, err)
	}
	if n := Deleted(marshal(t, &pb.DeleteRangeResponse{Header: header, Deleted: 4})); n != 4 {
		t.Errorf("deleted %d", n)
	}
	if id := Granted(marshal(t, &pb.LeaseGrantResponse{Header: header, ID: 6, TTL: 1})); id != 6 {
		t.Errorf("granted %d", id)
	}
	if _, err := KvsOf([]byte{0x12, 0x05, 0x00}); err == nil {
		t.Error("a cut answer is no error")
	}
}

// TestPages reads an answer in every possible piece.
func TestPages(t *testing.T) {
	var kvs []*mvccpb.KeyValue
	for i := range 5 {
		kvs = append(kvs, &mvccpb.KeyValue{Key: bytes.Repeat([]byte{'a' + byte(i)}, 200), Value: make([]byte, i*700), ModRevision: int64(i + 1)})
	}
	answer := marshal(t, &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 300}, Kvs: kvs, More: true, Count: 1 << 40})
	var p Pages
	for size := 1; size <= len(answer); size++ {
		p.Reset()
		for b := range slices.Chunk(answer, size) {
			p.Add(b)
		}
		if err := p.Err(); err != nil || p.Keys != 5 || !p.More || p.Count != 1<<40 || p.Revision() != 300 || !bytes.Equal(p.Last(), kvs[4].Key) {
			t.Fatalf("in pieces of %d: %+v, last %q, %v", size, p, p.Last(), err)
		}
	}
	p.Reset()
	if p.Err() != nil || p.Last() != nil || p.Revision() != 0 {
		t.Error("an empty answer")
	}
	p.Add(answer[:len(answer)-10])
	if p.Err() == nil {
		t.Error("a cut answer is no error")
	}
	p.Reset()
	p.Add([]byte{0x0f})
	if p.Err() == nil {
		t.Error("a broken answer is no error")
	}
}

// TestPagesOfAStream reads the messages of a RangeStream, each in every possible piece.
func TestPagesOfAStream(t *testing.T) {
	var messages [][]byte
	for i := range 5 {
		part := &pb.RangeResponse{Kvs: []*mvccpb.KeyValue{{Key: bytes.Repeat([]byte{'a' + byte(i)}, 200), Value: make([]byte, i*200), ModRevision: int64(i + 1)}}}
		if i == 4 {
			part.Header, part.More, part.Count = &pb.ResponseHeader{Revision: 300}, true, 1<<40
		}
		messages = append(messages, marshal(t, &pb.RangeStreamResponse{RangeResponse: part}), nil)
	}
	var p Pages
	for size := 1; size <= len(messages[8]); size++ {
		p.Reset()
		for _, m := range messages {
			for len(m) > size {
				p.AddStream(m[:size], false)
				m = m[size:]
			}
			p.AddStream(m, true)
		}
		if err := p.Err(); err != nil || p.Keys != 5 || !p.More || p.Count != 1<<40 || p.Revision() != 300 || p.Last()[0] != 'e' {
			t.Fatalf("in pieces of %d: %+v, last %q, %v", size, p, p.Last(), err)
		}
	}
	for _, broken := range [][]byte{messages[8][:len(messages[8])-1], {0x12, 0x00}, {0x0a}} {
		p.Reset()
		p.AddStream(broken, true)
		if p.Err() == nil {
			t.Errorf("a message %x… is no error", broken[:1])
		}
	}
}

func TestPrefixEnd(t *testing.T) {
	for in, want := range map[string]string{"/a/": "/a0", "a\xff": "b", "\xff": "\x00"} {
		if got := PrefixEnd([]byte(in)); string(got) != want {
			t.Errorf("end of %q is %q, want %q", in, got, want)
		}
	}
}

// FuzzAnswers reads anything, in one piece and in many: nothing panics, and both ways come to the same. What the generated type
// reads without unknown fields means the same to us.
func FuzzAnswers(f *testing.F) {
	answer, err := proto.Marshal(&pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 300}, More: true, Count: 5,
		Kvs: []*mvccpb.KeyValue{{Key: []byte("a"), Value: []byte("1"), ModRevision: 8}, {Key: []byte("b")}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(answer, 1)
	f.Add([]byte{0x12, 0x05, 0x00}, 2)
	f.Add([]byte{0x0f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, 3)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		var whole, parts Pages
		whole.Add(b)
		for p := range slices.Chunk(b, max(1, min(size, len(b)))) {
			parts.Add(p)
		}
		if (whole.Err() == nil) != (parts.Err() == nil) {
			t.Fatalf("whole: %v, in parts: %v", whole.Err(), parts.Err())
		}
		if whole.Err() == nil && (whole.Keys != parts.Keys || whole.More != parts.More || whole.Count != parts.Count || whole.Revision() != parts.Revision() || !bytes.Equal(whole.Last(), parts.Last())) {
			t.Fatalf("whole: %+v, in parts: %+v", whole, parts)
		}
		var r pb.RangeResponse
		if proto.Unmarshal(b, &r) == nil && len(r.ProtoReflect().GetUnknown()) == 0 && whole.Err() == nil && (whole.Keys != len(r.Kvs) || whole.More != r.More || whole.Count != r.Count) {
			t.Fatalf("read %+v, the generated type %v", whole, &r)
		}
		_, _ = KvsOf(b)
		_, _ = TxnOf(b)
		_, _ = EventsOf(b, func(int64, *Event) {})
		_, _, _ = Renewed(b)
		var stream Pages
		stream.AddStream(b, true)
		_ = EachKv(b, func([]byte, int64) {})
	})
}
