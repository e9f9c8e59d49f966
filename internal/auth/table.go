// Package auth is the replicated table of users, roles and permissions.
//
// It says who may do what. Who is asking the edge finds out, from the Tokens of
// this member and the passwords' hashes in a Root. Table is the writer's handle,
// Root what readers get. Invariants:
//
//	U1: a change that succeeds adds one to the auth revision; what fails, or
//	    changes nothing, does not. Enabling auth is no change in this sense.
//	U2: the table depends on commands alone, but for passwords that a command
//	    of etcd before 3.5 carries in the clear: they are salted here.
//	U3: rows are what etcd 3.7 would have in its file, byte for byte.
//	U4: a Root never changes.
package auth

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/protobuf/proto"

	"github.com/engram-kv/engram/internal/storage"
)

const (
	rowEnabled  = "authEnabled"
	rowRevision = "authRevision"
)

// Table is users and roles, and their rows. Only the applier uses it.
type Table struct {
	root  *Root
	fresh bool // no revision row yet
}

// Open reads the table.
func Open(r storage.Reader) (*Table, error) {
	root := &Root{
		revision: 1, users: map[string]*authpb.User{}, roles: map[string]*authpb.Role{}, rights: new(sync.Map),
	}
	t := &Table{root: root, fresh: true}
	err := errors.Join(
		storage.Rows(r, storage.TableAuth, func(name, value []byte) error {
			switch string(name) {
			case rowEnabled:
				root.enabled = bytes.Equal(value, []byte{1})
			case rowRevision:
				if len(value) != 8 {
					return fmt.Errorf("auth revision row %x, want 8 bytes", value)
				}
				root.revision, t.fresh = binary.BigEndian.Uint64(value), false
			}
			return nil
		}),
		storage.Rows(r, storage.TableAuthUser, func(name, value []byte) error {
			u := new(authpb.User)
			if err := proto.Unmarshal(value, u); err != nil {
				return fmt.Errorf("row of user %q: %w", name, err)
			}
			if !bytes.Equal(name, u.GetName()) {
				return fmt.Errorf("row of user %q holds user %q", name, u.GetName())
			}
			root.users[string(name)] = u
			return nil
		}),
		storage.Rows(r, storage.TableAuthRole, func(name, value []byte) error {
			role := new(authpb.Role)
			if err := proto.Unmarshal(value, role); err != nil {
				return fmt.Errorf("row of role %q: %w", name, err)
			}
			if !bytes.Equal(name, role.GetName()) {
				return fmt.Errorf("row of role %q holds role %q", name, role.GetName())
			}
			root.roles[string(name)] = role
			return nil
		}))
	if err != nil {
		return nil, fmt.Errorf("auth: open: %w", err)
	}
	return t, nil
}

// Init writes the row of the auth revision that etcd's file has from the start,
// if the store was fresh. The first change does it too.
func (t *Table) Init(b *storage.Batch) {
	if t.fresh {
		t.setRevision(b, t.root.revision)
	}
}

// Root returns users and roles as of now.
func (t *Table) Root() *Root { return t.root }

// Enable makes calls need a user. It does nothing if they do already. It fails
// with ErrRootUserNotExist or ErrRootRoleNotExist if nobody could undo it.
func (t *Table) Enable(b *storage.Batch) error {
	if t.root.enabled {
		return nil
	}
	if t.root.users[RootUser] == nil {
		return fmt.Errorf("enable auth: %w", ErrRootUserNotExist)
	}
	if !t.root.HasRole(RootUser, RootRole) {
		return fmt.Errorf("enable auth: %w", ErrRootRoleNotExist)
	}
	root := *t.root
	root.enabled, root.rights = true, new(sync.Map)
	t.root = &root
	b.Set(storage.RowKey(storage.TableAuth, []byte(rowEnabled)), []byte{1})
	return nil
}

// Disable lets everybody in again, and says whether that changed anything. All
// simple tokens are void then.
func (t *Table) Disable(b *storage.Batch) (changed bool) {
	if !t.root.enabled {
		return false
	}
	b.Set(storage.RowKey(storage.TableAuth, []byte(rowEnabled)), []byte{0})
	t.change(b, func(r *Root) { r.enabled = false })
	return true
}

