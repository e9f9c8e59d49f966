package mvcc

import (
	"encoding/binary"
	"fmt"
	"math/bits"
)

// keyValue is a decoded mvccpb.KeyValue. Its slices alias the encoding.
type keyValue struct {
	key, value                  []byte
	create, mod, version, lease int64
}

// Protobuf tags of mvccpb.KeyValue: field number << 3 | wire type, which is 0 for
// numbers and 2 for bytes.
const (
	tagKey     = 1<<3 | 2
	tagCreate  = 2 << 3
	tagMod     = 3 << 3
	tagVersion = 4 << 3
	tagValue   = 5<<3 | 2
	tagLease   = 6 << 3
)

const maxFieldNumber = 1<<29 - 1

func uvarintSize(v uint64) int { return (bits.Len64(v|1) + 6) / 7 }

func bytesFieldSize(n int) int {
	if n == 0 {
		return 0
	}
	return 1 + uvarintSize(uint64(n)) + n
}

func intFieldSize(v int64) int {
	if v == 0 {
		return 0
	}
	return 1 + uvarintSize(uint64(v))
}

func appendBytesField(dst []byte, tag byte, b []byte) []byte {
	if len(b) == 0 {
		return dst
	}
	dst = append(dst, tag)
	dst = binary.AppendUvarint(dst, uint64(len(b)))
	return append(dst, b...)
}

func appendIntField(dst []byte, tag byte, v int64) []byte {
	if v == 0 {
		return dst
	}
	return binary.AppendUvarint(append(dst, tag), uint64(v))
}

// size is the length of the encoding.
func (kv *keyValue) size() int {
	return bytesFieldSize(len(kv.key)) + intFieldSize(kv.create) + intFieldSize(kv.mod) +
		intFieldSize(kv.version) + bytesFieldSize(len(kv.value)) + intFieldSize(kv.lease)
}

// append encodes kv as etcd does: ascending fields, zero fields omitted.
func (kv *keyValue) append(dst []byte) []byte {
	dst = appendBytesField(dst, tagKey, kv.key)
	dst = appendIntField(dst, tagCreate, kv.create)
	dst = appendIntField(dst, tagMod, kv.mod)
	dst = appendIntField(dst, tagVersion, kv.version)
	dst = appendBytesField(dst, tagValue, kv.value)
	return appendIntField(dst, tagLease, kv.lease)
}

// decodeKeyValue reads an encoding. Unknown fields are skipped.
func decodeKeyValue(b []byte) (kv keyValue, err error) {
	whole := b
	for len(b) > 0 {
		tag, n := binary.Uvarint(b)
		if field := tag >> 3; n <= 0 || field == 0 || field > maxFieldNumber {
			return kv, badKeyValue(whole)
		}
		b = b[n:]
		switch tag & 7 {
		case 0:
			v, n := binary.Uvarint(b)
			if n <= 0 {
				return kv, badKeyValue(whole)
			}
			b = b[n:]
			switch tag {
			case tagCreate:
				kv.create = int64(v)
			case tagMod:
				kv.mod = int64(v)
			case tagVersion:
				kv.version = int64(v)
			case tagLease:
				kv.lease = int64(v)
			}
		case 2:
			l, n := binary.Uvarint(b)
			if n <= 0 || l > uint64(len(b)-n) {
				return kv, badKeyValue(whole)
			}
			field := b[n : n+int(l) : n+int(l)]
			b = b[n+int(l):]
			switch tag {
			case tagKey:
				kv.key = field
			case tagValue:
				kv.value = field
			}
		default:
			return kv, badKeyValue(whole)
		}
	}
	return kv, nil
}

func badKeyValue(b []byte) error {
	return fmt.Errorf("mvcc: %d bytes are no KeyValue: %.40x", len(b), b)
}

// keyOf returns the key within an encoded KeyValue, which it aliases. It looks
// no further if the key comes first, as in all that etcd and append write.
func keyOf(encoded []byte) []byte {
	if len(encoded) > 0 && encoded[0] == tagKey {
		if l, n := binary.Uvarint(encoded[1:]); n > 0 && l <= uint64(len(encoded)-1-n) {
			start, end := 1+n, 1+n+int(l)
			return encoded[start:end:end]
		}
	}
	kv, _ := decodeKeyValue(encoded)
	return kv.key
}

// ValueOf returns the value within an encoded KeyValue, which it aliases. It is
// nil if there is none.
func ValueOf(encoded []byte) []byte {
	kv, err := decodeKeyValue(encoded)
	if err != nil {
		broken("%v", err)
	}
	return kv.value
}

// withoutValue re-encodes kv with its value cleared.
func withoutValue(encoded []byte) ([]byte, error) {
	kv, err := decodeKeyValue(encoded)
	if err != nil {
		return nil, err
	}
	kv.value = nil
	return kv.append(make([]byte, 0, kv.size())), nil
}
