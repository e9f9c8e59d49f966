package command

import "google.golang.org/protobuf/encoding/protowire"

// The readers below accept canonical protobuf only: minimal varints, and no
// field that carries the zero value which an encoder leaves out. They take the
// input behind a tag and return what is left. A false ok means "not canonical",
// not "broken": the generated types have the last word.

// varint reads a minimal varint; n is 0 if there is none.
func varint(b []byte) (v uint64, n int) {
	if len(b) > 0 && b[0] < 0x80 {
		return uint64(b[0]), 1
	}
	if len(b) > 1 && b[1] < 0x80 && b[1] != 0 { // most lengths
		return uint64(b[0]&0x7f) | uint64(b[1])<<7, 2
	}
	v, n = protowire.ConsumeVarint(b)
	if n <= 1 || b[n-1] == 0 {
		return 0, 0
	}
	return v, n
}

// uintField reads a varint other than 0.
func uintField(b []byte) (v uint64, rest []byte, ok bool) {
	v, n := varint(b)
	if n == 0 || v == 0 {
		return 0, nil, false
	}
	return v, b[n:], true
}

// boolField reads the varint 1.
func boolField(b []byte) (rest []byte, ok bool) {
	if len(b) == 0 || b[0] != 1 {
		return nil, false
	}
	return b[1:], true
}

// enumField reads an enum number other than 0. Unknown numbers pass, as they do
// in proto3; a number beyond 32 bits would be cut by a decoder and is refused.
func enumField(b []byte) (v int32, rest []byte, ok bool) {
	u, rest, ok := uintField(b)
	if !ok || int64(u) != int64(int32(u)) {
		return 0, nil, false
	}
	return int32(u), rest, true
}

// messageField reads a length and as many bytes. They alias b.
func messageField(b []byte) (v, rest []byte, ok bool) {
	size, n := varint(b)
	if n == 0 || size > uint64(len(b)-n) {
		return nil, nil, false
	}
	end := n + int(size)
	return b[n:end:end], b[end:], true
}

// bytesField is messageField for a scalar, which is not written when empty.
func bytesField(b []byte) (v, rest []byte, ok bool) {
	v, rest, ok = messageField(b)
	return v, rest, ok && len(v) > 0
}

// intField is uintField for the signed types, which are not zigzagged.
func intField(b []byte) (v int64, rest []byte, ok bool) {
	u, rest, ok := uintField(b)
	return int64(u), rest, ok
}
