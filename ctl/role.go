package ctl

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) roleCommand() *cobra.Command {
	c := t.group("role", "Role related commands")
	c.AddCommand(t.roleAddCommand(), t.roleDeleteCommand(), t.roleGetCommand(), t.roleListCommand(), t.roleGrantCommand(), t.roleRevokeCommand())
	return c
}

func (t *tool) roleAddCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "add <role name>",
		Short: "Adds a new role",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("role add command requires role name as its argument")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.RoleAdd(ctx, args[0])
				if err != nil {
					return err
				}
				return p.roleAdded(args[0], r)
			})
		},
	}
}

func (t *tool) roleDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "delete <role name>",
		Short: "Deletes a role",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("role delete command requires role name as its argument")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.RoleDelete(ctx, args[0])
				if err != nil {
					return err
				}
				return p.roleDeleted(args[0], r)
			})
		},
	}
}

func (t *tool) roleGetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "get <role name>",
		Short: "Gets detailed information of a role",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("role get command requires role name as its argument")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.RoleGet(ctx, args[0])
				if err != nil {
					return err
				}
				return p.role(args[0], r)
			})
		},
	}
}

func (t *tool) roleListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Lists all roles",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 0 {
				return badArguments("role list command requires no arguments")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.RoleList(ctx)
				if err != nil {
					return err
				}
				return p.roles(r)
			})
		},
	}
}

// permissionRange is how the two commands about permissions name keys.
type permissionRange struct{ prefix, fromKey bool }

// openEnd is the range end that means all keys from the first on.
const openEnd = "\x00"

func (f *permissionRange) register(c *cobra.Command) {
	c.Flags().BoolVar(&f.prefix, "prefix", false, "all keys that begin with the key")
	c.Flags().BoolVar(&f.fromKey, "from-key", false, "all keys from the key on, in the order of their bytes")
}

// parse reads key and end. The empty key stands for the smallest one, and an end beside it for nothing, as in etcdctl.
func (f *permissionRange) parse(args []string) (key, end string, err error) {
	switch key = args[0]; {
	case f.prefix && f.fromKey:
		return "", "", badArguments("--from-key and --prefix flags are mutually exclusive")
	case key == "":
		if f.prefix || f.fromKey {
			end = openEnd
		}
		return "\x00", end, nil
	case len(args) > 1 && f.fromKey:
		return "", "", badArguments("unexpected endkey argument with --from-key flag")
	case len(args) > 1 && f.prefix:
		return "", "", badArguments("unexpected endkey argument with --prefix flag")
	case len(args) > 1:
		return key, args[1], nil
	case f.fromKey:
		return key, openEnd, nil
	case f.prefix:
		return key, clientv3.GetPrefixRangeEnd(key), nil
	}
	return key, "", nil
}

var permissionTypes = map[string]clientv3.PermissionType{
	"READ": clientv3.PermissionType(clientv3.PermRead), "WRITE": clientv3.PermissionType(clientv3.PermWrite),
	"READWRITE": clientv3.PermissionType(clientv3.PermReadWrite),
}

func (t *tool) roleGrantCommand() *cobra.Command {
	var keys permissionRange
	c := &cobra.Command{
		Use:   "grant-permission [options] <role name> <permission type> <key> [endkey]",
		Short: "Grants a key to a role",
		Long:  "Grants read, write or readwrite of a key, or of a range of keys, to a role.",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) < 3 {
				return badArguments("role grant command requires role name, permission type, and key [endkey] as its argument")
			}
			kind, ok := permissionTypes[strings.ToUpper(args[1])]
			if !ok {
				return badArguments("invalid permission type: %s", args[1])
			}
			key, end, err := keys.parse(args[2:])
			if err != nil {
				return err
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.RoleGrantPermission(ctx, args[0], key, end, kind)
				if err != nil {
					return err
				}
				return p.permissionGranted(args[0], r)
			})
		},
	}
	keys.register(c)
	return c
}

func (t *tool) roleRevokeCommand() *cobra.Command {
	var keys permissionRange
	c := &cobra.Command{
		Use:   "revoke-permission <role name> <key> [endkey]",
		Short: "Revokes a key from a role",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) < 2 {
				return badArguments("role revoke-permission command requires role name and key [endkey] as its argument")
			}
			key, end, err := keys.parse(args[1:])
			if err != nil {
				return err
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.RoleRevokePermission(ctx, args[0], key, end)
				if err != nil {
					return err
				}
				return p.permissionRevoked(args[0], args[1], end, r)
			})
		},
	}
	keys.register(c)
	return c
}
