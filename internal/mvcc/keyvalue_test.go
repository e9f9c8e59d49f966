package mvcc

import (
	"bytes"
	"math"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"
)

var keyValues = []keyValue{
	{},
	{key: []byte("a"), create: 2, mod: 3, version: 2, value: []byte("2")},
	{key: []byte("a"), value: []byte{0}, lease: -1},
	{key: bytes.Repeat([]byte("k"), 200), create: math.MaxInt64, mod: math.MaxInt64, version: 128, value: bytes.Repeat([]byte("v"), 70000), lease: math.MinInt64},
	{value: []byte("no key")},
}

// The encoding must be byte by byte that of etcd.
func TestKeyValueEncoding(t *testing.T) {
	for _, kv := range keyValues {
		got := kv.append(nil)
		want, err := proto.MarshalOptions{Deterministic: true}.Marshal(&mvccpb.KeyValue{
			Key: kv.key, CreateRevision: kv.create, ModRevision: kv.mod, Version: kv.version, Value: kv.value, Lease: kv.lease,
		})
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) || len(got) != kv.size() {
			t.Errorf("%.80x (size %d), want %.80x", got, kv.size(), want)
		}
		if !bytes.Equal(keyOf(got), kv.key) || !bytes.Equal(ValueOf(got), kv.value) {
			t.Errorf("%.80x has key %q and value %.20q", got, keyOf(got), ValueOf(got))
		}
		bare, err := withoutValue(got)
		if err != nil {
			t.Fatal(err)
		}
		if kv.value = nil; !bytes.Equal(bare, kv.append(nil)) {
			t.Errorf("without value: %.80x", bare)
		}
	}
}

// What decodeKeyValue accepts, protobuf must accept with the same meaning.
func FuzzDecodeKeyValue(f *testing.F) {
	for _, kv := range keyValues {
		if kv.size() < 1000 {
			f.Add(kv.append(nil))
		}
	}
	f.Add([]byte{tagKey, 5, 'a'})
	f.Add([]byte{0, 1})                                  // there is no field 0
	f.Add([]byte{0x38, 1, 0x42, 1, 'x', tagKey, 1, 'a'}) // unknown fields
	f.Fuzz(func(t *testing.T, b []byte) {
		kv, err := decodeKeyValue(b)
		var want mvccpb.KeyValue
		wantErr := proto.Unmarshal(b, &want)
		keyOf(b) // must not panic whatever the bytes
		if err != nil {
			return // groups and fixed fields are refused: etcd never writes them
		}
		if wantErr != nil {
			t.Fatalf("%x is accepted, protobuf says %v", b, wantErr)
		}
		if !bytes.Equal(kv.key, want.Key) || !bytes.Equal(kv.value, want.Value) || kv.create != want.CreateRevision ||
			kv.mod != want.ModRevision || kv.version != want.Version || kv.lease != want.Lease {
			t.Fatalf("%x is %+v, protobuf says %v", b, kv, &want)
		}
	})
}
