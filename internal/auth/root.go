package auth

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"sync"

	"go.etcd.io/etcd/api/v3/authpb"
	"google.golang.org/protobuf/proto"
)

// RootUser and RootRole name the administrator and what makes one.
const (
	RootUser = "root"
	RootRole = "root"
)

// Root is the users, roles and their rights at one moment. It never changes and
// may be used by anybody.
type Root struct {
	enabled  bool
	revision uint64
	users    map[string]*authpb.User
	roles    map[string]*authpb.Role

	rights *sync.Map // user name -> *rights, made when first needed
}

// Enabled says whether calls need a user.
func (r *Root) Enabled() bool { return r.enabled }

// Revision counts the changes, from 1. A token is good only for what was in
// force when it was given.
func (r *Root) Revision() uint64 { return r.revision }

// User returns the record of a user, nil if there is none. It is shared: nobody
// changes it.
func (r *Root) User(name string) *authpb.User { return r.users[name] }

// Password returns the hash that a user's password must match. It fails with
// ErrNotEnabled, ErrFailed or ErrNoPassword.
func (r *Root) Password(name string) ([]byte, error) {
	u := r.users[name]
	switch {
	case !r.enabled:
		return nil, fmt.Errorf("authenticate user %q: %w", name, ErrNotEnabled)
	case u == nil:
		return nil, fmt.Errorf("authenticate user %q, who does not exist: %w", name, ErrFailed)
	case u.GetOptions().GetNoPassword():
		return nil, fmt.Errorf("authenticate user %q: %w", name, ErrNoPassword)
	}
	return u.GetPassword(), nil
}

// UserRoles returns the roles of a user, in order. It fails with
// ErrUserNotFound.
func (r *Root) UserRoles(name string) ([]string, error) {
	u := r.users[name]
	if u == nil {
		return nil, fmt.Errorf("user %q: %w", name, ErrUserNotFound)
	}
	return slices.Clone(u.GetRoles()), nil
}

// RolePermissions returns what a role permits. The caller owns it. The role root
// permits everything, but its record must exist too. It fails with
// ErrRoleNotFound.
func (r *Root) RolePermissions(name string) ([]*authpb.Permission, error) {
	role := r.roles[name]
	if role == nil {
		return nil, fmt.Errorf("role %q: %w", name, ErrRoleNotFound)
	}
	if name == RootRole {
		return []*authpb.Permission{{PermType: authpb.READWRITE, RangeEnd: []byte{0}}}, nil
	}
	return proto.Clone(role).(*authpb.Role).GetKeyPermission(), nil
}

// UserNames returns the users in byte order.
func (r *Root) UserNames() []string { return slices.Sorted(maps.Keys(r.users)) }

// RoleNames returns the roles in byte order. As in etcd, names from "\xff" on
// are left out.
func (r *Root) RoleNames() []string {
	names := slices.Sorted(maps.Keys(r.roles))
	end, _ := slices.BinarySearch(names, "\xff")
	return names[:end]
}

// HasRole says whether there is such a user and it has the role.
func (r *Root) HasRole(user, role string) bool {
	return slices.Contains(r.users[user].GetRoles(), role)
}

// CheckRange checks that a user may read [key, end), as of the auth revision at
// which the user was authenticated. An empty end means the single key, "\x00"
// all keys from key on. While auth is off everything is allowed. It fails with
// ErrUserEmpty, ErrOldRevision or ErrPermissionDenied.
func (r *Root) CheckRange(user string, revision uint64, key, end []byte) error {
	return r.check(user, revision, authpb.READ, key, end)
}

// CheckPut checks that a user may write key, as CheckRange does. That a previous
// value may be read is checked by itself.
func (r *Root) CheckPut(user string, revision uint64, key []byte) error {
	return r.check(user, revision, authpb.WRITE, key, nil)
}

// CheckDeleteRange checks that a user may write [key, end), as CheckRange does.
func (r *Root) CheckDeleteRange(user string, revision uint64, key, end []byte) error {
	return r.check(user, revision, authpb.WRITE, key, end)
}

func (r *Root) check(user string, revision uint64, kind authpb.Permission_Type, key, end []byte) error {
	if !r.enabled {
		return nil
	}
	if err := r.CheckUser(user, revision); err != nil {
		return err
	}
	if r.HasRole(user, RootRole) {
		return nil
	}
	rights := r.rightsOf(user)
	allowed := rights.read
	if kind == authpb.WRITE {
		allowed = rights.write
	}
	if !allowed.covers(intervalOf(key, end)) {
		return fmt.Errorf("user %q, %v of [%q, %q): %w", user, kind, key, end, ErrPermissionDenied)
	}
	return nil
}

