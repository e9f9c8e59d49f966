package state

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/command"
)

// authorize checks the permissions that etcd checks when it applies an entry
// (state-machine.md, section 9.3). What only the serving member checks
// (compaction, alarms, membership) is not here: such entries of the servers'
// own carry no user.
func (b *batch) authorize(c *command.Command) error {
	a := b.m.auth.Root()
	if !a.Enabled() {
		return nil
	}
	user, revision := c.Header.Username, c.Header.AuthRevision
	switch c.Kind {
	case command.KindPut:
		return b.mayPut(a, c, &c.Put)
	case command.KindRange:
		return a.CheckRange(user, revision, c.Range.Key, c.Range.RangeEnd)
	case command.KindDeleteRange:
		return mayDelete(a, c, &c.DeleteRange)
	case command.KindTxn:
		return b.mayTxn(a, c, &c.Txn)
	case command.KindLeaseRevoke:
		return b.mayWriteLease(a, c, c.Msg.(*pb.LeaseRevokeRequest).GetID())
	case command.KindAuthUserGet:
		return a.CheckUserGet(user, c.Msg.(*pb.AuthUserGetRequest).GetName())
	case command.KindAuthRoleGet:
		return a.CheckRoleGet(user, c.Msg.(*pb.AuthRoleGetRequest).GetRole())
	case command.KindAuthEnable, command.KindAuthDisable,
		command.KindAuthUserAdd, command.KindAuthUserDelete, command.KindAuthUserChangePassword,
		command.KindAuthUserGrantRole, command.KindAuthUserRevokeRole, command.KindAuthUserList,
		command.KindAuthRoleAdd, command.KindAuthRoleDelete, command.KindAuthRoleList,
		command.KindAuthRoleGrantPermission, command.KindAuthRoleRevokePermission:
		return a.CheckAdmin(user)
	}
	return nil
}

func (b *batch) mayPut(a *auth.Root, c *command.Command, r *command.PutRequest) error {
	user, revision := c.Header.Username, c.Header.AuthRevision
	if err := a.CheckPut(user, revision, r.Key); err != nil {
		return err
	}
	// A key that joins a lease dies with it: only who may write all of the
	// lease's keys may add one.
	if err := b.mayWriteLease(a, c, r.Lease); err != nil {
		return err
	}
	if r.PrevKV {
		return a.CheckRange(user, revision, r.Key, nil)
	}
	return nil
}

// mayWriteLease checks for the right to write every key of a lease, which an
// unknown lease and lease 0 have none of. Of a lease without keys it asks for no
// user at all, as etcd does.
func (b *batch) mayWriteLease(a *auth.Root, c *command.Command, id int64) error {
	user, revision := c.Header.Username, c.Header.AuthRevision
	if a.CheckAdmin(user) == nil {
		return nil
	}
	if id == 0 {
		return nil
	}
	var refused error
	b.m.leases.EveryKey(id, func(key []byte) bool {
		refused = a.CheckPut(user, revision, key)
		return refused == nil
	})
	return refused
}

func mayDelete(a *auth.Root, c *command.Command, r *command.DeleteRangeRequest) error {
	user, revision := c.Header.Username, c.Header.AuthRevision
	if err := a.CheckDeleteRange(user, revision, r.Key, r.RangeEnd); err != nil {
		return err
	}
	if r.PrevKV {
		return a.CheckRange(user, revision, r.Key, r.RangeEnd)
	}
	return nil
}

