package command

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// parser turns a kind's wire form into the generated type by way of its Parse
// function.
type parser func(raw []byte) (m proto.Message, canonical bool)

func parsers() map[Kind]parser {
	return map[Kind]parser{
		KindPut: func(raw []byte) (proto.Message, bool) {
			var r PutRequest
			ok := ParsePut(raw, &r)
			return putMessage(&r), ok
		},
		KindRange: func(raw []byte) (proto.Message, bool) {
			var r RangeRequest
			ok := ParseRange(raw, &r)
			return rangeMessage(&r), ok
		},
		KindDeleteRange: func(raw []byte) (proto.Message, bool) {
			var r DeleteRangeRequest
			ok := ParseDeleteRange(raw, &r)
			return deleteMessage(&r), ok
		},
		KindTxn: func(raw []byte) (proto.Message, bool) {
			var r TxnRequest
			if !ParseTxn(raw, &r, new(TxnArena)) {
				return nil, false
			}
			return txnMessage(&r), true
		},
		KindCompaction: func(raw []byte) (proto.Message, bool) {
			var r CompactionRequest
			ok := ParseCompaction(raw, &r)
			return &pb.CompactionRequest{Revision: r.Revision, Physical: r.Physical}, ok
		},
	}
}

// checkParse checks C1 for one input, both ways: what parse accepts, the
// generated type accepts with equal fields and writes in as many bytes; what the
// generated type accepts and writes, parse accepts. It says what raw was.
func checkParse(t *testing.T, kind Kind, parse parser, raw []byte) string {
	want := kind.newMessage()
	err := proto.Unmarshal(raw, want)
	got, ok := parse(raw)
	if ok {
		if err != nil {
			t.Fatalf("%v %x: accepted, but not by the generated type: %v", kind, raw, err)
		}
		if !proto.Equal(got, want) {
			t.Fatalf("%v %x: decoded\n%v, want\n%v", kind, raw, got, want)
		}
		if size := proto.Size(want); size != len(raw) {
			t.Fatalf("%v %x: accepted %d bytes that would be written as %d", kind, raw, len(raw), size)
		}
	}
	norm, normErr := Normalize(kind, raw)
	if (normErr == nil) != (err == nil) && !errors.Is(normErr, ErrTooComplex) {
		t.Fatalf("%v %x: Normalize: %v, generated type: %v", kind, raw, normErr, err)
	}
	if normErr != nil {
		return "invalid"
	}
	if ok && !bytes.Equal(norm, raw) {
		t.Fatalf("%v: canonical %x became %x", kind, raw, norm)
	}
	again, normOK := parse(norm)
	if !normOK {
		t.Fatalf("%v: %x was normalized to %x, which is not canonical", kind, raw, norm)
	}
	known := kind.newMessage()
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(raw, known); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(again, known) {
		t.Fatalf("%v %x: normalized to\n%v, want\n%v", kind, raw, again, known)
	}
	if ok {
		return "canonical"
	}
	return "valid"
}

func fuzzParse(f *testing.F, kind Kind) {
	for _, s := range samples() {
		if s.kind == kind {
			f.Add(mustMarshal(f, s.msg))
		}
	}
	f.Add([]byte{0x0a, 0x81, 0x00, 'k'}) // length not minimal
	f.Add([]byte{0x0a, 0x01, 'k', 0x0a, 0x01, 'l'})
	f.Add([]byte{0x0a, 0x01, 'k', 0xa8, 0x01, 0x05}) // unknown field
	parse := parsers()[kind]
	f.Fuzz(func(t *testing.T, raw []byte) { checkParse(t, kind, parse, raw) })
}

func FuzzPut(f *testing.F)         { fuzzParse(f, KindPut) }
func FuzzRange(f *testing.F)       { fuzzParse(f, KindRange) }
func FuzzDeleteRange(f *testing.F) { fuzzParse(f, KindDeleteRange) }
func FuzzTxn(f *testing.F)         { fuzzParse(f, KindTxn) }
func FuzzCompaction(f *testing.F)  { fuzzParse(f, KindCompaction) }

// mutate changes an encoding in one of the ways in which encoders and attackers
// differ from the generated types.
func mutate(rng *rand.Rand, b []byte) []byte {
	b = bytes.Clone(b)
	at := func(n int) int { return rng.IntN(n + 1) }
	switch i := at(len(b)); rng.IntN(7) {
	case 0: // another byte
		if i < len(b) {
			b[i] = byte(rng.Uint32())
		}
	case 1: // a bit
		if i < len(b) {
			b[i] ^= 1 << rng.IntN(8)
		}
	case 2: // cut off
		return b[:i]
	case 3: // a piece twice, as a field may be
		j := i + at(len(b)-i)
		return slices.Concat(b[:j], b[i:j], b[j:])
	case 4: // a byte more, as in a varint that is too long
		return slices.Insert(b, i, []byte{0x80, 0x00, 0x01, 0xff, byte(rng.Uint32())}[rng.IntN(5)])
	case 5: // a byte less
		if i < len(b) {
			return slices.Delete(b, i, i+1)
		}
	case 6: // a tail of fields first
		return slices.Concat(b[i:], b[:i])
	}
	return b
}

