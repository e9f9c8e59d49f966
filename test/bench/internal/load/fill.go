package load

import (
	"github.com/engram-kv/engram/test/bench/internal/h2"
)

const (
	fillStreams = 4
	maxFillOps  = 100 // below etcd's limit of 128 operations in one transaction
)

// Fill puts the keys 0..n-1 with values of size bytes, many in each transaction.
func Fill(conns []*h2.Conn, n, size int) error {
	value := Value(size)
	perTxn := max(1, min(maxFillOps, (h2.MaxRequest-1024)/(size+2*maxKeySize)))
	txns := (n + perTxn - 1) / perTxn
	_, err := Closed{Conns: conns, Streams: fillStreams, Count: int64(txns), Next: func(s *Source) (string, []byte) {
		from := int(s.Serial) * perTxn
		s.Buf = AppendPuts(s.Buf[:0], from, min(from+perTxn, n), value)
		return Txn, s.Buf
	}}.Run()
	return err
}

// Overwrite makes count revisions, each a put of one of the keys 0..keys-1 in turn, with values of size bytes.
func Overwrite(conns []*h2.Conn, count int64, keys, size int) error {
	value := Value(size)
	_, err := Closed{Conns: conns, Streams: 32, Count: count, Next: func(s *Source) (string, []byte) {
		s.Buf = AppendPut(s.Buf[:0], Key(int(s.Serial%int64(keys))), value)
		return Put, s.Buf
	}}.Run()
	return err
}

// Grant grants the leases 0..n-1.
func Grant(conns []*h2.Conn, n int, ttl int64) error {
	_, err := Closed{Conns: conns, Streams: 32, Count: int64(n), Next: func(s *Source) (string, []byte) {
		s.Buf = AppendGrant(s.Buf[:0], LeaseID(int(s.Serial)), ttl)
		return LeaseGrant, s.Buf
	}}.Run()
	return err
}

// RandomPut returns a Next that puts random ones of the keys 0..keys-1.
func RandomPut(keys, size int) func(*Source) (string, []byte) {
	value := Value(size)
	return func(s *Source) (string, []byte) {
		s.Buf = AppendPut(s.Buf[:0], Key(s.Rand.IntN(keys)), value)
		return Put, s.Buf
	}
}
