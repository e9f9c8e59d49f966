package ctl

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) authCommand() *cobra.Command {
	c := t.group("auth", "Enable or disable authentication")
	c.AddCommand(t.authEnableCommand(), t.authDisableCommand(), t.authStatusCommand())
	return c
}

// withClient connects and makes one call of a short command.
func (t *tool) withClient(c *cobra.Command, call func(context.Context, *clientv3.Client, printer) error) error {
	client, p, err := t.connect(c)
	if err != nil {
		return err
	}
	defer closeClient(client)
	ctx, cancel := t.commandContext()
	defer cancel()
	return call(ctx, client, p)
}

const rootName = "root"

func (t *tool) authEnableCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "enable",
		Short: "Enables authentication",
		Long:  "Enables authentication. There must be a user root; the role root is added and granted to it if that was not done.",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 0 {
				return badArguments("auth enable command does not accept any arguments")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, _ printer) error {
				_, err := client.AuthEnable(ctx)
				if errors.Is(err, rpctypes.ErrRootRoleNotExist) {
					if err := makeRoot(ctx, client); err != nil {
						return err
					}
					_, err = client.AuthEnable(ctx)
				}
				if err != nil {
					return err
				}
				fmt.Fprintln(t.out, "Authentication Enabled")
				return nil
			})
		},
	}
}

// makeRoot gives the user root the role root, which it adds if there is none.
func makeRoot(ctx context.Context, client *clientv3.Client) error {
	if _, err := client.RoleAdd(ctx, rootName); err != nil && !errors.Is(err, rpctypes.ErrRoleAlreadyExist) {
		return err
	}
	_, err := client.UserGrantRole(ctx, rootName, rootName)
	return err
}

func (t *tool) authDisableCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "disable",
		Short: "Disables authentication",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 0 {
				return badArguments("auth disable command does not accept any arguments")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, _ printer) error {
				if _, err := client.AuthDisable(ctx); err != nil {
					return err
				}
				fmt.Fprintln(t.out, "Authentication Disabled")
				return nil
			})
		},
	}
}

func (t *tool) authStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Returns authentication status",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 0 {
				return badArguments("auth status command does not accept any arguments")
			}
			return t.withClient(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.AuthStatus(ctx)
				if err != nil {
					return err
				}
				return p.authStatus(r)
			})
		},
	}
}
