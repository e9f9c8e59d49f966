package ctl

import (
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) memberCommand() *cobra.Command {
	c := t.group("member", "Membership related commands")
	c.AddCommand(t.memberListCommand())
	return c
}

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
	status := "started"
	if m.GetName() == "" { // a member tells its name when it first starts
		status = "unstarted"
	}
	return []string{
		hexID(m.GetID()), status, m.GetName(), strings.Join(m.GetPeerURLs(), ","), strings.Join(m.GetClientURLs(), ","),
		yesNo(m.GetIsLearner()),
	}
}
