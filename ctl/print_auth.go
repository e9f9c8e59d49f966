package ctl

import (
	"fmt"
	"strings"

	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// authPrinter is the part of a printer for users, roles and authentication.
type authPrinter interface {
	authStatus(*clientv3.AuthStatusResponse) error

	userAdded(name string, r *clientv3.AuthUserAddResponse) error
	userDeleted(name string, r *clientv3.AuthUserDeleteResponse) error
	user(name string, r *clientv3.AuthUserGetResponse) error
	users(*clientv3.AuthUserListResponse) error
	passwordChanged(*clientv3.AuthUserChangePasswordResponse) error
	roleGranted(user, role string, r *clientv3.AuthUserGrantRoleResponse) error
	roleRevoked(user, role string, r *clientv3.AuthUserRevokeRoleResponse) error

	roleAdded(name string, r *clientv3.AuthRoleAddResponse) error
	roleDeleted(name string, r *clientv3.AuthRoleDeleteResponse) error
	role(name string, r *clientv3.AuthRoleGetResponse) error
	roles(*clientv3.AuthRoleListResponse) error
	permissionGranted(role string, r *clientv3.AuthRoleGrantPermissionResponse) error
	// permissionRevoked is told the keys as they were named.
	permissionRevoked(role, key, end string, r *clientv3.AuthRoleRevokePermissionResponse) error
}

func (r refuser) authStatus(*clientv3.AuthStatusResponse) error                  { return r.refuse() }
func (r refuser) userAdded(string, *clientv3.AuthUserAddResponse) error          { return r.refuse() }
func (r refuser) userDeleted(string, *clientv3.AuthUserDeleteResponse) error     { return r.refuse() }
func (r refuser) user(string, *clientv3.AuthUserGetResponse) error               { return r.refuse() }
func (r refuser) users(*clientv3.AuthUserListResponse) error                     { return r.refuse() }
func (r refuser) passwordChanged(*clientv3.AuthUserChangePasswordResponse) error { return r.refuse() }
func (r refuser) roleGranted(_, _ string, _ *clientv3.AuthUserGrantRoleResponse) error {
	return r.refuse()
}
func (r refuser) roleRevoked(_, _ string, _ *clientv3.AuthUserRevokeRoleResponse) error {
	return r.refuse()
}
func (r refuser) roleAdded(string, *clientv3.AuthRoleAddResponse) error      { return r.refuse() }
func (r refuser) roleDeleted(string, *clientv3.AuthRoleDeleteResponse) error { return r.refuse() }
func (r refuser) role(string, *clientv3.AuthRoleGetResponse) error           { return r.refuse() }
func (r refuser) roles(*clientv3.AuthRoleListResponse) error                 { return r.refuse() }
func (r refuser) permissionGranted(string, *clientv3.AuthRoleGrantPermissionResponse) error {
	return r.refuse()
}
func (r refuser) permissionRevoked(_, _, _ string, _ *clientv3.AuthRoleRevokePermissionResponse) error {
	return r.refuse()
}

// say writes a line for people.
func (p *simplePrinter) say(format string, args ...any) error {
	fmt.Fprintf(p.out, format+"\n", args...)
	return nil
}

func (p *simplePrinter) authStatus(r *clientv3.AuthStatusResponse) error {
	s := (*etcdserverpb.AuthStatusResponse)(r)
	return p.say("Authentication Status: %v\nAuthRevision: %d", s.GetEnabled(), s.GetAuthRevision())
}

func (p *simplePrinter) userAdded(name string, _ *clientv3.AuthUserAddResponse) error {
	return p.say("User %s created", name)
}

func (p *simplePrinter) userDeleted(name string, _ *clientv3.AuthUserDeleteResponse) error {
	return p.say("User %s deleted", name)
}

func (p *simplePrinter) user(name string, r *clientv3.AuthUserGetResponse) error {
	return p.say("User: %s\n%s", name, strings.Join(append([]string{"Roles:"}, r.Roles...), " "))
}

func (p *simplePrinter) users(r *clientv3.AuthUserListResponse) error {
	for _, name := range r.Users {
		fmt.Fprintln(p.out, name)
	}
	return nil
}

func (p *simplePrinter) passwordChanged(*clientv3.AuthUserChangePasswordResponse) error {
	return p.say("Password updated")
}

func (p *simplePrinter) roleGranted(user, role string, _ *clientv3.AuthUserGrantRoleResponse) error {
	return p.say("Role %s is granted to user %s", role, user)
}

func (p *simplePrinter) roleRevoked(user, role string, _ *clientv3.AuthUserRevokeRoleResponse) error {
	return p.say("Role %s is revoked from user %s", role, user)
}

func (p *simplePrinter) roleAdded(name string, _ *clientv3.AuthRoleAddResponse) error {
	return p.say("Role %s created", name)
}

func (p *simplePrinter) roleDeleted(name string, _ *clientv3.AuthRoleDeleteResponse) error {
	return p.say("Role %s deleted", name)
}

func (p *simplePrinter) role(name string, r *clientv3.AuthRoleGetResponse) error {
	fmt.Fprintf(p.out, "Role %s\n", name)
	for _, part := range []struct {
		title string
		kind  authpb.Permission_Type
	}{{"Read", authpb.READ}, {"Write", authpb.WRITE}} {
		fmt.Fprintf(p.out, "KV %s:\n", part.title)
		for _, perm := range r.Perm {
			if kind := perm.GetPermType(); kind == part.kind || kind == authpb.READWRITE {
				fmt.Fprintf(p.out, "\t%s\n", keysText(string(perm.GetKey()), string(perm.GetRangeEnd()), true))
			}
		}
	}
	return nil
}

// keysText names the keys of a permission. With a prefix that is one it says so.
func keysText(key, end string, prefix bool) string {
	switch {
	case end == "":
		return key
	case end == openEnd:
		return "[" + key + ", <open ended>"
	case prefix && end == clientv3.GetPrefixRangeEnd(key):
		return "[" + key + ", " + end + ") (prefix " + key + ")"
	}
	return "[" + key + ", " + end + ")"
}

func (p *simplePrinter) roles(r *clientv3.AuthRoleListResponse) error {
	for _, name := range r.Roles {
		fmt.Fprintln(p.out, name)
	}
	return nil
}

func (p *simplePrinter) permissionGranted(role string, _ *clientv3.AuthRoleGrantPermissionResponse) error {
	return p.say("Role %s updated", role)
}

func (p *simplePrinter) permissionRevoked(role, key, end string, _ *clientv3.AuthRoleRevokePermissionResponse) error {
	what := "range"
	if end == "" {
		what = "key"
	}
	return p.say("Permission of %s %s is revoked from role %s", what, keysText(key, end, false), role)
}

// headerOnly writes an answer that has nothing but a header.
func (p *fieldsPrinter) headerOnly(h *etcdserverpb.ResponseHeader) error {
	p.header(h)
	return nil
}

func (p *fieldsPrinter) userAdded(_ string, r *clientv3.AuthUserAddResponse) error {
	return p.headerOnly(r.Header)
}

func (p *fieldsPrinter) userDeleted(_ string, r *clientv3.AuthUserDeleteResponse) error {
	return p.headerOnly(r.Header)
}

func (p *fieldsPrinter) passwordChanged(r *clientv3.AuthUserChangePasswordResponse) error {
	return p.headerOnly(r.Header)
}

func (p *fieldsPrinter) roleGranted(_, _ string, r *clientv3.AuthUserGrantRoleResponse) error {
	return p.headerOnly(r.Header)
}

func (p *fieldsPrinter) roleRevoked(_, _ string, r *clientv3.AuthUserRevokeRoleResponse) error {
	return p.headerOnly(r.Header)
}

func (p *fieldsPrinter) roleAdded(_ string, r *clientv3.AuthRoleAddResponse) error {
	return p.headerOnly(r.Header)
}

func (p *fieldsPrinter) roleDeleted(_ string, r *clientv3.AuthRoleDeleteResponse) error {
	return p.headerOnly(r.Header)
}

func (p *fieldsPrinter) role(_ string, r *clientv3.AuthRoleGetResponse) error {
	p.header(r.Header)
	for _, perm := range r.Perm {
		fmt.Fprintf(p.out, "\"PermType\" :  %v\n", perm.GetPermType()) // two blanks, as in etcdctl
		p.text("Key", string(perm.GetKey()))
		p.text("RangeEnd", string(perm.GetRangeEnd()))
	}
	return nil
}

func (p *fieldsPrinter) roles(r *clientv3.AuthRoleListResponse) error {
	p.header(r.Header)
	fmt.Fprint(p.out, `"Roles" :`)
	for _, name := range r.Roles {
		fmt.Fprintf(p.out, " %q", name)
	}
	fmt.Fprintln(p.out)
	return nil
}

func (p *fieldsPrinter) permissionGranted(_ string, r *clientv3.AuthRoleGrantPermissionResponse) error {
	return p.headerOnly(r.Header)
}

func (p *fieldsPrinter) permissionRevoked(_, _, _ string, r *clientv3.AuthRoleRevokePermissionResponse) error {
	return p.headerOnly(r.Header)
}

func (p *jsonPrinter) authStatus(r *clientv3.AuthStatusResponse) error           { return p.print(r) }
func (p *jsonPrinter) userAdded(_ string, r *clientv3.AuthUserAddResponse) error { return p.print(r) }
func (p *jsonPrinter) userDeleted(_ string, r *clientv3.AuthUserDeleteResponse) error {
	return p.print(r)
}
func (p *jsonPrinter) user(_ string, r *clientv3.AuthUserGetResponse) error { return p.print(r) }
func (p *jsonPrinter) users(r *clientv3.AuthUserListResponse) error         { return p.print(r) }

func (p *jsonPrinter) passwordChanged(r *clientv3.AuthUserChangePasswordResponse) error {
	return p.print(r)
}

func (p *jsonPrinter) roleGranted(_, _ string, r *clientv3.AuthUserGrantRoleResponse) error {
	return p.print(r)
}

func (p *jsonPrinter) roleRevoked(_, _ string, r *clientv3.AuthUserRevokeRoleResponse) error {
	return p.print(r)
}

func (p *jsonPrinter) roleAdded(_ string, r *clientv3.AuthRoleAddResponse) error { return p.print(r) }
func (p *jsonPrinter) roleDeleted(_ string, r *clientv3.AuthRoleDeleteResponse) error {
	return p.print(r)
}
func (p *jsonPrinter) role(_ string, r *clientv3.AuthRoleGetResponse) error { return p.print(r) }
func (p *jsonPrinter) roles(r *clientv3.AuthRoleListResponse) error         { return p.print(r) }

func (p *jsonPrinter) permissionGranted(_ string, r *clientv3.AuthRoleGrantPermissionResponse) error {
	return p.print(r)
}

func (p *jsonPrinter) permissionRevoked(_, _, _ string, r *clientv3.AuthRoleRevokePermissionResponse) error {
	return p.print(r)
}

func (p *protobufPrinter) authStatus(r *clientv3.AuthStatusResponse) error {
	return p.print((*etcdserverpb.AuthStatusResponse)(r))
}

func (p *protobufPrinter) userAdded(_ string, r *clientv3.AuthUserAddResponse) error {
	return p.print((*etcdserverpb.AuthUserAddResponse)(r))
}

func (p *protobufPrinter) userDeleted(_ string, r *clientv3.AuthUserDeleteResponse) error {
	return p.print((*etcdserverpb.AuthUserDeleteResponse)(r))
}

func (p *protobufPrinter) user(_ string, r *clientv3.AuthUserGetResponse) error {
	return p.print((*etcdserverpb.AuthUserGetResponse)(r))
}

func (p *protobufPrinter) users(r *clientv3.AuthUserListResponse) error {
	return p.print((*etcdserverpb.AuthUserListResponse)(r))
}

func (p *protobufPrinter) passwordChanged(r *clientv3.AuthUserChangePasswordResponse) error {
	return p.print((*etcdserverpb.AuthUserChangePasswordResponse)(r))
}

func (p *protobufPrinter) roleGranted(_, _ string, r *clientv3.AuthUserGrantRoleResponse) error {
	return p.print((*etcdserverpb.AuthUserGrantRoleResponse)(r))
}

func (p *protobufPrinter) roleRevoked(_, _ string, r *clientv3.AuthUserRevokeRoleResponse) error {
	return p.print((*etcdserverpb.AuthUserRevokeRoleResponse)(r))
}

func (p *protobufPrinter) roleAdded(_ string, r *clientv3.AuthRoleAddResponse) error {
	return p.print((*etcdserverpb.AuthRoleAddResponse)(r))
}

func (p *protobufPrinter) roleDeleted(_ string, r *clientv3.AuthRoleDeleteResponse) error {
	return p.print((*etcdserverpb.AuthRoleDeleteResponse)(r))
}

func (p *protobufPrinter) role(_ string, r *clientv3.AuthRoleGetResponse) error {
	return p.print((*etcdserverpb.AuthRoleGetResponse)(r))
}

func (p *protobufPrinter) roles(r *clientv3.AuthRoleListResponse) error {
	return p.print((*etcdserverpb.AuthRoleListResponse)(r))
}

func (p *protobufPrinter) permissionGranted(_ string, r *clientv3.AuthRoleGrantPermissionResponse) error {
	return p.print((*etcdserverpb.AuthRoleGrantPermissionResponse)(r))
}

func (p *protobufPrinter) permissionRevoked(_, _, _ string, r *clientv3.AuthRoleRevokePermissionResponse) error {
	return p.print((*etcdserverpb.AuthRoleRevokePermissionResponse)(r))
}