// CheckUser checks that there is such a user, authenticated as of the present
// auth revision. While auth is off everybody is welcome. It fails as CheckRange
// does.
func (r *Root) CheckUser(user string, revision uint64) error {
	switch {
	case !r.enabled:
		return nil
	case revision == 0:
		return ErrUserEmpty
	case revision < r.revision:
		return fmt.Errorf("user %q was authenticated at auth revision %d, now at %d: %w", user, revision, r.revision, ErrOldRevision)
	case r.users[user] == nil:
		return fmt.Errorf("user %q does not exist: %w", user, ErrPermissionDenied)
	}
	return nil
}

// CheckCaller checks that somebody calls, while auth is on. As in etcd it need
// not be a user that exists: who shows a certificate of a trusted CA may see
// what is nobody's secret. It fails with ErrUserEmpty.
func (r *Root) CheckCaller(user string) error {
	if r.enabled && user == "" {
		return ErrUserEmpty
	}
	return nil
}

// CheckAdmin checks that a user may administer. Unlike the others it does not
// ask at which auth revision the user was authenticated. It fails with
// ErrUserEmpty, ErrUserNotFound or ErrPermissionDenied.
func (r *Root) CheckAdmin(user string) error {
	switch {
	case !r.enabled:
		return nil
	case user == "":
		return ErrUserEmpty
	case r.users[user] == nil:
		return fmt.Errorf("user %q: %w", user, ErrUserNotFound)
	case !r.HasRole(user, RootRole):
		return fmt.Errorf("user %q has not the role root: %w", user, ErrPermissionDenied)
	}
	return nil
}

// CheckUserGet checks that a user may see the roles of another: its own, or as
// administrator any. It fails as CheckAdmin does.
func (r *Root) CheckUserGet(user, other string) error {
	if err := r.CheckAdmin(user); err != nil && user != other {
		return err
	}
	return nil
}

// CheckRoleGet checks that a user may see the permissions of a role: of its own,
// or as administrator of any. It fails as CheckAdmin does.
func (r *Root) CheckRoleGet(user, role string) error {
	if err := r.CheckAdmin(user); err != nil && !r.HasRole(user, role) {
		return err
	}
	return nil
}

// rights is what a user may do with which keys, by all its roles together.
type rights struct{ read, write intervals }

func (r *Root) rightsOf(user string) *rights {
	if v, ok := r.rights.Load(user); ok {
		return v.(*rights)
	}
	var out rights
	for _, name := range r.users[user].GetRoles() {
		for _, p := range r.roles[name].GetKeyPermission() {
			iv := intervalOf(p.GetKey(), p.GetRangeEnd())
			if t := p.GetPermType(); t == authpb.READ || t == authpb.READWRITE {
				out.read = append(out.read, iv)
			}
			if t := p.GetPermType(); t == authpb.WRITE || t == authpb.READWRITE {
				out.write = append(out.write, iv)
			}
		}
	}
	out.read, out.write = out.read.merge(), out.write.merge()
	r.rights.Store(user, &out)
	return &out
}

// interval is [begin, end), or all keys from begin on if it is open.
type interval struct {
	begin, end []byte
	open       bool
}

// intervalOf understands key and range end as etcd does in requests and
// permissions.
func intervalOf(key, end []byte) interval {
	switch {
	case len(end) == 0:
		return interval{begin: key, end: append(slices.Clip(slices.Clone(key)), 0)}
	case len(end) == 1 && end[0] == 0:
		return interval{begin: key, open: true}
	}
	return interval{begin: key, end: end}
}

// intervals are sorted and neither overlap nor touch, once merged.
type intervals []interval

func (s intervals) merge() intervals {
	slices.SortFunc(s, func(a, b interval) int { return bytes.Compare(a.begin, b.begin) })
	var out intervals
	for _, iv := range s {
		last := len(out) - 1
		if last < 0 || !out[last].open && bytes.Compare(out[last].end, iv.begin) < 0 {
			out = append(out, iv)
			continue
		}
		if iv.open || !out[last].open && bytes.Compare(out[last].end, iv.end) < 0 {
			out[last].end, out[last].open = iv.end, iv.open
		}
	}
	return out
}

// covers says whether one of the merged intervals holds all of iv. An inverted
// range holds no key, but its begin must be covered all the same.
func (s intervals) covers(iv interval) bool {
	i, found := slices.BinarySearchFunc(s, iv.begin, func(a interval, key []byte) int { return bytes.Compare(a.begin, key) })
	if !found {
		i--
	}
	if i < 0 {
		return false
	}
	if s[i].open {
		return true
	}
	return !iv.open && bytes.Compare(iv.begin, s[i].end) < 0 && bytes.Compare(iv.end, s[i].end) <= 0
}
