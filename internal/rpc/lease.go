package rpc

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/state"
)

// leaseService is etcdserverpb.Lease without its stream, which is keepalive.go's.
type leaseService struct {
	pb.UnimplementedLeaseServer
	s *Server
}

func (l *leaseService) LeaseGrant(ctx context.Context, r *pb.LeaseGrantRequest) (_ *pb.LeaseGrantResponse, err error) {
	s, began := l.s, l.s.o.Clock.Now()
	defer func() { s.metrics.request(requestLeaseGrant, err, s.o.Clock.Now().Sub(began)) }()
	if err := s.o.Quota.Admit(state.Cost(&command.Command{Kind: command.KindLeaseGrant})); err != nil {
		return nil, err
	}
	who, err := s.user(ctx)
	if err != nil {
		return nil, err
	}
	for r.ID == 0 { // the log carries the ID, so that all members grant the same
		r.ID = int64(s.o.Consensus.NextID() &^ (1 << 63))
	}
	reply, err := s.do(ctx, who, command.KindLeaseGrant, r)
	defer reply.Release()
	if err != nil {
		return nil, err
	}
	return &pb.LeaseGrantResponse{Header: s.responseHeader(reply.Revision), ID: reply.LeaseID, TTL: reply.LeaseTTL}, nil
}

func (l *leaseService) LeaseRevoke(ctx context.Context, r *pb.LeaseRevokeRequest) (_ *pb.LeaseRevokeResponse, err error) {
	s, began := l.s, l.s.o.Clock.Now()
	defer func() { s.metrics.request(requestLeaseRevoke, err, s.o.Clock.Now().Sub(began)) }()
	who, err := s.user(ctx)
	if err != nil {
		return nil, err
	}
	reply, err := s.do(ctx, who, command.KindLeaseRevoke, r)
	defer reply.Release()
	if err != nil {
		return nil, err
	}
	return &pb.LeaseRevokeResponse{Header: s.responseHeader(reply.Revision)}, nil
}

func (l *leaseService) LeaseTimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	who, err := l.s.user(ctx)
	if err != nil {
		return nil, err
	}
	st, err := l.s.o.Leases.Status(ctx, who, r.ID, r.Keys)
	if err != nil {
		return nil, err
	}
	return &pb.LeaseTimeToLiveResponse{
		Header: l.s.responseHeader(0),
		ID:     r.ID, TTL: st.TTL, GrantedTTL: st.GrantedTTL, Keys: st.Keys,
	}, nil
}

func (l *leaseService) LeaseLeases(ctx context.Context, _ *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	who, err := l.s.user(ctx)
	if err != nil {
		return nil, err
	}
	ids, err := l.s.o.Leases.IDs(who)
	if err != nil {
		return nil, err
	}
	resp := &pb.LeaseLeasesResponse{Header: l.s.responseHeader(0)}
	for _, id := range ids {
		resp.Leases = append(resp.Leases, &pb.LeaseStatus{ID: id})
	}
	return resp, nil
}
