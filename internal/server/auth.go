package server

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/engram-kv/engram/internal/rpc"
	"github.com/engram-kv/engram/internal/state"
)

// authenticator is rpc.Auth. The replicated auth tables are applied and
// enforced, but this version issues no tokens: while auth is on (a state that a
// restored or replicated store may be in) no token is good.
type authenticator struct{ m *Member }

// Enabled implements rpc.Auth.
func (a authenticator) Enabled() bool {
	auth, _, _ := a.m.machine().Tables()
	return auth.Enabled()
}

// Revision implements rpc.Auth.
func (a authenticator) Revision() uint64 {
	auth, _, _ := a.m.machine().Tables()
	return auth.Revision()
}

// Identify implements rpc.Auth.
func (authenticator) Identify(string) (rpc.Identity, error) {
	return rpc.Identity{}, rpctypes.ErrGRPCInvalidAuthToken
}

// ClientCerts implements rpc.Auth.
func (authenticator) ClientCerts() bool { return false }

// quota is rpc.Quota.
type quota struct{ m *Member }

// Admit implements rpc.Quota.
func (q quota) Admit(cost int64) error {
	limit := q.m.cfg.Quota()
	if cost == 0 || limit == 0 || q.m.machine().Root().UsageBytes()+cost < limit {
		return nil
	}
	if _, _, alarms := q.m.machine().Tables(); !alarms.Has(pb.AlarmType_NOSPACE) {
		notify(q.m.overQuota)
	}
	return state.ErrNoSpace
}
