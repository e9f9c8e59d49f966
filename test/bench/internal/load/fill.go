package load

import (
	"github.com/engram-kv/engram/bench/api"
)

const (
	fillStreams = 4
	fillBytes   = 64 << 10 // of one transaction
	maxFillOps  = 100      // below etcd's limit of 128 operations in one transaction
)

// Fill puts the keys 0..n-1 with one value of size bytes, many in each transaction.
func Fill(conns []*Conn, n, size int) error {
	value := api.Value(size)
	return fill(conns, n, size, func(int) []byte { return value })
}

// FillDistinct is Fill with values that have nothing in common: a store that compresses blocks takes as many bytes as they have.
func FillDistinct(conns []*Conn, n, size int) error { return fill(conns, n, size, Distinct(size)) }

// Distinct returns a function that gives the i-th of many values of size bytes.
func Distinct(size int) func(i int) []byte {
	const stride = 8191 // neighbours in the store lie that far apart in the noise
	noise := api.Value(noiseBytes + size)
	return func(i int) []byte { return noise[i*stride%noiseBytes:][:size] }
}

// noiseBytes is many times what any store compresses at once.
const noiseBytes = 4 << 20

func fill(conns []*Conn, n, size int, value func(i int) []byte) error {
	perTxn := max(1, min(maxFillOps, fillBytes/(size+2*maxKeySize)))
	txns := (n + perTxn - 1) / perTxn
	_, err := Closed{Conns: conns, Streams: fillStreams, Count: int64(txns), Next: func(s *Source) (string, []byte) {
		from := int(s.Serial) * perTxn
		s.Buf = s.Buf[:0]
		for i := from; i < min(from+perTxn, n); i++ {
			s.Buf = api.AppendPutOp(s.Buf, Key(i), value(i))
		}
		return api.Txn, s.Buf
	}}.Run()
	return err
}

// Overwrite makes count revisions, each a put of one of the keys 0..keys-1 in turn, with values of size bytes.
func Overwrite(conns []*Conn, count int64, keys, size int) error {
	value := api.Value(size)
	_, err := Closed{Conns: conns, Streams: 32, Count: count, Next: func(s *Source) (string, []byte) {
		s.Buf = api.AppendPut(s.Buf[:0], Key(int(s.Serial%int64(keys))), value, 0)
		return api.Put, s.Buf
	}}.Run()
	return err
}

// DeleteEvery deletes the keys 0, step, 2*step and so on below n.
func DeleteEvery(conns []*Conn, step, n int) error {
	_, err := Closed{Conns: conns, Streams: 32, Count: int64((n + step - 1) / step), Next: func(s *Source) (string, []byte) {
		s.Buf = api.AppendDeleteRange(s.Buf[:0], Key(int(s.Serial)*step), nil)
		return api.DeleteRange, s.Buf
	}}.Run()
	return err
}

// Grant grants the leases 0..n-1.
func Grant(conns []*Conn, n int, ttl int64) error {
	_, err := Closed{Conns: conns, Streams: 32, Count: int64(n), Next: func(s *Source) (string, []byte) {
		s.Buf = api.AppendGrant(s.Buf[:0], LeaseID(int(s.Serial)), ttl)
		return api.LeaseGrant, s.Buf
	}}.Run()
	return err
}

// RandomPut returns a Next that puts random ones of the keys 0..keys-1.
func RandomPut(keys, size int) func(*Source) (string, []byte) { return RandomPutFrom(0, keys, size) }

// RandomPutFrom is RandomPut of the keys from first on.
func RandomPutFrom(first, keys, size int) func(*Source) (string, []byte) {
	value := api.Value(size)
	return func(s *Source) (string, []byte) {
		s.Buf = api.AppendPut(s.Buf[:0], Key(first+s.Rand.IntN(keys)), value, 0)
		return api.Put, s.Buf
	}
}
