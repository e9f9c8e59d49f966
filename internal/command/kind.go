package command

import (
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/membershippb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Kind says what a command does. There is one for each request that an
// InternalRaftRequest of etcd 3.7 can carry, and there will be no other: a
// request field that a real etcd member does not know stops it for good.
type Kind uint8

// The kinds. KindNone is no command.
const (
	KindNone Kind = iota
	KindRange
	KindPut
	KindDeleteRange
	KindTxn
	KindCompaction
	KindLeaseGrant
	KindLeaseRevoke
	KindAlarm
	KindLeaseCheckpoint
	KindAuthEnable
	KindAuthDisable
	KindAuthenticate
	KindAuthStatus
	KindAuthUserAdd
	KindAuthUserDelete
	KindAuthUserGet
	KindAuthUserChangePassword
	KindAuthUserGrantRole
	KindAuthUserRevokeRole
	KindAuthUserList
	KindAuthRoleList
	KindAuthRoleAdd
	KindAuthRoleDelete
	KindAuthRoleGet
	KindAuthRoleGrantPermission
	KindAuthRoleRevokePermission
	KindClusterVersionSet
	KindClusterMemberAttrSet
	KindDowngradeInfoSet
	KindDowngradeVersionTest

	kindEnd
)

// Field numbers of InternalRaftRequest that are not requests.
const (
	fieldID     protowire.Number = 1
	fieldV2     protowire.Number = 2
	fieldHeader protowire.Number = 100
)

// Field is the kind's field number in InternalRaftRequest, 0 for KindNone and
// for numbers that are no kind.
func (k Kind) Field() protowire.Number {
	switch k {
	case KindRange:
		return 3
	case KindPut:
		return 4
	case KindDeleteRange:
		return 5
	case KindTxn:
		return 6
	case KindCompaction:
		return 7
	case KindLeaseGrant:
		return 8
	case KindLeaseRevoke:
		return 9
	case KindAlarm:
		return 10
	case KindLeaseCheckpoint:
		return 11
	case KindAuthEnable:
		return 1000
	case KindAuthDisable:
		return 1011
	case KindAuthenticate:
		return 1012
	case KindAuthStatus:
		return 1013
	case KindAuthUserAdd:
		return 1100
	case KindAuthUserDelete:
		return 1101
	case KindAuthUserGet:
		return 1102
	case KindAuthUserChangePassword:
		return 1103
	case KindAuthUserGrantRole:
		return 1104
	case KindAuthUserRevokeRole:
		return 1105
	case KindAuthUserList:
		return 1106
	case KindAuthRoleList:
		return 1107
	case KindAuthRoleAdd:
		return 1200
	case KindAuthRoleDelete:
		return 1201
	case KindAuthRoleGet:
		return 1202
	case KindAuthRoleGrantPermission:
		return 1203
	case KindAuthRoleRevokePermission:
		return 1204
	case KindClusterVersionSet:
		return 1300
	case KindClusterMemberAttrSet:
		return 1301
	case KindDowngradeInfoSet:
		return 1302
	case KindDowngradeVersionTest:
		return 9900
	}
	return 0
}

// kindOf is the inverse of Field; KindNone if the field is no request.
func kindOf(field protowire.Number) Kind {
	if field >= 3 && field <= 11 {
		return KindRange + Kind(field-3)
	}
	for k := KindAuthEnable; k < kindEnd; k++ {
		if k.Field() == field {
			return k
		}
	}
	return KindNone
}

// newMessage returns an empty message of the kind's type, nil for KindNone.
func (k Kind) newMessage() proto.Message {
	switch k {
	case KindRange:
		return new(pb.RangeRequest)
	case KindPut:
		return new(pb.PutRequest)
	case KindDeleteRange:
		return new(pb.DeleteRangeRequest)
	case KindTxn:
		return new(pb.TxnRequest)
	case KindCompaction:
		return new(pb.CompactionRequest)
	case KindLeaseGrant:
		return new(pb.LeaseGrantRequest)
	case KindLeaseRevoke:
		return new(pb.LeaseRevokeRequest)
	case KindAlarm:
		return new(pb.AlarmRequest)
	case KindLeaseCheckpoint:
		return new(pb.LeaseCheckpointRequest)
	case KindAuthEnable:
		return new(pb.AuthEnableRequest)
	case KindAuthDisable:
		return new(pb.AuthDisableRequest)
	case KindAuthenticate:
		return new(pb.InternalAuthenticateRequest)
	case KindAuthStatus:
		return new(pb.AuthStatusRequest)
	case KindAuthUserAdd:
		return new(pb.AuthUserAddRequest)
	case KindAuthUserDelete:
		return new(pb.AuthUserDeleteRequest)
	case KindAuthUserGet:
		return new(pb.AuthUserGetRequest)
	case KindAuthUserChangePassword:
		return new(pb.AuthUserChangePasswordRequest)
	case KindAuthUserGrantRole:
		return new(pb.AuthUserGrantRoleRequest)
	case KindAuthUserRevokeRole:
		return new(pb.AuthUserRevokeRoleRequest)
	case KindAuthUserList:
		return new(pb.AuthUserListRequest)
	case KindAuthRoleList:
		return new(pb.AuthRoleListRequest)
	case KindAuthRoleAdd:
		return new(pb.AuthRoleAddRequest)
	case KindAuthRoleDelete:
		return new(pb.AuthRoleDeleteRequest)
	case KindAuthRoleGet:
		return new(pb.AuthRoleGetRequest)
	case KindAuthRoleGrantPermission:
		return new(pb.AuthRoleGrantPermissionRequest)
	case KindAuthRoleRevokePermission:
		return new(pb.AuthRoleRevokePermissionRequest)
	case KindClusterVersionSet:
		return new(membershippb.ClusterVersionSetRequest)
	case KindClusterMemberAttrSet:
		return new(membershippb.ClusterMemberAttrSetRequest)
	case KindDowngradeInfoSet:
		return new(membershippb.DowngradeInfoSetRequest)
	case KindDowngradeVersionTest:
		return new(pb.DowngradeVersionTestRequest)
	}
	return nil
}

// String is the name of the kind's field in InternalRaftRequest.
func (k Kind) String() string {
	if k == KindNone {
		return "none"
	}
	fields := (&pb.InternalRaftRequest{}).ProtoReflect().Descriptor().Fields()
	if f := fields.ByNumber(k.Field()); f != nil {
		return string(f.Name())
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}
