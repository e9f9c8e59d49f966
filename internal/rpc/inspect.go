package rpc

import (
	"context"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/hot"
	"github.com/engram-kv/engram/internal/inspectpb"
	"github.com/engram-kv/engram/internal/keypath"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/mvcc/index"
)

const (
	// defaultUsageRows and maxUsageRows bound the rows of a Usage.
	defaultUsageRows, maxUsageRows = 100, 10_000
	// maxSegments bounds what one Usage looks at: some tenths of a second.
	maxSegments = 200_000
	// usagesAtOnce bounds the CPUs that Usage takes from other requests.
	usagesAtOnce = 2

	defaultTopRows, maxTopRows = 10, 256
	defaultTopDepth            = 2
)

// inspectService is engram.v1.Inspect, which etcd has not.
type inspectService struct {
	inspectpb.UnimplementedInspectServer
	s     *Server
	usage chan struct{} // holds one for each Usage under way
}

func newInspectService(s *Server) *inspectService {
	return &inspectService{s: s, usage: make(chan struct{}, usagesAtOnce)}
}

// Usage measures keys by path.
func (i *inspectService) Usage(ctx context.Context, r *inspectpb.UsageRequest) (*inspectpb.UsageResponse, error) {
	o, err := segmentOptions(r)
	if err != nil {
		return nil, err
	}
	s, call := i.s, callFrom(ctx)
	if !r.Serializable && s.o.Consensus.Learner() {
		return nil, rpctypes.ErrGRPCNotSupportedForLearner
	}
	who, err := s.caller(call)
	if err != nil {
		return nil, err
	}
	if !r.Serializable {
		if err := s.confirm(call); err != nil {
			return nil, err
		}
	}
	select {
	case i.usage <- struct{}{}:
		defer func() { <-i.usage }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	v := s.view()
	defer v.Release()
	key, end := keypath.Range(r.Prefix)
	if err := v.MayRead(who, key, end); err != nil {
		return nil, err
	}
	found, err := v.KV().Segments(ctx, o)
	if err != nil {
		return nil, err
	}
	resp := &inspectpb.UsageResponse{
		ClusterId: s.o.ClusterID, MemberId: s.o.MemberID, Revision: v.KV().Revision(), CompactRevision: v.KV().CompactRevision(),
		Total: measure(found.Total), Others: measure(found.Others), OthersCount: int64(found.OthersCount), Next: found.Next,
	}
	for _, row := range found.Rows {
		resp.Rows = append(resp.Rows, &inspectpb.UsageRow{Path: row.Path, Group: row.Group, Measure: measure(row.Measure)})
	}
	return resp, nil
}

func segmentOptions(r *inspectpb.UsageRequest) (mvcc.SegmentOptions, error) {
	o := mvcc.SegmentOptions{
		Prefix: r.Prefix, Delimiter: r.Delimiter, Depth: max(1, int(r.Depth)), From: r.From,
		Limit: int(r.Limit), Most: maxSegments,
	}
	if o.Limit == 0 {
		o.Limit = defaultUsageRows
	}
	if o.Limit < 0 || o.Limit > maxUsageRows {
		return o, status.Errorf(codes.InvalidArgument, "limit is %d: give 1 to %d", r.Limit, maxUsageRows)
	}
	orders := map[inspectpb.UsageRequest_Order]mvcc.SegmentOrder{
		inspectpb.UsageRequest_PATH: mvcc.SegmentsByPath, inspectpb.UsageRequest_TOTAL: mvcc.SegmentsByTotal,
		inspectpb.UsageRequest_LIVE: mvcc.SegmentsByLive, inspectpb.UsageRequest_HISTORY: mvcc.SegmentsByHistory,
		inspectpb.UsageRequest_KEYS: mvcc.SegmentsByKeys,
	}
	var known bool
	if o.Order, known = orders[r.Order]; !known {
		return o, status.Errorf(codes.InvalidArgument, "order is %d, which this version does not know: give 0 to %d", r.Order, len(orders)-1)
	}
	return o, nil
}

func measure(m index.Measure) *inspectpb.Measure {
	return &inspectpb.Measure{Keys: m.Keys, Bytes: m.Bytes, History: m.History, HistoryBytes: m.HistoryBytes}
}

// Top tells what this member is busiest with.
func (i *inspectService) Top(ctx context.Context, r *inspectpb.TopRequest) (*inspectpb.TopResponse, error) {
	s := i.s
	if _, err := s.admin(ctx); err != nil {
		return nil, err
	}
	if s.o.Hot == nil {
		return nil, status.Error(codes.Unimplemented, "this member does not count what it is busy with")
	}
	depth, limit := int(r.Depth), int(r.Limit)
	if depth == 0 {
		depth = defaultTopDepth
	}
	if limit == 0 {
		limit = defaultTopRows
	}
	if limit < 0 || limit > maxTopRows {
		return nil, status.Errorf(codes.InvalidArgument, "limit is %d: give 1 to %d", r.Limit, maxTopRows)
	}
	if depth < 1 || depth > hot.MaxDepth {
		return nil, status.Errorf(codes.InvalidArgument, "depth is %d: give 1 to %d", r.Depth, hot.MaxDepth)
	}
	report := s.o.Hot.Top(s.o.Clock.Now(), depth, limit)
	rows := func(rows []hot.Row) (out []*inspectpb.TopRow) {
		for _, row := range rows {
			out = append(out, topRow(row))
		}
		return out
	}
	return &inspectpb.TopResponse{
		MemberId: s.o.MemberID, WindowSeconds: report.Window.Seconds(), Sampling: int64(report.Sampling),
		Total: topRow(hot.Row{Rates: report.Total}), Prefixes: rows(report.Prefixes), Keys: rows(report.Keys), Clients: rows(report.Clients),
	}, nil
}

func topRow(r hot.Row) *inspectpb.TopRow {
	return &inspectpb.TopRow{
		Name: []byte(r.Name), Reads: r.Reads, Writes: r.Writes, Events: r.Events, Bytes: r.Bytes, Doubt: r.Doubt,
	}
}

// Clock tells the time of day.
func (i *inspectService) Clock(context.Context, *inspectpb.ClockRequest) (*inspectpb.ClockResponse, error) {
	return &inspectpb.ClockResponse{MemberId: i.s.o.MemberID, UnixNanos: i.s.o.Clock.Now().UnixNano(), Version: i.s.o.Version}, nil
}
