package rpc

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/hot"
	"github.com/engram-kv/engram/internal/inspectpb"
)

// TestUsage compares what a member measures with what a client finds by reading everything.
func TestUsage(t *testing.T) {
	m := start(t, nil)
	rnd := rand.New(rand.NewPCG(7, 1))
	for range 300 {
		key := fmt.Sprintf("/registry/%s/ns%d/%d", []string{"pods", "leases", "events"}[rnd.IntN(3)], rnd.IntN(4), rnd.IntN(20))
		m.put(t, key, strings.Repeat("v", rnd.IntN(100)))
		if rnd.IntN(5) == 0 {
			must[*pb.DeleteRangeResponse](t)(m.kv.DeleteRange(t.Context(), &pb.DeleteRangeRequest{Key: []byte(key)}))
		}
	}
	inspect := inspectpb.NewInspectClient(m.conn)
	u := must[*inspectpb.UsageResponse](t)(inspect.Usage(t.Context(), &inspectpb.UsageRequest{Prefix: []byte("/registry/"), Delimiter: []byte("/"), Depth: 2, Limit: 1000}))
	var keys, bytes, revisions int64
	for _, row := range u.Rows {
		all := must[*clientv3.GetResponse](t)(m.client.Get(t.Context(), string(row.Path), clientv3.WithPrefix()))
		var size int64
		for _, kv := range all.Kvs {
			size += int64(len(must[[]byte](t)(proto.Marshal(kv))))
		}
		if !row.Group || row.Measure.Keys != all.Count || row.Measure.Bytes != size {
			t.Errorf("%s: %v, a client finds %d keys of %d bytes", row.Path, row.Measure, all.Count, size)
		}
		keys, bytes, revisions = keys+row.Measure.Keys, bytes+row.Measure.Bytes, revisions+row.Measure.Keys+row.Measure.History
	}
	// Nothing was compacted, so that every revision but the first is a put or a mark of a deletion.
	if len(u.Rows) != 12 || u.Total.Keys != keys || u.Total.Bytes != bytes || revisions != u.Revision-1 || u.MemberId != testMember || u.CompactRevision != -1 {
		t.Errorf("%d rows, %d keys of %d bytes, %d revisions: %v", len(u.Rows), keys, bytes, revisions, u)
	}
	top := must[*inspectpb.UsageResponse](t)(inspect.Usage(t.Context(), &inspectpb.UsageRequest{Delimiter: []byte("/"), Depth: 2, Order: inspectpb.UsageRequest_TOTAL, Limit: 2, Serializable: true}))
	if len(top.Rows) != 2 || top.OthersCount != 1 || top.Rows[0].Measure.Bytes+top.Rows[0].Measure.HistoryBytes < top.Rows[1].Measure.Bytes+top.Rows[1].Measure.HistoryBytes ||
		top.Rows[0].Measure.Keys+top.Rows[1].Measure.Keys+top.Others.Keys != top.Total.Keys {
		t.Errorf("%v", top)
	}
	page := must[*inspectpb.UsageResponse](t)(inspect.Usage(t.Context(), &inspectpb.UsageRequest{Delimiter: []byte("/"), Depth: 2, Limit: 1}))
	if string(page.Next) != "/registry/leases/" {
		t.Errorf("%v", page)
	}
	page = must[*inspectpb.UsageResponse](t)(inspect.Usage(t.Context(), &inspectpb.UsageRequest{Delimiter: []byte("/"), Depth: 2, Limit: 5, From: page.Next}))
	if len(page.Rows) != 2 || string(page.Rows[1].Path) != "/registry/pods/" || len(page.Next) != 0 {
		t.Errorf("%v", page)
	}
}

func TestInspectIsGuarded(t *testing.T) {
	m := start(t, func(o *Options) { o.Hot, o.Version = hot.New(hot.Options{}, time.Now()), "1.2.3" })
	m.put(t, "user/a", "1")
	inspect := inspectpb.NewInspectClient(m.conn)
	for _, bad := range []*inspectpb.UsageRequest{{Limit: -1}, {Limit: 10_001}, {Order: 77}} {
		if _, err := inspect.Usage(t.Context(), bad); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%v: %v", bad, err)
		}
	}
	for _, bad := range []*inspectpb.TopRequest{{Limit: -1}, {Limit: 257}, {Depth: 5}, {Depth: -1}} {
		if _, err := inspect.Top(t.Context(), bad); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%v: %v", bad, err)
		}
	}
	before := time.Now()
	clock := must[*inspectpb.ClockResponse](t)(inspect.Clock(t.Context(), &inspectpb.ClockRequest{}))
	if at := time.Unix(0, clock.UnixNanos); at.Before(before) || at.After(time.Now()) || clock.MemberId != testMember || clock.Version != "1.2.3" {
		t.Errorf("%v", clock)
	}

	m.learner.Store(true)
	_, err := inspect.Usage(t.Context(), &inspectpb.UsageRequest{})
	wantError(t, err, rpctypes.ErrGRPCNotSupportedForLearner)
	must[*inspectpb.UsageResponse](t)(inspect.Usage(t.Context(), &inspectpb.UsageRequest{Serializable: true}))
	must[*inspectpb.TopResponse](t)(inspect.Top(t.Context(), &inspectpb.TopRequest{}))
	m.learner.Store(false)

	m.authOn.Store(true)
	as := func(name string) context.Context {
		return metadata.AppendToOutgoingContext(t.Context(), "token", name)
	}
	for _, prefix := range []string{"", "u", "user", "other/"} {
		_, err := inspect.Usage(as("user"), &inspectpb.UsageRequest{Prefix: []byte(prefix)})
		wantError(t, err, errDenied)
	}
	if u := must[*inspectpb.UsageResponse](t)(inspect.Usage(as("user"), &inspectpb.UsageRequest{Prefix: []byte("user/a")})); u.Total.Keys != 1 {
		t.Errorf("%v", u)
	}
	must[*inspectpb.UsageResponse](t)(inspect.Usage(as("root"), &inspectpb.UsageRequest{}))
	_, err = inspect.Top(as("user"), &inspectpb.TopRequest{})
	wantError(t, err, errDenied)
	must[*inspectpb.TopResponse](t)(inspect.Top(as("root"), &inspectpb.TopRequest{}))
}

