// Package load sends requests at a server, closed loop or open loop, for the scenarios that `engram bench` has not, and counts
// what comes back. It knows nothing of which server it talks to.
package load

import (
	"fmt"

	"github.com/engram-kv/engram/bench/api"
)

const (
	KeyPrefix  = "/registry/pods/default/"
	keyDigits  = 9
	maxKeySize = len(KeyPrefix) + keyDigits

	// MaxKeys is how many keys there are.
	MaxKeys = 1_000_000_000
)

// Key is the i-th key. All are of one length, and in order.
func Key(i int) []byte {
	return fmt.Appendf(make([]byte, 0, maxKeySize), "%s%0*d", KeyPrefix, keyDigits, i)
}

// KeysEnd is the end of the range of all keys.
func KeysEnd() []byte { return api.PrefixEnd([]byte(KeyPrefix)) }

// LeaseID is the ID of the i-th lease, as long as one that a server picks.
func LeaseID(i int) int64 { return 1<<62 | int64(i) }

// PageOf reads a RangeResponse.
func PageOf(answer []byte) (*api.Pages, error) {
	p := &api.Pages{}
	p.Add(answer)
	return p, p.Err()
}
