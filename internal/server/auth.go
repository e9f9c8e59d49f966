package server

import (
	"golang.org/x/crypto/bcrypt"

	"github.com/engram-kv/engram/internal/auth"
	"github.com/engram-kv/engram/internal/rpc"
)

// authenticator is rpc.Auth, of the tables as applied and the tokens of this
// member.
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

// Identify implements rpc.Auth. As in etcd a simple token stands for its user as
// of now, whatever changed since it was issued.
func (a authenticator) Identify(token string) (rpc.Identity, error) {
	user, ok := a.m.tokens.User(token)
	if !ok {
		// What is applied comes first: a token of an entry below it is there.
		applied, _ := a.m.machine().Applied()
		if user, ok = a.m.tokens.User(token); !ok {
			if index, simple := auth.IssuedAt(token); simple && index > applied {
				return rpc.Identity{}, auth.ErrTokenAhead
			}
			return rpc.Identity{}, auth.ErrInvalidToken
		}
	}
	return rpc.Identity{User: user, AuthRevision: a.Revision()}, nil
}

// Password implements rpc.Auth.
func (a authenticator) Password(name string) ([]byte, uint64, error) {
	auth, _, _ := a.m.machine().Tables()
	hash, err := auth.Password(name)
	return hash, auth.Revision(), err
}

// bcryptCost is the cost of hashing a password. As etcd, a member starts with one
// that cannot be, and takes the default.
func (m *Member) bcryptCost() int {
	if cost := m.cfg.BcryptCost; cost >= uint(bcrypt.MinCost) && cost <= uint(bcrypt.MaxCost) {
		return int(cost)
	}
	m.log.Warn("--bcrypt-cost is not between what bcrypt takes, the default is used",
		"given", m.cfg.BcryptCost, "min", bcrypt.MinCost, "max", bcrypt.MaxCost, "default", bcrypt.DefaultCost)
	return bcrypt.DefaultCost
}

// ClientCerts implements rpc.Auth. As in etcd a trusted CA alone is not enough.
func (a authenticator) ClientCerts() bool { return a.m.cfg.ClientTLS.ClientCertAuth }