func TestNoTop(t *testing.T) {
	m := start(t, nil)
	if _, err := inspectpb.NewInspectClient(m.conn).Top(t.Context(), &inspectpb.TopRequest{}); status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
}

// TestTopCounts makes so many calls of each kind, with a clock that stands still, and finds all of them.
func TestTopCounts(t *testing.T) {
	began := time.Now()
	m := start(t, func(o *Options) { o.Hot = hot.New(hot.Options{}, began) })
	ctx := t.Context()
	for i := range 10 {
		m.put(t, fmt.Sprintf("/w/x/%d", i), "value")
	}
	for range 20 {
		must[*clientv3.GetResponse](t)(m.client.Get(ctx, "/r/x/", clientv3.WithPrefix()))
	}
	must[*clientv3.DeleteResponse](t)(m.client.Delete(ctx, "/d/x/1"))
	must[*clientv3.TxnResponse](t)(m.client.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision("/t/x/1"), "=", 0)).Then(clientv3.OpPut("/t/x/1", "v")).Commit())
	must[*clientv3.TxnResponse](t)(m.client.Txn(ctx).Then(clientv3.OpGet("/r/x/1")).Commit())
	chunks, err := m.client.GetStream(ctx, "", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for range chunks {
	}
	var r hot.Report
	want := map[string]hot.Rates{"/w/": {Writes: 10}, "/r/": {Reads: 21}, "/d/": {Writes: 1}, "/t/": {Writes: 1}, "": {Reads: 1}}
	wrong := func() string {
		r = m.s.o.Hot.Top(began.Add(time.Second), 1, 10)
		for _, row := range r.Prefixes {
			exact := hot.Rates{Reads: row.Reads * r.Window.Seconds(), Writes: row.Writes * r.Window.Seconds(), Events: row.Events * r.Window.Seconds()}
			if w := want[row.Name]; !near(exact.Reads, w.Reads) || !near(exact.Writes, w.Writes) || !near(exact.Events, w.Events) || row.Bytes <= 0 {
				return fmt.Sprintf("%q: %+v, want %+v", row.Name, exact, w)
			}
		}
		if len(r.Prefixes) != len(want) {
			return fmt.Sprintf("%+v", r.Prefixes)
		}
		return ""
	}
	// A stream is counted when its handler returns, perhaps a moment after its receiver has everything.
	for deadline := time.Now().Add(10 * time.Second); ; {
		text := wrong()
		if text == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(text)
		}
		runtime.Gosched()
	}
	if len(r.Clients) != 1 || r.Clients[0].Name != "127.0.0.1" {
		t.Errorf("clients %+v", r.Clients)
	}
}

func near(a, b float64) bool { return a-b < 0.001 && b-a < 0.001 }

// TestEventKey finds the key in events as they stand in an answer.
func TestEventKey(t *testing.T) {
	for _, e := range []*mvccpb.Event{
		{Kv: &mvccpb.KeyValue{Key: []byte("/a/b"), ModRevision: 7, Value: []byte("v")}},
		{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte("/a/b"), ModRevision: 7}, PrevKv: &mvccpb.KeyValue{Key: []byte("/a/b"), Value: bytes.Repeat([]byte("v"), 500)}},
	} {
		raw := must[[]byte](t)(proto.Marshal(&pb.WatchResponse{Events: []*mvccpb.Event{e}}))
		if key := eventKey(raw); string(key) != "/a/b" {
			t.Errorf("%v: key %q", e, key)
		}
	}
	for _, b := range [][]byte{nil, {0x5a}, {0x5a, 0x05, 1}, {8, 1}, {0x5a, 2, 0x12, 9}} {
		if key := eventKey(b); key != nil {
			t.Errorf("%x: key %q", b, key)
		}
	}
}
