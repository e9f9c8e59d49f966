package rpc

import (
	"context"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/member"
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
	return &pb.MemberListResponse{Header: c.header(), Members: c.s.o.Cluster.Members()}, nil
}

// header returns a header without a revision.
func (c *clusterService) header() *pb.ResponseHeader {
	h := c.s.header(0)
	return &pb.ResponseHeader{ClusterId: h.cluster, MemberId: h.member, RaftTerm: h.term}
}

// MemberAdd looks at the URLs before it asks who calls, as etcd does.
func (c *clusterService) MemberAdd(ctx context.Context, r *pb.MemberAddRequest) (*pb.MemberAddResponse, error) {
	urls, err := newPeerURLs(r.PeerURLs)
	if err != nil {
		return nil, err
	}
	if _, err := c.s.admin(ctx); err != nil {
		return nil, err
	}
	added, members, err := c.s.o.Cluster.AddMember(ctx, urls, r.IsLearner)
	if err != nil {
		return nil, err
	}
	return &pb.MemberAddResponse{Header: c.header(), Member: added, Members: members}, nil
}

// newPeerURLs returns the URLs of a member to be as etcd notes them down: without
// space around them, the scheme in small letters, sorted.
func newPeerURLs(given []string) ([]string, error) {
	urls := make([]string, len(given))
	for i, text := range given {
		text = strings.TrimSpace(text)
		if scheme, rest, ok := strings.Cut(text, ":"); ok {
			text = strings.ToLower(scheme) + ":" + rest
		}
		urls[i] = text
	}
	slices.Sort(urls)
	return urls, member.CheckPeerURLs(urls)
}

// mayChange checks that the caller is an administrator and that a member may have
// the ID: 0 is nobody's, and stands for a refused change in raft.
func (c *clusterService) mayChange(ctx context.Context, id uint64) error {
	if _, err := c.s.admin(ctx); err != nil {
		return err
	}
	if id == 0 {
		return member.ErrNotFound
	}
	return nil
}

func (c *clusterService) MemberRemove(ctx context.Context, r *pb.MemberRemoveRequest) (*pb.MemberRemoveResponse, error) {
	if err := c.mayChange(ctx, r.ID); err != nil {
		return nil, err
	}
	members, err := c.s.o.Cluster.RemoveMember(ctx, r.ID)
	if err != nil {
		return nil, err
	}
	return &pb.MemberRemoveResponse{Header: c.header(), Members: members}, nil
}

// MemberUpdate refuses URLs that are none, which etcd takes: every member of a
// real cluster that applied such a change would stop, and again at each start.
func (c *clusterService) MemberUpdate(ctx context.Context, r *pb.MemberUpdateRequest) (*pb.MemberUpdateResponse, error) {
	if err := c.mayChange(ctx, r.ID); err != nil {
		return nil, err
	}
	if err := member.CheckPeerURLs(r.PeerURLs); err != nil {
		return nil, err
	}
	members, err := c.s.o.Cluster.UpdateMember(ctx, r.ID, r.PeerURLs)
	if err != nil {
		return nil, err
	}
	return &pb.MemberUpdateResponse{Header: c.header(), Members: members}, nil
}

func (c *clusterService) MemberPromote(ctx context.Context, r *pb.MemberPromoteRequest) (*pb.MemberPromoteResponse, error) {
	if err := c.mayChange(ctx, r.ID); err != nil {
		return nil, err
	}
	members, err := c.s.o.Cluster.PromoteMember(ctx, r.ID, factsOf(callFrom(ctx)).token)
	if err != nil {
		return nil, err
	}
	return &pb.MemberPromoteResponse{Header: c.header(), Members: members}, nil
}