// mayTxn checks every compare and every operation of both branches, nested ones
// too: which branch will run must not tell a secret.
func (b *batch) mayTxn(a *auth.Root, c *command.Command, t *command.TxnRequest) error {
	user, revision := c.Header.Username, c.Header.AuthRevision
	for i := range t.Compare {
		if err := a.CheckRange(user, revision, t.Compare[i].Key, t.Compare[i].RangeEnd); err != nil {
			return err
		}
	}
	for _, ops := range [][]command.Op{t.Success, t.Failure} {
		for i := range ops {
			var err error
			switch op := &ops[i]; op.Kind {
			case command.OpRange:
				err = a.CheckRange(user, revision, op.Range.Key, op.Range.RangeEnd)
			case command.OpPut:
				err = b.mayPut(a, c, op.Put)
			case command.OpDeleteRange:
				err = mayDelete(a, c, op.DeleteRange)
			case command.OpTxn:
				err = b.mayTxn(a, c, op.Txn)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// authRequest runs a request of the auth service, and says whether it was one.
func (b *batch) authRequest(c *command.Command, reply *Reply) (handled bool, err error) {
	t, s, tokens := b.m.auth, b.store, b.m.o.Tokens
	switch r := c.Msg.(type) {
	case *pb.AuthEnableRequest:
		reply.Message = &pb.AuthEnableResponse{}
		return true, t.Enable(s)
	case *pb.AuthDisableRequest:
		if t.Disable(s) {
			tokens.VoidAll()
		}
		reply.Message = &pb.AuthDisableResponse{}
	case *pb.AuthStatusRequest:
		reply.Message = &pb.AuthStatusResponse{Enabled: t.Root().Enabled(), AuthRevision: t.Root().Revision()}
	case *pb.InternalAuthenticateRequest:
		token, err := t.Authenticate(r, b.index)
		if token != "" {
			tokens.Issue(token, r.GetName())
		}
		reply.Message = &pb.AuthenticateResponse{Token: token}
		return true, err
	case *pb.AuthUserAddRequest:
		reply.Message = &pb.AuthUserAddResponse{}
		return true, t.UserAdd(s, r)
	case *pb.AuthUserDeleteRequest:
		reply.Message = &pb.AuthUserDeleteResponse{}
		return true, b.voidingTokens(r.GetName(), t.UserDelete(s, r))
	case *pb.AuthUserChangePasswordRequest:
		reply.Message = &pb.AuthUserChangePasswordResponse{}
		return true, b.voidingTokens(r.GetName(), t.UserChangePassword(s, r))
	case *pb.AuthUserGrantRoleRequest:
		reply.Message = &pb.AuthUserGrantRoleResponse{}
		return true, t.UserGrantRole(s, r)
	case *pb.AuthUserRevokeRoleRequest:
		reply.Message = &pb.AuthUserRevokeRoleResponse{}
		return true, t.UserRevokeRole(s, r)
	case *pb.AuthUserGetRequest:
		roles, err := t.Root().UserRoles(r.GetName())
		reply.Message = &pb.AuthUserGetResponse{Roles: roles}
		return true, err
	case *pb.AuthUserListRequest:
		reply.Message = &pb.AuthUserListResponse{Users: t.Root().UserNames()}
	case *pb.AuthRoleAddRequest:
		reply.Message = &pb.AuthRoleAddResponse{}
		return true, t.RoleAdd(s, r)
	case *pb.AuthRoleDeleteRequest:
		reply.Message = &pb.AuthRoleDeleteResponse{}
		return true, t.RoleDelete(s, r)
	case *pb.AuthRoleGetRequest:
		perms, err := t.Root().RolePermissions(r.GetRole())
		reply.Message = &pb.AuthRoleGetResponse{Perm: perms}
		return true, err
	case *pb.AuthRoleListRequest:
		reply.Message = &pb.AuthRoleListResponse{Roles: t.Root().RoleNames()}
	case *pb.AuthRoleGrantPermissionRequest:
		reply.Message = &pb.AuthRoleGrantPermissionResponse{}
		return true, t.RoleGrantPermission(s, r)
	case *pb.AuthRoleRevokePermissionRequest:
		reply.Message = &pb.AuthRoleRevokePermissionResponse{}
		return true, t.RoleRevokePermission(s, r)
	default:
		return false, nil
	}
	return true, nil
}

// voidingTokens ends the tokens of a user unless the change failed.
func (b *batch) voidingTokens(user string, err error) error {
	if err == nil {
		b.m.o.Tokens.VoidUser(user)
	}
	return err
}
