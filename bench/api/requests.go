// Package api writes etcd's requests as bytes and reads from answers what a measurement needs: whatever a load generator spends,
// the server lacks. It knows messages, and nothing of who sends them.
//
// Requests come out as the generated types would write them, so that servers take the path that they take for real clients.
package api

import (
	"google.golang.org/protobuf/encoding/protowire"
)

// Methods.
const (
	Put          = "/etcdserverpb.KV/Put"
	Range        = "/etcdserverpb.KV/Range"
	RangeStream  = "/etcdserverpb.KV/RangeStream"
	DeleteRange  = "/etcdserverpb.KV/DeleteRange"
	Txn          = "/etcdserverpb.KV/Txn"
	Compact      = "/etcdserverpb.KV/Compact"
	Watch        = "/etcdserverpb.Watch/Watch"
	LeaseGrant   = "/etcdserverpb.Lease/LeaseGrant"
	LeaseRevoke  = "/etcdserverpb.Lease/LeaseRevoke"
	KeepAlive    = "/etcdserverpb.Lease/LeaseKeepAlive"
	Authenticate = "/etcdserverpb.Auth/Authenticate"
	Status       = "/etcdserverpb.Maintenance/Status"
)

// PrefixEnd is the end of the range of keys that begin with the prefix, which must hold a byte below 0xff.
func PrefixEnd(prefix []byte) []byte {
	end := append([]byte(nil), prefix...)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i] < 0xff {
			end[i]++
			return end[:i+1]
		}
	}
	return []byte{0}
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

// AppendPut appends a PutRequest; lease 0 is none.
func AppendPut(b, key, value []byte, lease int64) []byte {
	b = appendBytes(b, 1, key)
	b = appendBytes(b, 2, value)
	return appendInt(b, 3, lease)
}

func sizePut(key, value []byte, lease int64) int {
	return sizeBytes(key) + sizeBytes(value) + sizeInt(lease)
}

// RangeOptions are the fields of a RangeRequest beside its key.
type RangeOptions struct {
	End                               []byte
	Limit, Revision                   int64
	Serializable, KeysOnly, CountOnly bool
}

// AppendRange appends a RangeRequest.
func AppendRange(b, key []byte, o RangeOptions) []byte {
	b = appendBytes(b, 1, key)
	b = appendBytes(b, 2, o.End)
	b = appendInt(b, 3, o.Limit)
	b = appendInt(b, 4, o.Revision)
	b = appendBool(b, 7, o.Serializable)
	b = appendBool(b, 8, o.KeysOnly)
	return appendBool(b, 9, o.CountOnly)
}

// AppendDeleteRange appends a DeleteRangeRequest.
func AppendDeleteRange(b, key, end []byte) []byte {
	return appendBytes(appendBytes(b, 1, key), 2, end)
}

// AppendUpdate appends the TxnRequest with which Kubernetes creates or updates an object: if the key was last changed at
// modRevision (0: there is none) put the value, else get the key.
func AppendUpdate(b, key, value []byte, lease, modRevision int64) []byte {
	b = appendUnchanged(b, key, modRevision)
	put := sizePut(key, value, lease)
	b = appendHead(b, 2, 1+protowire.SizeBytes(put))
	b = appendHead(b, 2, put) // RequestOp.request_put
	b = AppendPut(b, key, value, lease)
	return appendElseGet(b, key)
}

// AppendDelete appends the TxnRequest with which Kubernetes deletes an object, likewise.
func AppendDelete(b, key []byte, modRevision int64) []byte {
	b = appendUnchanged(b, key, modRevision)
	b = appendHead(b, 2, 1+protowire.SizeBytes(sizeBytes(key)))
	b = appendHead(b, 3, sizeBytes(key)) // RequestOp.request_delete_range
	b = AppendDeleteRange(b, key, nil)
	return appendElseGet(b, key)
}

// appendUnchanged appends the Compare of a TxnRequest.
func appendUnchanged(b, key []byte, modRevision int64) []byte {
	const mod = 2 // Compare.MOD; Compare.EQUAL is 0 and not sent
	b = appendHead(b, 1, 2+sizeBytes(key)+1+protowire.SizeVarint(uint64(modRevision)))
	b = appendInt(b, 2, mod)
	b = appendBytes(b, 3, key)
	b = protowire.AppendTag(b, 6, protowire.VarintType) // of a oneof: sent also when it is 0
	return protowire.AppendVarint(b, uint64(modRevision))
}

func appendElseGet(b, key []byte) []byte {
	b = appendHead(b, 3, 1+protowire.SizeBytes(sizeBytes(key)))
	b = appendHead(b, 1, sizeBytes(key)) // RequestOp.request_range
	return appendBytes(b, 1, key)
}

// AppendPutOp appends one put to a TxnRequest without conditions.
func AppendPutOp(b, key, value []byte) []byte {
	put := sizePut(key, value, 0)
	b = appendHead(b, 2, 1+protowire.SizeBytes(put))
	b = appendHead(b, 2, put)
	return AppendPut(b, key, value, 0)
}

// AppendCompaction appends a CompactionRequest that is answered when the work is done.
func AppendCompaction(b []byte, revision int64) []byte {
	return appendInt(appendInt(b, 1, revision), 2, 1)
}

// AppendWatch appends a WatchRequest that creates a watcher. startRevision 0 means from now; id 0 lets the server choose.
func AppendWatch(b, key, end []byte, startRevision, id int64) []byte {
	b = appendHead(b, 1, sizeBytes(key)+sizeBytes(end)+sizeInt(startRevision)+sizeInt(id))
	b = appendBytes(b, 1, key)
	b = appendBytes(b, 2, end)
	b = appendInt(b, 3, startRevision)
	return appendInt(b, 7, id)
}

// AppendGrant appends a LeaseGrantRequest.
func AppendGrant(b []byte, id, ttl int64) []byte { return appendInt(appendInt(b, 1, ttl), 2, id) }

// AppendLease appends a LeaseKeepAliveRequest, or a LeaseRevokeRequest.
func AppendLease(b []byte, id int64) []byte { return appendInt(b, 1, id) }

// AppendAuthenticate appends an AuthenticateRequest.
func AppendAuthenticate(b []byte, name, password string) []byte {
	return appendBytes(appendBytes(b, 1, []byte(name)), 2, []byte(password))
}

// What is empty is left out, as protobuf does.

func appendBytes(b []byte, field protowire.Number, v []byte) []byte {
	if len(v) == 0 {
		return b
	}
	return append(appendHead(b, field, len(v)), v...)
}

// appendHead appends what stands before n bytes.
func appendHead(b []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(n))
}

func appendInt(b []byte, field protowire.Number, v int64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), uint64(v))
}

func appendBool(b []byte, field protowire.Number, v bool) []byte {
	if !v {
		return b
	}
	return appendInt(b, field, 1)
}

// sizeBytes and sizeInt are for fields below 16, whose tags take one byte.

func sizeBytes(v []byte) int {
	if len(v) == 0 {
		return 0
	}
	return 1 + protowire.SizeBytes(len(v))
}

func sizeInt(v int64) int {
	if v == 0 {
		return 0
	}
	return 1 + protowire.SizeVarint(uint64(v))
}
