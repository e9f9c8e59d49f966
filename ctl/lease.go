package ctl

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) leaseCommand() *cobra.Command {
	c := t.group("lease", "Lease related commands")
	c.AddCommand(t.leaseGrantCommand(), t.leaseRevokeCommand(), t.leaseTimeToLiveCommand(), t.leaseListCommand(), t.leaseKeepAliveCommand())
	return c
}

func (t *tool) leaseGrantCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "grant <ttl>",
		Short: "Creates leases",
		Long:  "Creates a lease that expires after so many seconds unless it is kept alive.",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("lease grant command needs TTL argument")
			}
			ttl, err := strconv.ParseInt(args[0], 10, 64)
			if err != nil {
				return badArguments("bad TTL (%w)", err)
			}
			client, p, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			ctx, cancel := t.commandContext()
			defer cancel()
			r, err := client.Grant(ctx, ttl)
			if err != nil {
				return fmt.Errorf("failed to grant lease (%w)", err)
			}
			return p.grant(r)
		},
	}
}

func (t *tool) leaseRevokeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "revoke <leaseID>",
		Short: "Revokes leases",
		Long:  "Ends a lease and removes the keys attached to it.",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("lease revoke command needs 1 argument")
			}
			id, err := parseLeaseID(args[0])
			if err != nil {
				return err
			}
			client, p, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			ctx, cancel := t.commandContext()
			defer cancel()
			r, err := client.Revoke(ctx, id)
			if err != nil {
				return fmt.Errorf("failed to revoke lease (%w)", err)
			}
			return p.revoke(id, r)
		},
	}
}

func (t *tool) leaseTimeToLiveCommand() *cobra.Command {
	var keys bool
	c := &cobra.Command{
		Use:   "timetolive <leaseID> [options]",
		Short: "Get lease information",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("lease timetolive command needs lease ID as argument")
			}
			id, err := parseLeaseID(args[0])
			if err != nil {
				return err
			}
			client, p, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			var options []clientv3.LeaseOption
			if keys {
				options = append(options, clientv3.WithAttachedKeys())
			}
			ctx, cancel := t.commandContext()
			defer cancel()
			r, err := client.TimeToLive(ctx, id, options...)
			if err != nil {
				return exit(exitConnection, err)
			}
			return p.timeToLive(r, keys)
		},
	}
	c.Flags().BoolVar(&keys, "keys", false, "print the keys attached to the lease")
	return c
}

func (t *tool) leaseListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List all active leases",
		RunE: func(c *cobra.Command, _ []string) error {
			client, p, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			ctx, cancel := t.commandContext()
			defer cancel()
			r, err := client.Leases(ctx)
			if err != nil {
				return exit(exitConnection, err)
			}
			return p.leases(r)
		},
	}
}

func (t *tool) leaseKeepAliveCommand() *cobra.Command {
	var once bool
	c := &cobra.Command{
		Use:   "keep-alive [options] <leaseID>",
		Short: "Keeps leases alive (renew)",
		Long:  "Keeps a lease alive until it is revoked, or this command is interrupted.",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("lease keep-alive command needs lease ID as argument")
			}
			id, err := parseLeaseID(args[0])
			if err != nil {
				return err
			}
			connect := t.connectLasting
			if once {
				connect = t.connect
			}
			client, p, err := connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			if once {
				ctx, cancel := t.commandContext()
				defer cancel()
				r, err := client.KeepAliveOnce(ctx, id)
				if err != nil {
					return exit(exitConnection, err)
				}
				return p.keepAlive(r)
			}
			return t.keepAlive(client, p, id)
		},
	}
	c.Flags().BoolVar(&once, "once", false, "renew the lease once and end")
	return c
}

func (t *tool) keepAlive(client *clientv3.Client, p printer, id clientv3.LeaseID) error {
	for {
		answers, err := client.KeepAlive(t.ctx, id)
		if err != nil {
			return exit(exitConnection, err)
		}
		for r := range answers {
			if err := p.keepAlive(r); err != nil {
				return err
			}
			if err := t.out.Flush(); err != nil {
				return err
			}
		}
		// The client gives up as well when no member has answered for as long as the lease lives.
		if lives, err := t.leaseLives(client, id); err != nil {
			return exit(exitConnection, err)
		} else if !lives {
			break
		}
	}
	if _, ok := p.(*simplePrinter); ok {
		fmt.Fprintf(t.out, "lease %016x expired or revoked.\n", id)
	}
	return nil
}

// leaseLives asks if a lease that is not kept alive any more is there still. Its error is that nobody answers.
func (t *tool) leaseLives(client *clientv3.Client, id clientv3.LeaseID) (bool, error) {
	ctx, cancel := t.commandContext()
	defer cancel()
	r, err := client.TimeToLive(ctx, id)
	switch {
	case t.ctx.Err() != nil: // the command is being ended
		return false, nil
	case err != nil && nobodyAnswered(err):
		return false, err
	}
	return err == nil && r.TTL > 0, nil
}
