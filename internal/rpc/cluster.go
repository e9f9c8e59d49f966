package rpc

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// clusterService is etcdserverpb.Cluster. Its headers carry no revision.
type clusterService struct {
	pb.UnimplementedClusterServer
	s *Server
}

func (c *clusterService) MemberList(ctx context.Context, r *pb.MemberListRequest) (*pb.MemberListResponse, error) {
	if _, err := c.s.user(ctx); err != nil {
		return nil, err
	}
	if r.Linearizable {
		if err := c.s.confirm(callFrom(ctx)); err != nil {
			return nil, err
		}
	}
	h := c.s.header(0)
	return &pb.MemberListResponse{
		Header:  &pb.ResponseHeader{ClusterId: h.cluster, MemberId: h.member, RaftTerm: h.term},
		Members: c.s.o.Cluster.Members(),
	}, nil
}
