package server

import (
	"bufio"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// figures are a member's metrics by series.
func figures(t *testing.T, m *Member) map[string]float64 {
	t.Helper()
	resp, err := http.Get("http://" + m.ClientAddrs()[0] + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	out := map[string]float64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		at := strings.LastIndexByte(lines.Text(), ' ')
		if at < 0 || lines.Text()[0] == '#' {
			continue
		}
		if out[lines.Text()[:at]], err = strconv.ParseFloat(lines.Text()[at+1:], 64); err != nil {
			t.Fatal(err)
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestMetricsMove: what a member does moves the metrics of it, and by as much as it does.
func TestMetricsMove(t *testing.T) {
	m := start(t, t.TempDir(), "--compaction-batch-limit=2") // records in a step
	defer stop(t, m)
	c, ctx := client(t, m), t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	before := figures(t, m)
	for range 3 {
		_, err := c.Put(ctx, "a", "1")
		must(err)
	}
	if _, err := c.Put(ctx, "a", "1", clientv3.WithLease(77)); err == nil {
		t.Fatal("a put with a lease that does not exist")
	}
	_, err := c.Put(ctx, "b", "1", clientv3.WithPrevKV()) // reads one range
	must(err)
	_, err = c.Get(ctx, "a") // one more
	must(err)
	_, err = c.Get(ctx, "a", clientv3.WithPrefix(), clientv3.WithSerializable(), clientv3.WithCountOnly())
	must(err)
	if _, err := c.Get(ctx, "a", clientv3.WithRev(999)); err == nil { // is not read
		t.Fatal("a future revision can be read")
	}
	_, err = c.Txn(ctx).Then(clientv3.OpGet("a"), clientv3.OpPut("c", "1"), clientv3.OpGet("b")).Commit() // two more
	must(err)
	stream, err := pb.NewKVClient(c.ActiveConnection()).RangeStream(ctx, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")}) // one more
	must(err)
	for more := true; more; {
		_, err := stream.Recv()
		more = err == nil
	}
	d, err := c.Delete(ctx, "b")
	must(err)
	began := time.Now()
	_, err = c.Compact(ctx, d.Header.Revision-1, clientv3.WithCompactPhysical()) // looks at five records, frees a twice
	must(err)
	_, err = c.Compact(ctx, d.Header.Revision, clientv3.WithCompactPhysical()) // looks at four, frees b
	must(err)

	after := figures(t, m)
	op := func(name, success string) string {
		return `etcd_server_apply_duration_seconds_count{op="` + name + `",success="` + success + `",version="v3"}`
	}
	for series, want := range map[string]float64{
		"etcd_mvcc_range_total": 6,
		op("Put", "true"):       4, op("Put", "false"): 1, op("Txn", "true"): 1, op("DeleteRange", "true"): 1, op("Compaction", "true"): 2,
		"etcd_debugging_mvcc_db_compaction_keys_total":                           3,
		"etcd_debugging_mvcc_db_compaction_total_duration_milliseconds_count":    2,
		"etcd_debugging_mvcc_db_compaction_pause_duration_milliseconds_count":    3 + 2,
		"etcd_debugging_mvcc_index_compaction_pause_duration_milliseconds_count": 2,
	} {
		if got := after[series] - before[series]; got != want {
			t.Errorf("%s grew by %v, want %v", series, got, want)
		}
	}
	if last := after["etcd_debugging_mvcc_db_compaction_last"]; before["etcd_debugging_mvcc_db_compaction_last"] != 0 || last < float64(began.Unix()) || last > float64(time.Now().Unix()) {
		t.Errorf("the last compaction was at %v; it began at %v", last, began.Unix())
	}
	if total, wait := after["etcd_debugging_mvcc_db_compaction_total_duration_milliseconds_sum"], time.Since(began).Seconds()*1000; total <= 0 || total > wait {
		t.Errorf("compactions of at most %v ms took %v", wait, total)
	}
}

// TestApplyMetrics: what is observed of entries is their share of the batch, by what they do.
func TestApplyMetrics(t *testing.T) {
	a := newApplyMetrics()
	entry := func(kind command.Kind, msg proto.Message) *raftpb.Entry {
		// The header's field has a number above most requests', and below those of some.
		data, err := command.AppendMessage(nil, kind, command.Header{ID: 1, Username: "u", AuthRevision: 3}, msg)
		if err != nil {
			t.Fatal(err)
		}
		return &raftpb.Entry{Data: data}
	}
	put, enable := entry(command.KindPut, &pb.PutRequest{Key: []byte("a")}), entry(command.KindAuthEnable, &pb.AuthEnableRequest{})
	member := &raftpb.Entry{Type: raftpb.EntryConfChange.Enum(), Data: put.Data}
	compact := entry(command.KindCompaction, &pb.CompactionRequest{Revision: 1})
	failed, before := state.Result{Err: fmt.Errorf("put: %w", state.ErrNoSpace)}, state.Result{Err: fmt.Errorf("compact: %w", mvcc.ErrCompacted)}
	a.applied([]*raftpb.Entry{put, put, {}, enable, member, compact, put}, []state.Result{{}, failed, {}, {}, {}, before}, 6*time.Millisecond) // the last one was not run
	a.applied([]*raftpb.Entry{put}, []state.Result{{}}, time.Hour)
	a.applied(nil, nil, time.Second)

	got := map[string]string{}
	for kind, both := range a.series {
		for success, s := range both {
			if s == nil {
				continue
			}
			var in []string
			for i, n := range s.counts {
				if n > 0 {
					in = append(in, strconv.FormatUint(n, 10)+" in "+strconv.Itoa(i))
				}
			}
			got[opName(command.Kind(kind))+" "+strconv.FormatBool(success == 1)] = strings.Join(in, ", ")
		}
	}
	// A share of 1 ms is above the bounds 0.1, 0.2, 0.4 and 0.8 ms; an hour is above all 20.
	want := map[string]string{"Put true": "1 in 4, 1 in 20", "Put false": "1 in 4", "AuthEnable true": "1 in 4", "Compaction true": "1 in 4"}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	entries, results := slices.Repeat([]*raftpb.Entry{put}, 100), make([]state.Result, 100)
	if n := testing.AllocsPerRun(100, func() { a.applied(entries, results, time.Millisecond) }); n != 0 {
		t.Errorf("counting a batch takes %v allocations", n)
	}
}
