package ctl

import (
	"strconv"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func (t *tool) moveLeaderCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "move-leader <member ID>",
		Short: "Transfers leadership to another etcd cluster member.",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) != 1 {
				return badArguments("move-leader command needs 1 argument")
			}
			target, err := strconv.ParseUint(args[0], 16, 64)
			if err != nil {
				return exit(exitArguments, err)
			}
			return t.moveLeader(c, target)
		},
	}
}

// moveLeader asks the leader, which is to be among the endpoints, for nobody else can do it.
func (t *tool) moveLeader(c *cobra.Command, target uint64) error {
	p, err := t.setup(c)
	if err != nil {
		return err
	}
	cfg, err := t.clientConfig(c)
	if err != nil {
		return err
	}
	client, err := clientv3.New(cfg)
	if err != nil {
		return exit(exitConnection, err)
	}
	defer closeClient(client)
	ctx, cancel := t.commandContext()
	defer cancel()
	for _, endpoint := range client.Endpoints() {
		status, err := client.Status(ctx, endpoint)
		if err != nil {
			return err
		}
		leader := status.Header.GetMemberId()
		if status.Leader != leader {
			continue
		}
		cfg.Endpoints = []string{endpoint}
		there, err := clientv3.New(cfg)
		if err != nil {
			return exit(exitConnection, err)
		}
		defer closeClient(there)
		r, err := there.MoveLeader(ctx, target)
		if err != nil {
			return err
		}
		return p.leaderMoved(leader, target, r)
	}
	return badArguments("no leader endpoint given at %v", client.Endpoints())
}
