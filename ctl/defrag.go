package ctl

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

func (t *tool) defragCommand() *cobra.Command {
	var cluster bool
	c := &cobra.Command{
		Use:   "defrag",
		Short: "Defragments the storage of the etcd members with given endpoints",
		RunE: func(c *cobra.Command, _ []string) error {
			client, _, err := t.connect(c)
			if err != nil {
				return err
			}
			defer closeClient(client)
			endpoints, err := t.chosenEndpoints(client, cluster)
			if err != nil {
				return err
			}
			failed := false
			for _, endpoint := range endpoints { // one after the other: a member may be slow meanwhile
				ctx, cancel := t.commandContext()
				start := time.Now()
				_, err := client.Defragment(ctx, endpoint)
				took := time.Since(start)
				cancel()
				if err != nil {
					failed = true
					fmt.Fprintf(t.err, "Failed to defragment etcd member[%s]. took %s. (%v)\n", endpoint, took, err)
					continue
				}
				fmt.Fprintf(t.out, "Finished defragmenting etcd member[%s]. took %s\n", endpoint, took)
				if err := t.out.Flush(); err != nil {
					return err
				}
			}
			if failed {
				return exit(exitFailed, nil)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&cluster, "cluster", false, "all members of the cluster, instead of --endpoints")
	return c
}
