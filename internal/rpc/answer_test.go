package rpc

import (
	"bytes"
	"slices"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/state"
)

// dice turns fuzz input into choices; at its end everything is 0.
type dice struct{ b []byte }

func (d *dice) next() byte {
	if len(d.b) == 0 {
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *dice) int64() int64 {
	v := int64(d.next()) << (8 * (d.next() % 8))
	if d.next()%8 == 0 {
		v = -v
	}
	return v
}

func (d *dice) bytes() []byte {
	n := min(int(d.next()%40), len(d.b))
	v := d.b[:n]
	d.b = d.b[n:]
	return bytes.Clone(v)
}

func (d *dice) kvs(t testing.TB) (encoded [][]byte, messages []*mvccpb.KeyValue) {
	for range d.next() % 4 {
		m := &mvccpb.KeyValue{Key: d.bytes(), Value: d.bytes(), CreateRevision: d.int64(), ModRevision: d.int64(), Version: d.int64(), Lease: d.int64()}
		raw, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		encoded, messages = append(encoded, raw), append(messages, m)
	}
	return encoded, messages
}

// build makes an answer and the message it stands for.
func build(t testing.TB, d *dice, depth int) (answer, proto.Message) {
	kinds := []state.OpKind{state.OpRange, state.OpPut, state.OpDeleteRange, state.OpTxn}
	a := answer{kind: kinds[d.next()%4]}
	if depth == 0 && a.kind == state.OpTxn {
		a.kind = state.OpRange
	}
	a.header = header{cluster: uint64(d.int64()), member: uint64(d.int64()), revision: d.int64(), term: uint64(d.int64())}
	h := &pb.ResponseHeader{ClusterId: a.header.cluster, MemberId: a.header.member, Revision: a.header.revision, RaftTerm: a.header.term}
	switch a.kind {
	case state.OpRange:
		m := &pb.RangeResponse{Header: h}
		a.kvs, m.Kvs = d.kvs(t)
		a.count, a.more = d.int64(), d.next()%2 == 1
		m.Count, m.More = a.count, a.more
		return a, m
	case state.OpPut:
		m := &pb.PutResponse{Header: h}
		if kvs, messages := d.kvs(t); len(kvs) > 0 {
			a.kvs, m.PrevKv = kvs[:1], messages[0]
		}
		return a, m
	case state.OpDeleteRange:
		m := &pb.DeleteRangeResponse{Header: h}
		a.kvs, m.PrevKvs = d.kvs(t)
		a.count = d.int64()
		m.Deleted = a.count
		return a, m
	}
	m := &pb.TxnResponse{Header: h, Succeeded: d.next()%2 == 1}
	a.succeeded = m.Succeeded
	for range d.next() % 5 {
		inner, message := build(t, d, depth-1)
		a.ops = append(a.ops, inner)
		op := &pb.ResponseOp{}
		switch message := message.(type) {
		case *pb.RangeResponse:
			op.Response = &pb.ResponseOp_ResponseRange{ResponseRange: message}
		case *pb.PutResponse:
			op.Response = &pb.ResponseOp_ResponsePut{ResponsePut: message}
		case *pb.DeleteRangeResponse:
			op.Response = &pb.ResponseOp_ResponseDeleteRange{ResponseDeleteRange: message}
		case *pb.TxnResponse:
			op.Response = &pb.ResponseOp_ResponseTxn{ResponseTxn: message}
		}
		m.Responses = append(m.Responses, op)
	}
	return a, m
}

// FuzzAnswer holds the assembled bytes to those of the generated types.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte{0})
	f.Add([]byte{3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 3, 2, 1, 0, 1, 2, 3})
	f.Add(bytes.Repeat([]byte{3, 255, 7, 1}, 60))
	f.Add(bytes.Repeat([]byte{0, 200, 5, 2, 33}, 80))
	f.Fuzz(func(t *testing.T, in []byte) {
		a, m := build(t, &dice{in}, 4)
		want, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if got := a.encode(); !bytes.Equal(got, want) {
			t.Fatalf("%v\n got %x\nwant %x", m, got, want)
		} else if len(got) != cap(got) {
			t.Fatalf("measured %d bytes, wrote %d", cap(got), len(got))
		}
		r, ok := m.(*pb.RangeResponse)
		if !ok {
			return
		}
		for _, step := range []int{1, 2, 7, len(want) + 1} {
			part := a // whose rows are used up
			part.kvs = slices.Clone(a.kvs)
			part.measure()
			head, rest := part.split()
			if n := len(head) + rest.Size(); n != len(want) {
				t.Fatalf("in two parts it has %d bytes, not %d", n, len(want))
			}
			got := bytes.Clone(head)
			for left := rest.Size(); left > 0; left -= min(step, left) {
				p := make([]byte, min(step, left))
				rest.Fill(p)
				got = append(got, p...)
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("in steps of %d: %v\n got %x\nwant %x", step, m, got, want)
			}
		}
		want, err = proto.Marshal(&pb.RangeStreamResponse{RangeResponse: r})
		if err != nil {
			t.Fatal(err)
		}
		if got := a.encodeChunk(); !bytes.Equal(got, want) {
			t.Fatalf("chunk %v\n got %x\nwant %x", m, got, want)
		}
		a.bare, r.Header = true, nil
		if want, err = proto.Marshal(&pb.RangeStreamResponse{RangeResponse: r}); err != nil {
			t.Fatal(err)
		}
		if got := a.encodeChunk(); !bytes.Equal(got, want) {
			t.Fatalf("bare chunk %v\n got %x\nwant %x", m, got, want)
		}
	})
}

func BenchmarkEncodePutAnswer(b *testing.B) {
	b.ReportAllocs()
	for range b.N {
		a := answer{kind: state.OpPut, header: header{cluster: 1 << 63, member: 1 << 62, revision: 123456, term: 7}}
		if len(a.encode()) == 0 {
			b.Fatal("no bytes")
		}
	}
}
