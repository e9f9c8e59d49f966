package rpc

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/engram-kv/engram/internal/command"
)

// authService is etcdserverpb.Auth. What it is asked goes through the log, also
// what only reads; who may ask is checked when the entry is applied. The log
// carries hashes of passwords and never the passwords.
type authService struct {
	pb.UnimplementedAuthServer
	s *Server
}

// ask puts a request into the log on behalf of the caller and returns its answer.
func ask[Response proto.Message](ctx context.Context, s *Server, kind command.Kind, r proto.Message) (none Response, err error) {
	who, err := s.caller(callFrom(ctx))
	if err != nil {
		return none, err
	}
	return askAs[Response](ctx, s, who, kind, r)
}

func askAs[Response proto.Message](ctx context.Context, s *Server, who Identity, kind command.Kind, r proto.Message) (none Response, err error) {
	began := s.o.Clock.Now()
	defer func() { s.metrics.request(requestOf(kind), err, s.o.Clock.Now().Sub(began)) }()
	reply, err := s.do(ctx, who, kind, r)
	defer reply.Release()
	if err != nil {
		return none, err
	}
	response := reply.Message.(Response)
	m := response.ProtoReflect()
	m.Set(m.Descriptor().Fields().ByNumber(fieldHeader), protoreflect.ValueOfMessage(s.responseHeader(0).ProtoReflect()))
	return response, nil
}

func (a *authService) AuthEnable(ctx context.Context, r *pb.AuthEnableRequest) (*pb.AuthEnableResponse, error) {
	return ask[*pb.AuthEnableResponse](ctx, a.s, command.KindAuthEnable, r)
}

func (a *authService) AuthDisable(ctx context.Context, r *pb.AuthDisableRequest) (*pb.AuthDisableResponse, error) {
	return ask[*pb.AuthDisableResponse](ctx, a.s, command.KindAuthDisable, r)
}

func (a *authService) AuthStatus(ctx context.Context, r *pb.AuthStatusRequest) (*pb.AuthStatusResponse, error) {
	return ask[*pb.AuthStatusResponse](ctx, a.s, command.KindAuthStatus, r)
}

// Authenticate gives a token to who knows the password of a user. It is checked
// here, and what the entry carries must not be of an older password: so the
// tables are as new as the call, and it is done again if they changed until the
// entry was applied.
func (a *authService) Authenticate(ctx context.Context, r *pb.AuthenticateRequest) (*pb.AuthenticateResponse, error) {
	s := a.s
	if err := s.confirm(callFrom(ctx)); err != nil {
		return nil, err
	}
	for {
		hash, revision, err := s.o.Auth.Password(r.Name)
		if err != nil {
			return nil, err
		}
		if err := s.hasher.compare(ctx, hash, r.Password); err != nil {
			return nil, err
		}
		resp, err := askAs[*pb.AuthenticateResponse](ctx, s, Identity{}, command.KindAuthenticate,
			&pb.InternalAuthenticateRequest{Name: r.Name, SimpleToken: newTokenPrefix()})
		if err != nil || revision == s.o.Auth.Revision() {
			return resp, err
		}
	}
}

// hashed replaces a password by its hash. The caller is known before the work is
// done, but what can be said without it comes first.
func (a *authService) hashed(ctx context.Context, password *string, hash *string) (who Identity, err error) {
	if len(*password) > maxPassword {
		return Identity{}, bcrypt.ErrPasswordTooLong
	}
	if who, err = a.s.caller(callFrom(ctx)); err != nil {
		return Identity{}, err
	}
	*hash, err = a.s.hasher.hash(ctx, *password)
	*password = ""
	return who, err
}

func (a *authService) UserAdd(ctx context.Context, r *pb.AuthUserAddRequest) (*pb.AuthUserAddResponse, error) {
	if r.GetOptions().GetNoPassword() {
		r.Password = ""
		return ask[*pb.AuthUserAddResponse](ctx, a.s, command.KindAuthUserAdd, r)
	}
	who, err := a.hashed(ctx, &r.Password, &r.HashedPassword)
	if err != nil {
		return nil, err
	}
	return askAs[*pb.AuthUserAddResponse](ctx, a.s, who, command.KindAuthUserAdd, r)
}

