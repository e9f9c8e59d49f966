package rpc

import (
	"context"
	"errors"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/member"
)

// errUnknownMethod answers a Downgrade whose action is none; etcd gives it no code.
var errUnknownMethod = errors.New("etcdserver: unknown method")

// maintenanceService is etcdserverpb.Maintenance.
type maintenanceService struct {
	pb.UnimplementedMaintenanceServer
	s *Server
}

func (m *maintenanceService) Status(ctx context.Context, _ *pb.StatusRequest) (*pb.StatusResponse, error) {
	s := m.s
	if _, err := s.user(ctx); err != nil {
		return nil, err
	}
	st, leader := s.o.Maintenance.Status(), s.o.Consensus.Leader()
	resp := &pb.StatusResponse{
		Header:           s.responseHeader(0),
		Version:          st.Version,
		DbSize:           st.SizeBytes,
		DbSizeInUse:      st.UsageBytes,
		DbSizeQuota:      st.QuotaBytes,
		Leader:           leader,
		RaftIndex:        s.o.Consensus.Committed(),
		RaftAppliedIndex: s.o.Consensus.Applied(),
		RaftTerm:         s.o.Consensus.Term(),
		IsLearner:        s.o.Consensus.Learner(),
		StorageVersion:   st.StorageVersion,
		DowngradeInfo:    st.Downgrade,
	}
	if leader == 0 {
		resp.Errors = append(resp.Errors, rpctypes.ErrorDesc(rpctypes.ErrGRPCNoLeader))
	}
	for _, a := range s.o.Maintenance.Alarms() {
		// One blank or two between the fields is up to how the program was built.
		resp.Errors = append(resp.Errors, strings.ReplaceAll(a.String(), "  ", " "))
	}
	return resp, nil
}

// Alarm lists, raises and clears alarms. Anybody may list.
func (m *maintenanceService) Alarm(ctx context.Context, r *pb.AlarmRequest) (_ *pb.AlarmResponse, err error) {
	s, began := m.s, m.s.o.Clock.Now()
	defer func() { s.metrics.request(requestAlarm, err, s.o.Clock.Now().Sub(began)) }()
	if r.Action == pb.AlarmRequest_GET {
		return m.listAlarms(ctx, r.Alarm)
	}
	who, err := s.admin(ctx)
	if err != nil {
		return nil, err
	}
	reply, err := s.do(ctx, who, command.KindAlarm, r)
	defer reply.Release()
	if err != nil {
		return nil, err
	}
	resp := &pb.AlarmResponse{}
	if found, ok := reply.Message.(*pb.AlarmResponse); ok {
		resp.Alarms = found.Alarms
	}
	resp.Header = s.responseHeader(reply.Revision)
	return resp, nil
}

// listAlarms lists the alarms of one type, or all for NONE.
func (m *maintenanceService) listAlarms(ctx context.Context, kind pb.AlarmType) (*pb.AlarmResponse, error) {
	if _, err := m.s.user(ctx); err != nil {
		return nil, err
	}
	if err := m.s.confirm(callFrom(ctx)); err != nil {
		return nil, err
	}
	resp := &pb.AlarmResponse{Header: m.s.responseHeader(0)}
	for _, a := range m.s.o.Maintenance.Alarms() {
		if kind == pb.AlarmType_NONE || a.Alarm == kind {
			resp.Alarms = append(resp.Alarms, a)
		}
	}
	return resp, nil
}

// Defragment starts to give space back. Unlike etcd's it stops nothing, and
// does not wait.
func (m *maintenanceService) Defragment(ctx context.Context, _ *pb.DefragmentRequest) (*pb.DefragmentResponse, error) {
	if _, err := m.s.admin(ctx); err != nil {
		return nil, err
	}
	if err := m.s.o.Maintenance.Reclaim(); err != nil {
		return nil, err
	}
	return &pb.DefragmentResponse{}, nil
}

func (m *maintenanceService) Hash(ctx context.Context, _ *pb.HashRequest) (*pb.HashResponse, error) {
	if _, err := m.s.admin(ctx); err != nil {
		return nil, err
	}
	hash, revision, err := m.s.o.Maintenance.Hash(ctx)
	if err != nil {
		return nil, err
	}
	return &pb.HashResponse{Header: m.s.responseHeader(revision), Hash: hash}, nil
}

func (m *maintenanceService) HashKV(ctx context.Context, r *pb.HashKVRequest) (*pb.HashKVResponse, error) {
	if _, err := m.s.admin(ctx); err != nil {
		return nil, err
	}
	h, err := m.s.o.Maintenance.HashKV(ctx, r.Revision)
	if err != nil {
		return nil, err
	}
	return &pb.HashKVResponse{
		Header: m.s.responseHeader(h.Revision),
		Hash:   h.Hash, CompactRevision: h.CompactRevision, HashRevision: h.HashRevision,
	}, nil
}

// MoveLeader has another voter lead. Only the leader itself can.
func (m *maintenanceService) MoveLeader(ctx context.Context, r *pb.MoveLeaderRequest) (*pb.MoveLeaderResponse, error) {
	if _, err := m.s.admin(ctx); err != nil {
		return nil, err
	}
	if err := m.s.o.Cluster.MoveLeader(ctx, r.GetTargetID()); err != nil {
		return nil, err
	}
	return &pb.MoveLeaderResponse{}, nil
}

// Downgrade checks, begins or ends a downgrade. To end none succeeds, as in etcd.
func (m *maintenanceService) Downgrade(ctx context.Context, r *pb.DowngradeRequest) (*pb.DowngradeResponse, error) {
	if _, err := m.s.admin(ctx); err != nil {
		return nil, err
	}
	switch r.Action {
	case pb.DowngradeRequest_VALIDATE, pb.DowngradeRequest_ENABLE, pb.DowngradeRequest_CANCEL:
	default:
		return nil, errUnknownMethod
	}
	version, err := m.s.o.Cluster.Downgrade(ctx, r.Action, r.Version)
	if r.Action == pb.DowngradeRequest_CANCEL && errors.Is(err, member.ErrNoInflightDowngrade) {
		version, err = m.s.o.Maintenance.Status().ClusterVersion, nil
	}
	if err != nil {
		return nil, err
	}
	return &pb.DowngradeResponse{Header: m.s.responseHeader(0), Version: version}, nil
}
