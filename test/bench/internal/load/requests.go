// Package load makes requests and sends them at a server, closed loop or open loop, and counts what comes back.
//
// It knows etcd's wire forms and nothing of which server it talks to. Requests are built as bytes and answers are looked
// at only as far as the measurement needs, since whatever the generator spends the server lacks.
package load

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// Paths of the calls.
const (
	Put        = "/etcdserverpb.KV/Put"
	Range      = "/etcdserverpb.KV/Range"
	Txn        = "/etcdserverpb.KV/Txn"
	Compact    = "/etcdserverpb.KV/Compact"
	Watch      = "/etcdserverpb.Watch/Watch"
	LeaseGrant = "/etcdserverpb.Lease/LeaseGrant"
	KeepAlive  = "/etcdserverpb.Lease/LeaseKeepAlive"
	KeyPrefix  = "/registry/pods/default/"
	keyDigits  = 9
	maxKeySize = len(KeyPrefix) + keyDigits
)

// Key is the i-th key. All are of one length, and in order.
func Key(i int) []byte {
	return fmt.Appendf(make([]byte, 0, maxKeySize), "%s%0*d", KeyPrefix, keyDigits, i)
}

// KeysEnd is the end of the range of all keys.
func KeysEnd() []byte {
	end := []byte(KeyPrefix)
	end[len(end)-1]++
	return end
}

// Value is size bytes that do not compress to nothing.
func Value(size int) []byte {
	v := make([]byte, size)
	state := uint64(size) | 1
	for i := range v {
		state = state*6364136223846793005 + 1442695040888963407
		v[i] = byte(state >> 56)
	}
	return v
}

// AppendPut appends a PutRequest.
func AppendPut(b, key, value []byte) []byte {
	b = appendBytes(b, 1, key)
	return appendBytes(b, 2, value)
}

// RangeOptions are the fields of a RangeRequest beside its key.
type RangeOptions struct {
	End             []byte
	Limit, Revision int64
	Serializable    bool
}

// AppendRange appends a RangeRequest.
func AppendRange(b, key []byte, o RangeOptions) []byte {
	b = appendBytes(b, 1, key)
	b = appendBytes(b, 2, o.End)
	b = appendInt(b, 3, o.Limit)
	b = appendInt(b, 4, o.Revision)
	if o.Serializable {
		b = appendInt(b, 7, 1)
	}
	return b
}

// AppendUpdate appends the TxnRequest with which Kubernetes updates an object: if the key was last changed at modRevision
// put the value, else get the key.
func AppendUpdate(b, key, value []byte, modRevision int64) []byte {
	const equal, target = 0, 2 // Compare.EQUAL and Compare.MOD; EQUAL is the zero value and not sent
	var cmp []byte
	cmp = appendInt(cmp, 1, equal)
	cmp = appendInt(cmp, 2, target)
	cmp = appendBytes(cmp, 3, key)
	cmp = protowire.AppendTag(cmp, 6, protowire.VarintType) // a oneof: sent also when it is 0
	cmp = protowire.AppendVarint(cmp, uint64(modRevision))
	b = appendBytes(b, 1, cmp)
	b = appendBytes(b, 2, appendBytes(nil, 2, AppendPut(nil, key, value)))               // RequestOp.request_put
	return appendBytes(b, 3, appendBytes(nil, 1, AppendRange(nil, key, RangeOptions{}))) // RequestOp.request_range
}

// AppendPuts appends a TxnRequest that puts the keys from..to-1.
func AppendPuts(b []byte, from, to int, value []byte) []byte {
	for i := from; i < to; i++ {
		b = appendBytes(b, 2, appendBytes(nil, 2, AppendPut(nil, Key(i), value)))
	}
	return b
}

// AppendCompaction appends a CompactionRequest that is answered when the work is done.
func AppendCompaction(b []byte, revision int64) []byte {
	return appendInt(appendInt(b, 1, revision), 2, 1)
}

// AppendWatch appends a WatchRequest that creates a watcher. startRevision 0 means from now.
func AppendWatch(b, key, end []byte, startRevision int64) []byte {
	create := appendBytes(nil, 1, key)
	create = appendBytes(create, 2, end)
	create = appendInt(create, 3, startRevision)
	return appendBytes(b, 1, create)
}

// LeaseID is the ID of the i-th lease, as long as one that a server picks.
func LeaseID(i int) int64 { return 1<<62 | int64(i) }

// AppendGrant appends a LeaseGrantRequest.
func AppendGrant(b []byte, id, ttl int64) []byte { return appendInt(appendInt(b, 1, ttl), 2, id) }

// AppendLease appends a LeaseKeepAliveRequest.
func AppendLease(b []byte, id int64) []byte { return appendInt(b, 1, id) }

// appendBytes and appendInt leave out what is empty, as protobuf does.
func appendBytes(b []byte, field protowire.Number, v []byte) []byte {
	if len(v) == 0 {
		return b
	}
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), v)
}

func appendInt(b []byte, field protowire.Number, v int64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), uint64(v))
}
