package rpc

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/command"
	"github.com/engram-kv/engram/internal/consensus"
	"github.com/engram-kv/engram/internal/lease"
	"github.com/engram-kv/engram/internal/member"
	"github.com/engram-kv/engram/internal/mvcc"
	"github.com/engram-kv/engram/internal/state"
)

// TestWireErrors spells the codes and texts out that clients match.
func TestWireErrors(t *testing.T) {
	for _, c := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{mvcc.ErrCompacted, codes.OutOfRange, "etcdserver: mvcc: required revision has been compacted"},
		{mvcc.ErrFutureRevision, codes.OutOfRange, "etcdserver: mvcc: required revision is a future revision"},
		{state.ErrKeyNotFound, codes.InvalidArgument, "etcdserver: key not found"},
		{state.ErrNoSpace, codes.ResourceExhausted, "etcdserver: mvcc: database space exceeded"},
		{state.ErrCorrupt, codes.DataLoss, "etcdserver: corrupt cluster"},
		{lease.ErrNotFound, codes.NotFound, "etcdserver: requested lease not found"},
		{lease.ErrExists, codes.FailedPrecondition, "etcdserver: lease already exists"},
		{lease.ErrTTLTooLarge, codes.OutOfRange, "etcdserver: too large lease TTL"},
		{lease.ErrNotPrimary, codes.Unknown, "not a primary lessor"},
		{member.ErrRemoved, codes.NotFound, "etcdserver: member not found"},
		{member.ErrNotFound, codes.NotFound, "etcdserver: member not found"},
		{member.ErrExists, codes.FailedPrecondition, "etcdserver: member ID already exist"},
		{member.ErrPeerURLExists, codes.FailedPrecondition, "etcdserver: Peer URLs already exists"},
		{member.ErrBadURL, codes.InvalidArgument, "etcdserver: given member URLs are invalid"},
		{member.ErrTooManyLearners, codes.FailedPrecondition, "etcdserver: too many learner members in cluster"},
		{member.ErrNotLearner, codes.FailedPrecondition, "etcdserver: can only promote a learner member"},
		{member.ErrLastVoter, codes.Unknown, "etcdserver: re-configuration failed due to not enough started members"},
		{member.ErrNotEnoughStarted, codes.Unknown, "etcdserver: re-configuration failed due to not enough started members"},
		{member.ErrUnhealthy, codes.Unavailable, "etcdserver: unhealthy cluster"},
		{member.ErrLearnerNotReady, codes.FailedPrecondition, "etcdserver: can only promote a learner member which is in sync with leader"},
		{ErrNotLeader, codes.FailedPrecondition, "etcdserver: not leader"},
		{ErrBadLeaderTransferee, codes.FailedPrecondition, "etcdserver: bad leader transferee"},
		{ErrLeaderTransferTimeout, codes.Unknown, "etcdserver: request timed out, leader transfer took too long"},
		{member.ErrInvalidVersionFormat, codes.InvalidArgument, "etcdserver: wrong downgrade target version format"},
		{member.ErrInvalidDowngradeTarget, codes.InvalidArgument, "etcdserver: invalid downgrade target version"},
		{member.ErrDowngradeInProcess, codes.FailedPrecondition, "etcdserver: cluster has a downgrade job in progress"},
		{member.ErrNoInflightDowngrade, codes.FailedPrecondition, "etcdserver: no inflight downgrade job"},
		{member.ErrNoClusterVersion, codes.FailedPrecondition, "etcdserver: cluster version not found during downgrade"},
		{auth.ErrRootUserNotExist, codes.FailedPrecondition, "etcdserver: root user does not exist"},
		{auth.ErrRootRoleNotExist, codes.FailedPrecondition, "etcdserver: root user does not have root role"},
		{auth.ErrUserAlreadyExist, codes.FailedPrecondition, "etcdserver: user name already exists"},
		{auth.ErrUserEmpty, codes.InvalidArgument, "etcdserver: user name is empty"},
		{auth.ErrUserNotFound, codes.FailedPrecondition, "etcdserver: user name not found"},
		{auth.ErrRoleAlreadyExist, codes.FailedPrecondition, "etcdserver: role name already exists"},
		{auth.ErrRoleNotFound, codes.FailedPrecondition, "etcdserver: role name not found"},
		{auth.ErrRoleEmpty, codes.InvalidArgument, "etcdserver: role name is empty"},
		{auth.ErrPermissionNotGiven, codes.InvalidArgument, "etcdserver: permission not given"},
		{auth.ErrPermissionDenied, codes.PermissionDenied, "etcdserver: permission denied"},
		{auth.ErrRoleNotGranted, codes.FailedPrecondition, "etcdserver: role is not granted to the user"},
		{auth.ErrPermissionNotGranted, codes.FailedPrecondition, "etcdserver: permission is not granted to the role"},
		{auth.ErrNotEnabled, codes.FailedPrecondition, "etcdserver: authentication is not enabled"},
		{auth.ErrFailed, codes.InvalidArgument, "etcdserver: authentication failed, invalid user ID or password"},
		{auth.ErrNoPassword, codes.Unknown, "auth: authentication failed, password was given for no password user"},
		{auth.ErrInvalidManagement, codes.InvalidArgument, "etcdserver: invalid auth management"},
		{auth.ErrOldRevision, codes.InvalidArgument, "etcdserver: revision of auth store is old"},
		{auth.ErrInvalidToken, codes.Unauthenticated, "etcdserver: invalid auth token"},
		{consensus.ErrStopped, codes.Unavailable, "etcdserver: server stopped"},
		{consensus.ErrTooManyRequests, codes.Unknown, "etcdserver: too many requests"},
		{consensus.ErrProposalDropped, codes.Unavailable, "etcdserver: leader changed"},
		{consensus.ErrLeaderChanged, codes.Unavailable, "etcdserver: leader changed"},
		{consensus.ErrTimeout, codes.Unavailable, "etcdserver: request timed out"},
		{consensus.ErrTimeoutDueToLeaderFail, codes.Unavailable, "etcdserver: request timed out, possibly due to previous leader failure"},
		{consensus.ErrTimeoutDueToConnectionLost, codes.Unavailable, "etcdserver: request timed out, possibly due to connection lost"},
		{consensus.ErrCanceled, codes.Canceled, "etcdserver: request canceled"},
		{command.ErrTooComplex, codes.InvalidArgument, "etcdserver: too many operations in txn request"},
		{context.Canceled, codes.Canceled, "context canceled"},
		{context.DeadlineExceeded, codes.DeadlineExceeded, "context deadline exceeded"},
		{rpctypes.ErrGRPCNoLeader, codes.Unavailable, "etcdserver: no leader"},
		{errors.New("disk on fire"), codes.Unknown, "disk on fire"},
	} {
		if s := status.Convert(WireError(c.err)); s.Code() != c.code || s.Message() != c.text {
			t.Errorf("%v: got %v %q, want %v %q", c.err, s.Code(), s.Message(), c.code, c.text)
		}
	}
	for _, e := range wireErrors { // whatever was asked and found stays in our log
		if got := WireError(fmt.Errorf("put %q: %w", "key", e.ours)); !errors.Is(got, e.wire) {
			t.Errorf("wrapped %v: got %v, want %v", e.ours, got, e.wire)
		}
	}
	if WireError(nil) != nil {
		t.Error("nil became an error")
	}
}
