package ctl

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) userCommand() *cobra.Command {
	c := t.group("user", "User related commands")
	c.AddCommand(t.userAddCommand(), t.userDeleteCommand(), t.userGetCommand(), t.userListCommand(), t.userPasswordCommand(),
		t.userGrantRoleCommand(), t.userRevokeRoleCommand())
	return c
}

func (t *tool) userAddCommand() *cobra.Command {
	var (
		interactive, noPassword bool
		given                   string
	)
	c := &cobra.Command{
		Use:   "add <user name or user:password> [options]",
		Short: "Adds a new user",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("user add command requires user name as its argument")
			}
			name, password := args[0], given
			if !noPassword && given == "" {
				var found bool
				if name, password, found = strings.Cut(args[0], ":"); found && name == "" {
					return badArguments("empty user name is not allowed")
				} else if !found {
					var err error
					if password, err = t.newPassword(name, interactive); err != nil {
						return err
					}
				}
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.UserAddWithOptions(ctx, name, password, &clientv3.UserAddOptions{NoPassword: noPassword})
				if err != nil {
					return err
				}
				return p.userAdded(name, r)
			})
		},
	}
	c.Flags().BoolVar(&interactive, "interactive", true, "ask for the password twice, at a terminal without echo; else read one line")
	c.Flags().StringVar(&given, "new-user-password", "", "the password; the argument is then the user's name as it stands")
	c.Flags().BoolVar(&noPassword, "no-password", false, "no password at all: certificates alone tell who it is")
	return c
}

// newPassword reads the password to be of a user.
func (t *tool) newPassword(name string, interactive bool) (string, error) {
	if !interactive {
		return t.readSecret("")
	}
	first, err := t.readSecret(fmt.Sprintf("Password of %s: ", name))
	if err != nil {
		return "", err
	}
	again, err := t.readSecret(fmt.Sprintf("Type password of %s again for confirmation: ", name))
	if err != nil || first != again {
		return "", badArguments("given passwords are different")
	}
	return first, nil
}

func (t *tool) userDeleteCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "delete <user name>",
		Short: "Deletes a user",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("user delete command requires user name as its argument")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.UserDelete(ctx, args[0])
				if err != nil {
					return err
				}
				return p.userDeleted(args[0], r)
			})
		},
	}
}

func (t *tool) userGetCommand() *cobra.Command {
	var detail bool
	c := &cobra.Command{
		Use:   "get <user name> [options]",
		Short: "Gets detailed information of a user",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("user get command requires user name as its argument")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.UserGet(ctx, args[0])
				if err != nil {
					return err
				}
				if !detail {
					return p.user(args[0], r)
				}
				fmt.Fprintf(t.out, "User: %s\n", args[0])
				for _, role := range r.Roles {
					fmt.Fprintln(t.out)
					r, err := client.RoleGet(ctx, role)
					if err != nil {
						return err
					}
					if err := p.role(role, r); err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	c.Flags().BoolVar(&detail, "detail", false, "show what the user's roles permit")
	return c
}

func (t *tool) userListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Lists all users",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 0 {
				return badArguments("user list command requires no arguments")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.UserList(ctx)
				if err != nil {
					return err
				}
				return p.users(r)
			})
		},
	}
}

func (t *tool) userPasswordCommand() *cobra.Command {
	var interactive bool
	c := &cobra.Command{
		Use:   "passwd <user name> [options]",
		Short: "Changes password of user",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("user passwd command requires user name as its argument")
			}
			password, err := t.newPassword(args[0], interactive)
			if err != nil {
				return err
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.UserChangePassword(ctx, args[0], password)
				if err != nil {
					return err
				}
				return p.passwordChanged(r)
			})
		},
	}
	c.Flags().BoolVar(&interactive, "interactive", true, "ask for the password twice, at a terminal without echo; else read one line")
	return c
}

func (t *tool) userGrantRoleCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "grant-role <user name> <role name>",
		Short: "Grants a role to a user",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 2 {
				return badArguments("user grant command requires user name and role name as its argument")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.UserGrantRole(ctx, args[0], args[1])
				if err != nil {
					return err
				}
				return p.roleGranted(args[0], args[1], r)
			})
		},
	}
}

func (t *tool) userRevokeRoleCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "revoke-role <user name> <role name>",
		Short: "Revokes a role from a user",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 2 {
				return badArguments("user revoke-role requires user name and role name as its argument")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.UserRevokeRole(ctx, args[0], args[1])
				if err != nil {
					return err
				}
				return p.roleRevoked(args[0], args[1], r)
			})
		},
	}
}