// UserAdd adds a user. It fails with ErrUserEmpty, ErrUserAlreadyExist or
// ErrBadHash.
func (t *Table) UserAdd(b *storage.Batch, r *pb.AuthUserAddRequest) error {
	name := r.GetName()
	if name == "" {
		return fmt.Errorf("add user: %w", ErrUserEmpty)
	}
	if t.root.users[name] != nil {
		return fmt.Errorf("add user %q: %w", name, ErrUserAlreadyExist)
	}
	u := &authpb.User{Name: []byte(name), Options: &authpb.UserAddOptions{NoPassword: r.GetOptions().GetNoPassword()}}
	var err error
	if u.Password, err = storedPassword(u, r.GetHashedPassword(), r.GetPassword()); err != nil {
		return fmt.Errorf("add user %q: %w", name, err)
	}
	t.setUser(b, u)
	return nil
}

// storedPassword is what a user's record holds of a password that a command
// brings. The plain one is only there in commands of etcd before 3.5. With
// neither, as etcd proposes a change to the empty password, no password is right.
func storedPassword(u *authpb.User, hashed, plain string) ([]byte, error) {
	if u.GetOptions().GetNoPassword() {
		return nil, nil
	}
	if hashed == "" && plain != "" {
		hash, err := bcrypt.GenerateFromPassword([]byte(plain), bcrypt.DefaultCost)
		if err != nil {
			return nil, fmt.Errorf("password of %d bytes: %w: %w", len(plain), ErrFailed, err)
		}
		return hash, nil
	}
	hash, err := base64.StdEncoding.DecodeString(hashed)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadHash, err)
	}
	return hash, nil
}

// UserDelete deletes a user, whose simple tokens are void then. It fails with
// ErrInvalidManagement for root while auth is on, or ErrUserNotFound.
func (t *Table) UserDelete(b *storage.Batch, r *pb.AuthUserDeleteRequest) error {
	name := r.GetName()
	if t.root.enabled && name == RootUser {
		return fmt.Errorf("delete user root while auth is on: %w", ErrInvalidManagement)
	}
	if t.root.users[name] == nil {
		return fmt.Errorf("delete user %q: %w", name, ErrUserNotFound)
	}
	b.Delete(storage.RowKey(storage.TableAuthUser, []byte(name)))
	t.change(b, func(r *Root) {
		r.users = maps.Clone(r.users)
		delete(r.users, name)
	})
	return nil
}

// UserChangePassword replaces a password; a user without one stays so. Simple
// tokens of the user are void then. It fails with ErrUserNotFound or ErrBadHash.
func (t *Table) UserChangePassword(b *storage.Batch, r *pb.AuthUserChangePasswordRequest) error {
	u, err := t.cloneUser(r.GetName())
	if err == nil {
		u.Password, err = storedPassword(u, r.GetHashedPassword(), r.GetPassword())
	}
	if err != nil {
		return fmt.Errorf("change password: %w", err)
	}
	t.setUser(b, u)
	return nil
}

// UserGrantRole gives a role to a user. Granting it again changes nothing. It
// fails with ErrUserNotFound or ErrRoleNotFound; the role root needs no record.
func (t *Table) UserGrantRole(b *storage.Batch, r *pb.AuthUserGrantRoleRequest) error {
	u, err := t.cloneUser(r.GetUser())
	if err != nil {
		return fmt.Errorf("grant role %q: %w", r.GetRole(), err)
	}
	if r.GetRole() != RootRole && t.root.roles[r.GetRole()] == nil {
		return fmt.Errorf("grant role %q to user %q: %w", r.GetRole(), r.GetUser(), ErrRoleNotFound)
	}
	at, found := slices.BinarySearch(u.Roles, r.GetRole())
	if found {
		return nil
	}
	u.Roles = slices.Insert(u.Roles, at, r.GetRole())
	t.setUser(b, u)
	return nil
}