// TestMutations feeds mutated messages to what the fuzz targets check, and
// wants to see inputs of each class.
func TestMutations(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	parse := parsers()
	seen := map[string]int{}
	for _, s := range samples() {
		body := mustMarshal(t, s.msg)
		entry, err := AppendRequest(nil, s.kind, Header{ID: 1, Username: "u", AuthRevision: 2}, body)
		if err != nil {
			t.Fatal(err)
		}
		for range 3000 {
			raw, data := body, entry
			for range 1 + rng.IntN(2) {
				raw, data = mutate(rng, raw), mutate(rng, data)
			}
			if p := parse[s.kind]; p != nil {
				seen[s.kind.String()+" "+checkParse(t, s.kind, p, raw)]++
			}
			seen["entry "+checkDecode(t, data)]++
		}
	}
	for _, what := range []string{"entry fast", "entry slow", "entry refused"} {
		if seen[what] < 100 {
			t.Errorf("%s: %d times only", what, seen[what])
		}
	}
	for kind := range parse {
		for _, class := range []string{"canonical", "valid", "invalid"} {
			if what := kind.String() + " " + class; seen[what] < 30 {
				t.Errorf("%s: %d times only", what, seen[what])
			}
		}
	}
}

// checkDecode checks C3 for one entry: what the generated type understands as
// one request, Decode understands too, and in the same way. It says which way
// Decode went.
func checkDecode(t *testing.T, data []byte) string {
	var c Command
	got := Decode(data, &c)
	way := "slow"
	if new(Command).decodeFast(data) {
		way = "fast"
	}
	m := new(pb.InternalRaftRequest)
	if err := proto.Unmarshal(data, m); err != nil {
		if got == nil && c.Kind != KindClusterVersionSet && c.Kind != KindClusterMemberAttrSet {
			t.Fatalf("%x: decoded %v, generated type says %v", data, c.Kind, err)
		}
		return "refused"
	}
	var want Command
	if err := want.fromMessage(m); err != nil {
		if got == nil && want.Kind != KindNone {
			t.Fatalf("%x: decoded %v, want error %v", data, c.Kind, err)
		}
		return "refused"
	}
	if got != nil {
		t.Fatalf("%x: not decoded: %v; generated type %v", data, got, m)
	}
	if c.ID != want.ID || c.Header != want.Header || c.Kind != want.Kind || !reflect.DeepEqual(c.FeatureLevel, want.FeatureLevel) || !proto.Equal(toMessage(&c), toMessage(&want)) {
		t.Fatalf("%x: decoded\n%v %+v %v, want\n%v %+v %v", data, c.Kind, c.Header, toMessage(&c), want.Kind, want.Header, toMessage(&want))
	}
	return way
}

func FuzzDecode(f *testing.F) {
	for _, s := range samples() {
		b, err := AppendMessage(nil, s.kind, Header{ID: 1, Username: "u", AuthRevision: 2}, s.msg)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	level, err := AppendFeatureLevel(nil, Header{ID: 1}, FeatureLevel{Level: 1, Fingerprint: 2})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(level)
	f.Add([]byte("\x08\x07\x12\x03PUT\x1a\x0a/0/version\x22\x053.5.0"))
	f.Fuzz(func(t *testing.T, data []byte) { checkDecode(t, data) })
}

// FuzzAppend: a header and a body that Normalize passed make an entry that the
// generated type reads back, and writes as the same bytes.
func FuzzAppend(f *testing.F) {
	for _, s := range samples() {
		f.Add(uint8(s.kind), uint64(9), "name", uint64(3), mustMarshal(f, s.msg))
	}
	f.Fuzz(func(t *testing.T, k uint8, id uint64, name string, revision uint64, raw []byte) {
		kind, h := Kind(k), Header{ID: id, Username: name, AuthRevision: revision}
		body, err := Normalize(kind, raw)
		if err != nil {
			return
		}
		data, err := AppendRequest(nil, kind, h, body)
		if err != nil {
			return
		}
		want := kind.newMessage()
		if err := proto.Unmarshal(body, want); err != nil {
			t.Fatal(err)
		}
		m := new(pb.InternalRaftRequest)
		if err := proto.Unmarshal(data, m); err != nil {
			t.Fatalf("generated type: %v", err)
		}
		if !proto.Equal(m, raftRequest(kind, h, want)) {
			t.Fatalf("entry is %v", m)
		}
		if size := RequestSize(kind, h, len(body)); size != len(data) || proto.Size(m) != size {
			t.Fatalf("%d bytes, RequestSize %d, generated type %d", len(data), size, proto.Size(m))
		}
		var c Command
		if err := Decode(data, &c); err != nil || c.Kind != kind || c.Header != h || !proto.Equal(toMessage(&c), want) {
			t.Fatalf("decoded %v %+v, %v", c.Kind, c.Header, err)
		}
	})
}
