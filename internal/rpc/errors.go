package rpc

import (
	"context"
	"errors"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// Errors that real members send with the code Unknown, whatever the client's
// constants say.
var (
	errTooManyRequests  = status.Error(codes.Unknown, "etcdserver: too many requests")
	errNotEnoughStarted = status.Error(codes.Unknown, "etcdserver: re-configuration failed due to not enough started members")
	errNotPrimary       = status.Error(codes.Unknown, "not a primary lessor")
	errNoPassword       = status.Error(codes.Unknown, "auth: authentication failed, password was given for no password user")
	errTransferTimeout  = status.Error(codes.Unknown, "etcdserver: request timed out, leader transfer took too long")
)

// What MoveLeader fails with.
var (
	// ErrNotLeader says that this member does not lead.
	ErrNotLeader = errors.New("rpc: not the leader")
	// ErrBadLeaderTransferee says that the target is no voter of the cluster.
	ErrBadLeaderTransferee = errors.New("rpc: bad leader transferee")
	// ErrLeaderTransferTimeout says that the target did not lead in time. It may
	// yet.
	ErrLeaderTransferTimeout = errors.New("rpc: leader transfer took too long")
)

// wireErrors is the one table from the errors of our packages to etcd's.
var wireErrors = []struct{ ours, wire error }{
	{mvcc.ErrCompacted, rpctypes.ErrGRPCCompacted},
	{mvcc.ErrFutureRevision, rpctypes.ErrGRPCFutureRev},

	{state.ErrKeyNotFound, rpctypes.ErrGRPCKeyNotFound},
	{state.ErrNoSpace, rpctypes.ErrGRPCNoSpace},
	{state.ErrCorrupt, rpctypes.ErrGRPCCorrupt},

	{lease.ErrNotFound, rpctypes.ErrGRPCLeaseNotFound},
	{lease.ErrExists, rpctypes.ErrGRPCLeaseExist},
	{lease.ErrTTLTooLarge, rpctypes.ErrGRPCLeaseTTLTooLarge},
	{lease.ErrNotPrimary, errNotPrimary},

	{member.ErrRemoved, rpctypes.ErrGRPCMemberNotFound},
	{member.ErrNotFound, rpctypes.ErrGRPCMemberNotFound},
	{member.ErrExists, rpctypes.ErrGRPCMemberExist},
	{member.ErrPeerURLExists, rpctypes.ErrGRPCPeerURLExist},
	{member.ErrBadURL, rpctypes.ErrGRPCMemberBadURLs},
	{member.ErrTooManyLearners, rpctypes.ErrGRPCTooManyLearners},
	{member.ErrNotLearner, rpctypes.ErrGRPCMemberNotLearner},
	{member.ErrLastVoter, errNotEnoughStarted},
	{member.ErrNotEnoughStarted, errNotEnoughStarted},
	{member.ErrUnhealthy, rpctypes.ErrGRPCUnhealthy},
	{member.ErrLearnerNotReady, rpctypes.ErrGRPCLearnerNotReady},

	{ErrNotLeader, rpctypes.ErrGRPCNotLeader},
	{ErrBadLeaderTransferee, rpctypes.ErrGRPCBadLeaderTransferee},
	{ErrLeaderTransferTimeout, errTransferTimeout},

	{member.ErrInvalidVersionFormat, rpctypes.ErrGRPCWrongDowngradeVersionFormat},
	{member.ErrInvalidDowngradeTarget, rpctypes.ErrGRPCInvalidDowngradeTargetVersion},
	{member.ErrDowngradeInProcess, rpctypes.ErrGRPCDowngradeInProcess},
	{member.ErrNoInflightDowngrade, rpctypes.ErrGRPCNoInflightDowngrade},
	{member.ErrNoClusterVersion, rpctypes.ErrGRPCClusterVersionUnavailable},

	{auth.ErrRootUserNotExist, rpctypes.ErrGRPCRootUserNotExist},
	{auth.ErrRootRoleNotExist, rpctypes.ErrGRPCRootRoleNotExist},
	{auth.ErrUserAlreadyExist, rpctypes.ErrGRPCUserAlreadyExist},
	{auth.ErrUserEmpty, rpctypes.ErrGRPCUserEmpty},
	{auth.ErrUserNotFound, rpctypes.ErrGRPCUserNotFound},
	{auth.ErrRoleAlreadyExist, rpctypes.ErrGRPCRoleAlreadyExist},
	{auth.ErrRoleNotFound, rpctypes.ErrGRPCRoleNotFound},
	{auth.ErrRoleEmpty, rpctypes.ErrGRPCRoleEmpty},
	{auth.ErrPermissionNotGiven, rpctypes.ErrGRPCPermissionNotGiven},
	{auth.ErrPermissionDenied, rpctypes.ErrGRPCPermissionDenied},
	{auth.ErrRoleNotGranted, rpctypes.ErrGRPCRoleNotGranted},
	{auth.ErrPermissionNotGranted, rpctypes.ErrGRPCPermissionNotGranted},
	{auth.ErrNotEnabled, rpctypes.ErrGRPCAuthNotEnabled},
	{auth.ErrFailed, rpctypes.ErrGRPCAuthFailed},
	{auth.ErrNoPassword, errNoPassword},
	{auth.ErrInvalidManagement, rpctypes.ErrGRPCInvalidAuthMgmt},
	{auth.ErrOldRevision, rpctypes.ErrGRPCAuthOldRevision},
	{auth.ErrInvalidToken, rpctypes.ErrGRPCInvalidAuthToken},
	{auth.ErrTokenAhead, rpctypes.ErrGRPCInvalidAuthToken},

	{consensus.ErrStopped, rpctypes.ErrGRPCStopped},
	{consensus.ErrTooManyRequests, errTooManyRequests},
	{consensus.ErrProposalDropped, rpctypes.ErrGRPCLeaderChanged},
	{consensus.ErrLeaderChanged, rpctypes.ErrGRPCLeaderChanged},
	{consensus.ErrTimeout, rpctypes.ErrGRPCTimeout},
	{consensus.ErrTimeoutDueToLeaderFail, rpctypes.ErrGRPCTimeoutDueToLeaderFail},
	{consensus.ErrTimeoutDueToConnectionLost, rpctypes.ErrGRPCTimeoutDueToConnectionLost},
	{consensus.ErrCanceled, rpctypes.ErrGRPCCanceled},

	{command.ErrTooComplex, rpctypes.ErrGRPCTooManyOps},
}

// WireError returns what a client gets for an error: a gRPC status with etcd's
// code and text. An error that is neither a status nor in the table becomes
// Unknown with its own text, as in etcd; nil stays nil.
func WireError(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	for _, e := range wireErrors {
		if errors.Is(err, e.ours) {
			return e.wire
		}
	}
	switch {
	case errors.Is(err, errBusy):
		return status.Error(codes.ResourceExhausted, "etcdserver: "+err.Error())
	case errors.Is(err, context.Canceled):
		return status.FromContextError(context.Canceled).Err()
	case errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(context.DeadlineExceeded).Err()
	case errors.Is(err, command.ErrDangerous):
		return status.Error(codes.InvalidArgument, "etcdserver: "+err.Error())
	}
	var wrapped interface{ GRPCStatus() *status.Status }
	if errors.As(err, &wrapped) {
		return wrapped.GRPCStatus().Err()
	}
	return status.Error(codes.Unknown, err.Error())
}

// What grpc-go says of bytes that are not the wire form of their message, before
// what protobuf says.
const (
	undecodedRequest = "grpc: error unmarshalling request: "              // of a unary call
	undecodedMessage = "grpc: failed to unmarshal the received message: " // of a stream
)

// undecoded returns what a client gets for a request that cannot be decoded, in
// the given words. Of what package command says only protobuf's part is told.
func undecoded(words string, err error) error {
	if errors.Is(err, command.ErrTooComplex) {
		return rpctypes.ErrGRPCTooManyOps
	}
	if parts, ok := err.(interface{ Unwrap() []error }); ok {
		for _, part := range parts.Unwrap() {
			if errors.Is(part, proto.Error) {
				err = part
			}
		}
	}
	return status.Error(codes.Internal, words+err.Error())
}