// UserRevokeRole takes a role from a user. It fails with ErrInvalidManagement
// for root's root while auth is on, ErrUserNotFound or ErrRoleNotGranted.
func (t *Table) UserRevokeRole(b *storage.Batch, r *pb.AuthUserRevokeRoleRequest) error {
	if t.root.enabled && r.GetName() == RootUser && r.GetRole() == RootRole {
		return fmt.Errorf("revoke role root from user root while auth is on: %w", ErrInvalidManagement)
	}
	u, err := t.cloneUser(r.GetName())
	if err != nil {
		return fmt.Errorf("revoke role %q: %w", r.GetRole(), err)
	}
	if !slices.Contains(u.Roles, r.GetRole()) {
		return fmt.Errorf("revoke role %q from user %q: %w", r.GetRole(), r.GetName(), ErrRoleNotGranted)
	}
	u.Roles = without(u.Roles, r.GetRole())
	t.setUser(b, u)
	return nil
}

func without(roles []string, role string) []string {
	return slices.DeleteFunc(slices.Clone(roles), func(r string) bool { return r == role })
}

// RoleAdd adds a role that permits nothing. It fails with ErrRoleEmpty or
// ErrRoleAlreadyExist.
func (t *Table) RoleAdd(b *storage.Batch, r *pb.AuthRoleAddRequest) error {
	name := r.GetName()
	if name == "" {
		return fmt.Errorf("add role: %w", ErrRoleEmpty)
	}
	if t.root.roles[name] != nil {
		return fmt.Errorf("add role %q: %w", name, ErrRoleAlreadyExist)
	}
	t.setRole(b, &authpb.Role{Name: []byte(name)})
	return nil
}

// RoleDelete deletes a role and takes it from all users. It fails with
// ErrInvalidManagement for root while auth is on, or ErrRoleNotFound.
func (t *Table) RoleDelete(b *storage.Batch, r *pb.AuthRoleDeleteRequest) error {
	name := r.GetRole()
	if t.root.enabled && name == RootRole {
		return fmt.Errorf("delete role root while auth is on: %w", ErrInvalidManagement)
	}
	if t.root.roles[name] == nil {
		return fmt.Errorf("delete role %q: %w", name, ErrRoleNotFound)
	}
	var holders []*authpb.User
	for user := range t.root.users {
		if t.root.HasRole(user, name) {
			u, _ := t.cloneUser(user)
			u.Roles = without(u.Roles, name)
			holders = append(holders, u)
		}
	}
	slices.SortFunc(holders, func(a, b *authpb.User) int { return bytes.Compare(a.Name, b.Name) })
	b.Delete(storage.RowKey(storage.TableAuthRole, []byte(name)))
	for _, u := range holders {
		writeUser(b, u)
	}
	t.change(b, func(r *Root) {
		r.roles, r.users = maps.Clone(r.roles), maps.Clone(r.users)
		delete(r.roles, name)
		for _, u := range holders {
			r.users[string(u.Name)] = u
		}
	})
	return nil
}

// RoleGrantPermission adds a permission to a role, or changes its kind. It fails
// with ErrPermissionNotGiven, ErrInvalidManagement for a range that is none, or
// ErrRoleNotFound.
func (t *Table) RoleGrantPermission(b *storage.Batch, r *pb.AuthRoleGrantPermissionRequest) error {
	p := r.GetPerm()
	if p == nil {
		return fmt.Errorf("grant permission to role %q: %w", r.GetName(), ErrPermissionNotGiven)
	}
	end := p.GetRangeEnd()
	if len(p.GetKey()) == 0 || len(end) > 0 && !bytes.Equal(end, []byte{0}) && bytes.Compare(end, p.GetKey()) <= 0 {
		return fmt.Errorf("grant permission on [%q, %q), which is no range: %w", p.GetKey(), end, ErrInvalidManagement)
	}
	role, err := t.cloneRole(r.GetName())
	if err != nil {
		return fmt.Errorf("grant permission: %w", err)
	}
	// As in etcd, only the first permission of an equal key is looked at. So one
	// of the same range may come twice.
	perms := role.KeyPermission
	at, found := slices.BinarySearchFunc(perms, p.Key, func(p *authpb.Permission, key []byte) int { return bytes.Compare(p.Key, key) })
	if found && bytes.Equal(perms[at].RangeEnd, end) {
		perms[at].PermType = p.GetPermType()
	} else {
		role.KeyPermission = append(perms, &authpb.Permission{PermType: p.GetPermType(), Key: p.GetKey(), RangeEnd: end})
		slices.SortStableFunc(role.KeyPermission, func(a, b *authpb.Permission) int { return bytes.Compare(a.Key, b.Key) })
	}
	t.setRole(b, role)
	return nil
}

