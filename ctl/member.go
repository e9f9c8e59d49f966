package ctl

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) memberCommand() *cobra.Command {
	c := t.group("member", "Membership related commands")
	c.AddCommand(t.memberListCommand(), t.memberAddCommand(), t.memberRemoveCommand(), t.memberUpdateCommand(), t.memberPromoteCommand())
	return c
}

// parseMemberID reads the one argument of a command about a member.
func parseMemberID(args []string) (uint64, error) {
	if len(args) != 1 {
		return 0, badArguments("member ID is not provided")
	}
	id, err := strconv.ParseUint(args[0], 16, 64)
	if err != nil {
		return 0, badArguments("bad member ID arg (%w), expecting ID in Hex", err)
	}
	return id, nil
}

// changeMembers connects, makes one change and prints what became of it.
func (t *tool) changeMembers(c *cobra.Command, change func(context.Context, *clientv3.Client, printer) error) error {
	client, p, err := t.connect(c)
	if err != nil {
		return err
	}
	defer closeClient(client)
	ctx, cancel := t.commandContext()
	defer cancel()
	return change(ctx, client, p)
}

func (t *tool) memberRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "remove <member ID>",
		Short: "Removes a member from the cluster",
		RunE: func(c *cobra.Command, args []string) error {
			id, err := parseMemberID(args)
			if err != nil {
				return err
			}
			return t.changeMembers(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.MemberRemove(ctx, id)
				if err != nil {
					return err
				}
				return p.memberRemoved(id, r)
			})
		},
	}
}

func (t *tool) memberUpdateCommand() *cobra.Command {
	var peerURLs string
	c := &cobra.Command{
		Use:   "update <member ID> --peer-urls=<URLs>",
		Short: "Updates a member in the cluster",
		RunE: func(c *cobra.Command, args []string) error {
			id, err := parseMemberID(args)
			if err != nil {
				return err
			}
			if peerURLs == "" {
				return badArguments("member peer urls not provided")
			}
			return t.changeMembers(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.MemberUpdate(ctx, id, strings.Split(peerURLs, ","))
				if err != nil {
					return err
				}
				return p.memberUpdated(id, r)
			})
		},
	}
	c.Flags().StringVar(&peerURLs, "peer-urls", "", "where other members find it from now on, separated by commas")
	return c
}

func (t *tool) memberPromoteCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "promote <member ID>",
		Short: "Promotes a non-voting member in the cluster",
		Long:  "Promotes a non-voting learner member to a voting one in the cluster.",
		RunE: func(c *cobra.Command, args []string) error {
			id, err := parseMemberID(args)
			if err != nil {
				return err
			}
			return t.changeMembers(c, func(ctx context.Context, client *clientv3.Client, p printer) error {
				r, err := client.MemberPromote(ctx, id)
				if err != nil {
					return err
				}
				return p.memberPromoted(id, r)
			})
		},
	}
}

// started says in simple words whether a member has told its name, as it does when it first starts.
func started(m *etcdserverpb.Member) string {
	if m.GetName() == "" {
		return "unstarted"
	}
	return "started"
}

// clusterOf is how a change of the members tells where it was made.
func clusterOf(h *etcdserverpb.ResponseHeader) string { return fmt.Sprintf("%16x", h.GetClusterId()) }

func (t *tool) memberListCommand() *cobra.Command {
	var consistency string
	c := &cobra.Command{
		Use:   "list",
		Short: "Lists all members in the cluster",
		Long: `Lists the members. In the output format "simple" a line is:

  ID, status, name, peer URLs, client URLs, is learner`,
		RunE: func(c *cobra.Command, _ []string) error {
			serializable, err := parseConsistency(consistency)
			if err != nil {
				return err
			}
			client, p, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			var options []clientv3.OpOption
			if serializable {
				options = append(options, clientv3.WithSerializable())
			}
			ctx, cancel := t.commandContext()
			defer cancel()
			r, err := client.MemberList(ctx, options...)
			if err != nil {
				return err
			}
			return p.members(r)
		},
	}
	c.Flags().StringVar(&consistency, "consistency", "l", "l (linearizable) or s (serializable)")
	return c
}

// memberHeader and memberRow are the columns of a member, for the formats simple and table.
var memberHeader = []string{"ID", "Status", "Name", "Peer Addrs", "Client Addrs", "Is Learner"}

func memberRow(m *etcdserverpb.Member) []string {
	return []string{
		hexID(m.GetID()), started(m), m.GetName(), strings.Join(m.GetPeerURLs(), ","), strings.Join(m.GetClientURLs(), ","),
		yesNo(m.GetIsLearner()),
	}
}
