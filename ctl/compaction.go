package ctl

import (
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) compactionCommand() *cobra.Command {
	var physical bool
	c := &cobra.Command{
		Use:     "compaction [options] <revision>",
		Aliases: []string{"compact"},
		Short:   "Compacts the event history in etcd",
		Long:    "Forgets the history below a revision. Reads and watches from there on stay possible.",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("compaction command needs 1 argument")
			}
			revision, err := strconv.ParseInt(args[0], 10, 64)
			if err != nil {
				return err
			}
			var options []clientv3.CompactOption
			if physical {
				options = append(options, clientv3.WithCompactPhysical())
			}
			connect := t.connect
			if physical {
				connect = t.connectLasting
			}
			client, _, err := connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			ctx, cancel := t.commandContext()
			if physical { // it ends when the space is back, and who asks for that means to wait
				cancel()
				ctx = t.ctx
			}
			defer cancel()
			if _, err := client.Compact(ctx, revision, options...); err != nil {
				return err
			}
			fmt.Fprintln(t.out, "compacted revision", revision)
			return nil
		},
	}
	c.Flags().BoolVar(&physical, "physical", false, "wait until the old revisions are removed from disk")
	return c
}
