package rpc

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// authService is the part of etcdserverpb.Auth that needs no users and roles.
// Anybody may ask for it.
type authService struct {
	pb.UnimplementedAuthServer
	s *Server
}

func (a *authService) AuthStatus(context.Context, *pb.AuthStatusRequest) (*pb.AuthStatusResponse, error) {
	return &pb.AuthStatusResponse{
		Header:       a.s.responseHeader(0),
		Enabled:      a.s.o.Auth.Enabled(),
		AuthRevision: a.s.o.Auth.Revision(),
	}, nil
}