func (a *authService) UserGet(ctx context.Context, r *pb.AuthUserGetRequest) (*pb.AuthUserGetResponse, error) {
	return ask[*pb.AuthUserGetResponse](ctx, a.s, command.KindAuthUserGet, r)
}

func (a *authService) UserList(ctx context.Context, r *pb.AuthUserListRequest) (*pb.AuthUserListResponse, error) {
	return ask[*pb.AuthUserListResponse](ctx, a.s, command.KindAuthUserList, r)
}

func (a *authService) UserDelete(ctx context.Context, r *pb.AuthUserDeleteRequest) (*pb.AuthUserDeleteResponse, error) {
	return ask[*pb.AuthUserDeleteResponse](ctx, a.s, command.KindAuthUserDelete, r)
}

// UserChangePassword hashes nothing if the new password is empty, as etcd: no
// password is right then.
func (a *authService) UserChangePassword(ctx context.Context, r *pb.AuthUserChangePasswordRequest) (*pb.AuthUserChangePasswordResponse, error) {
	if r.Password == "" {
		return ask[*pb.AuthUserChangePasswordResponse](ctx, a.s, command.KindAuthUserChangePassword, r)
	}
	who, err := a.hashed(ctx, &r.Password, &r.HashedPassword)
	if err != nil {
		return nil, err
	}
	return askAs[*pb.AuthUserChangePasswordResponse](ctx, a.s, who, command.KindAuthUserChangePassword, r)
}

func (a *authService) UserGrantRole(ctx context.Context, r *pb.AuthUserGrantRoleRequest) (*pb.AuthUserGrantRoleResponse, error) {
	return ask[*pb.AuthUserGrantRoleResponse](ctx, a.s, command.KindAuthUserGrantRole, r)
}

func (a *authService) UserRevokeRole(ctx context.Context, r *pb.AuthUserRevokeRoleRequest) (*pb.AuthUserRevokeRoleResponse, error) {
	return ask[*pb.AuthUserRevokeRoleResponse](ctx, a.s, command.KindAuthUserRevokeRole, r)
}

func (a *authService) RoleAdd(ctx context.Context, r *pb.AuthRoleAddRequest) (*pb.AuthRoleAddResponse, error) {
	return ask[*pb.AuthRoleAddResponse](ctx, a.s, command.KindAuthRoleAdd, r)
}

func (a *authService) RoleGet(ctx context.Context, r *pb.AuthRoleGetRequest) (*pb.AuthRoleGetResponse, error) {
	return ask[*pb.AuthRoleGetResponse](ctx, a.s, command.KindAuthRoleGet, r)
}

func (a *authService) RoleList(ctx context.Context, r *pb.AuthRoleListRequest) (*pb.AuthRoleListResponse, error) {
	return ask[*pb.AuthRoleListResponse](ctx, a.s, command.KindAuthRoleList, r)
}

func (a *authService) RoleDelete(ctx context.Context, r *pb.AuthRoleDeleteRequest) (*pb.AuthRoleDeleteResponse, error) {
	return ask[*pb.AuthRoleDeleteResponse](ctx, a.s, command.KindAuthRoleDelete, r)
}

func (a *authService) RoleGrantPermission(ctx context.Context, r *pb.AuthRoleGrantPermissionRequest) (*pb.AuthRoleGrantPermissionResponse, error) {
	return ask[*pb.AuthRoleGrantPermissionResponse](ctx, a.s, command.KindAuthRoleGrantPermission, r)
}

func (a *authService) RoleRevokePermission(ctx context.Context, r *pb.AuthRoleRevokePermissionRequest) (*pb.AuthRoleRevokePermissionResponse, error) {
	return ask[*pb.AuthRoleRevokePermissionResponse](ctx, a.s, command.KindAuthRoleRevokePermission, r)
}
