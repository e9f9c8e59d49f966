// Package keypath says which keys belong together by their paths.
//
// It knows keys as bytes alone.
package keypath

import "bytes"

// Cut returns the path of key that has depth delimiters behind its first prefix
// bytes and ends with the last of them, and true; or the whole key and false if it
// has not so many. A delimiter that follows the prefix at once does not count.
func Cut(key []byte, prefix int, delimiter []byte, depth int) (path []byte, group bool) {
	at := prefix
	if bytes.HasPrefix(key[at:], delimiter) {
		at += len(delimiter)
	}
	for range depth {
		i := bytes.Index(key[at:], delimiter)
		if i < 0 {
			return key, false
		}
		at += i + len(delimiter)
	}
	return key[:at:at], true
}

// Range is the range of all keys that begin with prefix, as requests name it: an
// end of one zero byte is none.
func Range(prefix []byte) (key, end []byte) {
	if len(prefix) == 0 {
		return []byte{0}, []byte{0}
	}
	for i := len(prefix) - 1; i >= 0; i-- {
		if prefix[i] < 0xff {
			end = bytes.Clone(prefix[:i+1])
			end[i]++
			return prefix, end
		}
	}
	return prefix, []byte{0}
}
