package rpc

import (
	"fmt"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Keys sorted by their values take the room that the values take.
func TestRoomForSortByValue(t *testing.T) {
	m := start(t, func(o *Options) { o.ResponseBytes, o.InlineBytes = 100<<10, 1<<10 })
	for i := range 4 {
		m.put(t, fmt.Sprint("k", i), fmt.Sprint(9-i)+strings.Repeat("v", 30<<10))
	}
	r := &pb.RangeRequest{
		Key: []byte("k"), RangeEnd: []byte("l"), KeysOnly: true,
		SortOrder: pb.RangeRequest_ASCEND, SortTarget: pb.RangeRequest_VALUE,
	}
	_, err := m.kv.Range(t.Context(), r)
	if s := status.Convert(err); s.Code() != codes.ResourceExhausted || !strings.Contains(s.Message(), "fewer keys") {
		t.Errorf("got %v", err)
	}
	r.Key = []byte("k1")
	if got := keysOf(must[*pb.RangeResponse](t)(m.kv.Range(t.Context(), r)).Kvs); got != "k3 k2 k1" {
		t.Errorf("keys %s", got)
	}
}
