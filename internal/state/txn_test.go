package state

import (
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/mvcc/index"
)

// countedLive counts the reads of values.
type countedLive struct {
	Live
	alone, calls, values int
}

func (l *countedLive) Value(it index.Item) ([]byte, error) {
	l.alone++
	return l.Live.Value(it)
}

func (l *countedLive) Values(items []index.Item) ([][]byte, error) {
	l.calls++
	l.values += len(items)
	return l.Live.Values(items)
}

// A compare with the values of a range reads them in bulk, for the applier waits,
// and not many more than it needs.
func TestCompareRangeOfValues(t *testing.T) {
	o := Options{}
	o.MVCC.ValueBudgetBytes, o.MVCC.WarmBytes = -1, -1
	r := newRig(t, o)
	const keys = 3000
	for i := range keys {
		r.propose(command.Header{}, command.KindPut, &pb.PutRequest{Key: fmt.Appendf(nil, "k%04d", i*7%keys), Value: fmt.Appendf(nil, "v%04d", i*7%keys)})
	}
	r.apply(keys, 500)
	r.reopen()
	for _, c := range []struct {
		key, end, value string
		result          int32
		want            bool
		most            int // values to be read
	}{
		{"k", "l", "v", resultGreater, true, keys},
		{"k", "l", "v0000", resultNotEqual, false, 64},
		{"k", "l", "v0100", resultLess, false, 512},
		{"k", "l", "v2999", resultNotEqual, false, keys},
		{"k2", "k3", "v2", resultGreater, true, 1000},
		{"k0001", "", "v0001", resultEqual, true, 1},
		{"x", "y", "v", resultNotEqual, false, 0},
	} {
		v := r.m.View()
		live := &countedLive{Live: v}
		compare := []command.Compare{{
			Target: targetValue, Result: c.result, Key: []byte(c.key), RangeEnd: []byte(c.end), Union: command.UnionValue, Value: []byte(c.value),
		}}
		if got, err := Holds(live, compare); err != nil || got != c.want {
			t.Errorf("%+v: %v, %v", c, got, err)
		}
		if live.alone > 1 || live.alone+live.values > c.most || live.calls > 20 {
			t.Errorf("%+v: %d values read alone and %d in %d calls", c, live.alone, live.values, live.calls)
		}
		v.Release()
	}
	// In a transaction that writes, over what its own batch wrote too.
	r.propose(command.Header{}, command.KindPut, &pb.PutRequest{Key: []byte("k1234"), Value: []byte("w")})
	for _, n := range []int{0, 1} {
		r.propose(command.Header{}, command.KindTxn, &pb.TxnRequest{
			Compare: []*pb.Compare{{
				Key: []byte("k"), RangeEnd: []byte("l"), Target: pb.Compare_VALUE, Result: pb.Compare_LESS,
				TargetUnion: &pb.Compare_Value{Value: []byte("vwx"[n : n+2])},
			}},
			Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("all"), Value: []byte("1")}}}},
		})
	}
	got := r.apply(len(r.entries), 10)
	if len(got) != 3 || got[1] != "revision 3002 false" || got[2] != "revision 3003 true [at 3003]" {
		t.Errorf("got %q", got)
	}
	r.close()
}