// RoleRevokePermission takes every permission of exactly this range from a role.
// It fails with ErrRoleNotFound or ErrPermissionNotGranted.
func (t *Table) RoleRevokePermission(b *storage.Batch, r *pb.AuthRoleRevokePermissionRequest) error {
	role, err := t.cloneRole(r.GetRole())
	if err != nil {
		return fmt.Errorf("revoke permission: %w", err)
	}
	before := len(role.KeyPermission)
	role.KeyPermission = slices.DeleteFunc(role.KeyPermission, func(p *authpb.Permission) bool {
		return bytes.Equal(p.Key, r.GetKey()) && bytes.Equal(p.RangeEnd, r.GetRangeEnd())
	})
	if len(role.KeyPermission) == before {
		return fmt.Errorf("revoke permission on [%q, %q) from role %q: %w", r.GetKey(), r.GetRangeEnd(), r.GetRole(), ErrPermissionNotGranted)
	}
	t.setRole(b, role)
	return nil
}

// Authenticate returns the simple token that the entry at index makes for a
// user, the same on every member; the password was checked before it was
// proposed. Without a prefix no simple token is meant and none is returned. It
// fails with ErrNotEnabled, ErrFailed or ErrNoPassword.
func (t *Table) Authenticate(r *pb.InternalAuthenticateRequest, index uint64) (token string, err error) {
	if _, err := t.root.Password(r.GetName()); err != nil {
		return "", err
	}
	if r.GetSimpleToken() == "" {
		return "", nil
	}
	return SimpleToken(r.GetSimpleToken(), index), nil
}

func (t *Table) cloneUser(name string) (*authpb.User, error) {
	u := t.root.users[name]
	if u == nil {
		return nil, fmt.Errorf("user %q: %w", name, ErrUserNotFound)
	}
	u = proto.Clone(u).(*authpb.User)
	u.Options = cmp.Or(u.Options, &authpb.UserAddOptions{}) // etcd 3.3 wrote none
	return u, nil
}

func (t *Table) cloneRole(name string) (*authpb.Role, error) {
	role := t.root.roles[name]
	if role == nil {
		return nil, fmt.Errorf("role %q: %w", name, ErrRoleNotFound)
	}
	return proto.Clone(role).(*authpb.Role), nil
}

func (t *Table) setUser(b *storage.Batch, u *authpb.User) {
	writeUser(b, u)
	t.change(b, func(r *Root) {
		r.users = maps.Clone(r.users)
		r.users[string(u.Name)] = u
	})
}

func writeUser(b *storage.Batch, u *authpb.User) {
	b.Set(storage.RowKey(storage.TableAuthUser, u.Name), marshal(u))
}

func (t *Table) setRole(b *storage.Batch, role *authpb.Role) {
	b.Set(storage.RowKey(storage.TableAuthRole, role.Name), marshal(role))
	t.change(b, func(r *Root) {
		r.roles = maps.Clone(r.roles)
		r.roles[string(role.Name)] = role
	})
}

// change publishes a changed copy of the root at the next auth revision.
func (t *Table) change(b *storage.Batch, fn func(*Root)) {
	root := *t.root
	root.rights = new(sync.Map)
	fn(&root)
	root.revision++
	t.root = &root
	t.setRevision(b, root.revision)
}

func (t *Table) setRevision(b *storage.Batch, revision uint64) {
	t.fresh = false
	b.Set(storage.RowKey(storage.TableAuth, []byte(rowRevision)), binary.BigEndian.AppendUint64(nil, revision))
}

// marshal is for records whose strings are UTF-8 because they were unmarshalled
// from a command or a row.
func marshal(m proto.Message) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		panic(fmt.Sprintf("auth: marshal %T: %v", m, err))
	}
	return b
}
