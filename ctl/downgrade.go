package ctl

import (
	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) downgradeCommand() *cobra.Command {
	c := t.group("downgrade", "Downgrade related commands")
	c.AddCommand(
		t.downgradeAction("validate <version>", "Validate downgrade capability before starting downgrade", clientv3.DowngradeValidate, true),
		t.downgradeAction("enable <version>", "Start a downgrade action to cluster", clientv3.DowngradeEnable, true),
		t.downgradeAction("cancel", "Cancel the ongoing downgrade action to cluster", clientv3.DowngradeCancel, false),
	)
	return c
}

// downgradeAction is one of the commands; the word before a blank in use is its name, and what it calls itself in its answer.
func (t *tool) downgradeAction(use, short string, action clientv3.DowngradeAction, versioned bool) *cobra.Command {
	return &cobra.Command{
		Use:   use,
		Short: short,
		RunE: func(c *cobra.Command, args []string) error {
			version := ""
			switch {
			case !versioned: // etcdctl does not look at the arguments
			case len(args) == 0:
				return badArguments("TARGET_VERSION not provided")
			case len(args) > 1:
				return badArguments("too many arguments")
			default:
				version = args[0]
			}
			client, p, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			ctx, cancel := t.commandContext()
			defer cancel()
			r, err := client.Downgrade(ctx, action, version)
			if err != nil {
				return err
			}
			return p.downgraded(c.Name(), r)
		},
	}
}
